"""Verdicts about members that are off: each kind of fault is named soon, and no healthy training ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.comparison import compare
from gradserver.engine.commands import Measures, Memory
from gradserver.engine.control.noise import Noise
from gradserver.engine.control.outliers import Outliers, Verdict
from gradserver.engine.figures import Figures, OfBucket, OfMember, Tally, figures_of, pack_figures, unpack_figures
from gradserver.mean import Array
from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.limits import MAX_WEIGHT

MORE = 4
"""Members of a group with rounds that do not wait for all."""
ROUNDS = 400
"""Rounds of a healthy training."""


def figures(rows: list[Array], weights: list[float] | None = None) -> Figures:
    """Compare ``rows`` as the reducer does."""
    weights = weights or [1.0] * len(rows)
    mean = np.average(rows, axis=0, weights=weights).astype(np.float32)
    measures = Measures(1, 0, 1 << 20, Memory(), [])
    values = [row.astype(np.float32) for row in rows]
    with np.errstate(all="ignore"):
        of_mean = float(mean.astype(np.float64) @ mean.astype(np.float64))
        compare(measures, list(enumerate(weights)), values, mean, of_mean, True, False)
    tally = Tally()
    tally.expect(mean.size)
    tally.add(measures.found)
    return figures_of({0: tally})


class Watched:
    """A group with rounds that are judged."""

    def __init__(self) -> None:
        self.outliers = Outliers()
        self.named: list[tuple[int, Verdict]] = []
        self.cleared: list[int] = []
        self.round = 0

    def take(
        self, rows: list[Array], weights: list[float] | None = None, section: int = 0, there: list[int] | None = None
    ) -> None:
        """Judge one more round; of the members that are ``there`` if that is said, of which more are present."""
        found, present = figures(rows, weights), 2 if there is None else MORE
        members = [one._replace(member_id=(there or [*range(len(rows))])[one.member_id]) for one in found.members]
        judged = self.outliers.take(members, dict(enumerate(weights or [1.0] * len(rows))), section, present)
        self.round += 1
        self.named += [(self.round, one) for one in judged.new]
        self.cleared += judged.cleared


WEIGHTS = st.floats(5e-324, MAX_WEIGHT)
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=64)


@given(st.lists(st.tuples(WEIGHTS, VALUES), min_size=2, max_size=5), st.booleans())
def test_no_weight_and_no_value_ends_in_an_error(given_: list[tuple[float, float]], is_double: bool) -> None:
    outliers, weights = Outliers(), [weight for weight, _ in given_]
    with np.errstate(all="ignore"):
        rows = [np.full(5, value).astype(np.float64 if is_double else np.float32) for _, value in given_]
        mean = np.average([row.astype(np.float64) for row in rows], axis=0, weights=weights).astype(rows[0].dtype)
        measures = Measures(1, 0, 1 << 20, Memory(), [])
        of, squares = list(enumerate(weights)), float(np.dot(mean, mean))
        compare(measures, of, rows, mean, squares, True, False, dtype=dtype_of("float64" if is_double else "float32"))
    tally = Tally()
    tally.expect(5)
    tally.add(measures.found)
    found = figures_of({0: tally})
    assert all(map(math.isfinite, (value for row in (*found.members, *found.buckets) for value in row)))
    assert unpack_figures(pack_figures(found)) == found
    outliers.take(found.members, dict(enumerate(weights)))


def test_a_weight_next_to_nothing_is_no_error() -> None:
    """Test weights of which the ratio is no number of float64."""
    members = [OfMember(member_id, 1.0, 1.0, 1.0) for member_id in range(3)]
    Outliers().take(members, {0: 32.0, 1: 32.0, 2: 5e-324})


def batches(random: np.random.Generator, workers: int, numel: int, noise: float) -> list[Array]:
    """Make the gradients of a round, with ``noise`` over signal."""
    return [1.0 + noise * random.normal(size=numel) for _ in range(workers)]


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("begins", [0, 40])
def test_a_worker_scaled_by_minus_ten_is_named_within_five_rounds(workers: int, begins: int) -> None:
    random, watched = np.random.default_rng(workers), Watched()
    for number in range(begins + 6):
        rows = batches(random, workers, 1000, 3.0)
        if number >= begins:
            rows[1] *= -10
        watched.take(rows)
    is_told = workers > 2 or begins > 0  # of two workers without a history, either may be wrong
    assert {one.member_id for _, one in watched.named} == ({1} if is_told else {0, 1})
    number, verdict = next(one for one in watched.named if one[1].member_id == 1)
    assert begins < number <= begins + 5
    assert verdict.either != is_told
    assert 5 < verdict.ratio < 20
    assert "times the median" in str(verdict)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("begins", [0, 40])
def test_a_flipped_exponent_bit_in_one_element_a_round_is_named(workers: int, begins: int) -> None:
    random, watched = np.random.default_rng(workers), Watched()
    for number in range(begins + 6):
        rows = [row.astype(np.float32) * 1e-3 for row in batches(random, workers, 5000, 3.0)]
        if number >= begins:
            bits = rows[0].view(np.uint32)
            bits[random.integers(5000)] ^= 1 << 30
        watched.take(rows)
    is_told = workers > 2 or begins > 0
    assert {one.member_id for _, one in watched.named} == ({0} if is_told else {0, 1})
    assert watched.named[0][0] <= begins + 5


def test_a_bit_that_flips_now_and_then_is_named_after_some_rounds() -> None:
    random, watched = np.random.default_rng(7), Watched()
    for number in range(64):
        rows = [row.astype(np.float32) * 1e-3 for row in batches(random, 4, 5000, 3.0)]
        if number % 8 == 0:
            rows[3].view(np.uint32)[number] ^= 1 << 30
        watched.take(rows)
    assert {one.member_id for _, one in watched.named} == {3}


@pytest.mark.parametrize("workers", [3, 4, 8])
@pytest.mark.parametrize("factor", [-1.0, -2.5, 0.0, 0.05, 30.0])
def test_other_factors_are_named_too(workers: int, factor: float) -> None:
    random, watched = np.random.default_rng(workers), Watched()
    for _ in range(60):
        rows = batches(random, workers, 1000, 2.0)
        rows[2] *= factor
        watched.take(rows)
    assert [one.member_id for _, one in watched.named] == [2]


def test_of_two_that_point_apart_neither_is_blamed_alone() -> None:
    random, watched = np.random.default_rng(3), Watched()
    for _ in range(60):
        rows = batches(random, 2, 1000, 1.0)
        rows[1] *= -1
        watched.take(rows)
    assert {one.member_id for _, one in watched.named} == {0, 1}
    assert all(one.either for _, one in watched.named)


@pytest.mark.parametrize("fault", [0.02, -10.0, 1.0])
def test_sections_with_very_different_norms_have_a_usual_norm_each(fault: float) -> None:
    """Test two workers that exchange fragments in turn, as local SGD does."""
    random, watched = np.random.default_rng(4), Watched()
    for number in range(90):
        section = number % 3
        rows = [10.0 ** (4 * section) * row for row in batches(random, 2, 1000, 1.0)]
        if number >= 60:
            rows[1] *= fault
        watched.take(rows, section=section)
    assert [(one.member_id, one.either) for _, one in watched.named] == ([] if fault == 1.0 else [(1, False)])


def test_of_two_that_are_both_far_from_usual_neither_is_blamed_alone() -> None:
    random, watched = np.random.default_rng(3), Watched()
    for number in range(60):
        rows = batches(random, 2, 1000, 1.0)
        if number > 40:
            rows[0] *= 1e3
            rows[1] *= 1e-3
        watched.take(rows)
    assert sorted((one.member_id, one.either) for _, one in watched.named) == [(0, True), (1, True)]


def test_one_of_two_is_blamed_as_soon_as_a_third_worker_tells() -> None:
    random, watched = np.random.default_rng(3), Watched()
    for number in range(60):
        rows = batches(random, 2 if number < 20 else 3, 1000, 1.0)
        rows[1] *= -10
        watched.take(rows)
    assert [(one.member_id, one.either) for _, one in watched.named] == [(0, True), (1, True), (1, False)]
    assert 0 in watched.cleared


def test_of_two_the_one_is_named_that_has_changed() -> None:
    """The worker with gradients that vanish is off, and not the other one, with the larger norm."""
    random, watched = np.random.default_rng(3), Watched()
    for number in range(60):
        rows = batches(random, 2, 1000, 1.0)
        if number > 40:
            rows[0] *= 1e-3
        watched.take(rows)
    assert [one.member_id for _, one in watched.named] == [0]


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize(("numel", "noise"), [(2000, 10.0), (200, 100.0), (20, 3.0), (3, 1.0), (1, 5.0)])
def test_nobody_is_named_in_noise(workers: int, numel: int, noise: float) -> None:
    random, watched = np.random.default_rng(workers + numel), Watched()
    for _ in range(ROUNDS):
        watched.take(batches(random, workers, numel, noise))
    assert watched.named == []


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_nobody_is_named_when_norms_have_heavy_tails(workers: int) -> None:
    """Near the end of a training most samples have no gradient, and some a large one."""
    random, watched = np.random.default_rng(workers), Watched()
    for _ in range(ROUNDS):
        scales = np.exp(1.5 * random.normal(size=workers))
        watched.take([scale * row for scale, row in zip(scales, batches(random, workers, 50, 4.0), strict=True)])
    assert watched.named == []


def test_small_batches_scatter_more_and_are_not_named() -> None:
    random, watched, weights = np.random.default_rng(5), Watched(), [32.0, 32.0, 1.0]
    for _ in range(300):
        watched.take([1.0 + 30 * random.normal(size=500) / math.sqrt(w) for w in weights], weights)
    assert watched.named == []


@pytest.mark.parametrize("factor", [-100.0, 0.001])
@pytest.mark.parametrize("begins", [0, 100])
def test_rounds_with_some_of_the_members_name_the_one_that_is_off_alone(factor: float, begins: int) -> None:
    """Test rounds of one to three of four members, as in modes that do not wait for all."""
    for seed in range(10):
        random, watched = np.random.default_rng(seed), Watched()
        for number in range(400):
            there = sorted(random.choice(MORE, size=random.integers(1, 4), replace=False).tolist())
            rows = batches(random, len(there), 1000, 1.0)
            if number >= begins and 2 in there:
                rows[there.index(2)] *= factor
            watched.take(rows, there=there)
        assert {one.member_id for _, one in watched.named} == {2}, seed
        assert not any(one.either for _, one in watched.named)


def test_of_rounds_with_two_of_the_members_an_opposite_one_is_not_told_and_no_other_is_blamed() -> None:
    random, watched = np.random.default_rng(1), Watched()
    for number in range(400):
        there = sorted(random.choice(MORE, size=2 + (number % 50 == 49), replace=False).tolist())
        rows = batches(random, len(there), 1000, 1.0)
        if 2 in there:
            rows[there.index(2)] *= -1
        watched.take(rows, there=there)
    assert {one.member_id for _, one in watched.named} <= {2}


def test_a_worker_that_is_in_line_again_is_cleared() -> None:
    random, watched = np.random.default_rng(6), Watched()
    for number in range(120):
        rows = batches(random, 4, 1000, 2.0)
        if number < 10:
            rows[1] *= 20
        watched.take(rows)
    assert [one.member_id for _, one in watched.named] == [1]
    assert watched.cleared == [1]
    assert watched.outliers.named == {}


# ── noise ─────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.floats(1.0, 20.0), st.integers(0, 2**32))
def test_noise_scale_is_that_of_the_samples(workers: int, spread: float, seed: int) -> None:
    """It is σ²/1 for elements of mean 1 and deviation σ, whatever the batches are.

    Batches are larger where samples scatter more. So its standard error is 2 % at most, as it follows the last rounds.
    """
    random, noise, numel = np.random.default_rng(seed), Noise(), 16_000
    sizes = [max(spread**2 / 25, 1.0) * float(size) for size in random.integers(4, 33, workers)]
    for _ in range(64):
        rows = [1.0 + spread * random.normal(size=numel) / math.sqrt(size) for size in sizes]
        noise.take(figures(rows, sizes).buckets)
    assert noise.scale == pytest.approx(spread**2, rel=0.1)
    assert noise.scale_of(0) == pytest.approx(noise.scale)


def test_noise_scale_is_told_when_there_is_enough_to_tell() -> None:
    noise = Noise()
    for _ in range(7):
        noise.take([OfBucket(0, 2.0, 6.0), OfBucket(1, -1.0, 1.0)])
    assert noise.scale is None
    noise.take([OfBucket(0, 2.0, 6.0)])
    assert noise.scale == pytest.approx(7.0)
    assert noise.scale_of(1) is None
    noise.restart()
    assert noise.scale is None
