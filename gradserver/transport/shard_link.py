"""A data shard: a process that holds slices for a coordinator elsewhere, and reduces and answers them.

It consists of the coordinator's own server and runtime around another engine (`gradserver.engine.shard`). It has one
more connection, the link to the coordinator, which carries orders and reports. Without the link it is of no use. When
the link breaks, the data shard discards its state and tells its workers. If the coordinator can be started again, the
data shard looks for it and enlists once more; otherwise it ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import zmq

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
)
from gradserver.protocol.limits import FORGOTTEN_SECONDS, MAX_ORDER_BYTES
from gradserver.protocol.messages import BePresent, Enlist, Enlisted, Failure, Message, Ping
from gradserver.protocol.transport.beacon import beacon_socket, light_beacon
from gradserver.protocol.transport.dealer import PING_SECONDS, Dealer
from gradserver.protocol.transport.numbers import Frames
from gradserver.protocol.transport.reach import RETRY_SECONDS, wait_for_listener
from gradserver.protocol.transport.under_way import LOOK_SECONDS
from gradserver.protocol.url import is_everywhere, not_answered, numeric_url, parse_url
from gradserver.protocol.wire import decode, encode
from gradserver.runtime import Runtime

log = logging.getLogger("gradserver")

_RETURN_SECONDS: Final = 0.5
"""Time limit of one attempt to find a coordinator again."""
_ANSWER_SECONDS: Final = 10.0
_BATCH: Final = 64


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
        self._address, self.local, self.on_this_host = wait_for_listener(primary, timeout)
        self._beacon: zmq.Socket[bytes] | None = None
        self._runtime: Runtime | None = None
        self._connection = -1
        self._waiting: deque[Frames] = deque()
        """Messages that are complete and in order."""
        self._context = zmq.Context()
        self._connect()

    def _connect(self) -> None:
        self._ask_at = time.monotonic() + PING_SECONDS
        self._dealer = Dealer(self._context, self._address, MAX_ORDER_BYTES)

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
                if now + RETRY_SECONDS >= until:
                    raise
            self._disconnect(0)
            time.sleep(RETRY_SECONDS)
            self._connect()

    def _offer(self, offer: Enlist, until: float, timeout: float) -> Enlisted:
        self.send(offer)
        self.send(Ping())  # its answer shows whether a message was lost
        poller = zmq.Poller()
        poller.register(self._dealer.socket, zmq.POLLIN)
        poller.register(self._dealer.monitor, zmq.POLLIN)
        while (now := time.monotonic()) < until:
            ready = dict(poller.poll(max(int((min(until, self.due, now + LOOK_SECONDS) - now) * 1000) + 1, 0)))
            if self._dealer.socket in ready or self._waiting:
                match self._take_one():
                    case Enlisted() as enlisted, _:
                        return enlisted
                    case Failure() as failure, _:
                        raise failure.exception()
                    case None:
                        continue
                    case other, _:
                        what = f"a {type(other).__name__}"
                        raise UnexpectedMessageError(f"{self.primary} is not a coordinator: it answers with {what}")
            self._dealer.look("coordinator")
            if self._dealer.has_ended():
                raise CoordinatorUnreachableError(self._dealer.end(self.primary, "coordinator").message)
            self._ask()
        raise CoordinatorUnreachableError(not_answered(self.primary, timeout))

    # ── as the loop sees it ───────────────────────────────────────────────────────────────────────────

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors to wait at. They are edge-triggered: call `take_some` before each wait, until nothing is left."""
        return self._dealer.socket_fd, self._dealer.monitor_fd

    def serve(self, runtime: Runtime, connection: int) -> None:
        """Hand every message from now on to ``runtime``, as one of ``connection``."""
        self._runtime, self._connection = runtime, connection

    def take_some(self) -> bool:
        """Receive messages, up to a number. Return whether there were none. Sets ``failure`` when the link breaks."""
        assert self._runtime is not None
        for taken in range(_BATCH):
            if self.failure is not None:
                return True
            if not self._waiting and not self._dealer.has_input():
                self._check_connection()
                return taken == 0
            try:
                match self._take_one():
                    case Failure() as failure, _:
                        self._break(failure.exception())
                    case message, payloads:
                        self._runtime.receive(self._connection, message, payloads)
            except (ProtocolError, ConnectionLostError) as error:
                self._break(error)
                return True
        return False

    def _take_one(self) -> tuple[Message, Sequence[Buffer]] | None:
        """Return the next message; None if it is out of order, or not for the engine."""
        if not self._waiting:
            self._waiting.extend(self._dealer.numbers.take(self._dealer.receive(), time.monotonic()))
        if not self._waiting:
            return None
        try:
            message, payloads = decode(self._waiting.popleft())
        except ProtocolError as error:
            raise type(error)(f"{self.primary} answers, but not as a gradserver coordinator: {error}") from error
        if isinstance(message, BePresent) and self._beacon is None:
            self._beacon = beacon_socket(self._context, message, self._address)
            light_beacon(self._beacon, self._address)
        return None if isinstance(message, Ping | BePresent) else (message, payloads)

    @property
    def due(self) -> float:
        """Time at which a missing message has to be there, or at which to ask again."""
        return min(self._dealer.numbers.deadline or self._ask_at, self._ask_at)

    def _ask(self) -> None:
        """Send a Ping at intervals. Its answer shows that a message was lost with none behind it.

        Raises:
            ConnectionLostError: a message is missing.
        """
        now = time.monotonic()
        self._dealer.look("coordinator")
        self._dealer.numbers.check(now)
        if self._ask_at <= now:
            self._ask_at = now + PING_SECONDS
            self.send(Ping())

    def _check_connection(self) -> None:
        try:
            self._ask()
        except (ProtocolError, ConnectionLostError) as error:
            self._break(error)
        if self._dealer.has_ended() and not self._dealer.has_input():
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
            self._dealer.socket.send_multipart([self._dealer.numbers.numbered(encode(message)), *payloads], zmq.NOBLOCK)
        except zmq.Again:  # libzmq has given the connection up
            self._break(CoordinatorError("the connection was closed"))

    def close(self) -> None:
        """Break the link, as a message violated the protocol."""
        self._break(CoordinatorError("it sent a message that is not an order"))

    def end(self) -> None:
        """Close the connection. May be called twice."""
        if not self._context.closed:
            self._disconnect(0 if self.failure else 1000)
            self._context.term()

    def _disconnect(self, linger_ms: int) -> None:
        self._dealer.disconnect(linger_ms)
        beacon, self._beacon = self._beacon, None
        if beacon is not None:
            beacon.close()


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
            time.sleep(RETRY_SECONDS)
    return None


def advertised(url: str, link: Link) -> str:
    """Return the URL at which workers find a server that listens at ``url``.

    If it listens on every address, this is the address from which it reaches the coordinator. On the coordinator's own
    host it stays unspecified: a worker that has found the coordinator has an address of this host that works for it.
    """
    host, port = parse_url(url)
    return url if not is_everywhere(host) or link.on_this_host else numeric_url(link.local, port)
