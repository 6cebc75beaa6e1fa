"""Copies of one device's buckets to the host and back, piece by piece, each as soon as it can be made.

    thread        compute stream       stream outbound        stream inbound
    ──────────    ──────────────────   ────────────────────   ───────────────────────
    autograd      backward, block 3
    autograd      event ───────────►   piece 0, event
    outbound      backward, block 2    piece 1, event         waits for the event of piece 0, and pushes that much
    outbound      …                    piece 2, event         … of piece 1, and pushes more
    a reader                                                  a result of piece 0 was written: tells
    inbound                                                   piece 0
    the caller    waits for an event ◄─────────────────────   behind the last piece

There are two streams, because a copy to the device must not wait for one to the host, which waits for computation. Two
threads have one each. The outbound thread waits for events, so that none of autograd's does. No thread waits for a
stream or a device as a whole.

What makes each order right:

- A piece is copied to the host behind all that had been queued, when its bucket was pushed, on each stream that wrote
  to the bucket.
- A piece is pushed when the host has seen its event. So its bytes are there, and nothing else writes to them.
- A result is copied to the device after that, so when the device has read the piece and nothing writes to it.
- The caller's stream waits for the last copy to the device. So whatever it computes has the result. The next gradient
  is computed behind that, and its copy to the host comes behind the gradient. So host memory is read before it is
  written again.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from torch import Tensor

from gradserver.protocol.errors import ClosedError, DeadlineError
from gradserver.worker.client import Worker
from gradserver.worker.devices.device import Device, Event, Stream
from gradserver.worker.devices.memory import HostMemory
from gradserver.worker.devices.staged import Staged, stage, takes_payloads
from gradserver.worker.handle import Handle
from gradserver.worker.member.learner import Stage
from gradserver.worker.member.progress import Progress

_End = None
"""The last task of a thread."""


@dataclass(eq=False)
class _Shipment:
    """One bucket of one round, on its way to the coordinator.

    Attributes:
        number: the bucket's number in the group's plan.
        ready: events behind all that writes to the bucket.
        copies: true if its elements are copied to the host.
        gradual: true if each piece is pushed when it is there; else all of them together.
        progress: what of it can be sent.
        handle: the handle of the push, which is done when all pieces are pushed.
        done: pieces that are on the host.
    """

    staged: Staged
    number: int
    weight: float
    present: bool
    ready: list[Event]
    copies: bool
    gradual: bool
    progress: Progress
    handle: Future[Handle] = field(default_factory=Future)
    done: int = 0
    pushed: Handle | None = None


class _Outbound:
    """The thread and the stream of copies to the host."""

    def __init__(self, worker: Worker, device: Device, inbound: _Inbound) -> None:
        self.stream: Final = device.new_stream()
        self._worker = worker
        self._device = device
        self._inbound = inbound
        self._tasks: SimpleQueue[_Shipment | None] = SimpleQueue()
        self._under_way: deque[_Shipment] = deque()
        self._is_open = True
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=f"gradserver-outbound-{device.name}", daemon=True).start()

    def ship(self, shipment: _Shipment) -> None:
        """Copy and push a bucket."""
        with self._lock:
            if self._is_open:
                self._tasks.put(shipment)
                return
        shipment.handle.set_exception(ClosedError("the worker was closed"))

    def close(self) -> None:
        """End both threads when all is copied that was begun."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._tasks.put(_End)

    def _run(self) -> None:
        self._device.use()
        goes_on = True
        while goes_on or self._under_way:
            while goes_on and (not self._under_way or not self._tasks.empty()):
                goes_on = self._take(self._tasks.get())
            if self._under_way and self._step(self._under_way[0]):
                self._under_way.popleft()
        self._inbound.close(self.stream)

    def _take(self, shipment: _Shipment | None) -> bool:
        """Queue a bucket's copies. Return false behind the last one."""
        if shipment is None:
            return False
        staged = shipment.staged
        try:
            for event in shipment.ready:
                self.stream.wait_event(event)
            for (start, stop), event in zip(staged.pieces, staged.events, strict=True):
                if shipment.copies:
                    staged.copy_out(self._device, self.stream, start, stop)
                self.stream.record_event(event)
        except BaseException as error:
            shipment.handle.set_exception(error)
        else:
            self._under_way.append(shipment)
        return True

    def _step(self, shipment: _Shipment) -> bool:
        """Wait until one more piece is there, and push it. Return true behind the last one, or an error."""
        staged, worker = shipment.staged, self._worker
        try:
            staged.events[shipment.done].synchronize()
            shipment.done += 1
            is_last = shipment.done == len(staged.pieces)
            nbytes = staged.pieces[shipment.done - 1][1] * staged.flat.element_size()
            if shipment.pushed is not None:
                worker.advance(shipment.progress, nbytes)
            elif shipment.gradual or is_last:
                shipment.progress.advance(nbytes)
                shipment.pushed = worker.push(
                    shipment.number,
                    staged.host,
                    weight=shipment.weight,
                    present=shipment.present,
                    progress=shipment.progress,
                )
            if is_last:
                assert shipment.pushed is not None
                shipment.handle.set_result(shipment.pushed)
            return is_last
        except BaseException as error:
            shipment.handle.set_exception(error)
            return True


