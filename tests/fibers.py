"""Threads that run one at a time, where a scheduler says, in a time that only it lets pass.

Code that blocks is driven by one thread of the test: `Scheduler.resume` runs a fiber until it waits again. In the
modules of `patched` locks, events, threads and clocks are those of the scheduler. A lock that is never released is then
a fiber that never goes on, and no test that hangs.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

TIMEOUT_MAX: Final = threading.TIMEOUT_MAX


class Killed(BaseException):
    """The end of a fiber of a process that has died."""


_STRANGER_SECONDS: Final = 0.1
"""Real seconds for which a thread waits that is no fiber."""


class Fiber:
    """A thread that runs while the scheduler waits for it.

    Attributes:
        owner: the process that it is a thread of.
        error: what ended it, if it did not return.
        is_over: true once it has ended.
    """

    def __init__(self, scheduler: Scheduler, body: Callable[[], object], owner: object) -> None:
        self.owner = owner
        self.error: BaseException | None = None
        self.is_over = self.is_killed = False
        self.face: object = self
        self.ready: Callable[[], bool] = lambda: True
        self.until = math.inf
        self.go = threading.Lock()
        self.go.acquire()
        self._scheduler, self._body = scheduler, body
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.is_killed:
                self._body()
        except Killed:
            pass
        except BaseException as error:  # it is the test's to judge
            self.error = error
        self.is_over = True
        self._scheduler.back.release()


class Scheduler:
    """The only one that lets fibers go on, and time pass.

    Args:
        chance: decides where a fiber loses its turn.
        preemption: how probable that is each time that it takes a lock.

    Attributes:
        now: the time, in seconds.
        fibers: all that have not ended.
    """

    def __init__(self, chance: random.Random, preemption: float = 0.0) -> None:
        self.now = 0.0
        self.fibers: list[Fiber] = []
        self.back = threading.Lock()
        self.back.acquire()
        self._chance, self._preemption = chance, preemption
        self._current: Fiber | None = None
        self._test = threading.current_thread()

    @property
    def owner(self) -> object:
        """The process of the fiber that runs; None for the test itself."""
        return None if self._current is None else self._current.owner

    @property
    def current(self) -> Fiber | None:
        """The fiber that runs."""
        return self._current

    def spawn(self, body: Callable[[], object], owner: object = None) -> Fiber:
        """Make a fiber of ``owner``, or else of the process that runs."""
        fiber = Fiber(self, body, self.owner if owner is None else owner)
        self.fibers.append(fiber)
        return fiber

    def runnable(self) -> list[Fiber]:
        """Return the fibers that can go on."""
        return [fiber for fiber in self.fibers if fiber.until <= self.now or fiber.ready()]

    def next_deadline(self) -> float:
        """Return when the first fiber goes on by itself."""
        return min((fiber.until for fiber in self.fibers), default=math.inf)

    def resume(self, fiber: Fiber) -> None:
        """Let a fiber run until it waits, or has ended. Raise the error that ended it."""
        before, self._current = self._current, fiber
        fiber.go.release()
        self.back.acquire()
        self._current = before
        if fiber.is_over:
            self.fibers.remove(fiber)
            fiber.thread.join()
            if fiber.error is not None:
                raise fiber.error

    def pause(self, ready: Callable[[], bool] = lambda: True, seconds: float = math.inf) -> bool:
        """Wait, as the fiber that runs, until ``ready()``, for so many seconds at most. Return whether it is."""
        fiber = self._current
        if fiber is None or fiber.thread is not threading.current_thread():
            self._check_stranger(seconds)
            return ready()
        if fiber.is_killed:
            raise Killed
        fiber.ready, fiber.until = ready, self.now + seconds
        self.back.release()
        fiber.go.acquire()
        if fiber.is_killed:
            raise Killed
        return ready()

    def _check_stranger(self, seconds: float) -> None:
        """Let a thread wait that is no fiber: an earlier test of this process has left it. End a fiber that is killed.

        Raises:
            AssertionError: the test itself waits.
        """
        here = threading.current_thread()
        assert here is not self._test, "the test itself cannot wait"
        if any(fiber.thread is here for fiber in self.fibers):
            raise Killed
        time.sleep(min(seconds, _STRANGER_SECONDS))

    def preempt(self) -> None:
        """Let others run first, now and then."""
        if self._preemption and self._current is not None and self._chance.random() < self._preemption:
            self.pause()

    def kill(self, owner: object) -> None:
        """End all fibers of a process, where they are."""
        for fiber in [fiber for fiber in self.fibers if fiber.owner is owner]:
            self._end(fiber)

    def _end(self, fiber: Fiber) -> None:
        fiber.is_killed = True
        while not fiber.is_over:
            fiber.go.release()
            self.back.acquire()
        self.fibers.remove(fiber)
        fiber.thread.join()

    def close(self) -> None:
        """End all fibers."""
        while self.fibers:
            self._end(self.fibers[-1])


class Lock:
    """A lock of fibers."""

    def __init__(self) -> None:
        self.is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, if need be when it is free."""
        scheduler = _the()
        if self.is_held:
            if not blocking:
                return False
            scheduler.pause(lambda: not self.is_held, math.inf if timeout < 0 else timeout)
            if self.is_held:
                return False
        elif blocking:
            scheduler.preempt()
            if self.is_held:
                scheduler.pause(lambda: not self.is_held)
        self.is_held = True
        return True

    def release(self) -> None:
        """Release it."""
        assert self.is_held, "a lock is released that no fiber holds"
        self.is_held = False

    def locked(self) -> bool:
        """Tell whether it is held."""
        return self.is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that the fiber which holds it may take once more."""

    def __init__(self) -> None:
        super().__init__()
        self._holder: Fiber | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        current = _the().current
        if not (self.is_held and self._holder is current) and not super().acquire(blocking, timeout):
            return False
        self._holder, self._count = current, self._count + 1
        return True

    def release(self) -> None:
        """Release it, if it was not taken more than once."""
        self._count -= 1
        if not self._count:
            super().release()


class Event:
    """An event of fibers."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set it."""
        self._is_set = True

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def clear(self) -> None:
        """Clear it."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        if not self._is_set:
            _the().pause(lambda: self._is_set, math.inf if timeout is None else timeout)
        return self._is_set


class Condition(Lock):
    """A condition of fibers. No fiber has to be notified: a fiber that waits looks by itself."""

    def wait_for(self, true: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``true()``."""
        self.release()
        _the().pause(true, timeout)
        self.acquire()
        return true()

    def notify_all(self) -> None:
        """Do nothing."""


