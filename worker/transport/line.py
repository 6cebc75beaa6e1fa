"""One connection of the tcp channel: its ZeroMQ connection, the beacon beside it, and the local socket in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq

from gradserver.protocol.channel import Receiver
from gradserver.protocol.limits import MAX_FRAME_BYTES
from gradserver.protocol.messages import BePresent, Message
from gradserver.protocol.transport.dealer import Dealer
from gradserver.protocol.transport.numbers import Numbers
from gradserver.worker.transport import forking
from gradserver.worker.transport.beacon import Beacon
from gradserver.worker.transport.local import LocalLine

_LINGER_MS: Final = 1000


class Line(Dealer):
    """The connection to one data shard. Number 0 is the coordinator itself.

    Attributes:
        gone: True once the monitor has said that the connection ended.
        shares: True if the server sees the memory that this worker shares.
        local: the connection that messages pass through instead, if the server is on this host. This connection still
            says whether the server lives.
        sends_locally: True while messages can be sent through ``local``.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, address: str, number: int) -> None:
        self.url = url
        self.what = "data shard" if number else "coordinator"
        self.number = number
        self.beacon: Beacon | None = None
        self.receiver: Receiver | None = None
        self.gone = False
        self.shares = False
        self.local: LocalLine | None = None
        self.sends_locally = False
        super().__init__(context, address, MAX_FRAME_BYTES)
        self.numbers = Numbers(self.lost_text(""))
        forking.guard(address)

    def light_beacon(self, wanted: BePresent, tell: Callable[[Message], None]) -> None:
        """Show from now on that this process runs, unless it does so already."""
        if self.beacon is not None and self.beacon.identity != wanted.identity:
            self.beacon.close()
            self.beacon = None
        if self.beacon is None:
            self.beacon = Beacon(self.address, wanted, tell)

    def put_out_beacon(self) -> None:
        """Show no more that this process runs."""
        if self.beacon is not None:
            self.beacon.close()

    def give_up(self) -> None:
        """Close the connection if something is missing or has no end, so that the server hears of it."""
        if self.numbers.deadline is not None or self.is_endless:
            self.gone = True
            self.disconnect(0)  # to tell libzmq to disconnect takes further calls on this socket, and nothing makes any

    def lost_text(self, why: str) -> str:
        """Say that the connection is gone."""
        return f"lost the {self.what} at {self.url}: {why}"

    def close(self) -> None:
        """Send what is queued, if it still can be, for a second at most. Put the beacon out first."""
        forking.unguard(self.address)
        gone = self.gone or self.has_ended()  # then nothing can leave any more
        if self.local is not None:
            self.local.close(0.0 if gone else _LINGER_MS / 1000)
        self.disconnect(0 if gone else _LINGER_MS)
