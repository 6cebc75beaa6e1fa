"""One connection of the tcp channel: its socket, and the monitor that says when it is gone."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

import zmq

from gradserver.protocol.channel import Receiver
from gradserver.protocol.errors import ConnectionLostError, CoordinatorUnreachableError, reason_of
from gradserver.protocol.limits import COORDINATOR_SILENCE, HEARTBEAT_SECONDS, MAX_FRAME_BYTES
from gradserver.protocol.messages import BePresent, Message
from gradserver.protocol.numbers import Frames, Numbers
from gradserver.protocol.url import numeric_url, parse_target, parse_url
from gradserver.worker.transport import forking
from gradserver.worker.transport.beacon import Presence
from gradserver.worker.transport.local import LocalLine

log = logging.getLogger("gradserver")

_RETRY_SECONDS: Final = 0.1
_SAY_SO_AFTER: Final = 2.0
"""Seconds without a coordinator after which the log says that this worker is still trying."""
_LINGER_MS: Final = 1000
_NEVER_MS: Final = 24 * 3600 * 1000
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_GONE: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
)


class Line:
    """The connection to one data shard. Number 0 is the coordinator itself."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, address: str, number: int) -> None:
        self.url = url
        self.what = "data shard" if number else "coordinator"
        self.number = number
        self._address = address
        self.presence: Presence | None = None
        self.receiver: Receiver | None = None
        self.gone = False
        """The monitor has said that the connection ended."""
        self.shares = False
        """Its process sees the memory that this worker shares."""
        self.local: LocalLine | None = None
        """Where messages pass instead, if that process is of this host. Whether it lives is still said here."""
        self.sends_locally = False
        self.numbers = Numbers()
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket, ipv6="[" in address)
        self.monitor = self.socket.get_monitor_socket(_GONE)
        self.monitor.get(_EVENTS)  # its descriptor signals nothing before this, and later this could swallow a signal
        self.monitor_fd = int(self.monitor.get(zmq.FD))
        self.socket.connect(address)
        forking.guard(address)

    def be_present(self, wanted: BePresent, tell: Callable[[Message], None]) -> None:
        """Show from now on that this process runs, unless it does so."""
        if self.presence is not None and self.presence.identity != wanted.identity:
            self.presence.close()
            self.presence = None
        if self.presence is None:
            self.presence = Presence(self._address, wanted, tell)

    def be_absent(self) -> None:
        """Show no more that this process runs."""
        if self.presence is not None:
            self.presence.close()

    def ordered(self, frames: Frames) -> Iterable[Frames]:
        """The messages that are due, now that this one has come.

        Raises:
            ConnectionLostError: something is missing.
        """
        try:
            return self.numbers.take(frames, time.monotonic())
        except ConnectionLostError as error:
            raise ConnectionLostError(self.lost_text(error.message)) from None

    def check(self, now: float) -> None:
        """Raise ConnectionLostError if something has been missing for too long."""
        try:
            self.numbers.check(now)
        except ConnectionLostError as error:
            raise ConnectionLostError(self.lost_text(error.message)) from None

    def give_up(self) -> None:
        """Close the connection if something is missing, so that the other side hears of it."""
        if self.numbers.deadline is not None:
            self.gone = True
            self._disconnect(0)  # to disconnect it would take further calls on this socket, and nobody makes any

    def lost_text(self, why: str) -> str:
        """What to say when the connection is gone."""
        return f"lost the {self.what} at {self.url}: {why}"

    def close(self) -> None:
        """Send what is queued, if it still can be, for a second at most. It is absent by then (`be_absent`)."""
        forking.unguard(self._address)
        gone = self.gone or bool(int(self.monitor.get(_EVENTS)) & _POLLIN)  # then nothing can leave any more
        if self.local is not None:
            self.local.close(0.0 if gone else _LINGER_MS / 1000)
        self._disconnect(0 if gone else _LINGER_MS)

    def _disconnect(self, linger_ms: int) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=linger_ms)


def beside(url: str, primary: str) -> str:
    """``url`` of a data shard, which may say that it listens everywhere on the coordinator's own host."""
    host, port = parse_url(url)
    if host.strip("[]") in ("*", "0.0.0.0", "::"):
        host = parse_url(primary)[0]
    return f"tcp://{host}:{port}"


def reach(url: str, timeout: float) -> tuple[str, bool]:
    """Try once whether somebody accepts a plain connection, and give what `wait_for_listener` does. OSError if not."""
    with socket.create_connection(parse_target(url), timeout=timeout) as connection:
        there, here = connection.getpeername(), connection.getsockname()[0]
        return numeric_url(*there[:2]), there[0] == here or here in ("127.0.0.1", "::1")


def wait_for_listener(url: str, timeout: float, what: str = "coordinator") -> tuple[str, bool]:
    """Try a plain connection until somebody accepts: libzmq would keep its own attempts to itself.

    Returns the URL with the address that was reached (a name may mean several, of which libzmq would try one),
    and whether that is an address of this host.
    """
    started = time.monotonic()
    said = False
    while True:
        left = started + timeout - time.monotonic()
        try:
            return reach(url, max(left, 0.01))
        except OSError as error:
            why = reason_of(error)
        if time.monotonic() + _RETRY_SECONDS >= started + timeout:
            raise CoordinatorUnreachableError(
                f"no {what} answered at {url} within {timeout:g} s ({why}). "
                f"Is `gradserver serve` running there, and is the port right?"
            )
        if not said and time.monotonic() - started > _SAY_SO_AFTER:
            said = True
            log.warning("no %s at %s yet (%s); trying for %g s in all", what, url, why, timeout)
        time.sleep(_RETRY_SECONDS)


def _configure(dealer: zmq.Socket[bytes], ipv6: bool) -> None:
    option = dealer.setsockopt
    # A new connection would be a stranger to the coordinator, so there is to be none; but told never to
    # reconnect (-1), libzmq throws away what has arrived and was not read yet, the reason for the end included.
    option(zmq.RECONNECT_IVL, _NEVER_MS)
    option(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    option(zmq.SNDHWM, 0)  # credits bound what is queued
    option(zmq.RCVHWM, 0)
    option(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
    option(zmq.HEARTBEAT_TIMEOUT, int((COORDINATOR_SILENCE - HEARTBEAT_SECONDS) * 1000))
    option(zmq.IPV6, int(ipv6))
