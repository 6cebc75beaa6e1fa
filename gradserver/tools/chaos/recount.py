"""Expected results of a round: the published rules, implemented once more and apart from the product.

The mean of each element, over the contributions that counted for it, in the order of member ids, in fp32:

    one contribution           g
    all of the same weight     (g₀ + g₁ + …) / n
    otherwise                  (w₀·g₀ + w₁·g₁ + …) / (w₀ + w₁ + …)
    none, or all of weight 0   0

On the hierarchical plane the same holds for the means of hosts, each with the sum of the weights of its members.
The ledger's digest of a contribution and of a result is that of `gradserver.protocol.digest`, word by word. The product
is asked only for the cuts of buckets into slices, and for the shares of data shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.means import mean_of
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Share, Table, comparable
from gradserver.tools.chaos import generator, robust

Array = npt.NDArray[Any]
Row = tuple[str, float, Array]
"""A contribution: name of the worker, weight, values."""
Cut = Mapping[str, frozenset[int]]
"""Slices that counted, of each worker with a contribution that did not count in full."""
PLAIN: Final = "plain"
"""Rule of the weighted mean; `gradserver.tools.chaos.robust` has the others."""
MODULUS: Final = 1 << 64
_ROW_WORDS: Final = 1024
ROW_BYTES: Final = 8 * _ROW_WORDS
_ROWS: Final = 256
"""Number of rows of which factors are computed together."""


def mean(rows: Sequence[tuple[float, Array]], size: int, rule: str = PLAIN) -> Array:
    """Compute the mean of rows with their weights, which are in the order of member ids, by a ``rule``."""
    given = [(weight, row) for weight, row in rows if weight > 0]
    if not given:
        return np.zeros(size, np.float32)
    if rule != PLAIN:
        return robust.mean(rule, mean, given, size)
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


def leveled(rows: Sequence[Row], size: int) -> Array:
    """Compute the mean of the hosts' means, by the hosts' weights. Hosts are in the order of their first members."""
    hosts: dict[str, list[Row]] = {}
    for row in rows:
        hosts.setdefault(generator.host(row[0]), []).append(row)
    means: list[tuple[float, Array]] = []
    for here in hosts.values():
        weight, total = sum(weight for _, weight, _ in here), np.zeros(size, np.float32)
        for _, own, given in here:
            total += given * np.float32(own)  # exact in any order, of contributions with few bits
        means.append((weight, total / np.float32(weight) if weight else total))
    return mean(means, size)


def shares(count: int, rule: str = PLAIN, plan: Plan | None = None, grain: int = 0) -> list[Share]:
    """Divide the buckets of a plan among ``count`` data shards, where no unit of ``rule`` is cut, into slices.

    By default the plan is that of a chaos run with gradients.
    """
    plan = plan or generator.plan()
    table = Table(1, comparable([None] * count), mean_of(rule).unit, grain)
    table.set_plan(plan)
    return [
        table.share(ExchangeKey(Stream.BUCKET, 0, part), bucket.operation) for part, bucket in enumerate(plan.buckets)
    ]


def prefixes(share: Share, counted: int) -> Iterator[frozenset[int]]:
    """List the sets of ``counted`` slices that may have counted: each shard counts from its first one on."""
    intervals = [range(start, stop) for start, stop in itertools.pairwise(share.bounds) if start < stop]
    for lengths in itertools.product(*(range(len(interval) + 1) for interval in intervals)):
        if sum(lengths) == counted:
            yield frozenset(
                index for interval, length in zip(intervals, lengths, strict=True) for index in interval[:length]
            )


def bucket(share: Share, rows: Sequence[Row], cut: Cut, size: int, rule: str = PLAIN) -> Array:
    """Compute the result of a bucket of ``size`` elements; rows are in the order of member ids."""
    if not cut:
        return mean([(weight, row) for _, weight, row in rows], size, rule)
    result = np.empty(size, np.float32)
    for index in range(share.layout.count):
        start, stop = share.layout.span(index)
        there = [(weight, row[start:stop]) for name, weight, row in rows if name not in cut or index in cut[name]]
        result[start:stop] = mean(there, stop - start, rule)
    return result


def ledger_digest(row: Array, part: int, share: Share, slices: Iterable[int] | None = None) -> int:
    """Compute the ledger's digest of bucket ``part`` of gradients, or of some of its ``slices``."""
    at = ROW_BYTES * sum(rows(4 * size) for size in generator.SIZES[:part])
    spans = [(0, row.size)] if slices is None else [share.layout.span(index) for index in slices]
    return sum(digest(row[start:stop], at + 4 * start) for start, stop in spans) % MODULUS


def rows(nbytes: int) -> int:
    """Return the rows of words that so many bytes take."""
    return -(-nbytes // ROW_BYTES)


def digest(data: Array, at: int) -> int:
    """Compute the digest of ``data``, which stands at byte ``at`` of a round's. The rest of its words is zeros."""
    lead, raw = at % 8, data.view(np.uint8)
    padded = np.zeros(-(-(lead + raw.size) // 8) * 8, np.uint8)
    padded[lead : lead + raw.size] = raw
    words, first = padded.view("<u8"), at // 8
    terms = _terms(-(-(first + words.size) // (_ROW_WORDS * _ROWS)) * _ROWS)
    return int(np.einsum("i,i->", words, terms[first : first + words.size]))


@cache
def _terms(count: int) -> npt.NDArray[np.uint64]:
    """Compute the factors of the words of so many rows."""
    mixed = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    factors = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    odd = 2 * np.arange(count, dtype=np.uint64) + np.uint64(1)
    return (odd[:, None] * factors[None, :]).reshape(-1)
