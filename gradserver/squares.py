"""Sums of squares and of products: the norms that come with results.

A sum has the same bits however a bucket is cut into slices, blocks and shards. Rows of 256 elements are summed first,
as every cut is at a multiple of that (`gradserver.protocol.shards.ALIGNMENT`). Rows are then added without rounding: a
sum is two numbers, of which the second is what rounding the first has lost. That is the splitting of Rump, Ogita and
Oishi, "Accurate Floating-Point Summation" (2008). About 85 bits are exact, so the rounded whole depends on no order.

Reading a block once more while it is in cache takes less time than the search for values that are not finite. It
makes that needless: a sum of squares is finite if all values are, unless it overflows. To a block of 2^17 elements
belong one BLAS call for each row and three calls of numpy on what these return. Rows of zeros take one call more. It
is so much because an operation on few numbers takes about a microsecond, in which a core reads 40 KB of its cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from gradserver.mean import Array

ROW: Final = 256
"""Elements that are summed up as one, in the type of the elements."""
_MOST_ROWS: Final = 2**13
_ONES: Final = np.ones(_MOST_ROWS)
_STARTS: Final = np.arange(0, ROW * _MOST_ROWS, ROW)
"""First element of each row."""
_LEAST: Final = 1e-28
"""Sum of a row of float32 below which products may have lost digits, as they are too small for that type."""
_EVEN: Final = 2.0**28
"""Sum of numbers over the smallest of them up to which float64 adds up float32 without rounding, in any order."""

Sum = tuple[float, float]
"""A sum of squares: its value as float64, and the rest that this lacks."""
NOTHING: Final[Sum] = (0.0, 0.0)


def squares(values: Array) -> Sum:
    """Compute the sum of squares of ``values``, float32 or float64, at most 2 MiB. Complex numbers come as pairs.

    The first value is at a multiple of `ROW` in its bucket. NaN or an infinity gives a sum that is not finite.
    """
    return products(values, values)


def products(left: Array, right: Array) -> Sum:
    """Compute the inner product of two arrays of one size and type, as `squares` does for one."""
    whole = left.size - left.size % ROW
    if left.size <= ROW:
        return _of_one(left, right)
    first = left[:whole]
    found = _of_rows(first, first if left is right else right[:whole])
    return found if whole == left.size else joined([*found, *_of_one(left[whole:], right[whole:])])


def _of_one(left: Array, right: Array) -> Sum:
    """Compute the inner product of one row with another."""
    total = float(np.dot(left, right))
    if not _LEAST < abs(total) < math.inf and left.dtype == np.float32:
        total = float(np.dot(left.astype(np.float64), right.astype(np.float64)))
    return total, 0.0


def _of_rows(left: Array, right: Array) -> Sum:
    """Compute the inner product of rows with others, or with themselves: then no number is negative."""
    same = left is right
    sums = dots(left.reshape(-1, ROW), right.reshape(-1, ROW))
    wide = sums.astype(np.float64, copy=False)
    sizes = wide if same else np.abs(wide)
    most = _added(sizes)
    if sums.dtype == np.float32:
        least = float(np.minimum.reduce(sizes))
        if not (least > _LEAST and most < math.inf):
            _mend(wide, left, right, most)
            most = _added(np.abs(wide))
        elif most < least * _EVEN:
            return most if same else _added(wide), 0.0
    return _split(wide, most)


def _by_matmul(left: Array, right: Array) -> Array:
    """Compute the inner product of each row, where numpy has no ``vecdot``: the same bits, a little slower."""
    found: Array = np.matmul(left[..., None, :], right[..., :, None])[..., 0, 0]
    return found


dots: Final[Callable[[Array, Array], Any]] = getattr(np, "vecdot", _by_matmul)
"""Compute the inner product of each row of an array with that of another one, by BLAS."""


def _added(numbers: Array) -> float:
    """Add up a few numbers of float64: in half the time of ``np.add.reduce``."""
    return float(np.dot(numbers, _ONES[: numbers.size]))


def _mend(sums: Array, left: Array, right: Array, most: float) -> None:
    """Replace sums of rows for which float32 was not enough. Rows of zeros are common, and need no second sum."""
    unsure = np.abs(sums) <= _LEAST
    if not most < math.inf:
        unsure |= ~np.isfinite(sums)
    places = np.flatnonzero(unsure)
    if places.size > sums.size // 4:  # look for zeros where they are: a copy would take longer
        for values in (left,) if left is right else (left, right):
            largest = np.maximum.reduceat(values.view(np.uint32), _STARTS[: sums.size])
            places = places[largest[places] > 0]
    first = left.reshape(-1, ROW).take(places, axis=0)
    if places.size and np.maximum.reduce(first.view(np.uint32), axis=None):
        second = first if left is right else right.reshape(-1, ROW).take(places, axis=0)
        sums[places] = dots(first.astype(np.float64), second.astype(np.float64))


def _split(sums: Array, most: float) -> Sum:
    """Add up numbers in two steps, of which the first does not round. Their absolute values add up to ``most``."""
    if not 0.0 < most < math.inf:
        return _added(sums), 0.0
    if most > 1e300:
        return joined(sums.tolist())
    unit = math.ldexp(1.5, math.frexp(most)[1] + 1)
    high = sums + unit
    high -= unit  # now the digits of all that can be added without rounding
    return _added_up(_added(high), _added(sums - high))


def _added_up(larger: float, smaller: float) -> Sum:
    """Add up two finite numbers, with what rounding loses: Knuth's TwoSum, which does not ask which is larger."""
    total = larger + smaller
    part = total - larger
    return total, (larger - (total - part)) + (smaller - part)


def joined(parts: Iterable[float]) -> Sum:
    """Add up numbers, without an order."""
    parts = list(parts)
    if not all(map(math.isfinite, parts)):
        return sum(parts), 0.0
    try:
        total = math.fsum(parts)
    except OverflowError:
        return sum(parts), 0.0
    return total, math.fsum([*parts, -total])


def by_slice(blocks: Sequence[Sum | None], of_slice: int) -> Iterator[float]:
    """Yield the two numbers of each slice, which has ``of_slice`` blocks at most; None stands for zeros."""
    for first in range(0, len(blocks), of_slice):
        parts = [part or NOTHING for part in blocks[first : first + of_slice]]
        yield from parts[0] if len(parts) == 1 else joined([number for part in parts for number in part])
