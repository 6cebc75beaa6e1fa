"""Stragglers: members that rounds were closed without, and how long rounds take without them. `data.quorum` decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.data.pace import Pace
from gradserver.protocol.exchange import BUCKET, ExchangeKey

_QUIET_SECONDS: Final = 10.0
"""Between two times that people are told."""


@dataclass(slots=True)
class Stragglers:
    """Stragglers of one group."""

    pace: Pace = field(default_factory=Pace)
    closed: dict[int, int] = field(default_factory=dict)
    """The last round that was closed without it, by member id."""
    section: tuple[int, int] = (-1, -1)
    """The last round that was closed, and the section that it is of; -1 if no member has said that."""
    quiet_until: float = -math.inf
    """Time at which people may be told again of a straggler."""

    latest: int = -1
    """The latest round that is complete here."""

    begun: tuple[int, float] = (-1, 0.0)
    """The round of which control said last which members contribute, and when it did."""

    def begin(self, number: int, now: float) -> None:
        """Note that control has said which members contribute to a round."""
        self.begun = number, now

    @property
    def awaited(self) -> tuple[int, float] | None:
        """The round of which control said which members contribute, and when it did; None if it is complete."""
        return self.begun if self.begun[0] > self.latest else None

    def close(self, member_id: int, number: int) -> None:
        """Count nothing more that ``member_id`` gives to rounds up to ``number``."""
        self.closed[member_id] = max(number, self.closed.get(member_id, -1))

    def section_of(self, number: int) -> int:
        """Return the section of a round that was closed, as control said; -1 if it does not know."""
        return self.section[1] if self.section[0] == number else -1

    def close_round(self, number: int, section: int) -> None:
        """Note that a round of ``section`` is closed."""
        self.section = number, section

    def is_closed(self, member_id: int, key: ExchangeKey) -> bool:
        """Tell whether what ``member_id`` gives to ``key`` does not count any more."""
        return key.stream == BUCKET and key.number <= self.closed.get(member_id, -1)

    @property
    def closed_round(self) -> int | None:
        """The round that was closed for stragglers and is not complete; None if there is none."""
        number = max(self.closed.values(), default=-1)
        return number if number > self.latest else None

    def completed(self, number: int) -> None:
        """Note that rounds up to ``number`` are complete here, and no later one."""
        self.latest = number

    def begin_again(self) -> None:
        """Forget which rounds were closed, as members are about to say in which round they are."""
        self.closed.clear()
        self.begin(-1, 0.0)

    def hand_over(self, member_id: int) -> None:
        """Give ``member_id`` to a new member: nothing was closed without it."""
        self.closed.pop(member_id, None)

    def is_quiet(self, now: float) -> bool:
        """Tell whether people were told a short time ago."""
        return now < self.quiet_until

    def tell(self, now: float) -> None:
        """Note that people are told now."""
        self.quiet_until = now + _QUIET_SECONDS
