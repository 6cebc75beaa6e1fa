"""Robust means: names, sizes, and results beside a plain reference, for every type, cut, codec and policy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver import reducer
from gradserver.engine.commands import Contribution, Memory, Reduce
from gradserver.engine.events import NonFinite, Sifted
from gradserver.engine.policy import OnNonFinite
from gradserver.mean import Outcome
from gradserver.protocol.codecs import Scratch, codec_of, seed_of
from gradserver.protocol.dtypes import BY_NAME, FLOAT32, numpy_dtype
from gradserver.protocol.errors import InvalidArgumentError, InvalidWorldSizeError
from gradserver.protocol.exchange import EXACT, ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.means import PLAIN, UNIT, Mean, Rule, mean_of
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.protocol.shards import Table
from gradserver.robust import _network

RULES = ("median", "trimmed:0.1", "trimmed:0.25", "trimmed:0.4", "clipped:1", "clipped:1.5", "krum:1", "krum:2")
VALUES = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 1.0, 2.5, 1e30])
Array = np.ndarray[Any, Any]
key = ExchangeKey(Stream.BUCKET, 0)


# ── the reference: as the papers write it, without blocks ─────────────────────────────────────────────


def expected(mean: Mean, rows: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return the mean of ``rows`` in float64: element by element, or unit by unit."""
    values = np.array(rows, np.float64)
    if mean.unit == 1:
        return of_elements(mean, values, np.array(weights))
    units = [values[:, start : start + UNIT] for start in range(0, values.shape[1], UNIT)]
    return np.concatenate([of_unit(mean, unit, np.array(weights)) for unit in units])


def of_elements(mean: Mean, values: Array, weights: Array) -> Array:
    count = len(values)
    trimmed = (count - 1) // 2 if mean.rule is Rule.MEDIAN else mean.trimmed(count)
    order = np.argsort(values, axis=0, kind="stable")[trimmed : count - trimmed]
    kept, theirs = np.take_along_axis(values, order, axis=0), weights[order]
    result: Array = (kept * theirs).sum(axis=0) / theirs.sum(axis=0)
    return result


def of_unit(mean: Mean, values: Array, weights: Array) -> Array:
    if mean.rule is Rule.CLIPPED:
        norms = np.linalg.norm(values, axis=1)
        limit = mean.parameter * sorted(norms)[(len(norms) - 1) // 2]
        values = values * np.minimum(1, limit / np.maximum(norms, 1e-300))[:, None]
        chosen = list(range(len(values)))
    else:
        chosen = nearest(values, mean.faulty(len(values)))
    share = weights[chosen] / weights[chosen].sum()
    result: Array = (values[chosen] * share[:, None]).sum(axis=0)
    return result


def nearest(values: Array, faulty: int) -> list[int]:
    count = len(values)
    if count < 3:
        return list(range(count))
    scores = []
    for one in range(count):
        distances = sorted(float(((values[one] - values[other]) ** 2).sum()) for other in range(count) if other != one)
        scores.append(sum(distances[: count - faulty - 2]))
    return sorted(np.argsort(scores, kind="stable")[: count - faulty - 2].tolist())


# ── reductions ────────────────────────────────────────────────────────────────────────────────────────


def command(
    rule: str,
    rows: Sequence[Array | None],
    weights: Sequence[float] | None = None,
    policy: OnNonFinite = OnNonFinite.HALT,
    spans: Sequence[tuple[int, int]] = (),
    name: str = "",
) -> Reduce:
    first = next(row for row in rows if row is not None)
    dtype = BY_NAME[name or first.dtype.name]
    contributions = [
        Contribution(2 * place, 1.0 if weights is None else weights[place], None if row is None else row.tobytes())
        for place, row in enumerate(rows)
    ]
    operation = Operation(Kind.ALL_REDUCE, Op.MEAN, dtype, first.nbytes // dtype.itemsize)
    return Reduce(
        *("group", 1, key, 0, operation, 0, first.nbytes, operation.numel, None, contributions, (), True),
        nonfinite=policy,
        spans=spans,
        mean=mean_of(rule),
    )


def combined(outcome: Outcome, dtype: Any) -> Array:
    outcome = outcome.payload if isinstance(outcome, Sifted) else outcome
    assert isinstance(outcome, bytes | bytearray | memoryview), outcome
    return np.frombuffer(outcome, dtype)


def reduce(rule: str, rows: Sequence[Array | None], weights: Sequence[float] | None = None) -> Array:
    made = command(rule, rows, weights)
    return combined(reducer.reduce(made), next(row.dtype for row in rows if row is not None))


def gradients(count: int, numel: int, seed: int = 0, dtype: Any = np.float32) -> list[Array]:
    chance = np.random.default_rng(seed)
    signal = chance.standard_normal(numel)
    rows = [(signal + 0.5 * chance.standard_normal(numel)).astype(dtype) for _ in range(count)]
    rows[-1] = (rows[-1] * -10).astype(dtype)
    return rows


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("rule", RULES)
def test_a_mean_is_that_of_the_reference(rule: str, count: int, weighted: bool) -> None:
    rows = gradients(count, UNIT + 1000 if count < 8 else 5000)
    weights = [1.0 + place % 3 for place in range(count)] if weighted else [4.0] * count
    result = reduce(rule, rows, weights)
    if count == 1:
        assert result.tobytes() == rows[0].tobytes()
    np.testing.assert_allclose(result, expected(mean_of(rule), rows, weights), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "complex64", "complex128"])
def test_every_floating_type_has_the_means(name: str, rule: str) -> None:
    dtype = BY_NAME[name]
    parts = 2 if dtype.kind == "c" else 1
    rows = gradients(5, 3000 * parts, dtype=np.float64)
    stored = [(row.view(np.complex128) if parts == 2 else row).astype(numpy_dtype(dtype)) for row in rows]
    made = combined(reducer.reduce(command(rule, stored, [1, 2, 3, 4, 5], name=name)), numpy_dtype(dtype))
    result = made.view(made.real.dtype) if parts == 2 else made.astype(np.float64)
    given_rows = [row.view(row.real.dtype) if parts == 2 else row.astype(np.float64) for row in stored]
    wanted = expected(mean_of(rule), given_rows, [1, 2, 3, 4, 5])
    precision = {"float16": 2e-3, "bfloat16": 1e-2}.get(name, 1e-5)
    np.testing.assert_allclose(result, wanted, rtol=precision, atol=precision)


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    values=st.lists(st.lists(VALUES, min_size=6, max_size=6), min_size=1, max_size=9),
    weighted=st.booleans(),
)
def test_equal_values_are_in_rank_order(rule: str, values: list[list[float]], weighted: bool) -> None:
    rows = [np.array(row, np.float32) for row in values]
    weights = [float(1 + place * place) if weighted else 1.0 for place in range(len(rows))]
    result = reduce(rule, rows, weights)
    wanted = expected(mean_of(rule), rows, weights)
    if mean_of(rule).rule is not Rule.KRUM:  # distances of 1e30 hide those of 1
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    assert np.isfinite(result).all()


