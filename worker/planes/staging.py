"""The way of buckets to the worker and of their results back, wherever their memory is.

A bucket on the CPU is pushed from, and received into, its own memory. One on a CUDA device has memory on the host
beside it, and is copied there and back while backward runs (`gradserver.worker.devices.copies`).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final
from weakref import WeakSet

import torch
from torch import Tensor

from gradserver.protocol.errors import DeadlineError, UsageError
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker
from gradserver.worker.devices.copies import Copier
from gradserver.worker.devices.cuda import open_device
from gradserver.worker.handle import Handle
from gradserver.worker.member.progress import Progress
from gradserver.worker.planes.plane import Kept

_COPY_SECONDS: Final = 60.0
"""Seconds that a push may take, beyond an exchange: the copy to the host comes before it, and computation before that.
"""

_on_device: dict[torch.device, WeakSet[Staging]] = {}
"""The stagings with buckets on each device of this process."""


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
        self._devices: dict[torch.device, Copier | None] = {}
        self._handles: dict[int, Handle] = {}
        self._staged: dict[int, tuple[Tensor, Future[Handle]]] = {}

    def new_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a bucket: on the CPU, where the channel reads and writes without a copy."""
        if self._copier(device) is not None:
            _on_device.setdefault(device, WeakSet()).add(self)
            return torch.zeros(numel, dtype=dtype, device=device)
        flat: Tensor = self._worker.empty((numel,), dtype)
        return flat.zero_()

    def before_forward(self) -> None:
        """Make sure that workers which share a device, as threads of one process, can wait for each other.

        Results are waited for at the end of a backward, in the thread that autograd has for the device. The other
        worker's backward would need that same thread. So they run theirs in their own threads.

        Raises:
            UsageError: the forward is captured into a CUDA graph, which would replay no exchange.
        """
        if any(copier is not None and copier.is_captured for copier in self._devices.values()):
            raise UsageError(
                "a step that exchanges gradients cannot be captured into a CUDA graph: capture the module's own "
                "forward and backward (torch.cuda.make_graphed_callables), and wrap what that returns"
            )
        if any(self in sharers and len(sharers) > 1 for sharers in _on_device.values()):
            torch.autograd.set_multithreading_enabled(False)  # concerns this thread alone

    @property
    def pushed(self) -> bool:
        """True if anything of the present round was pushed."""
        return bool(self._handles or self._staged)

    def factor(self, weight: float) -> None:
        """Return None: the coordinator multiplies."""

    def push(
        self,
        index: int,
        flat: Tensor,
        weight: float,
        present: bool = True,
        kept: Kept | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Contribute ``flat`` to bucket ``index``; it holds the result after `finish`. See `Worker.push`.

        ``progress`` is for one on the CPU. One on a CUDA device has its own.
        """
        assert kept is None
        copier = self._copier(flat.device)
        if copier is None:
            self._handles[index] = self._worker.push(
                self._agreement.first + index, flat, weight=weight, present=present, progress=progress
            )
        else:
            self._staged[index] = (flat, copier.push(index, flat, weight, present))

    @property
    def is_there(self) -> bool:
        """True if each bucket that was pushed in this round has its result; one of a CUDA device has it on the host."""
        pushing = [future for _, future in self._staged.values()]
        if not all(future.done() and future.exception() is None for future in pushing):
            return False
        return all(handle.done() for handle in (*self._handles.values(), *(future.result() for future in pushing)))

    def advance(self, progress: Progress, nbytes: int) -> None:
        """Send more of a bucket that was pushed with ``progress``: see `Worker.advance`."""
        self._worker.advance(progress, nbytes)

    def wait(self, index: int) -> Handle:
        """Wait for the result of a bucket that was pushed in this round."""
        handle = self._pushed(index)
        handle.wait(self._timeout)
        if index in self._staged and (copier := self._copier(self._staged[index][0].device)) is not None:
            copier.join(_COPY_SECONDS)
        return handle

    def _pushed(self, index: int) -> Handle:
        if index in self._staged:
            self._handles[index] = _begun(self._staged[index][1], self._timeout or self._worker.timeout)
        return self._handles[index]

    def note_writer(self, index: int, device: torch.device) -> None:
        """Note that a gradient of bucket ``index`` was computed on the calling thread's stream."""
        copier = self._copier(device)
        if copier is not None:
            copier.note_writer(index)

    def overwritten(self, index: int, flat: Tensor) -> None:
        """Note that ``flat`` does not hold the last result any more."""
        copier = self._copier(flat.device)
        if copier is not None:
            copier.forget(index)

    def _copier(self, device: torch.device) -> Copier | None:
        if device not in self._devices:
            opened = open_device(device)
            copier = None if opened is None else Copier(self._worker, self._agreement.first, opened)
            self._devices[device] = copier
        return self._devices[device]

    def within(self, timeout: float | None) -> None:
        """Limit waits from now on to ``timeout`` seconds; None for as long as the worker does."""
        self._timeout = timeout

    def finish(self, measures: bool = False) -> dict[int, Handle]:  # noqa: ARG002  (Plane's signature)
        """Wait until every result is in its bucket. Return the handles, by bucket, and open the next round.

        On a CUDA device the results are there for whatever is queued on the current stream from now on.
        """
        handles = self._handles
        for index in self._staged:
            self._pushed(index).wait(self._timeout)
        for copier in self._devices.values():
            if copier is not None:
                copier.join(_COPY_SECONDS)
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
