"""Tests of the sampler: one permutation for all ranks, sharded; the same on every machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.errors import InvalidArgumentError, InvalidRankError, InvalidWorldSizeError

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from gradserver.worker.data.permutation import epoch_permutation  # noqa: E402
from gradserver.worker.data.sampler import ShardSampler, Uneven  # noqa: E402
from tests.refusals import refused  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

lengths = st.integers(0, 200)
world_sizes = st.integers(1, 12)
keys = st.integers(0, 2**64 - 1)


def shards(length: int, world_size: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """Return the shard of every rank in one epoch."""
    samplers = [ShardSampler(length, rank, world_size, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(shard) for shard in drawn]
    return drawn


def of_torch(length: int, world_size: int, rank: int, drop_last: bool = False) -> list[int]:
    """Return the samples of torch's own sampler without shuffling."""
    data: Any = range(length)
    return list(DistributedSampler[int](data, world_size, rank, shuffle=False, drop_last=drop_last))


# --- shards ----------------------------------------------------------------------------------------


@given(length=lengths, world_size=world_sizes, shuffle=st.booleans(), seed=keys, epoch=keys)
def test_kept_shards_are_disjoint_complete_and_balanced(
    length: int, world_size: int, shuffle: bool, seed: int, epoch: int
) -> None:
    drawn = shards(length, world_size, epoch, shuffle=shuffle, seed=seed, uneven="keep")

    assert sorted(sample for shard in drawn for sample in shard) == list(range(length))
    sizes = [len(shard) for shard in drawn]
    assert max(sizes) - min(sizes) <= 1


