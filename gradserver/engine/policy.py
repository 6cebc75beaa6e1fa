"""What a coordinator was told about the size of a group."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InvalidWorldSizeError
from protocol.limits import BACKLOG_BYTES, MAX_WORLD_SIZE

GATHER_SECONDS = 2.0
"""How long an elastic group that could begin waits for more, if nobody says otherwise."""
DEAD_AFTER_SECONDS = 1.0
RECONNECT_SECONDS = 60.0
MISSING_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Policy:
    """An elastic group: one that goes on when members leave or are lost.

    Attributes:
        minimum: it begins when so many are there, and makes no further round with fewer.
        maximum: it never has more.
        gather: seconds that it waits for more than the minimum before it begins.
        backlog: bytes of unasked results that one member may have unread.
        dead_after: seconds in which somebody whose connection broke has departed. If the group is durable, he has half
            of them to come back.
        reconnect: seconds that a durable group waits for somebody to come back, when nobody is left.
        missing: seconds that those who have come back then wait for the others.
    """

    minimum: int
    maximum: int = MAX_WORLD_SIZE
    gather: float = GATHER_SECONDS
    backlog: int = BACKLOG_BYTES
    dead_after: float = DEAD_AFTER_SECONDS
    reconnect: float = RECONNECT_SECONDS
    missing: float = MISSING_SECONDS

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= MAX_WORLD_SIZE:
            raise InvalidWorldSizeError(
                f"an elastic group has MIN to MAX workers, 1 ≤ MIN ≤ MAX ≤ {MAX_WORLD_SIZE}, "
                f"not {self.minimum} to {self.maximum}"
            )

    def __str__(self) -> str:
        return f"{self.minimum} or more" if self.maximum == MAX_WORLD_SIZE else f"{self.minimum} to {self.maximum}"
