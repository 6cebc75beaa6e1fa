"""Tests of the shares: every slice has one shard, all compute the same, and work is shared by rates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import BY_NAME, FLOAT32, DType
from gradserver.protocol.exchange import DIVIDED, IN_PLACE, ROOTED, ExchangeKey, Kind, Op, Operation, Stream, layout_of
from gradserver.protocol.limits import KIB, MIB
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.protocol.shards import (
    EVEN,
    SPLIT_BUCKET_BYTES,
    SPLIT_BYTES,
    Share,
    Table,
    comparable,
    evenness,
)
from gradserver.protocol.slicing import ALIGNMENT

DTYPES = (FLOAT32, BY_NAME["float64"], BY_NAME["bfloat16"])

rate = st.one_of(st.just(1.0), st.floats(0.05, 100.0))
rates = st.lists(rate, min_size=1, max_size=6).map(tuple)
worlds = st.integers(1, 8)


@st.composite
def operations(draw: st.DrawFn, world: int) -> Operation:
    kind = draw(st.sampled_from([kind for kind in Kind if kind is not Kind.BARRIER]))
    numel = draw(st.one_of(st.integers(1, 1000), st.integers(1, 4 * MIB)))
    if kind in DIVIDED:
        numel *= world
    op = Op.SUM if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) else Op.NONE
    return Operation(kind, op, draw(st.sampled_from(DTYPES)), numel, 0 if kind in ROOTED else -1)


def key_of(operation: Operation) -> ExchangeKey:
    if operation.kind is Kind.TRANSFER:
        return ExchangeKey(Stream.TRANSFER, 0, 0, 0, 1)
    return ExchangeKey(Stream.COLLECTIVE, 0)


def plan_of(sizes: list[int], dtype: DType = FLOAT32) -> Plan:
    """Return a plan of buckets of so many bytes each."""
    return Plan(
        tuple(
            Bucket(f"b{index}", dtype, (Component(f"b{index}", (size // dtype.itemsize,)),))
            for index, size in enumerate(sizes)
        )
    )


def shares_of(plan: Plan, shard_rates: tuple[float, ...], world: int = 2) -> list[Share]:
    table = Table(world, shard_rates)
    table.set_plan(plan)
    return [
        table.share(ExchangeKey(Stream.BUCKET, 3, part), bucket.operation) for part, bucket in enumerate(plan.buckets)
    ]


def assert_tiled(share: Share, shards: int, operation: Operation) -> None:
    layout = share.layout
    intervals = [share.interval(shard) for shard in range(shards)]
    assert intervals[0][0] == 0
    assert intervals[-1][1] == layout.count
    for (start, stop), (after, _) in pairwise(intervals):
        assert start <= stop == after
    for index in range(layout.count):
        start, stop = share.interval(share.shard_of(index))
        assert start <= index < stop
    spans = [layout.span(index) for index in range(layout.count)]
    each = share.layout.itemsize // operation.dtype.itemsize  # what is portioned has one for each rank
    assert sum(stop - start for start, stop in spans) * each == operation.numel
    assert all(start < stop for start, stop in spans)
    assert all(stop == after for (_, stop), (after, _) in pairwise(spans))
    assert sum(share.load(shard) for shard in range(shards)) == operation.numel * operation.dtype.itemsize


@given(st.data(), rates, worlds)
def test_every_slice_of_a_collective_belongs_to_one_shard(
    data: st.DataObject, shard_rates: tuple[float, ...], world: int
) -> None:
    operation = data.draw(operations(world))
    share = Table(world, shard_rates).share(key_of(operation), operation)

    assert_tiled(share, len(shard_rates), operation)


@given(st.data(), worlds, st.floats(0.1, 10))
def test_one_shard_has_what_there_was_before_there_were_shards(data: st.DataObject, world: int, only: float) -> None:
    operation = data.draw(operations(world))
    for table in (Table(world), Table(world, (only,))):
        share = table.share(key_of(operation), operation)
        assert share.layout == layout_of(operation, world)
        assert share.interval(0) == (0, share.layout.count)
        assert share.shard_of(share.layout.count - 1) == 0


@given(st.data(), rates, worlds)
def test_all_participants_find_the_same(data: st.DataObject, shard_rates: tuple[float, ...], world: int) -> None:
    operation = data.draw(operations(world))
    same = Operation(operation.kind, operation.op, operation.dtype, operation.numel, operation.root)

    one, other = Table(world, shard_rates), Table(world, tuple(shard_rates))

    assert one.share(key_of(operation), operation) == other.share(key_of(same), same)


@given(st.data(), rates, worlds)
def test_small_collectives_go_whole_to_the_first_shard(
    data: st.DataObject, shard_rates: tuple[float, ...], world: int
) -> None:
    operation = data.draw(operations(world))
    share = Table(world, shard_rates).share(key_of(operation), operation)
    if operation.numel * operation.dtype.itemsize * share.layout.replies < SPLIT_BYTES:
        assert share.interval(0) == (0, share.layout.count)


def test_what_has_no_bytes_goes_to_the_first_shard() -> None:
    barrier = Operation(Kind.BARRIER, Op.NONE, FLOAT32, 0)

    share = Table(3, (0.0, 1.0)).share(ExchangeKey(Stream.COLLECTIVE, 0), barrier)

    assert share.interval(0) == (0, 1)
    assert share.interval(1) == (1, 1)


@given(st.data(), rates, worlds)
def test_large_collectives_are_shared_by_rates(data: st.DataObject, shard_rates: tuple[float, ...], world: int) -> None:
    operation = data.draw(operations(world))
    share = Table(world, shard_rates).share(key_of(operation), operation)
    if operation.numel * operation.dtype.itemsize < SPLIT_BYTES:
        return
    total = sum(shard_rates)
    for shard, shard_rate in enumerate(shard_rates):
        start, stop = share.interval(shard)
        if operation.kind in IN_PLACE:
            elements = share.load(shard) // operation.dtype.itemsize
            assert abs(elements - operation.numel * shard_rate / total) <= ALIGNMENT + 1
            if 0 < start < share.layout.count:
                assert share.layout.span(start)[0] % ALIGNMENT == 0
        else:
            assert abs((stop - start) - share.layout.count * shard_rate / total) <= 1 + 1e-6


def test_a_shard_of_rate_0_gets_nothing_that_is_shared() -> None:
    large = Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 10 * MIB)
    share = Table(2, (0.0, 1.0, 1.0)).share(ExchangeKey(Stream.COLLECTIVE, 0), large)
    assert [share.load(shard) for shard in range(3)] == [0, 20 * MIB, 20 * MIB]

    for bucket in shares_of(plan_of([400, 64 * KIB, 10 * MIB, 3 * MIB]), (0.0, 1.0, 1.0)):
        assert bucket.load(0) == 0


# ── buckets ───────────────────────────────────────────────────────────────────────────────────────────

sizes = st.one_of(st.integers(1, 4000), st.integers(1, 64 * KIB), st.integers(1, 4 * MIB)).map(lambda n: 8 * n)


@given(st.lists(sizes, min_size=1, max_size=30), rates, st.sampled_from(DTYPES))
def test_every_slice_of_a_plan_belongs_to_one_shard(
    buckets: list[int], shard_rates: tuple[float, ...], dtype: DType
) -> None:
    plan = plan_of(buckets, dtype)
    for share, bucket in zip(shares_of(plan, shard_rates), plan.buckets, strict=True):
        assert_tiled(share, len(shard_rates), bucket.operation)


@given(st.lists(sizes, min_size=1, max_size=60), st.lists(rate, min_size=2, max_size=5).map(tuple))
def test_a_round_is_shared_evenly_or_nothing_is_left_to_be_cut(
    buckets: list[int], shard_rates: tuple[float, ...]
) -> None:
    plan = plan_of(buckets)
    shares = shares_of(plan, shard_rates)
    fair = plan.nbytes / sum(shard_rates)
    for shard, shard_rate in enumerate(shard_rates):
        load = sum(share.load(shard) for share in shares)
        cuts = len(shares) and 2 * ALIGNMENT * FLOAT32.itemsize
        if load > EVEN * fair * shard_rate + cuts:  # it has small buckets alone, and without one of them too little
            whole = [share.load(shard) for share in shares if share.load(shard)]
            assert max(whole) < SPLIT_BUCKET_BYTES[-1]
            assert load - max(whole) <= fair * shard_rate + cuts


@pytest.mark.parametrize("shards", range(2, 9))
@pytest.mark.parametrize("unequal", [False, True])
def test_a_round_of_a_transformer_is_shared_within_two_percent(shards: int, unequal: bool) -> None:
    block = [1024 * 3 * 4, 1024 * 4, 4096 * 4, 2_363_904, 512 * KIB + 12]
    shard_rates = tuple(1.0 + unequal * shard for shard in range(shards))

    shares = shares_of(plan_of([4 * 50257 * 64, *(12 * block), 3072]), shard_rates)

    assert evenness(shares, shard_rates) <= EVEN


@pytest.mark.parametrize("codec", ["int8", "topk:0.01", "bf16"])
def test_what_counts_are_the_bytes_that_travel(codec: str) -> None:
    """Test that small buckets travel as they are, large ones shortened: they weigh as much as is left of them."""
    plan = with_codec(plan_of([32 * KIB] * 7 + [40 * MIB, 8 * MIB]), codec_of(codec))

    shares = shares_of(plan, (1.0, 2.0, 1.0))

    assert evenness(shares, (1.0, 2.0, 1.0)) <= EVEN


def test_rounding_does_not_add_up_over_many_buckets() -> None:
    shares = shares_of(plan_of([64 * KIB + 4 * 33] * 3000), (1.0, 1.0, 1.0, 0.1))

    assert evenness(shares, (1.0, 1.0, 1.0, 0.1)) < 1.0005


def test_empty_buckets_are_nobodys() -> None:
    plan = plan_of([0, 400, 0])
    table = Table(2, (1.0, 1.0))
    table.set_plan(plan)

    assert sum(table.buckets_of(plan, shard)[0] for shard in range(2)) == 1
    assert Table(2).buckets_of(plan, 0) == {0: 1}


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        ((None, None), (1.0, 1.0)),
        ((10.0, None, 1.0), (10.0, 5.5, 1.0)),
        ((0.0, None, 25.0), (0.0, 25.0, 25.0)),
        ((0.0, None), (0.0, 1.0)),
        ((0.0, 0.0), (1.0, 1.0)),
    ],
)
def test_a_shard_without_a_rate_counts_as_the_mean_of_the_others(
    stated: tuple[float | None, ...], meant: tuple[float, ...]
) -> None:
    assert comparable(stated) == meant
