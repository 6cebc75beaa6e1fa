"""Shares of a batch, and cadence: the rules for unequal workers, with the numbers that are known for them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

import gradserver
from gradserver import Cadence, InvalidArgumentError, InvalidRankError, InvalidWorldSizeError, ThroughputTracker

throughput = st.floats(0, 1e12, allow_subnormal=False)


# ── shares ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ratios", "batch", "sizes"),
    [
        ([0.7, 0.3], 10, (7, 3)),
        ([0.5, 0.3, 0.2], 10, (5, 3, 2)),
        ([0.25, 0.75], 10, (3, 7)),  # 2.5 is rounded away from zero
        ([0.95, 0.05], 2, (1, 1)),  # the last rank gets one, too
        ([0.05, 0.95], 4, (1, 3)),  # and so does the first
        ([0.9, 0.05, 0.05], 3, (1, 1, 1)),
        ([1.0], 7, (7,)),
    ],
)
def test_a_batch_is_cut_by_ratios(ratios: list[float], batch: int, sizes: tuple[int, ...]) -> None:
    assert gradserver.shard_sizes(ratios, batch) == sizes


@given(st.lists(throughput, min_size=1, max_size=40), st.integers(0, 10_000))
def test_each_rank_gets_a_sample_and_together_they_get_the_batch(throughputs: list[float], more: int) -> None:
    batch = len(throughputs) + more

    sizes = gradserver.shard_sizes(gradserver.shard_ratios(throughputs), batch)

    assert sum(sizes) == batch
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("throughputs", "ratios"),
    [
        ([30, 10], (0.75, 0.25)),
        ([100, 1], (0.95, 0.05)),
        ([0, 0, 0], (1 / 3, 1 / 3, 1 / 3)),
        ([5, 0], (0.95, 0.05)),  # not measured, or infinitely slow
        ([8, 8, 0.1, 0.1], (0.45, 0.45, 0.05, 0.05)),
        ([4], (1.0,)),
    ],
)
def test_ratios_follow_throughput_but_are_at_least_a_twentieth(
    throughputs: list[float], ratios: tuple[float, ...]
) -> None:
    assert gradserver.shard_ratios(throughputs) == pytest.approx(ratios)


def test_with_more_than_twenty_ranks_all_are_below_the_least_ratio_and_get_equal_shares() -> None:
    assert gradserver.shard_ratios([1.0] * 10 + [2.0] * 30) == pytest.approx((1 / 40,) * 40)


@given(st.lists(throughput, min_size=1, max_size=40))
def test_ratios_add_up_to_one_in_the_order_of_throughputs(throughputs: list[float]) -> None:
    ratios = gradserver.shard_ratios(throughputs)

    assert math.fsum(ratios) == pytest.approx(1)
    assert min(ratios) > 0
    by_throughput = sorted(zip(throughputs, ratios, strict=True))
    assert all(low[1] <= high[1] + 1e-12 for low, high in pairwise(by_throughput))


def test_a_speed_hint_gives_the_first_shares() -> None:
    assert ThroughputTracker(2, speed_hint=(1, 3.0)).ratios == pytest.approx((0.75, 0.25))
    assert ThroughputTracker(3, speed_hint=(0, 2.0)).ratios == pytest.approx((0.2, 0.4, 0.4))
    assert ThroughputTracker(1, speed_hint=(0, 9.0)).ratios == (1.0,)
    assert sum(ThroughputTracker(4, speed_hint=(2, 1e308)).ratios) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: gradserver.shard_sizes([0.5, 0.5], 1), InvalidArgumentError, "1 samples is too small for 2 workers"),
        (lambda: gradserver.shard_sizes([1.5, -0.5], 8), InvalidArgumentError, "rank 0 has 1.5"),
        (lambda: gradserver.shard_sizes([], 8), InvalidWorldSizeError, "at least 1"),
        (lambda: gradserver.shard_sizes([0.5, 0.5], 8.5), InvalidArgumentError, "must be an integer, not 8.5"),  # type: ignore[arg-type]
        (lambda: gradserver.LocalCluster(2, audit=2.0), InvalidArgumentError, "SHARE.*; not '2.0'"),
        (lambda: gradserver.shard_ratios([1, math.nan]), InvalidArgumentError, "rank 1 has nan"),
        (lambda: gradserver.shard_ratios([]), InvalidWorldSizeError, "at least 1"),
        (lambda: ThroughputTracker(2, speed_hint=(2, 2.0)), InvalidRankError, "names rank 2"),
        (lambda: ThroughputTracker(2, speed_hint=(-1, 2.0)), InvalidRankError, "names rank -1"),
        (lambda: ThroughputTracker(2, speed_hint=(0, 0.5)), InvalidArgumentError, "at least 1, not 0.5"),
        (lambda: ThroughputTracker(2, speed_hint=(0, math.inf)), InvalidArgumentError, "not inf"),
        (lambda: ThroughputTracker(2, speed_hint=3.0), InvalidArgumentError, r"speed_hint is \(slow_rank, ratio\), as"),  # type: ignore[arg-type]
        (lambda: ThroughputTracker(2, speed_hint=(1, "3")), InvalidArgumentError, "at least 1, not '3'"),  # type: ignore[arg-type]
        (lambda: ThroughputTracker(2, speed_hint=(0.5, 2)), InvalidArgumentError, "the slow rank of speed_hint must"),  # type: ignore[arg-type]
        (lambda: ThroughputTracker(2, calibration_steps=2.5), InvalidArgumentError, "must be an integer, not 2.5"),  # type: ignore[arg-type]
        (lambda: ThroughputTracker("2"), InvalidWorldSizeError, "the world size must be an integer, not '2'"),  # type: ignore[arg-type]
        (lambda: gradserver.CadenceOptions(speed_hint=2.0), InvalidArgumentError, "speed_hint is"),  # type: ignore[arg-type]
        (lambda: gradserver.CadenceOptions(anchor="10"), InvalidArgumentError, "anchor must be an integer, not '10'"),  # type: ignore[arg-type]
        (lambda: gradserver.CadenceOptions(max_total=0), InvalidArgumentError, "max_total must be at least 1"),
        (lambda: gradserver.CadenceOptions(overhead_target="5%"), InvalidArgumentError, "such as 0.1, not '5%'"),  # type: ignore[arg-type]
        (lambda: ThroughputTracker(2, rebalance_interval=0), InvalidArgumentError, "rebalance_interval"),
        (lambda: ThroughputTracker(2).record([1], [1.0, 1.0]), InvalidArgumentError, "not 1"),
        (lambda: ThroughputTracker(2).record([1, 1], [1.0, -1.0]), InvalidArgumentError, "rank 1"),
        (lambda: Cadence(1), InvalidWorldSizeError, "at least 2 ranks"),
        (lambda: Cadence(2, anchor=0), InvalidArgumentError, "anchor must be at least 1"),
        (lambda: Cadence(2, max_anchor=5), InvalidArgumentError, "at least the anchor of 10"),
        (lambda: Cadence(2, speed_hint=(5, 2.0)), InvalidRankError, "names rank 5"),
        (lambda: Cadence(2).record([1.0], 1.0), InvalidArgumentError, "not 1"),
        (lambda: Cadence(2).record([1.0, math.inf], 1.0), InvalidArgumentError, "rank 1"),
        (lambda: Cadence(2).record([1.0, 1.0], -1.0), InvalidArgumentError, "sync_milliseconds"),
        (lambda: Cadence(2).nudge(math.nan), InvalidArgumentError, "NaN"),
        (lambda: Cadence(3).clamped_total(2), InvalidArgumentError, "2 batches"),
    ],
)
def test_what_is_impossible_is_an_error_that_says_why(make: object, error: type[Exception], said: str) -> None:
    assert callable(make)
    with pytest.raises(error, match=said):
        make()


def test_shares_are_new_after_calibration_and_then_every_fifty_steps() -> None:
    tracker = ThroughputTracker(2)

    new = [step for step in range(1, 121) if tracker.record([5, 5], [10.0, 30.0])]

    assert new == [10, 60, 110]
    assert tracker.ratios == pytest.approx((0.75, 0.25))
    assert tracker.sizes(8) == (6, 2)
    assert not tracker.is_balanced


def test_the_first_measurement_counts_as_it_is_and_later_ones_by_three_tenths() -> None:
    tracker = ThroughputTracker(2)
    assert tracker.is_balanced

    tracker.record([10, 10], [10.0, 20.0])
    tracker.record([10, 0], [5.0, 1.0])  # a rank without samples keeps its average
    tracker.record([0, 10], [1.0, 0.0])  # and so does one without a time

    assert tracker.throughputs == pytest.approx([0.3 * 2 + 0.7 * 1, 0.5])


def test_shares_stay_as_they_are_while_nothing_was_measured() -> None:
    tracker = ThroughputTracker(2, calibration_steps=1, rebalance_interval=1, speed_hint=(0, 4.0))

    assert not tracker.record([0, 0], [0.0, 0.0])
    assert tracker.ratios == pytest.approx((0.2, 0.8))


# ── cadence ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("milliseconds", "sync", "target", "anchor", "counts"),
    [
        ([500, 1000], 10, 0.5, 10, (20, 10)),
        ([333, 500, 1000], 10, 0.5, 10, (30, 20, 10)),
        ([500, 1000], 400, 0.10, 40, (80, 40)),
    ],
)
def test_counts_follow_the_times(
    milliseconds: list[float], sync: float, target: float, anchor: int, counts: tuple[int, ...]
) -> None:
    """The times are those of ten batches, and those of the exchange are a part of the slowest rank's."""
    cadence = Cadence(len(counts), overhead_target=target)

    cadence.record(milliseconds, sync)

    assert (cadence.anchor, cadence.counts, cadence.calibrated) == (anchor, counts, True)


