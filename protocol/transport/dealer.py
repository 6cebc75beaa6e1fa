"""One ZeroMQ connection to a server, as a worker, a data shard and ``gradserver status`` make it."""

from __future__ import annotations

import time
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ConnectionLostError, CoordinatorUnreachableError, LimitExceededError
from gradserver.protocol.limits import COORDINATOR_SILENCE, HEARTBEAT_SECONDS, MIB
from gradserver.protocol.transport.numbers import Frames, Numbers
from gradserver.protocol.transport.under_way import MOST_UNDER_WAY, UnderWay
from gradserver.protocol.transport.zeromq import EVENTS, NOBLOCK, POLLIN, sender
from gradserver.protocol.url import no_coordinator

PING_SECONDS: Final = 1.0
"""Pause between two Pings of a waiting side. Messages of other connections do not show that this one was heard."""
_NEVER_MS: Final = 24 * 3600 * 1000
_ENDS: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
)
"""Events of the monitor after which nothing arrives any more."""
_LONG_FRAME: Final = 256
"""Bytes from which a frame is long. With a short one come two further bytes, and with a long one nine."""
_BROKEN: Final = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)
"""Events among these that end a connection which was one of gradserver's."""


class Dealer:
    """A DEALER that connects once, the monitor that says when the connection ends, and the numbers of both sides.

    Both sockets' descriptors are edge-triggered: take what there is before each wait.

    Args:
        context: libzmq's threads.
        address: URL of the server, with a numeric address.
        max_bytes: longest frame that is taken.

    Attributes:
        is_endless: True once a message has come that has no end.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, max_bytes: int) -> None:
        self.address = address
        self.numbers = Numbers()
        self._under_way: UnderWay | None = None
        self._end: int | None = None
        self.is_endless = False
        self.socket = context.socket(zmq.DEALER)
        self.send = sender(self.socket)
        option = self.socket.setsockopt
        # A new connection would be a stranger to the server, so there is to be none. Told never to reconnect (-1),
        # libzmq throws away what has arrived and was not read yet. The reason for the end would be lost with it.
        option(zmq.RECONNECT_IVL, _NEVER_MS)
        option(zmq.MAXMSGSIZE, max_bytes)
        option(zmq.SNDHWM, 0)  # credits bound what is queued
        option(zmq.RCVHWM, 0)
        option(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
        option(zmq.HEARTBEAT_TIMEOUT, int((COORDINATOR_SILENCE - HEARTBEAT_SECONDS) * 1000))
        option(zmq.IPV6, int("[" in address))
        self.monitor = self.socket.get_monitor_socket(_ENDS | zmq.EVENT_CONNECTED)
        self.monitor.get(EVENTS)  # its descriptor signals nothing before this, and later this could swallow a signal
        self.socket_fd = int(self.socket.get(zmq.FD))
        self.monitor_fd = int(self.monitor.get(zmq.FD))
        self.socket.connect(address)

    def has_input(self) -> bool:
        """Return True if a message can be received."""
        return bool(int(self.socket.get(EVENTS)) & POLLIN)

    def receive(self) -> Frames:
        """Receive a message that is there. Payloads stay where libzmq put them."""
        receive = self.socket.recv
        frame = receive(NOBLOCK, copy=False)
        frames: list[Buffer] = [frame.bytes]
        size = len(frame)
        size += 2 if size < _LONG_FRAME else 9  # written out, as each message passes here
        while frame.more:
            frame = receive(NOBLOCK, copy=False)
            frames.append(frame.buffer)
            more = len(frame)
            size += more + (2 if more < _LONG_FRAME else 9)
        if self._under_way is not None:
            self._under_way.taken += size
        return frames

    def look(self, what: str) -> bool:
        """Look from time to time at the bytes that have come from a ``what``, when all whole messages were taken.

        Returns:
            True if there are further messages. They may be signalled no more.

        Raises:
            LimitExceededError: a message has no end.
        """
        held = 0 if self._under_way is None else self._under_way.look(time.monotonic())
        if held <= MOST_UNDER_WAY:
            return False
        if self.has_input():
            return True
        self.is_endless = True
        raise LimitExceededError(
            f"the {what} sends a message without an end ({held // MIB} MiB of it came): it is not one of gradserver's"
        )

    def has_ended(self) -> bool:
        """Return True if the monitor has said that the connection ended."""
        while self._end is None and int(self.monitor.get(EVENTS)) & POLLIN:
            event = recv_monitor_message(self.monitor, NOBLOCK)
            if event["event"] == zmq.EVENT_CONNECTED:
                self._under_way = UnderWay(event["value"])
            else:
                self._end = event["event"]
        return self._end is not None

    def end(self, url: str, what: str) -> ConnectionLostError | CoordinatorUnreachableError:
        """Return what the end means for the ``what`` that the user knows as ``url``. It `has_ended`."""
        if self._end in _BROKEN:
            return ConnectionLostError(f"lost the {what} at {url}: its process ended, or the network to it failed")
        closed = self._end == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        return CoordinatorUnreachableError(no_coordinator(url, what, closed))

    def disconnect(self, linger_ms: int) -> None:
        """Close the connection. What is queued has so long to leave. Does nothing the second time."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=linger_ms)
