"""Plans that a member has proposed, and what of them others agreed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import MalformedMessageError, OutOfStepError, UsageError
from gradserver.protocol.limits import MAX_LIST
from gradserver.protocol.messages import Agreed, Propose
from gradserver.protocol.plan import Plan, Section, decode_plan
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.waiter import Waiter


class Proposal(NamedTuple):
    """A plan that the others have yet to agree with, and how it was said."""

    plan: Plan
    waiter: Waiter
    message: Propose


class Settled(NamedTuple):
    """The outcome of a proposal: the group's plan, this member's section of it, and buckets that are as before."""

    plan: Plan
    section: Section
    kept: set[int]
    waiter: Waiter


class Plans:
    """A member's proposals, one at a time. Not safe to share: the session's lock guards it.

    Attributes:
        generation: how often a plan has taken the place of all others.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.generation = 0
        self._rounds = rounds
        self._proposal: Proposal | None = None
        self._repeated: Proposal | None = None
        """A plan that was agreed on before this worker had to join anew, and is proposed once more."""
        self._settled: list[tuple[Plan, Section]] = []
        """Plans that were agreed on, in their order, and their sections."""
        self._proposed = 0
        """Number of the last proposal."""
        self._agreements: dict[int, Callable[[], object | None]] = {}
        """Agreements by the number of the section; None for one that was garbage collected."""

    @property
    def open(self) -> Proposal | None:
        """The proposal that has no answer yet."""
        for proposal in (self._repeated, self._proposal):
            if proposal is not None and proposal.waiter._open:
                return proposal
        return None

    @property
    def settled(self) -> list[tuple[Plan, Section]]:
        """Plans that were agreed on, in their order, and their sections."""
        return list(self._settled)

    def check(self, plan: Plan) -> Waiter | None:
        """Give what waits for ``plan``, if it is proposed already. Raise why it cannot be proposed."""
        if self._rounds.pushed:
            number = self._rounds.number
            raise OutOfStepError(f"round {number} is not finished: a new plan has to wait until it is")
        if self._proposal is None:
            return None
        if self._proposal.plan != plan:
            raise UsageError("this worker waits for the others to agree on another plan")
        return self._proposal.waiter

    def propose(self, plan: Plan, beside: bool, waiter: Waiter) -> Proposal:
        """Propose ``plan`` in place of all others, or ``beside`` those that there are."""
        here = self._rounds.plan
        self._proposed += 1
        message = Propose(plan.hash, self._rounds.number, number=self._proposed)
        if beside and here is not None:
            message = replace(message, beside=here.hash, dropped=self._dropped(here))
        self._proposal = Proposal(plan, waiter, message)
        return self._proposal

    def repeat(self, plan: Plan, waiter: Waiter) -> Proposal:
        """Propose ``plan`` once more, to a group that this worker joins anew. Agreements on it last."""
        assert self._rounds.plan is not None
        self._proposed += 1
        message = Propose(plan.hash, self._rounds.number, beside=self._rounds.plan.hash, number=self._proposed)
        self._repeated = Proposal(plan, waiter, message)
        return self._repeated

    def _dropped(self, here: Plan) -> tuple[int, ...]:
        """List sections of the plan that no agreement refers to any more."""
        kept = self._agreements
        gone = (one.number for one in here.each if one.number in kept and kept[one.number]() is None)
        return tuple(gone)[:MAX_LIST]

    def withdraw(self) -> None:
        """Forget the proposal: it could not be said, or its outcome was heard."""
        self._proposal = None

    def keep(self, number: int, agreement: Callable[[], object | None]) -> None:
        """Take note of the agreement on section ``number``, which lasts for as long as ``agreement`` gives it."""
        self._agreements[number] = agreement

    def agreed(self, agreed: Agreed, payloads: Sequence[Buffer]) -> Settled | None:
        """Take the coordinator's word that a plan is agreed on; None if this member waits for none."""
        if (proposal := self.open) is None:
            return None
        proposed, waiter, message = proposal
        plan = decode_plan(memoryview(payloads[0])) if payloads else proposed
        section = plan.section(agreed.section)
        if section is None or agreed.hash != proposed.hash or plan.alone(section) != proposed:
            raise MalformedMessageError(f"section {agreed.section} was agreed on, and is not what was proposed")
        repeated, self._repeated = self._repeated, None
        if repeated is None:
            self._settled = [*(self._settled if message.beside else ()), (proposed, section)]
        kept = set[int]()
        if message.beside and self._rounds.plan is not None:
            kept = {one.number for one in self._rounds.plan.each if plan.section(one.number) is not None}
        else:
            self.generation += 1
        self._agreements = {number: one for number, one in self._agreements.items() if number in kept}
        return Settled(plan, section, {part for number in kept for part in plan.parts_of(number)}, waiter)
