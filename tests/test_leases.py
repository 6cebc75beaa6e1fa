"""Positions: whatever is claimed, used, lost, late or restarted, each one is used up exactly once in an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.data_records import Claim, Committed, Order, Used
from gradserver.engine.declared import Kind
from gradserver.engine.journal_state import Dated, JournalState
from gradserver.engine.lease_table import Positions
from gradserver.engine.records import Epoch, Group, Round, RoundRecord, decode, encode
from gradserver.protocol.errors import DisagreementError, LimitExceededError, MalformedMessageError, OutOfStepError
from gradserver.protocol.limits import MAX_DATA, MAX_NUMEL
from gradserver.protocol.ranges import Ranges, both, count, lowest, minus, pack, union, unpack
from tests.examples import examples

# ── ranges ────────────────────────────────────────────────────────────────────────────────────────────

sets = st.sets(st.integers(0, 30))


def ranges_of(positions: set[int]) -> Ranges:
    return union(*(((position, position + 1),) for position in positions))


def within(ranges: Ranges) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@given(sets, sets, st.integers(0, 40))
def test_ranges_are_sets(one: set[int], other: set[int], number: int) -> None:
    ours, theirs = ranges_of(one), ranges_of(other)
    assert within(ours) == sorted(one)
    assert count(ours) == len(one)
    for found, expected in [(union(ours, theirs), one | other), (minus(ours, theirs), one - other)]:
        assert found == ranges_of(expected)
    assert both(ours, theirs) == ranges_of(one & other)
    low, rest = lowest(ours, number)
    assert within(low) == sorted(one)[:number]
    assert within(rest) == sorted(one)[number:]
    assert unpack(pack(ours)) == ours


@given(st.binary(max_size=64) | st.lists(st.integers(0, 2**64 - 1), max_size=6).map(lambda v: b"".join(map(_u64, v))))
def test_bytes_are_ranges_in_normal_form_or_none(data: bytes) -> None:
    try:
        found = unpack(data)
    except MalformedMessageError:
        return
    assert union(found) == found
    assert pack(found) == data
    assert all(0 <= start < stop <= MAX_NUMEL for start, stop in found)


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


# ── a model of control and workers ────────────────────────────────────────────────────────────────────

ORDER = Order(23, 17, True)
SLICES = frozenset({0, 1})


class Given(NamedTuple):
    """A worker's contribution to a round: samples, by slice of the gradients."""

    samples: dict[int, Counter[int]]
    counted: frozenset[int] = frozenset()
    """Slices that have come in time."""


class Member:
    """One worker: its data, as `gradserver.DataRanges` has it, and gradients that it keeps."""

    def __init__(self, first: int) -> None:
        self.round = first
        self.number = 0
        self.left: Ranges = ()
        self.used: Ranges = ()
        self.returned: Ranges = ()
        self.said: Ranges | None = None
        """Samples that it names in its round; None before that has begun."""
        self.kept = {index: Counter[int]() for index in SLICES}

    def give(self, wanted: int) -> Given:
        """Begin its round with some of its samples, or none, and with what it has kept."""
        taken, self.left = lowest(self.left, wanted)
        self.said, self.used = union(self.used, taken), ()
        given = {index: self.kept[index] + Counter(within(taken)) for index in SLICES}
        self.kept = {index: Counter() for index in SLICES}
        return Given(given)

    def hear(self, given: Given, keep: bool) -> None:
        """Hear that its round is over, and which of its slices counted."""
        assert self.said is not None
        if given.counted != SLICES and keep:
            self.kept = {index: given.samples[index] for index in SLICES - given.counted} | {
                index: Counter() for index in given.counted
            }
            self.used = self.said
        elif given.counted != SLICES:
            self.returned = union(self.returned, self.said)
        self.said = None
        self.round += 1


