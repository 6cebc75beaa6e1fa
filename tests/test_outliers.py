"""Verdicts about members that are off: each kind of fault is named soon, and no healthy training ever."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.comparison import compare
from gradserver.engine.commands import Measures, Memory
from gradserver.engine.control.noise import Noise
from gradserver.engine.control.outliers import EVERY, FEWEST, Outliers, Verdict
from gradserver.engine.figures import Figures, OfBucket, OfMember, Tally, figures_of, pack_figures, unpack_figures
from gradserver.mean import Array
from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.limits import MAX_WEIGHT
from tests.examples import examples

MORE = 4
"""Members of a group with rounds that do not wait for all."""


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
        """Judge one more round; of the members that are ``there`` if that is said."""
        found = figures(rows, weights)
        members = [one._replace(member_id=(there or [*range(len(rows))])[one.member_id]) for one in found.members]
        judged = self.outliers.take(members, dict(enumerate(weights or [1.0] * len(rows))), section)
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


def told_within(rounds: int) -> int:
    """Return the round by which a verdict is said that takes so many rounds with evidence."""
    return rounds + EVERY


FAULTS: dict[str, Callable[[np.random.Generator, Array], Array]] = {
    "sign": lambda _, row: -row,
    "ten times": lambda _, row: 10 * row,
    "minus ten times": lambda _, row: -10 * row,
    "garbage": lambda random, row: random.normal(size=row.size) * np.linalg.norm(row) / math.sqrt(row.size),
    "large garbage": lambda random, row: 1e6 * random.normal(size=row.size),
}


class Descent:
    """Gradients of a training: the true one turns and shrinks from round to round, and batches scatter around it."""

    def __init__(self, seed: int, workers: int, numel: int, noise: float) -> None:
        self.random, self.workers, self.numel, self.noise = np.random.default_rng(seed), workers, numel, noise
        self._true = self.random.normal(size=numel)
        self._number = 0

    def round(self, sizes: Sequence[float] | None = None) -> list[Array]:
        """Return the gradients of all workers, which have batches of these ``sizes``."""
        self._true = 0.98 * self._true + 0.2 * self.random.normal(size=self.numel)
        scale, self._number = 0.2 + math.exp(-self._number / 60), self._number + 1
        scatter = [self.noise / math.sqrt(size) for size in sizes or [1.0] * self.workers]
        return [scale * (self._true + each * self.random.normal(size=self.numel)) for each in scatter]


@pytest.mark.parametrize("workers", [3, 4, 8, 16])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("begins", [0, 75])
def test_a_faulty_worker_is_named_and_no_other(workers: int, fault: str, begins: int) -> None:
    training, watched = Descent(workers, workers, 4000, 1.5), Watched()
    for number in range(begins + told_within(FEWEST)):
        rows = training.round()
        if number >= begins:
            rows[1] = FAULTS[fault](training.random, rows[1])
        watched.take(rows)
    assert {one.member_id for _, one in watched.named} == {1}
    assert watched.named[0][0] > FEWEST - 1
    text = str(watched.named[0][1])
    assert ("times the median" in text) == ("times" in fault or "large" in fault)
    assert "1 times" not in text


@pytest.mark.parametrize("factor", [10.0, -10.0, 1e6])
def test_of_two_workers_the_one_is_named_that_has_grown(factor: float) -> None:
    training, watched = Descent(2, 2, 4000, 1.5), Watched()
    for number in range(80 + told_within(FEWEST)):
        rows = training.round()
        rows[1] *= factor if number >= 80 else 1.0
        watched.take(rows)
    assert [one.member_id for _, one in watched.named] == [1]


@pytest.mark.parametrize("factor", [10.0, -1.0, 0.0])
def test_of_two_workers_none_is_named_that_was_always_so(factor: float) -> None:
    training, watched = Descent(2, 2, 1000, 1.5), Watched()
    for _ in range(300):
        rows = training.round()
        rows[1] *= factor
        watched.take(rows)
    assert watched.named == []


@pytest.mark.parametrize("workers", [3, 5])
def test_a_bit_that_flips_now_and_then_is_named_after_some_rounds(workers: int) -> None:
    random, watched = np.random.default_rng(7), Watched()
    for number in range(64):
        rows = [row.astype(np.float32) * 1e-3 for row in batches(random, workers, 5000, 3.0)]
        if number % 8 == 0:
            rows[2].view(np.uint32)[number] ^= 1 << 30
        watched.take(rows)
    assert {one.member_id for _, one in watched.named} == {2}


@pytest.mark.parametrize("factor", [-100.0, 30.0])
def test_rounds_with_some_of_the_members_name_the_one_that_is_off_alone(factor: float) -> None:
    """Test rounds of one to three of four members, as in modes that do not wait for all."""
    for seed in range(5):
        random, watched = np.random.default_rng(seed), Watched()
        for _ in range(400):
            there = sorted(random.choice(MORE, size=random.integers(1, 4), replace=False).tolist())
            rows = batches(random, len(there), 1000, 1.0)
            if 2 in there:
                rows[there.index(2)] *= factor
            watched.take(rows, there=there)
        assert {one.member_id for _, one in watched.named} == {2}, seed


def test_a_worker_that_is_in_line_again_is_cleared() -> None:
    random, watched = np.random.default_rng(6), Watched()
    for number in range(200):
        rows = batches(random, 4, 1000, 2.0)
        if number < 50:
            rows[1] *= 20
        watched.take(rows)
    assert [one.member_id for _, one in watched.named] == [1]
    assert watched.cleared == [1]
    assert watched.outliers.named == {}


# ── honest workers ────────────────────────────────────────────────────────────────────────────────────

Honest = Callable[[Descent, int], tuple[list[Array], list[float] | None]]


def _unequal(training: Descent, _: int) -> list[float]:
    return [float(4 ** (place % 3)) for place in range(training.workers)]


def _heavy(training: Descent, _: int) -> tuple[list[Array], None]:
    tails = np.exp(1.5 * training.random.normal(size=training.workers))
    return [tail * row for tail, row in zip(tails, training.round(), strict=True)], None


def _student(training: Descent, _: int) -> tuple[list[Array], None]:
    return [row + training.random.standard_t(1.5, size=row.size) for row in training.round()], None


def _spike(training: Descent, number: int) -> tuple[list[Array], None]:
    factor = 1e4 if number % 100 > 97 else 1.0
    return [factor * row for row in training.round()], None


def _zeros(training: Descent, _: int) -> tuple[list[Array], None]:
    idle = training.random.random(training.workers) < 0.4
    return [row * (0.0 if one else 1.0) for one, row in zip(idle, training.round(), strict=True)], None


def _rows(training: Descent, _: int) -> tuple[list[Array], None]:
    """Return gradients of an embedding: each worker has some rows, of which one is frequent."""
    rows = training.round()
    for row in rows:
        table = row.reshape(-1, 10)
        table[1:][training.random.random(len(table) - 1) > 0.03] = 0
    return rows, None


def _vanishing(training: Descent, number: int) -> tuple[list[Array], None]:
    """Return gradients of workers of which all but one have learned their samples."""
    return [row * (1.0 if place == 0 else 0.9**number) for place, row in enumerate(training.round())], None


def _opposed(training: Descent, number: int) -> tuple[list[Array], None]:
    """Return gradients of workers with data of their own at the optimum: their sum is zero."""
    random = np.random.default_rng(5)
    own = [random.normal(size=training.numel) for _ in range(training.workers)]
    mean = sum(own) / len(own)
    return [(0.8**number + 0.01) * row - mean + one for one, row in zip(own, training.round(), strict=True)], None


HONEST: dict[str, Honest] = {
    "equal": lambda training, _: (training.round(), None),
    "unequal": lambda training, number: (training.round(_unequal(training, number)), None),
    "weighed": lambda training, number: (training.round(sizes := _unequal(training, number)), sizes),
    "heavy norms": _heavy,
    "heavy elements": _student,
    "spike of all": _spike,
    "zeros": _zeros,
    "embedding": _rows,
    "vanishing": _vanishing,
    "opposed": _opposed,
}


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("kind", HONEST)
def test_no_honest_worker_is_named_in_ten_thousand_rounds(workers: int, kind: str) -> None:
    """Test some 50 kinds of group: 60 rounds of each here, about 11,000 together, and more in the long suite."""
    rounds, named, total = examples(100), list[tuple[int, int, str]](), 0
    for numel, noise in ((1, 1.0), (10, 3.0), (200, 30.0), (2000, 1.0)):
        if (kind == "embedding" and numel < 200) or (kind == "opposed" and numel == 1):
            continue
        training, watched = Descent(workers * numel, workers, numel, noise), Watched()
        for number in range(rounds):
            watched.take(*HONEST[kind](training, number))
        named += [(numel, number, str(one)) for number, one in watched.named]
        total += rounds
    assert named == [], total


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_with_a_target_each_are_not_named(workers: int) -> None:
    """Test toy trainings: rank 0 has all zeros, rank 1 all ones, and so on."""
    for start in (-3.0, 0.0, 0.1, 0.5):
        weights, watched = np.full(8, start), Watched()
        for _ in range(200):
            rows = [weights - rank % 2 for rank in range(workers)]
            watched.take(rows)
            weights = weights - 0.1 * np.mean(rows, axis=0)
        assert watched.named == [], start


def test_small_batches_scatter_more_and_are_not_named() -> None:
    random, watched, weights = np.random.default_rng(5), Watched(), [32.0, 32.0, 1.0]
    for _ in range(300):
        watched.take([1.0 + 30 * random.normal(size=500) / math.sqrt(w) for w in weights], weights)
    assert watched.named == []


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
