"""Communicators: torch process groups of the members of one epoch, which end with it.

Members find each other in a store that one of them keeps (`gradserver.worker.meeting`). NCCL moves tensors of CUDA
devices, gloo those of the CPU. A communicator belongs to no default group of torch: a script's own `torch.distributed`
is not touched.

    state      event                                   next       what happens
    ─────────  ──────────────────────────────────────  ─────────  ──────────────────────────────────────────────────
    (none)     the first direct round of an epoch      FORMING    a thread looks for the other members
    FORMING    all are there                           READY      reductions go through it
    FORMING    interrupted, an error, or too late      GIVEN UP   the thread ends by itself
    READY      a reduction fails, or is interrupted    GIVEN UP   NCCL aborts; gloo's threads end by themselves
    READY      the epoch ends, or the round was void   GIVEN UP   the same

Gloo can end no reduction that waits for a member which is stopped, and its sockets stay open. Then its threads wait
for `_STUCK_SECONDS`, and write to memory that nothing else uses any more. NCCL kernels end when they are aborted. All
communicators of a process are aborted together: one by one, they can wait for each other (pytorch#119797).

On a CUDA device a stream of this module waits for NCCL, and neither a thread nor the stream of the computation does:
backward goes on beside a reduction.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed

from gradserver.protocol.errors import BackendUnavailableError, GradServerError
from gradserver.protocol.exchange import Op
from gradserver.worker.background import in_background
from gradserver.worker.devices.cuda import open_device
from gradserver.worker.devices.device import Device, Stream
from gradserver.worker.meeting import store_at

log = logging.getLogger("gradserver")

_C10D: Any = torch._C._distributed_c10d  # AllgatherOptions are nowhere else
dist: Any = distributed  # torch has not typed its stores and process groups

_STUCK_SECONDS: Final = 60.0
"""Seconds after which gloo gives a reduction up by itself: long after this module has."""
_OPS: Final[dict[Op, Any]] = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}
_SETTINGS: Final = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Settings of a process group with NCCL, which torch reads when it makes one.

From torch 2.6 on the first one leaves out the watchdog: deadlines are the coordinator's. A watchdog that sees an error
holds a lock for a minute, which the next reduction needs. It also has the watchdog of a script's own group end the
process. The other settings keep those of an older torch from that.
"""
_settings_lock = threading.Lock()


