"""Medians of all numbers but one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of sorted numbers without ``one`` of them, which are two at least."""
    place, count = bisect_left(ordered, one), len(ordered) - 1
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
