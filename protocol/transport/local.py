"""A local socket (Unix, SOCK_SEQPACKET) as both ends use it: messages in packets, and a last second for what waits."""

from __future__ import annotations

import contextlib
import socket
import time

from gradserver.protocol.transport.packets import PacketStream


def stream_through(connection: socket.socket) -> PacketStream:
    """Return the stream of messages that pass through ``connection``, which must not block."""
    return PacketStream(lambda packet: connection.send(packet, socket.MSG_NOSIGNAL), connection.recv)


def linger(connection: socket.socket, stream: PacketStream, until: float) -> None:
    """Send what ``stream`` has queued, until a moment of `time.monotonic` at most."""
    with contextlib.suppress(OSError):
        while stream.queued and (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            stream.flush()
