"""The way of buckets to the worker and of their results back, wherever their memory is.

A bucket on the CPU is pushed from, and received into, its own memory. One on a CUDA device has a copy in pinned memory
of the host. Copies run on a stream of their own beside the computation:

    compute stream   … backward of block 3 ┐ backward of block 2 …                      ┌ optimizer
    side stream                            └► to the host ┐                 ┌► to the device
    staging thread                                        └► push … result ─┘
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gradserver.protocol.errors import DeadlineError
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle

_cuda: Any = torch.cuda  # torch has not typed its constructors
# Seconds that a push may take to begin, beyond an exchange: the copy to the host comes before it.
_COPY_SECONDS = 60.0


# The stagings with buckets on each CUDA device of this process.
_on_device: dict[torch.device, WeakSet[Staging]] = {}


class Staging:
    """The exchange of one module's buckets for one worker.

    Args:
        worker: worker that has made the agreement.
        agreement: the buckets.
        timeout: seconds that a round may take beyond the end of backward; None for the worker's.
    """

    def __init__(self, worker: Worker, agreement: Agreement, timeout: float | None) -> None:
        self._worker = worker
        self._agreement = agreement
        self._timeout = timeout
        self._devices: dict[torch.device, _DeviceCopier] = {}
        self._handles: dict[int, Handle] = {}
        self._staged: dict[int, tuple[Tensor, Future[Handle]]] = {}

    def new_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a bucket: on the CPU, where the channel reads and writes without a copy."""
        if device.type != "cpu":
            _on_device.setdefault(device, WeakSet()).add(self)
            return torch.zeros(numel, dtype=dtype, device=device)
        flat: Tensor = self._worker.empty((numel,), dtype)
        return flat.zero_()

    def before_forward(self) -> None:
        """Make sure that workers which share a device, as threads of one process, can wait for each other.

        Results are waited for at the end of a backward, in the thread that autograd has for the device. The other
        worker's backward would need that same thread. So they run theirs in their own threads.
        """
        if any(self in sharers and len(sharers) > 1 for sharers in _on_device.values()):
            torch.autograd.set_multithreading_enabled(False)  # concerns this thread alone

    @property
    def pushed(self) -> bool:
        """True if anything of the present round was pushed."""
        return bool(self._handles or self._staged)

    def push(self, index: int, flat: Tensor, weight: float, present: bool = True) -> None:
        """Contribute ``flat`` to bucket ``index``; it holds the result after `finish`. See `Worker.push`."""
        copier = self._copier(flat.device)
        if copier is None:
            self._handles[index] = self._worker.push(
                self._agreement.first + index, flat, weight=weight, present=present
            )
        else:
            self._staged[index] = (flat, copier.push(index, flat, weight, present))

    def wait(self, index: int) -> Handle:
        """Wait for the result of a bucket on the CPU that was pushed in this round."""
        self._handles[index].wait(self._timeout)
        return self._handles[index]

    def overwritten(self, index: int, flat: Tensor) -> None:
        """Note that ``flat`` does not hold the last result any more."""
        copier = self._copier(flat.device)
        if copier is not None:
            copier.forget(index)

    def _copier(self, device: torch.device) -> _DeviceCopier | None:
        if device.type == "cpu":
            return None
        if device not in self._devices:
            self._devices[device] = _DeviceCopier(self._worker, self._agreement.first, device)
        return self._devices[device]

    def finish(self) -> dict[int, Handle]:
        """Wait until every result is in its bucket. Return the handles, by bucket, and open the next round.

        On a CUDA device the results are there for whatever is queued on the current stream from now on.
        """
        handles = self._handles
        for index, (flat, pushing) in self._staged.items():
            handles[index] = handle = _begun(pushing, self._timeout or self._worker.timeout)
            handle.wait(self._timeout)
            self._devices[flat.device].to_device(index, flat)
        for copier in self._devices.values():
            copier.join()
        self._worker.finish_round(self._timeout)
        self._handles, self._staged = {}, {}
        return handles


def _begun(pushing: Future[Handle], timeout: float) -> Handle:
    """Return the handle of a push that the staging thread makes, or raise its error."""
    try:
        return pushing.result(timeout + _COPY_SECONDS)
    except DeadlineError:
        raise
    except TimeoutError:
        raise DeadlineError(
            f"the gradients were not copied off the device within {timeout + _COPY_SECONDS:g} s: "
            f"the computation on it has not ended"
        ) from None


class _DeviceCopier:
    """The pinned copies, the side stream and the staging thread of one CUDA device."""

    def __init__(self, worker: Worker, first: int, device: torch.device) -> None:
        self._worker = worker
        self._first = first
        self._device = device
        self._stream = _cuda.Stream(device)
        self._host: dict[int, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"gradserver-staging-{device}")

    def push(self, index: int, flat: Tensor, weight: float, present: bool) -> Future[Handle]:
        """Copy ``flat`` to the host when the current stream is done with it, and push it from there."""
        host = self._host.get(index)
        if host is None:
            host = self._host[index] = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)
            flat.record_stream(self._stream)  # keeps the allocator from reusing it during a copy
            if not present:  # the result may be to leave it as it is
                host.copy_(flat)
        copied = _cuda.Event(blocking=True)
        with self._beside():
            if present and weight > 0:
                host.copy_(flat, non_blocking=True)
            # The event is recorded even if nothing is copied: the result of the last round may still be on its way from
            # there.
            copied.record(self._stream)
        return self._thread.submit(self._push, index, host, weight, present, copied)

    def _push(self, index: int, host: Tensor, weight: float, present: bool, copied: torch.cuda.Event) -> Handle:
        copied.synchronize()
        return self._worker.push(self._first + index, host, weight=weight, present=present)

    def forget(self, index: int) -> None:
        """Make the copy of bucket ``index`` anew when it is pushed next."""
        self._host.pop(index, None)

    def to_device(self, index: int, flat: Tensor) -> None:
        """Copy the result of bucket ``index`` into ``flat``."""
        with torch.cuda.stream(self._stream):
            flat.copy_(self._host[index], non_blocking=True)

    def join(self) -> None:
        """Let the current stream wait for the copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the side stream, behind what is queued on the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
