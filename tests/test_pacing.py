"""Rules for unequal workers in groups with members that come, go and are late: all decide the same, by equal tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver import CadenceOptions, InvalidArgumentError, InvalidRankError, shard_sizes
from gradserver.worker.pacing.shares import BalanceRule, CadenceRule, Rule
from gradserver.worker.pacing.stopwatch import DeviceClock, WallClock
from gradserver.worker.pacing.table import Decided, Measured, Table, numel_of

PLACES = 5
BATCH = 64


def table() -> Table:
    return Table(np.zeros(numel_of(PLACES)))


def cadence(member_ids: Sequence[int], **options: Any) -> CadenceRule:
    return CadenceRule(CadenceOptions(**options), member_ids)


def balance(member_ids: Sequence[int]) -> BalanceRule:
    return BalanceRule(member_ids, 3, 4, None)


def decided(rule: CadenceRule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return rule.member_ids, rule.counts


def measured(times: dict[int, Measured], *rules: Rule) -> Table:
    """Return the table of a round of members with these times and rules."""
    found = table()
    for rule in rules:
        rule.write(found)
    for member_id, one in times.items():
        found.measure(member_id, one)
    return found


# ── a group ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Group:
    """A group as the engine makes it: the largest of each number over the tables that counted."""

    make: Any
    rules: dict[int, Rule] = field(default_factory=dict)
    newcomers: set[int] = field(default_factory=set)

    def begin(self, member_ids: Sequence[int]) -> None:
        self.rules = {one: self.make(tuple(member_ids)) for one in member_ids}

    def round(self, times: dict[int, tuple[float, float]], late: set[int], leaves: set[int]) -> None:
        """Exchange: members that ``leave`` contribute, those that are ``late`` do not, and all that stay hear it."""
        memory = np.zeros(numel_of(PLACES))
        for member_id, rule in self.rules.items():
            own = np.zeros(numel_of(PLACES))
            if member_id not in self.newcomers:
                rule.write(Table(own))
            milliseconds, sync = times.get(member_id, (1.0, 0.0))
            Table(own).measure(member_id, Measured(milliseconds, 2, 10, sync))
            if member_id not in late:
                memory = np.maximum(memory, own)
        self.rules = {one: rule for one, rule in self.rules.items() if one not in leaves}
        for rule in self.rules.values():
            rule.advance(Table(memory), sorted(self.rules), self.newcomers)
        self.newcomers = set()

    def join(self, member_id: int) -> None:
        """Let a worker in. It believes what it can: that all have begun now."""
        self.rules[member_id] = self.make(tuple(sorted({*self.rules, member_id})))
        self.rules = dict(sorted(self.rules.items()))
        self.newcomers.add(member_id)


moments = st.tuples(st.floats(0.01, 1e5), st.floats(0, 1e5))
rounds = st.tuples(
    st.dictionaries(st.integers(0, PLACES - 1), moments),
    st.sets(st.integers(0, PLACES - 1), max_size=2),
    st.sets(st.integers(0, PLACES - 1), max_size=2),
    st.lists(st.integers(0, PLACES - 1), max_size=2),
)


@pytest.mark.parametrize("make", [cadence, balance])
@settings(deadline=None)
@given(st.lists(rounds, min_size=1, max_size=12))
def test_all_members_decide_the_same_whoever_comes_goes_or_is_late(make: Any, course: list[Any]) -> None:
    group = Group(make)
    group.begin(range(3))

    for times, late, leaves, joiners in course:
        there = set(group.rules)
        late &= there - group.newcomers
        if late | group.newcomers == there:  # a member that knows must be heard
            late = set()
        if not leaves & there < there - group.newcomers:
            leaves = set()
        for member_id in joiners:
            if member_id not in group.rules and group.rules:
                group.join(member_id)
        group.round(times, late - group.newcomers, leaves)
        check(list(group.rules.values()))


def check(rules: list[Any]) -> None:
    """Check that rules decide the same, and something possible."""
    first = rules[0]
    if isinstance(first, CadenceRule):
        assert {(rule.member_ids, rule.counts) for rule in rules} == {(first.member_ids, first.counts)}
        assert min(first.counts) >= 1
    else:
        assert {(rule.member_ids, rule.ratios) for rule in rules} == {(first.member_ids, first.ratios)}
        sizes = shard_sizes(first.ratios, BATCH)
        assert sum(sizes) == BATCH
        assert min(sizes) >= 1
    assert len(first.member_ids) == len(rules)


# ── a cadence ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_member_that_is_lost_takes_only_its_own_time_with_it() -> None:
    rule = cadence([0, 1, 2])
    rule.advance(measured({0: Measured(1000, 10), 1: Measured(500, 10), 2: Measured(2000, 10)}, rule), [0, 1, 2])
    assert decided(rule)[1] == (20, 40, 10)

    rule.advance(measured({1: Measured(2000, 40), 2: Measured(2000, 10)}, rule), [1, 2])

    assert decided(rule) == ((1, 2), (40, 10))
    assert rule.speed(1) == pytest.approx(20)
    assert rule.speed(0) == 0


def test_a_member_that_has_come_is_calibrated_by_its_first_round() -> None:
    rule = cadence([0, 1], max_batch_diff=1)
    rule.advance(measured({0: Measured(500, 10), 1: Measured(1000, 10)}, rule), [0, 1])
    assert decided(rule)[1] == (20, 10)

    rule.advance(measured({0: Measured(1000, 20), 1: Measured(1000, 10), 3: Measured(250, 10)}, rule), [0, 1, 3], {3})

    assert decided(rule) == ((0, 1, 3), (20, 10, 40))


def test_until_a_member_that_has_come_is_measured_it_has_the_anchor_and_others_keep_their_counts() -> None:
    rule = cadence([0, 1])
    rule.advance(measured({0: Measured(500, 10), 1: Measured(1000, 10)}, rule), [0, 1])

    rule.advance(measured({0: Measured(1000, 20), 1: Measured(1000, 10)}, rule), [0, 1, 2])

    assert decided(rule)[1] == (20, 10, 10)


def test_another_worker_with_the_id_of_a_lost_one_is_measured_anew() -> None:
    rule = cadence([0, 1])
    rule.advance(measured({0: Measured(500, 10), 1: Measured(1000, 10)}, rule), [0, 1])

    rule.advance(measured({0: Measured(1000, 20)}, rule), [0, 1], {1})

    assert rule.speed(1) == 0


def test_a_single_member_exchanges_each_batch_and_keeps_its_time_for_the_next_member() -> None:
    rule = cadence([0, 1])
    rule.advance(measured({0: Measured(500, 10), 1: Measured(1000, 10)}, rule), [0, 1])

    rule.advance(measured({0: Measured(1000, 20)}, rule), [0])
    assert rule.count(0) == 1
    rule.advance(measured({0: Measured(50, 1), 1: Measured(1000, 10)}, rule), [0, 1], {1})

    assert decided(rule)[1] == (20, 10)


def test_the_time_of_an_exchange_is_that_of_the_member_that_the_others_have_waited_for() -> None:
    rule = cadence([0, 1], overhead_target=0.10)

    rule.advance(measured({0: Measured(500, 10, 0, 900), 1: Measured(1000, 10, 0, 400)}, rule), [0, 1])

    assert decided(rule)[1] == (80, 40)


def test_a_largest_total_scales_counts_down_and_leaves_what_is_known_as_it_is() -> None:
    rule = cadence([0, 1], anchor=2, max_total=4)

    rule.advance(measured({0: Measured(100, 2), 1: Measured(300, 2)}, rule), [0, 1])
    assert decided(rule) == ((0, 1), (3, 1))
    rule.advance(measured({0: Measured(150, 3), 1: Measured(150, 1)}, rule), [0, 1])
    assert rule.speed(1) == pytest.approx(1e3 / 150)

    assert cadence(range(5), max_total=2).counts == (1,) * 5


def test_a_nudge_holds_for_all_that_have_called_it() -> None:
    one, other = cadence([0, 1]), cadence([0, 1])
    for rule in (one, other):
        rule.advance(measured({0: Measured(500, 10), 1: Measured(1000, 10)}, one), [0, 1])

    for rule in (one, other):
        rule.nudge(0.5)
        assert rule.counts == (10, 5)
    found = measured({0: Measured(500, 10), 1: Measured(500, 5)}, one, other)
    for rule in (one, other):
        rule.advance(found, [0, 1])

    assert decided(one) == decided(other)


def test_options_are_checked_and_an_anchor_of_0_turns_the_cadence_off() -> None:
    assert not CadenceOptions(max_anchor=0).is_on
    assert not CadenceOptions(max_anchor=0, anchor=30).is_on
    with pytest.raises(InvalidArgumentError, match="at least the anchor of 10"):
        CadenceOptions(max_anchor=5)
    with pytest.raises(InvalidArgumentError, match="max_total"):
        CadenceOptions(max_total=0)
    with pytest.raises(InvalidRankError, match="names rank 2"):
        cadence([0, 1], speed_hint=(2, 3.0))
    assert cadence([0, 1], speed_hint=(1, 3.0)).counts == (30, 10)


# ── a balance ─────────────────────────────────────────────────────────────────────────────────────────


def test_shares_follow_at_once_when_a_member_is_lost_and_calibration_begins_again_when_one_comes() -> None:
    rule = balance([0, 1, 2])
    times = {0: Measured(10, 1, 30), 1: Measured(10, 1, 20), 2: Measured(10, 1, 10)}
    for _ in range(3):
        rule.advance(measured(times, rule), [0, 1, 2])
    assert rule.ratios == pytest.approx((3 / 6, 2 / 6, 1 / 6))

    rule.advance(measured({1: times[1], 2: times[2]}, rule), [1, 2])
    assert rule.ratios == pytest.approx((2 / 3, 1 / 3))

    rule.advance(measured({1: times[1], 2: times[2], 4: Measured(10, 1, 60)}, rule), [1, 2, 4], {4})
    assert rule.ratios == pytest.approx((20 / 45, 10 / 45, 15 / 45))  # as fast as the others are on average
    for _ in range(2):
        rule.advance(measured({1: times[1], 2: times[2], 4: Measured(10, 1, 60)}, rule), [1, 2, 4])
    assert rule.ratios == pytest.approx((2 / 9, 1 / 9, 6 / 9))


# ── tables and stopwatches ────────────────────────────────────────────────────────────────────────────


def test_a_member_without_a_row_says_nothing_and_hears_nothing() -> None:
    found = table()

    found.measure(PLACES, Measured(1.0))
    found.decide(PLACES, Decided(1.0, 1.0))

    assert found.measured(PLACES) == Measured()
    assert found.decided(PLACES) == Decided()
    assert list(found.known()) == []


def test_a_clock_measures_computation_without_what_was_spent_in_exchanges() -> None:
    now, waited = [0.0], [0.0]
    watch = WallClock(lambda: waited[0], lambda: now[0])
    assert watch.read() == (0.0, 0.0, 0.0, 0.0)

    watch.begin()
    now[0], waited[0] = 3.0, 0.5
    watch.begin()  # of the second batch
    now[0] = 4.0
    watch.computed(2, 16)
    now[0], waited[0] = 4.25, 0.75
    assert watch.read() == (3500.0, 2, 16, 0.0)
    watch.arrived()
    now[0] = 9.0
    watch.begin()  # the optimizer has stepped in between
    now[0] = 10.0
    watch.computed(1, 8)

    assert watch.read() == (1000.0, 1, 8, 250.0)
    assert watch.read()[:3] == (0.0, 0.0, 0.0)


def test_what_comes_in_a_pause_is_not_measured() -> None:
    now, waited = [0.0], [0.0]
    device = Device(at=100.0)
    clocks = WallClock(lambda: waited[0], lambda: now[0]), DeviceClock(Any, lambda: Event(device))  # type: ignore[arg-type]

    def passes(milliseconds: float) -> None:
        now[0] += milliseconds / 1e3
        device.queued += milliseconds - 1.0  # an event takes one

    for given_up in (True, False):
        for watch in clocks:
            watch.begin()
        passes(3.0)
        for watch in clocks:
            watch.pause()
            watch.pause()
            if given_up:
                watch.cancel()
        passes(20.0)
    for watch in clocks:
        watch.begin()
    passes(5.0)
    for watch in clocks:
        watch.computed(1, 8)
        watch.arrived()

    for watch in clocks:
        milliseconds, batches, count, _ = watch.read()
        assert milliseconds == pytest.approx(8.0)
        assert (batches, count) == (1, 8)


def test_a_batch_that_was_given_up_is_not_measured() -> None:
    watch = WallClock(lambda: 0.0)

    watch.begin()
    watch.cancel()
    watch.computed(1, 8)

    assert watch.read()[:3] == (0.0, 0.0, 0.0)


class Event:
    """An event on a device that has passed the moments before ``device.at``."""

    def __init__(self, device: Device) -> None:
        device.queued += 1.0
        self.moment, self._device = device.queued, device

    def query(self) -> bool:
        return self._device.at >= self.moment

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "a time of the future"
        return later.moment - self.moment


@dataclass
class Device:
    """A device on which a moment is a millisecond."""

    queued: float = 0.0
    at: float = 0.0


def test_a_device_is_read_when_it_has_passed_a_moment_and_never_waited_for() -> None:
    device = Device()
    watch = DeviceClock(Any, lambda: Event(device))  # type: ignore[arg-type]  # events come from here
    for count in (1, 2):
        watch.begin()
        device.queued += 4.0
        watch.computed(count, 8.0 * count)
        device.queued += 1.0
        watch.arrived()
    assert watch.read() == (0.0, 0.0, 0.0, 0.0)

    device.at = 8.0
    assert watch.read() == (5.0, 1.0, 8.0, 2.0)
    device.at = 100.0
    assert watch.read() == (5.0, 2.0, 16.0, 2.0)
    assert watch.read()[:3] == (0.0, 0.0, 0.0)
