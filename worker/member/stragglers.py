"""A member's part in a group that does not wait for all: results that it has not asked for, and late gradients.

    result                                      what happens
    ──────────────────────────────────────────  ─────────────────────────────────────────────────────────────────
    of a bucket that it has not reached         kept in the backlog; when the bucket is pushed, it is there
    … and there is no room                      LeftOutError: it has to join again
    in which what it gave does not count        nothing more of this round is sent; its other results come unasked
    … and late contributions are kept           what it gave to these slices is added to what it gives next
    … and it is not finite                      it is forgotten, unless that halts the group
    … and is kept for more rounds than --staleness  all that is kept is forgotten

When the round fails, that is told for one of its buckets at least, and then holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError, LeftOutError
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Op, unasked_cost
from gradserver.protocol.limits import MIB, TOLD_BYTES
from gradserver.protocol.messages import Result
from gradserver.protocol.plan import Plan
from gradserver.worker.member.backlog import Backlog, room_for
from gradserver.worker.member.carryover import CarryOver, Contribution, is_finite
from gradserver.worker.member.effects import Log
from gradserver.worker.member.exchange import Exchange
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.learner import Stage
from gradserver.worker.member.rounds import Rounds

_CHRONIC_ROUNDS: Final = 8
"""Late rounds in a row after which the log says what that means. It says so again after twice as many, and so on."""


class Ended(Enum):
    """Fate of what a member gave to a round that is over."""

    COUNTED = "it counted"
    KEPT = "it came too late, and is given again"
    DROPPED = "it came too late, and is forgotten"


class Read:
    """Bytes that were read of what each data shard has sent. Not safe to share: the session's lock guards it."""

    def __init__(self) -> None:
        self._untold: dict[int, int] = {}

    def more(self, shard: int, payload: Buffer | None) -> int:
        """Count one more result, and give what ``shard`` is to be told; 0 for nothing yet."""
        untold = self._untold.get(shard, 0) + unasked_cost(payload)
        self._untold[shard] = 0 if untold >= TOLD_BYTES else untold
        return untold if untold >= TOLD_BYTES else 0


def lacks(result: Result, member_id: int) -> bool:
    """Return true if what ``member_id`` gives to these slices does not count."""
    return bool(result.without) and member_id in result.without


def overrun(backlog: Backlog, number: int, others: int, rank: int) -> LeftOutError:
    """Make the error for a worker in round ``number`` that has no room for results of round ``others``."""
    return LeftOutError(
        f"this worker is late for round {number}, while the others are in round {others}: more than "
        f"{backlog.limit / MIB:g} MiB of results wait for it. It has to join again",
        rank=rank,
    )