@pytest.mark.parametrize("count", range(1, 13))
def test_the_network_sorts(count: int) -> None:
    """Every order of zeros and ones is sorted, and so is everything (Knuth's zero-one principle)."""
    for ones in itertools.islice(itertools.product((0, 1), repeat=count), 4096):
        for trimmed in {0, (count - 1) // 2}:
            wires = list(ones)
            for low, high, needs_low, needs_high in _network(count, trimmed):
                pair = sorted((wires[low], wires[high]))
                wires[low], wires[high] = pair[0] if needs_low else -1, pair[1] if needs_high else -1
            assert wires[trimmed : count - trimmed] == sorted(ones)[trimmed : count - trimmed]


# ── L2: the same bits, however it is cut ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wire", ["fp32", "int8", "randomk:0.1"])
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_depend_neither_on_slices_nor_on_shards(rule: str, wire: str) -> None:
    numel, codec = 5 * UNIT + 12_345, codec_of(wire)
    rows = gradients(5, numel)
    plan = with_codec(simple_plan([("bucket", numel)], FLOAT32), codec)
    operation = plan.buckets[0].operation
    assert operation.codec is codec
    results = set()
    for rates in ((), (1.0, 1.0), (1.0, 2.0, 3.0), (0.0, 1.0, 1.0, 1.0)):
        table = Table(5, rates, mean_of(rule).unit)
        table.set_plan(plan)
        layout = table.share(key, operation).layout
        result = np.empty(numel, np.float32)
        for index in range(layout.count):
            start, stop = layout.span(index)
            result[start:stop] = of_slice(rule, operation, rows, index, start, stop)
        results.add(result.tobytes())
    if wire == "fp32":
        results.add(reduce(rule, rows).tobytes())  # as in shared memory: all slices at once
    assert len(results) == 1


def of_slice(rule: str, operation: Operation, rows: Sequence[Array], index: int, start: int, stop: int) -> Array:
    """Return the mean of one slice, decoded."""
    codec, scratch, seed = operation.codec, Scratch(), seed_of(0, 0, start)
    nbytes = codec.nbytes(stop - start) if codec is not EXACT else 4 * (stop - start)
    payloads = []
    for row in rows:
        room, part = np.empty(nbytes, np.uint8), row[start:stop]
        payloads.append(part.tobytes() if codec is EXACT else codec.encode(part, room, seed, scratch))
    given_by = [Contribution(rank, 1.0, payload) for rank, payload in enumerate(payloads)]
    memory = Memory() if codec is not EXACT else None
    what = index, operation, start, nbytes, stop - start, memory, given_by, (), True
    outcome = reducer.reduce(Reduce("g", 1, key, *what, mean=mean_of(rule)))
    assert isinstance(outcome, bytes | bytearray | memoryview), outcome
    if codec is EXACT:
        return np.frombuffer(outcome, np.float32)
    values = np.empty(stop - start, np.float32)
    codec.decode(outcome, stop - start, values, seed, scratch)
    return values


@pytest.mark.parametrize("rule", RULES)
def test_threads_compute_the_same_bits(rule: str) -> None:
    rows = gradients(4, 6 * UNIT + 77)
    done, found = threading.Event(), list[Outcome]()

    def later(outcome: Outcome) -> None:
        found.append(outcome)
        done.set()

    threads = reducer.Reducer(threads=3)
    try:
        outcome = threads.start(command(rule, rows), later)
        assert outcome is reducer.PENDING, "a robust mean of 6 MB takes long enough for other threads"
        assert done.wait(30)
    finally:
        threads.close()
    assert combined(found[0], np.float32).tobytes() == reduce(rule, rows).tobytes()


# ── votes ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES)
def test_a_member_without_samples_has_no_vote(rule: str) -> None:
    rows = gradients(5, 500)
    assert reduce(rule, [*rows, None, None], [1.0] * 5 + [1e-300] * 2).tobytes() == reduce(rule, rows).tobytes()


def test_a_contribution_of_zeros_has_a_vote() -> None:
    ones = np.ones(10, np.float32)
    assert reduce("median", [ones, None, None]).max() == 0
    assert reduce("trimmed:0.34", [ones, ones * 2, None]).max() == 1


def test_a_large_weight_buys_one_vote_only() -> None:
    rows = [np.full(10, value, np.float32) for value in (1.0, 2.0, 3.0, 1e6)]
    for rule in ("median", "trimmed:0.25"):
        assert 2 <= reduce(rule, rows, [1.0, 1.0, 1.0, 1e9]).max() <= 3
    assert reduce("krum:1", [*rows, rows[0]], [1.0, 1.0, 1.0, 1e9, 1.0]).max() <= 3


def test_a_clipped_contribution_has_the_median_norm() -> None:
    rows = [np.full(100, value, np.float32) for value in (1.0, 1.0, 1.0, -10.0)]
    np.testing.assert_allclose(reduce("clipped:1", rows), 0.5)


def test_krum_takes_no_part_of_the_faulty_ones() -> None:
    rows = gradients(7, 1000)
    rows[0] = rows[0] * 50
    result = reduce("krum:2", rows)
    chosen = nearest(np.array(rows, np.float64), 2)
    assert not {0, 6} & set(chosen)
    np.testing.assert_allclose(result, np.mean([rows[place] for place in chosen], axis=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18, 1e37])
@pytest.mark.parametrize("rule", ["clipped:1", "krum:1"])
def test_norms_have_the_range_of_the_type(rule: str, scale: float) -> None:
    rows = [(row * np.float32(0.05)).astype(np.float32) for row in gradients(5, 700)]
    scaled = [row * np.float32(scale) for row in rows]
    np.testing.assert_allclose(reduce(rule, scaled), reduce(rule, rows).astype(np.float64) * scale, 1e-5, scale * 1e-6)


# ── values that are not finite ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_value_that_is_not_finite_is_found_although_it_would_be_trimmed(rule: str, value: float) -> None:
    rows = gradients(5, 3 * UNIT)
    rows[3][UNIT + 5] = value
    outcome = reducer.reduce(command(rule, rows))
    assert isinstance(outcome, NonFinite)
    assert (outcome.member_id, outcome.element) == (6, UNIT + 5)


@pytest.mark.parametrize("policy", [OnNonFinite.LEAVE_OUT, OnNonFinite.SKIP])
@pytest.mark.parametrize("rule", RULES)
def test_a_slice_goes_on_without_it(rule: str, policy: OnNonFinite) -> None:
    rows = gradients(6, 3 * UNIT)
    rows[3][UNIT + 5] = np.nan
    spans = [(start, start + UNIT) for start in range(0, 3 * UNIT, UNIT)]
    outcome = reducer.reduce(command(rule, rows, policy=policy, spans=spans))
    assert isinstance(outcome, Sifted)
    assert [(found.slice, found.member_id, found.element) for found in outcome.findings] == [(1, 6, UNIT + 5)]
    result, middle = combined(outcome, np.float32), slice(UNIT, 2 * UNIT)
    for part in (slice(0, UNIT), slice(2 * UNIT, None)):
        assert result[part].tobytes() == reduce(rule, [row[part] for row in rows]).tobytes()
    if policy is OnNonFinite.LEAVE_OUT:
        others = [row[middle] for place, row in enumerate(rows) if place != 3]
        assert result[middle].tobytes() == reduce(rule, others).tobytes()


@pytest.mark.parametrize("rule", RULES)
def test_it_is_passed_on_if_that_is_the_policy(rule: str) -> None:
    rows = gradients(5, 1000)
    rows[2][7] = np.inf
    clean = [row.copy() for row in rows]
    result = combined(reducer.reduce(command(rule, rows, policy=OnNonFinite.PROPAGATE)), np.float32)
    assert np.isinf(result[7])
    assert np.isfinite(np.delete(result, 7)).all()
    if mean_of(rule).unit == 1:
        others = [np.delete(row, 7) for row in clean]
        assert np.delete(result, 7).tobytes() == reduce(rule, others).tobytes()


@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]])
@pytest.mark.parametrize("policy", list(OnNonFinite))
@pytest.mark.parametrize("rule", RULES)
def test_sums_of_large_values_stay_in_range(rule: str, policy: OnNonFinite, weights: list[float]) -> None:
    rows = [np.full(10, value, np.float32) for value in (3e38, 3.1e38, 3.2e38, 3.3e38, 3.4e38)]
    spans = [(0, 10)] if policy in (OnNonFinite.LEAVE_OUT, OnNonFinite.SKIP) else []
    outcome = reducer.reduce(command(rule, rows, weights, policy, spans))
    result = combined(outcome, np.float32)
    assert (result >= 1e38).all()
    assert np.isfinite(result).all()


