"""The coordinator's end of the tcp channel: one ZeroMQ ROUTER socket, and the daemon's loop.

How a lost worker is noticed: libzmq closes the connection of a process that died at once, and that of
a frozen or cut-off one when its heartbeats stop (they are answered by libzmq's own thread, so a worker
whose Python is busy is not taken for dead). Either way the socket's monitor says that *a* connection
closed; which one shows when a Ping can no longer be routed to it.

Workers of the same host may talk through a local socket (`.unix`), once they have joined here. Who is
alive is still for this socket to say.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq

from gradserver.channels.binding import RECEIVE_QUEUE, bind_router
from gradserver.channels.disconnects import Disconnects
from gradserver.channels.hosted import Line
from gradserver.channels.unix import UnixServer
from gradserver.coordinator import Coordinator
from protocol.buffer import Buffer
from protocol.errors import (
    GradServerError,
    MalformedMessageError,
    UnexpectedMessageError,
)
from protocol.messages import (
    Attend,
    Enlist,
    Failure,
    Join,
    Leave,
    MemoryAt,
    Message,
    Ping,
    Place,
    Push,
    Scope,
    ShareMemory,
    Status,
    StatusRequest,
)
from protocol.resuming import Resume
from protocol.wire import decode, encode

log = logging.getLogger("gradserver")

_GONE: Final = "it died, froze or lost its network"
_NOBLOCK: Final = int(zmq.NOBLOCK)  # plain numbers: combining zmq's enumeration takes longer than sending
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_MAX_EARLY: Final = 4096
"""Workers that wait while none may join. More are let in."""
_BATCH: Final = 64
"""Messages taken before timers and the monitor are looked at again."""
_ZERO_COPY_BYTES: Final = 32 * 1024
"""Below this a copy costs less than handing memory over and getting it back."""


class Link(Protocol):
    """A connection of another kind that the loop sees to: a data shard's to its coordinator."""

    failure: GradServerError | None

    @property
    def descriptors(self) -> tuple[int, int]:
        """What to wait at, once there is nothing left to take."""

    def take_some(self) -> bool:
        """Take what has come in; whether there was nothing. Sets ``failure`` when the link breaks."""


