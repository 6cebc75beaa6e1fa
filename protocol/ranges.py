"""Sets of positions as ranges: sorted pairs (first, the one behind the last) that neither overlap nor touch.

On the wire, and on disk, a pair is two little-endian integers of 64 bits.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Final, TypeAlias

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import brief
from gradserver.protocol.errors import LimitExceededError, MalformedMessageError
from gradserver.protocol.limits import MAX_NUMEL, MAX_RANGES

Ranges: TypeAlias = tuple[tuple[int, int], ...]

PAIR_BYTES: Final = 16
"""Bytes of one range."""
MAX_RANGES_BYTES: Final = MAX_RANGES * PAIR_BYTES


def count(ranges: Ranges) -> int:
    """Count the positions in ``ranges``."""
    return sum(stop - start for start, stop in ranges)


def union(*parts: Ranges) -> Ranges:
    """Return the positions that are in any of them."""
    present = [part for part in parts if part]
    if len(present) < 2:
        return present[0] if present else ()
    found: list[tuple[int, int]] = []
    for start, stop in sorted(pair for part in present for pair in part):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def minus(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return the positions in ``ranges`` that are not in ``taken``."""
    if not taken or not ranges:
        return ranges
    found: list[tuple[int, int]] = []
    at = 0
    for start, stop in ranges:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        here = at
        while here < len(taken) and taken[here][0] < stop:
            if start < taken[here][0]:
                found.append((start, taken[here][0]))
            start = max(start, taken[here][1])
            here += 1
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def both(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the positions in both."""
    return minus(ranges, minus(ranges, others)) if ranges and others else ()


def lowest(ranges: Ranges, number: int) -> tuple[Ranges, Ranges]:
    """Return the lowest ``number`` positions, or all if there are no more; and the rest."""
    for at, (start, stop) in enumerate(ranges):
        if stop - start > number:
            taken = (*ranges[:at], (start, start + number)) if number else ranges[:at]
            return taken, ((start + number, stop), *ranges[at + 1 :])
        number -= stop - start
    return ranges, ()


def pack(ranges: Ranges) -> bytes:
    """Encode ranges as bytes."""
    return struct.pack(f"<{2 * len(ranges)}Q", *(bound for pair in ranges for bound in pair))


def unpack(data: Buffer) -> Ranges:
    """Return the ranges in ``data``. MalformedMessageError or LimitExceededError if it has none."""
    if len(data) % PAIR_BYTES:
        raise MalformedMessageError(f"expected pairs of positions, got {len(data)} bytes")
    if len(data) > MAX_RANGES_BYTES:
        raise LimitExceededError(f"{len(data) // PAIR_BYTES} ranges at once, the limit is {MAX_RANGES}")
    bounds = struct.unpack(f"<{len(data) // 8}Q", data)
    if bounds and (bounds[-1] > MAX_NUMEL or any(one >= other for one, other in pairwise(bounds))):
        raise MalformedMessageError("ranges of positions that do not follow one another")
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def packed(value: object) -> Ranges:
    """Return the ranges in a field of a record."""
    if type(value) is not bytes:
        raise MalformedMessageError(f"expected ranges of positions, got {brief(value)}")
    return unpack(value)