@pytest.mark.parametrize("policy", [OnNonFinite.HALT, OnNonFinite.LEAVE_OUT])
def test_lossy_contributions_that_are_not_finite_are_found(policy: OnNonFinite) -> None:
    rows, codec = gradients(5, 2000), codec_of("bf16")
    rows[1][9] = np.nan
    payloads = [codec.encode(row, np.empty(codec.nbytes(2000), np.uint8), 0, Scratch()) for row in rows]
    operation = Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 2000, codec=codec)
    given_by = [Contribution(rank, 1.0, payload) for rank, payload in enumerate(payloads)]
    spans = ((0, 2000),) if policy is OnNonFinite.LEAVE_OUT else ()
    outcome = reducer.reduce(
        Reduce(
            *("g", 1, key, 0, operation, 0, codec.nbytes(2000), 2000, Memory(), given_by, (), True),
            nonfinite=policy,
            spans=spans,
            mean=mean_of("median"),
        )
    )
    if policy is OnNonFinite.HALT:
        assert isinstance(outcome, NonFinite)
        assert (outcome.member_id, outcome.element) == (1, 9)
    else:
        assert isinstance(outcome, Sifted)
        assert [found.member_id for found in outcome.findings] == [1]
        assert np.isfinite(np.frombuffer(outcome.payload or b"", np.uint16)).all()


