"""Codecs that keep every element, in fewer bits: fp32 (all of them), bf16, fp16 and int8.

They are idempotent: finite elements that were decoded encode to the same payload. So a mean that the coordinator
encoded is not worn down by whoever encodes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from protocol.codecs.base import INFINITY, MAGNITUDE, SIGN, Bytes, Codec, Floats, Scratch, Words


class Fp32(Codec):
    """The identity, 4 bytes an element: every bit arrives."""

    __slots__ = ()
    code: ClassVar[int] = 0
    family: ClassVar[str] = "fp32"

    def _block_nbytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, values: Floats, out: Bytes, _seed: int, _scratch: Scratch, /) -> None:
        out[:] = values.view(np.uint8)

    def _decode(self, data: Bytes, out: Floats, _seed: int, _scratch: Scratch, /) -> None:
        out.view(np.uint8)[:] = data


class Bf16(Codec):
    """bfloat16, the upper half of a float32: 2 bytes an element, error at most 2⁻⁸ of it (2⁻¹³⁴ below 2⁻¹²⁶).

    Rounded to nearest, ties to even; what would round to Inf stays the largest finite number. NaN and Inf stay.
    """

    __slots__ = ()
    code: ClassVar[int] = 1
    family: ClassVar[str] = "bf16"

    _OVERFLOW: ClassVar[int] = 0x7F7F_8000
    """The least magnitude that would round to Inf."""
    _QUIET: ClassVar[int] = 0x40
    """Keeps a NaN one whose upper half alone reads as Inf."""

    def _block_nbytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> None:
        bits, codes = values.view(np.uint32), out.view(np.uint16)
        rounded, magnitude, _ = scratch.words(values.size)
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(codes, rounded, casting="unsafe")

        np.bitwise_and(bits, MAGNITUDE, out=magnitude)
        if magnitude.max() >= self._OVERFLOW:  # cutting off instead of rounding keeps all of these what they are
            huge = np.flatnonzero(magnitude >= self._OVERFLOW)
            quiet = np.where(magnitude[huge] > INFINITY, self._QUIET, 0)
            codes[huge] = (bits[huge] >> 16) | quiet

    def _decode(self, data: Bytes, out: Floats, _seed: int, _scratch: Scratch, /) -> None:
        bits = out.view(np.uint32)
        np.copyto(bits, data.view(np.uint16))
        np.left_shift(bits, 16, out=bits)


class Fp16(Codec):
    """IEEE half precision: 2 bytes an element, error at most 2⁻¹¹ of it, 2⁻²⁵ for elements below 2⁻¹⁴.

    Rounded to nearest, ties to even; what is beyond ±65504 becomes that, and error feedback brings the rest later.
    NaN and Inf stay. numpy's own conversion takes one element after the other: this one is three times as fast.
    """

    __slots__ = ()
    code: ClassVar[int] = 2
    family: ClassVar[str] = "fp16"

    _OVERFLOW: ClassVar[int] = 0x477F_F000
    """The least magnitude, 65520, that would round to Inf."""
    _SMALLEST_NORMAL: ClassVar[int] = 113 << 23
    """The magnitude 2⁻¹⁴. Below it all halves are 2⁻²⁴ apart."""

    def _block_nbytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> None:
        bits, codes = values.view(np.uint32), out.view(np.uint16)
        magnitude, exponent, work = scratch.words(values.size)
        np.bitwise_and(bits, MAGNITUDE, out=magnitude)
        largest = magnitude.max()
        exponent.fill(self._SMALLEST_NORMAL)
        np.maximum(magnitude, exponent, out=exponent)
        np.bitwise_and(exponent, INFINITY, out=exponent)
        # Adding the power of two whose last bit is worth what the half's last bit is makes the adder round, and leaves
        # the half's significand in the low bits, with its leading one: that carries into the exponent, which therefore
        # is one less, and 0 at 2⁻¹⁴, where there may be none. Taking 113 from the exponent goes in with the power.
        np.add(exponent, (13 << 23) + (-113 << 10 & 0xFFFF), out=work)
        np.add(magnitude.view(np.float32), work.view(np.float32), out=magnitude.view(np.float32))
        np.right_shift(exponent, 13, out=exponent)
        np.add(magnitude, exponent, out=magnitude)
        np.right_shift(bits, 31, out=work)
        np.left_shift(work, 15, out=work)
        np.add(magnitude, work, out=magnitude)
        np.copyto(codes, magnitude, casting="unsafe")  # the low halves
        if largest >= self._OVERFLOW:
            huge = np.flatnonzero((bits & MAGNITUDE) >= self._OVERFLOW)
            kind = bits[huge] & MAGNITUDE
            unsigned = np.where(kind > INFINITY, 0x7E00, np.where(kind == INFINITY, 0x7C00, 0x7BFF))
            codes[huge] = (bits[huge] >> 31 << 15) | unsigned

    def _decode(self, data: Bytes, out: Floats, _seed: int, scratch: Scratch, /) -> None:
        bits = out.view(np.uint32)
        wide, work, _ = scratch.words(out.size)
        np.copyto(wide.view(np.int32), data.view(np.int16))  # the sign goes to the top
        np.bitwise_and(wide, 0x7FFF, out=bits)
        special = np.flatnonzero(bits >= 0x7C00) if bits.max() >= 0x7C00 else None
        np.left_shift(bits, 13, out=bits)
        np.add(bits, 112 << 23, out=bits)
        # Right for normal halves. A subnormal one has been read as if it had a leading one: m·2⁻²⁴ as 2⁻¹⁵ + m·2⁻²⁵.
        # Twice that less 2⁻¹⁴ is right then, and for normal ones it is no smaller than what is right.
        doubled = work.view(np.float32)
        np.add(out, out, out=doubled)
        np.subtract(doubled, np.float32(2**-14), out=doubled)
        np.minimum(out, doubled, out=out)
        if special is not None:
            bits[special] |= INFINITY
        np.bitwise_and(wide, SIGN, out=wide)
        np.bitwise_or(bits, wide, out=bits)


class Int8(Codec):
    """Integers -127 … 127 times one float32 scale for every 256 elements: 1.016 bytes an element.

    The scale is the group's largest magnitude / 127, so the error is at most half a scale; rounded to nearest, ties to
    even. A group with a NaN or Inf gets the scale NaN, and all of it decodes to that. Block-wise 8-bit quantisation is
    Dettmers et al. 2022, *8-bit Optimizers via Block-wise Quantization*, here with even steps.

    A block is its scales, then its integers. For every float32 p, p / 127 · 127 / 127 is p / 127, each step rounded:
    so the same scale is found again when what was decoded is encoded.
    """

    __slots__ = ()
    code: ClassVar[int] = 3
    family: ClassVar[str] = "int8"

    GROUP: ClassVar[int] = 256
    """Elements that share a scale."""
    _ROUNDER: ClassVar[np.float32] = np.float32(3 << 22)
    """Added to a small number it makes the adder round to an integer, and leaves that in the low bits."""
    _LEAST: ClassVar[np.float32] = np.finfo(np.float32).tiny
    """No scale is zero, or subnormal: those have too few bits, and some threads flush them to zero."""
    _GREATEST: ClassVar[np.float32] = np.uint32(0x7C01_0200).view(np.float32)
    """127 times this is finite, and that / 127 is this again."""

    def _block_nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.GROUP) + numel

    def _encode(self, values: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> None:
        work = scratch.words(values.size)[0]
        for elements, scales, integers in self._parts(out, values.size):
            rows, bits = values[elements].reshape(integers.shape), work[elements].reshape(integers.shape)
            np.bitwise_and(rows.view(np.uint32), MAGNITUDE, out=bits)
            scales[:] = self._scales(bits.max(axis=1, keepdims=True))
            quotients = bits.view(np.float32)
            np.divide(rows, scales, out=quotients)
            np.add(quotients, self._ROUNDER, out=quotients)
            np.copyto(integers.view(np.uint8), bits, casting="unsafe")  # the low bytes

    def _decode(self, data: Bytes, out: Floats, _seed: int, _scratch: Scratch, /) -> None:
        for elements, scales, integers in self._parts(data, out.size):
            rows = out[elements].reshape(integers.shape)
            np.copyto(rows, integers)
            np.multiply(rows, scales, out=rows)

    def _scales(self, peaks: Words) -> Floats:
        """The scales of groups with these largest magnitudes."""
        scales = peaks.view(np.float32) / np.float32(127)
        np.clip(scales, self._LEAST, self._GREATEST, out=scales)
        scales[peaks >= INFINITY] = np.nan
        return scales

    def _parts(self, block: Bytes, numel: int) -> Iterator[tuple[slice, Floats, npt.NDArray[np.int8]]]:
        """The full groups together, then the short one: which elements, a column of scales, rows of integers."""
        full, rest = divmod(numel, self.GROUP)
        middle = full * self.GROUP
        scales = block[: block.size - numel].view(np.float32)[:, None]
        integers = block[block.size - numel :].view(np.int8)
        if full:
            yield slice(0, middle), scales[:full], integers[:middle].reshape(full, self.GROUP)
        if rest:
            yield slice(middle, numel), scales[full:], integers[middle:].reshape(1, rest)
