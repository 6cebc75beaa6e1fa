"""The quicker way of rounds between hosts: over the coordinator, or from worker to worker. Both are tried.

What a link carries depends on what else is on it, and a coordinator's link must carry all workers. So nothing is
computed from rates: whole rounds are timed, of both ways, again and again.

    round                                 way
    ────────────────────────────────────  ───────────────────────────────────────────────────────────
    before the first trial                the coordinator's
    `TRIED` rounds from a trial on        the other one
    the next one: the vote                direct, as its commit has the times that all have measured
    between a vote and the next trial     the quicker one
    after a void round, until a trial     the coordinator's

Trials begin in rounds with numbers that a power of two divides: 8 at first, up to `_LONGEST`. So members that have not
heard of a membership in the same round meet in a later trial. All decide alike, as a vote has one result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor

from gradserver.protocol.messages import Welcome
from gradserver.protocol.offers import backend_of
from gradserver.protocol.planes import AUTO, DIRECT, GLOO

_UNCOUNTED: Final = 2
"""Rounds behind a change of the way that are not timed: connections are made, and grow quick."""
_COUNTED: Final = 4
TRIED: Final = _UNCOUNTED + _COUNTED
_FIRST: Final = 8
_LONGEST: Final = 512
"""Rounds between two trials, at first and at most."""
_GAIN: Final = 0.95
"""Part of the time over the coordinator that direct rounds may take to be chosen. The coordinator's way has one order
of sums, and sees gradients."""
_MOST_FAILURES: Final = 2
FIGURES: Final = 3
"""Elements of a vote: the seconds of a round of each way, and 1."""


def is_tried(here: Welcome) -> bool:
    """Tell whether rounds take the quicker way: of members on CPUs, none of which demands a plane."""
    is_demanded = here.demanded or any(offer.plane != AUTO for offer in here.offers)
    return here.plane == DIRECT and not is_demanded and backend_of(here.offers) == GLOO


class Trial:
    """The way of the rounds of one membership, as one member knows it.

    Args:
        number: the first round.
    """

    def __init__(self, number: int) -> None:
        self._is_direct = False
        self._seconds = {way: deque[float](maxlen=_COUNTED) for way in (False, True)}
        self.renew(number)

    def _schedule(self, number: int) -> None:
        """Choose the next trial. ``number`` is the next round."""
        self._last, self._alike = (-1, False, 0.0), 0
        self._begin = -(-(number + TRIED) // self._period) * self._period

    def renew(self, number: int) -> None:
        """Keep the way in a membership that lacks some of the last one's members, from the round ``number`` on."""
        self._is_barred = False
        self._period, self._failures = _FIRST, 0
        for measured in self._seconds.values():
            measured.clear()
        self._schedule(number)

    def goes_direct(self, number: int) -> bool:
        """Tell whether round ``number`` goes from worker to worker."""
        chosen, place = self._is_direct and not self._is_barred, number - self._begin
        if self._failures >= _MOST_FAILURES or not self._seconds[chosen]:
            return chosen  # the other way does not exist, or there is nothing to compare it with
        return not chosen if 0 <= place < TRIED else chosen or self.votes(number)

    @property
    def seconds(self) -> float:
        """Seconds of a round over the coordinator; 0 if none was timed."""
        return max(self._seconds[False], default=0.0)

    def votes(self, number: int) -> bool:
        """Tell whether the commit of round ``number`` has a vote."""
        return number == self._begin + TRIED

    def end(self, number: int, is_direct: bool) -> None:
        """Take the time of a round that has ended. That of several modules ends several times, and has no time."""
        now = time.perf_counter()
        last, way, since = self._last
        self._alike = self._alike + 1 if (last, way) == (number - 1, is_direct) else 0
        if self._alike >= _UNCOUNTED:
            self._seconds[is_direct].append(now - since)
        self._last = number, is_direct, now
        if number > self._begin + TRIED:
            self._schedule(number + 1)

    def fail(self, number: int) -> None:
        """Note that round ``number`` was void, though it was to be direct."""
        self._failures += not self._seconds[True]
        self._is_barred = True
        self._later(number)

    def tell(self, figures: Tensor) -> None:
        """Write what this member has measured into its vote."""
        if all(self._seconds.values()):
            figures.copy_(torch.tensor([*(median(self._seconds[way]) for way in (False, True)), 1.0]))

    def hear(self, number: int, figures: Sequence[float]) -> str:
        """Take the result of the vote in round ``number``. Return the choice in words; "" if it is as before."""
        through, direct, share = figures
        self._later(number)
        if share <= 0:
            return ""
        through, direct, before = through / share, direct / share, self._is_direct
        self._is_direct, self._is_barred = direct < (1.0 if before else _GAIN) * through, False
        if self._is_direct == before:
            return ""
        ways = f"from worker to worker: {direct:.3g} s a round", f"over the coordinator: {through:.3g} s a round"
        first, second = ways if self._is_direct else ways[::-1]
        return f"{first}; {second}"

    def _later(self, number: int) -> None:
        self._period = min(2 * self._period, _LONGEST)
        self._schedule(number + 1)