class Thread:
    """A thread that is a fiber of the process that runs."""

    def __init__(
        self, target: Callable[..., object], args: Sequence[Any] = (), name: str = "", daemon: bool = False
    ) -> None:
        del name, daemon
        self._body = lambda: target(*args)
        self._fiber: Fiber | None = None

    def start(self) -> None:
        """Begin."""
        self._fiber = _the().spawn(self._body)
        self._fiber.face = self

    def is_alive(self) -> bool:
        """Tell whether it has begun, and not ended."""
        return self._fiber is not None and not self._fiber.is_over

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        _the().pause(lambda: not self.is_alive(), math.inf if timeout is None else timeout)


class VirtualThreading:
    """Functions of `threading` that modules use."""

    Lock, RLock, Event, Condition, Thread, TIMEOUT_MAX = Lock, RLock, Event, Condition, Thread, TIMEOUT_MAX

    @staticmethod
    def current_thread() -> object:
        """Return the thread that runs."""
        current = _the().current
        return None if current is None else current.face


class VirtualTime:
    """Functions of `time` that modules use."""

    @staticmethod
    def monotonic() -> float:
        """Return the time."""
        return _the().now

    @staticmethod
    def sleep(seconds: float) -> None:
        """Let so much time pass."""
        _the().pause(lambda: False, seconds)


_running: list[Scheduler] = []


def _the() -> Scheduler:
    return _running[-1]


@contextmanager
def driving(scheduler: Scheduler) -> Iterator[None]:
    """Give the patched modules the locks, threads and times of ``scheduler``. Then end its fibers."""
    _running.append(scheduler)
    try:
        yield
    finally:
        try:
            scheduler.close()
        finally:
            _running.pop()


@contextmanager
def patched(modules: Sequence[str]) -> Iterator[pytest.MonkeyPatch]:
    """Give these modules the fibers' locks, threads and times."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(f"{module}.threading", VirtualThreading, raising=False)
            patch.setattr(f"{module}.time", VirtualTime, raising=False)
        yield patch
