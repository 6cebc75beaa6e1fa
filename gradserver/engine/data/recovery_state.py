"""State of a recovery at a data half: what each member has said that it holds, and what is being fetched.

The functions that work on it are in `gradserver.engine.data.recovery`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import BUCKET, ExchangeKey
from gradserver.protocol.messages import Result
from gradserver.protocol.messages.data import made_in
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
    slices: dict[State, dict[ExchangeKey, set[int]]] = field(
        default_factory=lambda: {state: defaultdict(set) for state in State}
    )
    weights: dict[ExchangeKey, dict[int, tuple[float, ...]]] = field(default_factory=lambda: defaultdict(dict))
    """Weights that counted in the slices of buckets that it holds, by member id."""

    made: dict[Place, int] = field(default_factory=dict)
    """Generation in which each result was made."""

    handed: set[Place] = field(default_factory=set)
    """Slices that it was handed in this recovery, and may keep no bytes of."""

    sizes: dict[Place, int] = field(default_factory=dict)
    """Bytes of collectives' and transfers' results, by slice, if they have any."""

    def has(self, state: State, place: Place) -> bool:
        """Tell whether it has a slice in this state."""
        return place[1] in self.slices[state].get(place[0], ())

    def bucket_of(self, number: int) -> int | None:
        """Return a bucket that was exchanged in round ``number``, if it holds anything of that at any shard."""
        held = (key for state in (State.HELD, State.ELSEWHERE) for key in self.slices[state])
        return next((key.part for key in held if key[:2] == (BUCKET, number)), None)

    def has_failed(self, key: ExchangeKey) -> bool:
        """Tell whether ``key`` has failed at it."""
        return any(key in self.slices[state] for state in FAILED)

    def has_ended(self, key: ExchangeKey, index: int = -1) -> bool:
        """Tell whether it lacks nothing of ``key``, or not that slice, and keeps less: it cannot give this again."""
        lacking = self.slices[State.LACKING].get(key, ())
        return key in self.slices[State.OVER] and not (lacking if index < 0 else index in lacking)

    def answered(self, key: ExchangeKey) -> set[int]:
        """Return the slices of ``key`` that it has the results of, kept or not."""
        return self.slices[State.HELD].get(key, set()) | self.slices[State.OVER].get(key, set())

    def say(
        self,
        state: State,
        key: ExchangeKey,
        slices: range,
        weights: tuple[float, ...] = (),
        nbytes: int = 0,
        made: int = 0,
    ) -> None:
        """Note that it says to have ``slices`` in a state, with the weights that counted, or the size of each."""
        self.slices[state][key].update(slices)
        if made:
            self.made.update(((key, index), made) for index in slices)
        if nbytes:
            self.sizes.update(((key, index), nbytes) for index in slices)
        if weights:
            self.weights[key].update(dict.fromkeys(slices, weights))

    def enter(self, number: int) -> None:
        """Go on to round ``number``. What it gave in an earlier one has no weight there."""
        self.weight = self.weight if self.round == number else 0.0
        self.round = number

    def give_up(self, key: ExchangeKey) -> bool:
        """Lack ``key`` no more, as it has failed; tell whether it did."""
        return self.slices[State.LACKING].pop(key, None) is not None

    def take(self, result: Result) -> None:
        """Note that it is sent the result of a slice. It may be the only member that has it then."""
        key, index = result.key, result.slice
        if result.weights:
            self.weights[key][index] = result.weights
        self.slices[State.HELD][key].add(index)
        self.handed.add((key, index))
        self.made[key, index] = made_in(result.proof)
        self.slices[State.LACKING].get(key, set()).discard(index)

    def loose(self) -> Iterable[Place]:
        """Yield the slices of collectives and transfers that it has begun and has no result for."""
        return ((key, index) for key, found in self.slices[State.LACKING].items() for index in found)


def latest(holders: Mapping[int, Holder], place: Place) -> tuple[int, ...]:
    """Return the members that hold the result of a slice, as it was made last. An earlier one is void."""
    holding = [member_id for member_id in holders if holders[member_id].has(State.HELD, place)]
    made = max((holders[member_id].made.get(place, 0) for member_id in holding), default=0)
    return tuple(member_id for member_id in holding if holders[member_id].made.get(place, 0) == made)


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

    generation: int
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
    """Inventory of each member, by member id."""
    wanted: deque[Wanted] = field(default_factory=deque)
    asked: dict[Place, tuple[int, Wanted]] = field(default_factory=dict)
    """Results that are being fetched: the source of each, and the members that lack it."""
    came: dict[Place, tuple[Result, tuple[Buffer, ...]]] = field(default_factory=dict)
    """Fetched results that came before one in front of them: they are handed on in order."""

    def hear(self, member_id: int, holder: Holder, now: float) -> None:
        """Take what ``member_id`` has said."""
        self.holders[member_id] = holder
        self.touched = now

    def forget(self, member_id: int) -> None:
        """Forget what ``member_id`` has said, and collect anew. A learner has said nothing."""
        if self.holders.pop(member_id, None) is not None:
            self.start_again()

    def progress(self, now: float) -> None:
        """Let the deadline run from ``now`` on."""
        self.touched = now

    def drain(self, which: tuple[int, ExchangeKey, int]) -> bool:
        """Note that a reduction from before has come back, and tell whether it was the last."""
        if which not in self.draining:
            return False
        self.draining.discard(which)
        return not self.draining

    def find_round(self, number: int) -> None:
        """Note the round that the group is in."""
        self.round = number

    def enter(self, stage: Stage) -> None:
        """Go on to a stage."""
        self.stage = stage

    def enter_round(self) -> None:
        """Let all members go on to the round that the group is in."""
        for holder in self.holders.values():
            holder.enter(self.round)

    def want(self, wanted: Iterable[Wanted]) -> None:
        """Fetch results, in order."""
        self.wanted.extend(wanted)

    def ask(self, most: int) -> Iterator[tuple[int, Place]]:
        """Yield results to fetch now, each with its source, while at most so many are on their way."""
        while self.wanted and len(self.asked) < most:
            wanted = self.wanted.popleft()
            source = wanted.holding[wanted.place[1] % len(wanted.holding)]
            self.asked[wanted.place] = source, wanted
            yield source, wanted.place

    def receive(self, place: Place, result: Result, payloads: tuple[Buffer, ...]) -> None:
        """Take a result that was fetched."""
        self.came[place] = result, payloads

    def hand_on(self) -> Iterator[tuple[int, Result, tuple[Buffer, ...]]]:
        """Yield fetched results that have none in front of them any more, with each member that lacks them."""
        for place, (_, wanted) in list(self.asked.items()):
            if place not in self.came:
                return
            del self.asked[place]
            result, payloads = self.came.pop(place)
            for lacking in wanted.lacking:
                self.holders[lacking].take(result)
                yield lacking, result, payloads

    def give_up(self, key: ExchangeKey) -> list[int]:
        """Fetch no results of ``key``, which has failed, and return the members that lack some."""
        self.wanted = deque(wanted for wanted in self.wanted if wanted.place[0] != key)
        return [member_id for member_id, holder in self.holders.items() if holder.give_up(key)]

    def start_again(self) -> None:
        """Collect anew: a member has gone, or has to say once more what it holds."""
        self.stage = Stage.COLLECTING
        self.wanted.clear()
        self.asked.clear()
        self.came.clear()
