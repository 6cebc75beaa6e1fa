"""Segments of shared memory as a worker makes them: memory without a name, of which blocks are carved."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from bisect import bisect_right, insort
from typing import Any, Final

import numpy as np

from gradserver.protocol.limits import KIB
from gradserver.protocol.transport.sharing import PAGE_BYTES, SEGMENT_HEADER_BYTES

ALIGNMENT: Final = 64
"""Alignment of arrays in an arena: a cache line, which no two arrays share."""

address_of = ctypes.addressof
view_of: Any = ctypes.c_char.from_buffer


class Owner(np.ndarray[Any, np.dtype[np.uint8]]):
    """The owner that all views of one block keep alive."""


class Block:
    """Bytes ``start`` to ``stop`` of a segment."""

    __slots__ = ("alive", "segment", "start", "stop")

    def __init__(self, segment: Segment, start: int, stop: int) -> None:
        self.segment = segment
        self.start = start
        self.stop = stop
        self.alive: weakref.ref[Owner] | None = None


class Segment:
    """Memory that both sides have mapped, and its free parts."""

    def __init__(self, number: int, descriptor: int, mapping: mmap.mmap, size: int, writable: bool) -> None:
        self.number = number
        self.descriptor = descriptor
        self.writable = writable
        """True if the coordinator may write to it."""
        self.close = weakref.finalize(self, os.close, descriptor)
        self.mapping = mapping
        self.size = size
        self.address = address_of(view_of(mapping))
        self._free = [(SEGMENT_HEADER_BYTES, size)]
        """Free parts in order, of which no two touch."""

    def carve(self, nbytes: int) -> Block | None:
        """Return a block of ``nbytes`` bytes, rounded up; None if no free part is as large."""
        length = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= length:
                self._free[index : index + 1] = [(start + length, stop)] if stop - start > length else []
                return Block(self, start, start + length)
        return None

    def put_back(self, block: Block) -> None:
        """Free ``block``."""
        start, stop = block.start, block.stop
        index = bisect_right(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
        insort(self._free, (start, stop))

    def is_unused(self) -> bool:
        """Return True if all of it is free."""
        return self._free == [(SEGMENT_HEADER_BYTES, self.size)]


def allocate(size: int) -> tuple[int, mmap.mmap]:
    """Return new memory of ``size`` bytes: its descriptor and its mapping.

    All of it is allocated at once, because the coordinator trusts in no page that does not exist. The kernel would
    not refuse what it does not have, but kill a process: so we look before.
    """
    available = _available()
    if size > available:
        raise OSError(errno.ENOMEM, f"{size / 1e6:.0f} MB are not available")
    descriptor = os.memfd_create("gradserver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        if sys.version_info >= (3, 13):
            mapping = mmap.mmap(descriptor, size, trackfd=False)  # else it keeps a descriptor of its own
        else:
            mapping = mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    # One fault that reads maps sixteen pages, for writing too; one that writes would map one, and clearing it was done.
    np.frombuffer(mapping, np.uint8)[::PAGE_BYTES].max()
    return descriptor, mapping


def _available() -> int:
    """Return the bytes of memory that the system could give."""
    with open("/proc/meminfo", "rb") as facts:
        for line in facts:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * KIB
    return sys.maxsize
