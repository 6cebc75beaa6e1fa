"""Tests of the cut of operations: the same everywhere, without gaps, and never too large."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from gradserver.protocol.dtypes import BY_CODE, BY_NAME, FLOAT32, UINT8, DType
from gradserver.protocol.errors import InvalidArgumentError, UnsupportedOperationError
from gradserver.protocol.exchange import (
    DIVIDED,
    JOINED,
    PORTIONED,
    ExchangeKey,
    Kind,
    Op,
    Operation,
    Stream,
    check_reducible,
    gets,
    gives,
    layout_of,
)
from gradserver.protocol.limits import MAX_NUMEL, MAX_WORLD_SIZE, MIN_CREDIT_BYTES, MIN_SLICE_COST, SLICE_BYTES

DTYPES = st.sampled_from(sorted(BY_CODE.values(), key=lambda dtype: dtype.code))
WORLDS = st.integers(1, 9) | st.integers(1, MAX_WORLD_SIZE)
CUT = [kind for kind in Kind if kind is not Kind.BARRIER and kind not in DIVIDED]
TENSOR_KINDS = st.sampled_from(CUT)


@given(TENSOR_KINDS, DTYPES, st.integers(0, 2_000_000), WORLDS)
@example(Kind.ALL_GATHER, BY_NAME["complex128"], 1000, MAX_WORLD_SIZE)
@example(Kind.ALL_REDUCE, FLOAT32, SLICE_BYTES // 4, 2)
@example(Kind.ALL_REDUCE, FLOAT32, SLICE_BYTES // 4 + 1, 2)
def test_slices_tile_the_tensor(kind: Kind, dtype: DType, numel: int, world: int) -> None:
    layout = layout_of(Operation(kind, Op.NONE, dtype, numel), world)

    assert_tiled([layout.span(index) for index in range(layout.count)], numel)
    assert {layout.owner(index) for index in range(layout.count)} <= {0}


def assert_tiled(spans: list[tuple[int, int]], numel: int) -> None:
    """Check that the spans cover [0, numel), one behind the other, none of them empty."""
    edge = 0
    for start, stop in spans:
        assert start == edge
        assert stop > start
        edge = stop
    assert edge == numel


@given(DTYPES, st.integers(0, 400_000), WORLDS)
@example(FLOAT32, SLICE_BYTES // 4, 3)
@example(FLOAT32, SLICE_BYTES // 4 + 1, 3)
def test_slices_of_a_reduce_scatter_tile_each_chunk_and_stay_inside_it(dtype: DType, chunk: int, world: int) -> None:
    layout = layout_of(Operation(Kind.REDUCE_SCATTER, Op.SUM, dtype, chunk * world), world)
    spans = [layout.span(index) for index in range(layout.count)]

    assert_tiled(spans, chunk * world)
    for index, (start, stop) in enumerate(spans):
        owner = layout.owner(index)
        assert owner * chunk <= start < stop <= (owner + 1) * chunk
    assert {layout.owner(index) for index in range(layout.count)} == (set(range(world)) if chunk else set())


@given(st.sampled_from(sorted(PORTIONED)), DTYPES, st.integers(0, 400_000), WORLDS)
def test_slices_of_what_is_portioned_have_elements_for_each_rank(
    kind: Kind, dtype: DType, each: int, world: int
) -> None:
    layout = layout_of(Operation(kind, Op.NONE, dtype, each * world, 0), world)

    assert_tiled([layout.span(index) for index in range(layout.count)], each)
    for index in range(layout.count):
        start, stop = layout.span(index)
        assert layout.nbytes(index) == (stop - start) * world * dtype.itemsize <= layout.cost(index) <= SLICE_BYTES
        portion = (stop - start) * dtype.itemsize
        assert layout.reply_bytes(index, index + 1) == portion * (1 if kind is Kind.SCATTER else world)


@given(TENSOR_KINDS, DTYPES, st.integers(1, MAX_NUMEL), WORLDS, st.data())
def test_no_slice_and_no_reply_is_larger_than_a_slice_may_be(
    kind: Kind, dtype: DType, numel: int, world: int, data: st.DataObject
) -> None:
    layout = layout_of(Operation(kind, Op.NONE, dtype, numel), world)
    index = data.draw(st.integers(0, layout.count - 1))

    replies = world if kind in JOINED else 1
    assert 0 < layout.nbytes(index) * replies <= layout.cost(index) <= SLICE_BYTES <= MIN_CREDIT_BYTES
    assert layout.nbytes(index) % dtype.itemsize == 0


@given(TENSOR_KINDS, DTYPES, st.integers(1, 1000), WORLDS)
def test_even_the_smallest_slice_costs_something(kind: Kind, dtype: DType, numel: int, world: int) -> None:
    layout = layout_of(Operation(kind, Op.NONE, dtype, numel), world)

    assert all(layout.cost(index) >= MIN_SLICE_COST for index in range(layout.count))


@given(DTYPES, st.integers(1, 10**7), st.integers(2, 40))
def test_what_does_not_divide_is_refused(dtype: DType, numel: int, world: int) -> None:
    if numel % world:
        for kind in DIVIDED:
            with pytest.raises(InvalidArgumentError, match=f"{numel} elements among {world} workers.*divisible"):
                layout_of(Operation(kind, Op.SUM, dtype, numel), world)


@pytest.mark.parametrize("kind", [*CUT, *DIVIDED])
def test_an_empty_tensor_has_no_slices(kind: Kind) -> None:
    assert layout_of(Operation(kind, Op.SUM, FLOAT32, 0), 3).count == 0


def test_a_barrier_is_one_slice_without_bytes() -> None:
    layout = layout_of(Operation(Kind.BARRIER, Op.NONE, FLOAT32, 0), 5)

    assert layout.count == 1
    assert layout.nbytes(0) == 0
    assert layout.cost(0) == MIN_SLICE_COST


@given(st.integers(0, 5), st.integers(0, 5))
def test_givers_and_getters(rank: int, owner: int) -> None:
    key = ExchangeKey(Stream.TRANSFER, 0, 0, 1, 4)

    def of(kind: Kind, root: int = -1) -> tuple[bool, bool]:
        operation = Operation(kind, Op.NONE, FLOAT32, 12, root)
        return gives(operation, rank, key), gets(operation, rank, key, owner)

    assert of(Kind.ALL_REDUCE) == (True, True)
    assert of(Kind.ALL_GATHER) == (True, True)
    assert of(Kind.REDUCE_SCATTER) == (True, rank == owner)
    assert of(Kind.BROADCAST, root=2) == (rank == 2, rank != 2)
    assert of(Kind.TRANSFER) == (rank == 1, rank == 4)
    assert of(Kind.BARRIER) == (False, False)
    assert of(Kind.GATHER, root=2) == (True, rank == 2)
    assert of(Kind.SCATTER, root=2) == (rank == 2, True)
    assert of(Kind.ALL_TO_ALL) == (True, True)


@pytest.mark.parametrize("dtype", BY_CODE.values(), ids=lambda dtype: dtype.name)
def test_only_what_can_be_averaged_is_and_only_what_has_an_order_is_ordered(dtype: DType) -> None:
    for op in (Op.SUM, Op.PRODUCT, Op.FIRST):
        check_reducible(op, dtype)
    refused = set()
    for op in (Op.MEAN, Op.MIN, Op.MAX):
        try:
            check_reducible(op, dtype)
        except UnsupportedOperationError as error:
            assert dtype.name in str(error)  # noqa: PT017 - which ones raise is what is tested
            refused.add(op)

    assert refused == (set() if dtype.kind == "f" else {Op.MIN, Op.MAX} if dtype.kind == "c" else {Op.MEAN})


def test_an_operation_says_what_it_is() -> None:
    assert str(Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 7)) == "all_reduce(mean) of float32[7]"
    assert str(Operation(Kind.BROADCAST, Op.NONE, FLOAT32, 7, 0)) == "broadcast of float32[7] from rank 0"
    assert str(Operation(Kind.GATHER, Op.NONE, FLOAT32, 7, 1)) == "gather of float32[7] to rank 1"
    assert str(Operation(Kind.BARRIER, Op.NONE, UINT8, 0)) == "barrier"
    assert str(Operation(Kind.BARRIER, Op.NONE, FLOAT32, 0)) == "a collective of float32[0]"
