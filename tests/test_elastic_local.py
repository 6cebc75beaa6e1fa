"""Elastic groups inside one process: what workers and `DistributedDataParallel` make of a death."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

from gradserver import LocalCluster, Membership
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    ClosedError,
    DeadlineError,
    InvalidRankError,
    InvalidWorldSizeError,
    LeftOutError,
    MembershipChangedError,
    WorkerLostError,
)
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.cluster import wait_until
from tests.elastic_training import FATAL, STEPS, VICTIM, WORLD, after_some_pushes, alone, train
from tests.models import Transformer, state_of
from tests.replicas import distance, same

PLAN = simple_plan([("b0", 600_000), ("b1", 3)], FLOAT32)


def exchange(worker: Worker, value: float) -> tuple[float, float]:
    """Exchange one round in which this worker gives ``value``. Return the result."""
    large, small = np.full(600_000, value, np.float32), np.full(3, value, np.float32)
    worker.push(1, small)
    worker.push(0, large)
    worker.finish_round()
    assert (large == large[0]).all()
    return float(large[0]), float(small[0])


def test_the_others_go_on_when_one_dies_and_ranks_change_at_the_end_of_the_round() -> None:
    with LocalCluster(4, elastic=(1, 8)) as cluster:

        def work(worker: Worker) -> list[Any]:
            member_id = worker.rank
            worker.agree(PLAN)
            seen: list[Any] = [exchange(worker, member_id)]
            changes: list[Membership] = []
            worker.on_membership(changes.append)
            if member_id == 1:
                cluster.kill(1)
            place = worker.rank, worker.world_size, worker.epoch
            seen += [place, exchange(worker, member_id), (worker.rank, worker.world_size, worker.epoch, worker.names)]
            assert [news.epoch for news in changes] == [2]
            return [*seen, exchange(worker, member_id), worker.round]

        results = cluster.run(work)

    assert results[1] is None
    for member_id, rank in ((0, 0), (2, 1), (3, 2)):
        mean = float(np.float32(5) / np.float32(3))
        names = ("worker-0", "worker-2", "worker-3")
        assert results[member_id] == [
            (1.5, 1.5), (member_id, 4, 1), (mean, mean), (rank, 3, 2, names), (mean, mean), 3,
        ]  # fmt: skip


def test_several_die_one_after_the_other_until_one_is_left() -> None:
    with LocalCluster(4, elastic=(1, 4)) as cluster:

        def work(worker: Worker) -> list[int]:
            member_id, worlds = worker.rank, []
            worker.agree(PLAN)
            for number in range(1, 5):
                if member_id == number:
                    cluster.kill(worker.rank)
                exchange(worker, member_id)
                worlds.append(worker.world_size)
            return worlds

        assert cluster.run(work) == [[3, 2, 1, 1], None, None, None]
        assert cluster.run(lambda worker: exchange(worker, 7.0)) == [(7.0, 7.0)]


def test_a_training_survives_a_death_in_the_middle_of_backward_as_one_process_would_have_computed_it() -> None:
    with LocalCluster(WORLD, elastic=(1, 8)) as cluster:

        def work(worker: Worker) -> Any:
            member_id = worker.rank
            if member_id == VICTIM:
                after_some_pushes(worker, FATAL, 0, lambda: cluster.kill(worker.rank))
            return train(worker, member_id, lambda _: None)

        states = [state for state in cluster.run(work) if state is not None]
        assert cluster.snapshot()["groups"]["local"]["round"] == STEPS  # type: ignore[index]

    assert len(states) == WORLD - 1
    assert all(same(states[0], other) for other in states[1:])
    left = [member_id for member_id in range(WORLD) if member_id != VICTIM]
    assert distance(states[0], alone(lambda step, _: range(WORLD) if step < FATAL else left)) < 1e-5


def test_a_wrapping_whose_first_rank_dies_in_it_says_so_and_can_be_repeated() -> None:
    with LocalCluster(3, elastic=(1, 3)) as cluster:

        def work(worker: Worker) -> Any:
            member_id = worker.rank
            if member_id == 0:
                return cluster.kill(0)
            with pytest.raises(MembershipChangedError, match="from rank 0, was called in a membership that has ended"):
                DistributedDataParallel(Transformer(member_id), worker)
            return state_of(DistributedDataParallel(Transformer(member_id), worker).module)

        states = cluster.run(work)

    assert states[0] is None
    assert same(states[1], states[2])
    assert same(states[1], state_of(Transformer(1)))


def test_collectives_go_on_or_raise_once_and_can_be_repeated() -> None:
    with LocalCluster(3, elastic=(1, 3)) as cluster:

        def work(worker: Worker) -> list[Any]:
            member_id = worker.rank
            if member_id == 0:
                cluster.kill(0)
            total = worker.all_reduce(np.full(2, member_id, np.float32), "sum").tolist()
            worker.barrier()
            with pytest.raises(MembershipChangedError, match="Rank and world size are new: call it again"):
                worker.all_gather(np.full(2, member_id, np.float32))
            gathered = worker.all_gather(np.full(2, member_id, np.float32)).tolist()
            part = worker.reduce_scatter(np.arange(4, dtype=np.float32), "sum").tolist()
            sent = worker.broadcast(np.full(1, member_id, np.float32), root=1).tolist()
            return [total, gathered, part, sent, worker.rank, worker.world_size]

        results = cluster.run(work)

    both = [[3, 3], [[1, 1], [2, 2]]]
    assert results == [None, [*both, [0, 2], [2], 0, 2], [*both, [4, 6], [2], 1, 2]]


def test_sends_go_by_rank_also_when_ranks_have_changed() -> None:
    with LocalCluster(3, elastic=(1, 3)) as cluster:

        def work(worker: Worker) -> float:
            member_id = worker.rank
            worker.agree(PLAN)
            if member_id == 0:
                cluster.kill(0)
            exchange(worker, member_id)
            if worker.rank == 0:
                worker.send(np.full(1, 42, np.float32), 1)
                return 0.0
            return float(worker.recv(np.zeros(1, np.float32), 0)[0])

        assert cluster.run(work) == [None, 0.0, 42.0]


def test_a_send_to_the_dead_fails_with_its_name() -> None:
    with LocalCluster(2, elastic=(1, 2)) as cluster:
        cluster.kill(1)
        with pytest.raises(WorkerLostError, match=r"'worker-1' \(rank 1\) was lost in round 0"):
            cluster.run(lambda worker: worker.send(np.zeros(1, np.float32), 1))


def test_below_the_minimum_the_round_is_finished_and_the_wait_for_more_ends() -> None:
    with LocalCluster(3, rejoin_for=0.3, timeout=10.0) as cluster:

        def work(worker: Worker) -> str:
            member_id = worker.rank
            worker.agree(PLAN)
            if member_id == 1:
                cluster.kill(1)
            with pytest.raises(DeadlineError) as raised:
                exchange(worker, member_id)
            return str(raised.value)

        results = cluster.run(work)

    assert (
        results[0]
        == results[2]
        == (
            "group 'local' waited 0.3 s for workers after round 0: it has 2, 'worker-0' (rank 0), 'worker-2' (rank 1), "
            "and at least 3 are needed to go on"
        )
    )


def test_a_worker_that_does_not_come_is_left_out_and_told_so() -> None:
    with LocalCluster(3, elastic=(1, 3), timeout=0.3) as cluster:
        others_are_done = threading.Event()

        def work(worker: Worker) -> Any:
            member_id = worker.rank
            worker.agree(PLAN)
            if member_id == 2:
                assert others_are_done.wait(10)
                with pytest.raises(LeftOutError, match=r"'worker-2' \(rank 2\), was left out of group 'local'"):
                    exchange(worker, member_id)
                return None
            found = exchange(worker, member_id)
            others_are_done.set()
            return found

        assert cluster.run(work) == [(0.5, 0.5), (0.5, 0.5), None]


def test_the_lowest_rank_names_lost_workers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradserver"), LocalCluster(3, elastic=(1, 3)) as cluster:
        cluster.kill(0)
        wait_until(lambda: len(caplog.messages) >= 2, "it is said")
        said = [record for record in caplog.records if record.name == "gradserver" and record.module == "traffic"]

    assert said[0].levelno == logging.WARNING
    assert said[0].message.startswith("group 'local': 'worker-0' (rank 0) was lost in round 0 (")
    assert said[0].message.endswith("; 2 workers go on")
    assert [record.levelno for record in said[1:]] == [logging.INFO] * (len(said) - 1)


def test_what_the_dead_was_waiting_for_fails() -> None:
    with LocalCluster(2, elastic=(1, 2)) as cluster:
        victim = cluster.workers[1]
        handle = victim.all_reduce(np.zeros(1, np.float32), async_op=True)
        cluster.kill(1)
        with pytest.raises(ClosedError, match="this worker was killed"):
            handle.wait()
        with pytest.raises(InvalidRankError, match="no rank 1 to kill among 1 workers"):
            cluster.kill(1)


@pytest.mark.parametrize("world", [1, 9])
def test_a_cluster_has_a_size_that_its_group_can_have(world: int) -> None:
    with pytest.raises(InvalidWorldSizeError, match=f"a world size of {world} for a group of 2 to 8"):
        LocalCluster(world, elastic=(2, 8))
