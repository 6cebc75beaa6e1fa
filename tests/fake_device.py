"""A device with streams that execute on the CPU, each operation as late as its order allows, or at once, or by chance.

A copy that nothing waits for is not made. So a missing wait shows in the elements, and not once in a thousand runs.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gradserver.worker.devices.device import Device

Pace = Literal["late", "at once", "by chance"]


class FakeEvent:
    """A point in a stream: the stream, and how many operations it has done there."""

    def __init__(self) -> None:
        self.point: tuple[FakeStream, int] | None = None

    def synchronize(self) -> None:
        if self.point is not None:
            stream, count = self.point
            stream.run_up_to(count)

    def query(self) -> bool:
        return self.point is None or self.point[0].has_done(self.point[1])


class FakeStream:
    """Operations in order, of which some are done."""

    def __init__(self, device: FakeDevice, pace: Pace) -> None:
        self._device = device
        self._pace = pace
        self._queue: deque[Callable[[], object]] = deque()
        self._queued = self._done = 0

    def enqueue(self, operation: Callable[[], object]) -> None:
        with self._device.mutex:
            self._queue.append(operation)
            self._queued += 1
            if self._pace == "at once" or (self._pace == "by chance" and self._device.chance.random() < 0.3):
                self.run_up_to(self._queued)

    def run_up_to(self, count: int) -> None:
        with self._device.mutex:
            while self._done < count:
                operation = self._queue.popleft()
                operation()
                self._done += 1

    def has_done(self, count: int) -> bool:
        return self._done >= count

    def wait_event(self, event: Any) -> None:
        with self._device.mutex:
            point = event.point  # as it is now: the event may be recorded anew
            if point is not None:
                stream, count = point
                self.enqueue(lambda: stream.run_up_to(count))

    def record_event(self, event: Any) -> object:
        with self._device.mutex:
            event.point = self, self._queued
        return event

    def synchronize(self) -> None:
        self.run_up_to(self._queued)


class FakeDevice:
    """The device. Tensors of the CPU are its tensors.

    Args:
        pace: when the streams of copies execute.
        compute: the stream of the computation, the same for all threads; one that executes at once by default, as the
            CPU does.
        refuses: reason why no pages can be locked; None if they can.
    """

    name = "fake"

    def __init__(
        self, pace: Pace = "late", compute: Pace = "at once", refuses: str | None = None, seed: int = 0
    ) -> None:
        self.mutex = threading.RLock()
        self.chance = random.Random(seed)
        self.compute = FakeStream(self, compute)
        self.refuses = refuses
        self.locked: dict[int, int] = {}
        self.pinned_bytes = 0
        self.is_capturing = False
        self.users = set[int]()
        """Threads that have made it theirs."""
        self.copied = [0, 0]
        """Bytes copied to the host, and to the device."""
        self.hosts: list[tuple[int, int]] = []
        self._pace: Pace = pace

    def use(self) -> None:
        self.users.add(threading.get_ident())

    def new_stream(self) -> FakeStream:
        return FakeStream(self, self._pace)

    def new_event(self) -> FakeEvent:
        return FakeEvent()

    def current_stream(self) -> FakeStream:
        return self.compute

    def captures(self) -> bool:
        return self.is_capturing

    def run(self, work: Callable[[], object], stream: Any) -> None:
        def later() -> None:
            with torch.no_grad():
                work()

        stream.enqueue(later)

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        assert not threading.current_thread().name.startswith("gradserver-") or threading.get_ident() in self.users
        to_device = any(begin <= source.data_ptr() < end for begin, end in self.hosts)
        with self.mutex:
            self.copied[to_device] += source.nbytes

        def run() -> None:
            with torch.no_grad():
                target.copy_(source)

        stream.enqueue(run)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        pass

    def lock(self, memory: Tensor) -> str | None:
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        if self.refuses is not None:
            return self.refuses
        with self.mutex:
            assert begin % 4096 == 0, "pages are locked as a whole"
            overlap = any(begin < address + nbytes and address < end for address, nbytes in self.locked.items())
            assert not overlap, "a page is locked twice"
            self.locked[begin] = memory.nbytes
            self.hosts.append((begin, end))
        return None

    def unlock(self, memory: Tensor) -> None:
        with self.mutex:
            del self.locked[memory.data_ptr()]

    def pinned(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        with self.mutex:
            self.pinned_bytes += nbytes
            self.hosts.append((memory.data_ptr(), memory.data_ptr() + nbytes))
        return memory


def checked(device: FakeDevice) -> Device:
    """Return ``device`` as what it stands for: mypy checks that it has all that a device needs."""
    return device
