"""Descriptors and memory, as the system counts them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from typing import Final

from gradserver.protocol.limits import MIB

_LEAST_MEMORY: Final = 256 * MIB
_COUNT: Final = struct.Struct("i")


class Spare:
    """A descriptor that is kept for the time when no other is left."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._nothing)

    @contextlib.contextmanager
    def holding(self, descriptor: int) -> Iterator[socket.socket]:
        """Yield the socket of ``descriptor``, which cannot become another one meanwhile. OSError if there is none."""
        os.dup2(descriptor, self._spare, inheritable=False)
        try:
            own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._spare)
            try:
                yield own
            finally:
                own.detach()
        finally:
            os.dup2(self._nothing, self._spare, inheritable=False)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._nothing)
        os.close(self._spare)


def queued(descriptor: int) -> int:
    """Return the bytes that have come and wait in the kernel."""
    try:
        (count,) = _COUNT.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(_COUNT.size)))
    except OSError:  # it was closed
        return 0
    return int(count)


def open_descriptors() -> int:
    """Return the number of open descriptors of this process; 0 if the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    try:
        return max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 4 * _LEAST_MEMORY)
    except (OSError, ValueError):
        return 4 * _LEAST_MEMORY
