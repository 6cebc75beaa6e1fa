"""Medians, quartiles, and quantities with their units."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stats:
    """Samples of one quantity, in seconds."""

    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stats:
        """Make statistics of one sample or more."""
        if not samples:
            raise ValueError("no samples")
        return cls(tuple(samples))

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values: the summary, and the samples in the order in which they were taken."""
        low, high = self.quartiles
        return {"median": self.median, "q1": low, "q3": high, "n": len(self.samples), "samples": list(self.samples)}


def figures(value: float, digits: int = 3) -> str:
    """Format `value` with at least ``digits`` significant digits, and no exponent: 0.0120, 1.20, 123, 12345."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 has a digit more before the point once it is rounded
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:.{max(0, places)}f}"


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, without the unit."""
    return figures(1e3 * seconds)


def microseconds(seconds: float) -> str:
    """Format a time in microseconds, without the unit."""
    return figures(1e6 * seconds)


def size_name(nbytes: int) -> str:
    """Format a size for people: 4 KiB, 26 MB, 1.5 MB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
