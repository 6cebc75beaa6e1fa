"""Interval between two averagings of parameters, and a guard that keeps it from growing while training diverges.

    overhead          smallest part of its time, over all workers, that a worker has waited for averagings
    overhead > target      every = ⌈every · overhead / target⌉, from the first interval to the longest
    … and the guard holds  every stays
    overhead < target / 2  every - 1, not below the first interval

The rule is that of the anchor of `gradserver.protocol.cadence`. The guard is flodl's: it looks at the relative changes
of the parameters by the last averagings. Replicas that drift apart between two averagings change more in each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from gradserver.protocol.cadence import OVERHEAD_TARGET
from gradserver.protocol.errors import InvalidArgumentError

WINDOW: Final = 5
"""Changes that the guard looks at: the last ones."""
RISING: Final = 3
"""Changes that rise one after the other, at the end, for the guard to hold."""
THRESHOLD: Final = 0.05
"""Relative change above which the last one must be."""


class ConvergenceGuard:
    """A guard that holds while parameters change more and more from one averaging to the next.

    It holds if the last three of the last five relative changes rise, and the last one is above 0.05.

    For example:

        guard = gradserver.ConvergenceGuard()
        for change in (0.02, 0.04, 0.08):
            guard.record(change)
        guard.holds                             # True

    Attributes:
        changes: the last relative changes, the oldest first.
    """

    def __init__(self, changes: Iterable[float] = ()) -> None:
        self.changes: deque[float] = deque(changes, WINDOW)

    def record(self, change: float) -> None:
        """Record the relative change of the parameters by an averaging: the norm of the change by their own.

        Raises:
            InvalidArgumentError: ``change`` is negative or not a number.
        """
        if math.isnan(change) or change < 0:
            raise InvalidArgumentError(f"a relative change of parameters must be at least 0, not {change!r}")
        self.changes.append(change)

    @property
    def holds(self) -> bool:
        """True if the interval must not grow."""
        last = list(self.changes)[-RISING:]
        rising = all(one < other for one, other in pairwise(last))
        return len(last) == RISING and rising and last[-1] > THRESHOLD


def next_interval(every: int, overhead: float, first: int, longest: int, guard: ConvergenceGuard) -> int:
    """Return the steps between two averagings, from now on.

    Args:
        every: steps so far.
        overhead: part of the time that a worker waits for averagings: the smallest of all workers.
        first: the first interval, which is the shortest.
        longest: the longest interval.
        guard: guard that keeps the interval from growing.
    """
    if overhead > OVERHEAD_TARGET:
        return every if guard.holds else min(max(math.ceil(every * overhead / OVERHEAD_TARGET), first), longest)
    return every - 1 if overhead < OVERHEAD_TARGET / 2 and every > first else every