@contextmanager
def _with_settings() -> Iterator[None]:
    """Set torch's settings in the body, and no longer: a script's own groups have its own ones."""
    with _settings_lock:
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class Signal:
    """A wake-up for the thread that waits for reductions: one is done, or there is nothing to wait for any more.

    Attributes:
        error: why there is nothing to wait for; None if there is.
    """

    def __init__(self) -> None:
        self.error: GradServerError | None = None
        self._event = threading.Event()
        self._heed: Callable[[], None] | None = None

    def on_interrupt(self, heed: Callable[[], None]) -> None:
        """Call ``heed``, in a thread of its own, when the wait is interrupted: what waits may not hear of it else."""
        self._heed = heed
        if self.error is not None:
            self._start(heed)

    def interrupt(self, error: GradServerError) -> None:
        """End the wait with ``error``. The first one counts."""
        if self.error is not None:
            return
        self.error = error
        self._event.set()
        if self._heed is not None:
            self._start(self._heed)

    def wake(self) -> None:
        """Have the waiting thread look again."""
        self._event.set()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``done()``, or an interrupt. Return false if neither came within ``timeout`` seconds."""
        while not done() and self.error is None:
            if not self._event.wait(timeout):
                return False
            self._event.clear()
        return True

    def _start(self, heed: Callable[[], None]) -> None:
        in_background(heed, "abort")


class _Queue(NamedTuple):
    """A device with a stream that waits for reductions."""

    device: Device
    stream: Stream


class Reduction:
    """A reduction or broadcast that is under way. ``queue``: None on the CPU."""

    def __init__(self, work: Any, tensor: Tensor, signal: Signal, queue: _Queue | None = None) -> None:
        self._work, self._tensor, self._signal = work, tensor, signal
        self._event: Any = None
        self._is_done = False
        if queue is None:
            return
        queue.device.run(work.synchronize, queue.stream)
        self._event = queue.device.new_event()
        queue.stream.record_event(self._event)
        # The tensor may be freed before NCCL has ended, when a round is void.
        queue.device.keep(tensor, queue.stream)

    def wait(self, timeout: float) -> None:
        """Wait until the result is in the tensor, for all streams of a device.

        Raises:
            GradServerError: what interrupted the wait.
            RuntimeError: the reduction failed, as torch says it.
            TimeoutError: it is not done in time.
        """
        work = self._work
        if work is None:
            raise _given_up()
        if self._event is not None:
            self._wait_for_event(timeout)
        else:
            self._wait_for_gloo(work, timeout)
        if self._is_done:
            work.wait()  # raises what made it fail
        elif self._signal.error is not None:
            raise self._signal.error.again()

    def _wait_for_gloo(self, work: Any, timeout: float) -> None:
        """Wait until gloo is done. Its future says so before ``is_completed`` is true.

        Most reductions are done when they are waited for. The others alone call back: Python in a thread of gloo would
        take the interpreter's lock from the computation.
        """
        future = work.get_future()
        if not future.done():
            future.add_done_callback(lambda _: self._signal.wake())
            if not self._signal.wait_until(future.done, timeout):
                raise TimeoutError(f"a reduction is not done after {timeout:g} s")
        self._is_done = future.done()

    def give_up(self) -> None:
        """Free the connections, which a reduction of gloo keeps open as long as there is anything that refers to it.

        The other members' reductions fail then, instead of waiting for this member until their time is up.
        """
        self._work = None

    def _wait_for_event(self, timeout: float) -> None:
        """Wait for the device. What interrupts the wait aborts NCCL, and so ends it."""
        if not self._event.query():
            late = BackendUnavailableError(f"a reduction is not done after {timeout:g} s")
            alarm = threading.Timer(timeout, self._signal.interrupt, [late])
            alarm.daemon = True
            alarm.start()
            try:
                self._event.synchronize()
            finally:
                alarm.cancel()
        self._is_done = self._signal.error is None


class Communicator:
    """The process groups of one epoch's members: one for each kind of device that the module's buckets are on.

    Args:
        store: address of the store, ``host:port`` or ``host:folder``.
        name: what this communicator is called there: no other one has the name.
        rank: this member's.
        world: number of members.
        devices: devices of the buckets.
        host: this host's address, as the others reach it; empty for what its name stands for.
    """

    def __init__(
        self, store: str, name: str, rank: int, world: int, devices: Iterable[torch.device], host: str
    ) -> None:
        self._address, self._name, self._rank, self._world = store, name, rank, world
        self._devices: dict[str, list[torch.device]] = {}
        self._reductions: weakref.WeakSet[Reduction] = weakref.WeakSet()
        """Reductions that anything refers to."""
        for device in sorted(set(devices), key=lambda one: (one.type, one.index or 0)):
            self._devices.setdefault(device.type, []).append(device)
        self._queues: dict[torch.device, _Queue | None] = {}
        self._host = host
        self._begun: dict[str, Any] = {}
        """Groups that are being formed."""
        self._groups: dict[str, Any] = {}
        self._given_up = False
        self._lock = threading.Lock()
        self._calling = threading.Lock()
        """Held during a call of a group. If the group is given up meanwhile, the caller must not be the last to have
        it: gloo's destructor would run in its thread."""
        self.failed: BaseException | None = None
        """Reason for which it could not be formed."""

    def form(self, signal: Signal, timeout: float) -> None:
        """Find the other members, within ``timeout`` seconds.

        Raises:
            GradServerError: what interrupted the wait.
            BackendUnavailableError: the members did not find each other. The error says why.
        """
        in_background(self._form, "rendezvous", signal, timeout)
        came = signal.wait_until(lambda: len(self._groups) == len(self._devices) or self.failed is not None, timeout)
        if len(self._groups) == len(self._devices):
            return
        if signal.error is not None:
            raise signal.error.again()
        why = f"{type(self.failed).__name__}: {self.failed}" if came else f"nothing came within {timeout:g} s"
        raise BackendUnavailableError(
            f"the {self._world} members could not connect to each other for direct reductions through the store at "
            f"{self._address}: {why}"
        )

    def _form(self, signal: Signal, timeout: float) -> None:
        try:
            limit = timedelta(seconds=timeout)
            store = store_at(self._address, self._name, limit)
            for kind in self._devices:
                self._begun[kind] = made = self._group(kind, store, limit)
                self._connect(kind, made)
            with self._lock:
                self._groups = dict(self._begun)
                given_up = self._given_up
            if given_up:
                self.give_up()
        except Exception as error:  # torch raises its own kinds, and the thread that waits is to have any of them
            self.failed = error
        signal.wake()

    def _group(self, kind: str, store: Any, limit: timedelta) -> Any:
        named = dist.PrefixStore(f"{self._name}/{kind}", store)
        if kind == "cuda":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(days=365)
            with _with_settings():
                return nccl(named, self._rank, self._world, options)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        if self._host:
            options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = max(limit, timedelta(seconds=_STUCK_SECONDS))
        return gloo(named, self._rank, self._world, options)

    def _connect(self, kind: str, made: Any) -> None:
        """Connect NCCL now, and not in the first round: for each device, in the same order at all members."""
        if kind == "cuda":
            for device in self._devices[kind]:
                made.allreduce([torch.zeros(1, device=device)]).wait()

    def part(self, tensor: Tensor) -> Tensor:
        """Return this member's part of a one-dimensional tensor, which is shared out evenly."""
        begin, end = (tensor.numel() * place // self._world for place in (self._rank, self._rank + 1))
        return tensor[begin:end]

    def all_reduce(self, tensor: Tensor, op: Op, signal: Signal) -> Reduction:
        """Begin to replace ``tensor`` by its combination over all members."""
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._begin("allreduce", tensor, tensor, options, signal)

    def broadcast(self, tensor: Tensor, rank: int, signal: Signal) -> Reduction:
        """Begin to replace ``tensor`` by that of ``rank``."""
        options = dist.BroadcastOptions()
        options.rootRank = rank
        return self._begin("broadcast", tensor, tensor.view(torch.uint8), options, signal)  # NCCL knows not all types

    def reduce(self, tensor: Tensor, rank: int, signal: Signal) -> Reduction:
        """Begin to replace the tensor of ``rank`` by the sum over all members. The others' are of no use after that."""
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = _OPS[Op.SUM], rank
        return self._begin("reduce", tensor, tensor, options, signal)

    def all_gather(self, rows: Tensor, tensor: Tensor, signal: Signal) -> Reduction:
        """Begin to put every member's ``tensor`` into ``rows``, one behind the other."""
        work = self._call("_allgather_base", tensor, rows, tensor, _C10D.AllgatherOptions())
        return self._reduction(work, rows, signal)

    def all_to_all(self, rows: Tensor, tensor: Tensor, signal: Signal) -> Reduction:
        """Begin to give each member its part of ``tensor``, and to put their parts for this one into ``rows``."""
        work = self._call("alltoall_base", tensor, rows, tensor, [], [], dist.AllToAllOptions())
        return self._reduction(work, rows, signal)

    def gather(self, tensor: Tensor, rows: list[Tensor] | None, rank: int, signal: Signal) -> Reduction:
        """Begin to put every member's ``tensor`` into the ``rows`` of ``rank``; the others have none."""
        options = dist.GatherOptions()
        options.rootRank = rank
        work = self._call("gather", tensor, [] if rows is None else [rows], [tensor], options)
        return self._reduction(work, rows[0] if rows else tensor, signal)

    def scatter(self, tensor: Tensor, parts: list[Tensor] | None, rank: int, signal: Signal) -> Reduction:
        """Begin to replace ``tensor`` by the one of the ``parts`` that ``rank`` has for this member."""
        options = dist.ScatterOptions()
        options.rootRank = rank
        work = self._call("scatter", tensor, [tensor], [] if parts is None else [parts], options)
        return self._reduction(work, tensor, signal)

    def send(self, tensor: Tensor, rank: int, number: int) -> object:
        """Begin to send ``tensor`` to ``rank`` under a ``number`` of 31 bits. Keep what is returned meanwhile."""
        work: object = self._call("send", tensor, [tensor], rank, number)
        return work

    def receive(self, tensor: Tensor, rank: int, number: int) -> Any:
        """Begin to receive ``tensor`` from ``rank``. A wait for the work that is returned says when it is there."""
        return self._call("recv", tensor, [tensor], rank, number)

    def _begin(self, what: str, tensor: Tensor, sent: Tensor, options: Any, signal: Signal) -> Reduction:
        work = self._call(what, tensor, [sent], options)
        return self._reduction(work, tensor, signal)

    def _reduction(self, work: Any, tensor: Tensor, signal: Signal) -> Reduction:
        begun = Reduction(work, tensor, signal, self._queue(tensor.device))
        with self._lock:
            self._reductions.add(begun)
            if self._given_up:  # meanwhile, by another thread
                begun.give_up()
        return begun

    def _call(self, what: str, tensor: Tensor, *arguments: Any) -> Any:
        """Call method ``what`` of the group for the device of ``tensor``."""
        with self._calling:
            try:
                call = getattr(self._groups[tensor.device.type], what)
            except KeyError:  # another thread has given up
                raise _given_up() from None
            try:
                return call(*arguments)
            finally:
                del call  # it refers to the group

    def _queue(self, device: torch.device) -> _Queue | None:
        if device not in self._queues:
            opened = open_device(device)
            self._queues[device] = None if opened is None else _Queue(opened, opened.new_stream())
        return self._queues[device]

    def give_up(self) -> None:
        """End all that is under way, and free the communicators. A second call does nothing."""
        with self._lock:
            groups = {**self._begun, **self._groups}
            self._groups, self._begun, self._given_up = {}, {}, True
            for begun in self._reductions:
                begun.give_up()
        # NCCL may take its time. Gloo's destructor waits for its threads, which may wait for a member that is stopped.
        # Nothing here refers to a group by itself, so that destructors run in the thread that clears.
        if groups:
            in_background(_end, "give-up", groups, self._calling)


def _given_up() -> RuntimeError:
    return RuntimeError("the communicators of this epoch were given up")


def _end(groups: dict[str, Any], calling: threading.Lock) -> None:
    """Abort NCCL, and let the destructors of all run, when no thread calls any of them."""
    if "cuda" in groups:
        with suppress(RuntimeError):
            abort = getattr(groups["cuda"], "abort", None) or groups["cuda"]._shutdown  # its name before torch 2.6
            abort()
            del abort
    with calling:
        pass
    groups.clear()
