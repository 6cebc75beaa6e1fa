"""Listeners: members that are sent results without having pushed, because they are late or about to become members.

A listener is sent the results of all buckets from a round on. What it has not read is bounded: it says how much it has
read, with `Taken`. A listener that lets too much pile up is *behind*, and listens no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradserver.engine.data.exchange import Exchange, Piece
from gradserver.protocol.exchange import BUCKET


@dataclass(slots=True)
class Listeners:
    """Listeners of one group."""

    backlog: int
    """Bytes that a listener may leave unread."""
    rounds: dict[int, int] = field(default_factory=dict)
    """The first round of which each is sent the results, by member id."""
    unread: Counter[int] = field(default_factory=Counter)
    """Bytes of these that each member has not read."""

    def make_room(self, nbytes: int) -> None:
        """Let each leave as many bytes unread, at least."""
        self.backlog = max(self.backlog, nbytes)

    def begin(self, member_ids: Iterable[int], number: int) -> None:
        """Send ``member_ids`` the results of rounds from ``number`` on."""
        self.rounds.update(dict.fromkeys(member_ids, number))

    def end(self, member_id: int) -> None:
        """Send ``member_id`` no more results. It may still read what it was sent."""
        self.rounds.pop(member_id, None)

    def forget(self, member_id: int) -> None:
        """End with a member that has left, or that nothing is sent to any more."""
        self.end(member_id)
        self.unread.pop(member_id, None)

    def void(self) -> None:
        """Begin to count anew, on new connections."""
        self.unread.clear()

    def of(self, exchange: Exchange, piece: Piece) -> list[int]:
        """Return the members that are sent ``piece`` besides those that have pushed it."""
        key = exchange.key
        if not self.rounds or key.stream != BUCKET:
            return []
        return [
            member_id
            for member_id, first in self.rounds.items()
            if first <= key.number and member_id not in piece.given
        ]

    def charge(self, member_id: int, nbytes: int) -> bool:
        """Count bytes that ``member_id`` is sent now; False, and nothing is counted, if too much would be unread."""
        unread = self.unread[member_id] + nbytes
        if unread > self.backlog:
            return False
        self.unread[member_id] = unread
        return True

    def read(self, member_id: int, nbytes: int) -> None:
        """Note that ``member_id`` has read so much."""
        self.unread[member_id] = max(0, self.unread[member_id] - nbytes)

    def validate(self, departed: Iterable[int]) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert all(0 <= unread <= self.backlog for unread in self.unread.values()), "an overrun backlog"
        assert self.rounds.keys().isdisjoint(departed), "a member that has departed listens"
