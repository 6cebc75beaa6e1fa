"""Kernels: loops over the elements of a block in one pass, where numpy makes one pass for every step.

A kernel gives the same bits as numpy. So members with and without it can train together, and one can get it in the
middle of a round. Here is the table of those there are. It is empty until `gradserver.protocol.compiled` has compiled
them: then another table takes its place at once. numpy does what is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

NONE: Final = np.empty(0, np.float32)
"""In the place of an array that there is not."""


class Given(NamedTuple):
    """Contributions to a mean, in rank order.

    Attributes:
        rows: their memory, which must outlive the addresses.
        addresses: where each begins.
        weights: factor of each; none if all are equal.
        divisor: of the sum.
    """

    rows: Sequence[npt.NDArray[Any]]
    addresses: Words
    weights: Floats
    divisor: float

    @classmethod
    def of(cls, rows: Sequence[npt.NDArray[Any]], weights: Sequence[float | np.float32], divisor: float) -> Given:
        """Collect contributions. There are no ``weights`` if all are equal."""
        addresses = np.array([row.ctypes.data for row in rows], np.uint64)
        return cls(rows, addresses, np.array(weights, np.float32), divisor)


Encode = Callable[[Floats, Bytes], None]
Decode = Callable[[Bytes, Floats], None]
Add = Callable[[Bytes, Floats, np.float32 | None], None]
Compensate = Callable[[Floats, Floats, Bytes, Floats], bool]
Largest = Callable[[Floats, Offsets], None]
Keep = Callable[[Floats, Floats, Offsets, Floats, Floats], bool]
AddAt = Callable[[Floats, Offsets, Floats, float], None]
Digest = Callable[[Words, Words, int], int]
Rows = Callable[[Words, Words, Words], None]
HandOut = Callable[[Given, Words, int, int, float], int]
Combine = Callable[[Given, int, int, Floats, Floats, Bytes, Floats], float]
Products = Callable[[Sequence[npt.NDArray[Any] | None], int, int, int], list[float]]


class Kernels(NamedTuple):
    """Table of kernels: by the code of a codec, or by the name of an element type.

    Attributes:
        encode: as `gradserver.protocol.codecs.Codec.encode_block`.
        decode: as ``decode_block``.
        add: as ``add_block``.
        compensate: as ``compensate_block``, with working memory of as many elements.
        combine: compute the encoded mean of a block, of which are given its first byte in each contribution and its
            number of elements. It takes the residual of the round before, or `NONE` for zeros, and leaves a new one
            in other memory, or `NONE` for none. The last array gets the result as it is decoded, unless it is `NONE`.
            It returns about the sum of squares of the mean as it was before its encoding. Less than 0 says that a
            number on the way is not finite: what was written is void then.
        average: the same for a mean in the type of its elements of 16 bits, which has no residuals.
        hand_out: compute such a mean, and write it to all targets, which are given by their addresses, and may be where
            contributions lie. Given are the place of the block behind all addresses, in bytes, its elements, and a
            limit. It returns how many are done: all, or those in front of some among which one is not finite, or with
            which the sum of squares, about, exceeds the limit.
        digest: add up words times factors, of which there are so many, times the odd number of a row of them. The last
            argument is the place of the first word. See `gradserver.protocol.digest`.
        rows: compute the keyed sum of each row of words, given these, the key, and room for the sums. See
            `gradserver.protocol.keyed`.
        largest: write the offsets of the elements of largest magnitude, as many as there is room for, in their order.
        keep_largest: encode with feedback the elements of largest magnitude, of which it writes the offsets. Given are
            values, residual, offsets, room for what is kept, and working memory. False as for ``compensate_block``.
        keep_drawn: the same for elements at given offsets.
        add_at: add numbers, times a weight if there is one, at offsets of a total.
        products: compute the sums of squares of blocks, and then the products of each with the last one. None stands
            for zeros. So many elements are looked at, in rows of 256: of so many rows one, with the offset that comes
            last. These sums need not have numpy's bits, as no result depends on them.
    """

    encode: Mapping[int, Encode] = {}
    decode: Mapping[int, Decode] = {}
    add: Mapping[int, Add] = {}
    compensate: Mapping[int, Compensate] = {}
    combine: Mapping[int, Combine] = {}
    average: Mapping[str, Combine] = {}
    hand_out: Mapping[str, HandOut] = {}
    digest: Digest | None = None
    rows: Rows | None = None
    largest: Largest | None = None
    keep_largest: Keep | None = None
    keep_drawn: Keep | None = None
    add_at: AddAt | None = None
    products: Mapping[str, Products] = {}


NUMPY: Final = Kernels()
"""Table of no kernels."""

_active: Kernels = NUMPY


def active() -> Kernels:
    """Return the table that is used now."""
    return _active


def use(kernels: Kernels) -> None:
    """Replace the table, for all threads, from their next block on."""
    global _active
    _active = kernels
