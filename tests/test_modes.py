"""Rounds that do not wait for all workers, with real workers in one process: updates are one log, the same for all."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from gradserver import DataRanges, LocalCluster, Turn, Worker
from gradserver.protocol.dtypes import BY_NAME
from gradserver.protocol.errors import InvalidArgumentError, OutOfStepError, UsageError
from gradserver.protocol.exchange import Op
from gradserver.protocol.plan import simple_plan

FLOAT32 = BY_NAME["float32"]
SIZES = (300, 70_000)
STEPS = 12


class Replica:
    """A model with a buffer for each bucket, and what it was after each update."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        worker.agree(simple_plan([(f"b{size}", size) for size in SIZES], FLOAT32, Op.MEAN))
        self.weights = [np.zeros(size, np.float32) for size in SIZES]
        self.after: dict[int, bytes] = {}
        self.staleness: list[int] = []
        self.dropped = 0
        self._chance = random.Random(worker.rank)

    def compute(self) -> list[Any]:
        return [one * np.float32(0.1) + np.float32(self._chance.random()) for one in self.weights]

    def exchange(self, gradients: list[Any], weight: float) -> None:
        for part, gradient in enumerate(gradients):
            self.worker.push(part, gradient, weight=weight)
        self.worker.finish_round()
        for one, gradient in zip(self.weights, gradients, strict=True):
            one -= np.float32(0.05) * gradient
        self.after[self.worker.round] = b"".join(one.tobytes() for one in self.weights)

    def follow(self) -> None:
        self.exchange([np.zeros(size, np.float32) for size in SIZES], 0.0)

    def contribute(self, gradients: list[Any]) -> Turn:
        version = self.worker.round
        self.worker.request_round()
        while (turn := self.worker.next_turn()) is Turn.APPLY:
            self.follow()
        if turn is Turn.DROP:
            self.dropped += 1
            return turn
        assert self.worker.staleness == self.worker.round - version
        self.staleness.append(self.worker.staleness)
        self.exchange([gradient * np.float32(self.worker.damping) for gradient in gradients], 1.0)
        return turn

    def end(self) -> None:
        self.worker.request_round(follows=True)
        while self.worker.next_turn() is Turn.APPLY:
            self.follow()
        self.follow()


def train(worker: Worker, slow: float = 0.0, steps: int = STEPS) -> Replica:
    replica = Replica(worker)
    for _ in range(steps):
        gradients = replica.compute()
        if worker.rank == 0 and slow:
            time.sleep(slow)  # it computes for longer
        replica.contribute(gradients)
    replica.end()
    return replica