class Model:
    """Workers that claim, use, come late by any number of rounds, die and join, and a control that is restarted.

    It knows which gradients are in which mean, and so how often each sample counted, whatever the table says.
    """

    def __init__(self, member_ids: int, keep: bool) -> None:
        self.keep = keep
        self.positions = Positions()
        self.written: list[Kind] = [Group("g", 8, 1.0)]
        self.round = self.epoch = 0
        self.members = {member_id: Member(0) for member_id in range(member_ids)}
        self.given: dict[tuple[int, int], Given] = {}
        """Contributions of each member to the open round, and to those of which it has not heard that they are over."""
        self.late: dict[int, set[int]] = {}
        self.counted: dict[int, dict[int, Counter[int]]] = {}
        """Number of times that each sample counted, by epoch and slice."""
        self.excused: set[int] = set()
        """Samples of this epoch that counted in a part of the slices when their worker died, or dropped the rest."""
        self.committed: list[Committed] = []
        self.note_members()
        self.positions.register("data", ORDER, 0, (), "w0")
        self.written += self.positions.states("g")

    def note_members(self) -> None:
        members = tuple((member_id, f"w{member_id}") for member_id in sorted(self.members))
        self.written.append(Epoch("g", 1, self.round, members, ""))

    # ── what workers do ───────────────────────────────────────────────────────────────────────────────

    def claim(self, member_id: int, wanted: int) -> None:
        me, use = self.members[member_id], self.positions.use("data")
        if me.round + (me.said is not None) > self.round:
            return  # it is answered when the rounds before are over
        me.number, returned, me.returned = me.number + 1, me.returned, ()
        answer = use.claim(member_id, me.number, self.epoch, wanted, returned)
        assert use.claim(member_id, me.number, self.epoch, wanted, returned) == answer, "the same again"
        assert count(answer.ranges) <= wanted
        for other in self.members.values():
            assert not both(other.left, answer.ranges), "it is another worker's"
        me.left = union(me.left, answer.ranges)
        self.positions.begin_use("data", member_id, me.round)
        if returned:
            self.written += self.positions.states("g")
        elif answer.ranges:
            self.written.append(Claim("g", "data", member_id, *answer))

    def give(self, member_id: int, wanted: int, in_time: frozenset[int] = SLICES) -> None:
        """Let ``member_id`` begin its round. What it gives counts if that is open, and not closed without it."""
        me = self.members[member_id]
        if me.said is None and me.round <= self.round:
            self.given[me.round, member_id] = me.give(wanted)
        self.push(member_id, in_time)

    def push(self, member_id: int, in_time: frozenset[int] = SLICES) -> None:
        me = self.members[member_id]
        if me.said is None:
            return
        if self.positions.used("data", self.epoch, member_id, me.round, me.said, self.round):
            self.written.append(Used("g", "data", member_id, me.round, self.epoch, me.said))
        if me.round == self.round and member_id not in self.late.get(self.round, ()):
            given = self.given[me.round, member_id]
            self.given[me.round, member_id] = given._replace(counted=given.counted | in_time)

    def hear(self, member_id: int) -> None:
        """Let ``member_id`` hear that its round is over, if it is."""
        me = self.members[member_id]
        if me.round < self.round and me.said is not None:
            given = self.given.pop((me.round, member_id))
            if given.counted and given.counted != SLICES and not self.keep:
                self.excused.update(*given.samples.values())
            me.hear(given, self.keep)

    # ── what becomes of them ──────────────────────────────────────────────────────────────────────────

    def cut(self, member_id: int) -> None:
        """Close the open round without ``member_id``, unless no other would be left. All may have come meanwhile."""
        late = self.late.setdefault(self.round, set())
        if len(late | {member_id}) < len(self.members):
            late.add(member_id)

    def die(self, member_id: int) -> None:
        if len(self.members) == 1:
            return
        del self.members[member_id]
        self.positions.depart(member_id)
        for number, _ in [key for key in self.given if key[1] == member_id]:
            given = self.given.pop((number, member_id))
            if number == self.round and given.counted:
                self.given[number, ~member_id] = given
            if given.counted and given.counted != SLICES:
                self.excused.update(*given.samples.values())
        self.note_members()

    def come(self, member_id: int) -> None:
        """Let a worker join. It may have the id of one that is gone, and contribute to a round with nothing of that."""
        if member_id not in self.members and (self.round, ~member_id) not in self.given:
            self.members[member_id] = Member(self.round)
            self.late.get(self.round, set()).discard(member_id)
            self.note_members()

    def over(self) -> None:
        """End the round, if all have given everything that it waits for."""
        late = self.late.get(self.round, set()) & self.members.keys()
        awaited = self.members.keys() - late
        there = {one: given for (number, one), given in self.given.items() if number == self.round}
        if any(one not in there or there[one].counted != SLICES for one in awaited):
            return
        given = {one: found for one, found in there.items() if found.counted}
        gone = {~one for one in given if one < 0} - {one for one in given if one >= 0}
        weights = dict.fromkeys({*gone, *(one for one in given if one >= 0)}, 1.0)
        partly = {max(one, ~one) for one, found in given.items() if found.counted != SLICES}
        found = self.positions.commit(self.round, self.members, weights, partly, late)
        for one in given.values():
            for index in one.counted:
                per_slice = self.counted.setdefault(self.epoch, {index: Counter() for index in SLICES})
                per_slice[index] += one.samples[index]
        self.committed += found
        self.written.append(Round("g", 1, RoundRecord(self.round, (1.0,) * 8, 0.0, 0.0, 0), found))
        for member_id in gone:
            self.given.pop((self.round, ~member_id), None)
        self.round += 1

    def restart(self, restated: bool, held: bool) -> None:
        """Make control anew from the records, or a file that restates them.

        What was given to the open round is ``held``, as its results are, or is pushed once more.
        """
        read, books = [decode(*encode(record)) for record in self.written], JournalState()
        for record in read:
            books.apply(Dated(0.0, record))
        if restated:
            read, books = [dated.record for dated in books.records()], JournalState()
            for record in read:
                books.apply(Dated(0.0, record))
        self.positions = books.groups["g"].positions
        self.positions.go_on(self.round)
        for number, one in [key for key in self.given if key[0] == self.round and not held]:
            given = self.given[number, one]._replace(counted=frozenset())
            if one < 0:  # it is gone, with what it gave
                del self.given[number, one]
            else:
                self.given[number, one] = given
        for member_id, me in self.members.items():
            if me.round == self.round:
                self.push(member_id)  # a round that was closed without it stays so

    def do(self, what: tuple[Any, ...]) -> None:
        name, member_id, number, flag = what
        there = member_id in self.members
        match name:
            case "claim" if there:
                self.claim(member_id, number)
            case "give" if there:
                self.give(member_id, number, SLICES if flag else frozenset({0}))
            case "hear" if there:
                self.hear(member_id)
            case "late" if there:
                self.cut(member_id)
            case "die" if there:
                self.die(member_id)
            case "come":
                self.come(member_id)
            case "over":
                self.over()
            case "restart":
                self.restart(flag, number % 2 > 0)
        self.positions.validate()

    def finish(self) -> None:
        """Let all present members use what is left, each as long as it gets something."""
        for _ in range(100):
            use = self.positions.use("data")
            owes = any(any(kept.values()) for me in self.members.values() for kept in me.kept.values())
            if use.finished and use.epoch == self.epoch and not owes:
                return
            for member_id in sorted(self.members):
                while self.members[member_id].round < self.round:
                    self.give(member_id, 0)
                    self.hear(member_id)
                self.claim(member_id, 3)
                self.give(member_id, 5)
            self.over()
            self.positions.validate()
        raise AssertionError("some of it never comes to an end")


