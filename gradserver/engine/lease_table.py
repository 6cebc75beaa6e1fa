"""Positions of a pass's order: each is left, held by a member or used up, exactly once. No lease expires by time.

A position's life:

    state  event                                             next   what happens
    ─────  ────────────────────────────────────────────────  ─────  ─────────────────────────────────────────────
    LEFT   Claim                                             HELD   the lowest go first; no other gets them
    HELD   the same Claim again                              HELD   the same answer, that may have been lost
    HELD   Claim of its holder, which returns them           LEFT   it has dropped what it computed of them
    HELD   Used in round n, which is not over                USED
    HELD   Used in round n, which is over                    HELD   the holder hears that it was late
    HELD   its holder departs                                LEFT
    USED   Used in round n again, without it                 HELD
    USED   Used in a later round                             USED   in that one: the holder was late for round n
    USED   round n is over, and the member counted           DONE   marked, if it counted in some slices only
    USED   round n closed without the member, and is over    HELD   it will count later, or comes back by a Claim
    USED   … but all that the member gave had come by then   DONE   it does not hear that it was late
    USED   its holder departs                                USED   whether it counted is known when the round is over
    USED   … and round n is over without the departed        LEFT
    DONE   round n is open again: members lack its end       USED   in round n, also if the member that used it is gone
    …      and it was used in a round behind n               HELD   or LEFT, if the member that used it is gone
    USED   … the same                                        HELD   or LEFT, as well
    DONE   all are, and a member claims of the next epoch    LEFT

So a member and this table agree about what it holds at any time, but for what is on its way.

What a coordinator that takes over knows of it:

    field of the table             how it comes back
    ─────────────────────────────  ────────────────────────────────────────────────────────────────────────────────
    `Use`: order, epoch, left      Data, Claim and Round records, each written before it is told
    `Use.held`, `Use.answers`      the same records; a claim without an answer is asked again, and has its number
    `Use.used`                     Used records; members that come back say it again before any push
    … of members that are gone     the same records. The weights of the round, which others hold, say if it counted
    … that control had not read    by members that come back. If one is gone, it is left: see below
    `Positions.users`              from the answers: each member that has one says what it used in each round
    `Positions._said`              not needed: it is said again
    rounds that closed without     Cut records (`gradserver.engine.control.group.rounds`)
    questions that wait            by the members, which ask again

A member says what it used before it pushes. So a coordinator with a data half of its own has read and written it before
any result of it is told. Data shards elsewhere can make all results of a round before control has read it. If then the
coordinator and this member die together, its samples are left, although they counted.

Nothing here knows ranks, nor how many workers there are. A *member id* stands for a worker, as everywhere in the
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from gradserver.engine.data_records import Claim, Committed, Data, Holder, OfData, Order, Used
from gradserver.engine.ends import MAX_CUTS
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
    """Ranges that members hold and have not said to be used."""
    used: dict[tuple[int, int], Ranges] = field(default_factory=dict)
    """Ranges in the contributions to rounds that are not over, by round and member id, or ``~id`` of one that is gone.
    """
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers to the last claim of each member."""

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

    def place(self, epoch: int, done: Ranges) -> tuple[int, Ranges]:
        """Return ``epoch`` and ``done``. The end of an epoch is the beginning of the next, where a fast member is."""
        return (epoch + 1, ()) if done and done == self._all else (epoch, done)

    def is_answered(self, member_id: int, number: int) -> bool:
        """Tell whether a claim is one that is repeated, for want of its answer."""
        before = self.answers.get(member_id)
        return before is not None and before.number == number

    def claim(self, member_id: int, number: int, epoch: int, wanted: int, returned: Ranges = ()) -> Answer:
        """Hand out as many as are ``wanted``, or are left. Others go first with what is ``returned``."""
        if self.is_answered(member_id, number):
            return self.answers[member_id]
        if epoch == self.epoch + 1 and self.finished:
            self.epoch, self.left = epoch, self._all
        if epoch > self.epoch:
            raise OutOfStepError(f"epoch {epoch} of data {self.name!r} cannot begin: epoch {self.epoch} is not used up")
        ranges, rest = lowest(self.left, wanted) if epoch == self.epoch else ((), self.left)
        mine = union(self.held.get(member_id, ()), ranges)
        self._check_pieces(len(rest) + len(mine) - len(self.left) - len(self.held.get(member_id, ())))
        if ranges:
            self.left, self.held[member_id] = rest, mine
        if epoch == self.epoch:
            self.give_back(member_id, returned)
        self.begun = self.begun or wanted > 0
        answer = Answer(number, epoch, ranges)
        self.answers[member_id] = answer
        return answer

    @property
    def pieces(self) -> int:
        """Number of ranges that its state consists of, at most."""
        parts = [self.left, *self.held.values(), *self.used.values(), *(one.ranges for one in self.answers.values())]
        return sum(map(len, parts))

    def claimable(self, member_id: int, number: int, wanted: int) -> int:
        """Return the number of ranges that the answer to a claim has, at most."""
        again = self.is_answered(member_id, number)
        return len(self.answers[member_id].ranges) if again else min(len(self.left), wanted)

    def say_used(self, member_id: int, round_number: int, ranges: Ranges) -> bool:
        """Note that ``ranges``, and nothing else that ``member_id`` holds, are in its contribution to a round.

        Return False if that was known.
        """
        before = self.used.get((round_number, member_id), ())
        if ranges == before:
            return False
        self._move(member_id, round_number, ranges)
        held = union(self.held.get(member_id, ()), before)
        strange = minus(ranges, held)
        if strange:
            raise MalformedMessageError(
                f"it says that it used {strange[0][0]} to {strange[0][1] - 1} of data {self.name!r}, and does not "
                f"hold them"
            )
        rest = minus(held, ranges)
        self._check_pieces(len(rest) + len(ranges) - len(before) - len(self.held.get(member_id, ())))
        _set(self.held, member_id, rest)
        _set(self.used, (round_number, member_id), ranges)
        return True

    def _move(self, member_id: int, round_number: int, ranges: Ranges) -> None:
        """Take ``ranges`` out of rounds before: the member has heard that it was late for these."""
        for key in [key for key in self.used if key[1] == member_id and key[0] < round_number]:
            if late := both(self.used[key], ranges):
                _set(self.used, key, minus(self.used[key], late))
                _set(self.held, member_id, union(self.held.get(member_id, ()), late))

    def have_all(self, member_ids: Collection[int]) -> bool:
        """Tell whether these members have all positions that are handed out, and none is left."""
        holders = self.held.keys() | {member_id for _, member_id in self.used}
        return bool(holders) and not self.left and holders <= {*member_ids}

    def give_back(self, member_id: int, ranges: Ranges) -> None:
        """Leave to all what ``member_id`` holds of ``ranges``."""
        back = both(self.held.get(member_id, ()), ranges)
        _set(self.held, member_id, minus(self.held.get(member_id, ()), back))
        self.left = union(self.left, back)

    def release(self, keys: Iterable[tuple[int, int]]) -> None:
        """Take what was used in rounds for unused: its holder has it, or all, if that is gone."""
        for key in keys:
            ranges, user = self.used.pop(key, ()), key[1]
            if user < 0:
                self.left = union(self.left, ranges)
            else:
                _set(self.held, user, union(self.held.get(user, ()), ranges))

    def take_used(self, round_number: int, user: int, ranges: Ranges) -> None:
        """Do as was written: of ``ranges`` what ``user`` holds is used in a round. If it is gone, that was left."""
        self.release([(round_number, user)])
        self._move(user, round_number, ranges)
        found = both(ranges, self.left if user < 0 else self.held.get(user, ()))
        if user < 0:
            self.left = minus(self.left, found)
        else:
            _set(self.held, user, minus(self.held.get(user, ()), found))
        _set(self.used, (round_number, user), found)

    def take_up(self, member_id: int, ranges: Ranges, holder: int | None) -> None:
        """Do as was written: ``ranges`` are held by ``holder`` now, or used up. Before they were left, or a member's.

        The record does not name that member: it may have departed, or have dropped them.
        """
        self.left = minus(self.left, ranges)
        for other in (member_id, *self.held.keys() - {member_id}):
            _set(self.held, other, minus(self.held.get(other, ()), ranges))
        for key in [*self.used]:
            _set(self.used, key, minus(self.used[key], ranges))
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
        for (_, member_id), ranges in self.used.items():
            if member_id in self.answers:
                held[member_id] = union(held.get(member_id, ()), ranges)
            else:
                left = union(left, ranges)
        holders = tuple(
            Holder(member_id, held.get(member_id, ()), *self.answers[member_id]) for member_id in sorted(self.answers)
        )
        return Data(group, self.name, self.order, self.by, self.epoch, self.begun, left, holders)

    def state_of_used(self, group: str) -> Iterator[Used]:
        """Make records of what is used in open rounds, which stand behind that of all of it."""
        for (number, user), ranges in self.used.items():
            yield Used(group, self.name, max(user, ~user), number, self.epoch, ranges, user < 0)


