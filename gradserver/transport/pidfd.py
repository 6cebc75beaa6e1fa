"""Descriptors that show whether the process at the other end of a local socket lives.

Linux gives a descriptor of a process that can be polled: it is readable within milliseconds of the process's end. It is
so even while children that the process forked keep its connections open. And it is certain, as no silence is.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

_SO_PEERPIDFD = 77
"""Option of Linux 6.5, not in `socket` yet: names the very process that connected, even one without a number here."""
_CREDENTIALS = struct.Struct("3i")


def process_of(connection: socket.socket) -> int | None:
    """Return a descriptor that polls readable once the process at the other end has ended. The caller closes it.

    None where the system has no such thing, does not allow it, or does not show us that process: it may belong to a
    container. If the process has ended before, what is found may be None too, and never the end of another that lives.
    """
    if sys.platform != "linux":
        return None
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        number, _, _ = _CREDENTIALS.unpack(credentials)
        return os.pidfd_open(number) if number > 0 else None
    except OSError:  # it has ended, or this is forbidden or unknown here
        return None


def has_ended(process: int) -> bool:
    """Return True if the process with this descriptor has ended."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(0))
