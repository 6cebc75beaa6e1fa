"""A torch sampler that gives each worker its own, disjoint part of a data set.

Every rank draws the same permutation for an epoch (`gradserver.worker.data.permutation`) and takes an interleaved
shard of it. So no message is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, get_args

import numpy as np
from torch.utils.data import Sampler

from gradserver.protocol.errors import InvalidArgumentError, InvalidRankError, InvalidWorldSizeError
from gradserver.protocol.nearest import names_keywords
from gradserver.protocol.whole import whole_number
from gradserver.worker.data.permutation import epoch_permutation, key_half, length_of
from gradserver.worker.data.sharding import check_rank, shard_batches

if TYPE_CHECKING:
    from gradserver.worker.data.permutation import Indices

Uneven: TypeAlias = Literal["pad", "drop", "keep"]
"""The treatment of an epoch's samples that do not divide evenly among the ranks."""

_CHUNK: Final = 4096
"""Samples turned into Python ints at a time: the whole shard as ints takes five times its memory."""


class HasRank(Protocol):
    """The properties of a worker that `ShardSampler.for_worker` reads."""

    @property
    def rank(self) -> int:
        """The rank, from 0 to ``world_size - 1``."""

    @property
    def world_size(self) -> int:
        """The number of workers in the group."""


class ShardSampler(Sampler[int]):
    """Sampler of one rank: an interleaved shard of a permutation that all ranks share.

    For example:

        sampler = ShardSampler(dataset, rank=0, world_size=4, seed=17)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    ``world_size`` does not always divide the number of samples. ``uneven`` decides what happens then:

    - ``"pad"``: all shards are equally long, as with torch's DistributedSampler. Up to ``world_size - 1`` samples from
      the beginning of the epoch's order are given a second time. All ranks have equally many batches, so that a plain
      loop works.
    - ``"drop"``: all shards are equally long. The last ``length % world_size`` samples of the epoch's order are
      omitted. With shuffling, each epoch omits other samples.
    - ``"keep"``: shards are disjoint, cover every sample, and differ in size by at most one. Some ranks may have one
      batch more than others, so the loop needs `DistributedDataParallel.join` or `Job.batches`.

    ``rank``, ``world_size``, ``uneven``, ``epoch``, ``start`` and ``done`` can be read. `set_epoch` changes the last
    three. A worker needs a new sampler when its rank or world size has changed. It can continue within an epoch.

    Args:
        dataset_or_length: any object with a length, or the number of samples; the same length on every rank.
        rank: rank of this worker.
        world_size: number of workers.
        shuffle: true for a new order in each epoch, the same on every rank. Otherwise rank r of n reads r, r + n,
            r + 2n, ….
        seed: 0 … 2⁶⁴ - 1, the same on every rank. With the epoch, it is the only source of randomness.
        uneven: ``"pad"`` (default), ``"drop"`` or ``"keep"``, the same on every rank.
        num_replicas: torch's name for ``world_size``.
        drop_last: torch's name for ``uneven="drop"``.

    Raises:
        InvalidArgumentError: the object has no length, the seed is out of range, or ``uneven`` is unknown.
        InvalidRankError: the rank is out of range.
        InvalidWorldSizeError: the world size is not a positive number.
    """

    @names_keywords
    def __init__(
        self,
        dataset_or_length: Sized | int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Uneven | None = None,
        num_replicas: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.rank, self.world_size = _place(rank, world_size, num_replicas)
        self._all_samples = length_of(dataset_or_length)
        self.uneven: Uneven = _uneven(uneven, drop_last)
        self._shuffle = bool(shuffle)
        self._seed = key_half(seed, "seed")
        self.set_epoch(0)

    @classmethod
    def for_worker(
        cls,
        dataset_or_length: Sized | int,
        worker: HasRank,
        *,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Uneven | None = None,
        drop_last: bool = False,
    ) -> ShardSampler:
        """Create a sampler for the present rank and world size of ``worker``; see the constructor for the rest."""
        return cls(
            dataset_or_length,
            worker.rank,
            worker.world_size,
            shuffle=shuffle,
            seed=seed,
            uneven=uneven,
            drop_last=drop_last,
        )

    def set_epoch(self, epoch: int, start: int = 0, done: Sequence[Sequence[int]] = ()) -> None:
        """Choose the order of the next iteration, and where in this rank's shard it begins.

        Without this call each iteration repeats the same epoch. An iteration that has begun does not change.

        Args:
            epoch: 0 … 2⁶⁴ - 1, the same on every rank.
            start: number of this rank's own samples (not batches) to skip. It is the number that the rank had used of
                this epoch before a stop. Every iteration and ``len`` omit them until the next call. It needs the same
                rank and world size as before the stop.
            done: number of samples that each rank had used of this epoch, the same on every rank: ``[(3, 3, 2)]`` for
                three workers. Counts of later workers, which used the rest, follow. The remaining samples are dealt
                anew. Each of them is given once, but for those that ``uneven="pad"`` repeats. If the last counts are
                for as many workers as there are now, each rank continues in its own shard instead, which sets
                ``start``.

        Raises:
            InvalidArgumentError: ``epoch`` or ``start`` is out of range, or ``done`` counts samples that its ranks did
                not have. Nothing changes.
        """
        epoch = key_half(epoch, "epoch")
        start = whole_number(start, "start")
        stages = [tuple(whole_number(count, "a count of done") for count in counts) for counts in done]
        if stages and len(stages[-1]) == self.world_size:
            start += stages.pop()[self.rank]
        left = self._left_by(stages) if stages else None
        samples = self._dealt(self._all_samples if left is None else len(left), self.world_size)
        shard = shard_batches(samples, self.rank, self.world_size)
        if start > len(shard):
            raise InvalidArgumentError(
                f"cannot start at sample {start}: the shard of rank {self.rank} of {self.world_size} "
                f"has {len(shard)} samples"
            )
        self.epoch, self.start, self.done = epoch, start, tuple(stages)
        self._left, self._shard = left, shard

    @property
    def order(self) -> dict[str, int | bool | str]:
        """Parameters that determine an epoch's order, besides its number. They are the same on every rank."""
        return {"length": self._all_samples, "shuffle": self._shuffle, "seed": self._seed, "uneven": self.uneven}

    def __len__(self) -> int:
        """The number of samples that the next iteration gives."""
        return len(self._shard) - self.start

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of the epoch, from ``start`` on, as plain ints."""
        left = self._left
        samples = self._all_samples if left is None else len(left)
        positions = self._shard[self.start :]
        padded = len(positions) > 0 and positions[-1] >= samples
        if not self._shuffle and left is None:
            return (position % samples for position in positions) if padded else iter(positions)
        # Drawn now, not at the first sample: a set_epoch in between must not change a running epoch. The order is of
        # all samples, even those that uneven="drop" leaves out, so that it picks others each time. The copy frees the
        # other ranks' part.
        order = epoch_permutation(self._all_samples, self._seed, self.epoch) if self._shuffle else None
        if left is not None:
            order = left if order is None else order[left]
        assert order is not None
        if padded:
            return _as_ints(order[np.arange(positions.start, positions.stop, positions.step) % samples])
        return _as_ints(order[positions.start : positions.stop : positions.step].copy())

    def _dealt(self, samples: int, world_size: int) -> int:
        """Return how many of ``samples`` are dealt among all ranks. With ``"pad"`` it is more than there are."""
        rest = samples % world_size
        if not rest or self.uneven == "keep":
            return samples
        return samples - rest if self.uneven == "drop" else samples + world_size - rest

    def _left_by(self, stages: list[tuple[int, ...]]) -> Indices:
        """Return the positions in the epoch's order that no rank had, by the counts of each rank in ``stages``."""
        left = np.arange(self._all_samples)
        for counts in stages:
            if not counts:
                raise InvalidArgumentError("done has an empty entry: each says what at least one rank had")
            dealt = max(len(left), self._dealt(len(left), len(counts)))
            for rank, count in enumerate(counts):
                if count > len(shard_batches(dealt, rank, len(counts))):
                    raise InvalidArgumentError(
                        f"done says that rank {rank} of {len(counts)} had {count} samples, and its shard of "
                        f"{len(left)} samples had fewer: it is of another data set, or of another epoch"
                    )
            turn, rank_of = np.divmod(np.arange(len(left)), len(counts))
            left = left[turn >= np.array(counts)[rank_of]]
        return left


def _place(rank: int | None, world_size: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return rank and world size of a sampler. torch calls the second ``num_replicas``."""
    if world_size is None:
        world_size = num_replicas
    elif num_replicas is not None and num_replicas != world_size:
        raise InvalidWorldSizeError(f"world_size is {world_size!r} and num_replicas is {num_replicas!r}: give one")
    how = "call ShardSampler.for_worker(dataset, worker), or give rank and world_size: ShardSampler(dataset, 0, 4)"
    if rank is not None and not hasattr(rank, "__index__"):
        raise InvalidRankError(f"rank is of the type {type(rank).__name__}, and must be a whole number: {how}")
    if world_size is None:
        raise InvalidWorldSizeError(f"world_size was not given: {how}")
    if rank is None:
        raise InvalidRankError(f"rank was not given: {how}")
    return check_rank(rank, world_size)


def _uneven(uneven: Uneven | None, drop_last: bool) -> Uneven:
    """Return the treatment of uneven samples. ``drop_last`` is torch's name for ``"drop"``."""
    if uneven is None:
        return "drop" if drop_last else "pad"
    if uneven not in get_args(Uneven):
        raise InvalidArgumentError(f"uneven is 'pad', 'drop' or 'keep', not {uneven!r}")
    if drop_last and uneven != "drop":
        raise InvalidArgumentError(f"drop_last=True means uneven='drop', and uneven is {uneven!r}: give one")
    return uneven


def _as_ints(indices: Indices) -> Iterator[int]:
    for at in range(0, len(indices), _CHUNK):
        yield from indices[at : at + _CHUNK].tolist()
