"""The plan of a group, and the plans that its members propose.

`gradserver.engine.control.plans` decides what happens to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradserver.protocol.plan import Plan


@dataclass(slots=True)
class Proposal:
    """A plan that one member wants to exchange by.

    Attributes:
        since: time at which the member said so.
        round: the next one, as the member knows.
        beside: True if it is one more section of the plan in force.
        dropped: sections of that plan which the member has no use for any more.
    """

    plan: Plan
    since: float
    round: int = 0
    beside: bool = False
    dropped: frozenset[int] = frozenset()


@dataclass(slots=True)
class Plans:
    """Plans of one group.

    Attributes:
        plan: the one in force.
        planned: its first round.
        proposals: by member id.
        proposed: the plan that all have proposed, while shards have yet to confirm it.
        unconfirmed: these shards.
        unaware: members that came back without knowing the plan in force.
    """

    plan: Plan | None = None
    planned: int = 0
    proposals: dict[int, Proposal] = field(default_factory=dict)
    proposed: Plan | None = None
    unconfirmed: set[int] = field(default_factory=set)
    unaware: set[int] = field(default_factory=set)
    _heard: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Connection and number of each member's last proposal."""

    @property
    def is_lossy(self) -> bool:
        """True if a bucket of the plan travels with a loss."""
        return self.plan is not None and any(bucket.operation.is_lossy for bucket in self.plan.buckets)

    def is_repeated(self, member_id: int, connection: int, number: int) -> bool:
        """Note the number of a proposal, and tell whether it came on this connection before."""
        before = self._heard.get(member_id)
        self._heard[member_id] = connection, number
        return number > 0 and before is not None and before[0] == connection and number <= before[1]

    def propose(self, member_id: int, proposal: Proposal) -> None:
        """Take a member's proposal."""
        self.proposals[member_id] = proposal

    def withdraw(self, member_id: int) -> None:
        """Forget a member's proposal."""
        self.proposals.pop(member_id, None)

    def withdraw_all(self) -> None:
        """Forget all proposals."""
        self.proposals.clear()
        self.unconfirmed.clear()

    def reference(self) -> tuple[int, bool]:
        """Return a member with the proposal of most, of several the lowest, and whether all have made it."""
        votes = Counter((proposal.plan.hash, proposal.beside) for proposal in self.proposals.values())
        leading = max(votes.values())
        found = min(
            member_id for member_id, one in self.proposals.items() if votes[one.plan.hash, one.beside] == leading
        )
        return found, len(votes) == 1

    def await_shards(self, plan: Plan, shards: Iterable[int]) -> None:
        """Have ``shards`` confirm the plan that all members have proposed."""
        self.proposed, self.unconfirmed = plan, set(shards)

    def void_confirmations(self) -> None:
        """Forget which shards have yet to confirm a plan."""
        self.unconfirmed.clear()

    def confirm(self, shard: int, digest: str) -> Plan | None:
        """Note that a shard goes by the plan with this hash. Return the plan when all do."""
        plan = self.proposed if self.proposals else None
        if plan is None or plan.hash != digest or shard not in self.unconfirmed:
            return None
        self.unconfirmed.discard(shard)
        return None if self.unconfirmed else plan

    def adopt(self, plan: Plan, number: int) -> None:
        """Put ``plan`` in force from round ``number`` on."""
        self.plan, self.planned = plan, number
        self.proposals.clear()
        self.unaware.clear()

    def restore(self, plan: Plan, number: int) -> None:
        """Go on with the plan of an earlier coordinator."""
        self.plan, self.planned = plan, number

    def note_known(self, member_id: int, digest: str) -> None:
        """Note the hash of the plan that a member goes by which is back."""
        self.unaware.discard(member_id)
        if self.plan is not None and self.plan.hash != digest:
            self.unaware.add(member_id)

    def tells(self, member_id: int) -> None:
        """Note that a member which did not know the plan is told it."""
        self.unaware.discard(member_id)

    def depart(self, member_id: int) -> None:
        """Forget a member."""
        self.withdraw(member_id)
        self.tells(member_id)
