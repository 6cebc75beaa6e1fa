"""A worker of `test_long_run`, as ``long_run_program.py URL NAME``: small rounds, a great many of them.

A worker called ``w`` and a number has that rank. The one called `LEADER` runs as many rounds as it is told to, and
waits until it is told more. If there are no more, all end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import gradserver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from tests.worker_programs import say

LEADER = "w0"
SIZES = (20_000, 700, 1)
"""Sizes of the buckets. The last bucket says whether this round is the last."""
COLLECTIVES_EVERY = 5
"""Rounds. Their results are kept up to a credit's worth: that is to be reached within the first tenth of a run."""


def main(url: str, name: str) -> None:
    with gradserver.connect(url, int(name[1:]) if name[0] == "w" else None, name=name, timeout=60.0) as worker:
        weights = np.zeros(SIZES[1], np.float32)
        worker.agree(simple_plan([(f"b{index}", size) for index, size in enumerate(SIZES)], FLOAT32))
        worker.serve_state(lambda: {"weights": weights})

        def install(state: Any) -> None:
            weights[:] = state["weights"]

        if worker.joins:
            worker.enter(install)
        say(f"entered {worker.round}")
        train(worker, weights)
    say(f"ok {worker.round}")


def train(worker: gradserver.Worker, weights: np.ndarray[Any, Any]) -> None:
    buckets = [worker.empty(size, "float32") for size in SIZES]
    for last in lasts(worker):
        number = worker.round
        for index, bucket in enumerate(buckets):
            bucket.fill(last if bucket is buckets[-1] else 1 + number % 7)
            worker.push(index, bucket)
        worker.finish_round()
        assert buckets[0][0] == buckets[1][-1] == 1 + number % 7
        weights += buckets[1]
        if number % COLLECTIVES_EVERY == 0 and not worker.observes:
            most = worker.all_reduce(weights[[0, -1]], op="max")
            assert (most == weights[0]).all(), (number, most, weights[0])
        if buckets[-1][0]:
            return


def lasts(worker: gradserver.Worker) -> Iterator[bool]:
    """Yield, for each round, whether it is the last one."""
    while worker.name != LEADER:
        yield False
    for line in sys.stdin:
        for _ in range(int(line)):
            yield False
        say(f"round {worker.round}")
    yield True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
