"""The round that a member is in: what it has pushed of it, and what it gives."""

from __future__ import annotations

from typing import Final

from gradserver.protocol.errors import GradServerError, OutOfStepError
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Kind
from gradserver.protocol.plan import Plan
from gradserver.worker.member.announced import Announced
from gradserver.worker.member.effects import Log
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.waiter import Waiter

NO_BUCKETS: Final = range(0)


class Rounds:
    """A member's rounds, one after the other. Not safe to share: the session's lock guards it.

    Attributes:
        plan: what a round exchanges, once members have agreed.
        number: the round that is open or next.
        pushed: what waits for each bucket that was pushed in this round. It stays the same object.
        open: the buckets that are exchanged in the present round, from its first push on.
        weight: of this worker in the present round.
        attempt: how often the present round was void, and begun again.
        announced: memberships and ends of rounds that the coordinator told of.
        skipped: true if the last round that is over must not be applied, as gradients of a member were not finite.
        left_out: true if gradients of this worker in it were not finite.
    """

    def __init__(self, identity: Identity) -> None:
        self.plan: Plan | None = None
        self.number = 0
        self.pushed: Final[dict[int, Waiter]] = {}
        self.open = NO_BUCKETS
        self.weight = 0.0
        self.attempt = 0
        self.announced = Announced()
        self.skipped = self.left_out = False
        self._identity = identity
        self._left_out_rounds = 0
        self._direct: Waiter | None = None
        """Waiter for word that the present round is void, while members reduce it among themselves."""
        self._void: tuple[ExchangeKey, GradServerError] | None = None
        """The latest commit that this member was told is void, and why."""

    def check_push(self, index: int) -> None:
        """Raise OutOfStepError if bucket ``index`` cannot be pushed now."""
        assert self.plan is not None
        if index not in self.open:
            raise OutOfStepError(
                f"bucket {self.plan.buckets[index].key!r} is another module's than those that were pushed in round "
                f"{self.number}: finish the round before pushing it"
            )
        if index in self.pushed:
            raise OutOfStepError(
                f"bucket {self.plan.buckets[index].key!r} was already pushed in round {self.number}: "
                f"finish the round before pushing it again"
            )

    def begin(self, index: int) -> None:
        """Begin the round with bucket ``index``: it exchanges those of its section."""
        assert self.plan is not None
        self.open = self.plan.section_of(index).parts

    # ── rounds that members reduce among themselves ───────────────────────────────────────────────────

    @property
    def is_direct(self) -> bool:
        """True if members reduce the present round among themselves."""
        return self._direct is not None

    def begin_direct(self, index: int, waiter: Waiter) -> GradServerError | None:
        """Reduce the present round with the others; give why bucket ``index``, its commit, is void, if it is already.

        The ``waiter`` is done when the commit fails, or the membership ends.
        """
        self._direct = waiter
        key = ExchangeKey(BUCKET, self.number, index)
        return self._void[1] if self._void is not None and self._void[0] == key else None

    def commit_failed(self, key: ExchangeKey, error: GradServerError) -> Waiter | None:
        """Take the coordinator's word that a commit fails; give what waits for that."""
        is_commit = key.stream == BUCKET and self.plan is not None and not self.plan.is_vacant(key.part)
        if not is_commit or self.plan is None or self.plan.buckets[key.part].kind is not Kind.COMMIT:
            return None
        if key.number >= self.number:
            self._void = key, error
        return self._direct if key.number == self.number and self._direct is not None and self._direct._open else None

    def begin_again(self) -> None:
        """Begin the present round again, with another section: it was void."""
        self._end_attempt()
        self.attempt += 1

    def _end_attempt(self) -> None:
        self.pushed.clear()
        self.open, self._direct = NO_BUCKETS, None

    def give_up(self) -> list[Waiter]:
        """Give the handle that waits for word of a round, which will not come."""
        waiting, self._direct = self._direct, None
        return [waiting] if waiting is not None and waiting._open else []

    # ── any round ─────────────────────────────────────────────────────────────────────────────────────

    def take(self, index: int, waiter: Waiter, weight: float) -> None:
        """Note that bucket ``index`` was pushed."""
        self.pushed[index], self.weight = waiter, weight

    def forget_pushes(self) -> None:
        """Forget what was pushed: nothing of it goes to any other member."""
        self.pushed.clear()

    def finish(self) -> None:
        """Go on to the next round."""
        self._end_attempt()
        self.attempt = 0
        self.number += 1

    def go_on_from(self, number: int) -> None:
        """Go to round ``number``."""
        self.number = number

    def missing(self, parts: range) -> list[str]:
        """List keys of buckets that have to be pushed before the round can be finished."""
        assert self.plan is not None
        buckets = self.plan.buckets
        return [buckets[part].key for part in parts if buckets[part].numel and part not in self.pushed]

    def note_not_finite(self) -> Log | None:
        """Note the outcome of a round in which gradients of a member were not finite."""
        found = [waiter.not_finite for waiter in self.pushed.values() if waiter.not_finite is not None]
        self.skipped, self.left_out = any(one.skips for one in found), any(one.own for one in found)
        if not self.left_out:
            return None
        self._left_out_rounds += 1
        if self._left_out_rounds & (self._left_out_rounds - 1) != 0:  # the first, and then ever more rarely
            return None
        became = "so no worker applies it" if self.skipped else "and is left out of the mean where it is not"
        here = self._identity.membership
        return Log(
            "group %r: what this worker, rank %d, gave to round %d is not finite, %s (the %d. time). Look at its "
            "data, loss and learning rate",
            (here.group, here.rank, self.number, became, self._left_out_rounds),
        )

    def go_by(self, plan: Plan, first: int) -> None:
        """Go by ``plan`` from round ``first`` on."""
        self.plan, self.number, self.attempt = plan, first, 0
        self._end_attempt()
