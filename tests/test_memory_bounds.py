"""Tests that credits bound the coordinator's memory: neither the model, nor a late worker, nor time adds to it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import numpy as np
import pytest

from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.limits import CREDIT_BYTES, SLICE_BYTES
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from tests.cluster import Daemon, joined, together, wait_until, worker_program

MEGABYTE = 1_000_000


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without machine code: about 115 MB, whatever the model, which come at some moment after the start."""
    monkeypatch.setenv("GRADSERVER_KERNELS", "numpy")


def exchange_with_one_late(world_size: int, buckets: int, numel: int, late: float) -> int:
    """Return the most bytes that the coordinator takes, beyond those when idle, while workers exchange two rounds.

    The last of them begins ``late`` seconds after the others have sent all that their credit allows.
    """
    with Daemon("--quiet", loaded="") as daemon, ExitStack() as stack:
        idle = daemon.memory("VmRSS")
        workers = [
            stack.enter_context(
                worker_program(
                    *(daemon.url, "rounds", rank, world_size, "tcp"),
                    count=2,
                    buckets=buckets,
                    numel=numel,
                    ready=True,
                )
            )
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.expect("ready")
        for worker in workers[:-1]:
            worker.tell()
        wait_until(lambda: have_sent_all_they_may(daemon, world_size - 1), "the others wait for the last")
        time.sleep(late)
        workers[-1].tell()
        for worker in workers:
            worker.expect("ok")
        return daemon.memory("VmHWM") - idle


def have_sent_all_they_may(daemon: Daemon, workers: int) -> bool:
    in_flight = daemon.group()["outstanding"]
    return all(outstanding > CREDIT_BYTES - SLICE_BYTES for outstanding in in_flight[:workers])


def test_coordinators_memory_does_not_depend_on_the_model_or_a_late_worker() -> None:
    peak = exchange_with_one_late(world_size=2, buckets=16, numel=4_000_000, late=0.0)  # 256 MB a round

    assert peak < 100 * MEGABYTE, f"{peak / MEGABYTE:.0f} MB"


@pytest.mark.long
def test_coordinator_takes_less_than_300_megabytes_for_a_gigabyte_of_gradients() -> None:
    peak = exchange_with_one_late(world_size=4, buckets=16, numel=16_000_000, late=5.0)

    assert peak < 300 * MEGABYTE, f"{peak / MEGABYTE:.0f} MB"


@pytest.mark.long
def test_coordinators_memory_does_not_grow_with_rounds() -> None:
    def train(worker: Worker, rounds: int) -> None:
        data = np.ones(1000, np.float32)
        for number in range(rounds):
            worker.push(0, data)
            worker.finish_round()
            if number % 10 == 0:
                worker.barrier()

    with Daemon("--quiet", loaded="") as daemon, joined(daemon.url, 2) as workers:
        together(workers, lambda worker: worker.agree(simple_plan([("b0", 1000)], FLOAT32)))
        together(workers, train, 500)
        before = daemon.memory()
        together(workers, train, 2000)
        growth = daemon.memory() - before

    assert growth < 2 * MEGABYTE, f"{growth / MEGABYTE:.1f} MB"


@pytest.mark.long
def test_coordinators_memory_does_not_grow_with_groups_that_come_and_go() -> None:
    with Daemon("--quiet", loaded="") as daemon:

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{daemon.pid}/fd"))

        def come_and_go(count: int) -> int:
            for number in range(count):
                with joined(daemon.url, 2, group=f"group {number}") as workers:
                    together(workers, lambda worker: worker.all_reduce(np.ones(1000, np.float32)))
            wait_until(lambda: not daemon.snapshot()["groups"], "all have left")
            wait_until(lambda: descriptors() <= at_first + 2, "what belonged to those that have left is closed")
            return daemon.memory()

        at_first = descriptors()
        before = come_and_go(20)
        after = come_and_go(50)

    assert after - before < 1 * MEGABYTE, f"{(after - before) / MEGABYTE:.1f} MB"