names = st.sampled_from(
    ["claim", "claim", "give", "give", "give", "hear", "hear", "over", "over", "late", "late", "die", "come", "restart"]
)
steps = st.tuples(names, st.integers(0, 2), st.integers(0, 9), st.booleans())


@given(st.lists(st.lists(steps, max_size=40), min_size=1, max_size=3), st.integers(1, 3), st.booleans())
@settings(max_examples=examples(200))
def test_each_sample_counts_exactly_once_in_each_epoch_whatever_is_late_lost_or_restarted(
    epochs: list[list[tuple[Any, ...]]], member_ids: int, keep: bool
) -> None:
    model = Model(member_ids, keep)
    for epoch, done in enumerate(epochs):
        model.epoch, model.excused = epoch, set()
        for what in done:
            model.do(what)
        model.finish()
        used = Counter(position for one in model.committed if one.epoch == epoch for position in within(one.ranges))
        assert used == dict.fromkeys(range(ORDER.length), 1), "by the table"
        for counted in model.counted[epoch].values():
            found = {position: counted[position] for position in range(ORDER.length) if position not in model.excused}
            assert found == dict.fromkeys(found, 1), "by the gradients that are in the means"


# ── one thing after the other ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def positions() -> Iterator[Positions]:
    found = Positions()
    found.register("data", Order(10, 17, True), 0, (), "'a' (rank 0)")
    yield found
    found.validate()


