"""A fleet: the processes of one comparison, which measure a case with all its contenders in turn."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradserver.tools.bench.cost import Cost, Timed
from gradserver.tools.bench.places import Here, Place
from gradserver.tools.bench.processes import Processes, ask
from gradserver.tools.bench.spec import Case, Contender, Link, Seat
from gradserver.tools.bench.stats import Stats
from gradserver.tools.common.forks import Copies
from gradserver.tools.common.processes import Child, listening_url, single_threaded

TIMEOUT = 120.0  # seconds that a worker waits for the others
SILENCE = TIMEOUT + 30.0  # time to wait for workers: their own deadline is earlier, as its error says more
MOST_IN_A_ROW = 1000
_PORT = 7411
_IMPORTS = "gradserver.tools.bench.contenders", "gradserver.tools.bench.member"
"""Imports of the workers, which take seconds of a processor."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Connections that the workers of a fleet need beside gloo. Links need a ``coordinator`` in any case."""

    links: tuple[Link, ...] = ()
    coordinator: bool = False
    ring: bool = False
    hub: bool = False
    threads: bool = False
    shards: bool = False


@dataclass(slots=True)
class Measured:
    """Measurements of one contender."""

    times: Stats
    wrong: int = 0
    in_a_row: int = 1
    figures: dict[str, float] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)


Progress = Callable[[str], None]


