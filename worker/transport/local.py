"""A worker's local sockets to processes of its own host, through which it hands over memory and messages."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from gradserver.protocol.errors import BackendUnavailableError, GradServerError, MalformedMessageError
from gradserver.protocol.transport.local import linger, stream_through
from gradserver.protocol.transport.sharing import (
    ADDRESS_PREFIX,
    MAX_PACKET_BYTES,
    Lend,
    Lent,
    Offer,
    Refused,
    Release,
    SharingMessage,
    Taken,
    Talk,
    Talking,
    decode_packet,
    encode_packet,
)

A = TypeVar("A", Taken, Lent, Talking)


class Partner:
    """The local socket of a coordinator, or a data shard."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.socket = connection
        self.token = token
        self._released: deque[int] = deque()
        """Released segments that are not announced yet, as the socket is full."""

    def ask(self, message: Offer | Lend | Talk, kind: type[A], descriptors: Sequence[int], timeout: float) -> A:
        """Send ``message`` with descriptors, and return the answer, which must be of this ``kind``."""
        self.socket.settimeout(timeout)
        self._send_releases()
        socket.send_fds(self.socket, [encode_packet(message)], descriptors, socket.MSG_NOSIGNAL)
        packet = self.socket.recv(MAX_PACKET_BYTES + 1)
        if not packet:
            raise BackendUnavailableError("the coordinator hung up")
        answer: SharingMessage = decode_packet(packet)
        if isinstance(answer, Refused):
            raise BackendUnavailableError(f"the coordinator refused it: {answer.reason}")
        if not isinstance(answer, kind):
            raise MalformedMessageError(f"a {type(answer).__name__} in answer to an {type(message).__name__}")
        return answer

    def release(self, number: int) -> None:
        """Announce, now or later, that a segment is used no more."""
        self._released.append(number)
        with contextlib.suppress(OSError):
            self.socket.settimeout(0.0)  # a garbage collector does not wait for a coordinator
            self._send_releases()

    def _send_releases(self) -> None:
        while self._released:
            self.socket.send(encode_packet(Release(self._released[0])), socket.MSG_NOSIGNAL)
            self._released.popleft()


class LocalLine:
    """A connection through which messages pass both ways, without a thread between.

    Args:
        address: address of the coordinator's local socket.
        token: shown there.
        timeout: seconds that the coordinator has for its answer.

    Attributes:
        descriptor: to be polled.
        stream: what passes. One thread at a time may send, and one receive.

    Raises:
        BackendUnavailableError: it cannot be had; says why.
    """

    def __init__(self, address: str, token: str, timeout: float) -> None:
        self._socket = connection = _connect(address, timeout)
        try:
            Partner(connection, token).ask(Talk(token), Talking, (), timeout)
        except (GradServerError, OSError) as error:
            connection.close()
            raise BackendUnavailableError(reason_of(error)) from error
        connection.setblocking(False)
        self.descriptor = connection.fileno()
        self.stream = stream_through(connection)

    def close(self, seconds: float = 0.0) -> None:
        """Close the connection. What is queued has ``seconds`` to leave."""
        linger(self._socket, self.stream, time.monotonic() + seconds)
        self._socket.close()


def connect_all(places: Sequence[tuple[str, str]], timeout: float) -> tuple[list[Partner], list[bool]]:
    """Connect to all that can be reached, and return which these are. Raises the first error if there are none."""
    peers: list[Partner] = []
    reached: list[bool] = []
    first: BackendUnavailableError | None = None
    for address, token in places:
        try:
            peers.append(Partner(_connect(address, timeout), token))
        except BackendUnavailableError as error:
            first = first or error
        reached.append(len(peers) > sum(reached))
    if not peers:
        assert first is not None
        raise first
    return peers, reached


def _connect(address: str, timeout: float) -> socket.socket:
    if sys.platform != "linux":
        raise BackendUnavailableError("only Linux can share memory without a name")
    if not address:
        raise BackendUnavailableError("the coordinator offers none")
    if not address.startswith(ADDRESS_PREFIX) or not address.isascii():
        raise BackendUnavailableError("the coordinator's local socket has no name of gradserver's")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        connection.connect("\0" + address)
    except OSError as error:
        connection.close()
        if error.errno == errno.ECONNREFUSED:
            raise BackendUnavailableError(
                "the coordinator's local socket cannot be reached: it runs on another host, or in another container. "
                "Containers share memory if they share a network namespace (docker: --network=container:… or host)"
            ) from None
        raise BackendUnavailableError(f"the coordinator's local socket: {reason_of(error)}") from error
    return connection


def reason_of(error: BaseException) -> str:
    """Return what to tell a user about ``error``, in a few words."""
    if isinstance(error, TimeoutError):
        return "the coordinator did not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
