"""The handshake: all that a server hears from a connection that is no peer's, before it is one and after it was one.

A message passes, in this order:

    limits     `.traffic` counts the messages and bytes of each stranger
    numbers    `Strangers`: the first message is number 1. A message without a number is a visitor's
    version    `gradserver.protocol.wire` reads it from each header
    probes     messages that measure the link are answered, and forgotten
    role       `ROLES`, by the type of the message. A new kind of peer is one more row there
    hold       workers wait while the server is not complete, but for members
    key        the engine, which makes the keys, compares the field that the role names

From then on the connection is a peer's, and the engine gets its messages.

    state   event                                        next    what happens
    ──────  ───────────────────────────────────────────  ──────  ────────────────────────────────────────────────────
    (none)  a message without a number                   NEW     it is taken: `gradserver status` says no more
    NEW     the message that is due                      NEW     it is taken; one that opens a role makes a peer
    NEW     a later one: the first was lost, or swapped  NEW     it is kept, for as long as its numbers say …
    NEW     … and what is missing does not come          PAST    ConnectionLostError
    (peer)  it is refused, evicted, lost, or leaves      PAST
    PAST    a message with a number                      PAST    it is told once more what it was told

So a process that missed something hears that, and can come again on a new connection. A message that a network repeats
late makes no peer of a connection that has parted. Only those are known that are likely to say anything more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import zmq

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    ConnectionLostError,
    GradServerError,
    JoinRefusedError,
    LimitExceededError,
    UnexpectedMessageError,
)
from gradserver.protocol.messages import Attend, Enlist, Failure, Join, Message, Ping, Probed, Scope
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.transport.numbers import Frames, Numbers, split
from gradserver.protocol.wire import encode
from gradserver.transport.liveness import Liveness
from gradserver.transport.system import descriptor_limit, too_few_text
from gradserver.transport.traffic import Connections

log = logging.getLogger("gradserver")

_KNOWN: Final = 1024
_WAITING: Final = 4096
"""Workers that wait at most while the server holds. More become peers at once."""
_EARLY_BYTES: Final = 4096
"""Longest message that is kept until the first one comes. No longer one follows soon after a first message."""


class Role(NamedTuple):
    """A kind of peer, as its first message shows it.

    Attributes:
        name: the kind.
        key: field of the first message that the engine compares before it lets the peer in; empty if there is none.
        waits: True if `Handshake.hold` delays the peer.
        first_beat: seconds that the beacon has at least to show for the first time.
        announces: True if the peer says when the beacon shows.
    """

    name: str
    key: str = ""
    waits: bool = False
    first_beat: float = 2.0
    announces: bool = True


ROLES: Final[Mapping[type[Message], Role]] = {
    Join: Role("worker", waits=True),
    Resume: Role("worker", "token", announces=False),
    Attend: Role("worker", "token"),
    Enlist: Role("data shard", "token", first_beat=30.0, announces=False),  # it does nothing before the beacon shows
}
"""Roles by the message that opens each. The engine behind the server decides what becomes of the peer."""


class Strangers:
    """Numbers and farewells, by the identity of the connection."""

    def __init__(self) -> None:
        self._known: dict[bytes, Numbers | None] = {}
        """Numbers of strangers; None for those that are past. The last one is the youngest."""
        self._farewells: dict[bytes, Failure] = {}
        """Last words to those that are past."""

    def take(self, identity: bytes, frames: Frames, now: float) -> Iterable[Frames]:
        """Return the messages that are due, now that one has come.

        Raises:
            ConnectionLostError: the connection is past, or a message is missing.
        """
        if not split(frames[0])[0]:
            return (frames,)
        if self.is_past(identity):
            raise ConnectionLostError("it was given up before")
        numbers = self._known.get(identity) or self._know(identity, Numbers())
        size = sum(len(frame) for frame in frames)
        due = numbers.take(frames, now)
        if not due and size > _EARLY_BYTES:
            raise ConnectionLostError(f"its first message was lost on the way: one of {size} bytes came")
        return due

    def admit(self, identity: bytes) -> Numbers:
        """Forget a stranger that becomes a peer, and return its numbers."""
        return self._known.pop(identity, None) or Numbers()

    def is_past(self, identity: bytes) -> bool:
        """Return True if nothing is taken from ``identity`` any more."""
        return identity in self._known and self._known[identity] is None

    def part(self, identity: bytes, farewell: Failure | None = None) -> None:
        """Take nothing from ``identity`` from now on. ``farewell`` may be lost on its way, so it is kept."""
        farewell = farewell or self._farewells.get(identity)
        self._make_room(identity)
        self._known[identity] = None
        if farewell is not None:
            self._farewells[identity] = farewell

    def farewell(self, identity: bytes) -> Failure | None:
        """Return the last words to ``identity``, if it is past."""
        return self._farewells.get(identity)

    def gap(self, identity: bytes) -> Numbers | None:
        """Return the numbers of ``identity`` if a message is missing."""
        numbers = self._known.get(identity)
        return None if numbers is None or numbers.deadline is None else numbers

    def _know(self, identity: bytes, numbers: Numbers) -> Numbers:
        self._make_room(identity)
        self._known[identity] = numbers
        return numbers

    def _make_room(self, identity: bytes) -> None:
        self._drop(identity)
        while len(self._known) >= _KNOWN:
            self._drop(next(iter(self._known)))

    def _drop(self, identity: bytes) -> None:
        self._known.pop(identity, None)
        self._farewells.pop(identity, None)


class Handshake:
    """First messages of strangers: which are heard, and in which role.

    Args:
        connections: the traffic of each connection.
        liveness: knows which connections are beacons.
        route: sends a header to an identity; False if that has no connection.
    """

    def __init__(self, connections: Connections, liveness: Liveness, route: Callable[[bytes, bytes], bool]) -> None:
        self._connections, self._liveness, self._route = connections, liveness, route
        self._waiting: dict[bytes, Sequence[Buffer]] | None = None
        """First messages of those that wait; None unless the server holds."""
        self._is_at_once: Callable[[Message], bool] = lambda _: False
        self.strangers = Strangers()

    def hears(self, identity: bytes, frame: zmq.Frame, size: int) -> bool:
        """Return True if a message of ``size`` bytes from a stranger is within its limits. ``frame`` is one of it."""
        saying = self._connections.stranger(identity)
        if saying is None:
            self._liveness.monitor.notice()  # its connection is known behind that
            saying = self._connections.introduce(identity, _descriptor_of(frame), time.monotonic())
        now = time.monotonic()
        if saying.traffic.parted is not None:
            saying.traffic.taken += size
        if saying.over:
            return False
        if self._liveness.note_beacon(identity):
            saying.traffic.present = self._liveness.is_lit(identity)
            return False
        if saying.one_more(now):
            return True
        error = LimitExceededError("too many messages from a worker that is in no group")
        self._connections.silence(saying, self._route(identity, encode(Failure.of(error, Scope.CONNECTION))))
        return False

    def role_of(self, identity: bytes, message: Message, frames: Sequence[Buffer]) -> Role | None:
        """Return the role that a stranger's ``message`` opens; None if the stranger waits, or was turned away."""
        role = ROLES.get(type(message))
        if self._waiting is not None:
            if type(message) is Ping and identity in self._waiting:  # it asks whether something is missing
                return None
            if role is not None and role.waits and len(self._waiting) < _WAITING and not self._is_at_once(message):
                self._waiting[identity] = frames
                return None
            self._waiting.pop(identity, None)
        if role is None:
            what = type(message).__name__
            error = UnexpectedMessageError(f"{what} from a worker that is in no group: join first")
            # A Ping follows each Join. When the Join was refused, the log says so already.
            self.turn_away(identity, error, logging.DEBUG if type(message) is Ping else logging.INFO)
        elif not self._connections.have_room():
            self.turn_away(identity, JoinRefusedError(too_few_text(descriptor_limit())), logging.WARNING)
            return None
        return role

    def answer_probe(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Answer a message of a stranger that measures its link."""
        if (saying := self._connections.stranger(identity)) is not None:
            saying.probe(sum(map(len, frames)))
        self._route(identity, encode(Probed()))

    def hold(self, is_at_once: Callable[[Message], bool]) -> None:
        """Let strangers with a role that waits wait until `release`, unless their message ``is_at_once``."""
        self._waiting, self._is_at_once = {}, is_at_once

    def release(self) -> Mapping[bytes, Sequence[Buffer]]:
        """Return the first messages of those that have waited. From now on none waits."""
        waiting, self._waiting = self._waiting or {}, None
        return waiting

    def turn_away(self, identity: bytes, error: GradServerError, level: int = logging.INFO) -> None:
        """Tell a stranger why its message is not taken."""
        log.log(level, "refused a peer that has not joined: %s", error)
        self._route(identity, encode(Failure.of(error, Scope.CONNECTION)))


def _descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of a frame's connection; -1 if libzmq does not say, as of one that speaks ZMTP 1 or 2."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
