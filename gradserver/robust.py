"""Robust means of contributions (`gradserver.protocol.means` has the rules and their sources).

Work goes in blocks that stay in a core's cache. Contributions are copied there first, since a member that shares its
memory could change it after the check. The smallest and largest values are found by a sorting network over whole
rows (Batcher 1968). Only comparisons are made that the result depends on.

Sums of squares are the same on every machine: numbers are added element by element, and the last ones exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

import numpy as np

from gradserver.mean import Array, divide, in_range as to_range, is_finite, scratch, weigh
from gradserver.protocol.limits import KIB
from gradserver.protocol.means import Mean, Rule

_CACHE_BYTES: Final = 512 * KIB
"""Size of all rows of a block together, if each element is taken by itself."""
_SMALLEST: Final = 2048
"""Elements of a block at least: with fewer, calls take longer than the work in them."""
_LANES: Final = 256
"""Sums that squares are added up in, before these are added up exactly."""
_VANISHING: Final = 1e-30
"""Share of the largest weight below which a member has no samples, and so no vote."""
FIRST_SCRATCH: Final = 16
"""Number of the first row of scratch memory; callers use lower ones."""


def robust_mean(
    mean: Mean,
    rows: Sequence[Array | None],
    weights: Sequence[float],
    out: Array,
    unit: int,
    guarded: bool = True,
) -> bool:
    """Write the mean of ``rows`` to ``out``, or return False if a row has an element that is not finite.

    Args:
        mean: the rule.
        rows: contributions of float32 or float64, in rank order; None stands for zeros.
        weights: their weights, in proportion.
        out: memory for the result, of the type of the rows. Its first element is the first one of a unit.
        unit: elements of a unit, for rules that go by units.
        guarded: False if values that are not finite are to be passed on. Where there is one, the result is the plain
            mean: of that element, or of its unit.
    """
    voters = _voters(weights)
    given, shares = [rows[place] for place in voters], [weights[place] for place in voters]
    step = unit if mean.unit > 1 else _block(len(given), out.itemsize)
    for start in range(0, out.size, step):
        part = slice(start, min(start + step, out.size))
        copies = [_copied(number, row, part, out.dtype) for number, row in enumerate(given)]
        whole = all(is_finite(copy) for copy in copies)
        if not whole and guarded:
            return False
        with np.errstate(all="ignore"):
            _combine(mean, copies, shares, out[part], whole, False)
            if not is_finite(out[part]):  # some sum may have left the range of the type
                again = [_copied(number, row, part, out.dtype) for number, row in enumerate(given)]
                exact = np.empty_like(out[part])
                _combine(mean, again, shares, exact, whole, True)
                np.copyto(out[part], exact, where=~np.isfinite(out[part]))
    return True


def _voters(weights: Sequence[float]) -> list[int]:
    """Return the places of members with samples; all if none has any."""
    least = max(weights) * _VANISHING
    return [place for place, weight in enumerate(weights) if weight >= least]


def _block(rows: int, itemsize: int) -> int:
    """Return the elements of a block of so many rows that stays in the cache."""
    fitting = _CACHE_BYTES // (itemsize * (rows + 1))
    return max(1 << (fitting.bit_length() - 1), _SMALLEST)


def _copied(number: int, row: Array | None, part: slice, dtype: np.dtype[np.generic]) -> Array:
    copy = scratch(FIRST_SCRATCH + number, part.stop - part.start, dtype)
    copy[:] = 0 if row is None else row[part]
    return copy


def _combine(mean: Mean, rows: list[Array], weights: list[float], out: Array, whole: bool, within: bool) -> None:
    """Write the mean of one block to ``out``; ``rows`` are overwritten. Without ``whole``, some value is not finite."""
    if not whole:
        _pass_on(mean, rows, weights, out, within)
        return
    match mean.rule:
        case Rule.MEDIAN:
            _middle(rows, weights, (len(rows) - 1) // 2, out, within)
        case Rule.TRIMMED:
            _middle(rows, weights, mean.trimmed(len(rows)), out, within)
        case Rule.CLIPPED:
            _clip(rows, mean.parameter)
            _average(rows, weights, out, within)
        case Rule.KRUM:
            chosen = _nearest(rows, mean.faulty(len(rows)))
            _average([rows[place] for place in chosen], [weights[place] for place in chosen], out, within)
        case Rule.PLAIN:
            _average(rows, weights, out, within)


def _pass_on(mean: Mean, rows: list[Array], weights: list[float], out: Array, within: bool) -> None:
    """Write the plain mean of each element that has a value which is not finite, or of its unit."""
    places = np.logical_or.reduce([~np.isfinite(row) for row in rows])
    plain = np.empty_like(out)
    _average(rows, weights, plain, False)
    for row in rows:
        row[places] = 0
    if mean.unit > 1:
        _average(rows, weights, out, within)
    else:
        _combine(mean, rows, weights, out, True, within)
    np.copyto(out, plain, where=places)
    np.copyto(out, np.nan, where=np.isnan(out))  # which of two NaN a sum keeps is the processor's choice


def _average(rows: Sequence[Array], weights: Sequence[float], out: Array, within: bool) -> None:
    """Write the weighted mean to ``out``, added up in this order. One row is its own mean, bit by bit."""
    if len(rows) == 1:
        out[:] = rows[0]
        return
    equal, divisor, scaled = weigh(weights)
    if within:  # no sum is larger than the largest value
        total = np.zeros(out.size, np.float64)
        for row, weight in zip(rows, scaled, strict=True):
            total += row.astype(np.float64) * ((1.0 if equal else weight) / divisor)
        out[:] = to_range(total, out.dtype)
        return
    if equal:
        np.add(rows[0], rows[1], out=out)
        for row in rows[2:]:
            np.add(out, row, out=out)
    else:
        product = scratch(FIRST_SCRATCH - 1, out.size, out.dtype)
        np.multiply(rows[0], out.dtype.type(scaled[0]), out=out)
        for row, weight in zip(rows[1:], scaled[1:], strict=True):
            np.multiply(row, out.dtype.type(weight), out=product)
            np.add(out, product, out=out)
    divide(out, divisor)


# ── median and trimmed mean ───────────────────────────────────────────────────────────────────────────


def _middle(rows: list[Array], weights: list[float], trimmed: int, out: Array, within: bool) -> None:
    """Write the mean of each element without the ``trimmed`` smallest and largest values, added up in their order.

    Of equal values that of the lower rank comes first.
    """
    kept = slice(trimmed, len(rows) - trimmed)
    network = _network(len(rows), trimmed)
    if min(weights) == max(weights) or kept.stop - kept.start == 1:
        _order(rows, network)
        _average(rows[kept], [1.0] * len(rows[kept]), out, within)
    else:
        _weigh_middle(rows, weights, kept, network, out, within)
    np.add(out, 0, out=out)  # the sign of zero would be the network's choice


def _weigh_middle(
    rows: list[Array], weights: list[float], kept: slice, network: Sequence[_Step], out: Array, within: bool
) -> None:
    """Write the mean of the values in the middle, each with the weight of the member that gave it."""
    _, _, scaled = weigh(weights)
    table = np.array(scaled, np.float64 if within else out.dtype)
    if out.dtype == np.float32:
        keys = [_key(row, place) for place, row in enumerate(rows)]
        _order(keys, network)
        found = [_unkeyed(key) for key in keys[kept]]
    else:
        order = np.argsort(np.stack(rows), axis=0, kind="stable")[kept]
        found = list(zip(np.take_along_axis(np.stack(rows), order, axis=0), order, strict=True))
    factors = [np.take(table, places, mode="clip") for _, places in found]
    divisor = np.add.reduce(factors, axis=0)
    if within:
        total = np.zeros(out.size, np.float64)
        for (values, _), factor in zip(found, factors, strict=True):
            total += values * (factor / divisor)
        out[:] = to_range(total, out.dtype)
        return
    out[:] = 0
    for (values, _), factor in zip(found, factors, strict=True):
        np.add(out, np.multiply(values, factor, out=factor), out=out)
    np.divide(out, divisor, out=out)


_PLACES: Final = 0xFFF
"""Bits of a float64 that are zero in any float32: they have room for the place of the row that a value is of."""


def _key(row: Array, place: int) -> Array:
    """Return float64 numbers in the order of float32 values, and of places where these are equal."""
    key = row.astype(np.float64)
    key += 0.0  # no negative zero
    bits = key.view(np.int64)
    bits |= ((bits >> 63) & _PLACES) ^ place  # a larger negative number is smaller
    return key


def _unkeyed(key: Array) -> tuple[Array, Array]:
    """Return the values of keys, and the places of their rows."""
    bits = key.view(np.int64)
    places = (bits ^ (bits >> 63)) & _PLACES
    bits &= ~_PLACES
    return key.astype(np.float32), places


def _order(rows: list[Array], network: Sequence[_Step]) -> None:
    """Put the values of ``rows`` in order at each element, as far as ``network`` does so."""
    spare = scratch(FIRST_SCRATCH - 1, rows[0].size, rows[0].dtype)
    for low, high, needs_low, needs_high in network:
        one, other = rows[low], rows[high]
        if needs_low and needs_high:
            np.minimum(one, other, out=spare)
            np.maximum(one, other, out=other)
            rows[low], spare = spare, one
        else:
            (np.minimum if needs_low else np.maximum)(one, other, out=rows[low if needs_low else high])


_Step = tuple[int, int, bool, bool]
"""A comparison of two rows: the smaller values go to the first, the larger ones to the second, as far as needed."""


@cache
def _network(count: int, trimmed: int) -> tuple[_Step, ...]:
    """Return the comparisons that put ``count`` rows in order, but for the ``trimmed`` first and last ones.

    Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2, algorithm M).
    """
    needed, steps = set(range(trimmed, count - trimmed)), list[_Step]()
    for low, high in reversed(list(_exchanges(count))):
        if low in needed or high in needed:
            steps.append((low, high, low in needed, high in needed))
            needed |= {low, high}
    return tuple(reversed(steps))


def _exchanges(count: int) -> Iterator[tuple[int, int]]:
    top = 1 << max((count - 1).bit_length() - 1, 0)
    part = top if count > 1 else 0
    while part:
        step, rest, distance = top, 0, part
        while True:
            yield from ((low, low + distance) for low in range(count - distance) if low & part == rest)
            if step == part:
                break
            distance, step, rest = step - part, step >> 1, part
        part >>= 1


# ── clipped mean and multi-Krum ───────────────────────────────────────────────────────────────────────


def _clip(rows: list[Array], times: float) -> None:
    """Scale rows with a norm above so many ``times`` the median norm, of two the lower, down to that."""
    norms = [_norm(row) for row in rows]
    limit = times * sorted(norms)[(len(norms) - 1) // 2]
    for row, norm in zip(rows, norms, strict=True):
        if norm > limit:
            np.multiply(row, row.dtype.type(limit / norm), out=row)


def _nearest(rows: list[Array], faulty: int) -> list[int]:
    """Return the places of the rows that are averaged, in rank order, if so many are ``faulty``.

    A row's score is the sum of the squares of its distances to the ``n - faulty - 2`` nearest others. As many rows are
    chosen, those with the lowest scores: most of which a guarantee is known (Damaskinos et al. 2019).
    """
    count = len(rows)
    if count < 3:
        return list(range(count))
    scales, most = [_scale(row) for row in rows], count - faulty - 2
    distances = [[0.0] * count for _ in rows]
    for one in range(count):
        for other in range(one):
            distances[one][other] = distances[other][one] = _distance(
                rows[one], rows[other], min(scales[one], scales[other])
            )
    scores = [
        math.fsum(sorted(distance for place, distance in enumerate(found) if place != one)[:most])
        for one, found in enumerate(distances)
    ]
    return sorted(sorted(range(count), key=lambda place: (scores[place], place))[:most])


def _scale(row: Array) -> float:
    """Return a power of two that brings all values to at most 1: squares then stay in the range of their type."""
    kind = np.finfo(row.dtype)
    exponent = math.frexp(max(float(np.max(row)), -float(np.min(row))))[1]
    return math.ldexp(1.0, -min(max(exponent, kind.minexp + 2), kind.maxexp - 1))


def _norm(row: Array) -> float:
    scale = _scale(row)
    work = scratch(FIRST_SCRATCH - 1, row.size, row.dtype)
    return math.sqrt(_sum_of_squares(np.multiply(row, row.dtype.type(scale), out=work))) / scale


def _distance(one: Array, other: Array, scale: float) -> float:
    """Return the square of the distance of two rows, of which ``scale`` suits both."""
    work = scratch(FIRST_SCRATCH - 1, one.size, one.dtype)
    half = one.dtype.type(scale / 2)  # a difference can be twice as large as a value
    np.multiply(one, half, out=work)
    np.subtract(work, np.multiply(other, half), out=work)
    distance = math.sqrt(_sum_of_squares(work)) / (scale / 2)
    return distance * distance


def _sum_of_squares(values: Array) -> float:
    """Return the sum of the squares of ``values``, which are overwritten."""
    np.multiply(values, values, out=values)
    full = values.size - values.size % _LANES
    lanes = np.add.reduce(values[:full].reshape(-1, _LANES), axis=0)
    return math.fsum([*lanes.tolist(), *values[full:].tolist()])
