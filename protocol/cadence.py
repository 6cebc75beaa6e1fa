"""Cadence: fast workers compute more batches between two exchanges, so that all are ready at the same time.

The slowest rank computes ``anchor`` batches between two exchanges, and each other rank as many as it can meanwhile. If
exchanges take too large a part of the time, the anchor grows; if they take little, it shrinks again. The rules are
those of flodl's ElChe:

    each exchange     ms of a rank      moves towards wall time / batches, faster the farther it is off
                      overhead          time of the exchange / longest wall time
                      overhead > target      anchor = ⌈anchor · overhead / target⌉, from the first one to the most
                      overhead < target / 2  anchor - 1, not below the first one
                      counts            anchor for the slowest; for others anchor · slowest ms / their ms, rounded
    calibrated        others' counts change only by more than 10 %, and by at most ``max_batch_diff``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gradserver.protocol.balance import checked_hint, rounded
from gradserver.protocol.errors import InvalidArgumentError, InvalidWorldSizeError
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.whole import whole_number

FIRST_ANCHOR: Final = 10
OVERHEAD_TARGET: Final = 0.10
MOST_ANCHOR: Final = 200
_LEAST_TARGET: Final = 0.01
_MOST_TARGET: Final = 0.50
_LEAST_ALPHA: Final = 0.1
_MOST_ALPHA: Final = 0.8
_DEAD_ZONE: Final = 0.10
"""Part of a count by which a new one must differ to take its place, once calibrated."""
_LEAST_FACTOR: Final = 0.1
_LEAST_MILLISECONDS: Final = 1e-6
"""Time of a batch below which it was not measured: a nanosecond."""


@dataclass(frozen=True)
class CadenceOptions:
    """Options of the cadence of a training, the same at all members of a group.

    For example:

        model = gradserver.DistributedDataParallel(network, worker, cadence=CadenceOptions(overhead_target=0.05))

    `Cadence` says what follows from them.

    Attributes:
        anchor: batches of the slowest rank between two exchanges, at first and at least.
        overhead_target: part of the time that exchanges may take. It is clamped to 0.01 … 0.50.
        max_anchor: the largest anchor. 0 turns the cadence off: an exchange for each batch.
        max_batch_diff: the most by which a rank's number of batches changes at once; None for no limit.
        max_total: the most batches of all ranks together between two exchanges; None for no limit. Counts above are
            scaled down in proportion, so that an update is of as many samples however unequal the ranks are.
        speed_hint: ``(slow_rank, ratio)`` for the first round: each other rank computes ``ratio`` times as many batches
            as ``slow_rank``.

    Raises:
        InvalidArgumentError: an option is not possible.
    """

    anchor: int = FIRST_ANCHOR
    overhead_target: float = OVERHEAD_TARGET
    max_anchor: int = MOST_ANCHOR
    max_batch_diff: int | None = None
    max_total: int | None = None
    speed_hint: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        if self.max_total is not None:
            whole_number(self.max_total, "max_total", 1)
        if self.is_on:
            self.cadence(2 if self.speed_hint is None else max(checked_hint(MAX_WORLD_SIZE, self.speed_hint)[0] + 1, 2))

    @property
    def is_on(self) -> bool:
        """True if there is a cadence at all."""
        return self.max_anchor != 0

    def clamped(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``counts`` within ``max_total``, but at least one batch for each rank."""
        return counts if self.max_total is None else clamped(counts, max(self.max_total, len(counts)))

    def cadence(self, world_size: int, hinted: bool = True) -> Cadence:
        """Return the cadence of ``world_size`` ranks; with the speed hint, unless not ``hinted``."""
        return Cadence(
            world_size,
            anchor=self.anchor,
            overhead_target=self.overhead_target,
            max_anchor=self.max_anchor,
            max_batch_diff=self.max_batch_diff,
            speed_hint=self.speed_hint if hinted else None,
        )


