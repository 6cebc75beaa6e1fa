"""Memory of the host that a device's buckets are copied to, and that results are copied back from.

Where the worker shares memory with its coordinator, it is that memory. So a gradient crosses the bus once each way, and
is copied nowhere else. Its pages are locked for as long as the model lives, or until the worker is closed.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gradserver.protocol.buffer import Bytes
from gradserver.worker.devices.device import Device
from gradserver.worker.transport.shared_memory import OWN_SEGMENT_BYTES

log = logging.getLogger("gradserver")

_PAGE: Final = mmap.PAGESIZE


class HostMemory:
    """Memory with locked pages, for one device.

    Args:
        device: device that copies to and from it.
        shared: function that gives uninitialised memory which the coordinator sees too; None if it sees none.
    """

    def __init__(self, device: Device, shared: Callable[[int], Bytes | None]) -> None:
        self._device = device
        self._shared = shared
        self._locked: list[Tensor] = []
        """Memory with pages that `release` unlocks. Until then nothing may unmap it."""
        self._process = os.getpid()
        self._complained = self._released = False
        self._lock = threading.Lock()

    def new(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` bytes, uninitialised. They share no page with anything else, as a page is locked once."""
        size = max(-(-nbytes // _PAGE) * _PAGE, OWN_SEGMENT_BYTES)
        given = self._shared(size)
        # Where it is not shared, a child that is forked must not turn its pages into copies, which the device does not
        # know: so this mapping is shared, too (the default of mmap), with no process.
        array = np.frombuffer(mmap.mmap(-1, size), np.uint8) if given is None else given
        memory = torch.from_numpy(array)
        with self._lock:
            if self._released:  # the worker is closed, and the next push will say so
                return memory[:nbytes]
            try:
                reason = self._device.lock(memory)
            except RuntimeError as error:
                reason = str(error)
            if reason is None:
                self._locked.append(memory)
                return memory[:nbytes]
        if not self._complained:
            log.warning(
                "gradients of %s are copied once more on the host, in pinned memory: %s", self._device.name, reason
            )
            self._complained = True
        return self._device.pinned(nbytes)

    def release(self) -> None:
        """Unlock all pages. No copy may be under way. A second call does nothing, and neither does a forked child's."""
        if self._process == os.getpid():
            with self._lock:
                self._released = True
                while self._locked:
                    self._device.unlock(self._locked.pop())
