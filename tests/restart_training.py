"""A small training that survives a coordinator. Its weights depend on every bit of every result.

Run as ``restart_training.py URL RANK WORLD ROUNDS WIRE [ROUND]``. It prints each round when it is done, and at last its
weights. In ``ROUND`` the last rank pushes everything, prints so, and waits until it is told to go on. The others wait
before they push anything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import gradserver
from gradserver.protocol.digest import digest
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.norms import norm_of
from tests.worker_programs import say, told

Floats = npt.NDArray[np.float32]
Training = Callable[[Worker, int, Callable[[int], None], Callable[[int, bool], None]], int]

SIZES = (16_384, 262_144 + 1000, 100, 20_000)
"""Elements of each bucket: less than a slice, more than one, next to nothing."""


def gradient(weights: Floats, name: str, number: int, part: int) -> Floats:
    """Return a gradient that depends on the weights, and on nothing but these arguments."""
    generator = np.random.Generator(np.random.SFC64([sum(name.encode()), number, part]))
    noise = generator.standard_normal(min(weights.size, 4096), np.float32)
    return np.resize(noise, weights.size) + np.float32(0.1) * weights


def train(
    worker: Worker,
    rounds: int,
    after: Callable[[int], None] = lambda _: None,
    pushing: Callable[[int, bool], None] = lambda *_: None,
) -> int:
    """Train for so many rounds, each rank with a weight of its own. Return the weights of the model.

    Its steps depend on the norms that come with the means.

    ``after`` is called after each round, ``pushing`` before any of its pushes, and after all.
    """
    worker.agree(simple_plan([(f"b{part}", size) for part, size in enumerate(SIZES)], FLOAT32))
    weights: list[Floats] = [np.ones(size, np.float32) for size in SIZES]
    gradients = [worker.empty((size,), np.float32) for size in SIZES]
    name, weight = f"w{worker.rank}", 1.0 + worker.rank
    for number in range(rounds):
        pushing(number, False)
        handles: dict[int, Handle] = {}
        for part in range(len(SIZES)) if worker.rank % 2 else reversed(range(len(SIZES))):
            gradients[part][:] = gradient(weights[part], name, number, part)
            handles[part] = worker.push(part, gradients[part], weight=weight)
        pushing(number, True)
        worker.finish_round()
        norms = {part: norm_of(n for pair in handle.squares.values() for n in pair) for part, handle in handles.items()}
        for part, (mine, mean) in enumerate(zip(weights, gradients, strict=True)):
            assert np.isclose(norms[part], np.linalg.norm(mean.astype(np.float64)), rtol=1e-6)
            mine -= np.float32(0.05 + 1e-6 * norms[part]) * mean
        if number % 3 == 2:  # a collective now and then, which is cut into slices or not
            total = np.full(20_000 if number % 2 else 10, number, np.int64)
            assert (worker.all_reduce(total, op="sum") == number * worker.world_size).all()
        after(number)
    return digest(np.concatenate(weights).view(np.uint8), 0)


def main(url: str, rank: int, world: int, rounds: int, wire: str, held: int = -1, training: Training = train) -> None:
    def pushing(number: int, done: bool) -> None:
        if number == held and done == (rank == world - 1):
            say("held")
            told()

    with gradserver.connect(url, rank, world, name=f"w{rank}", timeout=60.0, wire=wire) as worker:
        weights = training(worker, rounds, lambda number: say(f"round {number} {time.monotonic()}"), pushing)
    say(f"weights {weights}")


def run(training: Training) -> None:
    """Run what the command line asks for."""
    numbers = [int(number) for number in (*sys.argv[2:5], *sys.argv[6:])]
    held = numbers[3] if len(numbers) > 3 else -1
    main(sys.argv[1], numbers[0], numbers[1], numbers[2], sys.argv[5], held, training)


if __name__ == "__main__":
    run(train)
