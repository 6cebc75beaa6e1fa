"""Comparison of a group's contributions over its rounds: the noise scale, and members that are far off.

`gradserver.engine.control.watching` decides what happens to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.control.noise import Noise
from gradserver.engine.control.outliers import Outliers, Verdict
from gradserver.engine.figures import Figures
from gradserver.engine.records import Outlier
from gradserver.protocol.plan import Plan

_SHOWN: Final = 256
"""Buckets of a plan, at most, of which each is shown."""


@dataclass(slots=True)
class Watch:
    """Comparison of the contributions of one group.

    Attributes:
        noise: estimates of the noise scale.
        outliers: history of the members, and those that are off.
        left_out: members with contributions that have weight 0.
    """

    noise: Noise = field(default_factory=Noise)
    outliers: Outliers = field(default_factory=Outliers)
    left_out: set[int] = field(default_factory=set)

    def take(self, figures: Figures, weights: Mapping[int, float]) -> tuple[list[Verdict], list[int]]:
        """Take the figures of a round. Return verdicts that are new, and members that are in line again."""
        fresh, cleared = self.outliers.take(figures.members, weights)
        self.outliers.follow_level(figures.members)
        if fresh:
            self.noise.restart()  # what was off is in the estimates
        elif not self.outliers.is_wild(figures.members):
            self.noise.take(figures.buckets)
        return fresh, cleared

    def leave_out(self, member_id: int) -> None:
        """Note that contributions of a member have weight 0 from now on."""
        self.left_out.add(member_id)

    def forget(self, member_id: int) -> None:
        """Forget a member that has departed."""
        self.left_out.discard(member_id)
        self.outliers.forget(member_id)

    def restart(self) -> None:
        """Begin anew, as there is another plan."""
        self.noise.restart()

    def restore(self, found: Mapping[int, Outlier]) -> None:
        """Go on with the members that are off, as an earlier coordinator has written down."""
        for member_id, one in found.items():
            self.outliers.recall(Verdict(member_id, one.ratio, one.cosine, 0))
            if one.left_out:
                self.left_out.add(member_id)

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
                "left_out": member_id in self.left_out,
            }
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
