"""Unequal workers that train one module: a cadence of its exchanges, or a balance of its batches.

In each round a further bucket brings the members' times to all of them (`gradserver.worker.pacing.table`). So the next
decision is known when the round is over, without another message, on any plane, and also at a worker that has joined.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from gradserver.protocol.balance import CALIBRATION_STEPS, REBALANCE_INTERVAL, shard_sizes
from gradserver.protocol.cadence import CadenceOptions
from gradserver.protocol.dtypes import BY_NAME
from gradserver.protocol.errors import ClosedError, InvalidArgumentError, UsageError
from gradserver.protocol.exchange import Op
from gradserver.protocol.messages import Membership, Paced
from gradserver.protocol.plan import Bucket, Component
from gradserver.worker.client import Worker
from gradserver.worker.data.balanced import BalancedSampler
from gradserver.worker.data.ranges import DataRanges
from gradserver.worker.member.learner import Stage
from gradserver.worker.pacing.shares import BalanceRule, CadenceRule, Rule
from gradserver.worker.pacing.stopwatch import Stopwatch, stopwatch
from gradserver.worker.pacing.table import Measured, Table, numel_of
from gradserver.worker.torch_ddp.buckets import Slot
from gradserver.worker.torch_ddp.stepping import watch_steps
from gradserver.worker.torch_ddp.wrapping import check_mode

PACE_KEY: Final = "pace"
_TELL_EVERY: Final = 32
"""Rounds after which the coordinator hears of a member's speed, though nothing was decided."""


@dataclass(frozen=True)
class Balance:
    """Options of a balance: ``DistributedDataParallel(…, balance=Balance(data, speed_hint=(1, 3.0)))``.

    Attributes:
        data: source of the batches, which is told how large they are to be.
        calibration_steps: steps before the first new sizes.
        rebalance_interval: steps between new sizes after that.
        speed_hint: ``(slow_rank, ratio)`` for sizes before the first measurement: each other rank computes ``ratio``
            samples while ``slow_rank`` computes one. None for equal ones.
    """

    data: BalancedSampler | DataRanges
    calibration_steps: int = CALIBRATION_STEPS
    rebalance_interval: int = REBALANCE_INTERVAL
    speed_hint: tuple[int, float] | None = None


class Pace(Protocol):
    """Consequences of a rule for one worker."""

    @property
    def rule(self) -> Rule:
        """The rule."""

    @property
    def count(self) -> int:
        """Batches of this worker until the next exchange."""

    @property
    def drawn(self) -> int:
        """Steps that the data has dealt."""

    def weight(self, batches: int, given: float) -> float:
        """Return the weight of this worker's mean over ``batches``, of which the sum of weights was ``given``."""

    def used(self, batches: int) -> None:
        """Note that so many batches were exchanged."""

    def apply(self, rank: int, step: int, jumps: bool) -> None:
        """Go by what was decided, from ``step`` on. A worker that has just joined ``jumps`` there."""

    def told(self, rank: int) -> Paced:
        """Return what the coordinator is to show of this worker."""


class CadencePace:
    """Pace by a cadence: several batches between two exchanges."""

    def __init__(self, worker: Worker, options: CadenceOptions) -> None:
        self._worker = worker
        self.rule = CadenceRule(options, worker._session.membership.member_ids)

    @property
    def count(self) -> int:
        """Batches of this worker until the next exchange."""
        membership = self._worker._session.membership
        return self.rule.count(membership.member_ids[membership.rank])

    @property
    def drawn(self) -> int:
        """Nothing: the data is dealt by others."""
        return 0

    def weight(self, batches: int, given: float) -> float:  # noqa: ARG002  (Pace's signature)
        """Return the sum of weights: the number of batches, unless `set_weight` has said something else."""
        return given

    def used(self, batches: int) -> None:
        """Note that so many batches were exchanged."""

    def apply(self, rank: int, step: int, jumps: bool) -> None:
        """Go by what was decided."""

    def told(self, rank: int) -> Paced:
        """Return what the coordinator is to show of this worker."""
        counts = self.rule.counts
        return Paced(self.rule.speed(self.rule.member_ids[rank]), "batches", counts[rank] / sum(counts), counts[rank])


