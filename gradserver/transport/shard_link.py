"""A data shard: a process that holds slices for a coordinator elsewhere, and reduces and answers them.

It consists of the coordinator's own server and runtime around another engine (`gradserver.engine.shard`). It has one
more connection, the link to the coordinator, which carries orders and reports. Without the link it is of no use. When
the link breaks, the data shard discards its state and tells its workers. If the coordinator can be started again, the
data shard looks for it and enlists once more; otherwise it ends.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    ConnectionLostError,
    CoordinatorError,
    CoordinatorStoppedError,
    CoordinatorUnreachableError,
    GradServerError,
    JoinRefusedError,
    ProtocolError,
    UnexpectedMessageError,
    reason_of,
)
from gradserver.protocol.limits import COORDINATOR_SILENCE, FORGOTTEN_SECONDS, HEARTBEAT_SECONDS, MAX_ORDER_BYTES
from gradserver.protocol.messages import BePresent, Enlist, Enlisted, Failure, Message, Ping
from gradserver.protocol.numbers import Frames, Numbers
from gradserver.protocol.presence import presence_options
from gradserver.protocol.url import no_coordinator, numeric_url, parse_target, parse_url
from gradserver.protocol.wire import decode, encode
from gradserver.runtime import Coordinator

log = logging.getLogger("gradserver")

_RETRY_SECONDS: Final = 0.1
_RETURN_SECONDS: Final = 0.5
"""Time limit of one attempt to find a coordinator again."""
_ANSWER_SECONDS: Final = 10.0
_NEVER_MS: Final = 24 * 3600 * 1000
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_BATCH: Final = 64
_PING_SECONDS: Final = 1.0
"""Interval at which the coordinator is asked for an answer."""
_GONE: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
)
_EVERYWHERE: Final = ("*", "0.0.0.0", "[::]", "::")


class Link:
    """A data shard's end of the connection to its coordinator.

    Args:
        primary: the coordinator's URL.
        timeout: seconds to keep trying while no process listens there.

    Raises:
        CoordinatorUnreachableError: no process listened there in time.
    """

    def __init__(self, primary: str, timeout: float) -> None:
        self.primary = primary
        self.failure: GradServerError | None = None
        """Reason for which the link broke; None while it works."""
        self.is_vital = True
        """True if this process ends when the link breaks."""
        address, self.local, self.on_this_host = _reach(primary, timeout)
        self._address = address
        self._presence: zmq.Socket[bytes] | None = None
        self._coordinator: Coordinator | None = None
        self._connection = -1
        self._numbers = Numbers()
        self._waiting: deque[Frames] = deque()
        """Messages that are complete and in order."""
        self._context = zmq.Context()
        self._connect()

    def _connect(self) -> None:
        self._numbers, self._ask_at = Numbers(), time.monotonic() + _PING_SECONDS
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket, "[" in self._address)
        self._monitor = self._socket.get_monitor_socket(_GONE)
        self._monitor.get(_EVENTS)  # its descriptor signals nothing before this
        self._socket.connect(self._address)

    def enlist(self, offer: Enlist, timeout: float) -> Enlisted:
        """Offer this process as a data shard, and wait for the answer.

        If a message is lost on the way, another connection is made.

        Raises:
            CoordinatorUnreachableError: there was no answer in time.
            ConnectionLostError: each answer was lost.
            JoinRefusedError: the coordinator refuses this data shard, for the reason that the error names.
        """
        until = time.monotonic() + timeout
        lost: float | None = None
        while True:
            try:
                return self._offer(offer, until, timeout)
            except (ConnectionLostError, JoinRefusedError) as error:
                now = time.monotonic()
                if isinstance(error, ConnectionLostError):
                    lost = now
                    log.warning("no answer from the coordinator at %s (%s); retrying", self.primary, error.message)
                elif lost is None or now > lost + FORGOTTEN_SECONDS:
                    raise
                if now + _RETRY_SECONDS >= until:
                    raise
            self._disconnect(0)
            time.sleep(_RETRY_SECONDS)
            self._connect()

    def _offer(self, offer: Enlist, until: float, timeout: float) -> Enlisted:
        self.send(offer)
        self.send(Ping())  # its answer shows whether a message was lost
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (now := time.monotonic()) < until:
            ready = dict(poller.poll(max(int((min(until, self.due) - now) * 1000) + 1, 0)))
            if self._socket in ready or self._waiting:
                match self._take_one():
                    case Enlisted() as enlisted, _:
                        return enlisted
                    case Failure() as failure, _:
                        raise failure.exception()
                    case None:
                        continue
                    case other, _:
                        what = f"a {type(other).__name__}"
                        raise UnexpectedMessageError(f"{self.primary} is no coordinator: it answers with {what}")
            if self._monitor in ready:
                closed = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                raise CoordinatorUnreachableError(no_coordinator(self.primary, "coordinator", closed))
            self._ask()
        raise CoordinatorUnreachableError(
            f"the process that listens at {self.primary} did not answer as a gradserver coordinator "
            f"within {timeout:g} s"
        )

    # ── as the loop sees it ───────────────────────────────────────────────────────────────────────────

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors to wait at. They are edge-triggered: call `take_some` before each wait, until nothing is left."""
        return int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD))

    def serve(self, coordinator: Coordinator, connection: int) -> None:
        """Hand every message from now on to ``coordinator``, as one of ``connection``."""
        self._coordinator, self._connection = coordinator, connection

    def take_some(self) -> bool:
        """Receive messages, up to a number. Return whether there were none. Sets ``failure`` when the link breaks."""
        assert self._coordinator is not None
        for taken in range(_BATCH):
            if self.failure is not None:
                return True
            if not self._waiting and not int(self._socket.get(_EVENTS)) & _POLLIN:
                self._check_connection()
                return taken == 0
            try:
                match self._take_one():
                    case Failure() as failure, _:
                        self._break(failure.exception())
                    case message, payloads:
                        self._coordinator.receive(self._connection, message, payloads)
            except (ProtocolError, ConnectionLostError) as error:
                self._break(error)
                return True
        return False

    def _take_one(self) -> tuple[Message, Sequence[Buffer]] | None:
        """Return the next message; None if it is out of order, or not for the engine."""
        if not self._waiting:
            frames: Frames = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            self._waiting.extend(self._numbers.take(frames, time.monotonic()))
        if not self._waiting:
            return None
        try:
            message, payloads = decode(self._waiting.popleft())
        except ProtocolError as error:
            raise type(error)(f"{self.primary} answers, but not as a gradserver coordinator: {error}") from error
        if isinstance(message, BePresent) and self._presence is None:
            self._be_present(message)
        return None if isinstance(message, Ping | BePresent) else (message, payloads)

    def _be_present(self, wanted: BePresent) -> None:
        presence = self._presence = self._context.socket(zmq.DEALER)
        for option, value in presence_options(wanted, self._address).items():
            presence.setsockopt(getattr(zmq, option), value)
        presence.connect(self._address)
        presence.send(encode(Ping()))

    @property
    def due(self) -> float:
        """Time at which a missing message has to be there, or at which to ask again."""
        return min(self._numbers.deadline or self._ask_at, self._ask_at)

    def _ask(self) -> None:
        """Send a Ping at intervals. Its answer shows that a message was lost with none behind it.

        Raises:
            ConnectionLostError: a message is missing.
        """
        now = time.monotonic()
        self._numbers.check(now)
        if self._ask_at <= now:
            self._ask_at = now + _PING_SECONDS
            self.send(Ping())

    def _check_connection(self) -> None:
        try:
            self._ask()
        except ConnectionLostError as error:
            self._break(error)
        if int(self._monitor.get(_EVENTS)) & _POLLIN and not int(self._socket.get(_EVENTS)) & _POLLIN:
            self._break(CoordinatorError("its process or the network to it failed"))

    def _break(self, error: GradServerError) -> None:
        if self.failure is not None:
            return
        if isinstance(error, CoordinatorStoppedError):
            self.failure = error
        else:
            self.failure = CoordinatorError(f"lost the coordinator at {self.primary}: {error.message}")

    # ── as the engine sees it ─────────────────────────────────────────────────────────────────────────

    def attach(self, receiver: object) -> None:
        """Ignore ``receiver``: messages always go to the coordinator."""

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Queue a message."""
        try:
            self._socket.send_multipart([self._numbers.numbered(encode(message)), *payloads], zmq.NOBLOCK)
        except zmq.Again:  # libzmq has given the connection up
            self._break(CoordinatorError("the connection was closed"))

    def close(self) -> None:
        """Break the link, as a message violated the protocol."""
        self._break(CoordinatorError("it sent a message that is no order"))

    def end(self) -> None:
        """Close the connection. May be called twice."""
        if not self._context.closed:
            self._disconnect(0 if self.failure else 1000)
            self._context.term()

    def _disconnect(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        presence, self._presence = self._presence, None
        if presence is not None:
            presence.close()


def find_again(
    primary: str, offer: Enlist, patience: float, enough: Callable[[], bool]
) -> tuple[Link, Enlisted] | None:
    """Look for the coordinator for ``patience`` seconds, or until ``enough()``, and offer it this process once more."""
    until = time.monotonic() + patience
    while time.monotonic() < until and not enough():
        try:
            link = Link(primary, _RETURN_SECONDS)
        except CoordinatorUnreachableError:
            continue
        try:
            return link, link.enlist(offer, _ANSWER_SECONDS)
        except GradServerError as error:  # it may not have noticed yet that the earlier connection is closed
            log.info("%s; retrying", error.message)
            link.failure = error
            link.end()
            time.sleep(_RETRY_SECONDS)
    return None


def advertised(url: str, link: Link) -> str:
    """Return the URL at which workers find a server that listens at ``url``.

    If it listens on every address, this is the address from which it reaches the coordinator. On the coordinator's own
    host it stays unspecified: a worker that has found the coordinator has an address of this host that works for it.
    """
    host, port = parse_url(url)
    return url if host not in _EVERYWHERE or link.on_this_host else numeric_url(link.local, port)


def _reach(url: str, timeout: float) -> tuple[str, str, bool]:
    """Return the URL with the address that was reached, the local address, and whether both are the same host.

    Tries a plain connection until it is accepted: libzmq would not report its own attempts.
    """
    target = parse_target(url)
    until = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection(target, timeout=max(until - time.monotonic(), 0.01)) as connection:
                there, here = connection.getpeername(), connection.getsockname()[0]
                return numeric_url(*there[:2]), here, there[0] == here
        except OSError as error:
            why = reason_of(error)
        if time.monotonic() + _RETRY_SECONDS >= until:
            raise CoordinatorUnreachableError(
                f"no coordinator answered at {url} within {timeout:g} s ({why}). "
                f"Is `gradserver serve` running there, and is the port right?"
            )
        time.sleep(_RETRY_SECONDS)


def _configure(dealer: zmq.Socket[bytes], ipv6: bool) -> None:
    dealer.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_ORDER_BYTES)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int((COORDINATOR_SILENCE - HEARTBEAT_SECONDS) * 1000))
    dealer.setsockopt(zmq.IPV6, int(ipv6))
