"""A worker or a data shard that is connected over TCP, as the server sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.messages import Failure, Message, Ping, Scope, Welcome
from gradserver.protocol.numbers import Numbers
from gradserver.transport.local_peers import Line
from gradserver.transport.traffic import MEMBERS_MESSAGES, MEMBERS_RATE, Traffic

_PING: Final = Ping()


class Server(Protocol):
    """What sends for them."""

    def encoded(self, message: Message) -> bytes:
        """The header of ``message``."""

    def route(self, identity: bytes, header: bytes, payloads: Sequence[Buffer] = ()) -> bool:
        """Send; False if there is no connection to send on."""

    def forget(self, identity: bytes, farewell: Failure | None) -> None:
        """What still comes from there is a stranger's, who was told ``farewell``."""

    def welcomed(self, peer: Peer, welcome: Welcome) -> None:
        """It is about to be told that it is in a group, to which it may come back."""

    def suspect(self) -> None:
        """A message could not be sent."""


class Peer:
    """The coordinator's end of one worker's channel."""

    def __init__(self, server: Server, identity: bytes, numbers: Numbers) -> None:
        self._server = server
        self._reachable = True
        self.numbers = numbers
        self.traffic = Traffic()
        """What passes through its ZeroMQ connection."""
        self._said, self._may_say, self._since = 0, MEMBERS_MESSAGES, time.monotonic()
        self.identity = identity
        self.connection = -1
        self.line: Line | None = None
        """Where messages go, if not through the ZeroMQ connection."""
        self.talked = False
        """All that it says, or has said, passed there."""
        self.presence = b""
        """The identity of the connection that says that it is there."""
        self.presences: list[bytes] = []
        """That, and what it was before."""
        self.beats = False
        """libzmq says there that the process runs, and would be missed."""
        self.due = 0.0
        """Until when that need not be so."""
        self.silent: float | None = None
        """Since when it is not."""
        self.doubtful: float | None = None
        """Since when process and connection disagree."""
        self._farewell: Failure | None = None
        """What it was told that this is the end for."""

    def attach(self, receiver: object) -> None:
        """What comes in goes to the coordinator, always."""

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Send, or find out soon that the worker is gone: it may have said more than was read so far."""
        if type(message) is Welcome and message.durable:
            self._server.welcomed(self, message)
        elif type(message) is Failure and message.scope is Scope.CONNECTION:
            self._farewell = message
        line, header = self.line, self._server.encoded(message)
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
        """Send through the ZeroMQ connection; whether it is still there."""
        header = self._server.encoded(message)
        self._reachable = self._reachable and self._server.route(self.identity, self.numbers.numbered(header))
        self.traffic.sent += len(header)
        return self._reachable

    def may_say_more(self, messages: int = 1) -> bool:
        """It says one more message that takes no credit, and costs as much as so many: whether it may."""
        self._said += messages
        if self._said > self._may_say:
            self._may_say = MEMBERS_MESSAGES + int(MEMBERS_RATE * (time.monotonic() - self._since))
        return self._said <= self._may_say

    def is_connected(self) -> bool:
        """Whether the ZeroMQ connection is still there."""
        return self.tell(_PING)

    def close(self) -> None:
        """What it still says is a stranger's."""
        self._server.forget(self.identity, self._farewell)