def test_what_the_dead_held_goes_first(positions: Positions) -> None:
    use = positions.use("data")
    assert use.claim(0, 1, 0, 4).ranges == ((0, 4),)
    assert use.claim(1, 1, 0, 4).ranges == ((4, 8),)
    positions.used("data", 0, 0, 0, ((1, 3),), 0)
    positions.depart(0)
    assert use.claim(1, 2, 0, 5).ranges == ((0, 1), (3, 4), (8, 10))
    assert use.claim(1, 3, 0, 5).ranges == ()
    assert positions.commit(0, {1}, {1: 1.0}, ()) == ()
    assert use.claim(1, 4, 0, 5).ranges == ((1, 3),)


def test_what_a_dead_worker_gave_in_part_is_used_up_and_marked(positions: Positions) -> None:
    positions.use("data").claim(0, 1, 0, 4)
    positions.used("data", 0, 0, 0, ((0, 2),), 0)
    positions.depart(0)
    assert positions.commit(0, {1}, {0: 0.5}, {0}) == (Committed("data", 0, 0, True, ((0, 2),)),)
    assert positions.use("data").done == ((0, 2),)


@pytest.mark.parametrize("told", ["before", "afterwards"])
def test_what_a_late_member_used_it_holds_until_it_uses_or_returns_it(positions: Positions, told: str) -> None:
    """Test it saying what it used before the round is over, or later."""
    use = positions.use("data")
    use.claim(0, 1, 0, 4)
    if told == "before":
        positions.used("data", 0, 0, 7, ((0, 2),), 7)
    assert positions.commit(7, {0, 1}, {1: 1.0}, (), {0}) == ()
    if told == "afterwards":
        positions.used("data", 0, 0, 7, ((0, 2),), 8)
    assert use.held == {0: ((0, 4),)}
    positions.used("data", 0, 0, 8, ((0, 1),), 8)
    assert positions.commit(8, {0, 1}, {}, ()) == (Committed("data", 0, 0, False, ((0, 1),)),)
    assert use.claim(0, 2, 0, 2, ((1, 3),)).ranges == ((4, 6),), "others go first with what is returned"
    assert use.claim(0, 2, 0, 2, ((3, 4),)).ranges == ((4, 6),), "the same again: that was returned"
    assert use.claim(1, 1, 0, 2).ranges == ((1, 3),)


def test_a_late_member_counts_if_all_that_it_gave_came_while_its_round_was_closed(positions: Positions) -> None:
    positions.use("data").claim(0, 1, 0, 4)
    positions.used("data", 0, 0, 7, ((0, 2),), 7)
    assert positions.commit(7, {0, 1}, {0: 1.0, 1: 1.0}, (), {0}) == (Committed("data", 0, 0, False, ((0, 2),)),)
    positions.used("data", 0, 0, 8, ((2, 4),), 8)
    assert positions.commit(8, {0, 1}, {0: 1.0}, {0}, {0}) == (), "it hears that the rest was late"
    assert positions.use("data").held == {0: ((2, 4),)}


def test_a_member_may_use_samples_in_its_next_round_before_this_one_is_known_to_be_over(positions: Positions) -> None:
    use = positions.use("data")
    use.claim(0, 1, 0, 4)
    positions.used("data", 0, 0, 7, ((0, 2),), 7)
    positions.used("data", 0, 0, 8, ((0, 3),), 7)
    assert use.used == {(8, 0): ((0, 3),)}
    assert use.held == {0: ((3, 4),)}


def test_the_next_holder_of_an_id_has_nothing_of_what_the_last_one_used(positions: Positions) -> None:
    use = positions.use("data")
    use.claim(0, 1, 0, 4)
    positions.used("data", 0, 0, 7, ((0, 2),), 7)
    positions.depart(0)
    assert use.claim(0, 1, 0, 1).ranges == ((2, 3),)
    positions.used("data", 0, 0, 7, ((2, 3),), 7)
    assert use.held == {}
    assert positions.commit(7, {1}, {1: 1.0}, ()) == ()
    assert use.left == ((0, 10),)


