"""What a mean is, whatever its contributions travelled as: how they are weighed, where it is made, what is none."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradserver.engine.events import Broken, NonFinite, Sifted, Undecodable
from gradserver.protocol.buffer import Buffer

Array = npt.NDArray[Any]
Outcome = Buffer | tuple[Buffer, ...] | NonFinite | Sifted | Undecodable | Broken | None
"""Of a reduction: the result's bytes (if they were to be kept), or what forbids a result."""


def weigh(weights: Sequence[float]) -> tuple[bool, float, Sequence[float]]:
    """Whether all weigh the same; what a sum is divided by to be a mean; what contributions are multiplied with if not.

    A power of two changes no bits, and keeps ``w·g`` from leaving the range of ``g``.
    """
    if not weights or min(weights) == max(weights):
        return True, len(weights), weights
    scale = -math.frexp(max(weights))[1]
    scaled = [math.ldexp(weight, scale) for weight in weights]
    return False, sum(scaled), scaled


def is_finite(values: Array) -> bool:
    """Whether every element is. NaN is both the largest and the smallest; a sum would take twice as long."""
    return math.isfinite(np.maximum.reduce(values)) and math.isfinite(np.minimum.reduce(values))


def shares_of(weights: Sequence[float]) -> list[float]:
    """What part of a mean each contribution is. They add up to 1, or a little less or more."""
    _, _, scaled = weigh(weights)
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def first_non_finite(values: Array) -> int | None:
    """The first element that is not finite; None if all are."""
    if is_finite(values):
        return None
    return int(np.flatnonzero(~np.isfinite(values))[0])


def in_range(values: Array, dtype: npt.DTypeLike) -> Array:
    """``values``, which are means of finite numbers of ``dtype``, as that: rounding alone may have taken them out."""
    largest = np.finfo(dtype).max
    np.nan_to_num(values, copy=False, posinf=largest, neginf=-largest)
    return np.clip(values, -largest, largest).astype(dtype)


def with_one_nan(values: Array) -> Array:
    """``values``, in which every NaN has the same bits: which of two NaN a sum keeps is the processor's choice."""
    np.copyto(values, np.nan, where=np.isnan(values))
    return values


def divide(total: Array, divisor: float) -> None:
    """Divide in place. By a power of two a product has the same bits, and comes sooner."""
    number = total.dtype.type
    if math.frexp(divisor)[0] == 0.5:
        np.multiply(total, number(1 / divisor), out=total)
    else:
        np.divide(total, number(divisor), out=total)


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.by_number: dict[int, npt.NDArray[np.uint8]] = {}


_blocks = _Blocks()


def scratch(number: int, numel: int, dtype: npt.DTypeLike) -> Array:
    """Memory of this thread, the same for the same number: new memory would cost as much as what is done in it.

    Whatever was in it before is overwritten sooner or later.
    """
    nbytes = numel * np.dtype(dtype).itemsize
    block = _blocks.by_number.get(number)
    if block is None or block.size < nbytes:
        block = _blocks.by_number[number] = np.empty(nbytes, np.uint8)
    return block[:nbytes].view(dtype)
