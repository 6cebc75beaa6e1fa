"""Ways of messages that are slow for a while: a link, a connection, a worker's threads, or reductions.

Where each step is equally probable no message is on its way for long while others pass it. Here some are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from gradserver.engine.commands import Reduce
from tests.fibers import Fiber

_STEPS = (10, 30, 60, 120)
"""Steps after which other ways are slow."""
_PASSES = 0.01
"""Probability of a step on a slow way, where there are others."""
_LINKS = {"pass_up", "pass_down"}
"""Steps on the links between a coordinator and its data shards."""
Step = Callable[[], object]
Way = tuple[str, object]


class SlowWays:
    """Ways that are slow in one run.

    Args:
        seed: decides which are.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._slow: set[Way] = set()
        self._until = 0

    def of(self, steps: Sequence[Step], now: int) -> Sequence[Step]:
        """Return those of the possible ``steps`` that are not slow at step number ``now``."""
        ways = [_way_of(step) for step in steps]
        if now >= self._until and ways:
            self._choose(ways, now)
        if self._random.random() < _PASSES:
            return steps
        return [step for step, way in zip(steps, ways, strict=True) if way not in self._slow] or steps

    def _choose(self, ways: list[Way], now: int) -> None:
        """Have some of these be slow, most often links."""
        self._until = now + self._random.choice(_STEPS)
        links = [way for way in ways if way[0] in _LINKS]
        among = links if links and self._random.random() < 0.6 else ways
        self._slow = {self._random.choice(among) for _ in range(self._random.choice((0, 1, 1, 2)))}


def _way_of(step: Step) -> Way:
    """Return the kind of a step, and its process or connection."""
    if not isinstance(step, partial):
        return step.__name__, None
    what = step.args[0]
    owner = what.owner if isinstance(what, Fiber) else what
    return step.func.__name__, None if isinstance(what, Reduce) else owner