# ── names and sizes ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["plain", *RULES])
def test_a_mean_is_called_as_it_was(name: str) -> None:
    assert str(mean_of(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "mean", "median:1", "plain:", "trimmed", "trimmed:", "trimmed:0", "trimmed:0.5", "trimmed:-1"),
        *("trimmed:nan", "clipped:0.9", "clipped:inf", "clipped:x", "krum", "krum:0", "krum:1.5", "krum:100000"),
    ],
)
def test_other_names_are_errors_that_say_what_there_is(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"there is no mean .*(there are plain, median|, as )"):
        mean_of(name)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("plain", 1),
        ("median", 3),
        ("clipped:2", 3),
        ("trimmed:0.25", 4),
        ("trimmed:0.1", 10),
        ("krum:1", 5),
        ("krum:3", 9),
    ],
)
def test_a_mean_needs_members(name: str, needs: int) -> None:
    mean = mean_of(name)
    assert mean.needs == needs
    mean.check_size(needs)
    if needs > 1:
        with pytest.raises(InvalidWorldSizeError, match=f"group 'g': the mean {name} needs at least {needs} workers"):
            mean.check_size(needs - 1, "g")


def test_the_error_says_which_parameter_would_do() -> None:
    cases = ("trimmed:0.1", 4, "trimmed:0.25"), ("krum:4", 8, "krum:2"), ("trimmed:0.2", 3, "trimmed:0.34")
    for name, least, remedy in cases:
        with pytest.raises(InvalidWorldSizeError, match=remedy):
            mean_of(name).check_size(least)
        mean_of(remedy).check_size(least)
    assert PLAIN.unit == mean_of("median").unit == 1
