"""Positions: whatever is claimed, used, lost, late or restarted, each one is used up exactly once in an epoch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.data_records import Claim, Committed, Order
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


class Model:
    """Workers that claim, use, come late, die and join, around positions that may be restored at any time."""

    def __init__(self, seed: int, member_ids: int) -> None:
        self.chance = random.Random(seed)
        self.positions = Positions()
        self.written: list[Kind] = [Group("g", 8, 1.0)]
        self.round = self.epoch = 0
        self.present = set(range(member_ids))
        self.numbers: Counter[int] = Counter()
        self.held: dict[int, Ranges] = dict.fromkeys(self.present, ())
        self.carried: dict[int, Ranges] = dict.fromkeys(self.present, ())
        self.said: dict[int, Ranges] = {}
        self.cut: set[int] = set()
        """Workers that the open round was closed without."""
        self.committed: list[Committed] = []
        self.note_members()
        self.positions.register("data", ORDER, 0, (), "w0")
        self.written += self.positions.states("g")

    def note_members(self) -> None:
        self.written.append(
            Epoch("g", 1, self.round, tuple((member_id, f"w{member_id}") for member_id in sorted(self.present)), "")
        )

    def claim(self, member_id: int, wanted: int) -> bool:
        self.numbers[member_id] += 1
        use = self.positions.use("data")
        answer = use.claim(member_id, self.numbers[member_id], self.epoch, wanted)
        assert use.claim(member_id, self.numbers[member_id], self.epoch, wanted) == answer, "the same again"
        assert count(answer.ranges) <= wanted
        for held in self.held.values():
            assert not both(held, answer.ranges), "it is another worker's"
        self.held[member_id] = union(self.held[member_id], answer.ranges)
        if answer.ranges:
            self.written.append(Claim("g", "data", member_id, *answer))
        return bool(answer.ranges)

    def say(self, member_id: int, wanted: int) -> None:
        """Let ``member_id`` name its contribution to the open round: some of what it holds, and what it carries."""
        if member_id in self.cut:
            return  # nothing that it says of this round would count
        if member_id in self.said:
            self.held[member_id] = union(self.held[member_id], self.said[member_id])
        used, self.held[member_id] = lowest(self.held[member_id], wanted)
        self.said[member_id] = union(used, self.carried.pop(member_id, ()))
        self.held[member_id] = minus(self.held[member_id], self.said[member_id])
        self.positions.used("data", self.epoch, member_id, self.round, self.said[member_id], self.round)

    def late(self, member_id: int, keep: bool) -> None:
        self.cut.add(member_id)
        self.positions.not_counted(member_id, self.round, keep)
        self.written += [use.state("g") for use in self.positions.unwritten()]
        said = self.said.pop(member_id, ())
        if keep:  # also if it is late with nothing, behind a round that it was late in already
            self.carried[member_id] = union(self.carried.get(member_id, ()), said)

    def die(self, member_id: int) -> None:
        if len(self.present) > 1 and member_id in self.present:
            self.present.remove(member_id)
            self.positions.depart(member_id)
            self.held.pop(member_id)
            self.carried.pop(member_id, None)
            self.note_members()

    def come(self, member_id: int) -> None:
        if member_id not in self.present and member_id not in self.said:
            self.present.add(member_id)
            self.held[member_id] = ()
            self.numbers[member_id] = 0
            self.note_members()

    def over(self) -> None:
        """End the round. Chance decides whether a dead one counted."""
        weights = {member_id: 1.0 for member_id in self.said if member_id in self.present or self.chance.random() < 0.5}
        partly = {member_id for member_id in weights if member_id not in self.present}
        found = self.positions.commit(self.round, self.present, weights, partly)
        assert all(one.partly == (one.member_id in partly) for one in found)
        for member_id in self.said.keys() & weights.keys():
            assert self.said[member_id] == union(*(one.ranges for one in found if one.member_id == member_id))
        self.committed += found
        self.written.append(Round("g", 1, RoundRecord(self.round, (1.0,) * 8, 0.0, 0.0, 0), found))
        self.said, self.cut = {}, set()
        self.round += 1

    def restart(self, restated: bool) -> None:
        """Make control anew from the records, or a file that restates them. Present members repeat what they said."""
        read, books = [decode(*encode(record)) for record in self.written], JournalState()
        for record in read:
            books.apply(Dated(0.0, record))
        if restated:
            read, books = [dated.record for dated in books.records()], JournalState()
            for record in read:
                books.apply(Dated(0.0, record))
        self.positions = books.groups["g"].positions
        for member_id in list(self.said):
            if member_id in self.present:
                self.positions.used("data", self.epoch, member_id, self.round, self.said[member_id], self.round)
            else:
                del self.said[member_id]

    def do(self, what: tuple[Any, ...]) -> None:
        name, member_id, number, flag = what
        there = member_id in self.present
        match name:
            case "claim" if there:
                self.claim(member_id, number)
            case "say" if there:
                self.say(member_id, number)
            case "late" if there:
                self.late(member_id, flag)
            case "die":
                self.die(member_id)
            case "come":
                self.come(member_id)
            case "over":
                self.over()
            case "restart":
                self.restart(flag)
        self.positions.validate()

    def finish(self) -> None:
        """Let all present members use what is left, each as long as it gets something."""
        for _ in range(100):
            use = self.positions.use("data")
            if use.finished and use.epoch == self.epoch:
                return
            for member_id in sorted(self.present):
                self.claim(member_id, 3)
                self.say(member_id, 5)
            self.over()
            self.positions.validate()
        raise AssertionError("some of it never comes to an end")


names = st.sampled_from(["claim", "claim", "claim", "say", "say", "over", "over", "late", "die", "come", "restart"])
steps = st.tuples(names, st.integers(0, 3), st.integers(0, 9), st.booleans())


@given(st.lists(st.lists(steps, max_size=25), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 2**16))
@settings(max_examples=examples(200))
def test_each_position_is_used_up_exactly_once_in_each_epoch(
    epochs: list[list[tuple[Any, ...]]], member_ids: int, seed: int
) -> None:
    model = Model(seed, member_ids)
    for epoch, done in enumerate(epochs):
        model.epoch = epoch
        for what in done:
            model.do(what)
        model.finish()
        used = Counter(position for one in model.committed if one.epoch == epoch for position in within(one.ranges))
        assert used == dict.fromkeys(range(ORDER.length), 1)


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


@pytest.mark.parametrize("told", ["before", "meanwhile", "afterwards"])
@pytest.mark.parametrize("keep", [True, False])
def test_a_late_member_keeps_it_or_gives_it_back(positions: Positions, keep: bool, told: str) -> None:
    """Test it saying what it used before the round closes without it, or before it is over, or later."""
    use = positions.use("data")
    use.claim(0, 1, 0, 4)
    if told == "before":
        positions.used("data", 0, 0, 7, ((0, 2),), 7)
    positions.not_counted(0, 7, keep)
    if told == "meanwhile":
        positions.used("data", 0, 0, 7, ((0, 2),), 7)
    assert positions.commit(7, {0, 1}, {1: 1.0}, ()) == ()
    if told == "afterwards":
        positions.used("data", 0, 0, 7, ((0, 2),), 8)
    assert use.claim(1, 1, 0, 2).ranges == (((4, 6),) if keep else ((0, 2),))
    if keep:
        positions.used("data", 0, 0, 8, ((0, 4),), 8)
        assert positions.commit(8, {0, 1}, {}, ()) == (Committed("data", 0, 0, False, ((0, 4),)),)


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
