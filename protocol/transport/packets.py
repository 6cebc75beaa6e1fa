"""Messages over a local socket (Unix, SOCK_SEQPACKET) between processes of one host, without a network.

No thread stands between the processes, so it is fast. A message is one packet, or several if it is large:

    8 bytes    length of the header, and of the payload plus one (0: there is none), little-endian
    header     as `gradserver.protocol.wire` encodes it
    payload    as much of it as goes into this packet; the rest follows in packets of its own
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import LimitExceededError, MalformedMessageError
from gradserver.protocol.limits import KIB, MAX_FRAME_BYTES, MAX_HEADER_BYTES

PACKET_BYTES: Final = MAX_HEADER_BYTES + 32 * KIB
"""Bytes of the longest packet. Linux lends a socket twice as much by default, so that two are on their way."""

_LENGTHS: Final = struct.Struct("<II")


class PacketStream:
    """One end of a connection. One thread at a time may send, and one receive.

    Args:
        send: sends a packet to the other side, or raises BlockingIOError if that has too many already.
        receive: returns one packet, up to a number of bytes; empty at the end. BlockingIOError if there is none yet.

    Attributes:
        queued: packets that are not sent yet because the other side does not read; see `flush`.
        queued_bytes: their length together.
    """

    def __init__(self, send: Callable[[Buffer], object], receive: Callable[[int], bytes]) -> None:
        self._send_packet = send
        self._receive_packet = receive
        self.queued: deque[Buffer] = deque()
        self.queued_bytes = 0
        self._header = b""
        self._payload = bytearray()
        self._arrived = 0
        """Bytes that have arrived of a payload that is not whole."""

    def send(self, header: bytes, payloads: Sequence[Buffer] = ()) -> bool:
        """Send a message, or queue the rest. Return whether everything so far is sent.

        A large payload that is queued is read later: it must stay as it is.

        Raises:
            OSError: the other side is gone.
        """
        if not payloads:
            return self._send(_LENGTHS.pack(len(header), 0) + header)
        payload = payloads[0]
        lengths = _LENGTHS.pack(len(header), len(payload) + 1)
        room = PACKET_BYTES - len(lengths) - len(header)
        if len(payload) <= room:
            return self._send(b"".join((lengths, header, payload)))
        rest = memoryview(payload)
        out = self._send(b"".join((lengths, header, rest[:room])))
        for start in range(room, len(rest), PACKET_BYTES):
            out = self._send(rest[start : start + PACKET_BYTES])
        return out

    def _send(self, packet: Buffer) -> bool:
        if not self.queued:
            try:
                self._send_packet(packet)
                return True
            except BlockingIOError:
                pass
        self.queued.append(packet)
        self.queued_bytes += len(packet)
        return False

    def flush(self) -> bool:
        """Send what is queued, as far as the other side reads; return whether that is all. OSError: it is gone."""
        while self.queued:
            try:
                self._send_packet(self.queued[0])
            except BlockingIOError:
                return False
            self.queued_bytes -= len(self.queued.popleft())
        return True

    def receive(self) -> list[Buffer] | None:
        """Return the frames of a message; None if the packet that came does not complete one.

        Raises:
            BlockingIOError: there is no packet.
            EOFError: there never will be.
            MalformedMessageError, LimitExceededError: the packet is of no message, and no later one will be.
        """
        try:
            packet = self._receive_packet(PACKET_BYTES + 1)
        except BlockingIOError:
            raise
        except ConnectionError:  # the other side went without reading all; what it said is still there
            packet = self._receive_packet(PACKET_BYTES + 1)
        if not packet:
            raise EOFError
        if len(packet) > PACKET_BYTES:
            raise LimitExceededError(f"a packet of more than {PACKET_BYTES} bytes")
        return self._rest(packet) if self._payload else self._first(packet)

    def _first(self, packet: bytes) -> list[Buffer] | None:
        if len(packet) < _LENGTHS.size:
            raise MalformedMessageError(f"a packet of {len(packet)} bytes, which begins no message")
        header_bytes, payload_bytes = _LENGTHS.unpack_from(packet)
        start = _LENGTHS.size + header_bytes
        if start > len(packet) or payload_bytes > MAX_FRAME_BYTES + 1:
            raise LimitExceededError(f"a message with {header_bytes} bytes of header, {payload_bytes} of payload")
        header = packet[_LENGTHS.size : start]
        here = len(packet) - start
        if payload_bytes == 0 and here == 0:
            return [header]
        if payload_bytes == here + 1:
            return [header, memoryview(packet)[start:]]
        if here >= payload_bytes:
            raise MalformedMessageError(f"a packet with {here} bytes of a payload of {payload_bytes - 1}")
        self._header, self._payload, self._arrived = header, bytearray(payload_bytes - 1), here
        self._payload[:here] = packet[start:]
        return None

    def _rest(self, packet: bytes) -> list[Buffer] | None:
        arrived = self._arrived + len(packet)
        if arrived > len(self._payload):
            raise MalformedMessageError(f"{arrived} bytes of a payload of {len(self._payload)}")
        self._payload[self._arrived : arrived] = packet
        self._arrived = arrived
        if arrived < len(self._payload):
            return None
        payload, self._payload = self._payload, bytearray()
        return [self._header, memoryview(payload).toreadonly()]
