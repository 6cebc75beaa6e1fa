"""Sessions of the members of a durable group: which of them have no connection for the moment, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sessions:
    """Sessions of one group.

    Attributes:
        secret: text from which the members' tokens follow; empty if the group is not durable.
        away: members without a connection, each with the time until which it is waited for.
        busy: those of them that should be back, with processes that run; each with the time since when that is so.
    """

    secret: str = ""
    away: dict[int, float] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)

    def open(self, secret: str) -> None:
        """Make the group durable."""
        self.secret = secret

    def detach(self, seat: int, until: float) -> None:
        """Wait for a member that has lost its connection."""
        self.away[seat] = until

    def detach_all(self, seats: Iterable[int], until: float) -> None:
        """Wait for all members, as none of them is there."""
        self.away = dict.fromkeys(seats, until)

    def attach(self, seat: int) -> None:
        """Note that a member is back, or gone."""
        self.away.pop(seat, None)
        self.busy.pop(seat, None)

    def hurry(self, until: float) -> None:
        """Wait until this time at most, as other members are there and wait as well."""
        self.away = {seat: min(at, until) for seat, at in self.away.items()}

    def allow(self, until: float) -> None:
        """Wait until this time at least."""
        self.away = {seat: max(at, until) for seat, at in self.away.items()}

    def overdue(self, now: float) -> list[int]:
        """Return members that should be back by now."""
        return [seat for seat, until in self.away.items() if until <= now]

    def wait_for_busy(self, seat: int, since: float, until: float) -> bool:
        """Wait on for a member with a running process. True if this is the first time."""
        is_new = seat not in self.busy
        self.busy[seat] = since
        self.away[seat] = until
        return is_new