def test_the_anchor_grows_to_its_most_and_shrinks_by_one_to_its_first() -> None:
    cadence = Cadence(2, max_anchor=50)

    cadence.record([100, 100], 1e9)
    assert cadence.anchor == 50

    anchors = []
    for _ in range(45):
        cadence.record([100, 100], 0)
        anchors.append(cadence.anchor)
    assert anchors[:3] == [49, 48, 47]
    assert anchors[-5:] == [10] * 5


def test_the_anchor_stays_between_half_the_target_and_the_target() -> None:
    cadence = Cadence(2)
    cadence.record([100, 100], 20)
    assert cadence.anchor == 20

    cadence.record([200, 200], 15)  # 7.5 % of the time, and the target is 10 %

    assert cadence.anchor == 20


@pytest.mark.parametrize(("given", "held"), [(0.0, 0.01), (0.9, 0.50), (0.2, 0.2)])
def test_the_target_is_clamped(given: float, held: float) -> None:
    assert Cadence(2, overhead_target=given).overhead_target == held


def test_times_move_faster_the_farther_a_measurement_is_off() -> None:
    cadence = Cadence(2, overhead_target=0.5)
    cadence.record([1000, 1000], 0)  # 100 ms a batch

    cadence.record([1010, 3000], 0)  # 1 % off, and 200 % off

    assert cadence.milliseconds == pytest.approx([0.1 * 101 + 0.9 * 100, 0.8 * 300 + 0.2 * 100])


