"""Loops of the codecs that keep a fraction of a block: they find the largest elements, and add up what was kept."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import boolean, float32, int64, uint16, uint32, uint64, void

from gradserver.protocol.compiled.language import (
    FLOATS,
    INFINITY,
    OFFSETS,
    READ_FLOATS,
    READ_OFFSETS,
    ROW,
    compiled,
    magnitude_of,
    row_of,
)

_0, _1 = np.uint64(0), np.uint64(1)
_SAMPLE: Final = np.uint64(31)
_RUN: Final = np.uint64(16)
"""Elements that one comparison is for."""
_BUCKETS: Final = 4096
_HIGH: Final = np.uint32(19)
"""Bits below those that name a bucket: the exponent, and four bits more."""
_MIDDLE: Final = np.uint32(7)


@compiled()
def _bucket(magnitude: Any) -> Any:
    return uint64(magnitude >> _HIGH)


@compiled(uint32(ROW, uint64))
def _threshold(values: Any, kept: Any) -> Any:
    """Return a magnitude that ``kept`` elements reach, or probably; mostly not many more do. A sample tells it."""
    counts, size = np.zeros(_BUCKETS, np.uint32), uint64(values.size)
    for i in range(_0, size, _SAMPLE):
        counts[_bucket(magnitude_of(values[i]))] += uint32(1)
    expected = kept / 31
    wanted, found, bucket = expected + 4 * np.sqrt(expected) + 2, 0, _BUCKETS
    while bucket > 0 and found < wanted:
        bucket -= 1
        found += counts[bucket]
    return uint32(uint32(bucket) << _HIGH)


@compiled()
def _collect(values: Any, least: Any, offsets: Any) -> Any:
    """Write the offsets of elements of magnitude ``least`` or more, in order, and return their number."""
    size, found, start = uint64(values.size), _0, _0
    while start < size:
        most, count = uint32(0), min(_RUN, size - start)
        if count == _RUN:  # a constant number of times, which the compiler makes a few instructions of
            for i in range(_RUN):
                most = max(most, magnitude_of(values[start + i]))
        if most >= least or count < _RUN:
            for i in range(start, start + count):
                offsets[found] = uint16(i)
                found += uint64(magnitude_of(values[i]) >= least)
        start += count
    return found


@compiled()
def _digit(counts: Any, wanted: Any) -> Any:
    """Return the digit of the ``wanted``-th largest number, and how many have a larger one. Forget the counts."""
    digit, above = uint64(counts.size) - _1, _0
    while above + counts[digit] < wanted:
        above += counts[digit]
        digit -= _1
    counts[:] = 0
    return digit, above


@compiled(void(ROW, OFFSETS))
def _choose(row: Any, chosen: Any) -> None:
    """Choose the elements of largest magnitude, as many as ``chosen`` has room for; of equal ones the first.

    The offsets ascend. The least magnitude that is chosen is found digit by digit: 12, 12 and 7 bits.
    """
    kept = uint64(chosen.size)
    offsets = np.empty(row.size + 1, np.uint16)
    found = _collect(row, _threshold(row, kept), offsets)
    if found < kept:
        found = _collect(row, uint32(0), offsets)
    counts, rest = np.zeros(_BUCKETS, np.uint64), kept
    for i in range(found):
        counts[_bucket(magnitude_of(row[offsets[i]]))] += _1
    high, above = _digit(counts, rest)
    rest -= above
    for i in range(found):
        magnitude = magnitude_of(row[offsets[i]])
        if _bucket(magnitude) == high:
            counts[uint64(uint32(magnitude >> _MIDDLE) & uint32(0xFFF))] += _1
    middle, above = _digit(counts, rest)
    rest -= above
    upper = uint32(uint32(uint32(high) << uint32(12)) | uint32(middle))
    for i in range(found):
        magnitude = magnitude_of(row[offsets[i]])
        if uint32(magnitude >> _MIDDLE) == upper:
            counts[uint64(magnitude & uint32(0x7F))] += _1
    low, above = _digit(counts, rest)
    rest -= above
    least, place = uint32(uint32(upper << _MIDDLE) | uint32(low)), _0
    for i in range(found):
        magnitude = magnitude_of(row[offsets[i]])
        if magnitude > least:
            chosen[place] = int64(offsets[i])
            place += _1
        elif magnitude == least and rest > _0:
            chosen[place] = int64(offsets[i])
            place, rest = place + _1, rest - _1


@compiled(void(READ_FLOATS, OFFSETS))
def largest(values: Any, chosen: Any) -> None:
    """Choose the elements of largest magnitude, as many as ``chosen`` has room for; of equal ones the first."""
    _choose(row_of(values), chosen)


# The next two encode with feedback: they leave in `out` what is kept of ``values + residual``, and in `residual` all
# else. If they meet a number that is not finite, `residual` becomes what it was, which `spare` has meanwhile.


@compiled(uint32(ROW, ROW, ROW))
def _sum(row: Any, owed: Any, before: Any) -> Any:
    """Write sums to ``owed``, and return the largest magnitude of all."""
    most = uint32(0)
    for i in range(uint64(row.size)):
        before[i] = owed[i]
        owed[i] = row[i] + owed[i]
        most = max(most, magnitude_of(owed[i]))
    return most


@compiled(void(ROW, READ_OFFSETS, ROW))
def _move(owed: Any, offsets: Any, kept: Any) -> None:
    for i in range(uint64(kept.size)):
        kept[i] = owed[uint64(offsets[i])]
        owed[uint64(offsets[i])] = float32(0)


@compiled(boolean(READ_FLOATS, FLOATS, READ_OFFSETS, FLOATS, FLOATS))
def keep_drawn(values: Any, residual: Any, offsets: Any, out: Any, spare: Any) -> Any:
    """Encode the elements at ``offsets``."""
    owed, before = row_of(residual), row_of(spare)
    if _sum(row_of(values), owed, before) >= INFINITY:
        owed[:] = before
        return False
    _move(owed, offsets, row_of(out))
    return True


@compiled(boolean(READ_FLOATS, FLOATS, OFFSETS, FLOATS, FLOATS))
def keep_largest(values: Any, residual: Any, chosen: Any, out: Any, spare: Any) -> Any:
    """Encode the elements of largest magnitude, and leave their offsets in ``chosen``. NaN and Inf are the largest."""
    owed, before = row_of(residual), row_of(spare)
    if _sum(row_of(values), owed, before) >= INFINITY:
        owed[:] = before
        return False
    _choose(owed, chosen)
    _move(owed, chosen, row_of(out))
    return True


@compiled(void(FLOATS, READ_OFFSETS, READ_FLOATS, float32))
def add_at(total: Any, offsets: Any, values: Any, weight: Any) -> None:
    """Add values, times their weight, at offsets that are all different."""
    sums, row = row_of(total), row_of(values)
    for i in range(uint64(row.size)):
        place = uint64(offsets[i])
        sums[place] = sums[place] + row[i] * weight
