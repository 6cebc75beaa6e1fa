"""The bytes of a message that is not whole, which libzmq keeps for a process that has connected.

libzmq hands a message over when its last part has come. Its options bound a part, and the number of messages, not the
parts of one. A server that is none could fill the memory with a message without an end. So the process that waits looks
from time to time. The kernel knows how many bytes have come (TCP_INFO), and `Dealer` how many it was given.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

from gradserver.protocol.limits import MAX_FRAME_BYTES, MAX_HEADER_BYTES

LOOK_SECONDS: Final = 0.1
"""Pause between two looks of a process that waits."""
MOST_UNDER_WAY: Final = 4 * (MAX_FRAME_BYTES + MAX_HEADER_BYTES)
"""Bytes under way, with no whole message among them, above which there is no end of a message."""
_A_SECOND: Final = 64
"""Bytes of libzmq's own that come each second, at most."""
_COOKIE: Final = 57  # SO_COOKIE, of Linux 4.6: no other socket has the same
_TCP_INFO_BYTES: Final = 136
_RECEIVED: Final = struct.Struct("Q")
_ROOM: Final = struct.Struct("i")
_RECEIVED_AT: Final = 128  # tcpi_bytes_received, of Linux 4.1


class UnderWay:
    """The bytes of one connection.

    Args:
        descriptor: libzmq's own, which another connection may have later.

    Attributes:
        taken: bytes of messages that were taken.
        due: time of the next look.
    """

    def __init__(self, descriptor: int) -> None:
        self.taken = 0
        self._descriptor = descriptor
        self._since = self.due = time.monotonic()
        self._cookie = b""
        self._cookie = self._ask(lambda own: own.getsockopt(socket.SOL_SOCKET, _COOKIE, 8))

    def look(self, now: float) -> int:
        """Return the bytes that libzmq holds; 0 if the system does not tell, or it is no time for a look."""
        if now < self.due or not self._cookie:
            return 0
        self.due = now + LOOK_SECONDS
        info = self._ask(_info)
        if len(info) < _TCP_INFO_BYTES + _ROOM.size:
            return 0
        (received,), (room,) = _RECEIVED.unpack_from(info, _RECEIVED_AT), _ROOM.unpack_from(info, _TCP_INFO_BYTES)
        return int(received) - self.taken - int(room) - int(_A_SECOND * (now - self._since))

    def _ask(self, question: Callable[[socket.socket], bytes]) -> bytes:
        """Return what the system says of the connection; nothing if the descriptor is another's, or it has none."""
        if sys.platform != "linux":
            return b""
        try:
            own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._descriptor)
        except OSError:
            return b""
        try:
            cookie = own.getsockopt(socket.SOL_SOCKET, _COOKIE, 8)
            return question(own) if self._cookie in (b"", cookie) else b""
        except OSError:
            return b""
        finally:
            own.detach()


def _info(own: socket.socket) -> bytes:
    """Return the connection's counts, and how much of it the kernel may hold itself."""
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return info.ljust(_TCP_INFO_BYTES, b"\0") + _ROOM.pack(own.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
