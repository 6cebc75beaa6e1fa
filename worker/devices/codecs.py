"""The codecs bf16 and int8 in torch's operations, with the bits of `gradserver.protocol.codecs`.

They encode and decode where the tensor is: on a CUDA device, fewer bytes cross the bus then. Nothing in them waits.

Bits are equal because each step is exact or rounded once, as IEEE 754 says, in the same order. Three things would break
that, and are avoided:

- torch divides by a number of Python's by multiplying with its reciprocal on CUDA. So divisors are tensors there.
- A product and a sum in one kernel may be rounded once instead of twice. So each is a call of its own.
- A processor chooses the bits of a NaN that it computes. So NaN is written as bits, or moved as bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import torch
from torch import Tensor

from gradserver.protocol.codecs import Codec, codec_of
from gradserver.protocol.codecs.base import BLOCK, INFINITY, MAGNITUDE
from gradserver.protocol.codecs.dense import Int8
from gradserver.protocol.errors import DTypeError, SizeMismatchError

_NAN: Final = 0x7FC0_0000
"""The bits of numpy's own NaN."""


class DeviceCodec(ABC):
    """A codec for tensors of a device.

    Attributes:
        codec: the codec with the same bits.
    """

    codec: ClassVar[Codec]

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None, sifts: bool = False) -> None:
        """Encode one slice, as `gradserver.worker.member.coder.Coder` does.

        Args:
            values: float32, one-dimensional, contiguous. Not changed.
            out: uint8, as long as the payload.
            residual: float32, as many as ``values``: what is owed, and afterwards what is owed then. None without
                feedback.
            sifts: true if a slice that is not finite does not count; then its residual stays.
        """
        self._check(values, out)
        if residual is not None and residual.shape != values.shape:
            raise SizeMismatchError(f"residual has shape {tuple(residual.shape)}, values have {tuple(values.shape)}")
        counts = _is_finite(values) if sifts and residual is not None and values.numel() else None
        whole = values.numel() // BLOCK * BLOCK
        for start, stop, rows in ((0, whole, whole // BLOCK), (whole, values.numel(), 1)):
            if start < stop:
                piece = out[self.codec.nbytes(start) : self.codec.nbytes(stop)].view(rows, -1)
                owed = None if residual is None else residual[start:stop].view(rows, -1)
                self._encode(values[start:stop].view(rows, -1), piece, owed, counts)

    def _encode(self, values: Tensor, out: Tensor, residual: Tensor | None, counts: Tensor | None) -> None:
        """Encode rows, each a block, with what is owed where the sums of a block are finite."""
        if residual is None:
            self.encode_rows(values, out)
            return
        given = values + residual
        usable = _is_finite(given)
        if counts is not None:
            usable = usable & counts
        given = torch.where(usable, given.view(torch.int32), values.view(torch.int32)).view(torch.float32)
        decoded = self.encode_rows(given, out)
        residual.copy_(torch.where(usable, given - decoded, residual))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode one slice into ``out``, float32."""
        self._check(out, payload)
        whole = out.numel() // BLOCK * BLOCK
        for start, stop, rows in ((0, whole, whole // BLOCK), (whole, out.numel(), 1)):
            if start < stop:
                piece = payload[self.codec.nbytes(start) : self.codec.nbytes(stop)].view(rows, -1)
                self.decode_rows(piece, out[start:stop].view(rows, -1))

    def _check(self, values: Tensor, payload: Tensor) -> None:
        if values.dtype != torch.float32 or payload.dtype != torch.uint8:
            raise DTypeError(f"expected float32 and uint8, got {values.dtype} and {payload.dtype}")
        if payload.numel() != self.codec.nbytes(values.numel()):
            size = self.codec.nbytes(values.numel())
            raise SizeMismatchError(
                f"{values.numel()} elements as {self.codec.name} take {size} bytes, got {payload.numel()}"
            )

    @abstractmethod
    def encode_rows(self, values: Tensor, out: Tensor) -> Tensor:
        """Encode rows, each a block. Return the elements that they decode to."""

    @abstractmethod
    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        """Decode rows, each a block."""


class DeviceBf16(DeviceCodec):
    """bfloat16, as `gradserver.protocol.codecs.dense.Bf16`."""

    codec: ClassVar[Codec] = codec_of("bf16")
    _OVERFLOW: ClassVar[int] = 0x7F7F_8000
    _QUIET: ClassVar[int] = 0x40

    def encode_rows(self, values: Tensor, out: Tensor) -> Tensor:
        """Encode rows. What would round to Inf is cut off instead, and so are NaN and Inf themselves."""
        bits = values.view(torch.int32)
        magnitude = bits & MAGNITUDE
        upper = bits >> 16
        rounded = (bits + ((upper & 1) + 0x7FFF)) >> 16
        cut = upper | ((magnitude > INFINITY).to(torch.int32) * self._QUIET)
        codes = torch.where(magnitude >= self._OVERFLOW, cut, rounded)
        out.view(torch.int16).copy_(codes.to(torch.int16))
        return (codes << 16).view(torch.float32)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        """Decode rows."""
        out.view(torch.int32).copy_(payload.view(torch.int16).to(torch.int32) << 16)


class DeviceInt8(DeviceCodec):
    """Integers with a scale for each 256, as `gradserver.protocol.codecs.dense.Int8`."""

    codec: ClassVar[Codec] = codec_of("int8")

    def encode_rows(self, values: Tensor, out: Tensor) -> Tensor:
        """Encode rows."""
        count = values.shape[1]
        groups = _in_groups(values)
        peaks = (groups.view(torch.int32) & MAGNITUDE).amax(2)
        # A tensor of the device as divisor, for the sake of its bits.
        scales = peaks.view(torch.float32) / torch.full((1, 1), 127.0, device=values.device)
        scales = scales.clamp(float(Int8._LEAST), float(Int8._GREATEST))
        bits = torch.where(peaks >= INFINITY, torch.full_like(peaks, _NAN), scales.view(torch.int32))
        scales = bits.view(torch.float32)
        integers = (groups / scales.unsqueeze(2)).round_()
        integers = torch.where(integers.isnan(), torch.zeros_like(integers), integers)
        begin = 4 * scales.shape[1]
        out[:, :begin].copy_(scales.contiguous().view(torch.uint8))
        out[:, begin:].copy_(integers.flatten(1)[:, :count].to(torch.int8).view(torch.uint8))
        return (integers * scales.unsqueeze(2)).flatten(1)[:, :count]

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        """Decode rows."""
        begin = payload.shape[1] - out.shape[1]
        scales = payload[:, :begin].clone(memory_format=torch.contiguous_format).view(torch.float32)
        integers = _in_groups(payload[:, begin:].view(torch.int8).to(torch.float32))
        out.copy_((integers * scales.unsqueeze(2)).flatten(1)[:, : out.shape[1]])


DEVICE_CODECS: Final[dict[str, DeviceCodec]] = {"bf16": DeviceBf16(), "int8": DeviceInt8()}
"""All of them, by the name of the codec with the same bits."""


def _in_groups(rows: Tensor) -> Tensor:
    """Return rows in groups that share a scale, the last one of each row filled up with zeros."""
    rest = -rows.shape[1] % Int8.GROUP
    padded = torch.nn.functional.pad(rows, (0, rest)) if rest else rows
    return padded.view(rows.shape[0], -1, Int8.GROUP)


def _is_finite(rows: Tensor) -> Tensor:
    """Return, for each row (or for a whole vector), whether all elements are finite."""
    return ((rows.view(torch.int32) & MAGNITUDE).amax(-1, keepdim=True)) < INFINITY
