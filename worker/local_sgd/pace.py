"""Unequal workers of local SGD: a fast one makes more steps between two exchanges, so that all are ready together.

    one take                  the next one              the measured time: from one take to the next, but waiting
       │  steps, and a sending │  steps, and a sending   the table of times: with the last fragment of an interval
       └────── measured ───────┴────── measured ─────    the decision: when that is taken, from the table of all

The rule is that of a cadence with a fixed anchor (`gradserver.protocol.cadence`): the slowest worker makes as many
steps as the interval has, and each other one as many as it can meanwhile, within a limit. A mean is weighed by steps,
or by samples. So each of them counts as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradserver.protocol.balance import rounded
from gradserver.protocol.cadence import CadenceOptions
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.plan import Bucket
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.pacing import CadencePace, Pacing

MOST_TIMES = 4.0
"""The most times an interval's steps that a worker makes, unless `LocalSGD` is told another limit."""


class LocalPace:
    """The steps of one worker between two exchanges, by the measured times of all.

    Args:
        worker: the worker.
        every: steps of the slowest worker, to begin with.
        most: the most times as many steps of another one.

    Attributes:
        spec: the plan's row for the table of times.
    """

    def __init__(self, worker: Worker, every: int, most: float) -> None:
        self._anchor, self._most = every, most
        self._pace = CadencePace(worker, CadenceOptions(anchor=every, max_anchor=every))
        self._pacing = Pacing(worker, self._pace)
        self.spec: Bucket = self._pacing.spec
        self.memory = torch.empty(0)
        self._is_begun = False
        """True from the end of the first step on: what is before it is no computation."""
        self._steps, self._weight = 0, 0.0
        """Steps since the last take, and the sum of their weights."""

    def measure(self, device: torch.device, waiting: Callable[[], float]) -> None:
        """Measure steps on ``device``; ``waiting`` returns the seconds spent in exchanges so far."""
        self._pacing.measure(device, waiting)

    def step(self, weight: float) -> None:
        """Count a step. The first one is not measured."""
        if self._is_begun:
            self._steps, self._weight = self._steps + 1, self._weight + weight
        else:
            self._pacing.begin()
        self._is_begun = True

    def computed(self) -> None:
        """Note that the steps so far are done, and the result of an exchange is waited for."""
        self._pacing.open(self._steps, self._weight)
        self._pacing.computed()
        self._steps, self._weight = 0, 0.0

    def fill(self) -> Tensor:
        """Return the table of times with this worker's row."""
        self._pacing.fill(self.memory)
        return self.memory

    def began(self) -> None:
        """Note that steps go on behind an exchange without a table."""
        self._pacing.resumed()

    def arrived(self, anybody: bool) -> None:
        """Take the table of all."""
        self._pacing.arrived(self.memory, anybody)
        self._pacing.begin()

    def steps_of(self, every: int) -> int:
        """Return this worker's steps in an interval in which the slowest worker makes ``every``."""
        if len(self._pace.rule.member_ids) < 2:
            return every
        times = min(self._pace.count / self._anchor, self._most)
        return max(rounded(every * times), every)


def most_times(balance: float | bool) -> float | None:
    """Return the limit that ``balance=`` gives; None for equal steps. InvalidArgumentError if it is none."""
    if isinstance(balance, bool):
        return MOST_TIMES if balance else None
    if not isinstance(balance, (int, float)) or not 1 <= balance < math.inf:
        raise InvalidArgumentError(
            f"balance is True, or the most times `every` that a worker may step, at least 1: not {balance!r}"
        )
    return float(balance)
