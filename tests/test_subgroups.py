"""Sub-groups: groups of some members of a group, over branches of their connections."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gradserver import LocalCluster
from gradserver.cli import main
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    ClosedError,
    CollectiveMismatchError,
    DeadlineError,
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    JoinRefusedError,
    MembershipChangedError,
    UsageError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.messages import Join
from gradserver.protocol.offers import Offer
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.connect import Wish, connect, join as join_with
from tests.cluster import coordinator, joined, members, together, wait_until

CHANNELS = "memory", "tcp", "shm"
LARGE = 700_000
"""Elements of a tensor of several slices."""


def sub(worker: Worker, *ranks: int, timeout: float | None = None) -> Worker:
    """Return the sub-group of these ranks, which has this worker."""
    made = worker.subgroup(ranks, timeout)
    assert made is not None
    return made


def summed(worker: Worker, value: float, numel: int = 3) -> float:
    """Return the sum of all members' values."""
    data = np.full(numel, value, np.float32)
    worker.all_reduce(data, "sum")
    assert (data == data[0]).all()
    return float(data[0])


# ── what they are ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("channel", CHANNELS)
def test_overlapping_sub_groups_exchange_beside_each_other_and_their_parent(channel: str) -> None:
    def work(worker: Worker) -> list[Any]:
        me, seen = worker.rank, list[Any]()
        low, high, odd = worker.subgroup([0, 1, 2]), worker.subgroup([3, 2]), worker.subgroup(range(1, 4, 2))
        for step in range(3):
            for name, group in (("low", low), ("all", worker), ("high", high), ("odd", odd)):
                if group is None:
                    continue
                seen.append((name, group.rank, group.world_size, summed(group, me + step)))
                memory = group.empty(LARGE, np.float32)
                memory[:] = me
                late = group.all_reduce(memory, "max", async_op=True)
                root = group.broadcast(np.full(2, me, np.int64), root=group.world_size - 1)
                gathered = group.all_gather(np.array([me]))
                late.wait()
                seen.append((int(root[0]), gathered[:, 0].tolist(), float(memory[-1])))
        if high is not None:
            high.close()
        seen.append(summed(worker, 1))
        return seen

    with members(channel, 4) as workers:
        results = together(workers, work)
        assert all(worker.channel == channel for worker in workers)

    groups = {"low": [0, 1, 2], "all": [0, 1, 2, 3], "high": [2, 3], "odd": [1, 3]}
    for me, seen in enumerate(results):
        expected: list[Any] = []
        for step in range(3):
            for name, ranks in groups.items():
                if me in ranks:
                    expected.append((name, ranks.index(me), len(ranks), float(sum(ranks) + step * len(ranks))))
                    expected.append((ranks[-1], ranks, float(ranks[-1])))
        assert seen == [*expected, 4.0]


def test_a_sub_group_of_all_gives_the_same_bits_as_its_parent() -> None:
    def work(worker: Worker) -> list[npt.NDArray[np.float32]]:
        chance = np.random.default_rng(worker.rank)
        data = chance.normal(size=(2, 1000)).astype(np.float32)
        data[1] = data[0]
        worker.all_reduce(data[0])
        sub(worker, 3, 1, 0, 2, 2).all_reduce(data[1])
        return list(data)

    with LocalCluster(4) as cluster:
        results = cluster.run(work)
    assert len({data.tobytes() for result in results for data in result}) == 1


def test_members_are_named_by_ranks_and_others_get_none() -> None:
    def work(worker: Worker) -> Any:
        for wrong, kind in (((), InvalidArgumentError), ((4,), InvalidRankError), ((-1, 0), InvalidRankError)):
            with pytest.raises(kind):
                worker.subgroup(wrong)
        made = worker.subgroup([3, 1])
        alone = sub(worker, worker.rank)
        assert (alone.rank, alone.world_size, alone.names, summed(alone, 5)) == (0, 1, (worker.name,), 5)
        return made and (made.rank, made.world_size, made.names, made.group, made.name == worker.name)

    with LocalCluster(4) as cluster:
        results = cluster.run(work)
        assert {"local", "local/1"} < set(cluster.snapshot()["groups"])  # type: ignore[call-overload]
        assert cluster.snapshot()["groups"]["local/1"]["parent"] == "local"  # type: ignore[index]
    names = ("worker-1", "worker-3")
    group = next(result for result in results if result)[3]
    assert results == [None, (0, 2, names, group, True), None, (1, 2, names, group, True)]


