"""The size of slices: as many as keep both directions of a link busy, and no more than the coordinator has time for.

A slice is stored and forwarded whole. So a tensor of N bytes, in slices of s, is there N/B and s/B after it began to be
sent, if a link carries B bytes a second each way: the last slice travels twice. Small slices make that short. But each
slice of each member takes a fixed time of the coordinator. The bytes that reach the coordinator in that time are the
*grain* g: all its members' links together, or its own link if that is less. N/s slices cost N/s·g/B. The sum s/B +
N·g/(s·B) is least where both parts are equal, with s = √(N·g). Therefore a rate that is wrong by a factor of two costs
next to nothing.

The grain is one number for a group, which all members are told. So the same operation has the same slices at all of
them. Slices of one tensor have one size. Smaller ones at its end would not shorten a round: results leave as fast as
contributions come, so what one large slice has delayed stays late up to the end.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

from gradserver.protocol.limits import KIB, MIB

SLICE_SECONDS: Final = 100e-6
"""Time that one member's slice takes of the coordinator, and of the member's own processor, about."""
LEAST_BYTES: Final = 32 * KIB
"""Bytes of the smallest slice of a tensor that has several: headers are a three-hundredth of it."""
MAX_GRAIN: Final = 64 * MIB
ALIGNMENT: Final = 256
"""Elements at which tensors are cut: as many as share a scale in int8 and a row in sums of squares. Results must not
depend on the cut."""


def grain_of(rate: float) -> int:
    """Return the grain of a coordinator, or of each of its data shards, that ``rate`` bytes a second can reach."""
    return min(round(rate * SLICE_SECONDS), MAX_GRAIN)


def step_of(numel: int, nbytes: int, grain: int, unit: int) -> int:
    """Return the elements of each slice of ``numel`` elements, which travel as ``nbytes``: a multiple of ``unit``."""
    size = max(isqrt(nbytes * grain), LEAST_BYTES)
    slices = max((2 * nbytes + size) // (2 * size), 1)
    return max(-(-numel // (slices * unit)) * unit, unit)
