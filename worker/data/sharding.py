"""The batches of each worker: rank r of n takes r, r + n, r + 2n and so on.

Interleaving keeps shards disjoint and complete without any message between workers, and lets their sizes differ by at
most one. Nothing is padded: a worker with a shorter or empty shard simply has fewer batches.
"""

from __future__ import annotations

from gradserver.protocol.errors import InvalidRankError, InvalidWorldSizeError
from gradserver.protocol.whole import whole_number


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Return both as plain ints, when ``0 <= rank < world_size``.

    Raises InvalidWorldSizeError when ``world_size`` is not a positive integer, and InvalidRankError when ``rank`` is
    not one of ``0 … world_size - 1``.
    """
    world_size = whole_number(world_size, "world_size", least=1, error=InvalidWorldSizeError)
    rank = whole_number(rank, "rank", error=InvalidRankError)
    if rank >= world_size:
        raise InvalidRankError(f"rank must be below world_size, but {rank} is not below {world_size}")
    return rank, world_size


def shard_batches(num_batches: int, rank: int, world_size: int) -> range:
    """Return the batch numbers of one worker: ``rank``, ``rank + world_size``, … below ``num_batches``.

    Over all ranks they cover ``0 … num_batches - 1``, each number once. With fewer batches than workers, the range of
    the last ranks is empty.

    Raises:
        InvalidArgumentError: ``num_batches`` is negative.
        InvalidWorldSizeError: ``world_size`` is not a positive number.
        InvalidRankError: ``rank`` is not one of ``0 … world_size - 1``.
    """
    rank, world_size = check_rank(rank, world_size)
    return range(rank, whole_number(num_batches, "num_batches"), world_size)
