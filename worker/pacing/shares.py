"""Decisions for unequal workers, by the table that all members of a round have: how much each is to compute.

A rule adopts what the table says was decided before, goes over to the members of the next round, and takes the times.
Equal tables and equal members give equal decisions, also at a worker that has just joined. So no state of a rule is
kept elsewhere, and members do not agree on it by further messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from gradserver.protocol.balance import ThroughputTracker
from gradserver.protocol.cadence import Cadence, CadenceOptions
from gradserver.worker.pacing.table import Decided, Table


class Rule(Protocol):
    """A rule by which a group decides.

    Attributes:
        member_ids: the members that were decided for, by rank.
    """

    member_ids: tuple[int, ...]

    @property
    def terms(self) -> str:
        """The rule's options, which are the same at all members."""

    def speed(self, member_id: int) -> float:
        """Return the units of work of a member in a second; 0 if that is not known."""

    def write(self, table: Table) -> None:
        """Fill in what was decided."""

    def advance(self, table: Table, member_ids: Sequence[int], newcomers: Collection[int] = ()) -> bool:
        """Decide for the members of the next round, by rank. Return true if the decision is new.

        Args:
            table: the table that all have. A table of zeros says nothing.
            member_ids: ids of the members of the next round, by rank.
            newcomers: those of them for which this round was the first one.
        """


class CadenceRule:
    """Number of batches of each member until the next exchange.

    Attributes:
        member_ids: the members that were decided for, by rank.
        counts: batches of each of them.
    """

    def __init__(self, options: CadenceOptions, member_ids: Sequence[int]) -> None:
        self._options = options
        self.member_ids = tuple(member_ids)
        self._anchor, self._calibrated = float(options.anchor), False
        self._milliseconds = dict.fromkeys(member_ids, 0.0)
        self._counts: tuple[int, ...] = (1,) * len(self.member_ids)
        """Counts before they are clamped to the largest total."""
        if len(self.member_ids) > 1:
            self._counts = options.cadence(len(self.member_ids)).counts
        self.counts = options.clamped(self._counts)

    @property
    def terms(self) -> str:
        """The rule's options."""
        return repr(self._options)

    def count(self, member_id: int) -> int:
        """Return the batches of a member; of an unknown one, the anchor."""
        if member_id in self.member_ids:
            return self.counts[self.member_ids.index(member_id)]
        return int(self._anchor)

    def speed(self, member_id: int) -> float:
        """Return the batches per second of a member; 0 if that is not known."""
        milliseconds = self._milliseconds.get(member_id, 0.0)
        return 1e3 / milliseconds if milliseconds else 0.0

    def nudge(self, factor: float) -> None:
        """Make exchanges more frequent. See `gradserver.Cadence.nudge`."""
        if len(self.member_ids) > 1:
            cadence = self._cadence_of(self.member_ids, ())
            cadence.nudge(factor)
            self._take(cadence, self.member_ids)

    def write(self, table: Table) -> None:
        """Fill in what was decided."""
        table.head[:] = self._anchor, self._calibrated
        for member_id, count in zip(self.member_ids, self._counts, strict=True):
            table.decide(member_id, Decided(self._milliseconds[member_id], count))

    def advance(self, table: Table, member_ids: Sequence[int], newcomers: Collection[int] = ()) -> bool:
        """Decide for the members of the next round. See `Rule.advance`."""
        before, present = (self.member_ids, self.counts), tuple(member_ids)
        self._adopt(table)
        if len(present) < 2:  # nothing to wait for, and no exchange to save; what is known is kept for the next member
            self._milliseconds = {one: self._milliseconds.get(one, 0.0) for one in present}
            self.member_ids, self._counts = present, (1,) * len(present)
            self.counts = self._counts
            return before != (self.member_ids, self.counts)
        cadence, measured = self._cadence_of(present, newcomers), [table.measured(one) for one in present]
        cadence.record(
            [one.milliseconds for one in measured],
            table.sync_milliseconds(present),
            [int(one.batches) for one in measured],
        )
        self._take(cadence, present)
        return before != (self.member_ids, self.counts)

    def _take(self, cadence: Cadence, present: tuple[int, ...]) -> None:
        """Take over what ``cadence`` has decided for the members ``present``."""
        self._anchor, self._calibrated = float(cadence.anchor), cadence.calibrated
        self._milliseconds = dict(zip(present, cadence.milliseconds, strict=True))
        self.member_ids, self._counts = present, cadence.counts
        self.counts = self._options.clamped(self._counts)

    def _adopt(self, table: Table) -> None:
        """Go by what the others know, if any of them did."""
        known = tuple(table.known())
        if not known:
            return
        anchor, calibrated = table.head.tolist()
        self._anchor, self._calibrated = anchor, bool(calibrated)
        decided = {one: table.decided(one) for one in known}
        self._milliseconds = {one: decided[one].speed for one in known}
        self.member_ids, self._counts = known, tuple(int(decided[one].share) for one in known)

    def _cadence_of(self, present: tuple[int, ...], newcomers: Collection[int]) -> Cadence:
        """Return the cadence of ``present``, with what is known of those that were there before."""
        was_alone = len(self.member_ids) < 2  # its count of 1 is no part of a cadence
        before = self._options.cadence(max(len(self.member_ids), 2), hinted=False)
        before.anchor, before.calibrated = int(self._anchor), self._calibrated and not was_alone
        before.counts = (before.anchor,) * 2 if was_alone else self._counts
        for place, one in enumerate(self.member_ids):
            before.milliseconds[place] = self._milliseconds.get(one, 0.0)
        known = [one for one in self.member_ids if one not in newcomers]
        return before.resized([self.member_ids.index(one) if one in known else None for one in present])


