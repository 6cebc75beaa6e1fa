"""Rounds that are not over, and what members have said of each: `gradserver.engine.control.turns` acts on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradserver.protocol.errors import OutOfStepError
from gradserver.protocol.messages import Follow, Opens, Steps


@dataclass(slots=True)
class Turn:
    """A round that is open, or next. Members that said something first are seats."""

    opens: Opens | None = None
    opener: int = -1
    steps: list[tuple[Steps, int]] = field(default_factory=list)
    """Updates before it, each with the seat that said it first."""


@dataclass(slots=True)
class Turns:
    """Rounds that are not over, and members that ask about them."""

    rounds: dict[int, Turn] = field(default_factory=dict)
    following: dict[int, Follow] = field(default_factory=dict)
    """Question of each seat."""
    conflict: OutOfStepError | None = None
    """Error of two members that say different things of one round."""
