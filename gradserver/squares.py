"""Sums of squares of means: the norms that come with results.

A sum has the same bits however a bucket is cut into slices, blocks and shards. Rows of 256 elements are summed first,
as every cut is at a multiple of that (`gradserver.protocol.shards.ALIGNMENT`). Rows are then added without rounding: a
sum is two numbers, of which the second is what rounding the first has lost. That is the splitting of Rump, Ogita and
Oishi, "Accurate Floating-Point Summation" (2008). About 85 bits are exact, so the rounded whole depends on no order.

Reading a block once more while it is in cache takes less time than the search for values that are not finite, and
makes that needless: a sum of squares is finite if all values are, unless it overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from gradserver.mean import Array

ROW: Final = 256
"""Elements that are summed up as one, in the type of the elements."""
_SPARE: Final = 12
"""Binary digits of the number of rows in a block, at most."""
_LEAST: Final = 1e-28
"""Sum of a row of float32 below which squares may have lost digits, as they are too small for that type."""
_MOST: Final = 3e38
_EVEN: Final = 2.0**16
"""Largest over smallest of 2^12 sums of float32 up to which float64 adds them without rounding."""

Sum = tuple[float, float]
"""A sum of squares: its value as float64, and the rest that this lacks."""
NOTHING: Final[Sum] = (0.0, 0.0)


def squares(values: Array) -> Sum:
    """Compute the sum of squares of ``values``, float32 or float64, at most 2 MiB. Complex numbers come as pairs.

    The first value is at a multiple of `ROW` in its bucket. NaN or an infinity gives a sum that is not finite.
    """
    if values.size <= ROW:
        return _one(values)
    whole = values.size - values.size % ROW
    rows = values[:whole].reshape(-1, ROW)
    sums = np.matmul(rows[:, None, :], rows[:, :, None])[:, 0, 0]
    if values.dtype == np.float32:
        least, most = float(np.minimum.reduce(sums)), float(np.maximum.reduce(sums))
        if not _LEAST < least <= most < _MOST:
            sums = _of_rows(rows, sums)
        elif least * _EVEN > most:  # no digit is lost
            total = float(np.add.reduce(sums, dtype=np.float64)), 0.0
            return total if whole == values.size else joined([*total, *_one(values[whole:])])
    total = _split(sums.astype(np.float64))
    return total if whole == values.size else joined([*total, *_one(values[whole:])])


def _one(row: Array) -> Sum:
    """Sum up the squares of one row."""
    total = float(np.dot(row, row))
    if not _LEAST < total < _MOST and row.dtype == np.float32:
        wide = row.astype(np.float64)
        total = float(np.dot(wide, wide))
    return total, 0.0


def _of_rows(rows: Array, sums: Array) -> Array:
    """Sum up the squares of each row, as float64 where float32 is not enough: in ``sums``."""
    sums = sums.astype(np.float64)
    unsure = ~((sums > _LEAST) & (sums < _MOST))
    if (wide := rows[unsure]).any():
        wide = wide.astype(np.float64)
        sums[unsure] = np.matmul(wide[:, None, :], wide[:, :, None])[:, 0, 0]
    return sums


def _split(sums: Array) -> Sum:
    """Add up numbers of at most 2^12 rows, in two steps of which neither rounds."""
    most = float(np.maximum.reduce(sums))
    if not 0.0 < most < math.inf:
        return most, 0.0
    unit = math.ldexp(1.5, math.frexp(most)[1] + _SPARE) if most < 1e300 else math.inf
    if not unit < math.inf:
        return joined(sums.tolist())
    high = sums + unit
    high -= unit  # now the digits of all that can be added without rounding
    return joined([float(np.add.reduce(high)), float(np.add.reduce(sums - high))])


def joined(parts: Iterable[float]) -> Sum:
    """Add up numbers, without an order."""
    parts = list(parts)
    if not all(map(math.isfinite, parts)):
        return sum(parts), 0.0
    total = math.fsum(parts)
    return total, math.fsum([*parts, -total]) if math.isfinite(total) else 0.0


def by_slice(blocks: Sequence[Sum | None], of_slice: int) -> Iterator[float]:
    """Yield the two numbers of each slice, which has ``of_slice`` blocks at most; None stands for zeros."""
    for first in range(0, len(blocks), of_slice):
        parts = [part or NOTHING for part in blocks[first : first + of_slice]]
        yield from parts[0] if len(parts) == 1 else joined([number for part in parts for number in part])
