"""Commits of rounds that members reduce among themselves: all of one membership give theirs, or it is void for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

import gradserver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import InvalidArgumentError, RoundVoidError, WorkerLostError
from gradserver.protocol.exchange import Kind
from gradserver.protocol.plan import Bucket, Component, Plan, decode_plan, simple_plan
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle

SECONDS = 20.0
GRADIENTS = simple_plan([("a", 1000), ("b", 10)], FLOAT32)
COMMIT = Plan((Bucket("gradients", FLOAT32, (Component("x", (2,)),), kind=Kind.COMMIT),))


class Sections(NamedTuple):
    """The agreements of one worker: what the coordinator reduces, and the commit of what members reduce."""

    worker: Worker
    reduced: Agreement
    commit: Agreement

    @classmethod
    def of(cls, worker: Worker) -> Sections:
        return cls(worker, worker.agree_beside(GRADIENTS), worker.agree_beside(COMMIT))

    def begin(self) -> Handle[None]:
        """Begin a direct round, and return what is done when it is void."""
        watch: Handle[None] = Handle(SECONDS, self.worker._session.traffic.channel)
        why = self.worker._session.boundaries.begin_direct(self.commit.first, watch)
        if why is not None:
            watch._complete(why)
        return watch

    def vote(self) -> float:
        """Give the commit, and return the sum of weights when all have."""
        handle = self.worker.push(
            self.commit.first, np.zeros(2, np.float32), weight=1.0 + self.worker.rank, present=False
        )
        handle.wait(SECONDS)
        self.commit.finish(SECONDS)
        return handle.weight

    def again(self) -> tuple[float, float]:
        """Do the round over the coordinator, with a gradient of rank + 1; return the means of both buckets."""
        self.worker._session.boundaries.begin_again()
        a, b = (np.full(size, self.worker.rank + 1.0, np.float32) for size in (1000, 10))
        self.worker.push(self.reduced.first, a)
        self.worker.push(self.reduced.first + 1, b)
        self.reduced.finish(SECONDS)
        assert (a == a[0]).all()
        return float(a[0]), float(b[0])


@pytest.fixture
def fixed() -> Iterator[gradserver.LocalCluster]:
    with gradserver.LocalCluster(3, timeout=SECONDS) as cluster:
        yield cluster


@pytest.fixture
def elastic() -> Iterator[gradserver.LocalCluster]:
    with gradserver.LocalCluster(3, elastic=(2, 4), timeout=SECONDS) as cluster:
        yield cluster


def test_round_counts_when_all_have_committed(fixed: gradserver.LocalCluster) -> None:
    def work(worker: Worker) -> list[float]:
        sections, weights = Sections.of(worker), []
        for _ in range(5):
            sections.begin()
            weights.append(sections.vote())
        return weights

    assert fixed.run(work) == [[6.0] * 5] * 3


def test_one_refusal_makes_the_round_void_for_all_and_the_next_is_direct(fixed: gradserver.LocalCluster) -> None:
    def work(worker: Worker) -> list[object]:
        sections, seen = Sections.of(worker), list[object]()
        for number in range(4):
            sections.begin()
            if number == 1 and worker.rank == 1:
                worker._session.boundaries.refuse(sections.commit.first)
                seen.append(sections.again())
                continue
            try:
                seen.append(sections.vote())
            except RoundVoidError as error:
                seen += ["'worker-1' (rank 1) could not reduce it" in error.message, sections.again()]
        assert worker.round == 4
        return seen

    others = [6.0, True, (2.0, 2.0), 6.0, 6.0]
    assert fixed.run(work) == [others, [6.0, (2.0, 2.0), 6.0, 6.0], others]


def test_members_that_have_not_committed_hear_of_a_refusal_while_they_wait(fixed: gradserver.LocalCluster) -> None:
    def work(worker: Worker) -> tuple[float, float]:
        sections = Sections.of(worker)
        watch = sections.begin()
        if worker.rank == 2:
            worker._session.boundaries.refuse(sections.commit.first)
        with pytest.raises(RoundVoidError):
            watch.wait(SECONDS)
        return sections.again()

    assert fixed.run(work) == [(2.0, 2.0)] * 3


def test_member_that_refuses_twice_stays(fixed: gradserver.LocalCluster) -> None:
    def work(worker: Worker) -> tuple[float, float]:
        sections = Sections.of(worker)
        watch = sections.begin()
        if worker.rank == 2:
            worker._session.boundaries.refuse(sections.commit.first)
            worker._session.boundaries.refuse(sections.commit.first)
        with pytest.raises(RoundVoidError):
            watch.wait(SECONDS)
        return sections.again()

    assert fixed.run(work) == [(2.0, 2.0)] * 3


def test_gradients_of_one_member_make_way_for_those_of_all(fixed: gradserver.LocalCluster) -> None:
    committed = threading.Barrier(2, timeout=SECONDS)

    def work(worker: Worker) -> tuple[float, float]:
        sections = Sections.of(worker)
        sections.begin()
        if worker.rank == 2:
            committed.wait()
            return sections.again()  # it says nothing of the commit: it was told, and the coordinator forgot
        if worker.rank == 0:
            worker.push(sections.commit.first, np.zeros(2, np.float32), present=False)
            committed.wait()
            with pytest.raises(RoundVoidError):
                worker._session.member.rounds.pushed[sections.commit.first].wait(SECONDS)  # type: ignore[attr-defined]
        else:
            with pytest.raises(RoundVoidError):
                sections.vote()
        return sections.again()

    assert fixed.run(work) == [(2.0, 2.0)] * 3


def test_departure_makes_the_round_void_and_the_members_left_do_it(elastic: gradserver.LocalCluster) -> None:
    begun = threading.Barrier(3, timeout=SECONDS)

    def work(worker: Worker) -> list[object]:
        sections = Sections.of(worker)
        sections.begin()
        first = sections.vote()
        watch = sections.begin()
        begun.wait()
        if worker.rank == 2:
            elastic.kill(2)
        else:
            with pytest.raises(RoundVoidError, match="worker-2"):
                watch.wait(SECONDS)  # it has said nothing to the coordinator since the round began
        second = sections.again()
        assert worker.world_size == 2
        sections.begin()
        return [first, second, sections.vote()]

    results = elastic.run(work)
    assert results[:2] == [[6.0, (1.5, 1.5), 3.0]] * 2


def test_commit_of_a_membership_that_has_ended_is_void(elastic: gradserver.LocalCluster) -> None:
    begun, told = threading.Barrier(3, timeout=SECONDS), threading.Barrier(2, timeout=SECONDS)

    def work(worker: Worker) -> tuple[float, float]:
        sections = Sections.of(worker)
        watch = sections.begin()
        begun.wait()
        if worker.rank == 2:
            elastic.kill(2)
        with pytest.raises(RoundVoidError):
            watch.wait(SECONDS)
        told.wait()
        with pytest.raises(RoundVoidError):  # it is as if it had not heard
            sections.vote()
        return sections.again()

    assert elastic.run(work)[:2] == [(1.5, 1.5)] * 2


def test_group_that_needs_all_its_members_tells_those_that_wait_which_one_is_lost(
    fixed: gradserver.LocalCluster,
) -> None:
    begun = threading.Barrier(3, timeout=SECONDS)

    def work(worker: Worker) -> str:
        sections = Sections.of(worker)
        watch = sections.begin()
        begun.wait()
        if worker.rank == 1:
            fixed.kill(1)
        with pytest.raises(WorkerLostError) as caught:
            watch.wait(SECONDS)
        return caught.value.message

    results = fixed.run(work)
    assert "'worker-1'" in results[0]
    assert "'worker-1'" in results[2]


def test_rounds_go_over_the_coordinator_while_a_learner_needs_their_results() -> None:
    with gradserver.LocalCluster(2, elastic=(2, 3), timeout=SECONDS) as cluster:
        asked = threading.Event()

        def work(worker: Worker) -> list[str]:
            seen: list[str] = []
            if worker.joins:
                sections = Sections.of(worker)
                worker.enter(waits=True)
                sections.again()
                while worker.round < 30:
                    sections.begin()
                    seen.append(_round(sections))
                return seen
            sections = Sections.of(worker)
            worker.serve_state(lambda: {"step": 1})
            while worker.round < 30:
                if worker.round == 5 and worker.rank == 0:
                    cluster.add("late")
                    asked.set()
                if worker.round == 6:
                    assert asked.wait(SECONDS)
                    while worker.world_size == 2 and worker.round < 20:
                        sections.begin()
                        seen.append(_round(sections))
                    continue
                sections.begin()
                seen.append(_round(sections))
            return seen

        results = cluster.run(work)
        assert results[0] == results[1]
        assert "void" in results[0], "the learner had no results to begin with"
        assert results[0][-1] == results[2][-1] == "direct 6.0"


def _round(sections: Sections) -> str:
    try:
        return f"direct {sections.vote()}"
    except RoundVoidError:
        sections.again()
        return "void"


def test_commit_is_alone_in_its_section_and_one_slice() -> None:
    commit = COMMIT.buckets[0]
    with pytest.raises(InvalidArgumentError, match="it has to be alone"):
        Plan((commit, *GRADIENTS.buckets))
    with pytest.raises(InvalidArgumentError, match="it has to be alone"):
        Plan((Bucket("gradients", FLOAT32, (Component("x", (1 << 20,)),), kind=Kind.COMMIT),))
    with pytest.raises(InvalidArgumentError, match="no bucket is that"):
        Plan((Bucket("gradients", FLOAT32, (Component("x", (2,)),), kind=Kind.BARRIER),))
    assert decode_plan(COMMIT.encoded) == COMMIT