class BalancePace:
    """Pace by a balance: batches of different sizes, and an exchange behind each."""

    count = 1

    def __init__(self, worker: Worker, options: Balance) -> None:
        self._data = options.data
        membership = worker._session.membership
        self.rule = BalanceRule(
            membership.member_ids, options.calibration_steps, options.rebalance_interval, options.speed_hint
        )
        if isinstance(self._data, DataRanges):
            self._each = self._data.batch_size
        self.apply(membership.rank, self.drawn, jumps=False)

    @property
    def drawn(self) -> int:
        """Steps that the data has dealt."""
        return self._data.drawn if isinstance(self._data, BalancedSampler) else 0

    def weight(self, batches: int, given: float) -> float:
        """Return the number of samples in these batches."""
        if isinstance(self._data, DataRanges):
            return self._data.unexchanged or given
        return self._data.samples(batches) or given

    def used(self, batches: int) -> None:
        """Note that so many batches were exchanged."""
        if isinstance(self._data, BalancedSampler):
            self._data.used(batches)

    def apply(self, rank: int, step: int, jumps: bool) -> None:
        """Deal by the present ratios, from ``step`` on."""
        ratios = self.rule.ratios
        if isinstance(self._data, BalancedSampler):
            self._data.deal(ratios, rank, step, jumps)
        else:
            self._data.batch_size = shard_sizes(ratios, self._each * len(ratios))[rank]

    def told(self, rank: int) -> Paced:
        """Return what the coordinator is to show of this worker."""
        return Paced(self.rule.speed(self.rule.member_ids[rank]), "samples", self.rule.ratios[rank], 1)


def pacing_of(
    worker: Worker, cadence: CadenceOptions | bool, balance: Balance | BalancedSampler | DataRanges | None
) -> Pacing | None:
    """Return the pacing that was asked for; None for equal workers. See `pace_of` for its errors."""
    pace = pace_of(worker, cadence, balance)
    if pace is not None:
        check_mode(worker, "cadence= or balance=")
    return None if pace is None else Pacing(worker, pace)


def pace_of(
    worker: Worker, cadence: CadenceOptions | bool, balance: Balance | BalancedSampler | DataRanges | None
) -> Pace | None:
    """Return the pace that was asked for; None for equal workers.

    Raises:
        UsageError: both were asked for.
        InvalidArgumentError: an argument is of another kind.
        InvalidRankError: a speed hint names no rank.
    """
    options = CadenceOptions() if cadence is True else cadence
    if options is not False and not isinstance(options, CadenceOptions):
        raise InvalidArgumentError(f"cadence is a gradserver.CadenceOptions or True, not {cadence!r}")
    is_on = options is not False and options.is_on
    if balance is None:
        return CadencePace(worker, options) if options is not False and is_on else None
    if is_on:
        raise UsageError("cadence= gives fast workers more batches, and balance= larger ones: choose one of them")
    if isinstance(balance, BalancedSampler | DataRanges):
        balance = Balance(balance)
    found = balance.data if isinstance(balance, Balance) else balance
    if not isinstance(balance, Balance) or not isinstance(found, BalancedSampler | DataRanges):
        raise InvalidArgumentError(
            f"balance is a gradserver.BalancedSampler or DataRanges, or a gradserver.Balance of one, not "
            f"{'a Balance of ' if found is not balance else ''}{type(found).__name__}"
        )
    return BalancePace(worker, balance)


