"""What all codecs share: the cut into blocks, the size law, the checks, and working memory.

A payload is its blocks' encodings one behind the other, and every block of ``BLOCK`` elements but the last is full.
So a block is worked on while it is in cache, and the size of a payload follows from the number of elements alone:
whoever receives one can refuse it before taking memory. Numbers travel little-endian, as in every raw frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from protocol.buffer import Buffer
from protocol.errors import DTypeError, LayoutError, MalformedMessageError, SizeMismatchError

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

BLOCK: Final = 65_536
"""Elements that are encoded together: 256 KiB of float32, and an offset within it is a uint16. Part of the format."""

SIGN: Final = 0x8000_0000
MAGNITUDE: Final = 0x7FFF_FFFF
"""A float32 without its sign bit. Read as integers, magnitudes keep their order: finite < Inf < NaN."""
INFINITY: Final = 0x7F80_0000
"""The magnitude of Inf."""


class Scratch:
    """Working memory that calls reuse: 768 KiB, and a slice if there is error feedback.

    One for each thread: two calls at the same time must not share it.
    """

    __slots__ = ("_floats", "_words")

    def __init__(self) -> None:
        self._words = np.empty((3, BLOCK), np.uint32)
        self._floats = np.empty(0, np.float32)

    def words(self, numel: int) -> tuple[Words, Words, Words]:
        """Three arrays of ``numel`` (at most ``BLOCK``) words, whose content the next call of `words` may change."""
        first, second, third = self._words[:, :numel]
        return first, second, third

    def floats(self, numel: int) -> Floats:
        """An array of ``numel`` elements, whose content the next call of `floats` may change."""
        if self._floats.size < numel:
            self._floats = np.empty(numel, np.float32)
        return self._floats[:numel]


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """A way to write float32 as fewer bytes. Codecs of equal ``code`` and ``parameter`` are equal.

    What every one of them promises:

    - The size of a payload is a function of the number of elements.
    - A finite element decodes to a finite one: what does not fit saturates.
    - If any element is not finite, some decoded one is not either: the coordinator sees it and averages nothing.
    - Whoever decodes what one of them encoded has the same bits: it computes with no subnormal number, which some
      processors and threads flush to zero.
    """

    code: ClassVar[int]
    """What travels, with ``parameter``; never reused for another format."""
    family: ClassVar[str]
    """The name without the parameter."""

    parameter: int = 0

    @property
    def name(self) -> str:
        """What `codec_of` makes this codec from."""
        return self.family

    def nbytes(self, numel: int) -> int:
        """Bytes in the payload of ``numel`` elements."""
        full, rest = divmod(numel, BLOCK)
        return full * self._block_nbytes(BLOCK) + (self._block_nbytes(rest) if rest else 0)

    def encode(
        self, values: Floats, out: Bytes | None = None, seed: int = 0, scratch: Scratch | None = None
    ) -> memoryview:
        """``values`` as bytes.

        Args:
            values: float32, one-dimensional, contiguous. Not changed.
            out: uint8, at least ``nbytes(values.size)`` long, apart from ``values``; by default new memory.
            seed: what `randomk` draws from, from `seed_of`; the others do not look at it.
            scratch: working memory; by default new memory.

        Returns:
            The payload: the first ``nbytes(values.size)`` bytes of ``out``.

        Raises:
            DTypeError, LayoutError: ``values`` or ``out`` is not as said above.
            SizeMismatchError: ``out`` is too small.
        """
        _check(values, np.float32, "values")
        size = self.nbytes(values.size)
        if out is None:
            out = np.empty(size, np.uint8)
        _check(out, np.uint8, "out")
        if out.size < size:
            raise SizeMismatchError(f"{values.size} elements as {self.name} take {size} bytes, got room for {out.size}")
        scratch = scratch or Scratch()
        payload = out[:size]
        with np.errstate(all="ignore"):  # values that are not finite are expected, and kept recognisable
            for number, elements, piece in self._blocks(values.size):
                self._encode(values[elements], payload[piece], seed + number, scratch)
        return payload.data

    def decode(self, payload: Buffer, numel: int, out: Floats, seed: int = 0, scratch: Scratch | None = None) -> None:
        """Write the elements that ``payload`` stands for into ``out``.

        Args:
            payload: bytes from anywhere. Nothing in them is trusted.
            numel: how many elements the receiver expects.
            out: float32, one-dimensional, contiguous, ``numel`` elements. After an error its content is undefined.
            seed: the one that was encoded with.
            scratch: working memory; by default new memory.

        Raises:
            MalformedMessageError: ``payload`` is not what ``numel`` elements are encoded as.
            DTypeError, LayoutError, SizeMismatchError: ``out`` is not as said above.
        """
        _check(out, np.float32, "out")
        if out.size != numel:
            raise SizeMismatchError(f"{numel} elements are to be decoded into an array of {out.size}")
        data = np.frombuffer(payload, np.uint8)
        size = self.nbytes(numel)
        if data.size != size:
            raise MalformedMessageError(f"{numel} elements as {self.name} take {size} bytes, got {data.size}")
        scratch = scratch or Scratch()
        with np.errstate(all="ignore"):
            for number, elements, piece in self._blocks(numel):
                self._decode(data[piece], out[elements], seed + number, scratch)

    def _blocks(self, numel: int) -> Iterator[tuple[int, slice, slice]]:
        """Each block's number, its elements, and its bytes in the payload."""
        size = self._block_nbytes(BLOCK)
        for number, start in enumerate(range(0, numel, BLOCK)):
            count = min(BLOCK, numel - start)
            first = number * size
            yield number, slice(start, start + count), slice(first, first + self._block_nbytes(count))

    @abstractmethod
    def _block_nbytes(self, numel: int) -> int:
        """Bytes of a block of ``numel`` elements, of which there is at least one."""

    @abstractmethod
    def _encode(self, values: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> None:
        """Encode one block; ``out`` has its exact size."""

    @abstractmethod
    def _decode(self, data: Bytes, out: Floats, seed: int, scratch: Scratch, /) -> None:
        """Decode one block; ``data`` has its exact size."""


def is_finite(values: Floats) -> bool:
    """Whether every element is."""
    return bool(np.isfinite(values).all())


def _check(array: npt.NDArray[np.generic], dtype: type[np.generic], what: str) -> None:
    if array.dtype != dtype:
        raise DTypeError(f"{what} must be {np.dtype(dtype).name}, got {array.dtype.name}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise LayoutError(f"{what} must be one-dimensional and contiguous, got shape {array.shape}")
