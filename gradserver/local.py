"""A cluster inside this process: one thread for each worker, the real coordinator, no port."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, NamedTuple, ParamSpec, Self, TypeVar

from gradserver.engine import Engine
from gradserver.engine.control.watching import check_policy
from gradserver.engine.policy import Policy, in_mode, mode_of, on_non_finite, on_outlier
from gradserver.protocol.audits import audit_of
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel, Outlet
from gradserver.protocol.errors import (
    ClosedError,
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    raised,
)
from gradserver.protocol.in_process import in_process_pair
from gradserver.protocol.limits import BACKLOG_BYTES, CREDIT_BYTES
from gradserver.protocol.means import mean_of
from gradserver.protocol.messages import Join, Message, Split
from gradserver.protocol.nearest import names_keywords
from gradserver.protocol.offers import THREAD
from gradserver.runtime import Runtime
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.session import Session

_LOOK_AGAIN_SECONDS: Final = 0.05
"""Interval of looks at a worker that has returned, has exchanges under way, and that others wait for."""

P = ParamSpec("P")
T = TypeVar("T")


class LocalCluster:
    """Cluster of ``world_size`` workers, as threads of this process, which exchange by pointer through a coordinator.

    The engine, the reduction and the worker are those of a real cluster. Only the channel differs.

    For example:

        with gradserver.LocalCluster(world_size=4) as cluster:
            ranks = cluster.run(lambda worker: worker.rank)     # [0, 1, 2, 3]

    With ``elastic`` the others continue when a worker dies. `kill` simulates a death:

        with gradserver.LocalCluster(4, elastic=(1, 8)) as cluster:
            cluster.run(train)                  # in which, say, rank 2 calls cluster.kill(2), and rank 0 cluster.add()

    Args:
        world_size: number of workers.
        elastic: minimum and maximum number of workers of an elastic group. None if all are needed.
        rejoin_for: seconds that a group with fewer than the minimum waits for another worker. None for 0 without
            ``elastic``, and for ``timeout`` with it.
        quorum: number or share (``"75%"``) of the workers that a round waits for. None for all.
        backup: number of workers that a round does not wait for, instead of ``quorum``.
        grace: seconds that the others have after a quorum has given everything. The default is 0.5.
        late: ``"keep"`` (default) to add a late gradient to the next one of its worker, ``"drop"`` to forget it.
        mode: ``"bounded"`` or ``"async"`` for rounds that do not wait for all workers, see `Worker.request_round`. One
            begins when ``quorum`` workers have requested it: by default half of them, or one.
        staleness: most updates by which a gradient may be late; needed with ``"bounded"``. With ``late="keep"`` the
            most rounds for which it is kept, 12 by default.
        damping: factor of a gradient that is late: ``"inverse"`` for 1 / (1 + staleness).
        timeout: seconds that one exchange may wait for the others.
        credit: bytes that one worker may have in flight.
        wire: format in which gradients travel, see `gradserver.connect`. It shows the effect of a codec on a training.
        backlog: bytes of results that a joining worker may leave unread while the others continue. With 0 they wait.
        nonfinite: action on NaN or Inf in a gradient. ``"halt"`` ends the group with an error that names worker, bucket
            and parameter. ``"leave-out"`` leaves that slice of it out of the mean. With ``"skip"`` no worker applies
            the round. ``"propagate"`` passes it on, as torch does, which a GradScaler needs.
        outliers: action on a worker with gradients that are far off those of the others for several rounds.
            ``"report"`` names it. ``"leave-out"`` also evicts it with an OutlierError, which needs ``elastic``.
            ``"halt"`` ends the group.
        mean: rule by which gradients are averaged: ``"plain"``, or a robust one, as ``"median"``, ``"trimmed:0.25"``,
            ``"clipped:1"`` or ``"krum:1"``.
        audit: share of the rounds in which several workers compute the same samples of `DataRanges`, as 0.01, and
            the relative difference of their gradients that is allowed, as ``"0.01:1e-3"``.
    """

    @names_keywords
    def __init__(
        self,
        world_size: int,
        *,
        elastic: tuple[int, int] | None = None,
        rejoin_for: float | None = None,
        quorum: int | str | None = None,
        backup: int = 0,
        grace: float | None = None,
        late: str | None = None,
        mode: Literal["sync", "bounded", "async"] = "sync",
        staleness: int | None = None,
        damping: Literal["none", "inverse"] = "none",
        timeout: float = 60.0,
        credit: int = CREDIT_BYTES,
        wire: str = "fp32",
        backlog: int = BACKLOG_BYTES,
        nonfinite: Literal["halt", "leave-out", "skip", "propagate"] = "halt",
        outliers: Literal["report", "leave-out", "halt"] = "report",
        mean: str = "plain",
        audit: str | float = "off",
    ) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise InvalidArgumentError(f"world_size is a number of workers, not {world_size!r}")
        size = Policy(*elastic) if elastic else Policy.of(world_size)
        chosen, lateness = in_mode(mode_of(mode, staleness, damping), quorum, backup, grace, late, size.maximum)
        policy = dataclasses.replace(size, backlog=backlog, lateness=lateness, rejoin=rejoin_for, mode=chosen)
        rules = mean_of(mean), on_outlier(outliers), audit_of(str(audit))
        policy = dataclasses.replace(policy, mean=rules[0], outliers=rules[1], audit=rules[2])
        policy.check_mean()
        check_policy(policy)
        if not policy.minimum <= world_size <= policy.maximum:
            raise InvalidWorldSizeError(f"a world size of {world_size} for a group of {policy}")
        self._timeout, self._wire = timeout, wire
        self._changes = threading.Lock()
        self._running: _Running | None = None
        self._releasing = threading.Lock()
        self._release_again = False
        self._alarm = Alarm(self._tick)
        self._engine = Engine({"local": policy}, credit, nonfinite=on_non_finite(nonfinite))
        self._coordinator = Runtime(self._engine, self._alarm.set)
        joined = [self._join(f"worker-{rank}", rank, world_size)[0] for rank in range(world_size)]
        self.workers: list[Worker] = [Worker(line.session, wire=wire) for line in joined]
        self._lines = dict(zip(self.workers, joined, strict=True))
        self._bases: weakref.WeakKeyDictionary[Inbox, int] = weakref.WeakKeyDictionary()
        """The worker's own connection, by the inbox of that of a sub-group."""
        self._closed = False
        self._process = os.getpid()

    def run(self, fn: Callable[Concatenate[Worker, P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call ``fn(worker, …)`` in a thread for each worker, and return the results by rank.

        A worker leaves the cluster after its function has returned, when others wait for it. They are told at once.
        In an elastic cluster they continue without it. A worker that no other waits for stays for the next `run`.

        The first error of any worker is raised here, when all have ended. That worker is removed from the cluster, so
        that the others do not wait for it. The result of a killed worker is None, and its error is ignored. Added
        workers call the function too, and their results follow the others'.
        """
        if self._closed:
            raise ClosedError("this LocalCluster is closed")
        running = self._running = _Running(self, lambda worker: fn(worker, *args, **kwargs))
        with self._changes:  # workers that these add come behind them
            for worker in list(self._lines):
                running.start(worker)
        results = running.end()
        self._running = None
        return results

    def add(self, name: str | None = None) -> Worker:
        """Let one more worker join the group. While `run` is in progress, the worker calls its function too.

        Args:
            name: name of the worker. The name of a killed worker brings its rank back. None for a new name.
        """
        with self._changes:
            name = name or f"worker-{len(self.workers)}"
            line, joining = self._join(name, -1, 0)
            try:
                joining.wait()
            except BaseException:
                line.channel.close()
                raise
            worker = Worker(line.session, wire=self._wire)
            self.workers.append(worker)
            self._lines[worker] = line
            if self._running is not None:
                self._running.start(worker)
        return worker

    def kill(self, rank: int) -> None:
        """Kill the worker of this rank, as if its process died. It says no goodbye, and all of its calls fail."""
        found = next((worker for worker in self._lines if worker.rank == rank), None)
        if found is None:
            raise InvalidRankError(f"there is no rank {rank!r} to kill among {len(self._lines)} workers")
        line = self._lines.pop(found)
        line.session.lost(ClosedError("this worker was killed"))
        line.channel.close()

    def snapshot(self) -> dict[str, object]:
        """Return the coordinator's view, as plain JSON values."""
        return self._coordinator.snapshot()

    def close(self) -> None:
        """Close every worker. A second call does nothing. In a forked child, only the parent closes it."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            for worker in self.workers:
                worker.close("the LocalCluster was closed")
            self._alarm.close()
            self._coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, name: str, rank: int, wish: int) -> tuple[_Line, Handle[None]]:
        ours, theirs = in_process_pair(name)
        inbox = Inbox(self._coordinator, theirs, self._release)
        theirs.attach(inbox)
        session = Session(ours, self._timeout)
        line = _Line(session, ours, inbox.connection)
        session.subgroups.grow_by(lambda: self._grow(line))
        joining = session.join(Join("local", name, rank, wish, self._timeout, THREAD))
        return line, joining

    def _grow(self, line: _Line) -> Channel:
        """Return a channel for a sub-group of this worker."""
        ours, theirs = in_process_pair("a sub-group's channel")
        inbox = Inbox(self._coordinator, theirs, self._release, line.connection)
        theirs.attach(inbox)
        self._bases[inbox] = line.connection
        return ours

    def _tick(self) -> float | None:
        self._coordinator.tick()
        self._release()
        return self._coordinator.next_deadline()

    def _release(self) -> None:
        """Let returned workers leave if others wait for them. One thread at a time looks."""
        running = self._running
        if running is None or not running.returned:
            return
        self._release_again = True
        while self._release_again and self._releasing.acquire(blocking=False):
            try:
                self._release_again = False
                bases = {inbox.connection: base for inbox, base in list(self._bases.items())}
                awaited = {bases.get(one, one) for one in self._coordinator.undisturbed(self._awaited)}
                for worker in [one for one in list(running.returned) if self._is_awaited(one, awaited)]:
                    running.returned.discard(worker)
                    worker.close("its function has returned")
            finally:
                self._releasing.release()

    def _awaited(self) -> set[int]:
        """Return connections of members that others wait for, in the group or a sub-group."""
        return {one for name in self._engine.control.groups for one in self._engine.awaited(name)}

    def _is_awaited(self, worker: Worker, awaited: set[int]) -> bool:
        """Return whether others wait for what ``worker`` will never do. Exchanges that it has begun continue."""
        line = self._lines.get(worker)
        if line is None or line.connection not in awaited:
            return False
        if line.session.is_busy:
            self._alarm.set(time.monotonic() + _LOOK_AGAIN_SECONDS)
        return not line.session.is_busy


class _Running:
    """Call of `LocalCluster.run`, with a thread for each worker."""

    def __init__(self, cluster: LocalCluster, work: Callable[[Worker], Any]) -> None:
        self._cluster = cluster
        self._work = work
        self.returned: set[Worker] = set()
        """Workers that are in the cluster after their function has returned."""
        self._threads: list[threading.Thread] = []
        self._results: list[Any] = []
        self._errors: list[BaseException] = []

    def start(self, worker: Worker) -> None:
        """Start a thread for one more worker."""
        index = len(self._results)
        self._results.append(None)
        thread = threading.Thread(target=self._run, args=(index, worker), name=worker.name)
        self._threads.append(thread)
        thread.start()

    def end(self) -> list[Any]:
        """Wait for all threads, and return the results. The first error is raised."""
        for thread in self._threads:  # more may be added meanwhile
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self._results

    def _run(self, index: int, worker: Worker) -> None:
        try:
            self._results[index] = self._work(worker)
            self.returned.add(worker)
            self._cluster._release()
        except BaseException as error:  # raised again, in the caller's thread
            if worker in self._cluster._lines:
                self._errors.append(error)
                worker.abort(raised(error))


class _Line(NamedTuple):
    """Connection of a worker with the coordinator."""

    session: Session
    channel: Channel
    connection: int


class Inbox:
    """Receiver that hands the messages of one channel to the coordinator.

    ``base`` is the worker's own connection, if this is one for a sub-group.
    """

    def __init__(
        self, coordinator: Runtime, channel: Outlet, then: Callable[[], None] = lambda: None, base: int = -1
    ) -> None:
        self._coordinator, self._then, self._base = coordinator, then, base
        self.connection = coordinator.connect(channel)

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Hand over a message of the worker."""
        if type(message) is Split:
            self._coordinator.branch(self.connection, self._base, message)
        else:
            self._coordinator.receive(self.connection, message, payloads)
        self._then()

    def lost(self, error: GradServerError) -> None:
        """Report that the worker was lost."""
        self._coordinator.lost(self.connection, error.message)


class Alarm:
    """Thread that calls ``ring`` at the time last set.

    ``ring`` returns when to call it again, or None.
    """

    def __init__(self, ring: Callable[[], float | None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._at: float | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def set(self, at: float) -> None:
        """Ring at ``at`` on `time.monotonic`'s scale, or earlier if that was set before."""
        with self._changed:
            if self._closed or (self._at is not None and self._at <= at):
                return
            self._at = at
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradserver-alarm", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._at is None or self._at > time.monotonic()):
                    self._changed.wait(None if self._at is None else self._at - time.monotonic())
                if self._closed:
                    return
                self._at = None
            again = self._ring()
            if again is not None:
                self.set(again)
