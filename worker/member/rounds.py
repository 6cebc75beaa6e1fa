"""The round that a member is in: what it has pushed of it, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gradserver.protocol.advice import on_not_finite
from gradserver.protocol.errors import GradServerError, OutOfStepError, RoundVoidError
from gradserver.protocol.exchange import BUCKET, ExchangeKey
from gradserver.protocol.limits import MAX_COUNTER
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
        owes: true if this worker has something to give in the present round that did not count in an earlier one.
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
        self.owes = False
        self.attempt = 0
        self.announced = Announced()
        self.skipped = self.left_out = False
        self._identity = identity
        self._left_out_rounds = 0
        self.refused: ExchangeKey | None = None
        """The commit of the present round, if this member takes it for void."""
        self._direct: tuple[ExchangeKey, Waiter] | None = None
        """Commit of the present round, while members reduce it, and waiter for word that it is void."""
        self._void: dict[ExchangeKey, GradServerError] = {}
        """Commits of this round and the next that this member was told are void, and why."""
        self._ended: dict[int, tuple[int, int, GradServerError]] = {}
        """Void commits by their part: the first round, the membership before which that holds, and why."""

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

    def begin(self, index: int, is_kept: Callable[[int], bool] = lambda _: False) -> None:
        """Begin the round with bucket ``index``: it exchanges those of its section.

        A bucket ``is_kept`` if something of it did not count before.
        """
        assert self.plan is not None
        self.open = self.plan.section_of(index).parts
        self.owes = any(map(is_kept, self.open))

    # ── rounds that members reduce among themselves ───────────────────────────────────────────────────

    @property
    def is_direct(self) -> bool:
        """True if members reduce the present round among themselves."""
        return self._direct is not None

    def begin_direct(self, index: int, waiter: Waiter) -> GradServerError | None:
        """Reduce the present round with the others; give why bucket ``index``, its commit, is void, if it is already.

        The ``waiter`` is done when the commit fails, or the membership ends.
        """
        key = ExchangeKey(BUCKET, self.number, index)
        self._direct = key, waiter
        return self._why_void(key)

    def commit_failed(self, key: ExchangeKey, error: GradServerError) -> Waiter | None:
        """Take a data half's word that a commit fails, or another bucket; give what waits for that.

        It may come before the coordinator's word that the commit is in the plan.
        """
        if key.stream != BUCKET:
            return None
        if not isinstance(error, RoundVoidError):
            self._ended[key.part] = key.number, MAX_COUNTER, error  # the group has broken
        elif error.epoch:
            self._ended[key.part] = key.number, error.epoch, error
        elif key.number >= self.number:
            self._void[key] = error
        if self._direct is None or self._why_void(self._direct[0]) is None:
            return None
        return self._direct[1] if self._direct[1]._open else None

    def _why_void(self, key: ExchangeKey) -> GradServerError | None:
        """Give why a commit of the present round is void; None if this member was not told so."""
        number, epoch, error = self._ended.get(key.part, (MAX_COUNTER, 0, None))
        if number <= key.number and self._identity.membership.epoch < epoch:
            return error
        return self._void.get(key)

    def refuse(self, index: int) -> ExchangeKey:
        """Take the present round for void, with its commit ``index``: that is what is to be said."""
        self.refused = ExchangeKey(BUCKET, self.number, index)
        return self.refused

    def begin_again(self) -> ExchangeKey | None:
        """Begin the present round again, with another section: it was void. Give its commit, if that is to be said."""
        said, direct = self.refused, self._direct
        if direct is not None:
            self.refused = direct[0]
        self._end_attempt()
        self.attempt += 1
        return self.refused if said is None else None

    def _end_attempt(self) -> None:
        self.pushed.clear()
        self.open, self._direct = NO_BUCKETS, None

    def give_up(self) -> list[Waiter]:
        """Give the handle that waits for word of a round, which will not come."""
        direct, self._direct = self._direct, None
        return [direct[1]] if direct is not None and direct[1]._open else []

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
        self.attempt, self.refused = 0, None
        self.number += 1
        if self._void:
            self._void = {key: error for key, error in self._void.items() if key.number >= self.number}

    def join_anew(self) -> None:
        """Forget memberships and ends of rounds that the coordinator told of: it may be another one."""
        self.announced = Announced()

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
        by_part = {part: waiter.not_finite for part, waiter in self.pushed.items()}
        found = {part: one for part, one in by_part.items() if one is not None}
        self.skipped = any(one.skips for one in found.values())
        self.left_out = any(one.own for one in found.values())
        if not self.left_out:
            return None
        self._left_out_rounds += 1
        if self._left_out_rounds & (self._left_out_rounds - 1) != 0:  # the first, and then ever more rarely
            return None
        became = "so no worker applies it" if self.skipped else "and is left out of the mean where it is not"
        here, buckets = self._identity.membership, () if self.plan is None else self.plan.buckets
        own = [part for part, one in found.items() if one.own and part < len(buckets)]
        advice = on_not_finite([(buckets[part], -1) for part in own] or [(None, -1)])
        return Log(
            "group %r: what this worker, rank %d, gave to round %d is not finite, %s (the %d. time). %s",
            (here.group, here.rank, self.number, became, self._left_out_rounds, advice),
        )

    def go_by(self, plan: Plan, first: int) -> None:
        """Go by ``plan`` from round ``first`` on."""
        self.plan, self.number, self.attempt, self.refused = plan, first, 0, None
        self._end_attempt()
