"""Figures of a round that compare its contributions: how they are measured, added up, and reported.

They are sums over elements, so they add up over blocks, buckets and data shards. Signal and noise are the unbiased
estimates of `gradserver.comparison`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gradserver.engine.commands import Measured, Measures, Memory, make
from gradserver.engine.records import column, uncolumn
from gradserver.protocol.checks import brief
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import KIB, MAX_BUCKETS, MAX_WORLD_SIZE

BLOCK_BYTES: Final = 512 * KIB
"""Size of a unit: what a reduction computes at a time, about."""
_APART: Final = 8
"""One unit in so many is measured, at most, or one of a round that has fewer."""
_SAMPLED: Final = 2
"""Number of units of a large round that are measured, about."""
_RAREST: Final = 96
"""One unit in so many is measured, at least."""


class OfMember(NamedTuple):
    """Figures of a contribution g beside the mean m of the others: ``squares`` |g|², ``inner`` g·m, ``others`` |m|²."""

    member_id: int
    squares: float
    inner: float
    others: float


class OfBucket(NamedTuple):
    """Estimates for a bucket: ``signal`` is |G|² of the true gradient G, and ``noise`` the trace of the covariance."""

    part: int
    signal: float
    noise: float


class Figures(NamedTuple):
    """Figures of one round; none if nothing was compared."""

    members: tuple[OfMember, ...] = ()
    buckets: tuple[OfBucket, ...] = ()


NONE: Final = Figures()


def pack_figures(figures: Figures) -> list[Any]:
    """Return figures as they are written."""
    return [[column("d", row) for row in rows] for rows in figures]


def unpack_figures(value: Any) -> Figures:
    """Return what `pack_figures` gave; MalformedMessageError if it cannot be that."""
    if type(value) is not list or len(value) != 2 or any(type(rows) is not list for rows in value):
        raise MalformedMessageError(f"expected figures of a round, got {brief(value)}")
    members, buckets = value
    if len(members) > MAX_WORLD_SIZE or len(buckets) > MAX_BUCKETS:
        raise MalformedMessageError(f"figures of {len(members)} members and {len(buckets)} buckets")
    of_members = tuple(OfMember(*_row(row, 4, MAX_WORLD_SIZE)) for row in members)
    if any(one.squares < 0 or one.others < 0 for one in of_members):
        raise MalformedMessageError("figures of a round with a sum of squares below 0")
    return Figures(of_members, tuple(OfBucket(*_row(row, 3, MAX_BUCKETS)) for row in buckets))


def _row(value: Any, size: int, most: int) -> tuple[Any, ...]:
    number, *figures = uncolumn("d", value, size) or (-1.0,)
    if len(figures) != size - 1 or not (0 <= number < most and number == int(number)):
        raise MalformedMessageError(f"expected {size} figures, got {brief(value)}")
    if not all(map(math.isfinite, figures)):
        raise MalformedMessageError("figures of a round that are not finite")
    return int(number), *figures


def added(figures: Iterable[Figures]) -> Figures:
    """Add up the figures of several data shards."""
    members: defaultdict[int, list[Sequence[float]]] = defaultdict(list)
    buckets: defaultdict[int, list[Sequence[float]]] = defaultdict(list)
    for one in figures:
        for member_id, *rest in one.members:
            members[member_id].append(rest)
        for part, *rest in one.buckets:
            buckets[part].append(rest)
    return Figures(
        tuple(OfMember(which, *map(sum, zip(*rows, strict=True))) for which, rows in sorted(members.items())),
        tuple(OfBucket(which, *map(sum, zip(*rows, strict=True))) for which, rows in sorted(buckets.items())),
    )


class Span(NamedTuple):
    """Elements of a bucket, from ``start`` up to ``stop``, of which ``unit`` are measured or left out together."""

    start: int
    stop: int
    unit: int


@dataclass(slots=True)
class Sampling:
    """Choice of the units that are measured: one in ``strides`` of a round, other ones in the next.

    The units of a section's buckets are counted one behind the other, so that each round has one that is measured.

    Attributes:
        strides: so many units have one that is measured, by bucket.
        firsts: number of the unit with which the bucket would begin, less that of its own first unit.
        units: elements of a unit, by bucket.
        usual: the usual sums of squares of each bucket's mean, which only the reducer looks into.
    """

    strides: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    usual: defaultdict[int, Memory] = field(default_factory=lambda: defaultdict(Memory))

    @classmethod
    def of(cls, spans: Sequence[Span], sections: Iterable[Iterable[int]]) -> Sampling:
        """Make the choice for these parts of buckets, which are in so many ``sections`` that take turns."""
        strides, firsts = [1] * len(spans), [0] * len(spans)
        for parts in map(list, sections):
            count = 0
            for part in parts:
                start, stop, unit = spans[part]
                firsts[part] = count - start // unit
                count += -(-stop // unit) - start // unit
            stride = max(1, min(_RAREST, max(count // _SAMPLED, min(count, _APART))))
            for part in parts:
                strides[part] = stride
        return cls(tuple(strides), tuple(firsts), tuple(span.unit for span in spans))

    def measures(self, part: int, turn: int) -> Measures:
        """Return what is to be measured of a bucket when its section has its turn for the ``turn``-th time."""
        stride, first, unit = self.strides[part], self.firsts[part], self.units[part]
        return make(Measures, (stride, first + turn, unit, self.usual[part], []))


class _Sums:
    """Sums over some blocks of a bucket."""

    __slots__ = ("by_id", "noise", "numel", "signal")

    def __init__(self) -> None:
        self.numel, self.signal, self.noise = 0, 0.0, 0.0
        self.by_id: dict[int, tuple[float, float, float]] = {}

    def add(self, one: Measured) -> None:
        self.numel += one.numel
        self.signal += one.signal
        self.noise += one.noise
        for member_id, squares, inner, others in one.members:
            before = self.by_id.get(member_id, (0.0, 0.0, 0.0))
            self.by_id[member_id] = before[0] + squares, before[1] + inner, before[2] + others


class Tally:
    """Measurements of one bucket in one round.

    Blocks that stood out were measured because of what is in them: they stand for themselves. The others, which were
    sampled, stand for all that did not stand out.
    """

    __slots__ = ("numel", "sampled", "special")

    def __init__(self) -> None:
        self.numel = 0
        self.sampled, self.special = _Sums(), _Sums()

    def expect(self, numel: int) -> None:
        """Count the elements of a reduction that measures, perhaps none of its blocks."""
        self.numel += numel

    def add(self, found: Iterable[Measured]) -> None:
        """Add what a reduction has found."""
        for one in found:
            (self.special if one.stood_out else self.sampled).add(one)


def figures_of(tallies: dict[int, Tally]) -> Figures:
    """Estimate the figures of a round from what was measured of its buckets."""
    if not tallies:
        return NONE
    special = sum(tally.special.numel for tally in tallies.values())
    sampled = sum(tally.sampled.numel for tally in tallies.values())
    rest = sum(tally.numel for tally in tallies.values()) - special
    share = rest / sampled if sampled else 0.0
    members: dict[int, tuple[float, float, float]] = {}
    for tally in tallies.values():
        for sums, factor in ((tally.sampled, share), (tally.special, 1.0)):
            for member_id, found in sums.by_id.items():
                a, b, c = members.get(member_id, (0.0, 0.0, 0.0))
                members[member_id] = a + factor * found[0], b + factor * found[1], c + factor * found[2]
    buckets = [_of_bucket(part, tally) for part, tally in sorted(tallies.items()) if tally.sampled.numel]
    return Figures(
        tuple(OfMember(member_id, *found) for member_id, found in sorted(members.items()) if _is_sane(found)),
        tuple(one for one in buckets if _is_sane(one)),
    )


def _of_bucket(part: int, tally: Tally) -> OfBucket:
    share = (tally.numel - tally.special.numel) / tally.sampled.numel
    signal, noise = (
        share * getattr(tally.sampled, name) + getattr(tally.special, name) for name in ("signal", "noise")
    )
    return OfBucket(part, signal, noise)


def _is_sane(values: Iterable[float]) -> bool:
    return all(map(math.isfinite, values))
