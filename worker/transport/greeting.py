"""The kind of a listening ZeroMQ socket.

A socket of a kind that takes no workers closes a connection as soon as it has heard of our kind. What it has said of
itself may be lost with that: libzmq then sees a connection that broke, as any other may. Here the other side has to say
its kind first.
"""

from __future__ import annotations

import re
import socket
import time
from typing import Final

from gradserver.protocol.url import parse_target

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""The greeting of ZMTP 3.0: the signature, the version, the mechanism, and that this side is no server."""
_COMMAND: Final = 4
"""The first byte of a short frame with a command. Its length follows, in one byte."""
_KIND: Final = re.compile(rb"\x0bSocket-Type\0\0\0[\x03-\x06]([A-Z]+)", re.IGNORECASE)
_TAKES_WORKERS: Final = (b"ROUTER", b"REP", b"DEALER")
"""The kinds that a DEALER may be connected to."""


def takes_no_workers(url: str, timeout: float) -> bool:
    """Return whether a ZeroMQ socket at ``url`` takes no workers, after ``timeout`` seconds at most.

    False also if that cannot be found out.
    """
    until = time.monotonic() + timeout
    try:
        with socket.create_connection(parse_target(url), timeout=timeout) as connection:
            connection.sendall(_GREETING)
            _read(connection, len(_GREETING), until)
            first, length = _read(connection, 2, until)
            ready = _read(connection, length, until) if first == _COMMAND else b""
    except OSError:
        return False
    kind = _KIND.search(ready)
    return kind is not None and kind[1] not in _TAKES_WORKERS


def _read(connection: socket.socket, count: int, until: float) -> bytes:
    """Read ``count`` bytes. OSError if they do not come."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the other side has closed the connection")
        data += more
    return data
