"""Audits of one group: which members compute the same samples, and whether what they contributed agrees.

event                                        what happens
───────────────────────────────────────────  ─────────────────────────────────────────────────────────────────────────
a Claim for an audited round, the first one  its ranges are leased as any, and this member is the holder
… of another member that was drawn           it is given the same ranges, which it does not hold: it is a witness
the holder departs                           there is no audit: its samples are for others
the round is over, and the holder used       the contributions are judged
  exactly these ranges in it
… and it used others                         what was compared is dropped: it was not of the same samples

Nothing of an audit is written down before its round. After a restart, those that were under way are not judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from gradserver.engine.control.quiet import Quiet
from gradserver.engine.data_records import Committed
from gradserver.engine.records import Compared, RoundRecord
from gradserver.protocol.audits import Audit
from gradserver.protocol.means import Mean
from gradserver.protocol.messages.leases import Claim
from gradserver.protocol.plan import Plan
from gradserver.protocol.ranges import Ranges

_MOST_OPEN: Final = 4096
"""Rounds with an audit that lie ahead: loaders read so far ahead at most."""


class Repeat(NamedTuple):
    """Ranges that a witness is to compute: those of ``holder``, and the ``number`` of the claim."""

    number: int
    holder: int
    ranges: Ranges


@dataclass(slots=True)
class Lease:
    """Samples of one audit."""

    name: str
    epoch: int
    members: tuple[int, ...]
    holder: int
    ranges: Ranges


class Verdict(NamedTuple):
    """Outcome of one audit.

    Attributes:
        worst: the pair with the largest difference, as a multiple of its limit.
        differs: True if that is above the limit.
        wrong: the member that differs from two others which agree; -1 if there is none.
    """

    worst: Compared
    differs: bool
    wrong: int


def verdict(compared: Sequence[Compared]) -> Verdict:
    """Judge the pairs of one audit, of which there is at least one."""
    differing = [pair for pair in compared if pair.relative > pair.limit]
    agreeing = {member_id for pair in compared if pair not in differing for member_id in (pair.member_id, pair.other)}
    ids = {member_id for pair in differing for member_id in (pair.member_id, pair.other)}
    alone = ids - agreeing if agreeing else set()
    worst = max(compared, key=lambda pair: pair.relative / (pair.limit or 1.0))
    return Verdict(worst, bool(differing), alone.pop() if len(alone) == 1 else -1)


@dataclass(slots=True)
class Audits:
    """Audits of one group, since this coordinator has it.

    Attributes:
        rounds: number of those in which contributions were compared.
        differing: number of those in which two did not agree.
        wrong: the number of times that each member was found to be wrong, by member id.
        doubtful: the number of times that each was one of a pair of which one is wrong.
    """

    rounds: int = 0
    differing: int = 0
    wrong: Counter[int] = field(default_factory=Counter)
    doubtful: Counter[int] = field(default_factory=Counter)
    _leases: dict[int, Lease] = field(default_factory=dict)
    """By round."""
    _given: dict[tuple[str, int], Repeat] = field(default_factory=dict)
    """The last answer to each witness, by the data's name and member id."""
    _largest: float = 0.0
    _last: str = ""
    _quiet: Quiet = field(default_factory=Quiet)

    # ── samples ───────────────────────────────────────────────────────────────────────────────────────

    def repeat(self, member_id: int, claim: Claim) -> Repeat | None:
        """Return what ``member_id`` is to compute as a witness; None if it gets samples of its own."""
        before = self._given.get((claim.name, member_id))
        if before is not None and before.number == claim.number:
            return before
        lease = self._leases.get(claim.audit - 1)
        if lease is None or (lease.name, lease.epoch) != (claim.name, claim.epoch):
            return None
        if member_id == lease.holder or member_id not in lease.members:
            return None
        found = self._given[claim.name, member_id] = Repeat(claim.number, lease.holder, lease.ranges)
        return found

    def hold(
        self, member_id: int, claim: Claim, ranges: Ranges, audit: Audit, seed: int, present: Iterable[int], mean: Mean
    ) -> None:
        """Note that ``member_id`` got ``ranges`` for an audited round: the others that are drawn get the same."""
        number = claim.audit - 1
        if number in self._leases or len(self._leases) >= _MOST_OPEN or not audit.picks(seed, number):
            return
        members = audit.members(seed, number, present, mean)
        if member_id in members:
            self._leases[number] = Lease(claim.name, claim.epoch, members, member_id, ranges)

    def depart(self, member_id: int) -> None:
        """Give up audits of which ``member_id`` is the holder, and what it was told as a witness."""
        for number in [number for number, lease in self._leases.items() if lease.holder == member_id]:
            del self._leases[number]
        for key in [key for key in self._given if key[1] == member_id]:
            del self._given[key]

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────────

    def settle(
        self, record: RoundRecord, used_up: Sequence[Committed], audit: Audit, plan: Plan | None
    ) -> tuple[Compared, ...]:
        """End the audit of a round. Return for each pair the bucket with the largest difference, if they count."""
        lease = self._leases.get(record.round)
        for number in [number for number in self._leases if number <= record.round]:
            del self._leases[number]
        if lease is None or plan is None:
            return ()
        used = [(one.member_id, one.epoch, one.ranges) for one in used_up if one.name == lease.name]
        if (lease.holder, lease.epoch, lease.ranges) not in used or any(
            member_id in lease.members and member_id != lease.holder and ranges for member_id, _, ranges in used
        ):
            return ()
        found: dict[tuple[int, int], Compared] = {}
        for pair in record.compared:
            if not {pair.member_id, pair.other} <= {*lease.members} or pair.part >= len(plan.buckets):
                continue
            pair = pair._replace(limit=audit.limit(plan.buckets[pair.part].operation))
            which = pair.member_id, pair.other
            if which not in found or pair.relative / pair.limit > found[which].relative / found[which].limit:
                found[which] = pair
        return tuple(found[which] for which in sorted(found))

    def count(self, record: RoundRecord, plan: Plan | None, call: Callable[[int], str], group: str) -> str:
        """Count the audit of a round; gives what people are to hear of it, which may be nothing."""
        worst, differs, wrong = verdict(record.compared)
        self.rounds += 1
        self._largest = max(self._largest, worst.relative)
        if not differs:
            return ""
        self.differing += 1
        pairs = [pair for pair in record.compared if pair.relative > pair.limit]
        ids = sorted({member_id for pair in pairs for member_id in (pair.member_id, pair.other)})
        if wrong >= 0:
            self.wrong[wrong] += 1
            others = sorted({i for pair in record.compared for i in (pair.member_id, pair.other)} - {wrong})
            finding = f"{call(wrong)} differs from {' and '.join(map(call, others))}, which agree"
            look = "Look at that worker's device, data and loss"
        else:
            self.doubtful.update(ids)
            finding = f"{' and '.join(map(call, ids))} differ"
            look = "One of them is wrong, and no third worker tells which: look at their devices, data and losses"
        bucket = plan.buckets[worst.part].key if plan is not None and worst.part < len(plan.buckets) else worst.part
        self._last = (
            f"round {record.round}: {finding}: relative difference {size_of(worst)} in bucket {bucket!r}, and "
            f"{worst.limit:.2g} at most is rounding"
        )
        since = self._quiet.tell(record.completed, ids if wrong < 0 else [wrong])
        if since is None:
            return ""
        return f"audit of group {group!r}, {self._last}{since}. They computed the same samples. {look}"

    def describe(self, audit: Audit, names: Sequence[str]) -> dict[str, object]:
        """The counts, as plain JSON values."""

        def named(counts: Counter[int]) -> dict[str, int]:
            return {(names[one] if one < len(names) else "") or "(departed)": n for one, n in sorted(counts.items())}

        return {
            "policy": str(audit),
            "rounds": self.rounds,
            "differing": self.differing,
            "largest": self._largest if math.isfinite(self._largest) else None,
            "wrong": named(self.wrong),
            "doubtful": named(self.doubtful),
            "last": self._last,
        }


def size_of(pair: Compared) -> str:
    """Return the relative difference of a pair, for people."""
    return f"{pair.relative:.2g}" if math.isfinite(pair.relative) else "not finite"


def settled(record: RoundRecord, compared: tuple[Compared, ...]) -> RoundRecord:
    """Return the record with what counts of its comparisons."""
    return record if record.compared == compared else replace(record, compared=compared)
