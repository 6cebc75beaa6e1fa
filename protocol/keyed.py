"""The keyed hash of results: bytes that nothing without the key can find other bytes for.

    row   Σ ((low(w_i) + low(k_i)) mod 2^32) · ((high(w_i) + high(k_i)) mod 2^32)    mod 2^64

The w_i are up to 1024 little-endian 64-bit words, and the k_i as many of the key. This is NH (Black, Halevi, Krawczyk,
Krovetz, Rogaway 1999, *UMAC: Fast and Secure Message Authentication*). Two different rows of one length have the same
sum with a chance of 2^-32 at most. That needs a key that their author does not know. The sums of all rows, behind the
number of bytes, are short. A code over them (`gradserver.engine.proofs`) is told in their place, so nothing tells of
the key.

Compiled, it reads 26 GB/s from a cache, where numpy's way takes 1.4 GB/s, SHA-256 1.3 GB/s and BLAKE2b 0.5 GB/s.
`gradserver.protocol.digest` needs no key: anything can compute it, and find other bytes for it.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.kernels import Words, active

ROW: Final = 1024
"""Words of a row, and of a key."""
ROW_BYTES: Final = 8 * ROW
_AT_ONCE: Final = 8 * ROW
"""Words that numpy goes over in one step, so that they stay in a cache."""
_LOW, _SHIFT = np.uint64(0xFFFF_FFFF), np.uint64(32)


def key_of(secret: str) -> Words:
    """Return the key that follows from a secret."""
    return np.frombuffer(hashlib.shake_256(secret.encode()).digest(ROW_BYTES), "<u8")


def rows(data: Buffer | npt.NDArray[Any], key: Words) -> bytes:
    """Return the sums of the rows of ``data``, and the bytes behind its last whole word.

    Of parts with whole rows, but for the last one, they are those of the whole, one behind the other.
    """
    raw = np.frombuffer(data, np.uint8)
    whole = raw.size // 8 * 8
    words, rest = raw[:whole].view("<u8"), raw[whole:].tobytes()
    if not whole:
        return rest
    sums = np.empty(-(-words.size // ROW), np.uint64)
    if (kernel := active().rows) is not None:
        kernel(words, key, sums)
    else:
        for start in range(0, words.size, _AT_ONCE):
            _rows(words[start : start + _AT_ONCE], key, sums[start // ROW : (start + _AT_ONCE) // ROW])
    return sums.tobytes() + rest


def _rows(words: Words, key: Words, sums: Words) -> None:
    many = words.size // ROW
    if many:
        _sum(words[: many * ROW].reshape(many, ROW), key, sums[:many])
    if words.size > many * ROW:
        _sum(words[None, many * ROW :], key, sums[many : many + 1])


def _sum(words: Words, key: Words, sums: Words) -> None:
    mixed = (words.view("<u4") + key[: words.shape[1]].view("<u4")).view("<u8")
    np.einsum("ij,ij->i", mixed & _LOW, mixed >> _SHIFT, out=sums)


def hashed(size: int, parts: bytes) -> bytes:
    """Return the hash of so many bytes, of which these are the `rows`."""
    return size.to_bytes(8, "little") + parts


def keyed_hash(data: Buffer | npt.NDArray[Any], key: Words) -> bytes:
    """Return the hash of ``data``."""
    raw = np.frombuffer(data, np.uint8)
    return hashed(raw.size, rows(raw, key))