_Arrival = tuple[Staged, int, int]
"""Elements of a bucket's result that are on the host."""


class _Inbound:
    """The thread and the stream of copies to the device."""

    def __init__(self, device: Device, memory: HostMemory) -> None:
        self.stream: Final = device.new_stream()
        self._device = device
        self._memory = memory
        self._tasks: SimpleQueue[_Arrival | Future[Event] | None] = SimpleQueue()
        self._is_open = True
        self._last: Stream | None = None
        """The other stream, once nothing more comes."""
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=f"gradserver-inbound-{device.name}", daemon=True).start()

    def arrived(self, staged: Staged, start: int, stop: int) -> None:
        """Copy elements of a result to the device. Any thread may call this, and does not wait."""
        self._tasks.put((staged, start, stop))

    def behind(self) -> Future[Event]:
        """Return an event behind all copies to the device so far, when they are queued."""
        queued: Future[Event] = Future()
        with self._lock:
            if self._is_open:
                self._tasks.put(queued)
                return queued
        queued.set_exception(ClosedError("the worker was closed"))
        return queued

    def close(self, other: Stream) -> None:
        """End the thread, and unlock the memory of the host when this stream and the ``other`` are done with it."""
        with self._lock:
            self._is_open = False
            self._last = other
            self._tasks.put(_End)

    def _run(self) -> None:
        self._device.use()
        while self._carry_out([self._tasks.get(), *self._waiting()]):
            pass
        assert self._last is not None
        with suppress(RuntimeError):  # a device that has failed copies nothing more
            for stream in (self.stream, self._last):
                done = self._device.new_event()
                stream.record_event(done)
                done.synchronize()
        self._memory.release()

    def _waiting(self) -> Iterator[_Arrival | Future[Event] | None]:
        while not self._tasks.empty():
            yield self._tasks.get()

    def _carry_out(self, tasks: Iterable[_Arrival | Future[Event] | None]) -> bool:
        """Queue copies. Return false behind the last task."""
        for task in _merged(tasks):
            if task is None:
                return False
            if isinstance(task, Future):
                self._mark(task)
                continue
            staged, start, stop = task
            try:
                staged.copy_back(self._device, self.stream, start, stop)
            except BaseException as error:
                self._error = error
        return True

    def _mark(self, queued: Future[Event]) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            event = self._device.new_event()
            self.stream.record_event(event)
        except BaseException as raised:
            queued.set_exception(raised)
        else:
            queued.set_result(event)