class Fleet:
    """Processes that run from construction to the end of the context."""

    def __init__(self, workers: int, needs: Needs, folder: Path, place: Place | None = None) -> None:
        self.workers = workers
        self._needs = needs
        self._place: Place = place or Here()
        self._folder = folder
        folder.mkdir()
        more = {"GLOO_SOCKET_IFNAME": self._place.interface}
        self._processes = Processes(folder, more)
        self._copies = Copies(_IMPORTS, {**single_threaded(), **more}, folder / "forks.log")
        self._members: list[Child] = []
        self._servers: list[Child] = []
        """The coordinator and its data shards."""
        self._threads: Child | None = None
        try:
            self._start()
        except BaseException:
            self._close()
            raise

    def measure(
        self, case: Case, repetitions: int, sample_seconds: float, progress: Progress = lambda _: None
    ) -> dict[str, Measured]:
        """Measure every contender in turn, `repetitions` times. A sample is the time of one operation.

        Fast operations are measured several in a row, so that a sample lasts about `sample_seconds`. Its time is
        that of the slowest rank, from the barrier on, divided by their number.
        """
        progress("setting up")
        for child in self._everybody():
            names = [one.name for one in case.contenders if child in self._of(one)]
            ask(child, {"do": "prepare", "case": case.to_dict(), "names": names})
        self._processes.answers(self._everybody(), SILENCE)
        in_a_row: dict[str, int] = {}
        wrong = dict.fromkeys((one.name for one in case.contenders), 0)
        for one in case.contenders:
            wrong[one.name] += self._check(one)[0]
            self._time(one, 1)
            warm = self._time(one, 1)[0]
            in_a_row[one.name] = max(1, min(MOST_IN_A_ROW, round(sample_seconds / max(warm, 1e-7))))
        samples: dict[str, list[tuple[float, Cost]]] = {one.name: [] for one in case.contenders}
        for repetition in range(repetitions):
            progress(f"repetition {repetition + 1} of {repetitions}")
            for one in case.contenders:
                samples[one.name].append(self._time(one, in_a_row[one.name]))
        measured: dict[str, Measured] = {}
        for one in case.contenders:
            more, figures = self._check(one)
            times = Stats.of([seconds for seconds, _ in samples[one.name]])
            costs = [cost for _, cost in samples[one.name]]
            measured[one.name] = Measured(times, wrong[one.name] + more, in_a_row[one.name], figures, costs)
        return measured

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._end()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._processes.close()
        finally:
            self._copies.close()

    # ── start and end ─────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        needs, place = self._needs, self._place
        url = self._start_coordinator() if needs.links or needs.coordinator else ""
        hub = ""
        if needs.hub:
            host = place.coordinator_address()
            child = self._processes.start(
                "hub",
                "-m",
                "gradserver.tools.bench.hub",
                f"tcp://{host}:*",
                str(self.workers),
                prefix=place.coordinator_prefix(),
            )
            hub = self._processes.lines([child], SILENCE)[0]
        for rank in range(self.workers):
            self._members.append(self._start_member(f"worker {rank}", place.worker_prefix(rank)))
            seat = Seat(
                rank,
                self.workers,
                url,
                needs.links,
                str(self._folder / "gloo-store"),
                hub,
                place.worker_address(rank),
                needs.ring,
                tuple(child.process.pid for child in self._servers),
                TIMEOUT,
            )
            ask(self._members[-1], {"do": "seat", "seat": asdict(seat)})
        if needs.threads:
            self._threads = self._start_member("threads")
            ask(self._threads, {"do": "seat", "seat": asdict(Seat(0, self.workers, timeout=TIMEOUT))})
        ports = [answer["port"] for answer in self._processes.answers(self._everybody(), SILENCE)]
        addresses = [(place.worker_address(rank), ports[rank]) for rank in range(self.workers)]
        self._ask(self._everybody(), {"do": "join", "addresses": addresses})

    def _start_member(self, name: str, prefix: Sequence[str] = ()) -> Child:
        """Start a process with torch: a copy of one that has imported it, if it has no ``prefix``."""
        starter = None if prefix else self._copies.starter(SILENCE)
        return self._processes.start(name, "-m", "gradserver.tools.bench.worker_main", prefix=prefix, starter=starter)

    def _start_coordinator(self) -> str:
        place = self._place
        # Each host of a lab has all ports to itself; on this machine a free one is picked.
        port = 0 if isinstance(place, Here) else _PORT
        arguments = ["serve", "--bind", f"tcp://{place.coordinator_address()}:{port}", "--quiet"]
        if self._needs.shards:
            arguments += ["--rate", "0", "--allow-shards"]  # it only knows the members: the shards hold all slices
        url = self._serve("coordinator", arguments, place.coordinator_prefix())
        if self._needs.shards:
            for rank in range(self.workers):
                bind = f"tcp://{place.worker_address(rank)}:{_PORT}"
                arguments = ["serve", "--bind", bind, "--join", url, "--quiet"]
                self._serve(f"shard {rank}", arguments, place.worker_prefix(rank))
        return url

    def _serve(self, name: str, arguments: Sequence[str], prefix: Sequence[str]) -> str:
        child = self._processes.start(name, "-m", "gradserver", *arguments, prefix=prefix)
        self._servers.append(child)
        (line,) = self._processes.lines([child], SILENCE)
        return listening_url(child, line)

    def _end(self) -> None:
        """Let all processes end in order, so that nothing of theirs stays behind."""
        for child in self._everybody():
            ask(child, {"do": "end"})
        for child in self._everybody():
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(5.0)

    # ── asking ────────────────────────────────────────────────────────────────────────────────────────────

    def _everybody(self) -> list[Child]:
        return self._members + ([self._threads] if self._threads else [])

    def _of(self, contender: Contender) -> list[Child]:
        if not contender.kind.endswith("threads"):
            return self._members
        assert self._threads is not None, "the fleet has no process for threads"
        return [self._threads]

    def _time(self, contender: Contender, count: int) -> tuple[float, Cost]:
        """Measure the time of one of ``count`` operations, and its processor time."""
        answers = self._ask(self._of(contender), {"do": "run", "name": contender.name, "count": count})
        timed = [Timed(**answer) for answer in answers]
        return max(one.seconds for one in timed) / count, Cost.of(timed, count)

    def _check(self, contender: Contender) -> tuple[int, dict[str, float]]:
        """Count the wrong values over all ranks, and compute the mean over the ranks of every other figure."""
        answers = self._ask(self._of(contender), {"do": "check", "name": contender.name})
        wrong = sum(int(answer["wrong"]) for answer in answers)
        # Replicas with other weights than rank 0's are wrong, too.
        wrong += sum(answer.get("sha256") != answers[0].get("sha256") for answer in answers)
        numbers = [name for name, value in answers[0].items() if name != "wrong" and isinstance(value, float)]
        return wrong, {name: sum(answer[name] for answer in answers) / len(answers) for name in numbers}

    def _ask(self, children: Sequence[Child], request: dict[str, Any]) -> list[dict[str, Any]]:
        for child in children:
            ask(child, request)
        return self._processes.answers(children, SILENCE)
