"""CUDA devices. This module alone calls ``torch.cuda`` for copies, and nothing in it waits for a whole device.

Waits are for events. With ``torch.cuda.set_sync_debug_mode("error")`` all of it works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch import Tensor

from gradserver.worker.devices.device import Device, Event, Stream

_cuda: Any = torch.cuda  # torch has not typed its constructors
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pages are locked for all devices of the process."""


class CudaDevice:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device

    def use(self) -> None:
        """Make it the calling thread's device. A new thread has device 0, and would take memory there by and by."""
        torch.cuda.set_device(self._device)

    def new_stream(self) -> Stream:
        """Return a stream beside all others."""
        stream: Stream = _cuda.Stream(self._device)
        return stream

    def new_event(self) -> Event:
        """Return an event for which a thread waits asleep."""
        event: Event = _cuda.Event(blocking=True)
        return event

    def current_stream(self) -> Stream:
        """Return the stream of the calling thread's computation."""
        stream: Stream = _cuda.current_stream(self._device)
        return stream

    def captures(self) -> bool:
        """Return whether the calling thread's stream is captured into a CUDA graph."""
        return bool(_cuda.is_current_stream_capturing())

    def run(self, work: Callable[[], object], stream: Any) -> None:
        """Queue what ``work`` does on the device on ``stream``."""
        with torch.cuda.stream(stream):
            work()

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy between the device and the host, on ``stream``."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep the allocator from reusing the memory of ``tensor`` until ``stream`` is done with it."""
        tensor.record_stream(stream)

    def lock(self, memory: Tensor) -> str | None:
        """Lock pages of the host. Return the reason why not, if it fails."""
        address, nbytes, cudart = memory.data_ptr(), memory.nbytes, _cuda.cudart()
        error = self._apart(lambda: cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        if not int(error):
            return None
        return f"cudaHostRegister says error {int(error)}, {cudart.cudaGetErrorString(error)}"

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock`, when no copy is under way. At the end of a process there may be no CUDA left to tell."""
        address = memory.data_ptr()
        self._apart(lambda: _cuda.cudart().cudaHostUnregister(address))

    def pinned(self, nbytes: int) -> Tensor:
        """Return memory of torch's own pinned allocator, which takes up to twice as much as is asked for."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _apart(self, call: Callable[[], Any]) -> Any:
        """Return the error that a call in a thread of its own returns; its number is 0 if there is none.

        CUDA keeps the last error of each thread, and the next kernel that the thread launches would raise it.
        """
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                self.use()
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=run, name=f"gradserver-lock-{self.name}", daemon=True)
        thread.start()
        thread.join()
        return outcome.result()


def open_device(device: torch.device) -> Device | None:
    """Return the device of a bucket; None for the CPU, where nothing needs to be copied."""
    return None if device.type == "cpu" else CudaDevice(device)


def fetch(tensor: Tensor) -> Tensor:
    """Return a small tensor of a CUDA device on the host. It waits for what is queued before, and for nothing else."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = _cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(tensor.device))
    event.synchronize()
    return host


def fetch_whole(scalar: Tensor) -> int:
    """Return the value of an integer or a bool, which may be on a CUDA device, as `fetch` does."""
    return int(scalar if scalar.device.type == "cpu" else fetch(scalar))