@given(length=lengths, world_size=world_sizes, shuffle=st.booleans(), epoch=keys)
def test_by_default_shards_are_padded_to_one_length_as_torch_does(
    length: int, world_size: int, shuffle: bool, epoch: int
) -> None:
    drawn = shards(length, world_size, epoch, shuffle=shuffle)
    kept = shards(length, world_size, epoch, shuffle=shuffle, uneven="keep")

    assert {len(shard) for shard in drawn} == {-(-length // world_size)}
    assert [shard[: len(own)] for shard, own in zip(drawn, kept, strict=True)] == kept
    order = [shard[turn] for turn in range(len(drawn[0])) for shard in drawn]
    assert order == (order[:length] * world_size)[: len(order)], "repeated from the beginning of the epoch's order"
    if length and not shuffle:
        assert drawn == [of_torch(length, world_size, rank) for rank in range(world_size)]


def test_torch_s_names_mean_what_they_mean_there() -> None:
    for drop in (False, True):
        sampler = ShardSampler(range(11), num_replicas=4, rank=3, shuffle=False, drop_last=drop)
        assert list(sampler) == of_torch(11, 4, 3, drop_last=drop)
        assert sampler.uneven == ("drop" if drop else "pad")
    assert ShardSampler(11, 1, 4, num_replicas=4).world_size == 4


@given(length=lengths, world_size=world_sizes, shuffle=st.booleans(), epoch=keys)
def test_drop_makes_equal_shards_and_drops_only_the_remainder(
    length: int, world_size: int, shuffle: bool, epoch: int
) -> None:
    drawn = shards(length, world_size, epoch, shuffle=shuffle, uneven="drop")

    assert {len(shard) for shard in drawn} == {length // world_size}
    together = [sample for shard in drawn for sample in shard]
    assert len(set(together)) == len(together) == length - length % world_size
    assert set(together) <= set(range(length))


@given(length=lengths, world_size=world_sizes, epoch=keys)
def test_drop_only_shortens(length: int, world_size: int, epoch: int) -> None:
    whole = shards(length, world_size, epoch, uneven="keep")
    dropped = shards(length, world_size, epoch, uneven="drop")

    assert [shard[: length // world_size] for shard in whole] == dropped


def test_drop_leaves_out_other_samples_in_other_epochs() -> None:
    left_out = [set(range(11)).difference(*shards(11, 4, epoch, uneven="drop")) for epoch in range(20)]

    assert all(len(samples) == 3 for samples in left_out)
    assert set.union(*left_out) == set(range(11))


def test_without_shuffle_shards_interleave() -> None:
    assert shards(7, 3, shuffle=False) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert shards(7, 3, shuffle=False, uneven="keep") == [[0, 3, 6], [1, 4], [2, 5]]
    assert shards(7, 3, shuffle=False, uneven="drop") == [[0, 3], [1, 4], [2, 5]]
    assert shards(2, 4, shuffle=False, uneven="keep") == [[0], [1], [], []]
    assert shards(2, 5, shuffle=False) == [[0], [1], [0], [1], [0]]


@given(length=lengths, world_size=world_sizes, seed=keys, epoch=keys)
def test_ranks_shard_the_permutation_that_one_worker_would_read(
    length: int, world_size: int, seed: int, epoch: int
) -> None:
    (alone,) = shards(length, 1, epoch, seed=seed)

    kept = shards(length, world_size, epoch, seed=seed, uneven="keep")
    assert kept == [alone[rank::world_size] for rank in range(world_size)]


def test_samples_are_plain_ints_also_over_several_chunks() -> None:
    drawn = list(ShardSampler(20_000, 1, 2))

    assert len(set(drawn)) == 10_000
    assert {type(sample) for sample in drawn} == {int}


# --- epochs ----------------------------------------------------------------------------------------


def test_each_epoch_has_an_order_of_its_own() -> None:
    sampler = ShardSampler(50, 0, 2, seed=3)
    orders = []
    for epoch in range(30):
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))

    assert len(set(orders)) == 30
    assert len({frozenset(order) for order in orders}) == 30, "shards are not the same samples rearranged"


def test_an_epoch_repeats_until_the_next_is_set() -> None:
    sampler = ShardSampler(50, 0, 2)
    first = list(sampler)

    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_without_shuffle_epochs_are_alike() -> None:
    assert shards(9, 2, 0, shuffle=False) == shards(9, 2, 5, shuffle=False)


def test_seeds_differ_and_do_not_swap_with_epochs() -> None:
    orders = {tuple(epoch_permutation(40, seed, epoch)) for seed in range(12) for epoch in range(12)}

    assert len(orders) == 144


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_iteration_that_has_begun_keeps_its_epoch(shuffle: bool) -> None:
    sampler = ShardSampler(30, 0, 2, shuffle=shuffle)
    expected = list(sampler)

    running = iter(sampler)
    sampler.set_epoch(1, start=4)
    assert list(running) == expected


# --- resuming --------------------------------------------------------------------------------------


@given(
    data=st.data(),
    length=lengths,
    world_size=world_sizes,
    shuffle=st.booleans(),
    uneven=st.sampled_from(["pad", "drop", "keep"]),
    epoch=keys,
)
def test_start_skips_what_this_rank_had_consumed(
    data: st.DataObject, length: int, world_size: int, shuffle: bool, uneven: Uneven, epoch: int
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    sampler = ShardSampler(length, rank, world_size, shuffle=shuffle, uneven=uneven)
    sampler.set_epoch(epoch)
    whole = list(sampler)
    start = data.draw(st.integers(0, len(whole)))

    sampler.set_epoch(epoch, start=start)

    assert len(sampler) == len(whole) - start
    assert list(sampler) == whole[start:]
    assert list(sampler) == whole[start:], "until the next set_epoch"


@given(
    data=st.data(),
    length=lengths,
    world_sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    shuffle=st.booleans(),
    uneven=st.sampled_from(["pad", "drop", "keep"]),
)
def test_other_numbers_of_workers_go_on_with_what_is_left(
    data: st.DataObject, length: int, world_sizes: list[int], shuffle: bool, uneven: Uneven
) -> None:
    """Test stops with each rank in a place of its own, any number of times; only the last ones come to the end."""
    done: list[list[int]] = []
    used: list[int] = []
    for stage, world_size in enumerate(world_sizes, 1):
        own = done.pop() if done and len(done[-1]) == world_size else [0] * world_size
        counts = []
        for rank in range(world_size):
            sampler = ShardSampler(length, rank, world_size, shuffle=shuffle, seed=4, uneven=uneven)
            sampler.set_epoch(9, done=[*done, own])
            samples = list(sampler)
            assert (sampler.start, sampler.done, len(sampler)) == (own[rank], tuple(map(tuple, done)), len(samples))
            count = data.draw(st.integers(0, len(samples))) if stage < len(world_sizes) else len(samples)
            used += samples[:count]
            counts.append(own[rank] + count)
        done.append(counts)
    assert uneven == "pad" or len(set(used)) == len(used)
    assert uneven == "drop" or sorted(set(used)) == list(range(length))
    assert length - len(set(used)) < world_sizes[-1], "what earlier ones would have dropped is not lost"
    assert len(used) - len(set(used)) <= sum(world_sizes) - len(world_sizes), "fewer than one for each rank"


def test_as_many_workers_as_before_go_on_in_their_own_shards() -> None:
    for rank, count in enumerate((4, 0, 3)):
        sampler = ShardSampler(20, rank, 3)
        sampler.set_epoch(5)
        whole = list(sampler)
        sampler.set_epoch(5, done=[(4, 0, 3)])
        assert list(sampler) == whole[count:]


def test_the_next_epoch_starts_at_its_beginning() -> None:
    sampler = ShardSampler(20, 0, 2)
    sampler.set_epoch(3, start=6)
    assert (sampler.epoch, sampler.start, len(sampler)) == (3, 6, 4)

    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.start, len(sampler)) == (4, 0, 10)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 5), "cannot start at sample 5: the shard of rank 1 of 3 has 4 samples"),
        ((0, -1), "start must be at least 0, not -1"),
        ((0, 1.5), "start must be an integer, not 1.5 (float)"),
        ((-1, 0), "epoch must be at least 0, not -1"),
        ((2**64, 0), f"epoch must be below 2**64, not {2**64}"),
        ((0, 0, [(0, 5, 0)]), "cannot start at sample 5: the shard of rank 1 of 3 has 4 samples"),
        ((0, 0, [(3, -1)]), "a count of done must be at least 0, not -1"),
        ((0, 0, [()]), "done has an empty entry: each says what at least one rank had"),
        (
            (0, 0, [(2, 7)]),
            "done says that rank 1 of 2 had 7 samples, and its shard of 11 samples had fewer: it is of another data "
            "set, or of another epoch",
        ),
    ],
)
def test_a_refused_set_epoch_changes_nothing(arguments: tuple[Any, ...], text: str) -> None:
    sampler = ShardSampler(11, 1, 3)
    sampler.set_epoch(7, start=2)

    with refused(InvalidArgumentError, text):
        sampler.set_epoch(*arguments)
    assert (sampler.epoch, sampler.start) == (7, 2)