class BalanceRule:
    """Share of each member in a batch.

    Attributes:
        member_ids: the members that were decided for, by rank.
        ratios: share of each of them; together 1.
    """

    def __init__(
        self,
        member_ids: Sequence[int],
        calibration_steps: int,
        rebalance_interval: int,
        speed_hint: tuple[int, float] | None,
    ) -> None:
        self._options = calibration_steps, rebalance_interval, speed_hint
        self.member_ids = tuple(member_ids)
        self._tracker = self._new_tracker(len(self.member_ids), speed_hint)

    @property
    def terms(self) -> str:
        """The rule's options."""
        calibration, interval, hint = self._options
        return f"calibration_steps={calibration}, rebalance_interval={interval}, speed_hint={hint}"

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of each member, by rank."""
        return self._tracker.ratios

    def speed(self, member_id: int) -> float:
        """Return the samples per second of a member; 0 if that is not known."""
        if member_id not in self.member_ids:
            return 0.0
        return 1e3 * self._tracker.throughputs[self.member_ids.index(member_id)]

    def _new_tracker(self, world: int, hint: tuple[int, float] | None = None) -> ThroughputTracker:
        calibration, interval, _ = self._options
        return ThroughputTracker(world, calibration_steps=calibration, rebalance_interval=interval, speed_hint=hint)

    def write(self, table: Table) -> None:
        """Fill in what was decided."""
        table.head[0] = self._tracker.steps
        rows = zip(self.member_ids, self._tracker.throughputs, self._tracker.ratios, strict=True)
        for member_id, throughput, ratio in rows:
            table.decide(member_id, Decided(throughput, ratio))

    def advance(self, table: Table, member_ids: Sequence[int], newcomers: Collection[int] = ()) -> bool:
        """Decide for the members of the next round. See `Rule.advance`."""
        before = self.member_ids, self.ratios
        self._adopt(table)
        present = tuple(member_ids)
        if present != self.member_ids or newcomers:
            known = [one for one in self.member_ids if one not in newcomers]
            kept = [self.member_ids.index(one) if one in known else None for one in present]
            self._tracker, self.member_ids = self._tracker.resized(kept), present
        measured = [table.measured(one) for one in present]
        self._tracker.record([int(one.samples) for one in measured], [one.milliseconds for one in measured])
        return before != (self.member_ids, self.ratios)

    def _adopt(self, table: Table) -> None:
        """Go by what the others know, if any of them did."""
        known = tuple(table.known())
        if not known:
            return
        decided = [table.decided(one) for one in known]
        self.member_ids, self._tracker = known, self._new_tracker(len(known))
        self._tracker.steps = int(table.head[0])
        self._tracker.throughputs = [one.speed for one in decided]
        self._tracker.ratios = tuple(one.share for one in decided)
