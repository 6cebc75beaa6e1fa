"""Shares of a batch for unequal workers: each gets as much as it can compute while the others compute theirs.

    throughputs ──► shard_ratios ──► shard_sizes
        ▲            each ≥ 5 %       whole samples, each ≥ 1, together the batch
        └─ ThroughputTracker: samples per millisecond of each rank, smoothed; new ratios when they are due

The rules are those of flodl's `Ddp`: calibrate for 10 steps, then rebalance each 50. The same measurements give the
same shares everywhere, so members that know all measurements need not agree on shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gradserver.protocol.errors import InvalidArgumentError, InvalidRankError, InvalidWorldSizeError
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.whole import whole_number

CALIBRATION_STEPS: Final = 10
"""Steps before the first new ratios."""
REBALANCE_INTERVAL: Final = 50
"""Steps between new ratios after that."""
LEAST_RATIO: Final = 0.05
"""The least share of a batch that a worker gets."""
_ALPHA: Final = 0.3
"""Weight of the newest measurement in the average."""
_ABOVE: Final = 1e-9
"""Excess over the least ratio from which a share can give something up."""


def shard_ratios(throughputs: Sequence[float]) -> tuple[float, ...]:
    """Return each rank's share of a batch: its throughput over the sum, and at least 5 %.

    What the slowest get more than their throughput allows, the others give up in proportion to their shares.

    Args:
        throughputs: work per time of each rank, in any unit; 0 where it is not known yet.

    Returns:
        Ratios that add up to 1. All are equal if nothing is known of any rank.

    Raises:
        InvalidWorldSizeError: there is no rank.
        InvalidArgumentError: a throughput is negative or not finite.
    """
    world = _world_size(len(throughputs))
    for rank, throughput in enumerate(throughputs):
        if not (math.isfinite(throughput) and throughput >= 0):
            raise InvalidArgumentError(
                f"a throughput is at least 0 and finite, and rank {rank} has {throughput!r}: give samples per time"
            )
    largest = max(throughputs)
    if largest <= 0:
        return (1.0 / world,) * world
    scaled = [throughput / largest for throughput in throughputs]  # their sum cannot overflow
    total = math.fsum(scaled)
    return _at_least(LEAST_RATIO, [throughput / total for throughput in scaled])


def _at_least(least: float, ratios: Sequence[float]) -> tuple[float, ...]:
    """Raise ratios to ``least``, at the cost of those above it."""
    deficit = math.fsum(least - ratio for ratio in ratios if ratio < least)
    raised = [max(ratio, least) for ratio in ratios]
    above = math.fsum(ratio for ratio in raised if ratio > least + _ABOVE)
    if deficit > 0 and above > least * len(raised):
        raised = [
            max(ratio - deficit * (ratio / above), least) if ratio > least + _ABOVE else ratio for ratio in raised
        ]
    total = math.fsum(raised)
    return tuple(ratio / total for ratio in raised)


def hinted_ratios(world_size: int, slow_rank: int, ratio: float) -> tuple[float, ...]:
    """Return shares for a first guess: ``slow_rank`` computes 1 sample while each other rank computes ``ratio``.

    Raises:
        InvalidWorldSizeError: ``world_size`` is below 1.
        InvalidRankError: there is no such rank.
        InvalidArgumentError: ``ratio`` is below 1 or not finite.
    """
    world = _world_size(world_size)
    slow, times = checked_hint(world, (slow_rank, ratio))
    each = 1.0 / (1.0 / times + (world - 1))
    return tuple(each / times if rank == slow else each for rank in range(world))


def checked_hint(world_size: int, hint: object) -> tuple[int, float]:
    """Return a speed hint, the slow rank and how many times as fast the others are.

    Raises:
        InvalidRankError: there is no such rank.
        InvalidArgumentError: it is something else, or the ratio is below 1 or not finite.
    """
    if not isinstance(hint, tuple | list) or len(hint) != 2:
        raise InvalidArgumentError(
            f"speed_hint is (slow_rank, ratio), as (1, 3.0) if the others are 3 times as fast as rank 1, not {hint!r}"
        )
    slow, ratio = whole_number(hint[0], "the slow rank of speed_hint", -MAX_WORLD_SIZE), hint[1]
    if not 0 <= slow < world_size:
        raise InvalidRankError(f"speed_hint names rank {slow} as the slow one, and the ranks are 0 to {world_size - 1}")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 <= ratio < math.inf:
        raise InvalidArgumentError(
            f"the ratio of a speed_hint is how many times as fast the others are, at least 1, not {ratio!r}"
        )
    return slow, float(ratio)


def shard_sizes(ratios: Sequence[float], batch_size: int) -> tuple[int, ...]:
    """Cut a batch into whole samples for each rank, by ``ratios``. Each rank gets at least one.

    Sizes are rounded half away from zero, in the order of ranks. The last rank gets what is left.

    Args:
        ratios: share of each rank; they add up to 1.
        batch_size: number of samples in the batch, at least one for each rank.

    Raises:
        InvalidWorldSizeError: there is no rank.
        InvalidArgumentError: the batch has fewer samples than there are ranks, or a ratio is not from 0 to 1.
    """
    world = _world_size(len(ratios))
    if whole_number(batch_size, "batch_size") < world:
        raise InvalidArgumentError(
            f"a batch of {batch_size} samples is too small for {world} workers, which need at least one each: "
            f"use a batch of {world} or more, or fewer workers"
        )
    for rank, ratio in enumerate(ratios):
        if not 0 <= ratio <= 1:
            raise InvalidArgumentError(f"a ratio is a share of the batch, from 0 to 1, and rank {rank} has {ratio!r}")
    sizes: list[int] = []
    left = batch_size
    for rank, ratio in enumerate(ratios[:-1]):
        sizes.append(min(max(rounded(batch_size * ratio), 1), left - (world - rank - 1)))
        left -= sizes[-1]
    return (*sizes, left)


def rounded(value: float) -> int:
    """Return the whole number nearest to ``value``, which is not negative; the upper one if two are as near."""
    whole = math.floor(value)
    return whole + (value - whole >= 0.5)


class ThroughputTracker:
    """Measured speed of each rank, and the shares of a batch that follow from it.

    For example:

        tracker = gradserver.ThroughputTracker(world_size=2)
        sizes = tracker.sizes(batch_size=64)
        ...                                             # a step, in which each rank computes its shard
        tracker.record(sizes, milliseconds=[21.0, 60.0])

    Args:
        world_size: number of ranks.
        calibration_steps: steps before the first new ratios.
        rebalance_interval: steps between new ratios after that.
        speed_hint: ``(slow_rank, ratio)`` for shares before the first measurement: see `hinted_ratios`. None for
            equal ones.

    Attributes:
        ratios: present share of each rank. They add up to 1.
        throughputs: samples per millisecond of each rank, an exponential average; 0 where nothing was measured.
        steps: number of steps recorded.

    Raises:
        InvalidWorldSizeError: ``world_size`` is below 1.
        InvalidRankError: ``speed_hint`` names no rank.
        InvalidArgumentError: another argument is not possible.
    """

    def __init__(
        self,
        world_size: int,
        *,
        calibration_steps: int = CALIBRATION_STEPS,
        rebalance_interval: int = REBALANCE_INTERVAL,
        speed_hint: tuple[int, float] | None = None,
    ) -> None:
        world = _world_size(world_size)
        self._calibration_steps = whole_number(calibration_steps, "calibration_steps", 1)
        self._rebalance_interval = whole_number(rebalance_interval, "rebalance_interval", 1)
        self.steps = 0
        self.throughputs = [0.0] * world
        hint = None if speed_hint is None else checked_hint(world, speed_hint)
        self.ratios = (1.0 / world,) * world if hint is None else hinted_ratios(world, *hint)

    @property
    def is_balanced(self) -> bool:
        """True if all shares are equal."""
        return all(abs(ratio - self.ratios[0]) < 1e-6 for ratio in self.ratios)

    def resized(self, kept: Sequence[int | None]) -> ThroughputTracker:
        """Return a tracker for other ranks: ``kept`` has for each the rank that it was here, or None for a new one.

        What is known of the others holds, and their ratios follow at once. A new rank counts as an average one until
        it is measured, for which calibration begins again.

        Raises:
            InvalidWorldSizeError: there is no rank.
        """
        other = ThroughputTracker(
            len(kept), calibration_steps=self._calibration_steps, rebalance_interval=self._rebalance_interval
        )
        other.throughputs = [0.0 if rank is None else self.throughputs[rank] for rank in kept]
        if None not in kept:
            other.steps = self.steps
        known = [throughput for throughput in other.throughputs if throughput]
        average = math.fsum(known) / max(len(known), 1)
        if known:
            other.ratios = shard_ratios([throughput or average for throughput in other.throughputs])
        return other

    def sizes(self, batch_size: int) -> tuple[int, ...]:
        """Return each rank's number of samples of a batch: see `shard_sizes`."""
        return shard_sizes(self.ratios, batch_size)

    def record(self, samples: Sequence[int], milliseconds: Sequence[float]) -> bool:
        """Note what each rank has computed in a step, and how long it took. Return true if the ratios are new.

        A rank without a sample, or without a time, keeps its average.

        Raises:
            InvalidArgumentError: there is not one number for each rank, or one is negative or not finite.
        """
        world = len(self.throughputs)
        for name, values in (("samples", samples), ("milliseconds", milliseconds)):
            if len(values) != world:
                raise InvalidArgumentError(f"{name} has one number for each of the {world} ranks, not {len(values)}")
            for rank, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise InvalidArgumentError(f"{name} of rank {rank} must be at least 0 and finite, not {value!r}")
        self.steps += 1
        for rank, (count, time) in enumerate(zip(samples, milliseconds, strict=True)):
            if count > 0 and time > 0:
                now, before = count / time, self.throughputs[rank]
                self.throughputs[rank] = now if before == 0 else _ALPHA * now + (1 - _ALPHA) * before
        since = self.steps - self._calibration_steps
        if since < 0 or since % self._rebalance_interval or not any(self.throughputs):
            return False
        self.ratios = shard_ratios(self.throughputs)
        return True


def _world_size(world_size: int) -> int:
    return whole_number(world_size, "the world size", 1, InvalidWorldSizeError)