def test_a_count_changes_only_by_more_than_a_tenth_once_calibrated() -> None:
    cadence = Cadence(2, overhead_target=0.5)
    cadence.record([500, 1000], 0)
    assert cadence.counts == (20, 10)

    cadence.record([20 * 46, 1000], 0)  # 50 ms move to 49.6, for which 20 is still the count
    assert cadence.counts == (20, 10)
    cadence.record([20 * 25, 1000], 0)  # 0.5 off: 37.3 ms, for which 27 is
    assert cadence.counts == (27, 10)


def test_a_count_changes_by_at_most_the_difference_that_is_allowed() -> None:
    cadence = Cadence(2, overhead_target=0.5, max_batch_diff=3)
    cadence.record([500, 1000], 0)

    cadence.record([20 * 25, 1000], 0)

    assert cadence.counts == (23, 10)


def test_a_rank_without_a_batch_keeps_its_time() -> None:
    cadence = Cadence(2, overhead_target=0.5)
    cadence.record([1000, 0], 0, batches=[10, 0])
    assert not cadence.calibrated
    assert cadence.counts == (10, 10)

    cadence.record([1000, 500], 0, batches=[10, 10])

    assert cadence.milliseconds == pytest.approx([100, 50])
    assert cadence.counts == (10, 20)


def test_a_hint_sets_the_counts_until_times_are_known() -> None:
    cadence = Cadence(3, overhead_target=0.5, speed_hint=(1, 2.5))
    assert cadence.counts == (25, 10, 25)

    cadence.record([2500, 1000, 2500], 0)

    assert cadence.counts == (10, 10, 10)


@pytest.mark.parametrize(
    ("anchor", "factor", "nudged"), [(10, 0.5, 5), (10, 0.55, 6), (10, 0.01, 1), (1, 0.1, 1), (10, 3.0, 10)]
)
def test_a_nudge_makes_exchanges_more_frequent_and_never_rarer(anchor: int, factor: float, nudged: int) -> None:
    cadence = Cadence(2, anchor=anchor)

    cadence.nudge(factor)

    assert (cadence.anchor, cadence.counts) == (nudged, (nudged, nudged))


def test_a_nudge_keeps_the_proportions() -> None:
    cadence = Cadence(2, overhead_target=0.5)
    cadence.record([500, 1000], 0)

    cadence.nudge(0.5)

    assert cadence.counts == (10, 5)


@pytest.mark.parametrize(
    ("hint", "total", "counts"),
    [
        ((1, 2.0), 30, (20, 10)),
        ((1, 2.0), 100, (20, 10)),
        ((1, 2.0), 10, (7, 3)),  # 6.67 and 3.33 rounded down, and the first gets the rest
        ((1, 200.0), 3, (2, 1)),
        ((1, 200.0), 2, (1, 1)),
    ],
)
def test_counts_are_scaled_down_to_a_total(hint: tuple[int, float], total: int, counts: tuple[int, ...]) -> None:
    assert Cadence(2, max_anchor=4000, speed_hint=hint).clamped_total(total) == counts


@given(
    st.integers(2, 8).flatmap(
        lambda world: st.tuples(
            st.lists(
                st.tuples(st.lists(st.floats(0, 1e7), min_size=world, max_size=world), st.floats(0, 1e9)),
                min_size=1,
                max_size=20,
            ),
            st.integers(world, 10_000),
        )
    )
)
def test_counts_are_at_least_one_and_the_anchor_stays_in_its_bounds(
    course: tuple[list[tuple[list[float], float]], int],
) -> None:
    records, total = course
    cadence = Cadence(len(records[0][0]))

    for wall, sync in records:
        cadence.record(wall, sync)

    assert 10 <= cadence.anchor <= 200
    assert min(cadence.counts) >= 1
    clamped = cadence.clamped_total(total)
    assert min(clamped) >= 1
    assert sum(clamped) == min(total, sum(cadence.counts))
