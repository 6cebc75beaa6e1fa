"""Workers join groups that have no `Job`: a trainer with a GradientExchange, and one that calls collectives only."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from gradserver import GradientExchange, LocalCluster, Worker
from gradserver.protocol.errors import DeadlineError, StateError, UsageError
from gradserver.worker.connect import connect
from tests.cluster import PATIENCE, Daemon, Task

SIZE = 1000


class Trainer:
    """Gradient descent without torch: weights, and what is done to them in each step."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.weights = np.zeros(SIZE, np.float32)
        self.exchange = GradientExchange(worker, 1, [SIZE])
        self.worlds: list[int] = []
        if worker.joins:
            self.exchange.enter(self.install)
        self.exchange.serve_state(lambda: {"weights": self.weights})

    def install(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"].copy()

    def train(self, workers: int = 3) -> tuple[np.ndarray[Any, Any], int]:
        """Train for three steps with so many workers, and for as many before as it takes until they are there."""
        while self.worlds.count(workers) < 3:
            gradient = np.full(SIZE, 1.0 + self.exchange.step, np.float32)
            self.exchange.push_block(self.exchange.step, 0, gradient)
            self.exchange.finish()
            self.weights -= 0.1 * gradient
            self.worlds.append(self.worker.world_size)
        return self.weights, self.exchange.step


def calm(steps: int) -> np.ndarray[Any, Any]:
    """Return the weights after so many steps without a join."""
    weights = np.zeros(SIZE, np.float32)
    for step in range(steps):
        weights -= 0.1 * np.full(SIZE, 1.0 + step, np.float32)
    return weights


def test_a_trainer_with_a_gradient_exchange_joins_a_running_group() -> None:
    with LocalCluster(2, elastic=(1, 3)) as cluster:

        def work(worker: Worker) -> tuple[np.ndarray[Any, Any], int]:
            adds = worker.rank == 0 and not worker.joins
            trainer = Trainer(worker)
            if adds:
                Task(cluster.add)
            return trainer.train()

        results = cluster.run(work)
    assert len(results) == 3
    (steps,) = {steps for _, steps in results}
    for weights, _ in results:
        assert (weights == calm(steps)).all()


def test_a_group_of_fixed_size_waits_for_a_lost_worker_which_comes_back_with_the_state() -> None:
    with LocalCluster(3, rejoin_for=PATIENCE) as cluster:

        def work(worker: Worker) -> tuple[np.ndarray[Any, Any], int, int]:
            founder = not worker.joins
            trainer = Trainer(worker)
            if founder:
                trainer.train()
                trainer.worlds.clear()
                if worker.rank == 0:
                    cluster.kill(1)
                    Task(lambda: cluster.add("worker-1"))
            return *trainer.train(), worker.world_size

        first, killed, third, again = cluster.run(work)
        names = [worker.name for worker in cluster.workers]
    assert killed is None
    for weights, steps, world in (first, third, again):
        assert world == 3
        assert steps == first[1]
        assert (weights == calm(steps)).all()
    assert sorted(set(names)) == ["worker-0", "worker-1", "worker-2"]


def test_a_group_of_fixed_size_that_waits_for_a_lost_worker_in_vain_ends_with_an_error() -> None:
    with LocalCluster(2, rejoin_for=0.3, timeout=PATIENCE) as cluster:

        def work(worker: Worker) -> str:
            trainer = Trainer(worker)
            if worker.rank == 1:
                cluster.kill(1)
            with pytest.raises(DeadlineError) as raised:
                trainer.train()
            return str(raised.value)

        said, _ = cluster.run(work)
    assert said.startswith("group 'local' waited 0.3 s for workers after round 0: it has 1, 'worker-0' (rank 0)")


def test_over_tcp_and_with_a_state_that_is_of_something_else() -> None:
    with Daemon("--workers", "1:3", "--gather", "0") as daemon:
        trains, stop = threading.Event(), threading.Event()

        def found() -> int:
            with connect(daemon.url, name="founder") as worker:
                exchange = GradientExchange(worker, 1, [SIZE])
                worker.serve_state(lambda: {"something": "else"})
                while not stop.is_set():
                    exchange.push_block(exchange.step, 0, np.ones(SIZE, np.float32))
                    exchange.finish()
                    trains.set()
                return exchange.step

        founding = Task(found)
        assert trains.wait(PATIENCE)
        try:
            with (
                connect(daemon.url, name="learner") as worker,
                pytest.raises(StateError, match="is not that of a GradientExchange"),
            ):
                GradientExchange(worker, 1, [SIZE]).enter(lambda _: None)
        finally:
            stop.set()
        assert founding.result() > 0


def test_a_worker_joins_a_group_that_calls_collectives_only() -> None:
    with LocalCluster(2, elastic=(1, 3)) as cluster:

        def work(worker: Worker) -> list[tuple[float, int]]:
            total, sums = np.zeros(1), list[tuple[float, int]]()
            if worker.joins:
                worker.enter(lambda state: np.copyto(total, state["total"]))
            elif worker.rank == 0:
                Task(cluster.add)
            worker.serve_state(lambda: {"total": total})
            while [world for _, world in sums].count(3) < 3:
                total += worker.all_reduce(np.ones(1), "sum")
                sums.append((float(total[0]), worker.world_size))
                worker.next_round()
            return sums

        one, other, newcomer = cluster.run(work)
    assert one == other
    assert len(one) >= len(newcomer) == 3
    assert newcomer == one[-3:]


def test_a_group_that_exchanges_gradients_ends_its_rounds_by_that() -> None:
    with LocalCluster(1) as cluster:
        (worker,) = cluster.workers
        GradientExchange(worker, 1, [SIZE])
        with pytest.raises(UsageError, match="end with its gradients"):
            worker.next_round()


def test_rounds_without_gradients_end_in_a_group_of_fixed_size_too() -> None:
    with LocalCluster(2) as cluster:

        def work(worker: Worker) -> list[int]:
            for _ in range(3):
                worker.next_round()
            return [worker.round, int(worker.all_reduce(np.ones(1), "sum")[0])]

        assert cluster.run(work) == [[3, 2], [3, 2]]


def test_a_learner_where_no_round_ever_ends_hears_of_it() -> None:
    with LocalCluster(1, elastic=(1, 2), timeout=0.3) as cluster:
        worker = cluster.add()
        with pytest.raises(DeadlineError, match=r"waited 0.3 s for the members of group 'local' to agree on a plan"):
            worker.enter()
