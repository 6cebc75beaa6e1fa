"""Sessions of the members of a durable group: which of them have no connection for the moment, and for how long.

`gradserver.engine.control.sessions` decides what happens to them.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sessions:
    """Sessions of one group.

    Attributes:
        secret: text from which the members' tokens follow; empty if the group is not durable.
        keys: keys of the founders' Joins, by member id; empty where one has none.
        away: members without a connection, each with the time until which it is waited for.
        busy: those of them that should be back, with processes that run; each with the time since when that is so.
    """

    secret: str = ""
    keys: tuple[str, ...] = ()
    away: dict[int, float] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)

    def open(self, secret: str, keys: Sequence[str]) -> None:
        """Make the group durable."""
        self.secret, self.keys = secret, tuple(keys) if any(keys) else ()

    def founder(self, key: str) -> int:
        """Return the member id of the founder with ``key``; -1 if there is none."""
        equal = (bool(own) and hmac.compare_digest(own.encode(), key.encode()) for own in self.keys)
        return next((member_id for member_id, is_it in enumerate(equal) if is_it), -1)

    def detach(self, member_id: int, until: float) -> None:
        """Wait for a member that has lost its connection."""
        self.away[member_id] = until

    def detach_all(self, member_ids: Iterable[int], until: float) -> None:
        """Wait for all members, as none of them is there."""
        self.away = dict.fromkeys(member_ids, until)

    def attach(self, member_id: int) -> None:
        """Note that a member is back, or gone."""
        self.away.pop(member_id, None)
        self.busy.pop(member_id, None)

    def hurry(self, until: float) -> None:
        """Wait until this time at most, as other members are there and wait as well."""
        self.away = {member_id: min(at, until) for member_id, at in self.away.items()}

    def allow(self, until: float) -> None:
        """Wait until this time at least."""
        self.away = {member_id: max(at, until) for member_id, at in self.away.items()}

    def overdue(self, now: float) -> list[int]:
        """Return members that should be back by now."""
        return [member_id for member_id, until in self.away.items() if until <= now]

    def wait_for_busy(self, member_id: int, since: float, until: float) -> bool:
        """Wait on for a member with a running process. True if this is the first time."""
        is_new = member_id not in self.busy
        self.busy[member_id] = since
        self.away[member_id] = until
        return is_new