# --- the permutation -------------------------------------------------------------------------------


def philox_4x64_10(counter: int, key: tuple[int, int]) -> list[int]:
    """Compute one block of four words, after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""
    mask = 2**64 - 1
    a, b, c, d = (counter >> shift & mask for shift in (0, 64, 128, 192))
    k0, k1 = key
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (right >> 64) ^ b ^ k0, right & mask, (left >> 64) ^ d ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [a, b, c, d]


def test_the_reference_generator_is_the_published_one() -> None:
    # From the known-answer tests that come with the paper's own implementation.
    assert philox_4x64_10(0, (0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@given(length=st.integers(0, 60), seed=keys, epoch=keys)
def test_the_permutation_can_be_had_without_numpy(length: int, seed: int, epoch: int) -> None:
    # numpy counts blocks from 1.
    words = [word for block in range(length // 4 + 1) for word in philox_4x64_10(block + 1, (seed, epoch))]

    expected = sorted(range(length), key=words[:length].__getitem__)
    assert epoch_permutation(length, seed, epoch).tolist() == expected


def test_the_permutation_never_changes() -> None:
    """Test fixed values: a change alters the order of the data in all resumed runs."""
    assert epoch_permutation(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert digest(epoch_permutation(100_000, 17, 3)) == (
        "5d0e62281663932e98af3c10644e9cd47d51e0efc002e5c366d00fac138ccf6f"
    )


def digest(samples: Any) -> str:
    return hashlib.sha256(np.asarray(samples, dtype="<i8").tobytes()).hexdigest()


def test_every_process_draws_the_same_permutation() -> None:
    """Test another process than this one: its hashes and its generators have other seeds."""
    code = (
        "import hashlib, sys, numpy as np, torch\n"
        "from gradserver.worker.data.sampler import ShardSampler, Uneven\n"
        "np.random.seed(int(sys.argv[1])); torch.manual_seed(int(sys.argv[1]))\n"
        "sampler = ShardSampler(5000, 1, 3, seed=11)\n"
        "sampler.set_epoch(2)\n"
        "print(hashlib.sha256(np.asarray(list(sampler), dtype='<i8').tobytes()).hexdigest())\n"
    )
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    printed = subprocess.run(
        [sys.executable, "-c", code, hash_seed],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
    ).stdout.strip()

    assert printed == digest(shards(5000, 3, 2, seed=11)[1])


def test_draws_from_no_shared_generator_and_disturbs_none() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1), np.random.default_rng(0)
    before = np.random.get_state()[1].copy()  # type: ignore[index]

    torch.manual_seed(5)
    first = list(ShardSampler(100, 0, 2, seed=1))
    torch_after = torch.rand(1)

    assert torch.equal(torch_after, expected[0])
    assert np.array_equal(np.random.get_state()[1], before)  # type: ignore[index]
    assert list(ShardSampler(100, 0, 2, seed=1)) == first


def test_all_orders_are_equally_likely() -> None:
    draws = 24 * 200
    counts = Counter(tuple(epoch_permutation(4, 9, epoch).tolist()) for epoch in range(draws))

    assert set(counts) == set(permutations(range(4)))
    # Chi-squared with 23 degrees of freedom exceeds 49.7 once in a thousand; these draws are fixed.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7


def test_the_permutation_is_int64() -> None:
    order = epoch_permutation(5, 0, 0)

    assert order.shape == (5,)
    assert order.dtype == np.int64
    assert epoch_permutation(0, 0, 0).shape == (0,)


# --- what it is made from --------------------------------------------------------------------------


class FakeWorker:
    rank = 2
    world_size = 5


def test_for_worker_takes_rank_and_world_size_from_it() -> None:
    sampler = ShardSampler.for_worker(range(23), FakeWorker(), seed=4, uneven="drop")

    assert isinstance(sampler, ShardSampler)
    assert (sampler.rank, sampler.world_size) == (2, 5)
    assert list(sampler) == list(ShardSampler(23, 2, 5, seed=4, uneven="drop"))
    assert list(ShardSampler.for_worker(23, FakeWorker(), shuffle=False)) == [2, 7, 12, 17, 22]


@pytest.mark.parametrize(
    "data",
    [12, np.int64(12), list("a" * 12), np.zeros((12, 3)), torch.zeros(12, 3), TensorDataset(torch.ones(12))],
)
def test_takes_anything_with_a_length_or_the_length(data: Any) -> None:
    assert list(ShardSampler(data, 0, 4, shuffle=False)) == [0, 4, 8]


class Unsized(Dataset[int]):
    def __getitem__(self, item: int) -> int:
        return item


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NotYet(Unsized):
    def __len__(self) -> int:
        raise NotImplementedError("not read yet")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (-1, "the number of samples must be at least 0, not -1"),
        (1.5, "the number of samples must be an integer, not 1.5 (float)"),
        (True, "the number of samples must be an integer, not True (bool)"),
        (None, "the number of samples must be an integer, not None (NoneType)"),
        (
            Unsized(),
            "Unsized has no length, so it cannot be sharded by index; give a data set with __len__ or the "
            "number of samples",
        ),
        (
            Stream(),
            "Stream has no length, so it cannot be sharded by index; give a data set with __len__ or the "
            "number of samples",
        ),
        (NotYet(), "the length of NotYet is not known: not read yet"),
        (torch.tensor(3), "the length of Tensor is not known: len() of a 0-d tensor"),
        ("data/train", "need a data set or its length, not the str 'data/train'"),
    ],
)
def test_without_a_length_it_says_so(data: Any, text: str) -> None:
    with refused(InvalidArgumentError, text):
        ShardSampler(data, 0, 1)


def test_other_errors_of_the_constructor() -> None:
    with refused(InvalidRankError, "rank must be below world_size, but 3 is not below 3"):
        ShardSampler(10, 3, 3)
    with refused(InvalidWorldSizeError, "world_size must be at least 1, not 0"):
        ShardSampler(10, 0, 0)
    with refused(InvalidArgumentError, "seed must be at least 0, not -1"):
        ShardSampler(10, 0, 1, seed=-1)
    with refused(InvalidArgumentError, "seed must be below 2**64, not 18446744073709551616"):
        ShardSampler(10, 0, 1, seed=2**64)
    assert len(ShardSampler(10, 0, 1, seed=2**64 - 1)) == 10
    with refused(InvalidArgumentError, "uneven is 'pad', 'drop' or 'keep', not 'wrap'"):
        ShardSampler(10, 0, 1, uneven="wrap")  # type: ignore[arg-type]
    with refused(InvalidArgumentError, "drop_last=True means uneven='drop', and uneven is 'keep': give one"):
        ShardSampler(10, 0, 1, uneven="keep", drop_last=True)
    with refused(InvalidWorldSizeError, "world_size is 2 and num_replicas is 3: give one"):
        ShardSampler(10, 0, 2, num_replicas=3)
    how = "call ShardSampler.for_worker(dataset, worker), or give rank and world_size: ShardSampler(dataset, 0, 4)"
    with refused(InvalidWorldSizeError, f"world_size was not given: {how}"):
        ShardSampler(10)
    with refused(InvalidRankError, f"rank was not given: {how}"):
        ShardSampler(10, num_replicas=3)
    with refused(InvalidRankError, f"rank is of the type object, and must be a whole number: {how}"):
        ShardSampler(10, object())  # type: ignore[arg-type]


# --- in a DataLoader -------------------------------------------------------------------------------


def loaders(length: int, world_size: int, batch_size: int, **options: Any) -> list[Any]:
    dataset = TensorDataset(torch.arange(length))
    return [
        DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=ShardSampler(dataset, rank, world_size, seed=8, uneven="keep"),
            **options,
        )
        for rank in range(world_size)
    ]


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_cover_the_data_in_every_epoch(workers: int) -> None:
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    all_ranks = loaders(23, 3, 4, **options)
    orders = []
    for epoch in range(3):
        drawn = []
        for loader in all_ranks:
            loader.sampler.set_epoch(epoch)
            drawn.append(read(loader))

        assert sorted(sample for rank in drawn for batch in rank for sample in batch) == list(range(23))
        assert [len(rank) for rank in drawn] == [len(loader) for loader in all_ranks]
        assert drawn[0] == read(all_ranks[0]), "an epoch can be read again"
        orders.append(str(drawn))

    assert len(set(orders)) == 3


def test_ranks_may_have_different_numbers_of_batches() -> None:
    assert [len(read(loader)) for loader in loaders(13, 3, 4)] == [2, 1, 1]


def test_a_loader_goes_on_where_it_stopped() -> None:
    (loader,) = loaders(20, 1, 4)
    loader.sampler.set_epoch(1)
    whole = read(loader)

    loader.sampler.set_epoch(1, start=2 * 4)

    assert len(loader) == 3
    assert read(loader) == whole[2:]


def test_it_is_a_torch_sampler() -> None:
    assert isinstance(ShardSampler(3, 0, 1), Sampler)
