"""Contributions of the workers of a chaos run, as a function of the worker's name and of the round.

Values do not depend on ranks or on earlier contributions. A repeated contribution therefore has the same bytes, and
the oracle makes them once more from the ledger's names. A generator by counter (lowbias32: Wellons 2018, *Prospecting
for hash functions*) makes any of them without those before. Bits become floats directly, with magnitudes over sixteen
binary orders, so that the order of a sum shows in its bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.protocol.planes import AUTO, DIRECT, HIERARCHICAL

Array = npt.NDArray[Any]

SIZES: Final = (16_384, 7, 16_411, 393_261)
"""Number of elements of each bucket: one that fills pages, two that fill nothing evenly, and one of two slices."""
COARSE: Final = 1 << 62
"""Bit of a seed: its contributions have few bits, so that sums of up to 32 of them are exact in any order.

Gloo and NCCL add in an order of their own. Then the oracle's comparison bit by bit holds for them, too.
"""
LEVELED: Final = 1 << 61
"""Bit of a seed: workers are on two hosts, and reduce in each before they exchange."""
QUICKER: Final = "quicker"
"""In place of a plane: each worker is on a host of its own, and rounds take the quicker way."""
BITS: Final = {AUTO: 0, DIRECT: COARSE, HIERARCHICAL: COARSE | LEVELED, QUICKER: COARSE}
"""Bits of the seed, by plane."""
STEP: Final = np.float32(0.01)
"""Learning rate: the part of a mean by which weights change in a round."""
_BLOCK: Final = 16_384
"""Number of elements that are made at a time, so that the computation stays in a core's cache."""
_GOLDEN: Final = 0x9E37_79B9
_MASK: Final = (1 << 64) - 1


@cache
def plan() -> Plan:
    """Return the plan of a chaos run."""
    return simple_plan([(f"bucket {part}", size) for part, size in enumerate(SIZES)], FLOAT32)


def values(seed: int, name: str, number: int, part: int, out: Array | None = None) -> Array:
    """Make the contribution of ``name`` to bucket ``part`` of round ``number``; in ``out`` if that is given."""
    if out is None:
        out = np.empty(SIZES[part], np.float32)
    key = _key(seed, name, number, part)
    coarse = bool(seed & COARSE)
    exponents, fractions = np.uint32(0x0380_0000 if coarse else 0x0780_0000), 0x8078_0000 if coarse else 0x807F_FFFF
    low, high = np.uint32(key & 0xFFFF_FFFF), np.uint32(key >> 32)
    for first in range(0, out.size, _BLOCK):
        block = out[first : first + _BLOCK]
        x = block.view(np.uint32)  # bits are made in the place of the values
        np.multiply(_counter()[: x.size], np.uint32(_GOLDEN), out=x)
        x += np.uint32((int(low) + first * _GOLDEN) & 0xFFFF_FFFF)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x21F0_AAAD)
        x ^= high
        x ^= x >> np.uint32(15)
        x *= np.uint32(0xD35A_2D97)
        x ^= x >> np.uint32(15)
        # Sign and fraction as they come; four bits more choose one of sixteen exponents from 2^-8 on. Coarse ones have
        # four bits of a fraction, and one of eight exponents.
        exponent = (x & exponents) + np.uint32(119 << 23)
        x &= np.uint32(fractions)
        x |= exponent
    return out


def weight(seed: int, name: str, number: int) -> float:
    """Return the weight of ``name`` in round ``number``: now and then 0, and in each third round alike for all."""
    if number % 3 == 0:
        return 1.0
    key = _key(seed, name, number, -1)
    return 0.0 if key % 32 == 0 else 1.0 + (key >> 8) % 8 / 4


def host(name: str) -> str:
    """Return the host on which ``name`` is taken to be, if workers reduce by levels: one of two."""
    return f"host-{sum(name.encode()) % 2}"


def fingerprint(vectors: Sequence[Array]) -> int:
    """Compute 64 bits by which members and the oracle compare vectors: BLAKE2b, not a digest of the product."""
    found = blake2b(digest_size=8)
    for vector in vectors:
        found.update(vector.data)
    return int.from_bytes(found.digest(), "little")


def _key(seed: int, name: str, number: int, part: int) -> int:
    """Mix the arguments into 64 bits."""
    key = zlib.crc32(name.encode())
    for value in (seed, number, part):
        key = ((key ^ (value & _MASK)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        key ^= key >> 29
        key = (key * 0x94D0_49BB_1331_11EB) & _MASK
        key ^= key >> 32
    return key


@cache
def _counter() -> Array:
    return np.arange(_BLOCK, dtype=np.uint32)
