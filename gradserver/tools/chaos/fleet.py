"""The processes of a chaos run: started, observed, harmed and started again. None of them survives the run."""

from __future__ import annotations

import heapq
import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gradserver.protocol.planes import AUTO
from gradserver.tools.chaos.evidence import HEARD, LEDGER
from gradserver.tools.chaos.program import Settings
from gradserver.tools.chaos.schedule import Way
from gradserver.tools.chaos.uses import Use, use_of
from gradserver.tools.chaos.workload import Workload
from gradserver.tools.common.forks import ForkServer
from gradserver.tools.common.netns import Lab
from gradserver.tools.common.processes import Child, Family, RunError, Starter, listening_url, single_threaded

SILENCE: Final = 60.0
"""Seconds in which a started process must print its first line."""
_IMPORTED: Final = 300.0
"""Seconds in which workers' imports must be done: torch takes seconds, and more on a busy machine."""
COORDINATOR: Final = ("-m", "gradserver")
"""Arguments with which Python runs a coordinator."""
DONE: Final = "done"
"""Answer of a relay or wire to a command."""
_HIT: Final = "hit "
"""Beginning of a line by which a relay or wire reports that an event took effect."""
PARTING: Final = 5.0
"""Seconds that processes have to end by themselves."""
_FIRST_ROUND: Final = 5.0
"""Seconds that the first round of a worker may take, also after a coordinator was killed."""
_WRITES_AGAIN: Final = 5.0
"""Seconds after which a coordinator has retried a disk that was full (1 s), or the next one has admitted all."""
_STALLED: Final = 2.0
"""Seconds without a finished round after which workers write to their logs what each thread is doing."""
_FORGIVEN: Final = 10.0
"""Seconds after an event in which its worker may be out of the group."""


_BEGINS_ANEW: Final = frozenset({"LeftOutError", "ConnectionLostError", "CoordinatorUnreachableError"})
"""Errors that a joining worker may get when the coordinator is lost, or a recovery begins for another one."""


