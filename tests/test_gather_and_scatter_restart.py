"""Tests of gather, scatter and exchange while the coordinator is killed: results are right, or reported as lost."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserver import connect
from gradserver.protocol.errors import ConnectionLostError
from gradserver.worker.client import Worker
from tests.cluster import PATIENCE, Daemon, Task, wait_until
from tests.test_shard_processes import children_of

WORLD = 3
SIZE = 200_001
"""Elements for each rank: several slices."""
KILLS = 4


def given(rank: int, call: int, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return numbers that no other rank or call has."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * rank + call


def gathered(worker: Worker, call: int) -> bool:
    root = call % WORLD
    found = worker.gather(given(worker.rank, call, SIZE), root)
    due = np.stack([given(rank, call, SIZE) for rank in range(WORLD)])
    return found is None if worker.rank != root else found is not None and np.array_equal(found, due)


def scattered(worker: Worker, call: int) -> bool:
    root = call % WORLD
    parts = given(root, call, WORLD, SIZE)
    found = worker.scatter(np.empty(SIZE, np.float32), parts if worker.rank == root else None, root)
    return np.array_equal(found, parts[worker.rank])


def exchanged(worker: Worker, call: int) -> bool:
    found = worker.all_to_all(given(worker.rank, call, WORLD, SIZE))
    return np.array_equal(found, np.stack([given(rank, call, WORLD, SIZE)[worker.rank] for rank in range(WORLD)]))


def told(worker: Worker, call: int) -> bool:
    found = worker.all_gather_object(given(worker.rank, call, SIZE))
    return all(np.array_equal(one, given(rank, call, SIZE)) for rank, one in enumerate(found))


def until_more(calls: list[int], tasks: list[Task[None]]) -> None:
    """Wait until all have made a few calls more, or one has ended before its time."""
    before = min(calls)
    wait_until(lambda: min(calls) > before + 2 or any(task.ended(0) for task in tasks), "calls are made")


CALLS: list[Callable[[Worker, int], bool]] = [gathered, scattered, exchanged, told]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that the collector closes
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_every_call_is_right_or_lost_and_no_worker_waits(channel: str, shards: int, tmp_path: Path) -> None:
    """Test a call of which one has the result and another has not: it cannot be repeated, and the error says so.

    Of some data shards, one is killed as well.
    """
    enough, calls, lost = threading.Event(), [0] * WORLD, [0] * WORLD

    def work(worker: Worker) -> None:
        call = 0
        while True:
            if worker.broadcast(np.array([enough.is_set()], np.uint8))[0]:
                return
            try:
                assert CALLS[call % 4](worker, call), call
            except ConnectionLostError as error:
                if "not every worker can take part in it once more" not in error.message:
                    raise
                lost[worker.rank] += 1
            call += 1
            calls[worker.rank] = call

    with ExitStack() as stack:
        options = "--workers", f"{WORLD}:{WORLD}", "--state-dir", str(tmp_path), "--shards", str(shards)
        daemon = stack.enter_context(Daemon(*options))
        joining = [
            Task(connect, daemon.url, rank, WORLD, name=f"w{rank}", channel=channel, timeout=PATIENCE)
            for rank in range(WORLD)
        ]
        workers = [stack.enter_context(task.result()) for task in joining]
        tasks = [Task(work, worker) for worker in workers]
        for _ in range(KILLS):
            until_more(calls, tasks)
            if shards > 1:
                os.kill(children_of(daemon.pid)[-1], signal.SIGKILL)
                until_more(calls, tasks)
            daemon.send_signal(signal.SIGKILL)
            daemon.end()
            daemon = stack.enter_context(Daemon(*options))
        until_more(calls, tasks)
        enough.set()
        for task in tasks:
            task.result()
    assert max(lost) <= KILLS * (1 + (shards > 1))
    del joining, workers, tasks
    gc.collect()
