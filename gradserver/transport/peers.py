"""A worker or a data shard that is connected over TCP, as the server sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.limits import MAX_SUBGROUPS
from gradserver.protocol.messages import Failure, Message, Ping, Result, Scope, Welcome
from gradserver.protocol.transport.branches import on_branch
from gradserver.protocol.transport.numbers import Numbers
from gradserver.transport.local_peers import Line
from gradserver.transport.traffic import MEMBERS_MESSAGES, MEMBERS_RATE, Traffic

_PING: Final = Ping()


class Server(Protocol):
    """The server that sends for its peers."""

    def encoded(self, message: Message) -> bytes:
        """Return the header of ``message``."""

    def route(self, identity: bytes, header: bytes, payloads: Sequence[Buffer] = ()) -> bool:
        """Send; False if there is no connection to send on."""

    def forget(self, identity: bytes, farewell: Failure | None) -> None:
        """Drop a peer. From now on ``identity`` is a stranger with ``farewell`` as its last words."""

    def welcomed(self, peer: Peer, welcome: Welcome) -> None:
        """Ask for another beacon: ``peer`` is about to get a Welcome to a group that it may come back to."""

    def suspect(self) -> None:
        """Probe all peers, as a message could not be sent."""


class Peer:
    """The server's end of one worker's or data shard's channel."""

    def __init__(self, server: Server, identity: bytes, numbers: Numbers) -> None:
        self._server = server
        self._reachable = True
        self.numbers = numbers
        self.traffic = Traffic()
        """Traffic of its ZeroMQ connection."""
        self._said, self._may_say, self._since = 0, MEMBERS_MESSAGES, time.monotonic()
        self.identity = identity
        self.connection = -1
        self.line: Line | None = None
        """Local connection that messages pass through; None if they pass through the ZeroMQ connection."""
        self.talked = False
        """True once messages have passed through ``line``: no earlier one can still be on its way."""
        self.beacon = b""
        """Identity of its beacon."""
        self.beacons: list[bytes] = []
        """The same, and its earlier ones."""
        self.beats = False
        """True once the beacon would be missed."""
        self.due = 0.0
        """Deadline for the beacon's first beat."""
        self.silent: float | None = None
        """Time since when the beacon is missing."""
        self.doubtful: float | None = None
        """Time since when process and connection disagree."""
        self.branches: dict[int, Branch] = {}
        """Branches that this connection carries, by number."""
        self._farewell: Failure | None = None
        """Last words to it."""

    def grow(self, number: int) -> Branch | None:
        """Return a new branch; None if there are too many."""
        if len(self.branches) >= MAX_SUBGROUPS:
            return None
        branch = self.branches[number] = Branch(self, number)
        self.traffic.carry(1 + len(self.branches))
        return branch

    def attach(self, receiver: object) -> None:
        """Do nothing: messages always go to the coordinator."""

    def send(self, message: Message, payloads: Sequence[Buffer] = (), branch: int = 0) -> None:
        """Send, or have peers probed soon: a lost worker may have said more than was read so far."""
        if branch:
            self._pass_on(on_branch(self._server.encoded(message), branch), payloads)
            return
        if type(message) is Result:  # by far the most frequent
            pass
        elif type(message) is Welcome and message.durable:
            self._server.welcomed(self, message)
        elif type(message) is Failure and message.scope is Scope.CONNECTION:
            self._farewell = message
        self._pass_on(self._server.encoded(message), payloads)

    def _pass_on(self, header: bytes, payloads: Sequence[Buffer]) -> None:
        line = self.line
        if not self._reachable:
            sent = False
        elif line is not None:
            sent = line.send(header, payloads)
        else:
            sent = self._server.route(self.identity, self.numbers.numbered(header), payloads)
            self.traffic.sent += len(header) + (len(payloads[0]) if payloads else 0)
        if not sent:
            self._reachable = False
            self._server.suspect()

    def tell(self, message: Message) -> bool:
        """Send through the ZeroMQ connection. Return False if that is closed."""
        header = self._server.encoded(message)
        self._reachable = self._reachable and self._server.route(self.identity, self.numbers.numbered(header))
        self.traffic.sent += len(header)
        return self._reachable

    def may_say_more(self, messages: int = 1) -> bool:
        """Count a message without credit, which costs as much as ``messages``. Return False if it is one too many."""
        self._said += messages
        if self.floods:
            self._may_say = MEMBERS_MESSAGES + int(MEMBERS_RATE * (time.monotonic() - self._since))
        return not self.floods

    @property
    def floods(self) -> bool:
        """True once it has sent more messages without credit than it may."""
        return self._said > self._may_say

    def is_connected(self) -> bool:
        """Return True if the ZeroMQ connection is still there."""
        return self.tell(_PING)

    def close(self) -> None:
        """Drop the peer: what still comes from there is a stranger's."""
        self._server.forget(self.identity, self._farewell)


class Branch:
    """The server's end of a branch: a connection that the one of ``peer`` carries.

    Attributes:
        connection: number by which the engine knows it.
    """

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer, self._number = peer, number
        self.connection = -1

    def begin(self, connection: int) -> None:
        """Note the number by which the engine knows it."""
        self.connection = connection

    def attach(self, receiver: object) -> None:
        """Do nothing: messages always go to the coordinator."""

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Send on the peer's connection."""
        self._peer.send(message, payloads, self._number)

    def close(self) -> None:
        """Take nothing from this branch any more. Its number does not come again."""
        self._peer.branches.pop(self._number, None)
