"""A worker's end of the tcp channel: one ZeroMQ DEALER socket, shared by the threads that need it.

A small tensor should be two hops of the network and none between threads. So whoever sends does it in
his own thread, and whoever waits for a result reads it himself: he becomes the *reader*, if nobody is.
A thread of our own reads only while results are due that nobody waits for (see `TcpChannel.watch`).

The socket is not safe to share, so every call on it is made under a lock. Its file descriptor is
edge-triggered, and any call can swallow the edge: therefore a reader first takes what there is and then
waits, and a sender looks whether something came in under his hands, and if so wakes the reader.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.channel import Lock, Receiver
from protocol.errors import (
    BackendUnavailableError,
    ClosedError,
    ConnectionLostError,
    CoordinatorUnreachableError,
    GradServerError,
    ProtocolError,
)
from protocol.limits import MAX_FRAME_BYTES
from protocol.messages import MemoryAt, Message, Place, ShareMemory
from protocol.url import numeric_url, parse_target
from protocol.wire import Buffer, decode, encode
from worker.memory import SharedMemory

log = logging.getLogger("gradserver")

_HEARTBEAT_INTERVAL_MS: Final = 1000
_HEARTBEAT_TIMEOUT_MS: Final = 2500
_RETRY_SECONDS: Final = 0.1
_SAY_SO_AFTER: Final = 2.0
"""Seconds without a coordinator after which the log says that this worker is still trying."""
_LINGER_MS: Final = 1000
_NEVER_MS: Final = 24 * 3600 * 1000
_NOBLOCK: Final = int(zmq.NOBLOCK)  # plain numbers: combining zmq's enumeration takes longer than sending
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
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
        address, self.on_this_host = _wait_for_listener(url, timeout)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._configure(ipv6="[" in address)
        self._monitor = self._socket.get_monitor_socket(_GONE)
        self._monitor.get(_EVENTS)  # its descriptor signals nothing before this, and later this could swallow a signal
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._closing = False
        """Nothing is sent or received any more."""
        self._closed = False
        self._gone = False
        """The monitor has said that the connection ended."""
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = select.poll()
        self._wake_fd = self._wake_out.fileno()
        self._monitor_fd = int(self._monitor.get(zmq.FD))
        for descriptor in (int(self._socket.get(zmq.FD)), self._monitor_fd, self._wake_fd):
            self._poller.register(descriptor, select.POLLIN)
        self._receiver: Receiver | None = None
        self._enough: Callable[[], bool] = lambda: True
        self._bystanders = 0
        """Threads that wait while another one reads."""
        self._watched = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._watch, name="gradserver-tcp", daemon=True)
        self._memory: SharedMemory | None = None
        self._memory_at: MemoryAt | None = None
        self._asking: threading.Lock | None = None
        """Whoever waits to hear where memory can be shared: let go of when that is known, or never will be."""

    def attach(self, receiver: Receiver) -> None:
        """What comes in goes to ``receiver``, in the thread of whoever reads."""
        self._receiver = receiver
        self._thread.start()

    # ── memory that the coordinator sees too ──────────────────────────────────────────────────────────

    def share_memory(self, timeout: float) -> None:
        """Share memory with the coordinator from now on, where both run on one host.

        Raises:
            BackendUnavailableError: that cannot be; says why. Everything goes through the connection then.
        """
        self._asking = asking = threading.Lock()
        asking.acquire()
        with contextlib.suppress(ClosedError, ConnectionLostError):  # which is the next caller's to hear, and to handle
            self.send(ShareMemory())
        if self._closing or not self.wait(asking, timeout) or self._memory_at is None:
            raise BackendUnavailableError("the coordinator does not say whether it shares memory")
        level = logging.INFO if self.on_this_host else logging.DEBUG
        self._memory = SharedMemory(self._memory_at.address, self._memory_at.token, timeout, level)

    @property
    def kind(self) -> str:
        """How gradients reach the coordinator: "shm" or "tcp"."""
        return "tcp" if self._memory is None else "shm"

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Memory that the coordinator sees too; None if there is none."""
        return None if self._memory is None else self._memory.empty(nbytes)

    def place_of(self, data: npt.NDArray[np.uint8]) -> Place | None:
        """Where ``data`` lies in memory that the coordinator sees too; None if it does not."""
        return None if self._memory is None else self._memory.place_of(data)

    def _heard_of_memory(self, answer: MemoryAt | None) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            self._memory_at = answer
            asking.release()

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Queue a message; libzmq's own thread sends it. Payloads of some size are not copied."""
        header = encode(message)
        with self._lock:
            if self._closing:
                raise ClosedError("this worker is closed")
            try:
                if payloads:
                    payload = payloads[0]
                    self._socket.send(header, _NOBLOCK_MORE)
                    self._socket.send(payload, _NOBLOCK, copy=len(payload) < _ZERO_COPY_BYTES)
                else:
                    self._socket.send(header, _NOBLOCK)
            except zmq.Again:  # libzmq has given the connection up
                raise ConnectionLostError(self._lost_text("the connection is gone")) from None
            missed = self._reading.locked() and int(self._socket.get(_EVENTS)) & _POLLIN
        if missed:
            self._wake()

    # ── receiving ─────────────────────────────────────────────────────────────────────────────────────

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait until ``done`` can be acquired: by reading, unless another thread does that already."""
        until = time.monotonic() + timeout
        if self._reading.acquire(blocking=False):
            try:
                while not done.acquire(blocking=False):
                    left = until - time.monotonic()
                    if self._closing or left <= 0:
                        break
                    self._read(left)
                else:
                    return True
            finally:
                self._reading.release()
            return done.acquire(timeout=max(until - time.monotonic(), 0.0))
        # Another thread reads. It may leave before our result is there, and then our own thread takes over.
        with self._lock:
            self._bystanders += 1
        self._watched.release()
        try:
            return done.acquire(timeout=max(until - time.monotonic(), 0.0))
        finally:
            with self._lock:
                self._bystanders -= 1

    def watch(self, enough: Callable[[], bool]) -> None:
        """Have our own thread read, as soon as nobody else does, until ``enough()``."""
        self._enough = enough
        self._watched.release()

    def _watch(self) -> None:
        """The life of our own thread."""
        while True:
            self._watched.acquire()
            with self._reading:
                while not self._closing and (self._bystanders or not self._enough()):
                    self._read(None)
                if self._closing:
                    return

    def _read(self, timeout: float | None) -> None:
        """Take one message; if there is none, wait for something to happen. Only for the one reader.

        Reports a broken connection to the receiver, and then is closing.
        """
        try:
            if self._take():
                return
            for descriptor, _ in self._poller.poll(None if timeout is None else math.ceil(timeout * 1000)):
                if descriptor == self._wake_fd:
                    self._wake_out.recv(4096)
                elif descriptor == self._monitor_fd:
                    self._check_connection()
                else:
                    self._take()
        except GradServerError as error:
            self._closing = True
            if self._receiver is not None:
                self._receiver.lost(error)
            self._heard_of_memory(None)

    def _take(self) -> bool:
        """Hand one message to the receiver; whether there was one."""
        frames = self._receive()
        if frames is None:
            return False
        try:
            message, payloads = decode(frames)
        except ProtocolError as error:
            raise type(error)(f"{self._url} answers, but not as a gradserver coordinator: {error}") from error
        assert self._receiver is not None
        if type(message) is MemoryAt:
            self._heard_of_memory(message)
        else:
            self._receiver.receive(message, payloads)
        return True

    def _receive(self) -> list[Buffer] | None:
        with self._lock:
            if self._closing or not int(self._socket.get(_EVENTS)) & _POLLIN:
                return None
            frames: list[Buffer] = []
            more = True
            while more:
                frame = self._socket.recv(_NOBLOCK, copy=False)
                frames.append(frame.buffer)
                more = frame.more
            return frames

    def _check_connection(self) -> None:
        """Raise ConnectionLostError if the monitor says so, after taking in what arrived before the end."""
        with self._lock:
            if self._closing or not int(self._monitor.get(_EVENTS)) & _POLLIN:
                return
            event = recv_monitor_message(self._monitor, _NOBLOCK)["event"]
            self._gone = True
        while self._take():
            pass
        if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            raise ConnectionLostError(self._lost_text("the coordinator died, or the network between us did"))
        raise CoordinatorUnreachableError(f"whatever listens at {self._url} is no gradserver coordinator")

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Send what is queued (for a second at most), and let go of everything. May be called twice."""
        with self._lock:
            self._closing = True
            closed, self._closed = self._closed, True
        if closed:
            return
        self._wake()
        self._watched.release()
        current = threading.current_thread()
        if self._thread.is_alive() and current is not self._thread:
            self._thread.join()
        with self._reading, self._lock:  # whoever still reads has been woken, and leaves
            gone = self._gone or bool(int(self._monitor.get(_EVENTS)) & _POLLIN)  # then nothing can leave any more
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0 if gone else _LINGER_MS)
            self._wake_in.close()
            self._wake_out.close()
        self._context.term()
        if self._memory is not None:
            self._memory.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_in.send(b"\0")

    def _lost_text(self, why: str) -> str:
        return f"lost the coordinator at {self._url}: {why}"

    def _configure(self, ipv6: bool) -> None:
        option = self._socket.setsockopt
        # A new connection would be a stranger to the coordinator, so there is to be none; but told never to
        # reconnect (-1), libzmq throws away what has arrived and was not read yet, the reason for the end included.
        option(zmq.RECONNECT_IVL, _NEVER_MS)
        option(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        option(zmq.SNDHWM, 0)  # credits bound what is queued
        option(zmq.RCVHWM, 0)
        option(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
        option(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        option(zmq.IPV6, int(ipv6))


def _wait_for_listener(url: str, timeout: float) -> tuple[str, bool]:
    """Try a plain connection until somebody accepts: libzmq would keep its own attempts to itself.

    Returns the URL with the address that was reached (a name may mean several, of which libzmq would try one),
    and whether that is an address of this host.
    """
    target = parse_target(url)
    started = time.monotonic()
    said = False
    while True:
        left = started + timeout - time.monotonic()
        try:
            with socket.create_connection(target, timeout=max(left, 0.01)) as connection:
                there, here = connection.getpeername(), connection.getsockname()[0]
                return numeric_url(*there[:2]), there[0] == here or here in ("127.0.0.1", "::1")
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
