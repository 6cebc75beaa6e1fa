"""Positions of an epoch's order: each is left, held by a member or used up, exactly once.

A position's life:

    state  event                                             next   what happens
    ─────  ────────────────────────────────────────────────  ─────  ─────────────────────────────────────────────
    LEFT   Claim                                             HELD   the lowest go first; no other gets them
    HELD   the same Claim again                              HELD   the same answer, that may have been lost
    HELD   Used in round n, which is not over                USED
    HELD   Used in round n, which is over without the seat   HELD   it will count later … or LEFT, if it is dropped
    HELD   its holder departs                                LEFT
    USED   Used in round n again, without it                 HELD
    USED   round n is over, and the seat counted             DONE   marked, if it counted in some slices only
    USED   round n is over without the seat                  HELD   it will count later … or LEFT, if it is dropped
    USED   its holder departs                                USED   whether it counted is known when the round is over
    USED   … and round n is over without the departed        LEFT
    DONE   all are, and a member claims of the next epoch    LEFT

Nothing here knows ranks, nor how many workers there are. A *seat* stands for a worker, as everywhere in the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from gradserver.engine.data_records import Claim, Committed, Data, Holder, Order
from gradserver.protocol.errors import DisagreementError, LimitExceededError, MalformedMessageError, OutOfStepError
from gradserver.protocol.limits import MAX_DATA, MAX_RANGES
from gradserver.protocol.ranges import Ranges, both, count, lowest, minus, union

K = TypeVar("K")

_MOST_PIECES: Final = MAX_RANGES - 1
"""Most ranges of a state: what lies between them is then no more than a message holds."""


class Answer(NamedTuple):
    """Ranges that a member got of ``epoch``, by its claim of this ``number``."""

    number: int
    epoch: int
    ranges: Ranges


@dataclass(slots=True)
class Use:
    """The use of one kind of data: of one epoch at a time."""

    name: str
    order: Order
    by: str
    """The first member that used it."""
    epoch: int
    left: Ranges
    begun: bool = False
    """True if a member has claimed any."""
    held: dict[int, Ranges] = field(default_factory=dict)
    """Ranges that seats hold and have not said to be used."""
    used: dict[tuple[int, int], Ranges] = field(default_factory=dict)
    """Ranges in the contributions to rounds that are not over, by round and seat."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers to the last claim of each seat."""

    @property
    def finished(self) -> bool:
        """True if every position is used up."""
        return not (self.left or self.held or self.used)

    @property
    def done(self) -> Ranges:
        """The positions that are used up."""
        return minus(self._all, union(self.left, *self.held.values(), *self.used.values()))

    @property
    def _all(self) -> Ranges:
        return ((0, self.order.length),) if self.order.length else ()

    def claim(self, seat: int, number: int, epoch: int, wanted: int) -> Answer:
        """Hand out as many as are ``wanted``, or are left."""
        before = self.answers.get(seat)
        if before is not None and before.number == number:
            return before
        if epoch == self.epoch + 1 and self.finished:
            self.epoch, self.left = epoch, self._all
        if epoch > self.epoch:
            raise OutOfStepError(f"epoch {epoch} of data {self.name!r} cannot begin: epoch {self.epoch} is not used up")
        ranges, rest = lowest(self.left, wanted) if epoch == self.epoch else ((), self.left)
        mine = union(self.held.get(seat, ()), ranges)
        self._check_pieces(len(rest) + len(mine) - len(self.left) - len(self.held.get(seat, ())))
        if ranges:
            self.left, self.held[seat] = rest, mine
        self.begun = self.begun or wanted > 0
        answer = Answer(number, epoch, ranges)
        self.answers[seat] = answer
        return answer

    @property
    def pieces(self) -> int:
        """Number of ranges that its state consists of, at most."""
        parts = [self.left, *self.held.values(), *self.used.values(), *(one.ranges for one in self.answers.values())]
        return sum(map(len, parts))

    def claimable(self, seat: int, number: int, wanted: int) -> int:
        """Return the number of ranges that the answer to a claim has, at most."""
        before = self.answers.get(seat)
        return len(before.ranges) if before is not None and before.number == number else min(len(self.left), wanted)

    def say_used(self, seat: int, round_number: int, ranges: Ranges) -> None:
        """Note that ``ranges``, and nothing else that ``seat`` holds, are in its contribution to a round."""
        before = self.used.get((round_number, seat), ())
        held = union(self.held.get(seat, ()), before)
        strange = minus(ranges, held)
        if strange:
            raise MalformedMessageError(
                f"it says that it used {strange[0][0]} to {strange[0][1] - 1} of data {self.name!r}, and does not "
                f"hold them"
            )
        rest = minus(held, ranges)
        self._check_pieces(len(rest) + len(ranges) - len(before) - len(self.held.get(seat, ())))
        _set(self.held, seat, rest)
        _set(self.used, (round_number, seat), ranges)

    def give_back(self, seat: int, ranges: Ranges) -> None:
        """Leave to all what ``seat`` holds of ``ranges``."""
        back = both(self.held.get(seat, ()), ranges)
        _set(self.held, seat, minus(self.held.get(seat, ()), back))
        self.left = union(self.left, back)

    def take_up(self, seat: int, ranges: Ranges, holder: int | None) -> None:
        """Do as was written: ``ranges`` are held by ``holder`` now, or used up. Before they were left, or a seat's.

        The record does not name that seat: it may have departed, or have dropped them.
        """
        self.left = minus(self.left, ranges)
        for other in (seat, *self.held.keys() - {seat}):
            _set(self.held, other, minus(self.held.get(other, ()), ranges))
        if holder is not None:
            _set(self.held, holder, union(self.held.get(holder, ()), ranges))

    def _check_pieces(self, more: int) -> None:
        parts = [self.left, *self.held.values(), *self.used.values()]
        if more > 0 and sum(map(len, parts)) + more > _MOST_PIECES:
            raise LimitExceededError(
                f"what is left of epoch {self.epoch} of data {self.name!r} would fall into more than {_MOST_PIECES} "
                f"pieces: claim larger ones"
            )

    def state(self, group: str) -> Data:
        """Make a record of all of it. What is used in open rounds is held, or left if its holder has departed."""
        left, held = self.left, dict(self.held)
        for (_, seat), ranges in self.used.items():
            if seat in self.answers:
                held[seat] = union(held.get(seat, ()), ranges)
            else:
                left = union(left, ranges)
        holders = tuple(Holder(seat, held.get(seat, ()), *self.answers[seat]) for seat in sorted(self.answers))
        return Data(group, self.name, self.order, self.by, self.epoch, self.begun, left, holders)


