"""The server's end of the tcp channel: one ZeroMQ ROUTER socket, and the daemon's loop.

libzmq closes the connection of a process that died at once, and the system that of a lost host. The router's monitor
then says that *a* connection closed. Which one shows when a Ping can no longer be routed to it (`.liveness`).

Workers of the same host may talk through a local socket (`.local`) once they have joined here. It shows the end of
their processes within milliseconds, and for certain.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import zmq

from gradserver.json_text import json_text
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ConnectionLostError, GradServerError, LimitExceededError, MalformedMessageError
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import (
    Failure,
    Join,
    Leave,
    MemoryAt,
    Message,
    Ping,
    Place,
    Present,
    Probe,
    Push,
    Reported,
    Scope,
    ShareMemory,
    Status,
    StatusRequest,
    Welcome,
)
from gradserver.protocol.messages.recovery import Held, Holding
from gradserver.protocol.transport.branches import MARK, branch_of
from gradserver.protocol.transport.numbers import Numbers
from gradserver.protocol.transport.wakeup import Wakeup
from gradserver.protocol.transport.zeromq import EVENTS, NOBLOCK, NOBLOCK_MORE, POLLIN, ZERO_COPY_BYTES, sender
from gradserver.protocol.version import __version__
from gradserver.protocol.wire import decode, encode
from gradserver.runtime import Runtime
from gradserver.transport.binding import bind_router
from gradserver.transport.branches import PARTED, Branches
from gradserver.transport.handshake import ROLES, Handshake
from gradserver.transport.liveness import Liveness, Patience, Verdict
from gradserver.transport.local import UnixServer
from gradserver.transport.local_peers import Line
from gradserver.transport.peers import Peer
from gradserver.transport.system import can_share
from gradserver.transport.traffic import MEMBERS_RATE, Connections, unread_text

if TYPE_CHECKING:
    from gradserver.transport.shard_link import Link

log = logging.getLogger("gradserver")

_BATCH: Final = 64
"""Messages that are taken between two looks at timers and the monitor."""
_BATCH_BYTES: Final = 8 * MIB
"""Bytes of such messages: large ones take long."""
_LAST_WORDS: Final = 64
"""Messages of each peer that are read when a peer is lost: others send more meanwhile."""
_FRAMING: Final = 2
_LONG_FRAMING: Final = 9
_LONG_FRAME: Final = 256
"""Bytes that ZMTP puts in front of a frame: the second number for frames of `_LONG_FRAME` bytes and more."""
_WEIGHED: Final = frozenset((Held, Holding, Reported))
"""Messages that come in large numbers and take no credit: in a recovery, and from data shards."""
_MARK: Final = bytes([MARK])
_STATUS_COST: Final = 64
"""Number of messages that a member's request for the status counts as."""
_STATUS_PAUSE: Final = 5
"""Pause between two snapshots for the status, in times that the last one took."""


