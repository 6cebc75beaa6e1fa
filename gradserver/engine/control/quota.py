"""Journal quota: bytes of the journal that members of one group may cause, a budget that refills with time.

    record                                       counted
    ───────────────────────────────────────────  ──────────────────────────────────────────────────────────────────
    Group, Subgroup, Durable, Handling, Epoch,   whole
    Stragglers, Entered, Chosen, Plan, Halt,
    Closed, Reset, Commits
    Data, Claim, Used, the used data of a Round  ranges beyond `FREE_RANGES` for each member concerned
    Round, Boundary, Cut                         not at all

What is not counted belongs to rounds. It is small. Its price is that a round is exchanged or a sample is claimed, which
takes the coordinator longer than to write it down. So training is never refused, however fast it is.

A budget is a number of bytes. What is written is taken from it, and it refills evenly, wholly in an hour. While it is
used up the group is refused what would write more: joins, plans, and claims of many ranges. A departure cannot be
refused, so a budget can be overdrawn by what the members that are there have yet to cause.

A budget outlives its group, until it is full again. So a group that is founded again goes on with what it has left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from gradserver.engine.data_records import Claim, Data, Used
from gradserver.engine.declared import Kind
from gradserver.engine.records import Boundary, Cut, Round, Spent, size_of
from gradserver.protocol.errors import JoinRefusedError, QuotaExceededError
from gradserver.protocol.limits import MAX_ENDED_GROUPS, MIB
from gradserver.protocol.ranges import PAIR_BYTES, Ranges

REFILL_SECONDS: Final = 3600.0
"""In so long an empty budget is full again."""
FREE_RANGES: Final = 32
"""Ranges of one member that are not counted. A claim is one, or a few where samples of the dead are among them."""
ENDED_BUDGETS: Final = 4
"""Budgets that ended groups may owe together, under names that the operator has not given."""
_OF_ROUNDS: Final = Round | Boundary | Cut
"""Records that are not counted."""
_STEP: Final = 64
"""A budget is written down when it has changed by this part of it."""


@dataclass(slots=True)
class Account:
    """The budget of one group.

    Attributes:
        group: the group's name.
        limit: bytes in a full budget; 0 for no limit.
        clock: gives the time of the present event, in seconds.
        noted: the debt that is written down, in bytes.
    """

    group: str = ""
    limit: int = 0
    clock: Callable[[], float] = float
    noted: int = 0
    _debt: float = 0.0
    _at: float = 0.0

    def debt(self) -> float:
        """Give the bytes that were taken and are not refilled yet."""
        now = self.clock()
        if self._debt:
            self._debt = max(self._debt - (now - self._at) * self.limit / REFILL_SECONDS, 0.0)
        self._at = now
        return self._debt

    def spend(self, nbytes: float) -> None:
        """Take ``nbytes``, also if the budget has less."""
        if self.limit and nbytes:
            self._debt = self.debt() + nbytes

    @property
    def is_used_up(self) -> bool:
        """True if nothing is left."""
        return self.limit > 0 and self._debt > 0 and self.debt() >= self.limit

    def news(self) -> Spent | None:
        """Give the record of the debt; None if what is written down is near enough."""
        if not self.limit or abs(self._debt - self.noted) * _STEP < self.limit:
            return None
        self.noted = int(self._debt)
        return Spent(self.group, self.noted)

    def check(self, what: str) -> None:
        """Raise QuotaExceededError if the budget is used up; ``what`` names that which is refused."""
        if self.is_used_up:
            raise QuotaExceededError(self.why(what))

    def check_join(self, who: str) -> None:
        """Raise JoinRefusedError if the budget is used up."""
        if self.is_used_up:
            raise JoinRefusedError(self.why(f"the join of {who!r}"))

    def why(self, what: str) -> str:
        """Say why ``what`` is refused."""
        seconds = math.ceil((self.debt() - self.limit) * REFILL_SECONDS / self.limit) + 1
        return (
            f"the journal quota of group {self.group!r} is used up, and {what} is refused: its joins, departures, "
            f"plans and claims of data have filled {self.debt() / MIB:.1f} MiB of the coordinator's journal, and "
            f"{self.limit / MIB:g} MiB are allowed, which refill in an hour. Try again in {seconds} s and less often, "
            f"or start the coordinator with a larger --journal-quota"
        )


class Quotas:
    """The budgets of all groups.

    Args:
        limit: bytes in the budget of one group; 0 for no limit.
        named: the groups with names that the operator has given.

    Attributes:
        now: the time of the present event, in seconds.
    """

    def __init__(self, limit: int, named: Collection[str]) -> None:
        self.now = 0.0
        self._limit, self._named = limit, frozenset(named)
        self._accounts: dict[str, Account] = {}

    def account(self, group: str) -> Account:
        """Give the budget of a group, a full one if nothing is known of it."""
        account = self._accounts.get(group)
        if account is None:
            account = Account(group, self._limit, lambda: self.now)
            if self._limit:
                self._accounts[group] = account
        return account

    def restore(self, record: Spent) -> None:
        """Go on with a budget as an earlier coordinator has written it down, which may have had a larger limit."""
        account = self.account(record.group)
        account.spend(min(record.nbytes, self._limit))
        account.noted = record.nbytes

    def check_founding(self, group: str, living: Collection[str]) -> None:
        """Raise JoinRefusedError if groups that are not ``living`` any more have written too much.

        Otherwise ever new names would be ever new budgets. This concerns only names that the operator has not given,
        and of which nothing is known.
        """
        if group in self._accounts or group in self._named:
            return
        ended = [one for name, one in self._accounts.items() if name not in living and name not in self._named]
        owed, most = sum(account.debt() for account in ended), ENDED_BUDGETS * self._limit
        if ended and (owed >= most or len(ended) >= MAX_ENDED_GROUPS):
            raise JoinRefusedError(
                f"no group {group!r} can be founded for now: {len(ended)} groups that have ended have filled "
                f"{owed / MIB:.1f} MiB of the coordinator's journal, and {most / MIB:g} MiB are allowed in all, which "
                f"refill in an hour. Try again later, or use the name of a group that the operator has given (--groups)"
            )

    def forget(self, living: Collection[str]) -> Iterator[Spent]:
        """Forget the full budgets of groups that are not ``living`` any more. What to write down of that."""
        full = [name for name, one in self._accounts.items() if name not in living and not one.debt()]
        for name in full:
            if self._accounts.pop(name).noted:
                yield Spent(name, 0)


def counted(record: Kind) -> int:
    """The bytes of ``record`` that its group's budget pays for."""
    match record:
        case _ if isinstance(record, _OF_ROUNDS):
            return 0
        case Claim(ranges=ranges) | Used(ranges=ranges):
            return counted_ranges(len(ranges))
        case Data(left=left, holders=holders):
            pieces = len(left) + sum(len(holder.held) + len(holder.answer) for holder in holders)
            return counted_ranges(pieces, 1 + len(holders))
    return size_of(record)


def counted_ranges(count: int, member_ids: int = 1) -> int:
    """The bytes of so many ranges that are not free."""
    return PAIR_BYTES * max(count - FREE_RANGES * member_ids, 0)


def used_ranges(ranges: Ranges) -> int:
    """The bytes that are counted of ranges which a member says it has used: they come into the record of a round."""
    return counted_ranges(len(ranges))
