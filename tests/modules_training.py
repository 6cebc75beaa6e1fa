"""The training of `tests.restart_training`, with two modules of one shape and a small one, which take turns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradserver.protocol.digest import digest
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from tests.restart_training import Floats, gradient, run

MODULES: tuple[tuple[int, ...], ...] = ((20_000, 300_000), (20_000, 300_000), (10,))
"""Elements of the buckets of each."""
TURNS = (0, 1, 0, 2, 1)


def train(
    worker: Worker,
    rounds: int,
    after: Callable[[int], None] = lambda _: None,
    pushing: Callable[[int, bool], None] = lambda *_: None,
) -> int:
    """Train for so many rounds. Return the weights of all modules."""
    agreements = [
        worker.agree_beside(simple_plan([(f"b{part}", size) for part, size in enumerate(sizes)], FLOAT32))
        for sizes in MODULES
    ]
    weights: list[list[Floats]] = [[np.ones(size, np.float32) for size in sizes] for sizes in MODULES]
    gradients = [[worker.empty((size,), np.float32) for size in sizes] for sizes in MODULES]
    for number in range(rounds):
        module = TURNS[number % len(TURNS)]
        pushing(number, False)
        for part, mine in enumerate(weights[module]):
            gradients[module][part][:] = gradient(mine, f"w{worker.rank}", number, part)
            worker.push(agreements[module].first + part, gradients[module][part], weight=1.0 + worker.rank)
        pushing(number, True)
        worker.finish_round()
        for mine, mean in zip(weights[module], gradients[module], strict=True):
            mine -= np.float32(0.05) * mean
        if number % 3 == 2:
            total = np.full(20_000 if number % 2 else 10, number, np.int64)
            assert (worker.all_reduce(total, op="sum") == number * worker.world_size).all()
        after(number)
    return digest(np.concatenate([mine for each in weights for mine in each]).view(np.uint8), 0)


if __name__ == "__main__":
    run(train)