class Cadence:
    """Numbers of batches that each rank computes between two exchanges.

    For example, of two ranks the first is twice as fast:

        cadence = gradserver.Cadence(world_size=2, overhead_target=0.5)
        cadence.record([5_000, 10_000], sync_milliseconds=10)
        cadence.counts                                  # (20, 10)

    Args:
        world_size: number of ranks, at least 2.
        anchor: batches of the slowest rank between two exchanges, at first and at least.
        overhead_target: part of the time that exchanges may take. It is clamped to 0.01 … 0.50.
        max_anchor: the largest anchor.
        max_batch_diff: the most by which a count changes at once, when calibrated; None for no limit.
        speed_hint: ``(slow_rank, ratio)``: until times are known, each other rank computes ``ratio`` times as many
            batches as ``slow_rank``.

    Attributes:
        counts: batches of each rank until the next exchange.
        anchor: batches of the slowest rank.
        milliseconds: time of a batch of each rank, smoothed; 0 where nothing was measured.
        calibrated: true from the first record with times of all ranks.

    Raises:
        InvalidWorldSizeError: ``world_size`` is below 2.
        InvalidRankError: ``speed_hint`` names no rank.
        InvalidArgumentError: another argument is not possible.
    """

    def __init__(
        self,
        world_size: int,
        *,
        anchor: int = FIRST_ANCHOR,
        overhead_target: float = OVERHEAD_TARGET,
        max_anchor: int = MOST_ANCHOR,
        max_batch_diff: int | None = None,
        speed_hint: tuple[int, float] | None = None,
    ) -> None:
        if whole_number(world_size, "the world size", error=InvalidWorldSizeError) < 2:
            raise InvalidWorldSizeError(f"a cadence is for at least 2 ranks, not {world_size}: one waits for nothing")
        whole_number(anchor, "anchor", 1)
        if whole_number(max_anchor, "max_anchor") < anchor:
            raise InvalidArgumentError(f"max_anchor must be at least the anchor of {anchor}, not {max_anchor!r}")
        if not isinstance(overhead_target, int | float) or not math.isfinite(overhead_target):
            raise InvalidArgumentError(
                f"overhead_target must be a part of the time, such as 0.1, not {overhead_target!r}"
            )
        if max_batch_diff is not None:
            whole_number(max_batch_diff, "max_batch_diff")
        self._first, self._most, self._max_batch_diff = anchor, max_anchor, max_batch_diff
        self.overhead_target = min(max(overhead_target, _LEAST_TARGET), _MOST_TARGET)
        self.anchor = anchor
        self.milliseconds = [0.0] * world_size
        self.calibrated = False
        self.counts = (anchor,) * world_size
        if speed_hint is not None:
            slow, ratio = checked_hint(world_size, speed_hint)
            fast = max(1, rounded(anchor * ratio))
            self.counts = tuple(anchor if rank == slow else fast for rank in range(world_size))

    def record(
        self, wall_milliseconds: Sequence[float], sync_milliseconds: float, batches: Sequence[int] | None = None
    ) -> None:
        """Note the times since the last exchange, and choose the next counts.

        Args:
            wall_milliseconds: time in which each rank computed.
            sync_milliseconds: time of the exchange itself.
            batches: batches that each rank has computed; None for ``counts``. A rank without any keeps its time.

        Raises:
            InvalidArgumentError: there is not one number for each rank, or one is negative or not finite.
        """
        done = self.counts if batches is None else tuple(batches)
        self._check(wall_milliseconds, sync_milliseconds, done)
        for rank, (wall, count) in enumerate(zip(wall_milliseconds, done, strict=True)):
            if count > 0 and wall / count >= _LEAST_MILLISECONDS:
                self.milliseconds[rank] = _smoothed(self.milliseconds[rank], wall / count)
        longest = max(wall_milliseconds)
        if longest >= _LEAST_MILLISECONDS:
            self._move_anchor(sync_milliseconds / longest)
        self._choose()

    def resized(self, kept: Sequence[int | None]) -> Cadence:
        """Return a cadence for other ranks: ``kept`` has for each the rank that it was here, or None for a new one.

        The anchor, and what is known of the others, hold. A new rank begins with the anchor. Counts stay until it has a
        time, and are then chosen as in a first calibration.

        Raises:
            InvalidWorldSizeError: there are less than 2 ranks.
        """
        other = Cadence(
            len(kept),
            anchor=self._first,
            overhead_target=self.overhead_target,
            max_anchor=self._most,
            max_batch_diff=self._max_batch_diff,
        )
        other.anchor = self.anchor
        other.milliseconds = [0.0 if rank is None else self.milliseconds[rank] for rank in kept]
        other.counts = tuple(self.anchor if rank is None else self.counts[rank] for rank in kept)
        other.calibrated = self.calibrated and None not in kept
        return other

    def nudge(self, factor: float) -> None:
        """Make exchanges more frequent: the anchor times ``factor``, 0.1 to 1, rounded up. It never grows.

        Raises:
            InvalidArgumentError: ``factor`` is not a number.
        """
        if math.isnan(factor):
            raise InvalidArgumentError("the factor of a nudge must be a number from 0.1 to 1, not NaN")
        before = self.anchor
        self.anchor = max(1, math.ceil(before * min(max(factor, _LEAST_FACTOR), 1.0)))
        if self.calibrated:
            self._choose()
        else:
            self.counts = tuple(max(1, rounded(count * self.anchor / before)) for count in self.counts)

    def clamped_total(self, total: int) -> tuple[int, ...]:
        """Return ``counts`` for at most ``total`` batches of all ranks together, as at the end of an epoch.

        Counts above are scaled down, and rounded down, to at least 1 each. The first ranks get what rounding has left.

        Raises:
            InvalidArgumentError: ``total`` has less than one batch for each rank.
        """
        return clamped(self.counts, total)

    def _check(self, wall: Sequence[float], sync: float, batches: Sequence[int]) -> None:
        world = len(self.counts)
        for name, values in (("wall_milliseconds", wall), ("batches", batches)):
            if len(values) != world:
                raise InvalidArgumentError(f"{name} has one number for each of the {world} ranks, not {len(values)}")
            for rank, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise InvalidArgumentError(f"{name} of rank {rank} must be at least 0 and finite, not {value!r}")
        if not (math.isfinite(sync) and sync >= 0):
            raise InvalidArgumentError(f"sync_milliseconds must be at least 0 and finite, not {sync!r}")

    def _move_anchor(self, overhead: float) -> None:
        if overhead > self.overhead_target:
            wanted = math.ceil(min(self.anchor * overhead / self.overhead_target, self._most))
            self.anchor = min(max(wanted, self._first), self._most)
        elif overhead < self.overhead_target / 2 and self.anchor > self._first:
            self.anchor -= 1

    def _choose(self) -> None:
        """Choose the counts for the present anchor, as soon as each rank has a time."""
        if not all(self.milliseconds):
            return
        slowest = max(self.milliseconds)
        counts = []
        for before, one in zip(self.counts, self.milliseconds, strict=True):
            wanted = self.anchor if one == slowest else max(1, rounded(self.anchor * (slowest / one)))
            counts.append(self._damped(before, wanted) if self.calibrated and one != slowest else wanted)
        self.counts, self.calibrated = tuple(counts), True

    def _damped(self, before: int, wanted: int) -> int:
        """Return ``before`` if ``wanted`` is near to it, and else ``wanted`` as far as it may change at once."""
        if abs(wanted - before) <= _DEAD_ZONE * before:
            return before
        if self._max_batch_diff is None:
            return wanted
        return min(max(wanted, before - self._max_batch_diff), before + self._max_batch_diff)


def clamped(counts: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return ``counts``, scaled down to ``total`` if they are more. See `Cadence.clamped_total`."""
    world, now = len(counts), sum(counts)
    if total < world:
        raise InvalidArgumentError(f"{total} batches are less than one for each of the {world} ranks")
    if now <= total:
        return counts
    return _with_total([max(1, count * total // now) for count in counts], total)


def _smoothed(before: float, now: float) -> float:
    """Return the new average time of a batch. The first one counts as it is."""
    if before == 0:
        return now
    alpha = min(max(abs(now - before) / before, _LEAST_ALPHA), _MOST_ALPHA)
    return alpha * now + (1 - alpha) * before


def _with_total(counts: list[int], total: int) -> tuple[int, ...]:
    """Return counts that add up to ``total``: one more for the first ranks, or less for the largest counts."""
    for rank in range(max(total - sum(counts), 0)):
        counts[rank % len(counts)] += 1
    while sum(counts) > total:  # each rank has at least one, which may be more than its part
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)
