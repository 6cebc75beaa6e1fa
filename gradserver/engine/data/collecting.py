"""One opening of a durable group's books at a data half: who has said what he holds, and what is being fetched.

What is done with it is in `gradserver.engine.data.recovery`.
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
    """What one member has said."""

    round: int
    weight: float
    before: int = -1
    """The section of the round before; -1 if it does not know."""
    slices: dict[State, dict[ExchangeKey, set[int]]] = field(
        default_factory=lambda: {state: defaultdict(set) for state in State}
    )
    weights: dict[ExchangeKey, dict[int, tuple[float, ...]]] = field(default_factory=lambda: defaultdict(dict))
    """Of buckets' slices which it holds: who counted, by seat."""

    sizes: dict[Place, int] = field(default_factory=dict)
    """Bytes of collectives' and transfers' results, by slice, if they have any."""

    def has(self, state: State, place: Place) -> bool:
        """Whether it has a slice in this state."""
        return place[1] in self.slices[state].get(place[0], ())

    def has_failed(self, key: ExchangeKey) -> bool:
        """Whether ``key`` has failed at it."""
        return any(key in self.slices[state] for state in FAILED)

    def take(self, result: Result) -> None:
        """It is being sent the result of a slice, and may be the only one who has it then."""
        key, index = result.key, result.slice
        if result.weights:
            self.weights[key][index] = result.weights
        self.slices[State.HELD][key].add(index)
        self.slices[State.LACKING].get(key, set()).discard(index)

    def loose(self) -> Iterable[Place]:
        """What it has begun of collectives and transfers, and has no result for."""
        return ((key, index) for key, found in self.slices[State.LACKING].items() for index in found)


class Stage(Enum):
    """How far it has come, as the table in `gradserver.engine.data.recovery` has it."""

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
    """One opening of a group's books."""

    version: int
    due: int
    """The round that the group is in, as far as control knows."""
    latest: int
    """The latest that it can be in."""
    touched: float
    own: int
    """The first round of which no result can be an earlier coordinator's."""
    draining: set[tuple[int, ExchangeKey, int]]
    """Reductions of before that have not come back, with the number of the books that they are of."""
    stage: Stage = Stage.COLLECTING
    round: int = 0
    holders: dict[int, Holder] = field(default_factory=dict)
    """By seat."""
    wanted: deque[Wanted] = field(default_factory=deque)
    asked: dict[Place, tuple[int, Wanted]] = field(default_factory=dict)
    """Of what is being fetched, from whom, and for whom."""
    came: dict[Place, tuple[Result, tuple[Buffer, ...]]] = field(default_factory=dict)
    """What of that has come before something in front of it: it is handed on in order."""

    def start_again(self) -> None:
        """Somebody has gone, or has to say anew what he holds."""
        self.stage = Stage.COLLECTING
        self.wanted.clear()
        self.asked.clear()
        self.came.clear()
