"""Applicants of a group that forms.

`gradserver.engine.control.forming` decides what happens to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.policy import Policy
from gradserver.protocol.messages import Join

TOLD_AFTER_SECONDS: Final = 5.0
"""Time after which an applicant is told that the group waits for other workers."""
TOLD_EVERY_SECONDS: Final = 30.0
"""Time between two such tellings."""


@dataclass(slots=True)
class Applicant:
    """A worker that joined a group which is not complete yet, or that has no place for it."""

    connection: int
    join: Join
    since: float

    @property
    def deadline(self) -> float:
        """Time at which its patience ends."""
        return self.since + self.join.timeout


@dataclass(slots=True)
class Applicants:
    """Applicants of one group, in the order in which they came.

    Attributes:
        waiting: all of them.
        opens: end of the gathering; None while there are fewer than the minimum.
        tells_at: time at which they are told next that they wait, and for which workers; None if none waits.
    """

    waiting: list[Applicant] = field(default_factory=list)
    opens: float | None = None
    tells_at: float | None = None

    def join(self, applicant: Applicant, policy: Policy) -> None:
        """Have one more wait. With the last one of the minimum the gathering begins."""
        self.waiting.append(applicant)
        first = applicant.since + TOLD_AFTER_SECONDS
        self.tells_at = first if self.tells_at is None else min(self.tells_at, first)
        if len(self.waiting) < policy.minimum:
            return
        if self.opens is None:
            self.opens = applicant.since + policy.gather
        self.opens = min(self.opens, *(one.deadline for one in self.waiting))

    def tell_again(self, now: float) -> None:
        """Note that they were told ``now`` that they wait."""
        self.tells_at = now + TOLD_EVERY_SECONDS

    def forget(self, connection: int, policy: Policy) -> None:
        """Forget one. With fewer than the minimum the gathering is over."""
        self.waiting = [applicant for applicant in self.waiting if applicant.connection != connection]
        if len(self.waiting) < policy.minimum:
            self.opens = None
        if not self.waiting:
            self.tells_at = None

    def leave_all(self) -> None:
        """Forget all, as they are members now."""
        self.waiting.clear()
        self.opens = self.tells_at = None

    def are_enough(self, policy: Policy, now: float) -> bool:
        """Tell whether the group has all that it waits for."""
        count = len(self.waiting)
        if count < policy.minimum:
            return False
        wishes = [applicant.join.world_size for applicant in self.waiting]
        if count == policy.maximum or (all(wishes) and count >= max(wishes)):
            return True
        return self.opens is not None and self.opens <= now
