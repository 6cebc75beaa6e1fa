"""Communicators: torch process groups of the members of one epoch, which end with it.

Members find each other in a `torch.distributed.TCPStore` at the member of rank 0. NCCL moves tensors of CUDA devices,
gloo those of the CPU. A communicator belongs to no default group of torch: a script's own `torch.distributed` is not
touched.

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
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, distributed

from gradserver.protocol.errors import BackendUnavailableError, GradServerError
from gradserver.protocol.exchange import Op

log = logging.getLogger("gradserver")

dist: Any = distributed  # torch has not typed its stores and process groups

_STUCK_SECONDS: Final = 60.0
"""Seconds after which gloo gives a reduction up by itself: long after this module has."""
_OPS: Final[dict[Op, Any]] = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}
_QUIET: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}
"""Settings with which torch's watchdog reports and never ends the process: deadlines are the coordinator's."""


_ENDING_SECONDS: Final = 3.0
"""Time that threads have to end when the process does."""
_background: WeakSet[threading.Thread] = WeakSet()


def _in_background(target: Callable[..., object], name: str, *arguments: object) -> None:
    """Call ``target`` in a thread of its own, in which torch may block."""
    thread = threading.Thread(target=target, args=arguments, name=f"gradserver-{name}", daemon=True)
    _background.add(thread)
    thread.start()


@atexit.register
def _await_background() -> None:
    """Let threads end before the interpreter does: it would end them inside torch, which aborts the process then."""
    until = time.monotonic() + _ENDING_SECONDS
    for thread in list(_background):
        thread.join(max(until - time.monotonic(), 0.0))


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
        _in_background(heed, "abort")


class Reduction:
    """A reduction or broadcast that is under way."""

    def __init__(self, work: Any, tensor: Tensor, signal: Signal) -> None:
        self._work, self._tensor, self._signal = work, tensor, signal
        self._event: Any = None
        self._is_done = False
        if tensor.is_cuda:
            work.wait()  # the current stream waits, and not this thread
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            work.get_future().add_done_callback(self._note_done)

    def _note_done(self, _: object) -> None:
        """Note that gloo is done. It says so before ``is_completed`` is true."""
        self._is_done = True
        self._signal.wake()

    def wait(self, timeout: float) -> None:
        """Wait until the result is in the tensor.

        Raises:
            GradServerError: what interrupted the wait.
            RuntimeError: the reduction failed, as torch says it.
            TimeoutError: it is not done in time.
        """
        if self._event is not None:
            self._event.synchronize()  # an abort in another thread ends it
            if self._signal.error is not None:
                raise self._signal.error.again()
            if (failed := self._work.exception()) is not None:
                raise RuntimeError(str(failed))
            return
        if not self._signal.wait_until(lambda: self._is_done, timeout):
            raise TimeoutError(f"a reduction is not done after {timeout:g} s")
        if self._is_done:
            self._work.wait()  # raises what made it fail
        elif self._signal.error is not None:
            raise self._signal.error.again()


class Communicator:
    """The process groups of one epoch's members: one for each kind of device that the module's buckets are on.

    Args:
        store: address of the store, ``host:port``.
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
        self._devices = sorted({device.type: device for device in devices}.items())
        self._host = host
        self._groups: dict[str, Any] = {}
        self._given_up = False
        self._lock = threading.Lock()
        self.failed: BaseException | None = None
        """Why it could not be formed."""

    def form(self, signal: Signal, timeout: float) -> None:
        """Find the other members, within ``timeout`` seconds.

        Raises:
            GradServerError: what interrupted the wait.
            BackendUnavailableError: the members did not find each other. The error says why.
        """
        _in_background(self._form, "rendezvous", signal, timeout)
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
            host, _, port = self._address.rpartition(":")
            limit = timedelta(seconds=timeout)
            store = dist.TCPStore(host, int(port), None, False, limit)
            made = {kind: self._group(kind, device, store, limit) for kind, device in self._devices}
            with self._lock:
                self._groups = made
                given_up = self._given_up
            if given_up:
                self.give_up()
        except Exception as error:  # torch raises its own kinds, and the thread that waits is to have any of them
            self.failed = error
        signal.wake()

    def _group(self, kind: str, device: torch.device, store: Any, limit: timedelta) -> Any:
        named = dist.PrefixStore(f"{self._name}/{kind}", store)
        if kind == "cuda":
            os.environ.update({key: value for key, value in _QUIET.items() if key not in os.environ})
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(days=365)
            with torch.cuda.device(device):
                made = nccl(named, self._rank, self._world, options)
                made.allreduce([torch.zeros(1, device=device)]).wait()  # connects now, and not in the first round
            return made
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        if self._host:
            options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = max(limit, timedelta(seconds=_STUCK_SECONDS))
        return gloo(named, self._rank, self._world, options)

    def all_reduce(self, tensor: Tensor, op: Op, signal: Signal) -> Reduction:
        """Begin to replace ``tensor`` by its combination over all members."""
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return Reduction(self._begin("allreduce", tensor, options), tensor, signal)

    def broadcast(self, tensor: Tensor, rank: int, signal: Signal) -> Reduction:
        """Begin to replace ``tensor`` by that of ``rank``."""
        options = dist.BroadcastOptions()
        options.rootRank = rank
        return Reduction(self._begin("broadcast", tensor, options), tensor, signal)

    def _begin(self, what: str, tensor: Tensor, options: Any) -> Any:
        groups = self._groups  # another thread may give up meanwhile
        if tensor.device.type not in groups:
            raise RuntimeError("the communicators of this epoch were given up")
        return getattr(groups[tensor.device.type], what)([tensor], options)

    def give_up(self) -> None:
        """End all that is under way, and free the communicators. A second call does nothing."""
        with self._lock:
            groups, self._groups, self._given_up = self._groups, {}, True
        if "cuda" in groups:
            with suppress(RuntimeError):
                groups["cuda"].abort()
        # Gloo's destructor waits for its threads, which may wait for a member that is stopped. Nothing here refers to
        # the group by itself, so that the destructor runs in the thread that clears.
        if groups:
            _in_background(groups.clear, "give-up")
