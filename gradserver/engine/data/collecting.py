"""State of a recovery at a data half: what each member has said that it holds, and what is being fetched.

The functions that work on it are in `gradserver.engine.data.recovery`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import ExchangeKey
from gradserver.protocol.messages import Result
from gradserver.protocol.messages.recovery import State

FAILED: Final = (State.FAILED, State.CHANGED)
"""States of a collective or transfer that failed at a member."""

Place = tuple[ExchangeKey, int]
"""An exchange, and a slice of it."""


@dataclass(slots=True)
class Holder:
    """Inventory of one member: what it has said that it holds."""

    round: int
    weight: float
    before: int = -1
    """Section of the round before; -1 if it does not know."""
    slices: dict[State, dict[ExchangeKey, set[int]]] = field(
        default_factory=lambda: {state: defaultdict(set) for state in State}
    )
    weights: dict[ExchangeKey, dict[int, tuple[float, ...]]] = field(default_factory=lambda: defaultdict(dict))
    """Weights that counted in the slices of buckets that it holds, by seat."""

    sizes: dict[Place, int] = field(default_factory=dict)
    """Bytes of collectives' and transfers' results, by slice, if they have any."""

    def has(self, state: State, place: Place) -> bool:
        """Tell whether it has a slice in this state."""
        return place[1] in self.slices[state].get(place[0], ())

    def has_failed(self, key: ExchangeKey) -> bool:
        """Tell whether ``key`` has failed at it."""
        return any(key in self.slices[state] for state in FAILED)

    def take(self, result: Result) -> None:
        """Note that it is sent the result of a slice. It may be the only member that has it then."""
        key, index = result.key, result.slice
        if result.weights:
            self.weights[key][index] = result.weights
        self.slices[State.HELD][key].add(index)
        self.slices[State.LACKING].get(key, set()).discard(index)

    def loose(self) -> Iterable[Place]:
        """Yield the slices of collectives and transfers that it has begun and has no result for."""
        return ((key, index) for key, found in self.slices[State.LACKING].items() for index in found)


class Stage(Enum):
    """Stage of a recovery, as the table in `gradserver.engine.data.recovery` has it."""

    COLLECTING = auto()
    PREVIOUS = auto()
    TOLD = auto()
    PRESENT = auto()


class Wanted(NamedTuple):
    """A result that some lack and others hold."""

    place: Place
    lacking: tuple[int, ...]
    holding: tuple[int, ...]


@dataclass(slots=True)
class Recovery:
    """One recovery of a group."""

    version: int
    due: int
    """The round that the group is in, as far as control knows."""
    latest: int
    """The latest round that it can be in."""
    touched: float
    own: int
    """The first round of which no result can be an earlier coordinator's."""
    draining: set[tuple[int, ExchangeKey, int]]
    """Reductions from before that have not come back, each with its generation."""
    stage: Stage = Stage.COLLECTING
    round: int = 0
    holders: dict[int, Holder] = field(default_factory=dict)
    """Inventory of each member, by seat."""
    wanted: deque[Wanted] = field(default_factory=deque)
    asked: dict[Place, tuple[int, Wanted]] = field(default_factory=dict)
    """Results that are being fetched: the source of each, and the members that lack it."""
    came: dict[Place, tuple[Result, tuple[Buffer, ...]]] = field(default_factory=dict)
    """Fetched results that came before one in front of them: they are handed on in order."""

    def start_again(self) -> None:
        """Collect anew: a member has gone, or has to say once more what it holds."""
        self.stage = Stage.COLLECTING
        self.wanted.clear()
        self.asked.clear()
        self.came.clear()
