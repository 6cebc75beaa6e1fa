"""The laws of elastic groups that workers join, while members and learners die or leave at any point."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.protocol.errors import MembershipChangedError, WorkerLeftError, WorkerLostError
from gradserver.protocol.exchange import WORLD_BOUND, Kind, Stream, gets
from gradserver.protocol.limits import BACKLOG_BYTES
from tests.elastic_harness import Cluster, Newcomer, Step
from tests.engine_harness import TIMEOUT, small_slices
from tests.examples import examples
from tests.test_engine_elastic_laws import SLICE, collectives, seeds, sizes

Events = list[tuple[int, str, int]]
"""Events by step: which worker joins, returns, leaves or dies."""


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(SLICE):
        yield


N = Step()
A = Step(Kind.ALL_REDUCE, 5, 0, 0)

programs = st.lists(st.one_of(st.just(Step()), st.just(Step()), collectives), min_size=3, max_size=12)
happenings = st.sampled_from(["join", "join", "return", "leave", "die", "give up"])
events = st.lists(st.tuples(st.integers(0, 150), happenings, st.integers(0, 6)), max_size=8)


def happen(cluster: Cluster, what: str, who: int) -> None:
    match what:
        case "join":
            cluster.join()
        case "return" if cluster.gone:
            member_id = sorted(cluster.gone)[who % len(cluster.gone)]
            cluster.join(cluster.harness.engine.control.groups["default"].members.identities.names[member_id])
        case "leave" | "die":
            member_ids = sorted(cluster.members)
            cluster.remove(member_ids[who % len(member_ids)], what == "leave")
        case "give up":
            cluster.give_up(who)


def run(world: int, buckets: list[int], program: list[Step], happens: Events, seed: int) -> Cluster:
    """Run. With a backlog learners listen and catch up; without one the others wait for them."""
    cluster = Cluster(world, buckets, program, seed, backlog=BACKLOG_BYTES if seed % 3 else 0)
    cluster.serve()
    for step, what, who in happens:
        before = cluster.at.get(step, lambda: None)
        cluster.at[step] = partial(_both, before, partial(happen, cluster, what, who))
    cluster.run()
    cluster.run()  # what the last happenings lead to
    return cluster


def _both(one: object, other: object) -> None:
    assert callable(one)
    assert callable(other)
    one()
    other()


@given(st.integers(1, 4), sizes, programs, events, seeds)
@settings(max_examples=examples(100))
def test_after_joins_and_departures_all_get_equal_bytes_the_exact_mean_of_those_that_counted(
    world: int, buckets: list[int], program: list[Step], happens: Events, seed: int
) -> None:
    cluster = run(world, buckets, program, happens, seed)

    assert all(member.finished for member in cluster.members.values()), "a member waits"
    for member in (*cluster.members.values(), *cluster.past):
        for task in member.history:
            for index, (total, payload) in task.answers.items():
                weight, expected = cluster.outcome(task.mates[index], index, task.operation, member.member_id)
                assert total == weight
                owner = 0
                if task.operation.kind in WORLD_BOUND:
                    owner = sorted(task.mates[index])[task.layout.owner(index)]
                assert payload == (expected if gets(task.operation, member.member_id, task.key, owner) else None)


@given(st.integers(1, 4), sizes, programs, events, seeds)
def test_only_departures_make_anything_fail(
    world: int, buckets: list[int], program: list[Step], happens: Events, seed: int
) -> None:
    cluster = run(world, buckets, program, happens, seed)

    for member in cluster.members.values():
        for task in member.history:
            if task.error is None:
                continue
            assert task.key.stream != Stream.BUCKET
            if task.operation.kind is Kind.TRANSFER:
                assert isinstance(task.error, WorkerLostError | WorkerLeftError)
            else:
                assert isinstance(task.error, MembershipChangedError)
            assert cluster.gone, "no member departed"


@given(st.integers(1, 4), sizes, programs, events, seeds)
def test_ranks_are_dense_and_change_at_the_same_boundary_for_all(
    world: int, buckets: list[int], program: list[Step], happens: Events, seed: int
) -> None:
    cluster = run(world, buckets, program, happens, seed)

    for number in range(sum(step.kind is None for step in program)):
        there = {m.boundaries[number] for m in cluster.members.values() if number in m.boundaries}
        assert len(there) <= 1
        for _, member_ids in there:
            assert list(member_ids) == sorted(member_ids)
    group = cluster.harness.group()
    rounds = sum(step.kind is None for step in program)
    members = {
        member_id: member
        for member_id, member in cluster.members.items()
        if not isinstance(member, Newcomer) or member.entered < rounds  # else it waits for a round that does not begin
    }
    assert [member["rank"] for member in group["members"]] == list(range(len(members)))
    assert [member["seat"] for member in group["members"]] == sorted(members)
    for place, member_id in enumerate(sorted(members)):
        member = members[member_id]
        if isinstance(member, Newcomer):
            assert group["members"][place]["name"] == member.name


@given(st.integers(1, 4), sizes, st.integers(2, 6), events, seeds)
def test_no_round_is_lost_and_the_ledger_knows_what_counted(
    world: int, buckets: list[int], rounds: int, happens: Events, seed: int
) -> None:
    cluster = run(world, buckets, [Step()] * rounds, happens, seed)

    ledger = cluster.harness.engine.control.groups["default"].rounds.ledger
    assert [record.round for record in ledger] == list(range(rounds))
    for record in ledger:
        pushed = [by for (key, _), by in cluster.pushed.items() if key.stream == 0 and key.number == record.round]
        for member_id, counted in enumerate(record.weights):
            weights = [by[member_id].weight for by in pushed if member_id in by]
            assert counted in (weights or [0.0])


@example(
    2,
    [1, 9, 9],
    [N] * 5,
    [(0, "join", 0), (0, "leave", 0), (33, "join", 0), *[(86, "return", 0)] * 2, (114, "give up", 0)],
    0,
)
@example(2, [9, 9], [N, N, A, N, N, N, N], [(75, "join", 0), (75, "join", 0), (95, "leave", 1)], 232)
@example(2, [9, 9], [N, N, A, N, N, N, N], [(18, "join", 0), (61, "join", 0), (95, "leave", 1)], 232)
@given(st.integers(1, 4), sizes, programs, events, seeds)
def test_no_learner_waits_for_ever_and_nothing_is_left_behind(
    world: int, buckets: list[int], program: list[Step], happens: Events, seed: int
) -> None:
    cluster = run(world, buckets, program, happens, seed)

    group = cluster.harness.engine.data.groups["default"]
    assert not any(owed for (member_id, _), owed in group.traffic.outstanding.items() if member_id in cluster.members)
    cluster.harness.wait(TIMEOUT)
    cluster.deliver()
    waiting = [newcomer for newcomer in cluster.newcomers if not newcomer.refused]
    assert waiting == []
    for member_id in list(cluster.members):
        cluster.harness.leave(cluster.members[member_id].line)
    assert cluster.harness.engine.data.groups == {}
    cluster.harness.wait(TIMEOUT)
    assert cluster.harness.engine.next_deadline() is None