def test_a_sub_group_has_sub_groups() -> None:
    def work(worker: Worker) -> Any:
        three = worker.subgroup([1, 2, 3])
        if three is None:
            return summed(worker, 1)
        two = three.subgroup([0, 2])  # ranks 1 and 3 of all
        seen = None if two is None else (two.rank, two.names, summed(two, worker.rank))
        if two is not None:
            three.close()
            assert two.closed
        return seen, summed(worker, 1)

    with LocalCluster(4) as cluster:
        names = ("worker-1", "worker-3")
        results = cluster.run(work)
    assert results == [4.0, ((0, names, 4.0), 4.0), (None, 4.0), ((1, names, 4.0), 4.0)]


@pytest.mark.parametrize("channel", CHANNELS)
def test_all_workers_of_one_host_are_one_sub_group(channel: str) -> None:
    with members(channel, 3) as workers:
        hosts = together(workers, Worker.hosts)
        assert [(host.rank, host.world_size) for host in hosts] == [(0, 3), (1, 3), (2, 3)]
        assert together(hosts, lambda host: summed(host, 2)) == [6.0] * 3


def test_workers_of_several_hosts_are_in_the_sub_group_of_theirs() -> None:
    def join(place: tuple[str, int]) -> Worker:
        url, rank = place
        offer = Offer(host_id=f"host {rank % 2}")
        return join_with(Wish(url, Join("default", f"w{rank}", rank, 5, 20.0, offer), "tcp", "fp32", 0.0))

    def work(worker: Worker) -> Any:
        with worker:
            host = worker.hosts()
            again = host.hosts()  # all of it is on one host
            return host.names, summed(host, worker.rank), again.names == host.names

    with coordinator() as server:
        workers = together([(server.url, rank) for rank in range(5)], join)
        even, odd = ("w0", "w2", "w4"), ("w1", "w3")
        assert together(workers, work) == [(even, 6.0, True), (odd, 4.0, True)] * 2 + [(even, 6.0, True)]


def test_each_has_rounds_and_plans_of_its_own() -> None:
    def rounds(group: Worker, count: int) -> tuple[int, float]:
        group.agree(simple_plan([("b", 50_000)], FLOAT32))
        data = np.zeros(50_000, np.float32)
        for number in range(count):
            data[:] = group.rank + number
            group.push(0, data)
            group.finish_round()
        return group.round, float(data[0])

    def work(worker: Worker) -> Any:
        left, right = worker.subgroup([0, 1]), worker.subgroup([1, 2])
        seen = [rounds(left, 5)] if left else []
        seen += [rounds(worker, 2)]
        return seen + ([rounds(right, 3)] if right else [])

    with LocalCluster(3) as cluster:
        assert cluster.run(work) == [[(5, 4.5), (2, 2.0)], [(5, 4.5), (2, 2.0), (3, 2.5)], [(2, 2.0), (3, 2.5)]]


# ── making one ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("channel", CHANNELS)
def test_members_that_wait_for_each_other_in_different_sub_groups_are_told_so(channel: str) -> None:
    def work(worker: Worker) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            worker.subgroup([0, 1] if worker.rank == 0 else [0, 1, 2])
        return str(caught.value)

    with members(channel, 3) as workers:
        said = together(workers[:2], work)
        assert together(workers[:2], lambda worker: sub(worker, 0, 1).world_size) == [2, 2]
    name = workers[0].name[:-1]
    assert said[0] == said[1]
    assert f"'{name}0' (rank 0)" in said[0]
    assert f"'{name}1' (rank 1)" in said[0]
    assert f"'{name}0', '{name}1', '{name}2'" in said[0]
    assert "in the same order" in said[0]


def test_a_circle_of_three_is_found() -> None:
    def work(worker: Worker) -> Any:
        pair = (worker.rank, (worker.rank + 1) % 3)
        with pytest.raises(CollectiveMismatchError, match="neither can be complete"):
            sub(worker, *pair)
        return summed(worker, 1)

    with LocalCluster(3, timeout=20.0) as cluster:
        assert cluster.run(work) == [3.0] * 3


