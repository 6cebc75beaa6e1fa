"""Interleaved shards: disjoint, complete, possibly empty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.errors import InvalidArgumentError, InvalidRankError, InvalidWorldSizeError
from gradserver.protocol.whole import whole_number
from gradserver.worker.data.sharding import check_rank, shard_batches

ROOT = Path(__file__).resolve().parents[1]


def test_two_workers_take_even_and_odd_batches() -> None:
    even, odd = shard_batches(10, 0, 2), shard_batches(10, 1, 2)

    assert list(even) == [0, 2, 4, 6, 8]
    assert list(odd) == [1, 3, 5, 7, 9]
    assert not set(even) & set(odd)
    assert sorted([*even, *odd]) == list(range(10))


def test_uneven() -> None:
    shards = [list(shard_batches(7, rank, 3)) for rank in range(3)]

    assert shards == [[0, 3, 6], [1, 4], [2, 5]]


def test_single_worker_takes_all() -> None:
    assert list(shard_batches(5, 0, 1)) == [0, 1, 2, 3, 4]


def test_more_workers_than_batches() -> None:
    shards = [list(shard_batches(2, rank, 4)) for rank in range(4)]

    assert shards == [[0], [1], [], []]


def test_a_shard_is_a_range() -> None:
    assert shard_batches(10**15, 3, 8) == range(3, 10**15, 8)
    assert isinstance(shard_batches(0, 0, 1), range)


@given(num_batches=st.integers(0, 300), world_size=st.integers(1, 40))
def test_shards_are_disjoint_complete_and_balanced(num_batches: int, world_size: int) -> None:
    shards = [shard_batches(num_batches, rank, world_size) for rank in range(world_size)]

    together = [batch for shard in shards for batch in shard]
    assert len(together) == len(set(together)), "disjoint"
    assert set(together) == set(range(num_batches)), "complete"
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the lowest ranks have the longer shards"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((10, 2, 2), InvalidRankError, "rank must be below world_size, but 2 is not below 2"),
        ((10, -1, 2), InvalidRankError, "rank must be at least 0, not -1"),
        ((10, "1", 2), InvalidRankError, "rank must be an integer, not '1' (str)"),
        ((10, True, 2), InvalidRankError, "rank must be an integer, not True (bool)"),
        ((10, 0, 0), InvalidWorldSizeError, "world_size must be at least 1, not 0"),
        ((10, 0, -3), InvalidWorldSizeError, "world_size must be at least 1, not -3"),
        ((10, 0, 2.0), InvalidWorldSizeError, "world_size must be an integer, not 2.0 (float)"),
        ((10, 0, None), InvalidWorldSizeError, "world_size must be an integer, not None (NoneType)"),
        ((-1, 0, 2), InvalidArgumentError, "num_batches must be at least 0, not -1"),
        ((2.5, 0, 2), InvalidArgumentError, "num_batches must be an integer, not 2.5 (float)"),
    ],
)
def test_errors(arguments: tuple[int, int, int], error: type[InvalidArgumentError], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        shard_batches(*arguments)

    assert type(caught.value) is error
    assert str(caught.value) == text


def test_integers_of_numpy_are_integers() -> None:
    rank, world_size = check_rank(np.int64(1), np.uint8(3))  # type: ignore[arg-type]

    assert (rank, world_size) == (1, 3)
    assert type(rank) is type(world_size) is int
    assert list(shard_batches(np.int32(7), rank, world_size)) == [1, 4]  # type: ignore[arg-type]


def test_whole_number_accepts_its_lower_bound() -> None:
    assert whole_number(4, "n", least=4) == 4
    with pytest.raises(InvalidArgumentError, match=r"^n must be at least 4, not 3$"):
        whole_number(3, "n", least=4)


def test_needs_no_torch() -> None:
    modules = "gradserver.worker.data.sharding, gradserver.worker.torch_ddp.flatten"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
