"""A worker's end of the tcp channel: one ZeroMQ DEALER socket, and the thread that reads from it.

Sending happens in whichever thread calls `send`, so that a small tensor is on its way without waiting
for another thread to wake up. The socket is therefore shared, under a lock. Its file descriptor is
edge-triggered and any call on the socket can swallow the edge, so whoever has called looks whether
something came in meanwhile, and then wakes the reader.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.channel import Receiver
from protocol.errors import (
    ClosedError,
    ConnectionLostError,
    CoordinatorUnreachableError,
    GradServerError,
    InvalidArgumentError,
    ProtocolError,
)
from protocol.limits import MAX_FRAME_BYTES
from protocol.messages import Message
from protocol.url import parse_url
from protocol.wire import Buffer, decode, encode

log = logging.getLogger("gradserver")

_HEARTBEAT_INTERVAL_MS: Final = 1000
_HEARTBEAT_TIMEOUT_MS: Final = 2500
_RETRY_SECONDS: Final = 0.1
_SAY_SO_AFTER: Final = 2.0
"""Seconds without a coordinator after which the log says that this worker is still trying."""
_LINGER_MS: Final = 1000
_ZERO_COPY_BYTES: Final = 32 * 1024
"""Below this a copy costs less than handing memory over and getting it back."""

_GONE: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
)


class TcpChannel:
    """Connects to a coordinator.

    Args:
        url: ``tcp://HOST:PORT``.
        timeout: seconds to keep trying while nobody listens there.

    Raises:
        InvalidArgumentError: ``url`` is no URL.
        CoordinatorUnreachableError: nobody listened there in time.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        _wait_for_listener(url, timeout)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._configure()
        self._monitor = self._socket.get_monitor_socket(_GONE)
        self._socket.connect(url)
        self._lock = threading.Lock()
        self._closing = False
        self._closed = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._run, name="gradserver-tcp", daemon=True)

    def attach(self, receiver: Receiver) -> None:
        """Start handing what comes in to ``receiver``, from the reader's thread."""
        self._receiver = receiver
        self._thread.start()

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Queue a message; libzmq's own thread sends it. Payloads of some size are not copied."""
        header = encode(message)
        with self._lock:
            if self._closing:
                raise ClosedError("this worker is closed")
            try:
                if payloads:
                    payload = payloads[0]
                    self._socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
                    self._socket.send(payload, zmq.NOBLOCK, copy=len(payload) < _ZERO_COPY_BYTES)
                else:
                    self._socket.send(header, zmq.NOBLOCK)
            except zmq.Again:
                raise ConnectionLostError(self._lost_text("the connection is gone")) from None
            came_in = self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN
        if came_in and threading.current_thread() is not self._thread:
            self._wake()

    def close(self) -> None:
        """Send what is queued (for a second at most), and let go of everything."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        elif not self._thread.is_alive():
            self._release()

    # ── the reader's thread ───────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket.getsockopt(zmq.FD), select.POLLIN)
        poller.register(self._monitor.getsockopt(zmq.FD), select.POLLIN)
        poller.register(self._wake_out.fileno(), select.POLLIN)
        try:
            while not self._closing:
                self._drain()
                gone = self._disconnect_event()
                if gone is not None:
                    self._drain()  # what arrived before the end counts
                    self._report(ConnectionLostError(self._lost_text(gone)))
                    break
                if self._closing:
                    break
                poller.poll()
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
        except GradServerError as error:
            self._report(error)
        finally:
            with self._lock:
                self._closing = True
            self._release()

    def _drain(self) -> None:
        while not self._closing:
            with self._lock:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
            try:
                message, payloads = decode([frame.buffer for frame in frames])
            except ProtocolError as error:
                raise type(error)(f"{self._url} answers, but not as a gradserver coordinator: {error}") from error
            assert self._receiver is not None
            self._receiver.receive(message, payloads)

    def _disconnect_event(self) -> str | None:
        """What the monitor says has ended the connection, if anything has."""
        try:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return None
        if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            return "the coordinator died, or the network between us did"
        return "whatever listens there does not speak ZeroMQ"

    def _report(self, error: GradServerError) -> None:
        if self._receiver is not None:
            self._receiver.lost(error)

    def _release(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=_LINGER_MS)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_in.send(b"\0")

    def _lost_text(self, why: str) -> str:
        return f"lost the coordinator at {self._url}: {why}"

    def _configure(self) -> None:
        option = self._socket.setsockopt
        option(zmq.RECONNECT_IVL, -1)  # a new connection would be a stranger to the coordinator
        option(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        option(zmq.SNDHWM, 0)  # credits bound what is queued
        option(zmq.RCVHWM, 0)
        option(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
        option(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if "[" in self._url:
            option(zmq.IPV6, 1)


def _wait_for_listener(url: str, timeout: float) -> None:
    """Try a plain connection until somebody accepts: libzmq would keep its own attempts to itself."""
    host, port = parse_url(url)
    if port == 0 or host == "*":
        raise InvalidArgumentError(f"{url!r} names no one coordinator: give its host and port")
    started = time.monotonic()
    said = False
    while True:
        left = started + timeout - time.monotonic()
        try:
            socket.create_connection((host.strip("[]"), port), timeout=max(left, 0.01)).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() + _RETRY_SECONDS >= started + timeout:
            raise CoordinatorUnreachableError(
                f"no coordinator answered at {url} within {timeout:g} s ({why.lower()}). "
                f"Is `gradserver serve` running there, and is the port right?"
            )
        if not said and time.monotonic() - started > _SAY_SO_AFTER:
            said = True
            log.warning("no coordinator at %s yet (%s); trying for %g s in all", url, why.lower(), timeout)
        time.sleep(_RETRY_SECONDS)
