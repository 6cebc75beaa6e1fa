"""Tests of the size of slices: it follows from the links, is the same at all participants, and changes no result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.commands import Contribution, Digests, Memory, Reduce
from gradserver.engine.records import Durable, Plan as PlanRecord
from gradserver.protocol.codecs import codec_of, seed_of
from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.dtypes import BY_CODE, BY_NAME, FLOAT32, DType
from gradserver.protocol.exchange import ExchangeKey, Kind as Exchanged, Layout, Op, Operation, Stream, layout_of
from gradserver.protocol.limits import KIB, MAX_NUMEL, MIB, SLICE_BYTES
from gradserver.protocol.means import mean_of
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.protocol.shards import Table
from gradserver.protocol.slicing import ALIGNMENT, LEAST_BYTES, MAX_GRAIN, MOST_GRAINS, grain_of
from gradserver.reducer import reduce
from gradserver.residuals import Residuals
from gradserver.worker.norms import norm_of
from tests.examples import examples

GBIT = 1e9 / 8
CODECS = ("fp32", "bf16", "fp16", "int8", "topk:0.01", "topk:0.2", "randomk:0.3")

codecs = st.sampled_from(CODECS)
dtypes = st.sampled_from(sorted(BY_CODE.values(), key=lambda dtype: dtype.code))
grains = st.one_of(st.just(0), st.integers(1, MAX_GRAIN), st.floats(0.01, 100).map(lambda rate: grain_of(rate * GBIT)))
rates = st.lists(st.sampled_from((0.0, 0.3, 1.0, 2.0)), min_size=1, max_size=4).filter(any).map(tuple)
sizes = st.one_of(st.integers(1, 3000), st.integers(1, 3 * MIB))


def spans(layout: Layout) -> list[tuple[int, int]]:
    return [layout.span(index) for index in range(layout.count)]


def means(sizes: Sequence[int], codec: str = "fp32", dtype: DType = FLOAT32) -> Plan:
    """Return a plan of buckets with so many elements."""
    buckets = tuple(Bucket(f"b{n}", dtype, (Component(f"b{n}", (size,)),)) for n, size in enumerate(sizes))
    return Plan(buckets) if codec == "fp32" else with_codec(Plan(buckets), codec_of(codec))


# ── the law ───────────────────────────────────────────────────────────────────────────────────────────


@given(dtypes, st.integers(1, MAX_NUMEL), grains, st.data())
@example(FLOAT32, 250_000, grain_of(5 * GBIT), None)
def test_no_slice_is_larger_than_it_may_be_and_all_lie_at_rows(
    dtype: DType, numel: int, grain: int, data: st.DataObject | None
) -> None:
    layout = layout_of(Operation(Exchanged.ALL_REDUCE, Op.NONE, dtype, numel), 3, grain)
    index = layout.count - 1 if data is None else data.draw(st.integers(0, layout.count - 1))
    start, stop = layout.span(index)

    assert start % ALIGNMENT == 0
    assert 0 < layout.nbytes(index) <= SLICE_BYTES
    assert layout.span(layout.count - 1)[1] == numel
    assert layout.count == 1 or layout.step * dtype.itemsize * 3 >= LEAST_BYTES * 2
    assert stop - start == layout.step or index == layout.count - 1


@pytest.mark.parametrize(
    ("gbit", "nbytes", "count"),
    [
        (5.0, 1_000_000, 4),  # four members at 1 Gbit/s, and one's own link
        (5.0, 100_000_000, 167),  # processors are idle for most of the time
        (50.0, 100_000_000, 96),  # as many as there must be
        (1.0, 1_000_000, 10),
        (1.0, 26_000_000, 216),
        (50.0, 1_000_000, 1),
        (50.0, 26_000_000, 25),
        (0.1, 64 * KIB, 2),
        (0.1, 32 * KIB, 1),
    ],
)
def test_slow_links_have_small_slices_and_short_tensors_few(gbit: float, nbytes: int, count: int) -> None:
    operation = Operation(Exchanged.ALL_REDUCE, Op.MEAN, FLOAT32, nbytes // 4)

    assert layout_of(operation, 4, grain_of(gbit * GBIT)).count == count


@given(st.integers(1, 200).map(lambda n: n * 100_000), st.floats(0.05, 8))
def test_the_size_has_the_least_sum_of_both_costs(nbytes: int, gbit: float) -> None:
    grain = grain_of(gbit * GBIT)
    layout = layout_of(Operation(Exchanged.ALL_REDUCE, Op.MEAN, FLOAT32, nbytes // 4), 4, grain)

    def cost(size: float) -> float:
        return size + nbytes * grain / size

    most = max(min(MOST_GRAINS * grain, SLICE_BYTES), LEAST_BYTES)
    choices = [LEAST_BYTES * 1.1**power for power in range(37)]
    best = min(cost(size) for size in choices if size <= most)
    assert cost(nbytes / layout.count) < 1.25 * best


@given(st.integers(1, MAX_NUMEL), st.floats(0.01, 100))
def test_no_slice_of_a_slow_link_is_larger_than_some_grains(numel: int, gbit: float) -> None:
    grain = grain_of(gbit * GBIT)
    layout = layout_of(Operation(Exchanged.ALL_REDUCE, Op.MEAN, FLOAT32, numel), 4, grain)

    assert layout.nbytes(0) <= max(MOST_GRAINS * grain, LEAST_BYTES) * 1.5 + 4 * ALIGNMENT


@pytest.mark.parametrize("kind", [Exchanged.ALL_GATHER, Exchanged.TRANSFER, Exchanged.COMMIT, Exchanged.GATHER])
def test_other_operations_are_cut_as_ever(kind: Exchanged) -> None:
    operation = Operation(kind, Op.NONE, FLOAT32, 240_000)

    assert layout_of(operation, 3, grain_of(GBIT)) == layout_of(operation, 3)


# ── all participants ──────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(sizes, min_size=1, max_size=6),
    codecs,
    rates,
    st.integers(1, 9),
    grains,
    st.sampled_from(("plain", "krum:1")),
)
@example([600_000], "fp32", (1.0,), 3, grain_of(GBIT), "krum:1")
def test_each_element_has_one_slice_and_all_participants_find_it(
    numels: list[int], codec: str, shards: tuple[float, ...], world: int, grain: int, rule: str
) -> None:
    plan, unit = means(numels, codec), mean_of(rule).unit
    here, there = (Table(world, shards, unit, grain), Table(world, tuple(shards), unit, grain))
    here.set_plan(plan)
    there.set_plan(means(numels, codec))
    for part, bucket in enumerate(plan.buckets):
        key = ExchangeKey(Stream.BUCKET, 5, part)
        share = here.share(key, bucket.operation)
        assert share == there.share(key, bucket.operation)
        edge = 0
        for start, stop in spans(share.layout):
            assert start == edge < stop
            assert start % unit == 0
            edge = stop
        assert edge == bucket.numel
        assert share.layout.run_bytes(0, share.layout.count) == sum(map(share.layout.nbytes, range(share.layout.count)))
        assert [share.shard_of(index) for index in range(share.layout.count)] == sorted(
            shard for shard in range(len(share.bounds) - 1) for _ in range(*share.interval(shard))
        )


@pytest.mark.parametrize("codec", ["int8", "bf16", "topk:0.01"])
@pytest.mark.parametrize("grain", [0, grain_of(GBIT)])
def test_residuals_on_disk_are_of_the_slices_that_are_reduced(tmp_path: Path, codec: str, grain: int) -> None:
    plan = means([600_001], codec)
    residuals = Residuals(tmp_path)
    residuals.restore((Durable("g", "secret", (), grain), PlanRecord("g", 1, 0, plan)))
    table = Table(2, (), 1, grain)
    layout = table.share(ExchangeKey(Stream.BUCKET, 0, 0), plan.buckets[0].operation).layout

    assert (layout.count > 3) == (grain > 0 and codec != "topk:0.01")  # of which next to nothing travels
    for index in range(layout.count):
        rows = [np.ones(layout.run_numel(index, index + 1), np.float32)]
        assert len(reduced(plan.buckets[0].operation, layout, index, rows, 0, Memory(), residuals)) == rows[0].size


# ── results ───────────────────────────────────────────────────────────────────────────────────────────


def reduced(
    operation: Operation,
    layout: Layout,
    index: int,
    rows: Sequence[np.ndarray[Any, Any]],
    number: int,
    memory: Memory,
    residuals: Residuals | None = None,
    squares: list[float] | None = None,
    digests: Digests | None = None,
) -> np.ndarray[Any, Any]:
    """Reduce one slice, to which ``rows`` are what members have, as coordinator and workers do."""
    start, stop = layout.span(index)
    codec, seed = operation.codec, seed_of(number, 0, start)
    given = [row.data if not operation.is_lossy else codec.encode(row, seed=seed) for row in rows]
    contributions = [Contribution(member_id, 1.0 + member_id, payload) for member_id, payload in enumerate(given)]
    command = Reduce(
        *("g", 1, ExchangeKey(Stream.BUCKET, number, 0), index, operation, start, layout.nbytes(index), stop - start),
        *(memory if operation.is_lossy else None, contributions, (), True, digests),
        squares=squares,
    )
    if residuals is not None:
        residuals.provide(command)
    outcome = reduce(command)
    assert isinstance(outcome, memoryview)
    if not operation.is_lossy:
        return np.frombuffer(outcome, rows[0].dtype)
    out = np.empty(stop - start, np.float32)
    codec.decode(outcome, stop - start, out, seed)
    return out


def rounds(operation: Operation, layout: Layout, count: int, seed: int) -> tuple[list[bytes], list[float], list[int]]:
    """Reduce some rounds of a bucket. Return the results, their norms, and their digests."""
    memories = [Memory() for _ in range(layout.count)]
    found, norms, hashes = [], [], []
    for number in range(count):
        noise = np.random.default_rng((seed, number))
        whole = [noise.standard_normal(operation.numel).astype(np.float32) for _ in range(3)]
        squares: list[float] = []
        digests = Digests(0, [])
        parts = [
            reduced(
                operation,
                layout,
                index,
                [row[start:stop] for row in whole],
                number,
                memories[index],
                None,
                squares,
                digests,
            )
            for index, (start, stop) in enumerate(spans(layout))
        ]
        found.append(np.concatenate(parts).tobytes())
        norms.append(norm_of(squares))
        hashes.append(sum(value for _, value in digests.found) % (1 << 64))
    return found, norms, hashes


@settings(max_examples=examples(12), deadline=None)
@given(codecs, st.integers(1, 5 * BLOCK), grains, rates, st.integers(0, 2**32))
@example("int8", 4 * BLOCK + 300, grain_of(GBIT), (1.0,), 0)
@example("randomk:0.3", 4 * BLOCK + 300, grain_of(GBIT), (1.0,), 0)
@example("fp32", 4 * BLOCK + 300, grain_of(GBIT), (1.0, 2.0), 0)
def test_the_size_of_slices_changes_no_bit_of_any_result(
    codec: str, numel: int, grain: int, shards: tuple[float, ...], seed: int
) -> None:
    plan = means([numel], codec)
    operation, key = plan.buckets[0].operation, ExchangeKey(Stream.BUCKET, 0, 0)
    layouts = []
    for size in (0, grain):
        table = Table(3, shards, 1, size)
        table.set_plan(plan)
        layouts.append(table.share(key, operation).layout)

    assert rounds(operation, layouts[0], 3, seed) == rounds(operation, layouts[1], 3, seed)


def test_a_run_of_small_slices_has_the_squares_of_each() -> None:
    operation = Operation(Exchanged.ALL_REDUCE, Op.MEAN, FLOAT32, 400_000)
    for grain in (1, 3000, 20_000, 60_000):
        layout = layout_of(operation, 2, grain)
        rows = [np.random.default_rng(seed).standard_normal(400_000).astype(np.float32) for seed in range(2)]
        each: list[float] = []
        for index, (start, stop) in enumerate(spans(layout)):
            reduced(operation, layout, index, [row[start:stop] for row in rows], 0, Memory(), None, each)
        told: list[float] = []
        contributions = [Contribution(member_id, 1.0 + member_id, row.data) for member_id, row in enumerate(rows)]
        command = Reduce(
            *("g", 1, ExchangeKey(Stream.BUCKET, 0, 0), 0, operation, 0, 1_600_000, 400_000, None, contributions),
            *((), True),
            squares=told,
            each=layout.step,
        )
        reduce(command)
        assert told == each
        assert len(told) == 2 * layout.count


def test_what_is_of_wide_types_is_sliced_by_its_bytes() -> None:
    narrow, wide = (
        Operation(Exchanged.ALL_REDUCE, Op.SUM, BY_NAME[name], 200_000) for name in ("float16", "complex128")
    )

    assert layout_of(narrow, 2, grain_of(GBIT)).count < layout_of(wide, 2, grain_of(GBIT)).count
