"""The size of slices: so many that both directions of a link are busy, and no more than the coordinator has time for.

A slice is stored and forwarded whole. So N bytes in slices of s, over a link of B bytes a second, take N/B and s/B. But
each slice also takes a fixed time of its member, and of the coordinator or data shard that it goes to. The *grain* g is
what reaches both meanwhile: the one over its own link, the other over all links together. Then N/s slices cost N/s·g/B.
The sum of both costs is least at s = √(N·g), where they are equal. So a rate that is wrong by a factor of two costs
little.

That sum is of processors that have no time to spare. Where the link is slow they wait for it, and deal with slices
meanwhile. So no slice is larger than a few grains: then they are busy with slices for a small share of the time.

The grain is one number for a group, which all members are told. So an operation has the same slices at all of them.
They have one size: smaller ones at the end would shorten no round. Results leave as fast as contributions come, so what
a large slice has delayed stays late.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

from gradserver.protocol.codecs import Codec
from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.limits import KIB, MIB

SLICE_SECONDS: Final = 80e-6
"""Time that a slice takes of the processor of its member, and each member's slice of the coordinator's, about."""
LEAST_BYTES: Final = 32 * KIB
"""Bytes of the smallest slice of a tensor that has several: headers are a three-hundredth of it."""
MOST_GRAINS: Final = 12
"""Grains in the largest slice: the coordinator deals with slices for a twelfth of the time, and is idle otherwise."""
MAX_GRAIN: Final = 64 * MIB
ALIGNMENT: Final = 256
"""Elements at which tensors are cut: as many as share a scale in int8 and a row in sums of squares. Results must not
depend on the cut."""


def grain_of(rate: float) -> int:
    """Return the grain if ``rate`` bytes a second can reach a data shard and a member, together."""
    return min(round(rate * SLICE_SECONDS), MAX_GRAIN)


def step_of(numel: int, itemsize: int, codec: Codec | None, grain: int, unit: int) -> int:
    """Return the elements of each slice of ``numel`` elements: whole units, and blocks of a lossy codec."""
    unit = max(unit, ALIGNMENT if codec is None else BLOCK)
    nbytes = numel * itemsize if codec is None else codec.nbytes(numel)
    size = max(min(isqrt(nbytes * grain), MOST_GRAINS * grain), LEAST_BYTES)
    slices = max((2 * nbytes + size) // (2 * size), 1)
    return max(-(-numel // (slices * unit)) * unit, unit)
