"""Loops that compute the mean of contributions in one pass: encoded with feedback, or written to where all want it.

They give the same bits as numpy does, as the loops of `gradserver.protocol.compiled.loops` do, of which they are made.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import boolean, carray, float32, float64, int64, uint64, void

from gradserver.protocol.compiled.language import (
    BYTES,
    FLOATS,
    INFINITY,
    READ_FLOATS,
    READ_WORDS,
    ROW,
    compiled,
    pointer,
    row_of,
)
from gradserver.protocol.compiled.loops import CHUNK, FP32, give, take

_0, _1, _2, _4 = (np.uint64(number) for number in (0, 1, 2, 4))
_ONE: Final = np.float32(1)
_ZERO: Final = np.float32(0)


@compiled(float32(ROW, uint64), fastmath={"reassoc"})  # no result depends on this sum, so its order is free
def _squares(values: Any, count: Any) -> Any:
    total = _ZERO
    for i in range(count):
        total += values[i] * values[i]
    return total


@compiled(void(int64, uint64, READ_WORDS, uint64, READ_FLOATS, float32, boolean, uint64, uint64, ROW))
def _average(
    kind: Any,
    size: Any,
    addresses: Any,
    offset: Any,
    weights: Any,
    divisor: Any,
    multiplies: Any,
    start: Any,
    count: Any,
    total: Any,
) -> None:
    """Compute the mean of a chunk of blocks that begin ``offset`` behind some addresses.

    ``multiplies``: by ``divisor``, which is the inverse of a power of two.
    """
    take(kind, addresses[0] + offset, size, start, count, total, False, _ONE)
    if weights.size:
        for i in range(count):
            total[i] = total[i] * weights[0]
    for k in range(_1, uint64(addresses.size)):
        weight = weights[k] if weights.size else _ONE
        take(kind, addresses[k] + offset, size, start, count, total, True, weight)
    if multiplies:
        for i in range(count):
            total[i] = total[i] * divisor
    else:
        for i in range(count):
            total[i] = total[i] / divisor


@compiled(float64(int64, uint64, READ_WORDS, uint64, READ_FLOATS, float32, boolean, READ_FLOATS, FLOATS, BYTES, FLOATS))
def combine(
    kind: Any,
    size: Any,
    addresses: Any,
    offset: Any,
    weights: Any,
    divisor: Any,
    multiplies: Any,
    before: Any,
    after: Any,
    out: Any,
    arrived: Any,
) -> Any:
    """Encode the mean of blocks that begin ``offset`` behind some addresses. Arrays of no elements are not wanted.

    With ``after``, the residual ``before`` is added to the mean, and what is lost is left there. Without ``before``
    that is 0, which turns -0 into 0.

    Returns:
        The sum of squares of the mean; -1 if something is not finite.
    """
    begin, total, left = uint64(out.ctypes.data), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    owed, owing, results = row_of(before), row_of(after), row_of(arrived)
    start, squares = _0, 0.0
    while start < size:
        count = min(CHUNK, size - start)
        _average(kind, size, addresses, offset, weights, divisor, multiplies, start, count, total)
        squares += _squares(total, count)
        if owing.size:
            if owed.size:
                for i in range(count):
                    total[i] = total[i] + owed[start + i]
            else:
                for i in range(count):
                    total[i] = total[i] + _ZERO
            most = give(kind, begin, size, start, count, total, owing[start : start + count])
        else:
            most = give(kind, begin, size, start, count, total, left)
        if most >= INFINITY:
            return -1.0
        if results.size:
            take(kind, begin, size, start, count, results[start : start + count], False, _ONE)
        start += count
    return squares


@compiled(int64(int64, uint64, READ_WORDS, READ_WORDS, uint64, READ_FLOATS, float32, boolean, float64))
def hand_out(
    kind: Any,
    size: Any,
    addresses: Any,
    targets: Any,
    offset: Any,
    weights: Any,
    divisor: Any,
    multiplies: Any,
    limit: Any,
) -> Any:
    """Write the mean of blocks to all ``targets``, as far behind each. These may be where the blocks lie.

    A chunk is written while all of its contributions are in the first-level cache.

    Returns:
        The number of elements that were written: all, or those in front of a chunk with one that is not finite, or with
        which the sum of squares of the mean exceeds the ``limit``.
    """
    total, left, codes = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    made, start, squares = uint64(codes.ctypes.data), _0, 0.0
    while start < size:
        count = min(CHUNK, size - start)
        _average(kind, size, addresses, offset, weights, divisor, multiplies, start, count, total)
        if limit < np.inf:
            squares += _squares(total, count)
            if squares > limit:
                return int64(start)
        if give(kind, made, size, _0, count, total, left) >= INFINITY:
            return int64(start)
        for k in range(uint64(targets.size)):
            if kind == FP32:
                numbers = carray(pointer(targets[k] + offset + start * _4, np.float32), CHUNK)
                for i in range(count):
                    numbers[i] = codes[i]
            else:
                halves = carray(pointer(targets[k] + offset + start * _2, np.uint16), CHUNK)
                given = carray(pointer(made, np.uint16), CHUNK)
                for i in range(count):
                    halves[i] = given[i]
        start += count
    return int64(size)
