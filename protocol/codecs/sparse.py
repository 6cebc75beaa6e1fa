"""Codecs that keep a fraction of the elements, as they are, and drop the rest: topk and randomk.

Both are contractions (Stich et al. 2018, *Sparsified SGD with Memory*). A block loses at most 1 − k/n of its squared
length, for randomk on average. They are made for error feedback, which brings later what was dropped. Therefore randomk
does not scale what it keeps by n/k: that would make it unbiased, but no contraction, and its residual would grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.codecs.base import BLOCK, MAGNITUDE, Codec, Scratch, Words, is_finite
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.kernels import Bytes, Floats, Offsets as Indices, active

MILLION: Final = 1_000_000

_SAMPLE: Final = 31
"""The step of a sample that tells how large the large elements are. It is odd, as rows of matrices seldom are."""
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True)
class Sparse(Codec):
    """A codec that keeps ``parameter`` parts per million of each block, rounded up: at least one element."""

    parameter: int = MILLION // 100

    @property
    def name(self) -> str:
        """The name from which `codec_of` makes this codec."""
        return f"{self.family}:{self.parameter / MILLION:g}"

    def kept(self, numel: int) -> int:
        """Return how many of a block's elements are kept."""
        return -(-numel * self.parameter // MILLION)


class TopK(Sparse):
    """The elements of largest magnitude in each block of 65536, as float32 (Aji and Heafield 2017).

    A block is its values, then their offsets in ascending order. These are uint16, or where that is longer one bit for
    each element of the block. One in a hundred takes 0.06 bytes an element. Among elements of equal magnitude the first
    are taken. NaN counts as largest, Inf as next.
    """

    __slots__ = ()
    code: ClassVar[int] = 4
    family: ClassVar[str] = "topk"

    def _block_nbytes(self, numel: int) -> int:
        kept = self.kept(numel)
        return 4 * kept + min(2 * kept, -(-numel // 8))

    def _encode(self, values: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> None:
        """Encode as `Codec.encode_block`."""
        self._choose(values, out, scratch)

    def _decode(self, data: Bytes, out: Floats, _seed: int, _scratch: Scratch, /) -> None:
        """Decode as `Codec.decode_block`."""
        offsets = self._offsets(data, out.size)
        out.fill(0)
        out[offsets] = data[: 4 * offsets.size].view(np.float32)

    def _add(self, data: Bytes, total: Floats, weight: np.float32 | None, _seed: int, _scratch: Scratch, /) -> None:
        """Add as `Codec.add_block`: only what was kept is added."""
        offsets = self._offsets(data, total.size)
        _add_at(total, offsets, data[: 4 * offsets.size].view(np.float32), weight)

    def _compensate(self, values: Floats, residual: Floats, out: Bytes, _seed: int, scratch: Scratch, /) -> bool:
        """Compensate as `Codec.compensate_block`: what was kept is owed no more, and all else is."""
        compensated = scratch.compensated(values.size)
        if (kernel := active().keep_largest) is not None:
            kept = self.kept(values.size)
            chosen = np.empty(kept, np.int64)
            if not kernel(values, residual, chosen, out[: 4 * kept].view(np.float32), compensated):
                return False
            self._put_offsets(chosen, values.size, out)
            return True
        np.add(values, residual, out=compensated)
        chosen = self._choose(compensated, out, scratch)
        if not is_finite(compensated[chosen]):  # NaN and Inf count as largest
            return False
        np.copyto(residual, compensated)
        residual[chosen] = 0
        return True

    def _choose(self, values: Floats, out: Bytes, scratch: Scratch) -> Indices:
        """Encode one block. Return the offsets of what was kept."""
        numel, kept = values.size, self.kept(values.size)
        if (kernel := active().largest) is not None:
            chosen = np.empty(kept, np.int64)
            kernel(values, chosen)
        else:
            chosen = _largest(values, kept, scratch)

        out[: 4 * kept].view(np.float32)[:] = values[chosen]
        self._put_offsets(chosen, numel, out)
        return chosen

    def _put_offsets(self, chosen: Indices, numel: int, out: Bytes) -> None:
        """Write the offsets of what was kept."""
        places = out[4 * chosen.size :]
        if self._has_bitmap(numel):
            bitmap = np.zeros(numel, np.bool_)
            bitmap[chosen] = True
            places[:] = np.packbits(bitmap)
        else:
            places.view(np.uint16)[:] = chosen

    def _offsets(self, data: Bytes, numel: int) -> Indices:
        """Return the offsets in an encoded block: ascending, and below ``numel``. Else MalformedMessageError."""
        kept = self.kept(numel)
        places = data[4 * kept :]
        if self._has_bitmap(numel):
            offsets = np.flatnonzero(np.unpackbits(places))
        else:
            offsets = places.view(np.uint16).astype(np.int64)
        if offsets.size != kept:
            raise MalformedMessageError(f"{self.name} of {numel} elements keeps {kept}, got {offsets.size} offsets")
        if offsets[-1] >= numel or (offsets[1:] <= offsets[:-1]).any():
            raise MalformedMessageError(f"{self.name}: offsets do not ascend within {numel} elements")
        return offsets

    def _has_bitmap(self, numel: int) -> bool:
        return -(-numel // 8) < 2 * self.kept(numel)


class RandomK(Sparse):
    """Elements drawn by the seed, as float32, without their offsets: 4 bytes for each one kept.

    Every worker that encodes with the same seed keeps the same elements. So their mean has no others, and the
    coordinator's own encoding of it with that seed loses nothing.

    Each element is as likely to be kept as any other. A block with a NaN or Inf anywhere has a NaN as its first value.
    """

    __slots__ = ()
    code: ClassVar[int] = 5
    family: ClassVar[str] = "randomk"

    def _block_nbytes(self, numel: int) -> int:
        return 4 * self.kept(numel)

    def _encode(self, values: Floats, out: Bytes, seed: int, _scratch: Scratch, /) -> None:
        """Encode as `Codec.encode_block`."""
        chosen = values[self._drawn(values.size, seed)]
        if not is_finite(values):
            chosen[0] = np.nan
        out.view(np.float32)[:] = chosen

    def _decode(self, data: Bytes, out: Floats, seed: int, _scratch: Scratch, /) -> None:
        """Decode as `Codec.decode_block`."""
        out.fill(0)
        out[self._drawn(out.size, seed)] = data.view(np.float32)

    def _add(self, data: Bytes, total: Floats, weight: np.float32 | None, seed: int, _scratch: Scratch, /) -> None:
        """Add as `Codec.add_block`: only what was kept is added."""
        _add_at(total, self._drawn(total.size, seed), data.view(np.float32), weight)

    def _compensate(self, values: Floats, residual: Floats, out: Bytes, seed: int, scratch: Scratch, /) -> bool:
        """Compensate as `Codec.compensate_block`: what was kept is owed no more, and all else is."""
        compensated = scratch.compensated(values.size)
        if (kernel := active().keep_drawn) is not None:
            return kernel(values, residual, self._drawn(values.size, seed), out.view(np.float32), compensated)
        np.add(values, residual, out=compensated)
        if not is_finite(compensated):
            return False
        drawn = self._drawn(values.size, seed)
        out.view(np.float32)[:] = compensated[drawn]
        np.copyto(residual, compensated)
        residual[drawn] = 0
        return True

    def _drawn(self, numel: int, seed: int) -> Indices:
        return _draw(numel, self.kept(numel), seed & _MASK)


@lru_cache(maxsize=16)  # the coordinator asks once for each contribution to a block, and once for the mean
def _draw(numel: int, kept: int, seed: int) -> Indices:
    """Draw ``kept`` different offsets below ``numel``, one from each of equal parts of a randomly turned ring.

    Without the turn, elements in a part that is one shorter than others would be kept more often.
    """
    numbers = split_mix(seed, kept + 1)
    begins = np.arange(kept + 1) * numel // kept
    offsets = begins[:-1] + _below(np.diff(begins), numbers[1:])
    offsets += _below(np.int64(numel), numbers[:1])
    offsets[offsets >= numel] -= numel
    offsets.flags.writeable = False
    return offsets


def _largest(values: Floats, kept: int, scratch: Scratch) -> Indices:
    """Return ascending offsets of the ``kept`` elements of largest magnitude; of equal ones the first."""
    magnitude = scratch.words(values.size)[0]
    np.bitwise_and(values.view(np.uint32), MAGNITUDE, out=magnitude)
    chosen = _candidates(magnitude, kept)
    if chosen.size > kept:
        large = magnitude[chosen]
        threshold = np.partition(large, large.size - kept)[large.size - kept]
        chosen = chosen[large >= threshold]
    if chosen.size > kept:  # the processor decides which equals `partition` would take
        equal = np.flatnonzero(magnitude[chosen] == threshold)
        chosen = np.delete(chosen, equal[kept - chosen.size :])
    return chosen


def _candidates(magnitude: Words, kept: int) -> Indices:
    """Return ascending offsets of all that can be among the ``kept`` largest: these, and mostly few more.

    A sample tells where to start looking. It changes how long that takes, and never what is kept. Zeros are left out as
    far as possible: `partition` takes forty times as long where most elements are equal.
    """
    sample = np.sort(magnitude[::_SAMPLE])
    expected = kept / _SAMPLE
    rank = sample.size - int(expected + 4 * math.sqrt(expected)) - 2
    if rank >= 0:
        found = np.flatnonzero(magnitude >= max(sample[rank], 1))
        if found.size >= kept:
            return found
    found = np.flatnonzero(magnitude)
    if found.size < kept:  # all of these, and the first zeros
        zeros = np.flatnonzero(magnitude == 0)[: kept - found.size]
        found = np.sort(np.concatenate([found, zeros]))
    return found


def _add_at(total: Floats, offsets: Indices, values: Floats, weight: np.float32 | None) -> None:
    """Add ``values``, times ``weight`` if there is one, at ``offsets``, which are all different."""
    if (kernel := active().add_at) is not None:
        kernel(total, offsets, values, 1.0 if weight is None else float(weight))
        return
    total[offsets] += values if weight is None else values * weight


def seed_of(round_number: int, bucket: int, start: int) -> int:
    """Return the seed for element ``start`` of a bucket in a round and on, equal at workers and coordinator.

    Each block has a seed of its own, which does not depend on the slice that it travels in. If ``start`` is a multiple
    of ``BLOCK``, the same elements are drawn however a bucket is cut into slices.
    """
    return _seed_of(round_number, bucket) + start // BLOCK


@lru_cache(maxsize=1024)  # asked for with every slice
def _seed_of(round_number: int, bucket: int) -> int:
    seed = 0
    for number in (round_number, bucket):
        seed = int(split_mix(seed ^ number, 1)[0])
    return seed


def split_mix(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """Return ``count`` words by SplitMix64 (Steele, Lea and Flood 2014), which makes each of its number alone.

    It is written here because numpy's generators may give other numbers in its next version, and members' versions may
    differ.
    """
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed & _MASK)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


def _below(bounds: Indices | np.int64, words: npt.NDArray[np.uint64]) -> Indices:
    """Map each word to a number below its bound, which is at most 2³² (Lemire 2019)."""
    numbers: Indices = ((words >> np.uint64(32)).astype(np.int64) * bounds) >> 32
    return numbers
