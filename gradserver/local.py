"""A cluster inside this process: one thread for each worker, the real coordinator, no port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from gradserver.coordinator import Coordinator
from gradserver.engine import Engine
from protocol.buffer import Buffer
from protocol.channel import Outlet, memory_pair
from protocol.errors import ClosedError, GradServerError, InvalidArgumentError
from protocol.limits import CREDIT_BYTES
from protocol.messages import Join, Message
from worker.client import Worker
from worker.session import Session

P = ParamSpec("P")
T = TypeVar("T")


class LocalCluster:
    """``world_size`` workers as threads of this process, exchanging by pointer through a coordinator.

    The engine, the reduction and the worker are those of a real cluster; only the channel differs.

    Example::

        with gradserver.LocalCluster(world_size=4) as cluster:
            ranks = cluster.run(lambda worker: worker.rank)     # [0, 1, 2, 3]

    Args:
        world_size: number of workers.
        timeout: seconds that any one exchange may wait for the others.
        credit: bytes that one worker may have in flight.
        wire: what gradients travel as, see `gradserver.connect`: to try out what a codec does to a training.
    """

    def __init__(
        self, world_size: int, *, timeout: float = 60.0, credit: int = CREDIT_BYTES, wire: str = "fp32"
    ) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise InvalidArgumentError(f"world_size is a number of workers, not {world_size!r}")
        self._alarm = _Alarm(self._tick)
        self._coordinator = Coordinator(Engine({"local": world_size}, credit), self._alarm.set)
        sessions = [self._join(rank, timeout) for rank in range(world_size)]
        self.workers: list[Worker] = [Worker(session, wire=wire) for session in sessions]
        self._closed = False

    def run(self, fn: Callable[Concatenate[Worker, P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call ``fn(worker, …)`` in a thread for each worker, and return the results by rank.

        The first error that any of them raises is raised here, when all have ended; that worker is
        taken out of the cluster, so that the others do not wait for it.
        """
        if self._closed:
            raise ClosedError("this LocalCluster is closed")
        results: list[Any] = [None] * len(self.workers)
        errors: list[BaseException] = []

        def work(worker: Worker) -> None:
            try:
                results[worker.rank] = fn(worker, *args, **kwargs)
            except BaseException as error:  # raised again, in the caller's thread
                errors.append(error)
                worker.abort(f"it raised {type(error).__name__}: {error}")

        threads = [
            threading.Thread(target=work, args=(worker,), name=f"worker-{worker.rank}") for worker in self.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def snapshot(self) -> dict[str, object]:
        """What the coordinator sees, as plain JSON values."""
        return self._coordinator.snapshot()

    def close(self) -> None:
        """Close every worker; closing twice does nothing."""
        if not self._closed:
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

    def _join(self, rank: int, timeout: float) -> Session:
        ours, theirs = memory_pair(f"worker {rank}")
        theirs.attach(_Inbox(self._coordinator, theirs))
        session = Session(ours, timeout)
        session.join(Join("local", f"worker-{rank}", rank, 0, timeout))
        return session

    def _tick(self) -> float | None:
        self._coordinator.tick()
        return self._coordinator.next_deadline()


class _Inbox:
    """Hands what comes in on one channel to the coordinator."""

    def __init__(self, coordinator: Coordinator, channel: Outlet) -> None:
        self._coordinator = coordinator
        self._connection = coordinator.connect(channel)

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        self._coordinator.receive(self._connection, message, payloads)

    def lost(self, error: GradServerError) -> None:
        self._coordinator.lost(self._connection, error.message)


class _Alarm:
    """Calls ``ring`` at the time last set, from a thread that sleeps until then.

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
