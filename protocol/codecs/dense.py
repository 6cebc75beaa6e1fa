"""Codecs that keep every element, in fewer bits: fp32 (all of them), bf16, fp16 and int8.

They are idempotent: finite elements that were decoded encode to the same payload. So a worker that encodes the
coordinator's mean again loses nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.codecs.base import BLOCK, INFINITY, MAGNITUDE, SIGN, Codec, Scratch, Words
from gradserver.protocol.kernels import Bytes, Floats

Halves = npt.NDArray[np.uint16]


class Fp32(Codec):
    """The identity, 4 bytes an element: every bit arrives."""

    __slots__ = ()
    code: ClassVar[int] = 0
    family: ClassVar[str] = "fp32"

    def _block_nbytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, values: Floats, out: Bytes, _seed: int, _scratch: Scratch, /) -> None:
        """Encode as `Codec.encode_block`."""
        out[:] = values.view(np.uint8)

    def _decode(self, data: Bytes, out: Floats, _seed: int, _scratch: Scratch, /) -> None:
        """Decode as `Codec.decode_block`."""
        out.view(np.uint8)[:] = data


class Bf16(Codec):
    """bfloat16, the upper half of a float32: 2 bytes an element, error at most 2⁻⁸ of it (2⁻¹³⁴ below 2⁻¹²⁶).

    It rounds to nearest, ties to even. What would round to Inf stays the largest finite number. NaN and Inf stay.
    """

    __slots__ = ()
    code: ClassVar[int] = 1
    family: ClassVar[str] = "bf16"

    _OVERFLOW: ClassVar[int] = 0x7F7F_8000
    """The least magnitude that would round to Inf."""
    _QUIET: ClassVar[int] = 0x40
    """A bit that keeps a NaN if its upper half alone reads as Inf."""

    def _block_nbytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> None:
        """Encode as `Codec.encode_block`."""
        bits, codes = values.view(np.uint32), out.view(np.uint16)
        self._round(bits, codes, scratch.words(values.size)[0])
        if self._some_overflow(bits):  # cutting off instead of rounding changes none of these
            magnitude = bits & MAGNITUDE
            huge = np.flatnonzero(magnitude >= self._OVERFLOW)
            quiet = np.where(magnitude[huge] > INFINITY, self._QUIET, 0)
            codes[huge] = (bits[huge] >> 16) | quiet

    def _decode(self, data: Bytes, out: Floats, _seed: int, _scratch: Scratch, /) -> None:
        """Decode as `Codec.decode_block`."""
        bits = out.view(np.uint32)
        np.copyto(bits, data.view(np.uint16))
        np.left_shift(bits, 16, out=bits)

    def _compensate(self, values: Floats, residual: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> bool:
        """Compensate as `Codec.compensate_block`. What arrives is at hand without decoding."""
        compensated = scratch.compensated(values.size)
        np.add(values, residual, out=compensated)
        bits, rounded = compensated.view(np.uint32), scratch.words(values.size)[0]
        if self._some_overflow(bits):
            return super()._compensate(values, residual, out, seed, scratch)
        self._round(bits, out.view(np.uint16), rounded)
        np.left_shift(rounded, 16, out=rounded)
        np.subtract(compensated, rounded.view(np.float32), out=residual)
        return True

    def _round(self, bits: Words, codes: Halves, rounded: Words) -> None:
        """Write the upper halves to ``codes``, and leave them in ``rounded``. They are wrong where they overflow."""
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(codes, rounded, casting="unsafe")

    def _some_overflow(self, bits: Words) -> bool:
        """Return whether any is NaN or Inf, or would become so: the largest of all tells, or of those with a sign."""
        signed = np.maximum.reduce(bits)
        return bool(signed >= SIGN | self._OVERFLOW or np.maximum.reduce(bits.view(np.int32)) >= self._OVERFLOW)


class Fp16(Codec):
    """IEEE half precision: 2 bytes an element, error at most 2⁻¹¹ of it, 2⁻²⁵ for elements below 2⁻¹⁴.

    It rounds to nearest, ties to even. A number beyond ±65504 becomes that, and error feedback brings the rest later.
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
        """Encode as `Codec.encode_block`."""
        bits, codes = values.view(np.uint32), out.view(np.uint16)
        if self._round(bits, codes, scratch) >= self._OVERFLOW:
            huge = np.flatnonzero((bits & MAGNITUDE) >= self._OVERFLOW)
            kind = bits[huge] & MAGNITUDE
            unsigned = np.where(kind > INFINITY, 0x7E00, np.where(kind == INFINITY, 0x7C00, 0x7BFF))
            codes[huge] = (bits[huge] >> 31 << 15) | unsigned

    def _compensate(self, values: Floats, residual: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> bool:
        """Compensate as `Codec.compensate_block`. What arrives is at hand without decoding."""
        compensated = scratch.compensated(values.size)
        np.add(values, residual, out=compensated)
        bits = compensated.view(np.uint32)
        if self._round(bits, out.view(np.uint16), scratch) >= self._OVERFLOW:
            return super()._compensate(values, residual, out, seed, scratch)
        _, sign, decoded = scratch.words(values.size)
        np.bitwise_and(bits, SIGN, out=sign)
        np.bitwise_or(decoded, sign, out=decoded)
        np.subtract(compensated, decoded.view(np.float32), out=residual)
        return True

    def _round(self, bits: Words, codes: Halves, scratch: Scratch) -> int:
        """Write ``codes``, and leave the magnitudes that they decode to in the third words of ``scratch``.

        Returns:
            The largest magnitude of all: codes of those that overflow are wrong.
        """
        magnitude, exponent, power = scratch.words(bits.size)
        np.bitwise_and(bits, MAGNITUDE, out=magnitude)
        largest = int(np.maximum.reduce(magnitude))
        np.maximum(magnitude, self._SMALLEST_NORMAL, out=exponent)
        np.bitwise_and(exponent, INFINITY, out=exponent)
        # Adding the power of two with a last bit worth as much as the half's makes the adder round. That leaves the
        # half's significand in the low bits, with its leading one. That one carries into the exponent, which therefore
        # is one less. It is 0 at 2⁻¹⁴, where there may be no leading one. Taking 113 from the exponent goes in with the
        # power.
        np.add(exponent, (13 << 23) + (-113 << 10 & 0xFFFF), out=power)
        np.add(magnitude.view(np.float32), power.view(np.float32), out=magnitude.view(np.float32))
        np.subtract(magnitude.view(np.float32), power.view(np.float32), out=power.view(np.float32))
        np.right_shift(exponent, 13, out=exponent)
        np.add(magnitude, exponent, out=magnitude)
        np.right_shift(bits, 31, out=exponent)
        np.left_shift(exponent, 15, out=exponent)
        np.add(magnitude, exponent, out=magnitude)
        np.copyto(codes, magnitude, casting="unsafe")  # the low halves
        return largest

    def _decode(self, data: Bytes, out: Floats, _seed: int, scratch: Scratch, /) -> None:
        """Decode as `Codec.decode_block`."""
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

    The scale is the group's largest magnitude / 127, so the error is at most half a scale. It rounds to nearest, ties
    to even. A group with a NaN or Inf gets the scale NaN, and all of it decodes to that. Block-wise 8-bit quantisation
    is Dettmers et al. 2022, *8-bit Optimizers via Block-wise Quantization*, here with even steps.

    A block is its scales, then its integers. For every float32 p, p / 127 · 127 / 127 is p / 127, each step rounded. So
    encoding what was decoded finds the same scale again.
    """

    __slots__ = ()
    code: ClassVar[int] = 3
    family: ClassVar[str] = "int8"

    GROUP: ClassVar[int] = 256
    """Elements that share a scale."""
    _LEAST: ClassVar[np.float32] = np.finfo(np.float32).tiny
    """The least scale. None is zero or subnormal: those have too few bits, and some threads flush them to zero."""
    _GREATEST: ClassVar[np.float32] = np.uint32(0x7C01_0200).view(np.float32)
    """The greatest scale. 127 times this is finite, and that / 127 is this again."""

    def _block_nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.GROUP) + numel

    def _encode(self, values: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> None:
        """Encode as `Codec.encode_block`."""
        self._quantise(values, out, scratch.words(values.size)[0])

    def _decode(self, data: Bytes, out: Floats, _seed: int, _scratch: Scratch, /) -> None:
        """Decode as `Codec.decode_block`."""
        begin = data.size - out.size
        np.copyto(out, data[begin:].view(np.int8))
        _by_group(np.multiply, out, data[:begin].view(np.float32), out)

    def _compensate(self, values: Floats, residual: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> bool:
        """Compensate without decoding, as `Codec.compensate_block`; peaks show what is not finite."""
        compensated, work = scratch.compensated(values.size), scratch.words(values.size)[0]
        np.add(values, residual, out=compensated)
        scales = self._quantise(compensated, out, work)
        if scales is None:
            return False
        decoded = work.view(np.float32)
        _by_group(np.multiply, decoded, scales, decoded)
        np.subtract(compensated, decoded, out=residual)
        return True

    def places(self, start: int, stop: int, numel: int) -> Iterator[tuple[slice, int]]:
        """Yield as `Codec.places`: all integers, and behind them all scales."""
        size = self._block_nbytes(stop - start)
        begin = size - (stop - start)
        yield slice(begin, size), start
        yield slice(0, begin), numel + start // self.GROUP * 4

    def _quantise(self, values: Floats, out: Bytes, work: Words) -> Floats | None:
        """Encode one block, and leave its integers in ``work``, as float32.

        Returns:
            The scales of its groups; None if not all elements are finite.
        """
        np.bitwise_and(values.view(np.uint32), MAGNITUDE, out=work)
        peaks = np.maximum.reduceat(work, _STARTS[: -(-values.size // self.GROUP)])
        scales = peaks.view(np.float32) / np.float32(127)
        np.maximum(scales, self._LEAST, out=scales)
        np.minimum(scales, self._GREATEST, out=scales)
        finite = np.maximum.reduce(peaks) < INFINITY
        if not finite:
            scales[peaks >= INFINITY] = np.nan
        begin = out.size - values.size
        out[:begin].view(np.float32)[:] = scales

        integers = work.view(np.float32)
        _by_group(np.divide, values, scales, integers)
        np.rint(integers, out=integers)
        if not finite:  # a processor chooses which integer NaN becomes
            np.copyto(integers, 0, where=np.isnan(integers))
        np.copyto(out[begin:].view(np.int8), integers, casting="unsafe")
        return scales if finite else None


_STARTS: Final = np.arange(0, BLOCK, Int8.GROUP)
"""The beginnings of a block's groups."""


def _by_group(ufunc: np.ufunc, values: Floats, scales: Floats, out: Floats) -> None:
    """Apply ``ufunc`` to all ``values`` and the scales of their groups. The last group may be short."""
    full, rest = divmod(values.size, Int8.GROUP)
    if full:
        rows, middle = (full, Int8.GROUP), full * Int8.GROUP
        ufunc(values[:middle].reshape(rows), scales[:full, None], out=out[:middle].reshape(rows))
    if rest:
        ufunc(values[-rest:], scales[full], out=out[-rest:])
