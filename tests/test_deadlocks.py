"""Members that all wait for one another hear at once which of them waits for what; no other wait is taken for that.

Guards `gradserver.worker.stalls`, `gradserver.engine.control.deadlocks` and `gradserver.engine.control.group.blocked`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver import (
    ClosedError,
    DeadlineError,
    DeadlockError,
    GradServerError,
    LocalCluster,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.engine.control.group.blocked import BlockedMembers, Step
from gradserver.protocol.dtypes import BY_NAME
from gradserver.protocol.exchange import Op
from gradserver.protocol.messages.waiting import Blocked, Cause
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.stalls import Stalls
from tests.cluster import Daemon, Gather, Task, errors, joined, together, wait_until

PLAN = simple_plan([("bucket", 1000)], BY_NAME["float32"], Op.MEAN)
LONG = 20.0
"""Seconds that no deadlock takes to be found, on the busiest machine."""


def ones() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.ones(4, np.float32)


def _round(worker: Worker) -> None:
    worker.push(0, np.ones(1000, np.float32))
    worker.finish_round()


def barrier_or_receive(worker: Worker) -> None:
    worker.barrier() if worker.rank == 0 else worker.recv(ones(), 0)


def receive_from_each_other(worker: Worker) -> None:
    worker.recv(ones(), (worker.rank + 1) % worker.world_size)


def subgroup_or_parent(worker: Worker) -> None:
    part = worker.subgroup(range(worker.world_size))
    assert part is not None
    (part if worker.rank == 0 else worker).all_reduce(ones())


def making_a_subgroup_or_parent(worker: Worker) -> None:
    worker.subgroup([0, 1]) if worker.rank == 0 else worker.all_reduce(ones())


def round_or_barrier(worker: Worker) -> None:
    worker.agree(PLAN)
    _round(worker) if worker.rank == 0 else worker.barrier()


def plan_or_barrier(worker: Worker) -> None:
    worker.agree(PLAN) if worker.rank == 0 else worker.barrier()


def handle_or_send(worker: Worker) -> None:
    """Wait for what was begun long ago, while another member begins something else."""
    begun = worker.all_reduce(ones(), async_op=True) if worker.rank == 0 else None
    begun.wait() if begun else worker.send(ones(), 0)


def two_threads_or_barrier(worker: Worker) -> None:
    if worker.rank:
        worker.barrier()
        return
    other = Task(worker.recv, ones(), 1, tag=1)
    try:
        worker.recv(ones(), 1)
    finally:
        with suppress(GradServerError):
            other.result()


class Case(NamedTuple):
    run: Callable[[Worker], None]
    told: Sequence[str]


CASES = (
    Case(
        barrier_or_receive,
        ("(rank 0) waits for barrier (collective 0 of round 0), which lacks 'w", "transfer of float32[4] from rank 0"),
    ),
    Case(receive_from_each_other, ("transfer of float32[4] from rank 1 to rank 0 (tag 0), which lacks",)),
    Case(subgroup_or_parent, ("waits for all_reduce(mean) of float32[4] (collective 0 of round 0), which lacks",)),
    Case(making_a_subgroup_or_parent, ("waits for the others to make the same sub-group, which lacks",)),
    Case(
        round_or_barrier,
        (
            "waits for bucket 'bucket' of round 0, which lacks",
            "waits for barrier (collective 0 of round 0), which lacks",
        ),
    ),
    Case(plan_or_barrier, ("waits for the plan that it has proposed, which lacks",)),
    Case(handle_or_send, ("waits for all_reduce(mean) of float32[4]", "from rank 1 to rank 0")),
    Case(two_threads_or_barrier, ("(rank 0) waits for transfer of float32[4] from rank 1", "waits for barrier")),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have waits told after a moment. The test's own threads call no worker later."""
    monkeypatch.setattr("gradserver.worker.handle.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("gradserver.worker.stalls.OTHERS_SECONDS", 0.0)


# ── every member waits for another one ────────────────────────────────────────────────────────────────


@each_case
def test_members_that_wait_for_each_other_hear_which_waits_for_what(case: Case, gather: Gather) -> None:
    workers = gather(2)
    began = time.monotonic()
    found = errors(DeadlockError, workers, case.run)
    assert time.monotonic() - began < LONG
    assert found[0].message == found[1].message
    for text in (*case.told, "can go on, as each waits for another one"):
        assert text in found[0].message, found[0].message
    assert len(found[0].waits) == 2


def test_three_members_in_a_circle_are_named(gather: Gather) -> None:
    found = errors(DeadlockError, gather(3), receive_from_each_other)
    assert [f"(rank {rank}) waits" in one for rank, one in enumerate(found[2].waits)] == [True] * 3


@pytest.mark.parametrize("options", [["--shards", "2"], ["--state-dir", "state"]], ids=["shards", "durable"])
def test_it_is_found_with_data_shards_and_in_durable_groups(
    options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = [str(tmp_path_factory.mktemp("state")) if one == "state" else one for one in options]
    with Daemon("--workers", "2", *options) as running, joined(running.url, 2) as workers:
        found = errors(DeadlockError, workers, round_or_barrier)
    assert "waits for bucket 'bucket' of round 0, which lacks" in found[0].message


def test_a_loop_that_ends_without_join_in_mode_bounded() -> None:
    """One worker has left its loop, and waits for all; the other one requests a round that needs it."""

    def train(worker: Worker) -> None:
        worker.agree(PLAN)
        for _ in range(2 + 6 * worker.rank):
            worker.request_round()
            while worker.next_turn().name == "APPLY":
                _follow(worker)
            _round(worker)
        worker.barrier()

    def _follow(worker: Worker) -> None:
        worker.push(0, np.zeros(1000, np.float32), weight=0.0)
        worker.finish_round()

    with LocalCluster(2, mode="bounded", staleness=0, timeout=60.0) as cluster:
        found = errors(DeadlockError, cluster.workers, train)
    assert "(rank 0) waits for barrier (collective 0 of round" in found[0].message
    assert "(rank 1) waits for the round that it has requested, which lacks 'worker-0' (rank 0)" in found[0].message


# ── what is none ──────────────────────────────────────────────────────────────────────────────────────


def test_a_thread_of_the_script_that_has_yet_to_call_may_give_what_the_others_wait_for(
    gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gather(2)
    received, looks, look = ones() * 0, Counter[Stalls](), Stalls.look

    def count(self: Stalls, check: int = 0) -> None:
        look(self, check)
        looks[self] += 1

    monkeypatch.setattr(Stalls, "look", count)
    monkeypatch.setattr("gradserver.worker.stalls.OTHERS_SECONDS", LONG)

    def late() -> None:
        wait_until(lambda: len(looks) == 2 and min(looks.values()) > 2, "both workers have looked at their waits")
        first.send(ones(), 1)

    barrier, waits, gives = Task(first.barrier), Task(second.recv, received, 0), Task(late)
    gives.result()
    waits.result()
    second.barrier()
    barrier.result()
    assert received.tolist() == ones().tolist()


def test_a_wait_with_a_limit_of_its_own_ends_by_that(gather: Gather) -> None:
    first, second = gather(2)
    waits = Task(second.recv, ones(), 0)
    with pytest.raises(DeadlineError):
        first.all_reduce(ones(), timeout=0.5)
    first.send(ones(), 1)
    waits.result()


def test_a_quorum_that_closes_the_round_is_none() -> None:
    def train(worker: Worker) -> int:
        worker.agree(PLAN)
        if worker.rank == 2:
            worker.recv(ones(), 0)
        _round(worker)
        if worker.rank == 0:
            worker.send(ones(), 2)
        worker.barrier()
        return worker.round

    with LocalCluster(3, quorum=2, grace=0.4, timeout=60.0) as cluster:
        assert together(cluster.workers, train) == [1, 1, 1]


# ── any program ───────────────────────────────────────────────────────────────────────────────────────

Op3 = tuple[str, int, int]


class Programs(NamedTuple):
    """Calls of each of three workers, one call after the other."""

    each: list[list[Op3]]

    @property
    def stands_still(self) -> bool:
        """Play them, and tell whether all workers that are not done wait for each other."""
        at = [0, 0, 0]
        while True:
            due = [ops[place] if place < len(ops) else None for ops, place in zip(self.each, at, strict=True)]
            if all(one is None for one in due):
                return False
            ready = next((one for one in due if one is not None and self._is_ready(one, due)), None)
            if ready is None:
                return True
            for rank in self._concerned(ready):
                at[rank] += 1

    def _is_ready(self, op: Op3, due: list[Op3 | None]) -> bool:
        return all(due[rank] == op for rank in self._concerned(op))

    def _concerned(self, op: Op3) -> tuple[int, ...]:
        return (0, 1, 2) if op[0] == "barrier" else op[1:]


@st.composite
def programs(draw: st.DrawFn) -> Programs:
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    ops = st.one_of(
        st.just(("barrier", 0, 0)),
        st.sampled_from(pairs).map(lambda ends: ("transfer", *ends)),
        st.sampled_from([(0, 1), (1, 2), (0, 2)]).map(lambda ends: ("part", *ends)),
    )
    each: list[list[Op3]] = [[], [], []]
    for op in [*draw(st.lists(ops, min_size=1, max_size=6)), ("barrier", 0, 0)]:
        for rank in (0, 1, 2) if op[0] == "barrier" else op[1:]:
            each[rank].append(op)
    if draw(st.booleans()):
        mine = each[draw(st.integers(0, 2))]
        place = draw(st.integers(0, max(len(mine) - 2, 0)))
        mine[place : place + 2] = mine[place : place + 2][::-1]
    return Programs(each)


@given(programs())
def test_workers_hear_of_a_standstill_if_and_only_if_there_is_one(told: Programs) -> None:
    def run(worker: Worker) -> None:
        parts = {ends: worker.subgroup(ends) for ends in ((0, 1), (1, 2), (0, 2))}
        for kind, one, other in told.each[worker.rank]:
            if kind == "barrier":
                worker.barrier()
            elif kind == "part":
                part = parts[one, other]
                assert part is not None
                part.barrier()
            elif worker.rank == one:
                worker.send(ones(), other)
            else:
                worker.recv(ones(), one)

    with pytest.MonkeyPatch.context() as patch, LocalCluster(3, timeout=60.0) as cluster:
        patch.setattr("gradserver.worker.handle.FIRST_SECONDS", 0.02)
        if not told.stands_still:
            cluster.run(run)
            return
        with pytest.raises((DeadlockError, WorkerLeftError, WorkerLostError, ClosedError)) as caught:
            cluster.run(run)
    assert isinstance(caught.value, DeadlockError) or any(ops[-1:] != [("barrier", 0, 0)] for ops in told.each), (
        "a worker ended its program, so another error could come first"
    )


# ── the checks ────────────────────────────────────────────────────────────────────────────────────────


def blocked(serial: int = 1, check: int = 0) -> Blocked:
    return Blocked(serial, check, (Cause.EXCHANGE,), ("barrier",), ("'w'",))


@pytest.fixture
def both() -> BlockedMembers:
    """Two members that both have said that they wait, so the first check is open."""
    found = BlockedMembers()
    assert found.hear(0, blocked(), (0, 1)) is Step.NOTHING
    assert found.hear(1, blocked(), (0, 1)) is Step.ASK
    return found


def test_two_checks_are_answered_before_members_stand_still(both: BlockedMembers) -> None:
    assert both.hear(0, blocked(check=both.check), (0, 1)) is Step.NOTHING
    assert both.hear(0, blocked(check=both.check), (0, 1)) is Step.NOTHING
    assert both.hear(1, blocked(check=both.check), (0, 1)) is Step.ASK
    assert both.hear(1, blocked(check=both.check), (0, 1)) is Step.NOTHING
    assert both.hear(0, blocked(check=both.check), (0, 1)) is Step.STILL


def test_an_answer_to_an_earlier_check_does_not_count(both: BlockedMembers) -> None:
    first = both.check
    both.hear(0, blocked(check=first), (0, 1))
    assert both.hear(1, blocked(check=first), (0, 1)) is Step.ASK
    assert both.hear(0, blocked(check=first), (0, 1)) is Step.NOTHING
    assert both.hear(1, blocked(check=both.check), (0, 1)) is Step.NOTHING


def test_a_member_that_has_gone_on_meanwhile_ends_the_checks(both: BlockedMembers) -> None:
    both.hear(0, blocked(check=both.check), (0, 1))
    first = both.check
    assert both.hear(1, blocked(serial=2, check=first), (0, 1)) is Step.ASK
    assert both.check != first
    both.hear(0, Blocked(3, both.check), (0, 1))
    assert both.check == 0
    assert both.hear(1, blocked(serial=2), (0, 1)) is Step.NOTHING


def test_a_member_that_departs_ends_the_checks(both: BlockedMembers) -> None:
    both.forget(0)
    assert both.check == 0
    assert both.hear(1, blocked(), (0, 1)) is Step.NOTHING
