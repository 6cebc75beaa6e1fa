"""A worker that trains on two overlapping sub-groups until one of its peers is killed. Run by tests of sub-groups.

``subgroup_program.py URL RANK WORLD_SIZE``. Ranks 0 to 2 are in the first sub-group, 1 and above in the second.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from gradserver import GradServerError, Worker, connect


def say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


def total(group: Worker) -> float:
    data = group.empty(200_000, np.float32)  # one slice: it counts or not
    data[:] = 1.0
    group.all_reduce(data, "sum")
    assert (data == data[0]).all()
    return float(data[0])


def main(url: str, rank: int, world_size: int) -> None:
    with connect(url, rank, world_size or None, name=f"w{rank}", timeout=20.0) as worker:
        ranks = range(3), range(1, worker.world_size)
        groups = [group for group in map(worker.subgroup, ranks) if group is not None]
        for group in (*groups, worker):
            assert total(group) == group.world_size
        say("ready")
        pending = list(groups)
        while pending:
            for group in list(pending):
                try:
                    count = total(group)
                except GradServerError as error:
                    say(f"error {time.monotonic()} {type(error).__name__}: {error}")
                    return
                if count < group.world_size:
                    pending.remove(group)
        say(f"smaller {time.monotonic()}")
        sys.stdin.readline()
        say(f"totals {[total(group) for group in (*groups, worker)]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
