"""The launcher: starts the agents, the coordinator and the workers, and handles what comes from them."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.url import numeric_url
from gradserver.tools.common.processes import RunError
from gradserver.tools.launch import frames, places, report
from gradserver.tools.launch.attendance import Attendance
from gradserver.tools.launch.coordinator import Coordinator
from gradserver.tools.launch.crew import SLACK_SECONDS, Crew
from gradserver.tools.launch.hosts import own_address
from gradserver.tools.launch.options import Options
from gradserver.tools.launch.output import Console
from gradserver.tools.launch.places import Hello, Place
from gradserver.tools.launch.signals import ENDING, PASSED, received
from gradserver.tools.launch.station import Station, StationError

_START_SECONDS: Final = 60.0
"""Time in which agents and coordinator must be ready."""
_WITHOUT_WORKERS_SECONDS: Final = 2.0
"""Time that an agent without workers has to end. Its remote shell may still try to connect."""


class _InterruptedError(Exception):
    """A signal has ended the run before its workers were started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Launcher:
    """Launcher of one run."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options, self._console = options, console
        self._stations: list[Station] = []
        self._coordinator: Coordinator | None = None
        self._serve_options: list[str] = []
        self._coordinator_restarts = 0
        self._url = options.url
        self._places: list[Place] = []
        self._master = "", 0
        self._crew: Crew | None = None
        self._attendance: Attendance | None = None
        self._wakeup = -1
        self._news, self._waker = os.pipe()
        """Pipe with a byte when the attendance has changed."""
        for descriptor in (self._news, self._waker):
            os.set_blocking(descriptor, False)

    def run(self) -> int:
        """Run everything. Return the exit status.

        Raises:
            RunError: the run could not begin, or an agent made no sense.
            InvalidArgumentError: the options do not fit the hosts.
        """
        with received() as self._wakeup:
            try:
                self._prepare()
                crew = self._crew = Crew(self._options, self._console, self._stations, self._places, self._environment)
                crew.start()
                self._attendance = self._begin_attendance()
                self._run_until(lambda: not crew.running(), None)
                self._attendance.close(crew.status() == 0)
                self._end_stations(crew)
            except _InterruptedError as interrupted:
                self._console.say("interrupted before the workers were started")
                return 128 + interrupted.number
            finally:
                self._close()
        crew.report()
        return crew.status()

    # ── before the workers start ──────────────────────────────────────────────────────────────────────

    def _prepare(self) -> None:
        """Start agents and coordinator, and give each worker its place."""
        options = self._options
        deadline = time.monotonic() + _START_SECONDS
        if options.log_dir is not None:
            _make_folder(options.log_dir)
        self._start_agents()
        if not options.is_elastic and not options.serve:
            self._start_coordinator(0)  # meanwhile
        self._run_until(lambda: all(station.hello for station in self._stations), deadline)
        hellos = self._hellos()
        counts = places.counts(options.hosts, hellos, options.nproc)
        self._places = places.assign(options.hosts, hellos, counts, options.all_gpus)
        world = len(self._places)
        if options.minimum is not None and options.minimum > world:
            raise InvalidArgumentError(f"--min {options.minimum} is more than there are workers: {world}")
        self._console.begin(world)
        self._start_coordinator(world)
        self._run_until(lambda: self._url is not None, deadline)
        if self._url is None:
            raise RunError(f"the coordinator does not listen after {_START_SECONDS:g} s")
        self._master = self._rendezvous(hellos[0])
        threads = self._environment(self._places[0], 0).get("OMP_NUM_THREADS")
        text = report.beginning(options.hosts, hellos, self._places, threads)
        more = " (--nproc N starts more)" if world == 1 and options.nproc is None else ""
        started = "" if self._coordinator is None else ", started here"
        self._console.say(f"{text}{more}; coordinator {self._url}{started}")

    def _begin_attendance(self) -> Attendance:
        assert self._url is not None
        names = [self._environment(place, 0)["GRADSERVER_NAME"] or "" for place in self._places]
        is_own, is_only_here = self._coordinator is not None, all(host.is_here for host in self._options.hosts)
        return Attendance(self._url, names, is_own, self._console, self._waker, is_only_here)

    def _start_agents(self) -> None:
        options = self._options
        for host in options.hosts:
            try:
                self._stations.append(Station(host, options.rsh, options.python, options.grace))
            except StationError as error:
                raise RunError(str(error)) from None

    def _hellos(self) -> list[Hello]:
        """Return what each agent has said of its host. RunError if one has not answered."""
        found = []
        for station in self._stations:
            if station.hello is None:
                words = "".join(f"\n  {line}" for line in station.last_words())
                raise RunError(f"host {station.host} has not answered within {_START_SECONDS:g} s{words}")
            found.append(station.hello)
        return found

    def _start_coordinator(self, world: int) -> None:
        """Start a coordinator, if there is none. Some options of it need to know how many workers there are."""
        options = self._options
        if self._url is not None or self._coordinator is not None:
            return
        bind = options.bind
        if bind is None:
            address = own_address(options.hosts)
            if address is None:
                raise RunError("this host has no route to the others: give its address, as --bind tcp://ADDRESS:0")
            bind = numeric_url(address, 0)
        # It begins with all workers, or with those that are there when one of them loses its patience.
        size = ["--workers", f"*={options.minimum or 1}:{world}", "--gather", "3600"] if options.is_elastic else []
        self._serve_options = [*size, *options.serve, *_sized([*size, *options.serve], world)]
        self._coordinator = Coordinator(bind, self._serve_options, options.log_dir)

    def _rendezvous(self, hello: Hello) -> tuple[str, int]:
        """Return where rank 0, on the host of ``hello``, can meet the others for torch.distributed."""
        host = self._options.hosts[0]
        if host.is_here:
            return own_address(self._options.hosts) or hello.host, hello.port
        return hello.address or host.address.rpartition("@")[2], hello.port

    def _environment(self, place: Place, restarts: int) -> Mapping[str, str | None]:
        hello = self._stations[place.host].hello
        assert hello is not None
        assert self._url is not None
        found = places.environment_of(place, self._places, hello, self._master, self._url, os.environ)
        carried = {} if self._options.hosts[place.host].is_here else places.carried(os.environ)
        own = {"PYTHONPATH": self._options.pythonpath, "GRADSERVER_RESTARTS": str(restarts)}
        if self._options.resume is not None:
            own["GRADSERVER_RESUME"] = self._options.resume
        return {**carried, **found, **own}

    # ── events ────────────────────────────────────────────────────────────────────────────────────────

    def _run_until(self, is_over: Callable[[], bool], deadline: float | None) -> None:
        """Handle events until ``is_over()``, or until the deadline."""
        while not is_over() and (deadline is None or time.monotonic() < deadline):
            self._turn(deadline)

    def _turn(self, deadline: float | None) -> None:
        """Wait for events, and handle them."""
        stations = [station for station in self._stations if station.is_open]
        writing = [station.outbox.descriptor for station in stations if station.outbox.size]
        readable, writable = frames.wait(self._reading(stations), writing, self._patience(deadline))
        for number in frames.read(self._wakeup) or b"":
            self._signalled(number)
        frames.read(self._console.drained)
        frames.read(self._news)
        if self._coordinator is not None and self._coordinator.process.output.fileno() in readable:
            self._hear_coordinator(self._coordinator)
        for station in stations:
            if station.outbox.descriptor in writable:
                station.outbox.flush()
            self._hear(station, readable)
        self._console.tell_of_loss()
        if self._crew is not None:
            self._crew.check_time(time.monotonic())
            if self._attendance is not None:
                self._attendance.check_time(time.monotonic(), len(self._crew.running()))

    def _reading(self, stations: list[Station]) -> list[int]:
        """Return the descriptors to read. Workers wait while their output is not read."""
        reading = [self._wakeup, self._console.drained, self._news]
        if not self._console.is_full:
            reading += [station.incoming for station in stations]
            reading += [station.errors for station in stations if station.is_heard]
        if self._coordinator is not None and not self._coordinator.process.ended:
            reading.append(self._coordinator.process.output.fileno())
        return reading

    def _patience(self, deadline: float | None) -> float | None:
        deadlines = [deadline, *(None if one is None else one.deadline() for one in (self._crew, self._attendance))]
        return min((one - time.monotonic() for one in deadlines if one is not None), default=None)

    def _signalled(self, number: int) -> None:
        if number not in PASSED:
            return
        if self._crew is not None:
            self._crew.request(number)
        elif number in ENDING:
            raise _InterruptedError(number)

    def _hear(self, station: Station, readable: set[int]) -> None:
        if station.errors in readable and station.is_heard:
            for line in station.listen():
                if station.hello is not None:  # before, there are banners, and errors that are shown in one piece
                    self._console.host_line(str(station.host), line)
        if station.incoming in readable:
            try:
                for frame in station.receive():
                    if self._crew is not None:
                        self._crew.take(frame)
            except StationError as error:
                raise RunError(f"host {station.host}: {error}") from None
        elif station.has_ended:  # what it has started may hold the pipe open
            station.give_up()
        if not station.is_open:
            self._lost(station)

    def _lost(self, station: Station) -> None:
        if self._crew is not None:
            self._crew.lost(station)
        else:
            text = station.describe_end()
            words = "".join(f"\n  {line}" for line in station.last_words())
            raise RunError(f"host {station.host} cannot be used: {text}{words}")

    def _hear_coordinator(self, coordinator: Coordinator) -> None:
        coordinator.read()
        self._url = self._url or coordinator.url
        if not coordinator.process.ended:
            return
        if self._crew is None:
            raise coordinator.cannot_start()
        failure = coordinator.failure(time.monotonic())
        if self._may_restart_coordinator(self._crew):
            self._coordinator_restarts += 1
            count = f"{self._coordinator_restarts} of {self._options.restarts}"
            self._console.say(
                f"the coordinator: {failure.fate()}. It is started again ({count}), and the workers go on"
            )
            coordinator.close()
            assert self._url is not None
            self._coordinator = Coordinator(self._url, self._serve_options, self._options.log_dir)
        else:
            self._crew.lose_coordinator(failure)

    def _may_restart_coordinator(self, crew: Crew) -> bool:
        """Tell whether the coordinator is started again: its groups continue if it keeps their state on disk."""
        is_durable = any(option.partition("=")[0] == "--state-dir" for option in self._serve_options)
        return is_durable and not crew.is_ending and self._coordinator_restarts < self._options.restarts

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────

    def _end_stations(self, crew: Crew) -> None:
        """Let the agents end what workers have left behind. A signal cuts this short."""
        for station in self._stations:
            station.finish()
        requests, until = crew.requests, time.monotonic() + self._options.grace + SLACK_SECONDS
        self._run_until(
            lambda: crew.requests > requests or not any(station.is_open for station in self._stations), until
        )

    def _close(self) -> None:
        patience = _WITHOUT_WORKERS_SECONDS if self._crew is None else 0.0 if self._crew.was_killed else SLACK_SECONDS
        for station in self._stations:
            station.close(patience)
        if self._coordinator is not None:
            self._coordinator.close()
        if self._crew is not None:
            self._crew.close()
        os.close(self._news)


def _sized(words: list[str], world: int) -> list[str]:
    """Return the number of workers as an option, if others need it. InvalidArgumentError if they cannot be right."""
    if not words:
        return []
    from gradserver.serving import sized

    try:
        return sized(words, world)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--serve {shlex.join(words)!r}: {error.message}") from None


def _make_folder(folder: Path) -> None:
    """Make the folder for the output. RunError if files cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "coordinator.log").open("ab").close()
    except OSError as error:
        raise RunError(f"--log-dir {folder} cannot be written: {error.strerror}") from None