class Positions:
    """Positions in all data of one group.

    Attributes:
        uses: by name.
        users: the round from which on each seat says, in every round, what it used; by name and seat.
    """

    def __init__(self) -> None:
        self.uses: dict[str, Use] = {}
        self.users: dict[tuple[str, int], int] = {}
        self._said: dict[tuple[str, int], int] = {}
        """The last round of which each seat has said so."""
        self._dropped: dict[int, int] = {}
        """The last round of each seat that does not count, and never will."""
        self._kept: dict[int, int] = {}
        """The last round of each seat that does not count, but later will."""
        self._unwritten: set[str] = set()
        """Data with a state that is to be written anew: ranges were given back, and no other record says so."""

    def register(self, name: str, order: Order, epoch: int, done: Ranges, user: str) -> Use:
        """Register a ``user`` of data. It goes on where ``epoch`` and ``done`` say, unless the group is elsewhere.

        Raises:
            DisagreementError: others use other data under this name, or go on from elsewhere; both sides are named.
        """
        use = self.uses.get(name)
        if use is None:
            if len(self.uses) >= MAX_DATA:
                raise LimitExceededError(f"the group uses {MAX_DATA} kinds of data already")
            use = Use(name, order, user, epoch, ())
            use.left = minus(use._all, done)
            use._check_pieces(1)
            self.uses[name] = use
        elif use.order != order:
            raise DisagreementError(
                f"{user} uses data {name!r} as {order}, and {use.by} as {use.order}. All members must give DataRanges "
                f"the same length, seed and shuffle, or another name="
            )
        elif not use.begun and (epoch or done) and (epoch, done) != (use.epoch, use.done):
            raise DisagreementError(
                f"{user} goes on with data {name!r} in epoch {epoch}, {count(done)} samples used, and {use.by} in "
                f"epoch {use.epoch}, {count(use.done)} samples used. All members must load the same checkpoint"
            )
        return use

    def use(self, name: str) -> Use:
        """Return the use of data that a member has registered."""
        if name not in self.uses:
            raise MalformedMessageError(f"no member has registered data {name!r}")
        return self.uses[name]

    def used(self, name: str, epoch: int, seat: int, round_number: int, ranges: Ranges, over: int) -> None:
        """Note what ``seat`` says to be in its contribution to a round; rounds before ``over`` are over."""
        use = self.use(name)
        self._said[name, seat] = max(round_number, self._said.get((name, seat), -1))
        if round_number <= self._dropped.get(seat, -1):
            if epoch == use.epoch:
                use.give_back(seat, ranges)
                self._unwritten.add(name)
        elif round_number >= over and round_number > self._kept.get(seat, -1):
            if epoch == use.epoch:
                use.say_used(seat, round_number, ranges)
            elif ranges:
                raise MalformedMessageError(f"it used ranges of epoch {epoch}, and {use.epoch} is the present one")

    def begin_use(self, name: str, seat: int, round_number: int) -> None:
        """Note that ``seat`` uses samples from this round on, if it has not before."""
        self.users.setdefault((name, seat), round_number)

    def awaits(self, round_number: int, counted: Collection[int]) -> bool:
        """Tell whether a member that ``counted`` in a round has yet to say what it used in it."""
        return any(
            seat in counted and first <= round_number and self._said.get((name, seat), -1) < round_number
            for (name, seat), first in self.users.items()
            if seat in self.uses[name].held
        )

    def not_counted(self, seat: int, round_number: int, keep: bool) -> None:
        """Close a round without ``seat``, which is late. With ``keep`` what it gave will count later."""
        (self._kept if keep else self._dropped)[seat] = round_number
        for use in self.uses.values():
            ranges = use.used.pop((round_number, seat), ())
            _set(use.held, seat, union(use.held.get(seat, ()), ranges))
            if not keep and ranges:
                use.give_back(seat, ranges)
                self._unwritten.add(use.name)

    def commit(
        self, round_number: int, present: Collection[int], weights: Mapping[int, float], partly: Collection[int]
    ) -> tuple[Committed, ...]:
        """End a round: what its members used that counted is used up.

        Args:
            round_number: which.
            present: seats of the members that are present. They count, whatever weight they chose to have.
            weights: weights that counted, by seat.
            partly: seats that counted in some slices only.
        """
        found = []
        for use in self.uses.values():
            for number, seat in sorted(key for key in use.used if key[0] <= round_number):
                ranges = use.used.pop((number, seat))
                if seat in present or weights.get(seat, 0.0) > 0:
                    found.append(Committed(use.name, use.epoch, seat, seat in partly, ranges))
                else:
                    use.left = union(use.left, ranges)
        return tuple(found)

    def depart(self, seat: int) -> None:
        """Leave what ``seat`` held to the others, but for what it used in rounds that are not over: it is vacant."""
        self._dropped.pop(seat, None)
        self._kept.pop(seat, None)
        for name, use in self.uses.items():
            use.answers.pop(seat, None)
            use.give_back(seat, use.held.get(seat, ()))
            self.users.pop((name, seat), None)
            self._said.pop((name, seat), None)

    # ── what was written down ─────────────────────────────────────────────────────────────────────────

    def states(self, group: str) -> list[Data]:
        """All of it, to be written down."""
        return [use.state(group) for use in self.uses.values()]

    def restore(self, record: Data | Claim | Committed) -> None:
        """Go on from what was written down, record after record; what is used in rounds that are not over is held."""
        match record:
            case Data():
                use = Use(record.name, record.order, record.by, record.epoch, record.left, record.begun)
                use.held = {holder.seat: holder.held for holder in record.holders if holder.held}
                use.answers = {holder.seat: Answer(*holder[2:]) for holder in record.holders if holder.number}
                self.uses[record.name] = use
            case Claim(_, name, seat, number, epoch, ranges) if name in self.uses:
                use = self.uses[name]
                if epoch > use.epoch:
                    use.epoch, use.left, use.held = epoch, use._all, {}
                use.begun = True
                use.take_up(seat, ranges, seat)
                use.answers[seat] = Answer(number, epoch, ranges)
            case Committed(name, epoch, seat, _, ranges) if name in self.uses and epoch == self.uses[name].epoch:
                self.uses[name].take_up(seat, ranges, None)

    def unwritten(self) -> list[Use]:
        """Take the data with a state that is to be written anew."""
        names, self._unwritten = self._unwritten, set()
        return [self.uses[name] for name in sorted(names)]

    def keep_only(self, seats: Iterable[int]) -> None:
        """Keep what ``seats`` hold: all others have departed."""
        there = set(seats)
        for use in self.uses.values():
            for seat in use.held.keys() - there:
                use.give_back(seat, use.held[seat])
            use.answers = {seat: answer for seat, answer in use.answers.items() if seat in there}

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> dict[str, object]:
        """Return the epoch of each data, and the number of positions in each state: plain JSON values."""
        return {
            name: {
                "epoch": use.epoch,
                "length": use.order.length,
                "left": count(use.left),
                "held": sum(map(count, use.held.values())) + sum(map(count, use.used.values())),
            }
            for name, use in self.uses.items()
        }

    def validate(self) -> None:
        """Raise AssertionError if a position is in two places, or nowhere."""
        for use in self.uses.values():
            parts = [use.left, use.done, *use.held.values(), *use.used.values()]
            assert sum(map(count, parts)) == use.order.length, f"{use.name}: a position is twice somewhere"
            assert union(*parts) == use._all, f"{use.name}: a position is nowhere"
            assert all(use.held.values()), "a holder of nothing"
            assert all(use.used.values()), "a user of nothing"


def _set(table: dict[K, Ranges], key: K, ranges: Ranges) -> None:
    """Set an entry, or remove it if ``ranges`` are empty."""
    if ranges:
        table[key] = ranges
    else:
        table.pop(key, None)
