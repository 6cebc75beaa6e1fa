"""The common part of all codecs: the cut into blocks, the size law, the checks, and working memory.

A payload is its blocks' encodings one behind the other, and every block of ``BLOCK`` elements but the last is full. So
a block is worked on while it is in cache. The size of a payload follows from the number of elements alone, and a
receiver can refuse one before it takes memory. Numbers travel little-endian, as in every raw frame.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import DTypeError, LayoutError, MalformedMessageError, SizeMismatchError
from gradserver.protocol.kernels import Bytes, Floats, active

Words = npt.NDArray[np.uint32]

BLOCK: Final = 65_536
"""Elements that are encoded together: 256 KiB of float32, and an offset within it is a uint16. Part of the format."""

SIGN: Final = 0x8000_0000
MAGNITUDE: Final = 0x7FFF_FFFF
"""A float32 without its sign bit. Read as integers, magnitudes keep their order: finite < Inf < NaN."""
INFINITY: Final = 0x7F80_0000
"""The magnitude of Inf."""


class Scratch:
    """Working memory that calls reuse: five blocks, 1.25 MiB. Pages that no codec touches cost nothing.

    Each thread has one: two calls at the same time must not share it.
    """

    __slots__ = ("_compensated", "_decoded", "_words")

    def __init__(self) -> None:
        first, second, third = np.empty((3, BLOCK), np.uint32)
        self._words = first, second, third
        self._compensated = np.empty(BLOCK, np.float32)
        self._decoded = np.empty(BLOCK, np.float32)

    def words(self, numel: int) -> tuple[Words, Words, Words]:
        """Return three arrays of ``numel`` (at most ``BLOCK``) words, for encoding or decoding one block."""
        first, second, third = self._words
        if numel == BLOCK:
            return self._words
        return first[:numel], second[:numel], third[:numel]

    def compensated(self, numel: int) -> Floats:
        """Return ``numel`` (at most ``BLOCK``) elements, for what is encoded with feedback."""
        return self._compensated[:numel]

    def decoded(self, numel: int) -> Floats:
        """Return ``numel`` (at most ``BLOCK``) elements, for what was decoded and is to be added up."""
        return self._decoded[:numel]


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """A way to write float32 as fewer bytes. Codecs of equal ``code`` and ``parameter`` are equal.

    Every codec promises this:

    - The size of a payload is a function of the number of elements.
    - A finite element decodes to a finite one: what does not fit saturates.
    - If any element is not finite, some decoded one is not either: the coordinator sees it and averages nothing.
    - All receivers that decode one payload get the same bits. No codec computes with subnormal numbers, which some
      processors and threads flush to zero.
    """

    code: ClassVar[int]
    """The number that travels, with ``parameter``. It is never reused for another format."""
    family: ClassVar[str]
    """The name without the parameter."""

    parameter: int = 0

    @property
    def name(self) -> str:
        """The name from which `codec_of` makes this codec."""
        return self.family

    def nbytes(self, numel: int) -> int:
        """Return the bytes in the payload of ``numel`` elements."""
        full, rest = divmod(numel, BLOCK)
        return full * self._block_nbytes(BLOCK) + (self._block_nbytes(rest) if rest else 0)

    def encode(
        self, values: Floats, out: Bytes | None = None, seed: int = 0, scratch: Scratch | None = None
    ) -> memoryview:
        """Encode ``values`` as bytes.

        Args:
            values: float32, one-dimensional, contiguous. Not changed.
            out: uint8, at least ``nbytes(values.size)`` long, apart from ``values``; by default new memory.
            seed: the seed of `randomk`'s choice, from `seed_of`; other codecs ignore it.
            scratch: working memory; by default new memory.

        Returns:
            The payload: the first ``nbytes(values.size)`` bytes of ``out``.

        Raises:
            DTypeError, LayoutError: ``values`` or ``out`` is not as said above.
            SizeMismatchError: ``out`` is too small.
        """
        payload = self.room(values, out)
        scratch = scratch or Scratch()
        with np.errstate(all="ignore"):  # values that are not finite are expected, and kept recognisable
            for number, elements, piece in self.blocks(values.size):
                self.encode_block(values[elements], payload[piece], seed + number, scratch)
        return payload.data

    def decode(self, payload: Buffer, numel: int, out: Floats, seed: int = 0, scratch: Scratch | None = None) -> None:
        """Write the elements that ``payload`` stands for into ``out``.

        Args:
            payload: bytes from anywhere. Nothing in them is trusted.
            numel: how many elements the receiver expects.
            out: float32, one-dimensional, contiguous, ``numel`` elements. After an error its content is undefined.
            seed: the seed of the encoding.
            scratch: working memory; by default new memory.

        Raises:
            MalformedMessageError: ``payload`` is not an encoding of ``numel`` elements.
            DTypeError, LayoutError, SizeMismatchError: ``out`` is not as said above.
        """
        _check(out, np.float32, "out")
        if out.size != numel:
            raise SizeMismatchError(f"{numel} elements are to be decoded into an array of {out.size}")
        data = self.data_of(payload, numel)
        scratch = scratch or Scratch()
        with np.errstate(all="ignore"):
            for number, elements, piece in self.blocks(numel):
                self.decode_block(data[piece], out[elements], seed + number, scratch)

    def room(self, values: Floats, out: Bytes | None) -> Bytes:
        """Return the memory for the payload of ``values``: the beginning of ``out``, or new. Errors as `encode`."""
        _check(values, np.float32, "values")
        size = self.nbytes(values.size)
        if out is None:
            return np.empty(size, np.uint8)
        _check(out, np.uint8, "out")
        if out.size < size:
            raise SizeMismatchError(f"{values.size} elements as {self.name} take {size} bytes, got room for {out.size}")
        return out[:size]

    def data_of(self, payload: Buffer, numel: int) -> Bytes:
        """Return ``payload`` as an array of the size that ``numel`` elements take; else MalformedMessageError."""
        data = np.frombuffer(payload, np.uint8)
        size = self.nbytes(numel)
        if data.size != size:
            raise MalformedMessageError(f"{numel} elements as {self.name} take {size} bytes, got {data.size}")
        return data

    # ── block by block ────────────────────────────────────────────────────────────────────────────────────────────
    # Functions for callers that do more with a block while it is in cache. They check nothing but content: arrays are
    # one-dimensional, contiguous and of exact size, and numpy has been told to ignore what is not finite.

    def blocks(self, numel: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield each block's number, its elements, and its bytes in the payload."""
        size = self._block_nbytes(BLOCK)
        for number, start in enumerate(range(0, numel, BLOCK)):
            count = min(BLOCK, numel - start)
            first = number * size
            yield number, slice(start, start + count), slice(first, first + self._block_nbytes(count))

    def places(self, start: int, stop: int, _numel: int) -> Iterator[tuple[slice, int]]:
        """Yield the places of a block's bytes among those of ``_numel`` elements, for hashing.

        The place does not depend on how the whole was cut before it was encoded, as the beginnings of blocks do.

        Args:
            start: the block's first element.
            stop: the one behind its last.

        Yields:
            A part of the block's bytes, and the byte of the whole at which it stands.
        """
        yield slice(0, self._block_nbytes(stop - start)), self.nbytes(start)

    @abstractmethod
    def _block_nbytes(self, numel: int) -> int:
        """Return the bytes of a block of ``numel`` elements, at least one."""

    def encode_block(self, values: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> None:
        """Encode one block."""
        if (kernel := active().encode.get(self.code)) is not None:
            kernel(values, out)
        else:
            self._encode(values, out, seed, scratch)

    def decode_block(self, data: Bytes, out: Floats, seed: int, scratch: Scratch, /) -> None:
        """Decode one block. MalformedMessageError: it is none."""
        if (kernel := active().decode.get(self.code)) is not None:
            kernel(data, out)
        else:
            self._decode(data, out, seed, scratch)

    def add_block(self, data: Bytes, total: Floats, weight: np.float32 | None, seed: int, scratch: Scratch, /) -> None:
        """Add the elements in ``data`` to ``total``, times ``weight`` if there is one. Errors as `decode_block`."""
        if (kernel := active().add.get(self.code)) is not None:
            kernel(data, total, weight)
        else:
            self._add(data, total, weight, seed, scratch)

    def compensate_block(self, values: Floats, residual: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> bool:
        """Encode one block of ``values + residual``, and leave in ``residual`` what that lost.

        Returns:
            False if a sum is not finite: then nothing was encoded, and ``residual`` is what it was.
        """
        if (kernel := active().compensate.get(self.code)) is not None:
            return kernel(values, residual, out, scratch.compensated(values.size))
        return self._compensate(values, residual, out, seed, scratch)

    # ── with numpy ────────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _encode(self, values: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> None:
        """Encode as `encode_block`."""

    @abstractmethod
    def _decode(self, data: Bytes, out: Floats, seed: int, scratch: Scratch, /) -> None:
        """Decode as `decode_block`."""

    def _add(self, data: Bytes, total: Floats, weight: np.float32 | None, seed: int, scratch: Scratch, /) -> None:
        """Add as `add_block`."""
        decoded = scratch.decoded(total.size)
        self._decode(data, decoded, seed, scratch)
        if weight is not None:
            np.multiply(decoded, weight, out=decoded)
        np.add(total, decoded, out=total)

    def _compensate(self, values: Floats, residual: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> bool:
        """Compensate as `compensate_block`."""
        compensated = scratch.compensated(values.size)
        np.add(values, residual, out=compensated)
        if not is_finite(compensated):
            return False
        self._encode(compensated, out, seed, scratch)
        self._decode(out, residual, seed, scratch)
        np.subtract(compensated, residual, out=residual)
        return True


def is_finite(values: Floats) -> bool:
    """Return whether every element (at least one) is finite: NaN is both the largest and the smallest."""
    return math.isfinite(np.maximum.reduce(values)) and math.isfinite(np.minimum.reduce(values))


def _check(array: npt.NDArray[np.generic], dtype: type[np.generic], what: str) -> None:
    if array.dtype != dtype:
        raise DTypeError(f"{what} must be {np.dtype(dtype).name}, got {array.dtype.name}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise LayoutError(f"{what} must be one-dimensional and contiguous, got shape {array.shape}")
