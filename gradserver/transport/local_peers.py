"""Workers of the server's own host: one connection to its local socket, and all that there is of a worker."""

from __future__ import annotations

import array
import select
import socket
from collections.abc import Sequence
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.transport.local import stream_through
from gradserver.protocol.transport.sharing import MAX_PACKET_BYTES, SharingMessage, encode_packet
from gradserver.transport.shared_memory import Segments

MAX_QUEUED: Final = 50_000
"""Packets that may wait for a worker that does not read. Credits keep members far below it."""
_FDS_TAKEN: Final = 4
"""Descriptors taken from a packet, and closed unless there is exactly one. The kernel closes those beyond."""


class Guest:
    """A worker that may connect with its token.

    Its connections stay here when they are closed: no token is good for a second one of a kind.
    """

    def __init__(self, identity: bytes, token: str) -> None:
        self.identity = identity
        self.token = token
        self.segments = Segments()
        self.sharing: Line | None = None
        """Connection through which memory is handed over."""
        self.line: Line | None = None
        """Connection through which messages pass."""
        self.process: int | None = None
        """Descriptor that is readable once the process has ended; None if there is no such."""
        self.ended = False
        """True once the process has ended."""


class Line:
    """One connection to the local socket."""

    def __init__(self, accepted: socket.socket, poller: select.poll) -> None:
        self.socket = accepted
        self.descriptor = accepted.fileno()
        self.guest: Guest | None = None
        self.talks = False
        """True if messages pass here."""
        self.stream = stream_through(accepted)
        self._poller = poller

    def send(self, header: bytes, payloads: Sequence[Buffer]) -> bool:
        """Send a message; False if the worker is gone, or does not read."""
        waiting = len(self.stream.queued)
        if waiting >= MAX_QUEUED:
            return False
        try:
            if not self.stream.send(header, payloads) and not waiting:
                self._poller.modify(self.descriptor, select.POLLIN | select.POLLOUT)
        except OSError:
            return False
        return True

    def say(self, message: SharingMessage) -> None:
        """Send a packet that is not a message. OSError if that is not possible at once."""
        self.socket.send(encode_packet(message), socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[bytes, list[int]]:
        """Receive one packet with its descriptors. BlockingIOError if there is none."""
        descriptors = array.array("i")
        packet, ancillary, flags, _ = self.socket.recvmsg(
            MAX_PACKET_BYTES, socket.CMSG_LEN(_FDS_TAKEN * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if flags & socket.MSG_TRUNC:
            packet = b"\xc1"  # which begins no message
        return packet, list(descriptors)
