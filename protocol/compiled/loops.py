"""Loops over the elements of a block, in the part of Python that numba compiles.

They give the same bits as numpy does in `gradserver.protocol.codecs` and `gradserver.reducer`: each operation rounds as
numpy's, in the same order. Nothing here may be contracted or reordered, so ``fastmath`` is off. Where a step is done
otherwise, a comment says why the bits are the same.

A block is worked on in chunks that stay in the first-level cache. Rows are given as addresses: so their number is no
part of a function's type, and a function is compiled once. Arithmetic on uint32 is cast back after every operation, as
numba would go on in 64 bits, of which a vector has half as many. Indices are unsigned: numba lets negative ones wrap.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import boolean, carray, float32, float64, int8, int64, uint16, uint32, uint64, void

from gradserver.protocol.compiled.language import (
    BYTES,
    FLOATS,
    INFINITY,
    MAGNITUDE,
    READ_BYTES,
    READ_FLOATS,
    READ_WORDS,
    ROW,
    SUMS,
    WORDS,
    bits_of,
    compiled,
    magnitude_of,
    number_of,
    pointer,
    round_even,
    row_of,
)

FP32, BF16, FP16, INT8 = 0, 1, 2, 3
"""Codecs, by their codes; float32 as the elements of a tensor, too."""
BFLOAT16, FLOAT16 = 16, 17
"""Element types. They differ from codecs in what is too large: that becomes Inf."""

CHUNK: Final = np.uint64(512)
"""Elements that all steps are done with before the next ones. With more of them, the memory waits for the steps."""
_GROUP: Final = np.uint64(256)
_ROW: Final = np.uint64(1024)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_HALF: Final = np.uint64(32)
_0, _1, _2, _4, _8, _255 = (np.uint64(number) for number in (0, 1, 2, 4, 8, 255))

_SIGN: Final = np.uint32(0x8000_0000)
_BF16_OVERFLOW: Final = np.uint32(0x7F7F_8000)
_FP16_OVERFLOW: Final = np.uint32(0x477F_F000)
_FP16_LARGEST: Final = np.uint32(0x477F_E000)
_FP16_NORMAL: Final = np.uint32(113 << 23)
_FP16_POWER: Final = np.uint32((13 << 23) + (-113 << 10 & 0xFFFF))
_INT8_LEAST: Final = np.finfo(np.float32).tiny
_INT8_GREATEST: Final = np.uint32(0x7C01_0200).view(np.float32)
_STEPS: Final = np.float32(127)
_NAN: Final = np.float32(np.nan)
_ONE: Final = np.float32(1)
_ZERO: Final = np.float32(0)
_LEAST_HALF: Final = np.float32(2**-14)
_CLEAR: Final = int(np.float32(0.49996).view(np.uint32))
"""Distance from the nearest integer, as bits, up to which a product with 1/scale rounds as the quotient does."""

# ── from bytes to numbers ─────────────────────────────────────────────────────────────────────────────────


@compiled()
def _of_upper(code: Any) -> Any:
    """Read a bfloat16."""
    return number_of(uint32(uint32(code) << uint32(16)))


@compiled()
def _of_half(code: Any) -> Any:
    """Read a half, as `Fp16` does."""
    wide = uint32(code)
    magnitude = uint32(wide & uint32(0x7FFF))
    number = number_of(uint32(uint32(magnitude << uint32(13)) + uint32(112 << 23)))
    doubled = (number + number) - _LEAST_HALF
    number = number if number < doubled else doubled
    bits = uint32(bits_of(number) | (INFINITY if magnitude >= uint32(0x7C00) else uint32(0)))
    return number_of(uint32(bits | uint32(uint32(wide & uint32(0x8000)) << uint32(16))))


@compiled(void(int64, uint64, uint64, uint64, uint64, ROW, boolean, float32))
def take(kind: Any, begin: Any, size: Any, start: Any, count: Any, total: Any, adds: Any, weight: Any) -> None:
    """Decode ``count`` elements from ``start`` on, of the ``size`` that begin at an address.

    If it ``adds``, they are added to ``total`` with their weight. A product with 1 changes no bit.
    """
    if kind == INT8:
        scales = carray(pointer(begin + (start >> _8) * _4, np.float32), CHUNK >> _8)
        integers = carray(pointer(begin + ((size + _255) >> _8) * _4 + start, np.int8), CHUNK)
        first, group = _0, _0
        while first < count:
            scale, last = scales[group], min(first + _GROUP, count)
            if adds:
                for i in range(first, last):
                    total[i] = total[i] + np.float32(integers[i]) * scale * weight
            else:
                for i in range(first, last):
                    total[i] = np.float32(integers[i]) * scale
            first, group = last, group + _1
    elif kind == FP32:
        numbers = carray(pointer(begin + start * _4, np.float32), CHUNK)
        if adds:
            for i in range(count):
                total[i] = total[i] + numbers[i] * weight
        else:
            for i in range(count):
                total[i] = numbers[i]
    else:
        halves = carray(pointer(begin + start * _2, np.uint16), CHUNK)
        if kind in (BF16, BFLOAT16):
            if adds:
                for i in range(count):
                    total[i] = total[i] + _of_upper(halves[i]) * weight
            else:
                for i in range(count):
                    total[i] = _of_upper(halves[i])
        elif adds:
            for i in range(count):
                total[i] = total[i] + _of_half(halves[i]) * weight
        else:
            for i in range(count):
                total[i] = _of_half(halves[i])


# ── from numbers to bytes ─────────────────────────────────────────────────────────────────────────────────
# Each returns the largest magnitude, which tells what is not finite, and leaves in `left` what was lost.


@compiled(uint32(uint64, uint64, uint64, uint64, ROW, ROW))
def _give_int8(begin: Any, size: Any, start: Any, count: Any, values: Any, left: Any) -> Any:
    scales = carray(pointer(begin + (start >> _8) * _4, np.float32), CHUNK >> _8)
    integers = carray(pointer(begin + ((size + _255) >> _8) * _4 + start, np.int8), CHUNK)
    most, first, group = uint32(0), _0, _0
    while first < count:
        last, peak = min(first + _GROUP, count), uint32(0)
        for i in range(first, last):
            peak = max(peak, magnitude_of(values[i]))
        most = max(most, peak)
        if peak < INFINITY:
            scale = min(max(number_of(peak) / _STEPS, _INT8_LEAST), _INT8_GREATEST)
            # A product with 1/scale is less than 2⁻¹⁵ from the quotient, and takes a fifth of its time. Unless it is
            # as near to the middle of two integers, both round to the same one.
            inverse, farthest = _ONE / scale, uint32(0)
            for i in range(first, last):
                quotient = values[i] * inverse
                integer = round_even(quotient)
                farthest = max(farthest, magnitude_of(quotient - integer))
                integers[i] = int8(np.int32(integer))
                left[i] = values[i] - integer * scale
            if farthest > uint32(_CLEAR):
                for i in range(first, last):
                    integer = round_even(values[i] / scale)
                    integers[i] = int8(np.int32(integer))
                    left[i] = values[i] - integer * scale
        else:
            scale = _NAN
            for i in range(first, last):
                integers[i] = int8(0)
        scales[group] = scale
        first, group = last, group + _1
    return most


@compiled(uint32(uint64, uint64, uint64, ROW, ROW))
def _give_bf16(begin: Any, start: Any, count: Any, values: Any, left: Any) -> Any:
    codes, most = carray(pointer(begin + start * _2, np.uint16), CHUNK), uint32(0)
    for i in range(count):
        bits = bits_of(values[i])
        magnitude, cut = uint32(bits & MAGNITUDE), uint32(bits >> uint32(16))
        most = max(most, magnitude)
        code = uint32(uint32(bits + uint32(uint32(0x7FFF) + uint32(cut & uint32(1)))) >> uint32(16))
        if magnitude >= _BF16_OVERFLOW:
            code = uint32(cut | (uint32(0x40) if magnitude > INFINITY else uint32(0)))
        codes[i] = uint16(code)
        left[i] = values[i] - _of_upper(code)
    return most


@compiled(uint32(uint64, uint64, uint64, boolean, ROW, ROW))
def _give_fp16(begin: Any, start: Any, count: Any, saturates: Any, values: Any, left: Any) -> Any:
    codes, most = carray(pointer(begin + start * _2, np.uint16), CHUNK), uint32(0)
    largest = uint32(0x7BFF) if saturates else uint32(0x7C00)
    for i in range(count):
        bits = bits_of(values[i])
        magnitude, sign = uint32(bits & MAGNITUDE), uint32(bits & _SIGN)
        most = max(most, magnitude)
        exponent = uint32(max(magnitude, _FP16_NORMAL) & INFINITY)
        power = number_of(uint32(exponent + _FP16_POWER))
        rounded = number_of(magnitude) + power
        arrived = bits_of(rounded - power)
        code = uint32(uint32(bits_of(rounded) + uint32(exponent >> uint32(13))) & uint32(0x7FFF))
        if magnitude >= _FP16_OVERFLOW:
            arrived = _FP16_LARGEST
            code = largest
            if magnitude >= INFINITY:
                code = uint32(0x7E00) if magnitude > INFINITY else uint32(0x7C00)
        codes[i] = uint16(uint32(code | uint32(sign >> uint32(16))))
        left[i] = values[i] - number_of(uint32(arrived | sign))
    return most


@compiled(uint32(uint64, uint64, uint64, ROW, ROW))
def _give_bfloat16(begin: Any, start: Any, count: Any, values: Any, _left: Any) -> Any:
    codes, most = carray(pointer(begin + start * _2, np.uint16), CHUNK), uint32(0)
    for i in range(count):
        bits = bits_of(values[i])
        most = max(most, uint32(bits & MAGNITUDE))
        odd = uint32(uint32(bits >> uint32(16)) & uint32(1))
        codes[i] = uint16(uint32(uint32(bits + uint32(uint32(0x7FFF) + odd)) >> uint32(16)))
    return most


@compiled(uint32(uint64, uint64, uint64, ROW, ROW))
def _give_fp32(begin: Any, start: Any, count: Any, values: Any, _left: Any) -> Any:
    numbers, most = carray(pointer(begin + start * _4, np.float32), CHUNK), uint32(0)
    for i in range(count):
        most = max(most, magnitude_of(values[i]))
        numbers[i] = values[i]
    return most


@compiled(uint32(int64, uint64, uint64, uint64, uint64, ROW, ROW))
def give(kind: Any, begin: Any, size: Any, start: Any, count: Any, values: Any, left: Any) -> Any:
    """Encode ``count`` elements as those from ``start`` on, of the ``size`` that begin at an address."""
    if kind == INT8:
        return _give_int8(begin, size, start, count, values, left)
    if kind == BF16:
        return _give_bf16(begin, start, count, values, left)
    if kind == BFLOAT16:
        return _give_bfloat16(begin, start, count, values, left)
    if kind == FP32:
        return _give_fp32(begin, start, count, values, left)
    return _give_fp16(begin, start, count, kind == FP16, values, left)


# ── digests ───────────────────────────────────────────────────────────────────────────────────────────────


@compiled(uint64(READ_WORDS, READ_WORDS, uint64))
def digest(words: Any, factors: Any, place: Any) -> Any:
    """Compute a digest of words, from one place on: rows of words times factors, times the odd number of the row."""
    size, row = uint64(words.size), carray(pointer(uint64(words.ctypes.data), np.uint64), words.size)
    factor = carray(pointer(uint64(factors.ctypes.data), np.uint64), factors.size)
    total, start, column, number = _0, _0, place % _ROW, place // _ROW
    while start < size:
        count, part = min(_ROW - column, size - start), _0
        for i in range(count):
            part += row[start + i] * factor[column + i]
        total += part * (_2 * number + _1)
        start, column, number = start + count, _0, number + _1
    return total


@compiled(void(READ_WORDS, READ_WORDS, WORDS))
def rows(words: Any, key: Any, sums: Any) -> None:
    """Compute the keyed sum of each row of words: products of halves, each with its half of the key added."""
    size, row = uint64(words.size), carray(pointer(uint64(words.ctypes.data), np.uint64), words.size)
    keys = carray(pointer(uint64(key.ctypes.data), np.uint64), key.size)
    start, number = _0, _0
    while start < size:
        count, total = min(_ROW, size - start), _0
        for i in range(count):
            word, own = row[start + i], keys[i]
            total += ((word + own) & _LOW) * (((word >> _HALF) + (own >> _HALF)) & _LOW)
        sums[number] = total
        start, number = start + count, number + _1


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────


@compiled(void(int64, READ_FLOATS, BYTES))
def encode(kind: Any, values: Any, out: Any) -> None:
    """Encode a block."""
    size, begin, row, left = uint64(values.size), uint64(out.ctypes.data), row_of(values), np.empty(CHUNK, np.float32)
    start = _0
    while start < size:
        count = min(CHUNK, size - start)
        give(kind, begin, size, start, count, row[start : start + count], left)
        start += count


@compiled(void(int64, READ_BYTES, FLOATS, boolean, float32))
def decode(kind: Any, data: Any, out: Any, adds: Any, weight: Any) -> None:
    """Decode a block, or add it to what is there with its weight."""
    size, begin, row = uint64(out.size), uint64(data.ctypes.data), row_of(out)
    start = _0
    while start < size:
        count = min(CHUNK, size - start)
        take(kind, begin, size, start, count, row[start : start + count], adds, weight)
        start += count


@compiled(boolean(int64, READ_FLOATS, FLOATS, BYTES, FLOATS))
def compensate(kind: Any, values: Any, residual: Any, out: Any, spare: Any) -> Any:
    """Encode a block of ``values + residual``, and leave in ``residual`` what is lost, if all sums are finite.

    In ``spare``, which is as long, stays what is owed until all sums are known to be finite.
    """
    size, begin, row, owed = uint64(values.size), uint64(out.ctypes.data), row_of(values), row_of(residual)
    sums, before, start = np.empty(CHUNK, np.float32), row_of(spare), _0
    while start < size:
        count = min(CHUNK, size - start)
        for i in range(count):
            before[start + i] = owed[start + i]
            sums[i] = row[start + i] + owed[start + i]
        if give(kind, begin, size, start, count, sums, owed[start : start + count]) >= INFINITY:
            for i in range(start + count):
                owed[i] = before[i]
            return False
        start += count
    return True


# ── comparisons ───────────────────────────────────────────────────────────────────────────────────────────


@compiled(float64(ROW, ROW, uint64), fastmath={"reassoc"})  # no result depends on these sums: their order is free
def _product(left: Any, right: Any, count: Any) -> Any:
    total = 0.0
    for i in range(count):
        total += float64(left[i]) * float64(right[i])
    return total


@compiled(void(int64, READ_WORDS, uint64, uint64, uint64, SUMS))
def products(kind: Any, addresses: Any, seen: Any, step: Any, offset: Any, sums: Any) -> None:
    """Add up the squares of blocks, and the products of each with the last one, of one group in ``step``.

    An address of 0 stands for zeros.
    """
    blocks = uint64(addresses.size)
    last, groups = blocks - _1, np.zeros((blocks, _GROUP), np.float32)
    for first in range(_0, seen, _GROUP):
        count = min(_GROUP, seen - first)
        for k in range(blocks):
            if addresses[k] != _0:
                take(kind, addresses[k], seen, first * step + offset * _GROUP, count, groups[k], False, _ONE)
                sums[k] += _product(groups[k], groups[k], count)
        for k in range(last):
            sums[blocks + k] += _product(groups[k], groups[last], count)
