"""The workers of a run, from their start to their end: which are started again, and when the others are ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gradserver.tools.launch import report
from gradserver.tools.launch.attempt import Attempt
from gradserver.tools.launch.failures import Failure, first
from gradserver.tools.launch.frames import Frame, Kind
from gradserver.tools.launch.options import Options
from gradserver.tools.launch.output import AS_IT_WAS, Console, Logs
from gradserver.tools.launch.places import Place
from gradserver.tools.launch.signals import ENDING
from gradserver.tools.launch.station import Station

_SETTLING_SECONDS: Final = 1.0
"""Time after a failure in which other workers may end by themselves, so that they can say why."""
SLACK_SECONDS: Final = 10.0
"""Time after which an agent that should have reported the end of its workers is given up."""

Environment = Callable[[Place, int], Mapping[str, str | None]]
"""Variables of a worker that was started again so many times."""


class Crew:
    """All workers of a run.

    Args:
        options: the options of the run.
        console: where their output is shown.
        stations: the hosts, in the order of the options.
        places: the workers' places, by rank.
        environment: returns what a worker's environment has beside that of its host.

    Attributes:
        was_killed: whether the workers that had not ended were killed.
        requests: number of signals that the user has sent.
    """

    def __init__(
        self,
        options: Options,
        console: Console,
        stations: Sequence[Station],
        places: Sequence[Place],
        environment: Environment,
    ) -> None:
        self.was_killed = False
        self.requests = 0
        self._options, self._console = options, console
        self._stations, self._places, self._environment = stations, places, environment
        self._logs = Logs(options.log_dir)
        self._attempts: dict[int, Attempt] = {}
        """All attempts, by number. The last one of a rank is its present one."""
        self._restarts = dict.fromkeys(range(len(places)), 0)
        self._failures: list[Failure] = []
        self._has_failed = False
        """True if the run ends because of a failure."""
        self._settled_at: float | None = None
        """Time at which the workers that are left are asked to end, because one has failed."""
        self._kill_at: float | None = None
        """Time at which they are killed."""
        self._request: int | None = None
        """Signal by which the user asked the run to end."""

    def start(self) -> None:
        """Start all workers."""
        for place in self._places:
            self._start(place)

    def running(self) -> list[Attempt]:
        """Return the attempts that have not ended."""
        return [attempt for attempt in self._attempts.values() if attempt.is_running]

    def close(self) -> None:
        """Close the files with the output."""
        self._logs.close()

    def _start(self, place: Place) -> None:
        station, options = self._stations[place.host], self._options
        attempt = Attempt(len(self._attempts), place, station)
        self._attempts[attempt.number] = attempt
        station.send(
            Kind.START,
            number=attempt.number,
            command=options.command,
            python=options.is_python,
            folder=options.folder,
            environment=self._environment(place, self._restarts[place.rank]),
        )

    # ── what agents say ───────────────────────────────────────────────────────────────────────────────

    def take(self, frame: Frame) -> None:
        """Handle a frame of an agent."""
        if frame.kind is Kind.OUTPUT:
            number, stream, data = frame.output()
            self._attempts[number].take(stream, data, self._console, self._logs)
            return
        fields = frame.fields()
        attempt = self._attempts[fields["number"]]
        if frame.kind is Kind.ENDED:
            self._ended(attempt, fields["status"])
        elif "error" in fields:
            self._restarts[attempt.rank] = self._options.restarts  # it would not start the next time, either
            status, text = int(fields["status"]), str(fields["error"]).encode(errors=AS_IT_WAS)
            self._ended(attempt, status, Failure(attempt.name, attempt.where, status, time.monotonic(), text))
        else:
            attempt.pid = int(fields["pid"])
            title = f"{attempt.name} of {len(self._places)}, {attempt.where}: {' '.join(self._options.command)}"
            self._logs.begin(attempt.rank, title)

    def lost(self, station: Station) -> None:
        """Handle the end of an agent: its workers are dead, or out of reach and about to die."""
        attempts = [attempt for attempt in self.running() if attempt.station is station]
        text = f"the host was lost: {station.describe_end()}".encode() if attempts else b""
        for attempt in attempts:
            status = station.status
            self._ended(attempt, status, Failure(attempt.name, attempt.where, status, time.monotonic(), text))

    def _ended(self, attempt: Attempt, status: int, failure: Failure | None = None) -> None:
        """Decide what follows from the end of a worker."""
        attempt.end(status, self._console)
        failure = failure or attempt.failure()
        if failure is None:
            return
        fate = f"{failure.what}: {failure.fate()}, after {failure.lived:.1f} s"
        if attempt.asked_at is None and self._may_restart(attempt, failure):
            if failure.was_joining:  # that has cost the group nothing, and is none of the worker's own failures
                self._console.say(f"{fate}. It was about to join, and is started again, which does not count")
            else:
                count = self._restarts[attempt.rank] = self._restarts[attempt.rank] + 1
                self._console.say(f"{fate}. It is started again ({count} of {self._options.restarts})")
            self._start(attempt.place)
            return
        self._failures.append(failure)
        if self._goes_on():
            self._console.say(f"{fate}. The others go on without it")
        else:
            self._begin_to_end()

    @property
    def is_ending(self) -> bool:
        """True if the workers that run were asked to end, or are about to be, or if there are none."""
        return self._settled_at is not None or self._kill_at is not None or not self.running()

    def _may_restart(self, attempt: Attempt, failure: Failure) -> bool:
        """Tell whether a worker is started again. Once another has come to the end, there is nothing to join."""
        if self._settled_at is not None or self._kill_at is not None or not attempt.station.is_open:
            return False
        if any(other.status == 0 for other in self._attempts.values()):
            return False
        if failure.was_joining and self._options.restarts:
            return True
        return self._restarts[attempt.rank] < self._options.restarts

    def _goes_on(self) -> bool:
        left = sum(attempt.is_running or attempt.status == 0 for attempt in self._attempts.values())
        return self._options.minimum is not None and left >= self._options.minimum and self._kill_at is None

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────

    def lose_coordinator(self, failure: Failure) -> None:
        """Handle the end of the coordinator: no worker can go on."""
        if self.running() and self._kill_at is None:
            self._failures.append(failure)
            self._begin_to_end()

    def request(self, number: int) -> None:
        """Pass on a signal of the user's. A second request to end kills."""
        name = signal.Signals(number).name
        self.requests += 1
        if number not in ENDING:
            self._pass_on(number)
        elif self._kill_at is not None or not self.running():
            self._console.say(f"{name}: all that is left is killed")
            self._kill()
        else:
            self._request = number
            again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
            workers = report.counted(len(self.running()), "worker")
            patience = f"Those that have not ended in {self._options.grace:g} s are killed; {again} kills them at once"
            self._console.say(f"{name} was passed on to {workers}. {patience}")
            self._ask(number)

    def deadline(self) -> float | None:
        """Return when `check_time` has something to do."""
        deadlines = [self._settled_at, self._kill_at]
        if not self._console.is_full:
            deadlines += [attempt.deadline() for attempt in self.running()]
        return min((one for one in deadlines if one is not None), default=None)

    def check_time(self, now: float) -> None:
        """Do what is due."""
        running = self.running()
        if not self._console.is_full:
            for attempt in running:
                attempt.show_unfinished(self._console, now)
        if self._settled_at is not None and (self._settled_at <= now or not running):
            self._settled_at = None
            if running:
                self._console.say(f"{report.ranks([one.rank for one in running])}: asked to end (SIGTERM)")
                self._ask(signal.SIGTERM)
        if self._kill_at is not None and self._kill_at <= now:
            self._overdue(running)

    def _begin_to_end(self) -> None:
        self._has_failed = self._has_failed or self._request is None
        if self._settled_at is None and self._kill_at is None:
            self._settled_at = time.monotonic() + _SETTLING_SECONDS

    def _ask(self, number: int) -> None:
        """Ask all workers to end."""
        now = time.monotonic()
        self._kill_at = now + self._options.grace
        for attempt in self.running():
            attempt.asked_at = attempt.asked_at or now
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for station in self._stations:
            if station.is_open:
                station.send(Kind.SIGNAL, signal=int(number))

    def _kill(self) -> None:
        self._ask(signal.SIGKILL)
        self.was_killed, self._kill_at = True, time.monotonic() + SLACK_SECONDS
        self._console.give_up()  # what has ended cannot be heard of while no process reads

    def _overdue(self, running: Sequence[Attempt]) -> None:
        """Kill the workers that have not ended in time. An agent that does not report their end is given up."""
        if not self.was_killed:
            if running:
                late = report.ranks([attempt.rank for attempt in running])
                self._console.say(f"{late}: not ended within {self._options.grace:g} s, and killed (SIGKILL)")
            self._kill()
            return
        self._kill_at = None
        for attempt in running:
            attempt.station.give_up()
            attempt.end(-signal.SIGKILL, self._console)

    # ── the result ────────────────────────────────────────────────────────────────────────────────────

    def report(self) -> None:
        """Show the failure that ended the run, and say where the output is."""
        if self._has_failed:
            cause = first(self._failures)
            told = {failure.what for failure in self._failures}
            last = {attempt.name: attempt for attempt in self._attempts.values()}
            ended = [attempt.rank for name, attempt in last.items() if attempt.status and name not in told]
            report.show_failures(self._console, cause, self._failures, ended)
        report.show_logs(self._console, self._options.log_dir, self._logs.trouble)

    def status(self) -> int:
        """Return the exit status: that of the first failure, or 128 and the signal by which the user ended the run."""
        if self._has_failed:
            return first(self._failures).exit_status
        last = {attempt.rank: attempt.status for attempt in self._attempts.values()}
        return 128 + self._request if self._request is not None and any(last.values()) else 0
