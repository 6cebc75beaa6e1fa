"""The agreement of a module with its replicas: some buckets of the group's plan, and rounds of its own."""

from __future__ import annotations

from collections.abc import Callable

from gradserver.protocol.errors import UsageError
from gradserver.protocol.plan import Plan
from gradserver.worker.member.plans import Plans

Finish = Callable[[float | None, range | None], None]
"""Finishes a round of some buckets: `gradserver.worker.boundaries.Boundaries.finish_round`."""


class Agreement:
    """One module's part of a group's exchange. `Worker.agree_beside` makes it.

    It lasts for as long as it is referenced. When all workers have dropped theirs, the next agreement may take its
    place in the plan.

    Attributes:
        plan: the module's buckets, as a plan of their own.
        number: that of the section in the group's plan. No other agreement of the group has it.
        first: the number of its first bucket there.
    """

    def __init__(self, finish_round: Finish, plans: Plans, plan: Plan, number: int, first: int) -> None:
        self.plan, self.number, self.first = plan, number, first
        self._finish_round = finish_round
        self._plans = plans
        self._generation = plans.generation

    @property
    def parts(self) -> range:
        """The numbers of its buckets in the group's plan."""
        return range(self.first, self.first + len(self.plan.buckets))

    def check(self) -> None:
        """Raise UsageError if the group's plan has no part for this agreement any more."""
        if self._plans.generation != self._generation:
            raise UsageError(
                "the worker agreed on a plan in place of all others after this module was wrapped: Worker.agree does "
                "that, Worker.agree_beside does not"
            )

    def finish(self, timeout: float | None) -> None:
        """Wait for the results of every bucket, and open the next round. See `Worker.finish_round`."""
        self._finish_round(timeout, self.parts)
