"""The oracle's replica: the weights that members must have after each round, and the outer optimizer's momentum.

    gradients             w - 0.01·g
    local SGD, average    w - g
    local SGD, nesterov   v = 0.9·v + g, from v = g on;  w - 0.7·(g + 0.9·v)

Each operation rounds once, to float32. The mean g is that of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.tools.chaos import generator
from gradserver.tools.chaos.workload import Workload

Array = npt.NDArray[Any]

_RATE: Final = np.float32(0.7)
_MOMENTUM: Final = np.float32(0.9)


class Replica:
    """Weights and momentum, vector by vector.

    Attributes:
        rule: what a round does with the weights, for people.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._weights = [np.zeros(size, np.float32) for size in generator.SIZES]
        self._momentum: dict[int, Array] = {}
        """Momentum of each vector that was averaged."""
        self.rule = f"those before it and {workload.outer} of the mean" if workload.is_local else _OF_GRADIENTS

    def weights(self, vectors: Sequence[int]) -> Array:
        """Return the weights of some vectors, one behind the other."""
        return np.concatenate([self._weights[vector] for vector in vectors])

    def step(self, number: int, means: Sequence[Array]) -> None:
        """Update the weights by the means of round ``number``, one for each bucket."""
        for bucket, mean in zip(self._workload.buckets(number), means, strict=True):
            start = 0
            for vector in bucket.vectors:
                stop = start + generator.SIZES[vector]
                self._update(vector, mean[start:stop])
                start = stop

    def _update(self, vector: int, gradient: Array) -> None:
        weights = self._weights[vector]
        if not self._workload.is_local:
            weights -= gradient * generator.STEP
        elif self._workload.outer == "average":
            weights -= gradient
        else:
            momentum = self._momentum.get(vector)
            if momentum is None:
                momentum = self._momentum[vector] = gradient.copy()
            else:
                momentum *= _MOMENTUM
                momentum += gradient
            weights -= (momentum * _MOMENTUM + gradient) * _RATE

    def fingerprint(self) -> int:
        """Compute 64 bits of the weights, and of the momentum behind them."""
        return generator.fingerprint([*self._weights, *(self._momentum[vector] for vector in sorted(self._momentum))])


_OF_GRADIENTS: Final = "those before it minus 0.01 times the mean"