class Pacing:
    """The pace of one worker, and the bucket that brings the times to all.

    Args:
        worker: the worker.
        pace: the pace.

    Attributes:
        spec: the plan's row for the bucket.
        weight: weight of this worker in the exchange that is open.
    """

    def __init__(self, worker: Worker, pace: Pace) -> None:
        self._worker, self._pace = worker, pace
        membership = worker._session.membership
        shape = (numel_of(membership.places or max(membership.member_ids) + 1),)
        self.spec = Bucket(
            PACE_KEY, BY_NAME["float64"], (Component(f"times and shares ({pace.rule.terms})", shape),), Op.MAX
        )
        self._watch: Stopwatch | None = None
        self._computes = False
        """True from a forward to the end of the backward that exchanges."""
        self._weights: list[float] = []
        """Weights of the batches that were accumulated since the last exchange."""
        self._versions: list[int] = []
        """Versions of the parameters when a cadence accumulated gradients; none if there are no such gradients."""
        self._batches, self.weight = 0, 1.0
        self._knows = not worker.joins
        """True if this worker knows what was decided: one that has joined hears it with its first result."""
        self._newcomers: set[int] = set()
        self._rounds = 0
        me = weakref.ref(self)

        def heard(news: Membership) -> None:
            if (self := me()) is not None:
                self._newcomers.update(news.entering)

        worker.on_membership(heard)

    def measure(
        self, device: torch.device, waiting: Callable[[], float], parameters: Iterable[nn.Parameter] = ()
    ) -> None:
        """Measure the computation on ``device``, and the optimizers' steps of ``parameters``.

        ``waiting`` returns the seconds spent in exchanges so far.
        """
        self._watch = stopwatch(device, waiting)
        watch_steps(self, parameters)

    def stepping(self) -> None:
        """Note that an optimizer begins a step. What is between that and a forward does not count."""
        if self._watch is not None and not self._computes:
            self._watch.begin()

    def stepped(self) -> None:
        """Note that it has ended the step."""
        if self._watch is not None and not self._computes:
            self._watch.pause()

    @property
    def is_cadence(self) -> bool:
        """True if there can be several batches between two exchanges."""
        return isinstance(self._pace, CadencePace)

    @property
    def counts(self) -> tuple[int, ...]:
        """Batches of each rank until the next exchange."""
        rule = self._pace.rule
        return rule.counts if isinstance(rule, CadenceRule) else (1,) * len(rule.member_ids)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Part of the work of each rank. Together they are 1."""
        rule = self._pace.rule
        return rule.ratios if isinstance(rule, BalanceRule) else tuple(one / sum(self.counts) for one in self.counts)

    def nudge(self, factor: float) -> None:
        """Make a cadence's exchanges more frequent: its anchor times ``factor``, 0.1 to 1.

        All workers call it between the same two exchanges, after the first of them.

        Raises:
            UsageError: this is no cadence.
        """
        if not isinstance(self._pace, CadencePace):
            raise UsageError("nudge is for a cadence: DistributedDataParallel(…, cadence=True)")
        self._pace.rule.nudge(factor)

    # ── batches ───────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Note that a forward begins, or a backward without one."""
        self._computes = True
        if self._watch is not None:
            self._watch.begin()

    def is_due(self, batches: int, modules: int) -> bool:
        """Return true if an exchange is due when so many batches are computed. UsageError with several ``modules``."""
        if modules > 1 and self.is_cadence:
            raise UsageError(f"cadence= is for a worker with one wrapped module, and this one has {modules}")
        return batches >= self._pace.count

    def accumulated(self, weight: float, slots: Sequence[Slot]) -> None:
        """Note a batch with gradients that were accumulated, and that weighs ``weight``."""
        self._weights.append(weight)
        if self.is_cadence:
            self._versions = [slot.parameter._version for slot in slots]

    def check_accumulated(self, slots: Sequence[Slot], thrown_away: bool) -> None:
        """Check that the loop has left weights and gradients alone since a cadence accumulated gradients.

        Gradients that were ``thrown_away`` are forgotten. UsageError if that was in between two exchanges.
        """
        versions, self._versions = self._versions, []
        if versions and (thrown_away or versions != [slot.parameter._version for slot in slots]):
            what = "gradients were cleared" if thrown_away else "weights were changed"
            raise UsageError(
                f"{what} between two exchanges of a cadence: step the optimizer and clear gradients only after a "
                f"backward that has exchanged them: if model.exchanged: optimizer.step(); optimizer.zero_grad()"
            )
        if thrown_away:
            self._weights.clear()

    def open(self, batches: int, weight: float) -> None:
        """Open an exchange of so many batches. The last of them weighs ``weight``, if it was not accumulated."""
        self._batches = batches
        given = sum(self._weights) + (weight if batches > len(self._weights) else 0.0)
        self.weight = self._pace.weight(batches, given)

    # ── the exchange ──────────────────────────────────────────────────────────────────────────────────

    def computed(self) -> None:
        """Note that this worker has computed its batches."""
        self._computes = False
        if self._watch is not None:
            self._watch.computed(self._batches, self.weight if self._batches else 0.0)

    def resumed(self) -> None:
        """Note that an exchange without the bucket is over, and the computation goes on."""
        self._computes = True
        if self._watch is not None:
            self._watch.arrived()
            self._watch.begin()

    def abandon(self) -> None:
        """Note that the batches of the open exchange were not computed: their time counts for nothing."""
        self._batches, self._computes = max(self._batches, 1), False
        if self._watch is not None:
            self._watch.cancel()

    def fill(self, memory: Tensor) -> None:
        """Fill in the bucket: what this worker has measured, and what it knows was decided."""
        table = Table(memory.numpy())
        table.clear()
        if self._knows:
            self._pace.rule.write(table)
        if self._watch is not None:
            milliseconds, batches, samples, sync = self._watch.read()
            measured = Measured(milliseconds, batches, samples, sync, self._pace.drawn)
            table.measure(self._worker._session.member.identity.member_id, measured)

    def arrived(self, memory: Tensor, anybody: bool) -> None:
        """Take the results: go by what follows from the times of all, if ``anybody`` took part."""
        if self._watch is not None:
            self._watch.arrived()
        self._pace.used(self._batches)
        self._weights.clear()
        self._versions.clear()
        self._batches = 0
        session = self._worker._session
        if session.stage is not Stage.MEMBER or not anybody:
            return
        table, membership = Table(memory.numpy()), session.membership
        is_new = self._pace.rule.advance(table, membership.member_ids, self._newcomers)
        self._newcomers.clear()
        if is_new or not self._knows:
            self._pace.apply(membership.rank, table.drawn(), jumps=not self._knows)
        self._knows = True
        if is_new or self._rounds % _TELL_EVERY == 0:
            with suppress(ClosedError, ConnectionError):  # the next push will report it
                session.tell(self._pace.told(membership.rank))
        self._rounds += 1
