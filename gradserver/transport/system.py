"""Descriptors and memory, as the system counts them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import termios
from collections.abc import Iterator
from typing import Final

from gradserver.protocol.errors import LimitExceededError
from gradserver.protocol.limits import MIB

_LEAST_MEMORY: Final = 256 * MIB
_RESERVED: Final = 64
_REMEDY: Final = "`ulimit -n 65536`, or LimitNOFILE= in its systemd unit"
_LEAST: Final = 40
"""Descriptors with which a server starts. Fewer do for two workers; of more, some are cut off before they are heard."""
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


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def reserve_of(limit: int) -> int:
    """Return how many descriptors of a process that may have ``limit`` are kept from connections."""
    return min(_RESERVED, limit // 4)


def too_few_text(limit: int) -> str:
    """Say that there are too few descriptors, and what to do."""
    return (
        f"the coordinator has too few descriptors (open files) left: {limit} is its limit. Raise it where it starts, "
        f"as by {_REMEDY}"
    )


def check_limit() -> None:
    """Raise LimitExceededError if this process may not have enough descriptors for a server."""
    if (limit := descriptor_limit()) < _LEAST:
        raise LimitExceededError(
            f"this process may have {limit} descriptors (open files), and needs {_LEAST}: raise its limit, as by "
            f"{_REMEDY}"
        )


def can_share() -> bool:
    """Return True if descriptors may be spent on shared memory: of the first third of all.

    A worker that shares memory takes three times as many as another, and can do without.
    """
    return open_descriptors() <= descriptor_limit() // 3


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    try:
        return max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 4 * _LEAST_MEMORY)
    except (OSError, ValueError):
        return 4 * _LEAST_MEMORY
