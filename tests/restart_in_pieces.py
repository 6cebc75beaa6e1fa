"""The training of `tests.restart_training`, of which each bucket fills while it is exchanged, as a device's does.

What is not there yet is NaN: if it were sent, the group would halt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradserver.protocol.limits import MIB
from gradserver.worker.client import Worker
from gradserver.worker.member.progress import Progress
from tests.restart_training import Floats, run, train

STEP = MIB // 2


def train_in_pieces(
    worker: Worker, rounds: int, after: Callable[[int], None], pushing: Callable[[int, bool], None]
) -> int:
    """Train with buckets that fill by half a slice, in turn."""
    push, finish_round = worker.push, worker.finish_round
    filling: list[tuple[Progress, Floats, Floats, int]] = []

    def begin(part: int, data: Any, *, weight: float) -> Any:
        there = data.copy()
        data[:] = np.nan
        progress = Progress(lambda *_: None)
        filling.append((progress, data, there, 0))
        return push(part, data, weight=weight, progress=progress)

    def fill_and_finish() -> None:
        while filling:
            progress, data, there, done = filling.pop(0)
            until = min(done + STEP // 4, data.size)
            data[done:until] = there[done:until]
            worker.advance(progress, until * 4)
            if until < data.size:
                filling.append((progress, data, there, until))
        finish_round()

    worker.push, worker.finish_round = begin, fill_and_finish  # type: ignore[assignment]
    return train(worker, rounds, after, pushing)


if __name__ == "__main__":
    run(train_in_pieces)
