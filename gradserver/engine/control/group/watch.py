"""Comparison of a group's contributions over its rounds: the noise scale, and members that are far off.

`gradserver.engine.control.watching` decides what happens to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gradserver.engine.control.noise import Noise
from gradserver.engine.control.outliers import ADVICE, Judgement, Outliers, Verdict
from gradserver.engine.figures import Figures
from gradserver.engine.records import Outlier
from gradserver.protocol.errors import OutlierError
from gradserver.protocol.limits import EVICTED_SECONDS
from gradserver.protocol.plan import Plan

_SHOWN: Final = 256
"""Buckets of a plan, at most, of which each is shown."""


class Evicted(NamedTuple):
    """A worker that was evicted: workers with its name may join again from ``until`` on."""

    member_id: int
    until: float
    error: OutlierError


@dataclass(slots=True)
class Watch:
    """Comparison of the contributions of one group.

    Attributes:
        noise: estimates of the noise scale.
        outliers: history of the members, and those that are off.
        evicted: workers that were evicted, as they were far off, by name; none that is back.
    """

    noise: Noise = field(default_factory=Noise)
    outliers: Outliers = field(default_factory=Outliers)
    evicted: dict[str, Evicted] = field(default_factory=dict)

    def take(self, figures: Figures, weights: Mapping[int, float], section: int) -> Judgement:
        """Take the figures of a round of a section of the plan."""
        found = self.outliers.take(figures.members, weights, section)
        if found.new:
            self.noise.restart()  # what was off is in the estimates
        elif not self.outliers.is_wild(figures.members):
            self.noise.take(figures.buckets)
        return found

    def evict(self, member_id: int, name: str, error: OutlierError, now: float) -> None:
        """Keep out workers with this name for a while."""
        self.evicted[name] = Evicted(member_id, now + EVICTED_SECONDS, error)

    def admit(self, name: str) -> None:
        """Note that a worker with this name has joined."""
        self.evicted.pop(name, None)

    def forget(self, member_id: int) -> None:
        """Forget a member that has departed."""
        self.outliers.forget(member_id)

    def restart(self) -> None:
        """Begin anew, as there is another plan."""
        self.noise.restart()
        self.outliers.restart()

    def restore(self, found: Mapping[int, Outlier], evicted: Mapping[str, Outlier], now: float) -> None:
        """Go on with what an earlier coordinator has written down of members that are off, and of evicted ones."""
        for member_id, one in found.items():
            self.outliers.recall(Verdict(member_id, one.ratio, one.cosine, 0))
        for name, one in evicted.items():
            error = OutlierError(f"{one.told(repr(name))}. {ADVICE}", worker=name, round=one.round)
            self.evict(one.member_id, name, error, now)

    def describe(self, plan: Plan | None) -> dict[str, object]:
        """Return the noise scale as plain JSON values, in units of weight; None where it is not known yet."""
        noise, parts = self.noise, range(0 if plan is None else len(plan.buckets))
        shown = parts if len(parts) <= _SHOWN else ()
        known = {} if plan is None else {plan.buckets[part].key: noise.scale_of(part) for part in shown}
        return {
            "scale": _rounded(noise.scale),
            "signal": _rounded(noise.signal),
            "noise": _rounded(noise.noise),
            "buckets": {key: _rounded(scale) for key, scale in known.items() if scale is not None},
        }

    def describe_member(self, member_id: int) -> dict[str, object]:
        """Return the figures of a member as plain JSON values; nothing if there are none."""
        figures, verdict = self.outliers.figures_of(member_id), self.outliers.named.get(member_id)
        if figures is None and verdict is None:
            return {}
        ratio, cosine = figures if verdict is None and figures else (1.0, 0.0)
        if verdict is not None:
            ratio, cosine = verdict.ratio, verdict.cosine
        return {
            "gradients": {
                "norm_ratio": _rounded(ratio),
                "cosine": _rounded(cosine),
                "off": None if verdict is None else str(verdict),
            }
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
