"""Tests of a cluster inside one process: the real coordinator and workers, without a port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from gradserver import LocalCluster
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    ClosedError,
    CollectiveMismatchError,
    DeadlineError,
    InvalidArgumentError,
    InvalidWorldSizeError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.limits import MIN_CREDIT_BYTES
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from tests.cluster import PATIENCE, Task, wait_until

T = TypeVar("T")
PLAN = simple_plan([("b0", 100), ("b1", 3)], FLOAT32)
ROUNDS = 250


def ones() -> np.ndarray[Any, Any]:
    return np.ones(3, np.float32)


def test_function_runs_once_for_each_worker_and_results_come_by_rank() -> None:
    with LocalCluster(4) as cluster:
        seen = cluster.run(lambda worker, a, b: (worker.rank, worker.world_size, worker.name, a, b), 1, b=2)

    assert seen == [(rank, 4, f"worker-{rank}", 1, 2) for rank in range(4)]


def test_every_worker_runs_in_a_thread_of_its_own() -> None:
    with LocalCluster(3) as cluster:
        names = cluster.run(lambda _: threading.current_thread().name)

    assert names == ["worker-0", "worker-1", "worker-2"]


def test_eight_workers_exchange_hundreds_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a local cluster opens no port and never sleeps")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(time, "sleep", forbidden)

    def train(worker: Worker) -> int:
        worker.agree(PLAN)
        large, small = np.empty(100, np.float32), np.empty(3, np.float32)
        for number in range(ROUNDS):
            large.fill(worker.rank + number)
            small.fill(worker.rank - number)
            worker.push(1, small)
            worker.push(0, large)
            worker.finish_round()
            assert (large == 3.5 + number).all()
            assert (small == 3.5 - number).all()
        return worker.round

    with LocalCluster(8) as cluster:
        assert cluster.run(train) == [ROUNDS] * 8


def test_many_workers_pass_large_tensors_with_little_credit() -> None:
    def work(worker: Worker) -> None:
        for _ in range(3):
            total = worker.all_reduce(np.full(1_500_000, worker.rank, np.float32), "sum")
            assert (total == 32 * 31 / 2).all()

    with LocalCluster(32, credit=MIN_CREDIT_BYTES) as cluster:
        cluster.run(work)


def test_cluster_is_used_again_and_again() -> None:
    with LocalCluster(2) as cluster:
        for number in range(3):
            assert cluster.run(lambda worker, n: float(worker.all_reduce(n * ones())[0]), number) == [number] * 2


def test_workers_keep_their_state_between_runs() -> None:
    def one_round(worker: Worker) -> int:
        worker.push(0, np.zeros(100, np.float32))
        worker.push(1, ones())
        worker.finish_round()
        return worker.round

    with LocalCluster(2) as cluster:
        cluster.run(lambda worker: worker.agree(PLAN))
        assert [cluster.run(one_round) for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


# ── a function that has returned ──────────────────────────────────────────────────────────────────────

FOREVER = 3600.0
"""A timeout in seconds that no test reaches."""


def in_time(cluster: LocalCluster, fn: Callable[[Worker], T]) -> list[T]:
    """Return the result of `run`, which must come before any timeout."""
    return Task(cluster.run, fn).result()


@pytest.mark.parametrize("wait", ["all_reduce", "barrier", "recv", "agree", "push"])
def test_others_do_not_wait_for_a_worker_whose_function_has_returned(wait: str) -> None:
    def work(worker: Worker) -> None:
        worker.all_reduce(ones())
        if wait == "push":
            worker.agree(PLAN)
        if worker.rank == 0:
            return
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: worker.all_reduce(ones()),
            "barrier": worker.barrier,
            "recv": lambda: worker.recv(ones(), 0),
            "agree": lambda: worker.agree(PLAN),
            "push": lambda: worker.push(0, np.ones(100, np.float32)).wait(),
        }
        calls[wait]()

    with LocalCluster(2, timeout=FOREVER) as cluster, pytest.raises(WorkerLeftError, match="its function has returned"):
        in_time(cluster, work)


def test_an_elastic_cluster_goes_on_without_a_worker_whose_function_has_returned() -> None:
    def train(worker: Worker) -> tuple[float, int]:
        worker.agree(PLAN)
        number = worker.rank
        for _ in range(2 + 2 * number):
            data = np.full(100, number, np.float32)
            worker.push(0, data)
            worker.push(1, ones())
            worker.finish_round()
        return float(data[0]), worker.world_size

    with LocalCluster(3, elastic=(1, 3), timeout=FOREVER) as cluster:
        assert in_time(cluster, train) == [(1.0, 3), (1.5, 2), (2.0, 1)]


def test_what_a_returned_worker_had_begun_is_done_all_the_same() -> None:
    def work(worker: Worker) -> float:
        if worker.rank == 0:
            handles = [worker.send(np.full(500_000, n, np.float32), 1, async_op=True) for n in range(8)]
            return float(len(handles))
        return sum(float(worker.recv(np.zeros(500_000, np.float32), 0)[0]) for _ in range(8))

    with LocalCluster(2, timeout=FOREVER, credit=MIN_CREDIT_BYTES) as cluster:
        assert in_time(cluster, work) == [8.0, 28.0]
        assert cluster.run(lambda worker: worker.closed) == [False, False]


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_may_return_while_another_thread_looks_who_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, is_awaited = threading.Event(), LocalCluster._is_awaited

    def slowly(self: LocalCluster, worker: Worker, awaited: set[int]) -> bool:
        looks.set()
        running = self._running
        assert running is not None
        wait_until(lambda: len(running.returned) == 2, "the other has returned")
        return is_awaited(self, worker, awaited)

    def work(worker: Worker) -> int:
        if worker.rank == 1:
            assert looks.wait(PATIENCE)
        return worker.rank

    monkeypatch.setattr(LocalCluster, "_is_awaited", slowly)
    with LocalCluster(2) as cluster:
        assert cluster.run(work) == [0, 1]


@pytest.mark.parametrize("guilty", range(3))
def test_error_that_is_raised_is_the_cause_and_not_a_consequence(guilty: int) -> None:
    def work(worker: Worker) -> None:
        for number in range(20):
            worker.all_reduce(ones())
            if worker.rank == guilty and number == 5:
                raise ZeroDivisionError("division by zero in the loss")

    with LocalCluster(3) as cluster, pytest.raises(ZeroDivisionError, match="division by zero in the loss"):
        cluster.run(work)


def test_others_are_told_which_worker_failed() -> None:
    told: dict[int, BaseException] = {}

    def work(worker: Worker) -> None:
        if worker.rank == 1:
            raise ZeroDivisionError("division by zero")
        try:
            worker.all_reduce(ones())
        except WorkerLostError as error:
            told[worker.rank] = error
            raise

    with LocalCluster(3) as cluster, pytest.raises(ZeroDivisionError):
        cluster.run(work)

    assert {rank: str(error) for rank, error in told.items()} == dict.fromkeys(
        (0, 2),
        "'worker-1' (rank 1) was lost and is needed to go on: it raised ZeroDivisionError: division by zero",
    )


def test_late_worker_is_told_of_the_first_loss_and_not_of_leaves_because_of_it() -> None:
    with LocalCluster(3) as cluster:
        zero, one, two = cluster.workers
        one.abort("out of memory")
        with pytest.raises(WorkerLostError):
            zero.recv(ones(), 1)
        zero.close()

        with pytest.raises(WorkerLostError, match=r"'worker-1' \(rank 1\) was lost .*: out of memory"):
            two.all_reduce(ones())


def test_exit_of_a_worker_is_raised_too() -> None:
    def work(worker: Worker) -> None:
        if worker.rank == 0:
            raise SystemExit(3)
        worker.barrier()

    with LocalCluster(2) as cluster, pytest.raises(SystemExit):
        cluster.run(work)


def test_worker_that_leaves_early_is_named() -> None:
    def work(worker: Worker) -> None:
        if worker.rank == 0:
            worker.close("the epoch is over")
        else:
            worker.barrier()

    with (
        LocalCluster(2) as cluster,
        pytest.raises(WorkerLeftError, match=r"'worker-0' \(rank 0\) left and is needed to go on: the epoch is over"),
    ):
        cluster.run(work)


def test_worker_that_calls_something_else_is_named() -> None:
    def work(worker: Worker) -> None:
        worker.all_reduce(ones(), "sum" if worker.rank else "max")

    with LocalCluster(2) as cluster, pytest.raises(CollectiveMismatchError, match="is not the same everywhere"):
        cluster.run(work)


def test_worker_that_does_not_come_is_named_when_time_is_up() -> None:
    over = threading.Event()

    def work(worker: Worker) -> None:
        if worker.rank == 1:
            assert over.wait(PATIENCE)
            return
        try:
            worker.barrier()
        finally:
            over.set()

    with LocalCluster(3, timeout=0.2) as cluster, pytest.raises(DeadlineError) as caught:
        cluster.run(work)

    assert caught.value.missing == ("'worker-1' (rank 1)",)
    assert "collective 0 of round 0, barrier, waited 0.2 s (--round-timeout) for 'worker-1' (rank 1)" in str(
        caught.value
    )


def test_each_deadline_counts_from_its_own_exchange() -> None:
    with LocalCluster(2, timeout=0.4) as cluster:
        zero, one = cluster.workers
        for _ in range(3):
            task = Task(zero.barrier)
            assert not task.ended(0.25)
            one.barrier()
            task.result()
        assert "waited 0.4 s" in str(Task(zero.barrier).error(DeadlineError, 5.0))


def test_worker_that_failed_is_out_and_says_why() -> None:
    def fail(worker: Worker) -> None:
        if worker.rank == 0:
            raise ZeroDivisionError("division by zero")

    with LocalCluster(2) as cluster:
        with pytest.raises(ZeroDivisionError):
            cluster.run(fail)
        with pytest.raises((ClosedError, WorkerLostError), match="it raised ZeroDivisionError: division by zero"):
            cluster.run(lambda worker: worker.barrier())


# ── making and closing ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [True, 2.0, "2", None])
def test_world_size_must_be_a_number(world_size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="world_size is a number of workers, not "):
        LocalCluster(world_size)


@pytest.mark.parametrize("world_size", [0, -1, 1025])
def test_world_size_must_be_in_range(world_size: int) -> None:
    with pytest.raises(InvalidWorldSizeError, match=f"a world size is 1 to 1024, not {world_size}"):
        LocalCluster(world_size)


def test_credit_must_suffice_for_two_slices() -> None:
    with pytest.raises(InvalidArgumentError, match="a credit of 1000 bytes is too small"):
        LocalCluster(2, credit=1000)


def test_snapshot_shows_the_group() -> None:
    with LocalCluster(2) as cluster:
        cluster.run(lambda worker: worker.agree(PLAN))
        groups: Any = cluster.snapshot()["groups"]

    assert groups["local"]["state"] == "active"
    assert [member["name"] for member in groups["local"]["members"]] == ["worker-0", "worker-1"]


def test_closing_leaves_no_thread_and_nothing_to_use() -> None:
    before = set(threading.enumerate())
    cluster = LocalCluster(2)
    cluster.run(lambda worker: worker.barrier())

    cluster.close()
    cluster.close()

    assert set(threading.enumerate()) <= before
    with pytest.raises(ClosedError, match="this LocalCluster is closed"):
        cluster.run(lambda worker: worker.rank)
    with pytest.raises(ClosedError, match="the worker was closed .the LocalCluster was closed."):
        cluster.workers[0].barrier()


def test_closing_ends_what_still_runs() -> None:
    cluster = LocalCluster(2)
    over = threading.Event()
    task = Task(cluster.run, lambda worker: over.wait(PATIENCE) if worker.rank else worker.recv(ones(), 1))
    assert not task.ended(0.05)

    cluster.close()

    over.set()
    task.error(ClosedError, 5.0)


def test_clusters_live_side_by_side() -> None:
    with LocalCluster(2) as one, LocalCluster(3) as other:
        assert one.run(lambda worker: float(worker.all_reduce(ones(), "sum")[0])) == [2.0] * 2
        assert other.run(lambda worker: float(worker.all_reduce(ones(), "sum")[0])) == [3.0] * 3