def test_a_later_control_waits_for_what_members_have_used_before_it_ends_a_round(positions: Positions) -> None:
    positions.use("data").claim(0, 1, 0, 4)
    again = Positions()
    for record in positions.states("g"):
        again.restore(record)
    again.go_on(7)
    assert again.awaits(7, {0, 1})
    again.used("data", 0, 0, 7, ((0, 2),), 7)
    assert not again.awaits(7, {0, 1})
    assert again.awaits(8, {0, 1})


def test_an_epoch_begins_when_the_one_before_is_used_up(positions: Positions) -> None:
    use = positions.use("data")
    use.claim(0, 1, 0, 10)
    with pytest.raises(OutOfStepError, match="epoch 1 of data 'data' cannot begin: epoch 0 is not used up"):
        use.claim(1, 1, 1, 1)
    positions.used("data", 0, 0, 0, ((0, 10),), 0)
    positions.commit(0, {0}, {}, ())
    assert use.finished
    assert use.claim(1, 1, 1, 3).ranges == ((0, 3),)
    assert use.epoch == 1
    assert use.claim(0, 2, 0, 5).ranges == (), "of an epoch that is over"


def test_no_member_uses_what_is_not_its_own(positions: Positions) -> None:
    positions.use("data").claim(0, 1, 0, 4)
    with pytest.raises(MalformedMessageError, match="says that it used 4 to 4 of data 'data', and does not hold"):
        positions.used("data", 0, 0, 0, ((2, 5),), 0)
    with pytest.raises(MalformedMessageError, match="epoch 3, and 0 is the present one"):
        positions.used("data", 3, 0, 0, ((2, 3),), 0)
    with pytest.raises(MalformedMessageError, match="no member has registered data 'other'"):
        positions.use("other")


def test_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch, positions: Positions) -> None:
    monkeypatch.setattr("gradserver.engine.lease_table._MOST_PIECES", 4)
    use = positions.use("data")
    use.claim(0, 1, 0, 1)
    use.claim(1, 1, 0, 1)
    use.claim(0, 2, 0, 1)
    with pytest.raises(LimitExceededError, match="more than 4 pieces: claim larger ones"):
        use.claim(1, 2, 0, 1)
    assert use.claim(1, 3, 0, 100).ranges == ((3, 10),), "which leaves no more pieces"


def test_members_must_use_the_same_data(positions: Positions) -> None:
    said = (
        "'b' (rank 1) uses data 'data' as 11 samples, in their order, and 'a' (rank 0) as 10 samples, shuffled with "
        "seed 17. All members must give DataRanges the same length, seed and shuffle, or another name="
    )
    with pytest.raises(DisagreementError) as caught:
        positions.register("data", Order(11, 17, False), 0, (), "'b' (rank 1)")
    assert str(caught.value) == said
    for number in range(MAX_DATA - 1):
        positions.register(f"{number}", ORDER, 0, (), "'b'")
    with pytest.raises(LimitExceededError, match=f"uses {MAX_DATA} kinds of data already"):
        positions.register("one more", ORDER, 0, (), "'b'")


def test_members_go_on_from_the_same_place_until_one_has_gone_on() -> None:
    positions, order = Positions(), Order(10, 17, True)
    use = positions.register("data", order, 3, ((0, 2), (5, 6)), "'a' (rank 0)")
    assert positions.register("data", order, 3, ((0, 2), (5, 6)), "'b'") is use
    assert positions.register("data", order, 0, (), "'c', who does not care") is use
    with pytest.raises(DisagreementError, match="'d' goes on with data 'data' in epoch 3, 4 samples used, and 'a'"):
        positions.register("data", order, 3, ((0, 4),), "'d'")
    assert use.claim(0, 1, 3, 4).ranges == ((2, 5), (6, 7))
    assert positions.register("data", order, 0, ((0, 4),), "'e', who comes later") is use


def test_members_go_on_from_the_end_of_an_epoch_when_one_is_at_the_beginning_of_the_next() -> None:
    positions, order = Positions(), Order(10, 17, True)
    use = positions.register("data", order, 3, ((0, 10),), "'a' (rank 0)")
    assert use.claim(0, 1, 3, 0).epoch == 3
    assert use.claim(0, 2, 4, 0).epoch == 4, "it asks if there is anything"
    assert positions.register("data", order, 3, ((0, 10),), "'b' (rank 1)") is use
    assert (use.epoch, use.done) == (4, ())
    with pytest.raises(DisagreementError, match="'c' goes on with data 'data' in epoch 3, 9 samples used, and 'a'"):
        positions.register("data", order, 3, ((0, 9),), "'c'")