class Fleet(Family):
    """Coordinator, workers, and the relays between them. Leaving the context ends every process.

    Attributes:
        faults: descriptions of surprises: what went wrong and no event explains.
        outs: number of times that workers were out of the group, by error.
        back: (kind, seconds) from an event to the next round that its worker finished.
        round: latest round that a worker has finished.
        plane: plane of the group, or "auto".
        on_hit: called with the kind and the target of an event when it takes effect.
        on_call: called with the name of a worker that begins with collectives.
    """

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        ways: dict[str, Way],
        minimum: int,
        pace: float,
        lab: Lab | None = None,
        plane: str = AUTO,
        serve: Sequence[str] = (),
    ) -> None:
        super().__init__(folder, single_threaded())
        self.lab = lab
        self.hosts = {name: host for host, name in enumerate(n for n, way in ways.items() if way is Way.WIRE)}
        """Hosts of the workers in a lab that can be disconnected; all others are on the coordinator's."""
        self._workload = workload
        self._ways, self._pace, self.plane = ways, pace, plane
        self._serve = "--shards", str(workload.shards), "--mean", workload.mean, *serve
        """Further options of the coordinator."""
        self._minimum, self._sizes = minimum, f"{minimum}:{len(ways) + 2}"
        self._forks: ForkServer | None = None
        """Origin of the workers' processes, if these import torch."""
        if (plane != AUTO or workload.is_local) and lab is None:
            own = f"gradserver.tools.chaos.{'locally' if workload.is_local else 'directly'}"
            self._forks = ForkServer((own, "gradserver.worker.connect"), self._environment, folder / "forks.log")
        self._heard = (folder / HEARD).open("wb", buffering=0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._by_name: dict[str, Child] = {}
        self._ending: set[Child] = set()
        """Processes that are expected to end."""
        self._disturbed: dict[str, float] = {}
        """Times until which it is no surprise that a worker is out of the group."""
        self._forgetful = 0.0
        """Time until which the ledger may lack workers that have joined."""
        self._entered: dict[str, float] = {}
        """Time at which each worker has joined last."""
        self._hit: dict[str, tuple[str, float]] = {}
        """Event of each worker that has not finished a round since."""
        self._inside: set[str] = set()
        self._returning: set[str] = set()
        """Workers that have to join before they count as back."""
        self._astray: set[str] = set()
        """Workers that are out of the group without a reason, and were reported."""
        self._url = self._address = ""
        self._ports: dict[str, int] = {}
        """Ports to which workers behind a relay or wire connect."""
        self.faults: list[str] = []
        self.outs: Counter[str] = Counter()
        self.back: list[tuple[str, float]] = []
        self.round = -1
        self._finished = 0.0
        """Time at which a worker has finished a round last; 0 if that is not looked at."""
        self.on_hit: Callable[[str, str], object] = lambda _kind, _name: None
        self.on_call: Callable[[str], object] = lambda _name: None

    # ── starting ──────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Start everything, and wait until all workers have finished a round."""
        if self._forks is not None:
            self._forks.await_ready(_IMPORTED)
        self._start_coordinator("127.0.0.1:0" if self.lab is None else f"{self.lab.coordinator_address()}:7411")
        for way, module in ((Way.RELAY, "relay"), (Way.WIRE, "wires")):
            names = [name for name, one in self._ways.items() if one is way]
            if names and not (self.lab and way is Way.WIRE):
                child = self._start(module, "-m", f"gradserver.tools.chaos.{module}", self._address, *names)
                self._ports.update(json.loads(self._first_line(child)))
        for name in self._ways:
            self.start_worker(name, len(self._ways))
        deadline = time.monotonic() + SILENCE
        while len(self._inside) < len(self._ways):
            self.run_until(time.monotonic() + 0.1)
            if time.monotonic() > deadline or self.faults:
                lacking = ", ".join(sorted(self._ways.keys() - self._inside))
                raise RunError(f"{lacking} did not come in; the logs are in {self.folder}\n" + "\n".join(self.faults))

    def _start_coordinator(self, address: str) -> None:
        options = ["--workers", self._sizes, "--state-dir", str(self.folder / LEDGER)]
        child = self._start("coordinator", *COORDINATOR, "serve", "--bind", f"tcp://{address}", *options, *self._serve)
        if address == self._address:
            return  # at the address of before: no process has to be told, and none waits for it
        self._url = listening_url(child, self._first_line(child))
        self._address = self._url.removeprefix("tcp://")

    def start_worker(self, name: str, world: int = 0) -> None:
        """Start a worker. With ``world``, it begins the group together with the others."""
        way = self._ways.get(name, Way.DIRECT)
        url = f"tcp://127.0.0.1:{self._ports[name]}" if name in self._ports else self._url
        channel = "auto" if way is Way.DIRECT else "tcp"
        settings = Settings(url, name, self._workload.to_json(), channel, 20.0, self._pace, world, self.plane)
        starter = self._forks.start if self._forks is not None else None
        self._start(name, "-m", "gradserver.tools.chaos.program", settings.to_json(), starter=starter)

    def _start(self, name: str, *arguments: str, starter: Starter | None = None) -> Child:
        prefix: list[str] = []
        if self.lab is not None:
            host = self.hosts.get(name)
            prefix = self.lab.coordinator_prefix() if host is None else self.lab.worker_prefix(host)
        log = f"{name} {next(self._number)}"
        options: dict[str, Any] = {"prefix": prefix, "last": signal.SIGKILL, "log": log, "starter": starter}
        child = self._by_name[name] = self.start(name, *arguments, **options)
        return child

    def _first_line(self, child: Child) -> str:
        deadline = time.monotonic() + SILENCE
        while not child.lines:
            self._hear(0.1)
            if child.ended or time.monotonic() > deadline:
                raise RunError(f"{self.autopsy(child)}\nthe logs are in {self.folder}")
        return child.lines[0]

    # ── living ────────────────────────────────────────────────────────────────────────────────────────────

    def run_until(self, moment: float) -> None:
        """Read what processes print, and do what is due, until then."""
        while (now := time.monotonic()) < moment:
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            after = self._due[0][0] if self._due else moment
            self._hear(max(0.0, min(moment, after) - now))
            if self._finished and time.monotonic() > self._finished + _STALLED:
                self._finished = 0.0
                self.note("stalled")
                self.say_to_all("stacks")

    def note(self, kind: str, **fields: Any) -> None:
        """Write a line of the run itself."""
        line = {"kind": kind, **fields, "at": time.monotonic()}
        self._heard.write(json.dumps(line).encode() + b"\n")

    @property
    def inside(self) -> int:
        """Number of workers in the group, as far as they have reported."""
        return len(self._inside)

    def absent(self) -> list[str]:
        """List the run's own workers that are not in the group."""
        return sorted(self._ways.keys() - self._inside)

    def use(self) -> dict[str, tuple[int, Use]]:
        """Measure what each process uses, with its id, by name. The judge is left out."""
        found = {}
        for name, child in self._by_name.items():
            if child is not self._judge and child.process.poll() is None:
                found[name] = child.process.pid, use_of(child.process.pid)
        return found

    def _hear(self, seconds: float) -> None:
        for child in self.hear(seconds):
            child.lines = [line for line in child.lines if line != DONE and not self._is_hit(line)]
            if self._is_worker(child):
                for line in child.lines:
                    self._take(child, line)
                child.lines.clear()
            if child.ended:
                self._bury(child)

    def _is_hit(self, line: str) -> bool:
        if not line.startswith(_HIT):
            return False
        what, name = line.removeprefix(_HIT).split()
        for kind in {"hold": ("blackhole", "partition"), "reset": ("reset", "midcall")}.get(what, (what,)):
            self.on_hit(kind, name)
        return True

    def _take(self, child: Child, text: str) -> None:
        self._heard.write(text.encode() + b"\n")
        line = json.loads(text)
        name, at = child.name, line["at"]
        match line["kind"]:
            case "round":
                self.round, self._finished = max(self.round, line["round"]), time.monotonic()
                self._inside.add(name)
                self._astray.discard(name)
                if name in self._hit and self._hit[name][1] < at and name not in self._returning:
                    kind, since = self._hit.pop(name)
                    self.back.append((kind, at - since))
            case "meets":
                self.on_call(name)
            case "dies":
                self.on_hit("midpush", name)
            case "entered":
                self.on_hit("join", name)
                self._returning.discard(name)
                self._entered[name] = at
                if at < self._forgetful:
                    self._may_be_forgotten(name)
            case "out" | "refused":
                self.outs[line["error"]] += 1
                if name not in self._inside and line["error"] in _BEGINS_ANEW:
                    return
                self._inside.discard(name)
                if at > self._disturbed.get(name, 0.0) and name not in self._astray:
                    self._astray.add(name)
                    self.faults.append(f"{name} was out of the group without an event: {line['text']}")
            case "left":
                self._inside.discard(name)

    def _bury(self, child: Child) -> None:
        child.process.wait()
        child.hang_up()
        self.children.remove(child)
        self._inside.discard(child.name)
        if child not in self._ending:
            words = "\n".join(f"  | {line}" for line in child.last_words(6))
            self.faults.append(f"{child.name} {child.fate()}:\n{words}")
        self._ending.discard(child)

    # ── for the injection of events ───────────────────────────────────────────────────────────────────────

    def running(self, name: str) -> Child | None:
        """Return the process of this name, if it runs."""
        child = self._by_name.get(name)
        return child if child is not None and child.process.poll() is None else None

    def can_spare(self, name: str) -> bool:
        """Tell whether the group survives without this worker: enough others are members, and back from their events.

        On a busy machine they come back later than the schedule allows for.
        """
        return len(self._inside.difference(self._hit, {name})) >= self._minimum

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call ``do`` after ``seconds``."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), do))

    def expect_end(self, name: str) -> None:
        """Expect that this process ends."""
        self._ending.add(self._by_name[name])

    def expect_out(self, name: str, kind: str, seconds: float) -> None:
        """Expect that an event of this ``kind`` takes a worker's membership. The event is over after ``seconds``.

        If these are not zero, the worker may still finish its round, and is back only when it has joined again.
        """
        now = time.monotonic()
        if seconds:
            self._returning.add(name)
        self._disturbed[name] = now + seconds + _FORGIVEN
        self._hit[name] = kind, now + seconds

    def expect_gap(self, seconds: float) -> None:
        """Expect that nothing is written for ``seconds``, and for some time until the next retry."""
        now = time.monotonic()
        self._forgetful = now + seconds + _WRITES_AGAIN
        for name, at in self._entered.items():  # a worker is a member, and written down as one, after its first round
            if at > now - _FIRST_ROUND:
                self._may_be_forgotten(name)

    def _may_be_forgotten(self, name: str) -> None:
        """Forgive a worker that a restarted coordinator does not know, as the ledger lacks its arrival."""
        self._disturbed[name] = max(self._disturbed.get(name, 0.0), self._forgetful)

    def restart_coordinator(self) -> None:
        """Start the coordinator again at its address."""
        self._start_coordinator(self._address)

    def say_to_all(self, line: str) -> None:
        """Send a line to all workers."""
        for child in list(self.children):
            if self._is_worker(child) and self.running(child.name) is child:
                self.say(child.name, line)

    def _is_worker(self, child: Child) -> bool:
        return child.name in self._ways or child.name.startswith("x")

    def say(self, name: str, line: str) -> None:
        """Send a line to a process."""
        child = self._by_name[name]
        if child in self.children:
            child.say(line)

    # ── judging, and the end ────────────────────────────────────────────────────────────────────────────────

    def start_judge(self) -> None:
        """Start the oracle, which follows the run."""
        arguments = str(self.folder), self._workload.to_json()
        self._judge = self._start("judge", "-m", "gradserver.tools.chaos.judge", *arguments)

    _judge: Child

    @property
    def judged(self) -> Mapping[str, Any]:
        """Progress of the oracle."""
        lines = self._judge.lines
        if lines:
            self._progress = json.loads(lines[-1])
            lines.clear()
        return self._progress

    _progress: Mapping[str, Any] = MappingProxyType({"checked": 0, "behind": 0, "found": {}})

    def leave(self) -> None:
        """Let all workers leave, and end the coordinator."""
        self._due.clear()
        workers = [child for child in self.children if self._is_worker(child)]
        for child in workers:
            self._ending.add(child)
            child.process.send_signal(signal.SIGCONT)
            self.say(child.name, "leave")
        self._await(workers, PARTING)
        for child in self.children:
            if child is not self._judge:
                self._ending.add(child)
                (child.process.kill if child in workers else child.process.terminate)()
        self._await([child for child in self.children if child is not self._judge], PARTING)

    def _await(self, children: Sequence[Child], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(child in self.children for child in children) and time.monotonic() < deadline:
            self._hear(0.1)

    def verdict(self, waiting: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """Return the oracle's verdict, once it has checked everything; ``waiting`` is called meanwhile."""
        self._ending.add(self._judge)
        self.say("judge", "end")
        while not self._judge.ended:
            self._hear(0.5)
            waiting(self._progress)
        if not self._judge.lines or "rounds" not in (found := json.loads(self._judge.lines[-1])):
            words = "\n".join(self._judge.last_words(12))
            raise RunError(f"the oracle {self._judge.fate()}:\n{words}")
        verdict: dict[str, Any] = found
        return verdict

    def close(self) -> None:
        """End all processes, stopped ones included."""
        for child in self.children:
            if child.name != "coordinator":
                child.process.kill()
        super().close()
        if self._forks is not None:
            self._forks.close()
        self._heard.close()