def test_a_member_that_does_not_come_is_named_in_time() -> None:
    with LocalCluster(3) as cluster:
        gave_up = threading.Barrier(3)

        def work(worker: Worker) -> Any:
            if worker.rank == 2:
                gave_up.wait(10)
                return summed(sub(worker, 0, 1, 2), 1)
            with pytest.raises(DeadlineError, match=r"not complete after 0\.2 s: 'worker-2' did not call") as caught:
                worker.subgroup([0, 1, 2], timeout=0.2)
            assert caught.value.missing == ("worker-2",)
            gave_up.wait(10)
            return summed(sub(worker, 0, 1, 2), 1)

        assert cluster.run(work) == [3.0] * 3


def test_no_worker_joins_a_sub_group_by_its_name() -> None:
    with coordinator() as server, joined(server.url, 2) as workers:
        made = together(workers, lambda worker: sub(worker, 0, 1))
        with pytest.raises(JoinRefusedError, match="is a sub-group of 'default'"):
            connect(server.url, 0, 2, made[0].group, "stranger", 5.0)
        assert together(made, lambda group: summed(group, 1)) == [2.0, 2.0]


def test_a_group_by_the_name_of_a_sub_group_is_in_no_ones_way() -> None:
    with coordinator() as server, joined(server.url, 1, group="default/1") as others:
        with joined(server.url, 2) as workers:
            made = together(workers, lambda worker: sub(worker, 0, 1))
            assert [group.group for group in made] == ["default/2"] * 2
        assert summed(others[0], 1) == 1.0


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("channel", CHANNELS)
def test_who_closes_a_sub_group_stays_in_the_group_and_the_reverse_ends_both(channel: str) -> None:
    with members(channel, 3) as workers:
        made = together(workers, lambda worker: sub(worker, 0, 1, 2))
        pair = together(workers[:2], lambda worker: sub(worker, 0, 1))
        made[2].close()
        made[2].close()
        with pytest.raises(ClosedError):
            made[2].barrier()
        for group in made[:2]:
            with pytest.raises(WorkerLeftError, match="'.*2'"):
                group.barrier()
        assert together(workers, lambda worker: summed(worker, 1)) == [3.0] * 3
        workers[0].close()
        assert made[0].closed
        assert pair[0].closed
        with pytest.raises(WorkerLeftError, match="'.*0'"):
            pair[1].barrier()


def test_the_coordinator_forgets_sub_groups_that_are_closed() -> None:
    with coordinator() as server, joined(server.url, 2) as workers:

        def work(worker: Worker) -> None:
            for _ in range(30):
                sub(worker, 0, 1).close()

        together(workers, work)
        wait_until(lambda: len(server._runtime.snapshot()["groups"]) == 1, "they are forgotten")  # type: ignore[arg-type]
        wait_until(lambda: not any(peer.branches for peer in server._peers.values()), "no branch is left")


@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_the_stop_of_the_coordinator_ends_waits_in_sub_groups(channel: str) -> None:
    with coordinator() as server, joined(server.url, 2, channel=channel) as workers:
        made = together(workers, lambda worker: sub(worker, 0, 1))
        waits = [made[0].barrier(async_op=True)]
        server.request_stop("it is time")
        for wait in waits:
            with pytest.raises(GradServerError, match="it is time"):
                wait.wait(10)
        assert made[0].closed


def test_memory_of_a_sub_group_is_free_when_it_is_closed() -> None:
    with coordinator() as server, joined(server.url, 2, channel="shm") as workers:

        def work(worker: Worker) -> None:
            for _ in range(40):
                group = sub(worker, 0, 1)
                assert summed(group, 1, LARGE) == 2.0  # through slots of shared memory
                group.close()

        together(workers, work)
        assert server._unix is not None
        assert server._unix.segments <= 12


# ── deaths ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sub_group_of_an_elastic_group_goes_on_without_a_dead_member() -> None:
    with LocalCluster(4, elastic=(1, 8)) as cluster:

        def work(worker: Worker) -> Any:
            me = worker.rank
            some, pair = worker.subgroup([1, 2, 3]), worker.subgroup([0, 3])
            seen: list[Any] = [] if some is None else [summed(some, me)]
            if me == 2:
                cluster.kill(2)
            if some is not None:
                seen.append(summed(some, me))
                with pytest.raises(MembershipChangedError):
                    some.all_gather(np.array([me]))
                seen.append((some.all_gather(np.array([me]))[:, 0].tolist(), some.rank, some.world_size))
            if pair is not None:
                seen.append((summed(pair, me), pair.world_size, pair.epoch))
            again = sub(worker, *range(4)) if worker.world_size == 4 else sub(worker, *range(3))
            return [*seen, again.world_size, summed(again, me)]

        results = cluster.run(work)
    pair = (3.0, 2, results[0][0][2])
    assert results == [
        [pair, 3, 4.0],
        [6.0, 4.0, ([1, 3], 0, 2), 3, 4.0],
        None,
        [6.0, 4.0, ([1, 3], 1, 2), pair, 3, 4.0],
    ]


