"""What a round's results must be: the published rule of means, written out once more and apart from the reducer.

for each element, over the contributions that counted for it, in the order of seats, in fp32:
one contribution           g
all of the same weight     (g₀ + g₁ + …) / n
otherwise                  (w₀·g₀ + w₁·g₁ + …) / (w₀ + w₁ + …)
none, or all of weight 0   0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradserver.chaos import generator
from protocol.exchange import ExchangeKey, Stream
from protocol.shards import Share, Table, comparable

Array = npt.NDArray[Any]


class Giver(NamedTuple):
    """Somebody who contributed to a round; whoever departed in it has ``cut``, slices that counted by bucket."""

    seat: int
    name: str
    weight: float
    cut: tuple[int, ...] | None = None


def mean(rows: Sequence[tuple[float, Array]], size: int) -> Array:
    """The mean of rows with their weights, which are in the order of seats."""
    given = [(weight, row) for weight, row in rows if weight > 0]
    if not given:
        return np.zeros(size, np.float32)
    weights = [weight for weight, _ in given]
    if len(given) == 1:
        return given[0][1].copy()
    if min(weights) == max(weights):
        total = given[0][1] + given[1][1]
        for _, row in given[2:]:
            total += row
        total /= np.float32(len(given))
        return total
    total = given[0][1] * np.float32(weights[0])
    for weight, row in given[1:]:
        total += row * np.float32(weight)
    total /= np.float32(sum(weights))
    return total


def shares(count: int) -> list[Share]:
    """How the buckets of a chaos run are cut among so many data shards."""
    table = Table(1, comparable([None] * count))
    table.set_plan(generator.plan())
    return [
        table.share(ExchangeKey(Stream.BUCKET, 0, part), bucket.operation)
        for part, bucket in enumerate(generator.plan().buckets)
    ]


def prefixes(share: Share, counted: int) -> Iterator[frozenset[int]]:
    """The slices that can be meant when so many of somebody counted: each shard counts from its first one on."""
    intervals = [range(start, stop) for start, stop in itertools.pairwise(share.bounds) if start < stop]
    for lengths in itertools.product(*(range(len(interval) + 1) for interval in intervals)):
        if sum(lengths) == counted:
            yield frozenset(
                index for interval, length in zip(intervals, lengths, strict=True) for index in interval[:length]
            )


def bucket(
    share: Share, rows: Sequence[tuple[int, float, Array]], cut: Mapping[int, frozenset[int]], size: int
) -> Array:
    """The result of a bucket of (seat, weight, values); whoever is in ``cut`` counted for these slices only."""
    if not cut:
        return mean([(weight, row) for _, weight, row in rows], size)
    result = np.empty(size, np.float32)
    for index in range(share.layout.count):
        start, stop = share.layout.span(index)
        there = [(weight, row[start:stop]) for seat, weight, row in rows if seat not in cut or index in cut[seat]]
        result[start:stop] = mean(there, stop - start)
    return result