def _merged(tasks: Iterable[_Arrival | Future[Event] | None]) -> Iterator[_Arrival | Future[Event] | None]:
    """Yield tasks, with neighbouring elements of one bucket as one."""
    last: _Arrival | None = None
    for task in tasks:
        if last is not None:
            if isinstance(task, tuple) and task[0] is last[0] and task[1] == last[2]:
                last = (last[0], last[1], task[2])
                continue
            yield last
        last = task if isinstance(task, tuple) else None
        if last is None:
            yield task
    if last is not None:
        yield last


class Copier:
    """The exchange of one device's buckets by way of the host.

    Args:
        worker: worker that exchanges them.
        first: number of bucket 0 in the group's plan.
        device: the device.
    """

    def __init__(self, worker: Worker, first: int, device: Device) -> None:
        self._worker = worker
        self._first = first
        self._device = device
        self._memory = HostMemory(device, lambda nbytes: worker._session.traffic.channel.empty(nbytes))
        self._inbound = _Inbound(device, self._memory)
        self._outbound = _Outbound(worker, device, self._inbound)
        self._buckets: dict[int, Staged] = {}
        self._writers: dict[int, list[Stream]] = {}
        """Streams that have written to each bucket since it was pushed."""
        weakref.finalize(self, self._outbound.close).atexit = False
        worker.closes(self._outbound)

    @property
    def is_captured(self) -> bool:
        """True if the calling thread's computation is captured, so that no gradient is there to be exchanged."""
        return self._device.captures()

    def note_writer(self, index: int) -> None:
        """Note that the calling thread's stream writes to bucket ``index``."""
        stream, writers = self._device.current_stream(), self._writers.setdefault(index, [])
        if stream not in writers:
            writers.append(stream)

    def push(self, index: int, flat: Tensor, weight: float, present: bool) -> Future[Handle]:
        """Contribute ``flat`` when all that was queued before has written to it. The result is the push's handle."""
        staged, number = self._buckets.get(index), self._first + index
        if staged is None or staged.flat is not flat or staged.has_payloads != takes_payloads(self._worker, number):
            staged = self._buckets[index] = stage(self._worker, number, flat, self._device, self._memory, staged)
            for tensor in staged.on_device:
                for stream in (self._outbound.stream, self._inbound.stream):
                    self._device.keep(tensor, stream)
        self.note_writer(index)
        ready = [self._device.new_event() for _ in self._writers[index]]
        for event, stream in zip(ready, self._writers.pop(index), strict=True):
            stream.record_event(event)
        # A result can leave elements as they are. So the host needs them even if they are not given.
        copies = (present and weight > 0) or not (staged.mirrors or staged.has_payloads)
        staged.mirrors = True
        inbound, itemsize = self._inbound, flat.element_size()
        progress = Progress(
            lambda start, stop: inbound.arrived(staged, start // itemsize, stop // itemsize), staged.has_payloads
        )
        # Where this worker can be late, the result of a piece can come before the piece is copied: see `Stragglers`.
        session = self._worker._session
        gradual = present and weight > 0 and session.stage is Stage.MEMBER and not session.membership.late
        shipment = _Shipment(staged, number, weight, present, ready, copies, gradual, progress)
        self._outbound.ship(shipment)
        return shipment.handle

    def forget(self, index: int) -> None:
        """Copy bucket ``index`` anew when it is pushed next, whether it is given or not."""
        if (staged := self._buckets.get(index)) is not None:
            staged.mirrors = False

    def join(self, timeout: float) -> None:
        """Let the calling thread's stream wait until all results that have come are on the device."""
        try:
            event = self._inbound.behind().result(timeout)
        except FutureTimeoutError:
            raise DeadlineError(f"copies to {self._device.name} were not queued within {timeout:g} s") from None
        self._device.current_stream().wait_event(event)

    def close(self) -> None:
        """Free the memory of the host when all copies are done. A second call does nothing."""
        self._outbound.close()
