"""Workload of a chaos run: the buckets that its workers exchange in each round.

    gradients    the four vectors of the model, each as a bucket of its own
    local SGD    the changes of one fragment's vectors, as one bucket. Fragments take turns, as the rounds come

Of local SGD each fragment is a section of the group's plan. A word in front of its bucket says when members sent it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

from gradserver.protocol.codecs import codec_of
from gradserver.protocol.codecs.base import Codec
from gradserver.protocol.dtypes import BY_NAME, FLOAT32
from gradserver.protocol.exchange import Op
from gradserver.protocol.plan import Bucket as PlanBucket, Component, Plan, Section
from gradserver.protocol.plan_codecs import with_codec
from gradserver.protocol.shards import Share
from gradserver.tools.chaos import generator, recount
from gradserver.tools.common.as_json import AsJson

EXACT: Final = "fp32"
"""Wire format that loses nothing."""
OUTERS: Final = ("average", "nesterov")
"""Outer optimizers of local SGD."""
_WORD: Final = PlanBucket("interval", BY_NAME["float64"], (Component("due, and time not waited", (2,)),), Op.MAX)


class Bucket(NamedTuple):
    """A bucket of means.

    Attributes:
        part: its number in the group's plan.
        place: its place in its section, and so in the record of a round.
        vectors: the numbers of the model's vectors in it.
        size: its number of elements.
        share: its cut into slices, and these among data shards.
        at: the first byte of its payload among those of a round, as the ledger's digests have it.
        codec: format in which it travels; None if that loses nothing.
    """

    part: int
    place: int
    vectors: tuple[int, ...]
    size: int
    share: Share
    at: int
    codec: Codec | None

    @property
    def slices(self) -> int:
        """Number of slices."""
        return self.share.layout.count


@dataclass(frozen=True, slots=True)
class Workload(AsJson):
    """Workload of one run.

    Attributes:
        seed: seed of the contributions, with `gradserver.tools.chaos.generator.BITS`.
        shards: number of data shards.
        mean: rule of the means.
        outer: outer optimizer of local SGD, one of `OUTERS`; empty for gradients.
        fragments: number of fragments of local SGD. With several, one is on its way while a worker computes.
        wire: format in which larger buckets travel.
        grain: what the size of slices follows from, as the ledger says.
    """

    seed: int
    shards: int = 1
    mean: str = recount.PLAIN
    outer: str = ""
    fragments: int = 1
    wire: str = EXACT
    grain: int = 0

    @property
    def is_local(self) -> bool:
        """True for local SGD."""
        return bool(self.outer)

    def sliced(self, grain: int) -> Workload:
        """Return the same workload, with slices of another size."""
        return replace(self, grain=grain)

    def buckets(self, number: int) -> tuple[Bucket, ...]:
        """Return the buckets of means that are exchanged in round ``number``."""
        return _sections(self)[number % self.fragments]

    def fragment(self, number: int) -> tuple[int, ...]:
        """Return the vectors that are exchanged in round ``number``."""
        return tuple(vector for bucket in self.buckets(number) for vector in bucket.vectors)


@cache
def _sections(workload: Workload) -> tuple[tuple[Bucket, ...], ...]:
    """Return the buckets of means of each section."""
    codec = codec_of(workload.wire)
    groups = _fragments(workload.fragments) if workload.is_local else ()
    plans = [Plan((_WORD, _bucket_of(f"fragment.{number}", group))) for number, group in enumerate(groups)]
    plans = [with_codec(plan, codec) for plan in plans or [generator.plan()]]
    shares = recount.shares(workload.shards, workload.mean, _joined(plans), workload.grain)
    found: list[tuple[Bucket, ...]] = []
    first = 0
    for number, plan in enumerate(plans):
        section: list[Bucket] = []
        at = 0
        for place, bucket in enumerate(plan.buckets):
            lossy, part = bucket.codec if bucket.operation.is_lossy else None, first + place
            if bucket.op is Op.MEAN:
                vectors = groups[number] if groups else (place,)
                section.append(Bucket(part, place, vectors, bucket.numel, shares[part], at, lossy))
            nbytes = bucket.numel * bucket.dtype.itemsize if lossy is None else lossy.nbytes(bucket.numel)
            at += recount.rows(nbytes) * recount.ROW_BYTES
        found.append(tuple(section))
        first += len(plan.buckets)
    return tuple(found)


def _joined(plans: list[Plan]) -> Plan:
    """Return the plan of which each of ``plans`` is a section."""
    buckets = tuple(bucket for plan in plans for bucket in plan.buckets)
    sections, first = [], 0
    for number, plan in enumerate(plans):
        sections.append(Section(number, 0, first, len(plan.buckets)))
        first += len(plan.buckets)
    return Plan(buckets, tuple(sections))


def _bucket_of(key: str, vectors: tuple[int, ...]) -> PlanBucket:
    return PlanBucket(key, FLOAT32, tuple(Component(f"vector{one}", (generator.SIZES[one],)) for one in vectors))


def _fragments(count: int) -> list[tuple[int, ...]]:
    """Divide the vectors among ``count`` fragments: the largest first, each to the smallest fragment so far."""
    sizes, chosen = [0] * count, [list[int]() for _ in range(count)]
    for vector in sorted(range(len(generator.SIZES)), key=lambda one: (-generator.SIZES[one], one)):
        smallest = sizes.index(min(sizes))
        chosen[smallest].append(vector)
        sizes[smallest] += generator.SIZES[vector]
    return [tuple(sorted(vectors)) for vectors in chosen]
