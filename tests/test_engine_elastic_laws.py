"""The laws of elastic groups, with deaths and departures at any point, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.protocol.errors import MembershipChangedError, WorkerLeftError, WorkerLostError
from gradserver.protocol.exchange import WORLD_BOUND, ExchangeKey, Kind, Operation, Stream, gets
from tests.elastic_harness import Cluster, Step
from tests.engine_harness import TIMEOUT, Array, Outcome, small_slices
from tests.examples import examples
from tests.test_engine_laws import Cluster as FixedCluster, Scenario

SLICE = 16
"""Bytes of a slice in these tests: four elements of float32."""

Departures = dict[int, tuple[int, bool]]
"""Departures by time: the member, and whether with a goodbye."""


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(SLICE):
        yield


kinds = st.sampled_from(list(Kind))
collectives = st.builds(Step, kinds, st.integers(1, 10), st.integers(0, 4), st.integers(0, 4))
programs = st.lists(st.one_of(st.just(Step()), collectives), min_size=1, max_size=8)
sizes = st.lists(st.integers(1, 14), min_size=1, max_size=4)
departures = st.dictionaries(st.integers(0, 90), st.tuples(st.integers(0, 4), st.booleans()), max_size=4)
seeds = st.integers(0, 2**20)


def run(world: int, buckets: list[int], program: list[Step], goes: Departures, seed: int) -> Cluster:
    cluster = Cluster(world, buckets, program, seed)
    for step, (member_id, politely) in goes.items():
        cluster.at[step] = partial(cluster.remove, member_id, politely)
    cluster.run()
    return cluster


def answers(cluster: Cluster) -> dict[tuple[ExchangeKey, int], dict[int, tuple[Outcome, Operation]]]:
    """Return all results, also those of members that departed later, by exchange, slice and member id."""
    found: dict[tuple[ExchangeKey, int], dict[int, tuple[Outcome, Operation]]] = {}
    for member_id, member in (cluster.members | cluster.gone).items():
        for task in member.history:
            for index, outcome in task.answers.items():
                found.setdefault((task.key, index), {})[member_id] = outcome, task.operation
    return found


@given(st.integers(1, 5), sizes, programs, departures, seeds)
@settings(max_examples=examples(120))
def test_all_remaining_members_end_with_equal_bytes_the_exact_mean_of_those_that_counted(
    world: int, buckets: list[int], program: list[Step], goes: Departures, seed: int
) -> None:
    cluster = run(world, buckets, program, goes, seed)

    assert all(member.finished for member in cluster.members.values()), "a member waits"
    for (key, index), got in answers(cluster).items():
        for member_id, (outcome, operation) in got.items():
            weight, payload = cluster.expected(key, index, operation, member_id)
            assert outcome[0] == weight
            layout = cluster.pushed[key, index][member_id].layout
            owner = sorted(cluster.pushed[key, index])[layout.owner(index)] if operation.kind in WORLD_BOUND else 0
            assert outcome[1] == (payload if gets(operation, member_id, key, owner) else None)


@given(st.integers(1, 5), sizes, programs, departures, seeds)
def test_only_what_cannot_go_on_fails_and_for_all_alike(
    world: int, buckets: list[int], program: list[Step], goes: Departures, seed: int
) -> None:
    cluster = run(world, buckets, program, goes, seed)

    failed: dict[ExchangeKey, set[str]] = {}
    for member in cluster.members.values():
        assert member.changes <= len(cluster.gone), "a departure is raised once"
        for task in member.history:
            if task.error is None:
                continue
            failed.setdefault(task.key, set()).add(str(task.error))
            assert task.key.stream != Stream.BUCKET
            if task.operation.kind is Kind.TRANSFER:
                assert isinstance(task.error, WorkerLostError | WorkerLeftError)
            else:
                assert isinstance(task.error, MembershipChangedError)
                assert task.operation.kind in WORLD_BOUND or task.operation.root in cluster.gone
    for key, texts in failed.items():
        assert len(texts) == 1, "one failure, one reason"
        tasks = [task for member in cluster.members.values() for task in member.history if task.key == key]
        assert all(task.error is not None for task in tasks)


@given(st.integers(1, 5), sizes, programs, departures, seeds)
def test_ranks_and_epochs_change_at_the_same_boundary_for_all(
    world: int, buckets: list[int], program: list[Step], goes: Departures, seed: int
) -> None:
    cluster = run(world, buckets, program, goes, seed)

    for number in range(sum(step.kind is None for step in program)):
        ((_, member_ids),) = {member.boundaries[number] for member in cluster.members.values()}
        assert list(member_ids) == sorted(member_ids)
    assert len({(member.epoch, member.member_ids) for member in cluster.members.values()}) <= 1
    group = cluster.harness.group()
    assert [member["rank"] for member in group["members"]] == list(range(len(cluster.members)))
    assert [member["seat"] for member in group["members"]] == sorted(cluster.members)


@given(st.integers(1, 5), sizes, st.integers(1, 4), departures, seeds)
def test_no_round_is_lost_and_the_ledger_knows_where_each_member_counted(
    world: int, buckets: list[int], rounds: int, goes: Departures, seed: int
) -> None:
    cluster = run(world, buckets, [Step()] * rounds, goes, seed)

    ledger = cluster.harness.engine.control.groups["default"].rounds.ledger
    assert [record.round for record in ledger] == list(range(rounds))
    for record in ledger:
        counted = {
            (member_id, key.part): {
                index for (k, index), tasks in cluster.pushed.items() if k == key and member_id in tasks
            }
            for key in {key for key, _ in cluster.pushed if key.number == record.round}
            for member_id in range(world)
        }
        cut = {(member_id, part): slices for member_id, part, slices in record.cut}
        for member_id in range(world):
            gave = {part: len(slices) for (s, part), slices in counted.items() if s == member_id and slices}
            weights = [
                tasks[member_id].weight
                for (key, _), tasks in cluster.pushed.items()
                if key.stream == Stream.BUCKET and key.number == record.round and member_id in tasks
            ]
            assert record.weights[member_id] in ([*weights] or [0.0])
            if any(s == member_id for s, _ in cut):
                assert member_id in cluster.gone
                assert {part: slices for (s, part), slices in cut.items() if s == member_id} == gave
            elif gave:
                assert gave == {part: -(-size // 4) for part, size in enumerate(buckets)}


@given(st.integers(1, 5), sizes, programs, departures, seeds)
def test_nothing_is_left_behind(
    world: int, buckets: list[int], program: list[Step], goes: Departures, seed: int
) -> None:
    cluster = run(world, buckets, program, goes, seed)

    group = cluster.harness.engine.data.groups["default"]
    assert all(not exchange.pushed for exchange in group.exchanges.values()), "but what only departed members began"
    assert not any(owed for (member_id, _), owed in group.traffic.outstanding.items() if member_id in cluster.members)
    for member_id in list(cluster.members):
        cluster.harness.leave(member_id)
    assert cluster.harness.engine.data.groups == {}
    cluster.harness.wait(TIMEOUT)
    assert cluster.harness.engine.next_deadline() is None


@given(st.integers(1, 4), sizes, st.integers(1, 3), seeds, seeds, seeds)
def test_an_elastic_group_without_departures_gives_the_bits_of_a_fixed_one(
    world: int, buckets: list[int], rounds: int, one: int, other: int, salt: int
) -> None:
    scenario = Scenario(world, tuple(buckets), rounds, (), (), salt)
    fixed = FixedCluster(scenario, one)
    fixed.run()

    def give(member_id: int, key: ExchangeKey, _operation: Operation, _attempt: int) -> tuple[float, Array | None]:
        return scenario.weight(member_id, key), scenario.values(member_id, key)

    elastic = Cluster(world, buckets, [Step()] * rounds, other, give)
    elastic.run()

    got = {
        (*where, member_id): outcome for where, by in answers(elastic).items() for member_id, (outcome, _) in by.items()
    }
    assert got == fixed.answers()