class Positions:
    """Positions in all data of one group.

    Attributes:
        uses: by name.
        users: the round from which on each member says, in every round, what it used; by name and member id.
    """

    def __init__(self) -> None:
        self.uses: dict[str, Use] = {}
        self.users: dict[tuple[str, int], int] = {}
        self._said: dict[tuple[str, int], int] = {}
        """The last round of which each member has said so."""
        self._ends: deque[tuple[int, tuple[Committed, ...]]] = deque(maxlen=MAX_CUTS)
        """Rounds that are over, and what each used up, as they may be made again."""

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
        elif not use.begun and (epoch or done) and use.place(epoch, done) != use.place(use.epoch, use.done):
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

    def used(self, name: str, epoch: int, member_id: int, round_number: int, ranges: Ranges, over: int) -> bool:
        """Note what ``member_id`` says to be in its contribution to a round; rounds before ``over`` are over.

        Return False if that changes nothing.
        """
        use = self.use(name)
        self._said[name, member_id] = max(round_number, self._said.get((name, member_id), -1))
        if round_number < over:
            return False  # the round was closed without it, or this is said again
        if epoch == use.epoch:
            return use.say_used(member_id, round_number, ranges)
        if ranges:
            raise MalformedMessageError(f"it used ranges of epoch {epoch}, and {use.epoch} is the present one")
        return False

    def begin_use(self, name: str, member_id: int, round_number: int) -> None:
        """Note that ``member_id`` uses samples from this round on, if it has not before."""
        self.users.setdefault((name, member_id), round_number)

    def awaits(self, round_number: int, counted: Collection[int]) -> bool:
        """Tell whether a member that ``counted`` in a round has yet to say what it used in it."""
        return any(
            member_id in counted and first <= round_number and self._said.get((name, member_id), -1) < round_number
            for (name, member_id), first in self.users.items()
            if member_id in self.uses[name].held
        )

    def commit(
        self,
        round_number: int,
        present: Collection[int],
        weights: Mapping[int, float],
        partly: Collection[int],
        late: Collection[int] = (),
    ) -> tuple[Committed, ...]:
        """End a round: what its members used that counted is used up.

        Args:
            round_number: which.
            present: ids of the members that are present. They count, whatever weight they chose to have.
            weights: weights that counted, by member id.
            partly: members that counted in some slices only.
            late: members that the round was closed without.
        """
        found = []
        for use in self.uses.values():
            over = [used for used in use.used if used[0] <= round_number]
            for number, key in sorted(over, key=lambda used: (used[0], max(used[1], ~used[1]))):
                ranges, member_id = use.used.pop((number, key)), max(key, ~key)
                counted = weights.get(member_id, 0.0) > 0
                if key in late and not (counted and key not in partly):
                    use.held[key] = union(use.held.get(key, ()), ranges)
                elif key in present or counted:
                    found.append(Committed(use.name, use.epoch, member_id, member_id in partly, ranges))
                else:
                    use.left = union(use.left, ranges)
        self._ends.append((round_number, tuple(found)))
        return tuple(found)

    def go_back(self, round_number: int) -> None:
        """Take back what ``round_number`` and later rounds have used up: it is open again.

        Members may hold its results, with what a member gave that is gone: its weights tell. Results of later rounds
        are lost. Members that are there say again what they used. What others have claimed meanwhile stays theirs.
        """
        for each in self.uses.values():
            each.release([key for key in each.used if key[0] > round_number])
        while self._ends and self._ends[-1][0] >= round_number:
            number, used_up = self._ends.pop()
            for name, epoch, member_id, _, ranges in used_up:
                if (use := self.uses.get(name)) is None:
                    continue
                if use.epoch > epoch:  # members that had heard of the end, and began the next epoch, are gone
                    use.epoch, use.left, use.held, use.used = epoch, (), {}, {}
                key = number, member_id if member_id in use.answers else ~member_id
                _set(use.used, key, union(use.used.get(key, ()), both(ranges, use.done)))
                if number > round_number:
                    use.release([key])
        self.users = {user: min(first, round_number) for user, first in self.users.items()}
        self._said = {user: min(last, round_number - 1) for user, last in self._said.items()}

    def depart(self, member_id: int) -> None:
        """Leave to the others what ``member_id`` held, but for what it used in rounds that are not over: it is gone.

        Another member may get its id before these are over. So what it used is that of ``~member_id`` from now on.
        """
        for name, use in self.uses.items():
            use.answers.pop(member_id, None)
            for number, _ in [key for key in use.used if key[1] == member_id]:
                before = use.used.get((number, ~member_id), ())
                use.used[number, ~member_id] = union(before, use.used.pop((number, member_id)))
            use.give_back(member_id, use.held.get(member_id, ()))
            self.users.pop((name, member_id), None)
            self._said.pop((name, member_id), None)

    # ── what was written down ─────────────────────────────────────────────────────────────────────────

    def states(self, group: str) -> Iterator[Data | Used]:
        """All of it, to be written down."""
        for use in self.uses.values():
            yield use.state(group)
            yield from use.state_of_used(group)

    def restore_end(self, round_number: int, used_up: tuple[Committed, ...]) -> None:
        """Take what was written of the end of a round, which may be written for the second time."""
        self.go_back(round_number)
        for committed in used_up:
            self.restore(committed)
        for use in self.uses.values():
            use.release([key for key in use.used if key[0] <= round_number])
        self._ends.append((round_number, used_up))

    def restore(self, record: OfData | Committed) -> None:
        """Go on from what was written down, record after record."""
        match record:
            case Data():
                use = Use(record.name, record.order, record.by, record.epoch, record.left, record.begun)
                use.held = {holder.member_id: holder.held for holder in record.holders if holder.held}
                use.answers = {holder.member_id: Answer(*holder[2:]) for holder in record.holders if holder.number}
                before, self.uses[use.name] = self.uses.get(use.name, use), use
                for (number, user), ranges in before.used.items() if before.epoch == use.epoch else ():
                    use.take_used(number, user, ranges)
            case Claim(_, name, member_id, number, epoch, ranges) if name in self.uses:
                use = self.uses[name]
                if epoch > use.epoch:
                    use.epoch, use.left, use.held, use.used = epoch, use._all, {}, {}
                use.begun = True
                use.take_up(member_id, ranges, member_id)
                use.answers[member_id] = Answer(number, epoch, ranges)
            case Used(_, name, member_id, number, epoch, ranges, gone) if (
                name in self.uses and epoch == self.uses[name].epoch
            ):
                self.uses[name].take_used(number, ~member_id if gone else member_id, ranges)
            case Committed(name, epoch, member_id, _, ranges) if name in self.uses and epoch == self.uses[name].epoch:
                self.uses[name].take_up(member_id, ranges, None)

    def go_on(self, round_number: int) -> None:
        """Go on with ``round_number``: members that have an answer go on to say what they used in each round."""
        for name, use in self.uses.items():
            for member_id in use.answers:
                self.begin_use(name, member_id, round_number)

    def have_all(self, member_ids: Collection[int]) -> list[Use]:
        """Return the data of which these members have the last samples, if no other has any of any data; else none."""
        found = [use for use in self.uses.values() if use.held or use.used]
        return found if all(use.have_all(member_ids) for use in found) else []

    def keep_only(self, member_ids: Iterable[int]) -> None:
        """Keep what ``member_ids`` hold: all others have departed."""
        known = {one for use in self.uses.values() for one in (*use.held, *use.answers, *(key[1] for key in use.used))}
        for member_id in known.difference(member_ids):
            if member_id >= 0:
                self.depart(member_id)

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