def test_what_the_dead_used_in_an_open_round_is_left_by_what_is_written(positions: Positions) -> None:
    use = positions.use("data")
    use.claim(0, 1, 0, 4)
    use.claim(1, 1, 0, 4)
    positions.used("data", 0, 0, 0, ((0, 2),), 0)
    positions.used("data", 0, 1, 0, ((4, 5),), 0)
    positions.depart(0)
    again = Positions()
    again.restore(use.state("g"))
    assert again.use("data").left == ((0, 4), (8, 10))
    assert again.use("data").held == {1: ((4, 8),)}
    again.validate()


# ── rounds that are made again ────────────────────────────────────────────────────────────────────────


def written(positions: Positions, ends: list[tuple[int, tuple[Committed, ...]]]) -> Positions:
    """Return positions as a later control reads them: the first claims, and ends of rounds, one after the other."""
    again = Positions()
    again.register("data", Order(10, 17, True), 0, (), "w0")
    for member_id in range(2):
        number, epoch, ranges = positions.use("data").answers.get(member_id, (1, 0, ((4, 8),)))
        again.restore(Claim("g", "data", member_id, number, epoch, ranges))
    for end in ends:
        again.restore_end(*end)
    return again


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_what_a_round_used_up_is_used_again_when_that_is_made_again(
    positions: Positions, dies: bool, restarts: bool
) -> None:
    """Test that all results of a round were lost with a data shard, and perhaps one of its members too."""
    use = positions.use("data")
    use.claim(0, 1, 0, 4)
    use.claim(1, 1, 0, 4)
    for member_id, ranges in enumerate([((0, 3),), ((4, 8),)]):
        positions.begin_use("data", member_id, 2)
        positions.used("data", 0, member_id, 5, ranges, 5)
    ends = [(5, positions.commit(5, {0, 1}, {0: 1.0, 1: 1.0}, ()))]
    if restarts:
        positions = written(positions, ends)
        positions.go_on(6)
        use = positions.use("data")
    assert use.done == ((0, 3), (4, 8))

    if dies:
        positions.depart(1)
    positions.go_back(5)
    assert not use.done
    assert use.left == ((8, 10),), "if results of it are held after all, what a dead member used has counted"
    assert use.used == {(5, 0): ((0, 3),), (5, ~1 if dies else 1): ((4, 8),)}
    assert positions.awaits(5, {0})
    positions.used("data", 0, 0, 5, ((0, 3),), 5)
    there = {0} if dies else {0, 1}
    if not dies:
        positions.used("data", 0, 1, 5, ((4, 8),), 5)
    assert not positions.awaits(5, there)
    ends.append((5, positions.commit(5, there, dict.fromkeys(there, 1.0), ())))
    assert use.done == (((0, 3),) if dies else ((0, 3), (4, 8)))
    assert use.held == {0: ((3, 4),)}
    positions.validate()

    last = written(positions, ends)
    last.keep_only(there)
    assert last.use("data").done == use.done
    assert last.use("data").left == use.left
    last.validate()


def test_what_others_have_claimed_stays_theirs_when_a_round_is_made_again(positions: Positions) -> None:
    use = positions.use("data")
    for epoch in range(2):
        use.claim(0, 1 + epoch, epoch, 10)
        positions.used("data", epoch, 0, epoch, ((0, 10),), epoch)
        positions.commit(epoch, {0}, {0: 1.0}, ())
    assert use.claim(1, 1, 2, 3).epoch == 2
    positions.depart(1)
    positions.go_back(1)
    assert (use.epoch, use.left, use.held, use.used) == (1, (), {}, {(1, 0): ((0, 10),)})
    positions.validate()
    positions.depart(0)
    assert use.claim(1, 2, 1, 4).ranges == (), "it is not known if that has counted"
    positions.commit(1, {1}, {1: 1.0}, ())
    assert use.claim(1, 3, 1, 4).ranges == ((0, 4),)
    positions.go_back(0)
    assert (use.epoch, use.left, use.used) == (0, (), {(0, ~0): ((0, 10),)})
    positions.commit(0, {1}, {1: 1.0}, ())
    assert use.left == ((0, 10),)
    positions.validate()