MODES: list[dict[str, Any]] = [
    {"mode": "async"},
    {"mode": "async", "staleness": 1},
    {"mode": "async", "damping": "inverse", "quorum": 2},
    {"mode": "bounded", "staleness": 2},
    {"mode": "bounded", "staleness": 0},
    {"mode": "bounded", "staleness": 3, "quorum": "75%", "grace": 0.002},
    {"mode": "bounded", "staleness": 3, "backup": 1},
    {"mode": "async", "wire": "int8"},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_all_replicas_apply_the_same_updates_in_the_same_order(options: dict[str, Any]) -> None:
    with LocalCluster(3, timeout=20.0, **options) as cluster:
        replicas = cluster.run(train, 0.004)
        (group,) = cluster.snapshot()["groups"].values()  # type: ignore[attr-defined]
    first, *others = replicas
    assert all(one.after == first.after for one in others)
    bound = options.get("staleness")
    assert bound is None or all(staleness <= bound for one in replicas for staleness in one.staleness)
    assert all(len(one.staleness) + one.dropped == STEPS for one in replicas)
    for replica, member in zip(replicas, group["members"], strict=True):
        shown = member["staleness"]
        assert shown["contributions"] == len(replica.staleness)
        assert (shown["refused"], shown["max"]) == (replica.dropped, max(replica.staleness))


def test_with_a_bound_of_zero_a_round_takes_all() -> None:
    with LocalCluster(3, mode="bounded", staleness=0, timeout=20.0) as cluster:
        replicas = cluster.run(train)
    assert [sum(one.staleness) for one in replicas] == [0, 0, 0]
    assert len(replicas[0].after) == STEPS + 1


def test_in_an_asynchronous_group_a_worker_that_computes_for_long_holds_no_other_up() -> None:
    with LocalCluster(2, mode="async", timeout=20.0) as cluster:

        def run(worker: Worker) -> Replica:
            replica = Replica(worker)
            if worker.rank == 0:
                gradients = replica.compute()
                while cluster.snapshot()["groups"]["local"]["round"] < 5:  # type: ignore[index]
                    time.sleep(0.001)
                replica.contribute(gradients)
            else:
                for _ in range(5):
                    replica.contribute(replica.compute())
            replica.end()
            return replica

        slow, quick = cluster.run(run)
    assert slow.after == quick.after
    assert slow.staleness == [5]
    assert quick.staleness == [0] * 5


@pytest.mark.parametrize("options", MODES[1:4], ids=str)
def test_each_sample_is_used_once_though_contributions_are_refused(options: dict[str, Any]) -> None:
    used: list[int] = []

    def run(worker: Worker) -> int:
        replica = Replica(worker)
        data = DataRanges(97, worker, batch_size=3, seed=5)
        while not data.finished():
            while len(indices := data.take()):
                gradients = replica.compute()
                if worker.rank == 0:
                    time.sleep(0.003)
                if replica.contribute(gradients) is Turn.PUSH:
                    used.extend(indices.tolist())
            replica.end()
        return replica.dropped

    with LocalCluster(3, timeout=20.0, **options) as cluster:
        cluster.run(run)
    assert sorted(used) == list(range(97))


@pytest.mark.parametrize("options", [{"mode": "bounded", "staleness": 1}, {"mode": "async"}], ids=str)
def test_workers_may_return_at_any_time_in_an_elastic_cluster(options: dict[str, Any]) -> None:
    def run(worker: Worker) -> Replica:
        replica = Replica(worker)
        for _ in range(3 + 3 * worker.rank):
            replica.contribute(replica.compute())
        return replica

    with LocalCluster(3, elastic=(1, 3), timeout=30.0, **options) as cluster:
        began = time.monotonic()
        replicas = cluster.run(run)
        assert time.monotonic() - began < 20.0
    for number in replicas[0].after:
        assert len({one.after[number] for one in replicas if number in one.after}) == 1


def test_turns_have_an_order() -> None:
    with LocalCluster(1, mode="async", timeout=20.0) as cluster:
        (worker,) = cluster.workers
        with pytest.raises(UsageError, match="no plan"):
            worker.request_round()
        replica = Replica(worker)
        with pytest.raises(OutOfStepError, match="request a round first"):
            worker.next_turn()
        with pytest.raises(UsageError, match="request a round for each contribution"):
            worker.push(0, np.zeros(SIZES[0], np.float32))
        worker.request_round()
        with pytest.raises(OutOfStepError, match="cannot request a round"):
            worker.request_round()
        assert worker.next_turn() is Turn.PUSH
        replica.exchange(replica.compute(), 1.0)
        assert (worker.mode, worker.round) == ("async", 1)


def test_a_synchronous_group_grants_no_rounds() -> None:
    with LocalCluster(1) as cluster, pytest.raises(UsageError, match="mode 'sync'"):
        cluster.workers[0].request_round()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "bounded"}, "needs staleness"),
        ({"mode": "later"}, "expected one of 'sync', 'bounded', 'async'"),
        (
            {"staleness": 1},
            "staleness is for mode 'bounded' or 'async', or for what late workers keep .* and the mode is 'sync'",
        ),
        ({"damping": "inverse"}, "damping is for mode 'bounded' or 'async', .*, or leave damping out"),
        ({"staleness": 1, "damping": "inverse"}, "staleness and damping are for mode"),
        ({"mode": "async", "late": "drop"}, "late needs mode 'sync'"),
        ({"mode": "async", "backlog": 0}, "backlog must be above 0"),
        ({"mode": "async", "staleness": -1}, "staleness is 0 to"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        LocalCluster(2, **options)
