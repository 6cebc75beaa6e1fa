"""Slow workers of a group, and workers that are gone: notes for people.

`gradserver.engine.control.slow` has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_DEPARTURES: Final = 8
_SHOWN_SECONDS: Final = 600.0


class Gone(NamedTuple):
    """Worker that is gone, at a ``time`` of the coordinator's clock, and why. It may have been ``joining``."""

    name: str
    why: str
    time: float
    joining: bool


@dataclass(slots=True)
class Slow:
    """Notes about one group.

    Attributes:
        gone: the last workers that are gone.
        quiet_until: time until which the log does not name a member again, by id.
    """

    gone: deque[Gone] = field(default_factory=lambda: deque(maxlen=_DEPARTURES))
    quiet_until: dict[int, float] = field(default_factory=dict)

    def note_gone(self, gone: Gone) -> None:
        """Note that a worker is gone."""
        self.gone.append(gone)

    def may_name(self, member_id: int, now: float, seconds: float) -> bool:
        """Tell whether the log may name a member. If so, it is quiet about that member for so many ``seconds``."""
        if now < self.quiet_until.get(member_id, -math.inf):
            return False
        self.quiet_until[member_id] = now + seconds
        return True

    def describe(self, now: float) -> list[dict[str, object]]:
        """Return the workers that are gone since a short time, as plain JSON values."""
        return [
            {"name": one.name, "why": one.why, "ago": round(now - one.time, 1), "joining": one.joining}
            for one in self.gone
            if now - one.time < _SHOWN_SECONDS
        ]
