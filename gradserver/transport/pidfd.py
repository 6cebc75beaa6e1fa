"""Whether the process at the other end of a local socket is still there.

Linux gives a descriptor of a process that can be polled as soon as the process has ended: within milliseconds, also
while children that it forked keep its connections open. And it is certain, as no silence of a connection is.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

_SO_PEERPIDFD = 77
"""Of Linux 6.5, and not in `socket` yet: of exactly the process that connected, even if it has no number here."""
_CREDENTIALS = struct.Struct("3i")


def process_of(connection: socket.socket) -> int | None:
    """A descriptor that polls readable once the process that made this connection has ended; the caller closes it.

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
    """Whether the process with this descriptor has."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(0))
