"""Gradient noise scale: how far contributions scatter around the true gradient.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training" (2018): with batches
much larger than tr(Σ)/|G|², the simple noise scale, a step gains little from more samples. That is about the critical
batch size. Estimates of one round scatter much, and may be negative. So numerator and denominator are smoothed by
themselves before the one is divided by the other (appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gradserver.engine.figures import OfBucket

_HORIZON: Final = 256
"""Rounds that estimates are smoothed over, once there are as many."""
_MOST: Final = 1e300
"""Bound of an estimate: sums over buckets have room in float64."""
_LEAST: Final = 8
"""Rounds below which no figure is told."""


class Smoothed(NamedTuple):
    """Means of the estimates of so many rounds for one bucket, in which later rounds count for more."""

    rounds: int
    signal: float
    noise: float

    def after(self, one: OfBucket) -> Smoothed:
        """Return the means with one more round."""
        rounds = self.rounds + 1
        share = 1 / min(rounds, _HORIZON)
        return Smoothed(
            rounds,
            self.signal + share * (one.signal - self.signal),
            self.noise + share * (one.noise - self.noise),
        )


@dataclass(slots=True)
class Noise:
    """Smoothed estimates of one group, for each bucket by its place in the plan."""

    by_part: dict[int, Smoothed] = field(default_factory=dict)

    def take(self, buckets: Iterable[OfBucket]) -> None:
        """Add the estimates of a round. Those that are too large to be added up are left out."""
        for one in buckets:
            if max(abs(one.signal), abs(one.noise)) > _MOST:
                continue
            self.by_part[one.part] = self.by_part.get(one.part, Smoothed(0, 0.0, 0.0)).after(one)

    def restart(self) -> None:
        """Forget all: what was measured is not what is to come."""
        self.by_part = {}

    @property
    def signal(self) -> float | None:
        """Estimate of the squared norm of the true gradient; None if there is none yet."""
        return sum(one.signal for one in self.by_part.values()) if self._is_known else None

    @property
    def noise(self) -> float | None:
        """Estimate of the trace of the covariance for weight 1; None if there is none yet."""
        return sum(one.noise for one in self.by_part.values()) if self._is_known else None

    @property
    def scale(self) -> float | None:
        """Simple noise scale, in units of weight; None if it is not known."""
        return _ratio(self.signal, self.noise)

    def scale_of(self, part: int) -> float | None:
        """Return the simple noise scale of one bucket; None if it is not known."""
        one = self.by_part.get(part)
        return None if one is None or one.rounds < _LEAST else _ratio(one.signal, one.noise)

    @property
    def _is_known(self) -> bool:
        return bool(self.by_part) and max(one.rounds for one in self.by_part.values()) >= _LEAST


def _ratio(signal: float | None, noise: float | None) -> float | None:
    """Divide the noise by the signal; None while the estimate of the signal is not above 0, or next to nothing."""
    if signal is None or noise is None or signal <= 0 or noise < 0:
        return None
    ratio = noise / signal
    return ratio if math.isfinite(ratio) else None
