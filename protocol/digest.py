"""The digest of the ledger: 64 bits of any number of bytes, of contributions and of results.

    digest(bytes, at) = Σ w_p · T[p mod 1024] · (2·⌊p / 1024⌋ + 1)    mod 2^64

The w_p are the little-endian 64-bit words of a place that holds zeros, and ``bytes`` from offset ``at`` on. T are 1024
odd numbers, 8 KiB that stay in the first-level cache: splitmix64 of 1, 2, … (Steele, Lea, Flood 2014, *Fast splittable
pseudorandom number generators*).

Digests add up: the digest of a whole is the sum of its parts' digests. So it depends neither on the cut into slices,
blocks, threads or shards, nor on their order. Odd factors have inverses, so every other word gives another digest. An
odd word in another place gives another digest, too. Each zero bit at a word's end takes a bit of the factors'
difference: of words with z of them one in 2^(63-z) has the same digest in another place. The digest shows faults, not
forgery: other bytes with the same digest can be found.

For bytes in a core's second-level cache it takes 2.6 times as long as a copy. For bytes in no cache it takes 0.7 times
as long, since it reads, and writes nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.kernels import active
from gradserver.protocol.plan import Plan

MODULUS: Final = 1 << 64
_ROW: Final = 1024
"""Words after which the factors repeat, times the next odd number."""
_WORD: Final = np.dtype("<u8")


@cache
def _factors() -> npt.NDArray[np.uint64]:
    """Return T."""
    mixed = np.arange(1, _ROW + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def digest(data: Buffer | npt.NDArray[Any], at: int = 0) -> int:
    """Return the digest of ``data``, which stands at byte ``at`` of the whole. Any contiguous memory will do."""
    raw = np.frombuffer(data, np.uint8)
    lead = min(-at % 8, raw.size)
    body = (raw.size - lead) // 8 * 8
    total = 0
    if lead:  # it begins and ends within a word
        total += _partial(raw[:lead], at)
    if lead + body < raw.size:
        total += _partial(raw[lead + body :], at + lead + body)
    words, factors = raw[lead : lead + body].view(_WORD), _factors()
    if (kernel := active().digest) is not None:
        return (total + kernel(words, factors, (at + lead) // 8)) % MODULUS
    row, column = divmod((at + lead) // 8, _ROW)
    if column:
        first = words[: _ROW - column]
        total += int(np.einsum("i,i->", first, factors[column : column + first.size])) * (2 * row + 1)
        words, row = words[first.size :], row + 1
    rows = words.size // _ROW
    if rows:
        odd = np.arange(2 * row + 1, 2 * (row + rows) + 1, 2, dtype=np.uint64)
        sums = np.einsum("ij,j->i", words[: rows * _ROW].reshape(rows, _ROW), factors)
        total += int(np.einsum("i,i->", sums, odd))
    if last := words.size - rows * _ROW:
        total += int(np.einsum("i,i->", words[rows * _ROW :], factors[:last])) * (2 * (row + rows) + 1)
    return total % MODULUS


def _partial(data: npt.NDArray[np.uint8], at: int) -> int:
    """Return the digest of less than a word, which lies within one."""
    row, column = divmod(at // 8, _ROW)
    word = int.from_bytes(data.tobytes(), "little") << (8 * (at % 8))
    return word * int(_factors()[column]) * (2 * row + 1)


def places(plan: Plan) -> tuple[int, ...]:
    """Return where each bucket's payload begins in what is hashed of a round: behind the one before, at a whole row.

    A round hashes one section, which begins at 0.
    """
    found, at = [], 0
    firsts = {section.first for section in plan.each}
    for part, bucket in enumerate(plan.buckets):
        at = 0 if part in firsts else at
        found.append(at)
        operation = bucket.operation
        size = operation.codec.nbytes(bucket.numel) if operation.is_lossy else bucket.numel * bucket.dtype.itemsize
        at += -(-size // (8 * _ROW)) * 8 * _ROW
    return tuple(found)
