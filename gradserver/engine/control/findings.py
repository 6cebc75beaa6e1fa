"""Gradients that were not finite and did not halt their group: counts, and some warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.control.quiet import Quiet
from gradserver.engine.policy import OnNonFinite
from gradserver.engine.records import RoundRecord
from gradserver.protocol.advice import on_not_finite
from gradserver.protocol.plan import Bucket, Plan

_TOLD: Final = 4
"""Contributions that one warning names."""


@dataclass(slots=True)
class Findings:
    """Counts of one group, since this coordinator has it.

    Attributes:
        rounds: in how many there were such gradients.
        by_id: the same for each member.
    """

    rounds: int = 0
    by_id: Counter[int] = field(default_factory=Counter)
    _quiet: Quiet = field(default_factory=Quiet)

    def count(
        self, record: RoundRecord, policy: OnNonFinite, plan: Plan | None, call: Callable[[int], str], group: str
    ) -> str:
        """Count those of a round; gives what people are to hear of it, which may be nothing."""
        self.rounds += 1
        self.by_id.update({member_id for member_id, _, _, _ in record.nonfinite})
        since = self._quiet.tell(record.completed)
        if since is None:
            return ""
        told = [
            f"{call(member_id)} in {_where(plan, part, first)}"
            for member_id, part, _, first in record.nonfinite[:_TOLD]
        ]
        more = f" and {len(record.nonfinite) - _TOLD} more" if len(record.nonfinite) > _TOLD else ""
        becomes = "no worker applies it" if policy is OnNonFinite.SKIP else "left out of the mean"
        what = f"round {record.round} of group {group!r} has NaN or Inf from {', '.join(told)}{more}"
        advice = on_not_finite((_bucket(plan, part), first) for _, part, _, first in record.nonfinite[:_TOLD])
        return f"{what}: {becomes}{since}. {advice}"

    def describe(self, names: Sequence[str]) -> dict[str, object]:
        """The counts, as plain JSON values."""
        by_name: Counter[str] = Counter()
        for member_id, rounds in sorted(self.by_id.items()):  # an earlier coordinator may have given one
            by_name[(names[member_id] if member_id < len(names) else "") or "(departed)"] += rounds
        return {"rounds": self.rounds, "workers": dict(by_name)}


def _bucket(plan: Plan | None, part: int) -> Bucket | None:
    return None if plan is None or part >= len(plan.buckets) else plan.buckets[part]


def _where(plan: Plan | None, part: int, first: int) -> str:
    bucket = _bucket(plan, part)
    if bucket is None:
        return f"bucket {part}"
    if not 0 <= first < bucket.numel:
        return f"bucket {bucket.key!r}"
    near = ", or one beside it," if bucket.operation.is_lossy else ""
    return f"{bucket.tensor_at(first)}{near} of bucket {bucket.key!r}"