class Stragglers:
    """Results that come before their bucket, and gradients that come after it. The session's lock guards it.

    Attributes:
        backlog: results of buckets that this worker has not pushed yet.
        carry: what did not count, and is added to what this worker gives next.
        failures: errors of rounds that failed, and that this worker has not finished; by round.
        late: the last round in which something of this worker did not count.
    """

    def __init__(self, identity: Identity, rounds: Rounds) -> None:
        self.backlog = Backlog()
        self.carry = CarryOver()
        self.failures: dict[int, GradServerError] = {}
        self.late = -1
        self._identity = identity
        self._rounds = rounds
        self._read = Read()
        self._over = -1
        """The round of which nothing more is sent, as it would not count."""
        self._late_rounds = 0
        """Number of rounds in a row for which it was late."""

    def expect(self, plan: Plan, slices: Sequence[int], kept: Collection[int], first: int) -> None:
        """Take what comes unasked as ``plan``'s; with ``slices`` in its buckets. Buckets ``kept`` are as before.

        Results from round ``first`` on stay: those of a data shard can overtake the word that the plan is agreed on.
        """
        before = self.backlog.all()
        self.backlog = Backlog(room_for(plan.nbytes), slices, [section.parts for section in plan.each])
        for result, payload in before:
            if result.key.number >= first:
                self.backlog.put(result, payload)
        self.carry.forget(kept)
        self.failures.clear()

    def read(self, payload: Buffer | None, shard: int) -> int:
        """Count a result that came unasked, and give the bytes that ``shard`` is to be told of; 0 for none yet."""
        return self._read.more(shard, payload)

    def keep(self, result: Result, payload: Buffer | None) -> bool:
        """Keep a result for what has not begun; false if there is no room. One for what has ended is dropped."""
        key, rounds = result.key, self._rounds
        to_come = key.number > rounds.number or (key.number == rounds.number and key.part not in rounds.pushed)
        if key.stream != BUCKET or not to_come:
            return True
        return self.backlog.put(result, payload)

    def came(self, key: ExchangeKey) -> list[tuple[Result, Buffer | None]]:
        """Hand over what has come of a bucket before it has begun."""
        return self.backlog.take(key.number, key.part) if key.stream == BUCKET else []

    def is_over(self, key: ExchangeKey) -> bool:
        """Return true if nothing that is sent for ``key`` would count any more."""
        return key.stream == BUCKET and key.number == self._over

    def note_late(self, number: int) -> None:
        """Note that something that this worker gives to round ``number`` does not count."""
        self.late = self._over = number

    def note_failure(self, number: int, error: GradServerError) -> None:
        """Note that round ``number`` failed, if that is not known."""
        self.failures.setdefault(number, error)

    def begin_again(self, number: int, is_from: Callable[[Result], bool]) -> None:
        """Begin again in round ``number``, at the shard that a result ``is_from``.

        What is sent may count there. Results of rounds behind it are void.
        """
        self._over = -1
        self._read = Read()
        self.backlog.forget_if(lambda result: result.key.number > number and is_from(result))

    def keeps(self, exchange: Exchange) -> bool:
        """Return true if what this worker gave to ``exchange`` is to count later where it does not now."""
        if self._identity.stage is Stage.OBSERVING:  # it was not to count
            return False
        is_mean = exchange.operation.op is Op.MEAN and exchange.weight > 0
        return self._identity.membership.late == "keep" and is_mean

    def keep_own(self, exchange: Exchange, given: Sequence[tuple[int, Contribution]]) -> None:
        """Keep what this worker gave to some slices, and does not count there."""
        for index, contribution in given:
            if self._identity.membership.nonfinite != "halt" and not is_finite(contribution, exchange.operation.dtype):
                continue  # what is not finite would spoil the next round, too
            self.carry.put(exchange.key.part, index, contribution, exchange.key.number)

    def finish(self) -> tuple[Ended, Log | None]:
        """Note that a round is over. Return what becomes of what this worker gave to it, and what to say."""
        number, here, warning = self._rounds.number, self._identity.membership, None
        self.failures.pop(number, None)
        waits_for_all = here.mode == "sync" and self._identity.stage is not Stage.OBSERVING
        was_late = self.late == number and waits_for_all
        self._late_rounds = self._late_rounds + 1 if was_late else 0
        if self._late_rounds >= _CHRONIC_ROUNDS and self._late_rounds.bit_count() == 1:
            what = "is added to what it gives next" if here.late == "keep" else "is forgotten"
            warning = Log(
                "group %r: this worker, rank %d, was late for %d rounds in a row. What it gave too late %s; if it "
                "stays this slow, give it smaller batches, or the others more time (--grace)",
                (here.group, here.rank, self._late_rounds, what),
            )
        if not was_late:
            return Ended.COUNTED, warning
        if here.late != "keep":
            return Ended.DROPPED, warning
        since = self.carry.since
        if since is None or not 0 <= here.staleness < number + 1 - since:
            return Ended.KEPT, warning
        self.carry.forget()
        return Ended.DROPPED, self._too_old(since)

    def _too_old(self, since: int) -> Log:
        here, number = self._identity.membership, self._rounds.number
        return Log(
            "group %r: this worker, rank %d, was late for rounds %d to %d. What it gave to them is more than %d rounds "
            "old (--staleness), and is dropped. Give it smaller batches, or the others more time (--grace)",
            (here.group, here.rank, since, number, here.staleness),
        )