def test_a_sub_group_of_a_group_that_needs_all_ends_with_the_error_that_names_the_dead() -> None:
    with LocalCluster(4) as cluster:

        def work(worker: Worker) -> Any:
            some, rest = worker.subgroup([1, 2]), worker.subgroup([0, 3])
            if some is not None:
                some.barrier()
            if worker.rank == 2:
                return cluster.kill(2)
            said = []
            for group in filter(None, (some, worker)):
                with pytest.raises(WorkerLostError, match="'worker-2'") as caught:
                    group.barrier()
                said.append((caught.value.worker, caught.value.rank))
            return said, rest and summed(rest, 1)

        results = cluster.run(work)
    assert results[0] == results[3] == ([("worker-2", 2)], 2.0)
    assert results[1] == ([("worker-2", 1), ("worker-2", 2)], None)


@pytest.mark.parametrize("elastic", [True, False])
def test_a_member_that_dies_while_a_sub_group_is_made(elastic: bool) -> None:
    with LocalCluster(3, elastic=(1, 3) if elastic else None) as cluster:
        waiting = threading.Semaphore(0)

        def work(worker: Worker) -> Any:
            if worker.rank == 2:
                is_waiting = lambda: len(_waiting(cluster)) == 2  # noqa: E731
                wait_until(is_waiting, "both wait")
                return cluster.kill(2)
            waiting.release()
            if elastic:
                made = sub(worker, 0, 1, 2)
                return made.names, made.rank, summed(made, worker.rank)
            with pytest.raises(WorkerLostError, match="cannot begin: 'worker-2' .* was lost") as caught:
                worker.subgroup([0, 1, 2])
            with pytest.raises(WorkerLostError, match="'worker-2'"):
                worker.subgroup([0, 1, 2])
            return caught.value.worker, caught.value.rank, sub(worker, 0, 1).world_size

        results = cluster.run(work)
    names = ("worker-0", "worker-1")
    assert results[:2] == ([(names, 0, 1.0), (names, 1, 1.0)] if elastic else [("worker-2", 2, 2)] * 2)


def _waiting(cluster: LocalCluster) -> list[Any]:
    groups: Any = cluster.snapshot()["groups"]
    return [one for group in groups.values() if group["state"] == "forming" for one in group["waiting"]]


def test_a_learner_is_in_no_sub_group_before_it_is_a_member() -> None:
    with LocalCluster(2, elastic=(1, 4)) as cluster:
        new = cluster.add()
        assert new.joins
        with pytest.raises(UsageError, match="in no sub-group before it is a member"):
            new.subgroup([0])


def test_a_sub_group_is_waited_for_by_a_worker_that_has_returned() -> None:
    def work(worker: Worker) -> Any:
        made = sub(worker, 0, 1)
        if worker.rank == 0:
            return None
        with pytest.raises(WorkerLeftError, match="'worker-0'"):
            made.barrier()
        return 1

    with LocalCluster(2) as cluster:
        assert cluster.run(work) == [None, 1]


def test_a_worker_that_has_returned_is_not_waited_for_when_a_sub_group_is_made() -> None:
    def work(worker: Worker) -> Any:
        if worker.rank == 0:
            return None
        with pytest.raises(WorkerLeftError, match="cannot begin: 'worker-0'"):
            worker.subgroup([0, 1])
        return 1

    with LocalCluster(2) as cluster:
        assert cluster.run(work) == [None, 1]


def test_the_status_shows_of_which_group_a_sub_group_is(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server, joined(server.url, 2) as workers:
        together(workers, lambda worker: sub(worker, 0, 1))
        assert main(["status", server.url, "--interval", "0.05"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "group 'default/1': active, 2 of 2 workers, membership epoch 2, sub-group of 'default'" in shown
