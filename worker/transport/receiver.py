"""The receiver of one of several connections that a channel has, one after the other."""

from __future__ import annotations

from typing import Protocol

from gradserver.protocol.channel import Receiver
from gradserver.protocol.errors import GradServerError
from gradserver.worker.transport.tcp import TcpChannel


class Owner(Protocol):
    """The channel that outlives its connections."""

    def broke(self, channel: TcpChannel, error: GradServerError) -> None:
        """Handle the end of ``channel``."""


class ConnectionReceiver:
    """Receiver of one connection. It passes messages on, and reports its end to the channel."""

    def __init__(self, owner: Owner, channel: TcpChannel, receiver: Receiver) -> None:
        self.receive = receiver.receive
        self._owner = owner
        self._channel = channel

    def lost(self, error: GradServerError) -> None:
        """Report that the connection broke."""
        self._owner.broke(self._channel, error)
