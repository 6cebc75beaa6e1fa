"""What workers in processes of their own do. Run as ``worker_programs.py NAME URL RANK WORLD_SIZE ARGUMENTS``.

They say what they have reached on stdout, and where a test decides what is next they wait for a line on stdin.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gradserver import GradServerError, Worker, connect
from protocol.dtypes import FLOAT32
from protocol.plan import simple_plan


def say(what: str) -> None:
    print(what, flush=True)


def told() -> None:
    """Wait until the test says go on."""
    sys.stdin.readline()


def rounds(worker: Worker, count: int, buckets: int, numel: int, ready: bool = False) -> None:
    """Exchange ``count`` rounds, in which worker r contributes r + round; say ``ok`` if every result was right."""
    worker.agree(simple_plan([(f"b{index}", numel) for index in range(buckets)], FLOAT32))
    memory = [np.empty(numel, np.float32) for _ in range(buckets)]
    if ready:
        say("ready")
        told()
    for number in range(count):
        for index, data in enumerate(memory):
            data.fill(worker.rank + number + index)
            worker.push(index, data)
        worker.finish_round()
        mean = (worker.world_size - 1) / 2
        for index, data in enumerate(memory):
            assert (data == np.float32(mean + number + index)).all(), (number, index, data)
    say("ok")


def wait_for_ever(worker: Worker, say_error: bool = True) -> None:
    """Exchange rounds until something goes wrong; say what, and when on the machine's clock."""
    data = np.zeros(1000, np.float32)
    worker.all_reduce(data)
    say("exchanging")
    try:
        while True:
            worker.all_reduce(data)
    except GradServerError as error:
        if say_error:
            say(f"error {json.dumps([time.monotonic(), type(error).__name__, str(error)])}")


def main() -> None:
    name, url, rank, world_size, arguments = sys.argv[1:]
    program: Callable[..., None] = globals()[name]
    options: dict[str, Any] = json.loads(arguments)
    group, timeout = options.pop("group", "default"), options.pop("timeout", 20.0)
    with connect(url, int(rank), int(world_size), group, f"w{rank}", timeout) as worker:
        program(worker, **options)


if __name__ == "__main__":
    main()