class TcpServer:
    """Binds a ROUTER socket and runs the loop.

    Args:
        runtime: gets the messages that come in.
        bind: ``tcp://HOST:PORT``; port 0 picks a free one.
        share_memory: True if workers of this host may share memory instead of sending gradients.
        patience: how long a peer may be away before it counts as lost.

    Raises:
        CoordinatorError: the address cannot be bound; the message says why.
    """

    def __init__(
        self, runtime: Runtime, bind: str, share_memory: bool = True, patience: Patience | None = None
    ) -> None:
        self._runtime = runtime
        # What pyzmq needs to hand memory over takes descriptors, with the first such message. It is to have them before
        # connections take all: else libzmq ends the process.
        zmq.Frame(bytes(zmq.COPY_THRESHOLD))
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self.url = bind_router(self._router, bind)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._send = sender(self._router)
        self._peers: dict[bytes, Peer] = {}
        self._wakeup = Wakeup()
        self._stopping: str | None = None
        self._calls: deque[Callable[[], None]] = deque()
        runtime.run_in(self.look)
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._framed: tuple[Buffer, zmq.Frame] | None = None
        self._unsure = True
        """True if the router may have messages that its descriptor does not signal any more."""
        self._poller = select.poll()
        self._unix = UnixServer(self._poller, self) if share_memory else None
        self._connections = Connections()
        self._liveness = Liveness(self._router, self._unix, patience or Patience(), self._connections)
        self._monitor = self._liveness.monitor
        self.suspect = self._monitor.suspect
        self._link: Link | None = None
        self._handshake = Handshake(self._connections, self._liveness, self.route)
        self._strangers = self._handshake.strangers
        self._branches = Branches(runtime)
        self._gaps: dict[bytes, Numbers] = {}
        """Numbers by identity, of the connections on which a message is missing."""
        self._status, self._status_due = b"", 0.0

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────

    def request_stop(self, reason: str) -> None:
        """Make `run` tell the workers ``reason`` and return. Safe to call from signal handlers and threads."""
        self._stopping = reason
        self._wakeup.wake()

    def hold(self, is_at_once: Callable[[Message], bool] = lambda _: False) -> None:
        """Let workers that join wait until `release`, unless their message ``is_at_once``."""
        self._handshake.hold(is_at_once)

    def release(self) -> None:
        """Let those join that have waited, and all that come."""
        for identity, frames in self._handshake.release().items():
            self._take(identity, frames)

    def look(self, call: Callable[[], None] = lambda: None) -> None:
        """Make `run` call ``call``, and check its condition. Safe to call from signal handlers and threads."""
        self._calls.append(call)
        self._wakeup.wake()

    def tend(self, link: Link) -> None:
        """Serve ``link`` in the loop, too. The loop ends when it breaks, and the server stops then if it is vital."""
        self._link = link
        for descriptor in link.descriptors:
            self._poller.register(descriptor, select.POLLIN)

    def neglect(self) -> None:
        """Serve the link no more."""
        if self._link is not None:
            for descriptor in self._link.descriptors:
                self._poller.unregister(descriptor)
            self._link = None

    @property
    def is_stopping(self) -> bool:
        """True once a stop was requested."""
        return self._stopping is not None

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until `request_stop`, or ``until()``.

        libzmq's descriptors are edge-triggered, and any call on the router can swallow its edge: so after one what
        there is must be taken before waiting. (`zmq.Poller` does the same with six times the system calls.)
        """
        router, monitor, wake = int(self._router.get(zmq.FD)), self._monitor.descriptor, self._wakeup.descriptor
        poller = self._poller
        for descriptor in (router, monitor, wake):
            poller.register(descriptor, select.POLLIN)
        self._monitor.notice()  # also because its descriptor signals nothing before it was looked at once
        while self._stopping is None:
            caught_up = not self._unsure or self._take_some()
            if self._link is not None:
                caught_up = self._link.take_some() and caught_up
                if self._link.failure is not None:
                    if not self._link.is_vital:
                        return
                    self._stopping = self._link.failure.message
                    break
            if until():
                return
            due, now = self._next_timer(), time.monotonic()
            if due is not None and due <= now:
                self._run_timers()
                continue
            # One reading for both: poll(2) takes a time that has passed, and so is negative, for no limit at all.
            wait = 0 if not caught_up else None if due is None else math.ceil((due - now) * 1000)
            for descriptor, events in poller.poll(wait):
                if descriptor == monitor:
                    self._monitor.notice()
                elif descriptor == wake:
                    self._wakeup.clear()
                    while self._calls:
                        self._calls.popleft()()
                elif descriptor == router:
                    self._unsure = True
                elif self._unix is not None:
                    self._unix.ready(descriptor, events)
        self._runtime.stop(self._stopping)

    def close(self) -> None:
        """Close the port. Messages to workers have a second to leave."""
        if self._unix is not None:
            self._unix.close()
        self._liveness.close()
        self._connections.close()
        self._router.close(linger=1000)
        self._context.term()
        self._wakeup.close()

    def _next_timer(self) -> float | None:
        due = [at for at in (self._runtime.next_deadline(), self._monitor.due) if at is not None]
        if self._connections:
            due.append(self._connections.due)
        if self._link is not None:
            due.append(self._link.due)
        if self._gaps:
            self._gaps = {one: numbers for one, numbers in self._gaps.items() if numbers.deadline is not None}
            due += [numbers.deadline for numbers in self._gaps.values() if numbers.deadline is not None]
        return min(due) if due else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        deadline = self._runtime.next_deadline()
        if deadline is not None and deadline <= now:
            self._runtime.tick()
        if self._monitor.take_due(now):
            self._probe()
        if self._connections.due <= now:
            self._weigh(now)
        for identity, numbers in list(self._gaps.items()):
            try:
                numbers.check(now)
            except ConnectionLostError as error:
                self._break(identity, error)

    # ── in ────────────────────────────────────────────────────────────────────────────────────────────

    def _take_some(self) -> bool:
        """Receive messages, up to a number that keeps timers punctual. Return True if those were all."""
        self._framed = None  # its memory may be its giver's again
        left = _BATCH_BYTES
        for _ in range(_BATCH):
            self._unsure = False
            if not int(self._router.get(EVENTS)) & POLLIN:
                return True
            left -= self._take_one()
            if left < 0:
                break
        self._unsure = True
        return False

    def _take_one(self) -> int:
        """Receive one message, and return its bytes on the wire. Payloads stay where libzmq put them."""
        receive = self._router.recv
        identity = receive(NOBLOCK)
        frame = receive(NOBLOCK, copy=False)
        header = frame.bytes
        frames: list[Buffer] = [header]
        size = len(header) + (_FRAMING if len(header) < _LONG_FRAME else _LONG_FRAMING)
        while frame.more:
            frame = receive(NOBLOCK, copy=False)
            frames.append(buffer := frame.buffer)
            size += len(buffer) + (_FRAMING if len(buffer) < _LONG_FRAME else _LONG_FRAMING)
        peer = self._peers.get(identity)
        try:
            if peer is not None:
                peer.traffic.taken += size
                due = peer.numbers.take(frames, time.monotonic())
            elif self._handshake.hears(identity, frame, size):
                due = self._strangers.take(identity, frames, time.monotonic())
            else:
                return size
        except ConnectionLostError as error:
            self._break(identity, error)
            return size
        if not due and (numbers := self._strangers.gap(identity) if peer is None else peer.numbers) is not None:
            self._gaps[identity] = numbers
        for message in due:
            self._take(identity, message)
        return size

    def _break(self, identity: bytes, error: ConnectionLostError) -> None:
        """Give up a connection on which a message is missing: nothing more is taken from it."""
        peer = self._peers.get(identity)
        if peer is None and not self._strangers.is_past(identity):
            log.info("closed the connection of a peer that has not joined: %s", error.message)
        lost = ConnectionLostError(f"this connection to {self.url} is closed: {error.message}")
        told = self._strangers.farewell(identity) or Failure.of(lost, Scope.CONNECTION)
        self.route(identity, encode(told))
        self.forget(identity, told, error.message)
        if peer is not None:
            self._runtime.lost(peer.connection, error.message)

    def _take(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Take one message, which is in order."""
        peer = self._peers.get(identity)
        number, frames = branch_of(frames) if peer is not None and frames[0][:1] == _MARK else (0, frames)
        try:
            message, payloads = decode(frames)
        except GradServerError as error:
            if peer is None:
                self._handshake.turn_away(identity, error)
            else:
                self._runtime.garbled(peer.connection, error)
            return
        if type(message) is StatusRequest:
            if peer is None or self._may_go_on(peer, _STATUS_COST):
                self.route(identity, encode(Status()), [self._current_status()])
        elif peer is None and type(message) is Probe:
            self._handshake.answer_probe(identity, frames)
        elif peer is None:
            self._shake(identity, message, payloads, frames)
        elif number:
            self._take_from_branch(peer, number, message, payloads)
        else:
            self._take_from(peer, message, payloads)

    def _shake(self, identity: bytes, message: Message, payloads: Sequence[Buffer], frames: Sequence[Buffer]) -> None:
        """Make a stranger a peer, if ``message`` opens a role."""
        role = self._handshake.role_of(identity, message, frames)
        if role is None:
            return
        peer = self._peers[identity] = Peer(self, identity, self._strangers.admit(identity))
        peer.connection = self._runtime.connect(peer)
        if peer.tell(self._liveness.invite(peer, message, role.first_beat, role.announces)):
            peer.traffic = self._connections.admit(identity)
        else:
            self.suspect()
        self._runtime.receive(peer.connection, message, payloads)

    def _take_from(self, peer: Peer, message: Message, payloads: Sequence[Buffer]) -> None:
        """Pass on a message of a peer. A place in memory that it shares becomes that memory."""
        if type(message) is Push:
            self._take_push(peer, peer.connection, message, payloads)
            return
        if type(message) not in _WEIGHED and not self._may_go_on(peer):
            return
        if type(message) is ShareMemory:
            address, token = self._unix.admit(peer.identity) if self._unix is not None and can_share() else ("", "")
            peer.tell(MemoryAt(address, token))
            return
        if type(message) is Ping:  # it waits, and something of ours may have been lost
            peer.is_connected()
            return
        if type(message) is Present:
            self._liveness.beats(peer, message)
            return
        if type(message) is Leave:
            self._branches.end(peer, "it left the group that its sub-group is of")
            if self._unix is not None:
                self._unix.unshare(peer.identity)  # before the answer: then its memory is its own again
        self._runtime.receive(peer.connection, message, payloads)

    def _take_push(self, peer: Peer, connection: int, push: Push, payloads: Sequence[Buffer]) -> None:
        if push.place is not None:
            try:
                payloads = self._views(peer.identity, push.place, push.target)
            except MalformedMessageError as error:
                self._runtime.garbled(connection, error)
                return
        self._runtime.receive(connection, push, payloads)

    def _take_from_branch(self, peer: Peer, number: int, message: Message, payloads: Sequence[Buffer]) -> None:
        """Pass on a message of one of the peer's branches."""
        if type(message) is Push:
            if (branch := peer.branches.get(number)) is not None:
                self._take_push(peer, branch.connection, message, payloads)
        elif type(message) in _WEIGHED or self._may_go_on(peer):
            self._branches.hear(peer, number, message, payloads)

    def _may_go_on(self, peer: Peer, messages: int = 1) -> bool:
        """Count messages that take no credit. Return False for a peer that has sent too many, after its eviction."""
        if peer.may_say_more(messages):
            return True
        text = f"more than {MEMBERS_RATE:g} messages a second that take no credit"
        self._runtime.garbled(peer.connection, LimitExceededError(text))
        return False

    def _current_status(self) -> bytes:
        """Return a snapshot, or a recent one: snapshots take a sixth of the time at most."""
        if time.monotonic() >= self._status_due:
            began = time.thread_time()
            shown: dict[str, object] = {"url": self.url, "version": __version__}
            if self._unix is not None:
                shown["shared_memory"] = {"segments": self._unix.segments, "bytes": self._unix.nbytes}
            self._status = json_text(shown | self._runtime.snapshot()).encode()
            self._status_due = time.monotonic() + _STATUS_PAUSE * (time.thread_time() - began)
        return self._status

    def _views(self, identity: bytes, place: Place, target: Place | None) -> list[memoryview]:
        """Return the memory of a contribution, and the memory for its result if that is another."""
        views: list[memoryview] = []
        for there in (place,) if target is None else (place, target):
            view = self._unix.view(identity, there) if self._unix is not None else None
            if view is None:
                where = f"segment {there.segment}, offset {there.offset}"
                raise MalformedMessageError(f"a Push of what lies in memory that is not shared: {where}")
            views.append(view)
        if views[-1].readonly:
            raise MalformedMessageError("a Push with its result in memory that was shared for reading only")
        return views

    # ── out ───────────────────────────────────────────────────────────────────────────────────────────

    def encoded(self, message: Message) -> bytes:
        """Return the header of ``message``. A result goes to every member, and is encoded once."""
        if message is not self._encoded[0]:
            self._encoded = (message, encode(message))
            self._framed = None
        return self._encoded[1]

    def _frame_of(self, payload: Buffer) -> zmq.Frame:
        """Return ``payload`` as libzmq sends it: all members get it from the same memory, which is handed over once."""
        if self._framed is None or self._framed[0] is not payload:
            self._framed = (payload, zmq.Frame(payload))
        return self._framed[1]

    def route(self, identity: bytes, header: bytes, payloads: Sequence[Buffer] = ()) -> bool:
        """Send; False if there is no connection any more, or its queue is full."""
        send = self._send
        self._unsure = True
        try:
            send(identity, NOBLOCK_MORE)
            if payloads:
                payload = payloads[0]
                send(header, NOBLOCK_MORE)
                send(payload if len(payload) < ZERO_COPY_BYTES else self._frame_of(payload), NOBLOCK)
            else:
                send(header, NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def forget(
        self, identity: bytes, farewell: Failure | None = None, reason: str = PARTED, ended: bool = False
    ) -> None:
        """Drop a peer with the last words ``farewell``. Nothing that still comes from it is taken.

        Its branches are lost for ``reason``; if its process has ``ended``, for certain.
        """
        if (peer := self._peers.pop(identity, None)) is not None:
            self._liveness.forget(peer)
            self._connections.part(identity, peer.traffic, time.monotonic(), peer.floods)
        self._gaps.pop(identity, None)
        self._strangers.part(identity, farewell)
        if self._unix is not None:
            self._unix.forget(identity)
        if peer is not None:
            self._branches.end(peer, reason, ended)

    def welcomed(self, peer: Peer, welcome: Welcome) -> None:
        """Have ``peer`` light the beacon by which another coordinator knows it that takes this one's place."""
        role = ROLES[Join]
        peer.tell(self._liveness.invite(peer, welcome, role.first_beat, role.announces))

    def is_lit(self, beacon: str) -> bool:
        """Return True if the process with this beacon runs."""
        return self._liveness.is_lit(beacon.encode())

    # ── what the local socket's server calls ──────────────────────────────────────────────────────────

    def talks(self, identity: bytes, line: Line) -> None:
        """Send messages to this worker through ``line`` from now on."""
        if (peer := self._peers.get(identity)) is not None:
            peer.line, peer.talked = line, True

    def heard(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Take a message."""
        self._take(identity, frames)

    def garbled(self, identity: bytes, error: GradServerError) -> None:
        """Report bytes that are no message."""
        self.hung_up(identity)
        if (peer := self._peers.get(identity)) is not None:
            self._runtime.garbled(peer.connection, error)

    def hung_up(self, identity: bytes) -> None:
        """Note that a line has ended. If its worker lives, messages go through its ZeroMQ connection again."""
        if (peer := self._peers.get(identity)) is not None:
            peer.line = None
            self.suspect()

    def ended(self, identity: bytes) -> None:
        """Lose a worker after its process has ended. Messages on its ZeroMQ connection may be on their way."""
        if (peer := self._peers.get(identity)) is not None:
            if peer.talked:
                self._lose(self._liveness.ended(peer))
            else:
                self.suspect()

    # ── lost peers ────────────────────────────────────────────────────────────────────────────────────

    def _weigh(self, now: float) -> None:
        """Disconnect the connections that cost too much. Members are lost with theirs."""
        self._monitor.notice()
        allowance = self._runtime.allowance()
        for traffic, why in self._connections.look(now, allowance, not self._unsure):
            for peer in [peer for peer in self._peers.values() if peer.traffic is traffic]:
                self._lose(Verdict(peer, why))
        if self._unix is not None:
            for peer in [peer for peer in self._peers.values() if peer.line is not None]:
                allowed, queued = allowance * peer.traffic.memberships, self._unix.queued(peer.identity)
                if queued > allowed:
                    self._unix.cut(peer.identity)
                    self._lose(Verdict(peer, unread_text(queued, allowed)))

    def _probe(self) -> None:
        verdicts = self._liveness.look(self._peers.values())
        if not verdicts:
            return
        for _ in range(_LAST_WORDS * len(self._peers)):  # what they said before they went counts
            if not int(self._router.get(EVENTS)) & POLLIN:
                break
            self._take_one()
        for verdict in verdicts:
            if self._unix is not None:
                self._unix.drain(verdict.peer.identity)
            self._lose(verdict)

    def _lose(self, verdict: Verdict) -> None:
        peer, reason, ended, silent = verdict
        if self._peers.get(peer.identity) is not peer:
            return
        if silent:
            self._branches.end(peer, reason)
            self._runtime.silent(peer.connection, reason)
        else:
            self.forget(peer.identity, None, reason, ended)
            self._runtime.lost(peer.connection, reason, ended)