class TcpServer:
    """Binds a ROUTER socket and runs the loop.

    Args:
        coordinator: who is told what comes in.
        bind: ``tcp://HOST:PORT``; port 0 picks a free one.
        share_memory: whether workers of this host may share memory instead of sending gradients.

    Raises:
        CoordinatorError: the address cannot be bound; the message says why.
    """

    def __init__(self, coordinator: Coordinator, bind: str, share_memory: bool = True) -> None:
        self._coordinator = coordinator
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self.url = bind_router(self._router, bind)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._disconnects = Disconnects(self._router)
        self._peers: dict[bytes, _Peer] = {}
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping: str | None = None
        self._calls: deque[Callable[[], None]] = deque()
        coordinator.run_in(self._call_soon)
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._unsure = True
        """Whether the router may have something that its descriptor does not signal any more."""
        self._poller = select.poll()
        self._unix = UnixServer(self._poller, self) if share_memory else None
        self._link: Link | None = None
        self._early: list[tuple[bytes, Sequence[Buffer]]] | None = None

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def wake_fd(self) -> int:
        """A file descriptor to write a byte to when the loop should look around, also from signal handlers."""
        return self._wake_in.fileno()

    def request_stop(self, reason: str) -> None:
        """Make `run` tell the workers ``reason`` and return. Safe to call from signal handlers and threads."""
        self._stopping = reason
        self._wake()

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Have ``call`` called by the loop. Safe to call from any thread."""
        self._calls.append(call)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_in.send(b"\0")

    def hold(self) -> None:
        """From now on let nobody join who has not yet: he waits until `release`."""
        self._early = []

    def release(self) -> None:
        """Let those join who have waited, and everybody who comes."""
        early, self._early = self._early or [], None
        for identity, frames in early:
            self._take(identity, frames)

    def look(self) -> None:
        """Make `run` look whether its condition holds. Safe to call from signal handlers and threads."""
        self._call_soon(lambda: None)

    def tend(self, link: Link) -> None:
        """Have the loop see to ``link``, too, and stop when that breaks."""
        self._link = link
        for descriptor in link.descriptors:
            self._poller.register(descriptor, select.POLLIN)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until `request_stop`, or ``until()``.

        libzmq's descriptors are edge-triggered, and any call on the router can swallow its edge: so after one what
        there is must be taken before waiting. (`zmq.Poller` does the same with six times the system calls.)
        """
        router, monitor, wake = int(self._router.get(zmq.FD)), self._disconnects.descriptor, self._wake_out.fileno()
        poller = self._poller
        for descriptor in (router, monitor, wake):
            poller.register(descriptor, select.POLLIN)
        self._disconnects.notice()  # also because its descriptor signals nothing before it was looked at once
        while self._stopping is None:
            caught_up = not self._unsure or self._take_some()
            if self._link is not None:
                caught_up = self._link.take_some() and caught_up
                if self._link.failure is not None:
                    self._stopping = self._link.failure.message
                    break
            if until():
                return
            due = self._next_timer()
            if due is not None and due <= time.monotonic():
                self._run_timers()
                continue
            wait = 0 if not caught_up else None if due is None else math.ceil((due - time.monotonic()) * 1000)
            for descriptor, events in poller.poll(wait):
                if descriptor == monitor:
                    self._disconnects.notice()
                elif descriptor == wake:
                    self._wake_out.recv(4096)
                    while self._calls:
                        self._calls.popleft()()
                elif descriptor == router:
                    self._unsure = True
                elif self._unix is not None:
                    self._unix.ready(descriptor, events)
        self._coordinator.stop(self._stopping)

    def close(self) -> None:
        """Let go of the port. What was said to workers has a second to leave."""
        if self._unix is not None:
            self._unix.close()
        self._disconnects.close()
        self._router.close(linger=1000)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    def _next_timer(self) -> float | None:
        due = [at for at in (self._coordinator.next_deadline(), self._disconnects.due) if at is not None]
        return min(due, default=None)

    def _run_timers(self) -> None:
        now = time.monotonic()
        deadline = self._coordinator.next_deadline()
        if deadline is not None and deadline <= now:
            self._coordinator.tick()
        if self._disconnects.is_time(now):
            self._probe()

    # ── in ────────────────────────────────────────────────────────────────────────────────────────────

    def _take_some(self) -> bool:
        """Receive what has come in, up to a number that keeps timers punctual; whether that was all."""
        for _ in range(_BATCH):
            self._unsure = False
            if not int(self._router.get(_EVENTS)) & _POLLIN:
                return True
            self._take_one()
        self._unsure = True
        return False

    def _take_one(self) -> None:
        """Receive one message. Payloads are left where libzmq put them."""
        receive = self._router.recv
        identity = receive(_NOBLOCK)
        frames: list[Buffer] = []
        more = True
        while more:
            frame = receive(_NOBLOCK, copy=False)
            frames.append(frame.buffer)
            more = frame.more
        self._take(identity, frames)

    def _take(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        peer = self._peers.get(identity)
        try:
            message, payloads = decode(frames)
        except GradServerError as error:
            if peer is None:
                self._turn_away(identity, error)
            else:
                self._coordinator.garbled(peer.connection, error)
            return
        if type(message) is StatusRequest:
            status = json.dumps({"url": self.url, **self._shared(), **self._coordinator.snapshot()}).encode()
            self.route(identity, Status(), [status])
        elif peer is not None:
            self._take_from(peer, message, payloads)
        elif isinstance(message, Join) and self._early is not None and len(self._early) < _MAX_EARLY:
            self._early.append((identity, frames))
        elif isinstance(message, Join | Enlist | Attend | Resume):
            peer = self._peers[identity] = _Peer(self, identity)
            peer.connection = self._coordinator.connect(peer)
            self._coordinator.receive(peer.connection, message, payloads)
        else:
            what = type(message).__name__
            self._turn_away(identity, UnexpectedMessageError(f"{what} from someone who is in no group: join first"))

    def _take_from(self, peer: _Peer, message: Message, payloads: Sequence[Buffer]) -> None:
        """Pass on what a worker says; a place in memory that it shares becomes that memory."""
        if type(message) is Push and message.place is not None:
            try:
                payloads = self._views(peer.identity, message.place, message.target)
            except MalformedMessageError as error:
                self._coordinator.garbled(peer.connection, error)
                return
        elif type(message) is ShareMemory:
            address, token = self._unix.admit(peer.identity) if self._unix is not None else ("", "")
            self.route(peer.identity, MemoryAt(address, token), ())
            return
        elif type(message) is Leave and self._unix is not None:
            self._unix.unshare(peer.identity)  # before the answer: whoever has left has its memory for itself
        self._coordinator.receive(peer.connection, message, payloads)

    def _views(self, identity: bytes, place: Place, target: Place | None) -> list[memoryview]:
        """The memory in which a contribution lies, and that which the result is written to, if that is another."""
        views: list[memoryview] = []
        for there in (place,) if target is None else (place, target):
            view = self._unix.view(identity, there) if self._unix is not None else None
            if view is None:
                where = f"segment {there.segment}, offset {there.offset}"
                raise MalformedMessageError(f"a Push of what lies in memory that is not shared: {where}")
            views.append(view)
        if views[-1].readonly:
            raise MalformedMessageError("a Push whose result belongs into memory that was shared for reading only")
        return views

    def _shared(self) -> dict[str, object]:
        if self._unix is None:
            return {}
        return {"shared_memory": {"segments": self._unix.segments, "bytes": self._unix.nbytes}}

    def _turn_away(self, identity: bytes, error: GradServerError) -> None:
        log.info("a stranger was turned away: %s", error)
        self.route(identity, Failure.of(error, Scope.CONNECTION), ())

    # ── out ───────────────────────────────────────────────────────────────────────────────────────────

    def encoded(self, message: Message) -> bytes:
        """The header of ``message``. A result goes to every member: it is encoded once."""
        if message is not self._encoded[0]:
            self._encoded = (message, encode(message))
        return self._encoded[1]

    def route(self, identity: bytes, message: Message, payloads: Sequence[Buffer]) -> bool:
        """Send; False if there is no connection to send on any more, or its queue is full."""
        header = self.encoded(message)
        send = self._router.send
        self._unsure = True
        try:
            send(identity, _NOBLOCK_MORE)
            if payloads:
                payload = payloads[0]
                send(header, _NOBLOCK_MORE)
                send(payload, _NOBLOCK, copy=len(payload) < _ZERO_COPY_BYTES)
            else:
                send(header, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def forget(self, identity: bytes) -> None:
        """Drop a peer: what still comes from it is a stranger's."""
        self._peers.pop(identity, None)
        if self._unix is not None:
            self._unix.forget(identity)

    # ── what the local socket's server calls ──────────────────────────────────────────────────────────

    def talks(self, identity: bytes, line: Line) -> None:
        """Messages to this worker go through ``line`` from now on."""
        if (peer := self._peers.get(identity)) is not None:
            peer.line = line

    def heard(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """A message came in."""
        self._take(identity, frames)

    def garbled(self, identity: bytes, error: GradServerError) -> None:
        """What came in is no message."""
        self.hung_up(identity)
        if (peer := self._peers.get(identity)) is not None:
            self._coordinator.garbled(peer.connection, error)

    def hung_up(self, identity: bytes) -> None:
        """A line has ended. If its worker is still alive, messages go through its connection again."""
        if (peer := self._peers.get(identity)) is not None:
            peer.line = None
            self._disconnects.suppose()

    # ── who is gone ───────────────────────────────────────────────────────────────────────────────────

    def suspect(self) -> None:
        """A message could not be sent: look at once who is gone."""
        self._disconnects.suspect()

    def _probe(self) -> None:
        gone = [peer for peer in self._peers.values() if not peer.is_connected()]
        if not gone:
            return
        for _ in range(2 * RECEIVE_QUEUE * len(self._peers)):  # what they said before they went counts
            if not int(self._router.get(_EVENTS)) & _POLLIN:
                break
            self._take_one()
        for peer in gone:
            if self._unix is not None:
                self._unix.drain(peer.identity)
            if self._peers.get(peer.identity) is peer:
                self.forget(peer.identity)
                self._coordinator.lost(peer.connection, _GONE)


class _Peer:
    """The coordinator's end of one worker's channel."""

    def __init__(self, server: TcpServer, identity: bytes) -> None:
        self._server = server
        self._reachable = True
        self.identity = identity
        self.connection = -1
        self.line: Line | None = None
        """Where messages go, if not through the ZeroMQ connection."""

    def attach(self, receiver: object) -> None:
        """What comes in goes to the coordinator, always."""

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Send, or find out soon that the worker is gone: it may have said more than was read so far."""
        line = self.line
        sent = self._reachable and (
            line.send(self._server.encoded(message), payloads)
            if line is not None
            else self._server.route(self.identity, message, payloads)
        )
        if not sent:
            self._reachable = False
            self._server.suspect()

    def is_connected(self) -> bool:
        """Whether the ZeroMQ connection is still there."""
        self._reachable = self._reachable and self._server.route(self.identity, Ping(), ())
        return self._reachable

    def close(self) -> None:
        self._server.forget(self.identity)
