"""Tests of rounds that are closed without late members: all results are equal, and nothing counts twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.policy import Lateness, Policy
from gradserver.protocol.messages import Result
from tests.engine_harness import bucket, plan_of, small_slices
from tests.examples import examples
from tests.sharded_harness import ShardedHarness
from tests.straggler_harness import LateCluster

ELEMENTS = 12
"""Elements of a slice: three members, four rounds."""


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(8 * ELEMENTS), pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradserver.protocol.shards.SPLIT_BYTES", 8 * ELEMENTS)
        patch.setattr("gradserver.protocol.shards.SPLIT_BUCKET_BYTES", (8 * ELEMENTS,) * 3)
        patch.setattr("gradserver.protocol.shards.ALIGNMENT", ELEMENTS)
        yield


policies = st.one_of(
    st.builds(Lateness, quorum=st.integers(1, 3), keeps=st.booleans()),
    st.builds(Lateness, percent=st.sampled_from([30.0, 60.0, 100.0]), keeps=st.booleans()),
    st.builds(Lateness, backup=st.integers(1, 2), grace=st.just(0.0), keeps=st.booleans()),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["step", "step", "deliver", "deliver"]), st.integers(0, 2)),
        st.tuples(st.sampled_from(["reduce", "pass", "wait"]), st.just(0)),
        st.tuples(st.just("run"), st.integers(0, 2)),
    ),
    max_size=60,
)
kills = st.dictionaries(st.integers(0, 59), st.integers(0, 2), max_size=1)
buckets = st.lists(st.integers(1, 3), min_size=1, max_size=3)
shards = st.sampled_from([(), (), (1.0, 1.0), (2.0, 1.0, 1.0)])


class Course(NamedTuple):
    """The parameters of a run."""

    sizes: list[int]
    lateness: Lateness
    steps: list[tuple[str, int]]
    deaths: dict[int, int]
    rates: tuple[float, ...]
    seed: int


def courses(deaths: st.SearchStrategy[dict[int, int]] = kills) -> st.SearchStrategy[Course]:
    return st.builds(Course, buckets, policies, actions, deaths, shards, st.integers(0, 2**20))


def run(course: Course) -> LateCluster:
    cluster = LateCluster(3, course.sizes, 4, course.lateness, course.seed, course.rates)
    for number, (what, member_id) in enumerate(course.steps):
        if number in course.deaths:
            cluster.kill(course.deaths[number])
        match what:
            case "reduce":
                cluster.reduce()
            case "pass":
                cluster.pass_on()
            case "wait":
                cluster.harness.wait(1.0)
            case "step" if member_id in cluster.members:
                cluster.step(member_id)
            case "deliver" if member_id in cluster.members:
                cluster.deliver(member_id)
            case "run" if member_id in cluster.members:  # two of three come as far as they can, one does nothing
                for _ in range(40):
                    cluster.reduce()
                    cluster.pass_on()
                    for other in list(cluster.members):
                        if other != member_id:
                            cluster.step(other)
                            cluster.deliver(other)
                cluster.harness.wait(1.0)
    for _ in range(3):  # a worker that waits for control's decision may have to ask again
        cluster.finish()
        if cluster.finished:
            break
        cluster.harness.wait(2.0)
    cluster.finish()
    return cluster


def comes_to_its_end_in_run(seed: int) -> LateCluster:
    """Run as ``seed`` decides. One member does nothing for a while, so some rounds are closed without it."""
    chance, keeps = random.Random(seed), bool(seed % 2)
    lateness = (
        Lateness(quorum=2, keeps=keeps),
        Lateness(percent=60.0, keeps=keeps),
        Lateness(backup=1, grace=0.0, keeps=keeps),
    )[seed % 3]
    what = ["step", "step", "deliver", "deliver", "reduce", "pass", "wait", "run", "run"]
    steps = [("run", chance.randint(0, 2)), *((chance.choice(what), chance.randint(0, 2)) for _ in range(40))]
    deaths = {chance.randint(5, 39): chance.randint(0, 2)} if seed % 4 == 3 else {}
    sizes = [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
    cluster = run(Course(sizes, lateness, steps, deaths, ((), (1.0, 1.0), (2.0, 1.0, 1.0))[seed // 3 % 3], seed))
    assert cluster.finished, "a member waits"
    return cluster


def counted(cluster: LateCluster) -> Counter[tuple[int, int, int, int]]:
    """Return the weight with which each gradient counted in all, by its member and round, bucket and slice."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    for command in cluster.reductions:
        for slice_offset in range(command.numel // ELEMENTS):
            for gave in command.contributions:
                assert gave.payload is not None
                values = np.frombuffer(gave.payload, np.float64)[slice_offset * ELEMENTS :][:ELEMENTS] * gave.weight
                for at in np.flatnonzero(values):
                    where = int(at) // 4, int(at) % 4, command.key.part, command.first // ELEMENTS + slice_offset
                    found[where] += float(values[at])  # type: ignore[assignment]
    return found


@given(courses())
@settings(max_examples=examples(60), deadline=None)
def test_all_end_with_the_same_bytes_which_are_the_exact_mean_of_what_counted(
    course: Course,
) -> None:
    cluster = run(course)

    assert cluster.finished, "a member waits"
    everybody = [*cluster.members.values(), *cluster.gone.values()]
    results: dict[tuple[int, int], bytes] = {}
    for member in everybody:
        for where, (_, data) in member.results.items():
            assert results.setdefault(where, data) == data, "not the same for all"
    expected = {where: np.zeros(len(data) // 8) for where, data in results.items()}
    for command in cluster.reductions:
        where = command.key.number, command.key.part
        if where in expected:
            total = sum(given.weight for given in command.contributions)
            mean = sum(
                np.frombuffer(given.payload or b"", np.float64)[: command.numel] * given.weight
                for given in command.contributions
            )
            expected[where][command.first : command.first + command.numel] = mean / total
    for where, data in results.items():
        np.testing.assert_allclose(np.frombuffer(data, np.float64), expected[where], rtol=1e-12, atol=0)


@given(courses())
@settings(max_examples=examples(60), deadline=None)
def test_each_gradient_counts_once_or_not_at_all_and_is_kept_until_it_does(course: Course) -> None:
    cluster = run(course)

    found = counted(cluster)
    for member in cluster.members.values():
        kept: Counter[tuple[int, int, int]] = Counter()
        for part, there in member.session.member.stragglers.carry._slices.items():
            for index, (weight, data) in there.items():
                assert data is not None
                for at in np.flatnonzero(values := data.view(np.float64)):
                    kept[int(at) % 4, part, index] += float(values[at]) * weight  # type: ignore[assignment]
        for number, weight in enumerate(member.weights):
            for part, size in enumerate(course.sizes):
                for index in range(size):
                    once = found[member.member_id, number, part, index]
                    late = (number, part, index) in member.without
                    if course.lateness.keeps:
                        assert once + kept[number, part, index] == pytest.approx(weight, rel=1e-12)
                    else:
                        assert once == (0 if late else weight)
                        assert not member.session.member.stragglers.carry.nbytes
    for member in cluster.gone.values():
        for number, weight in enumerate(member.weights):
            for part, size in enumerate(course.sizes):
                for index in range(size):
                    once = found[member.member_id, number, part, index]
                    assert once == 0 or once == pytest.approx(weight, rel=1e-12)


@given(courses(st.just({})))
@settings(max_examples=examples(30), deadline=None)
def test_a_round_has_its_quorum_and_nothing_is_left_behind(course: Course) -> None:
    cluster = run(course)

    for command in cluster.reductions:
        assert len(command.contributions) >= course.lateness.needed(3)
    ledger = cluster.harness.engine.control.groups["default"].rounds.ledger
    assert [record.round for record in ledger] == list(range(4))
    group = cluster.harness.engine.data.groups["default"]
    assert not group.exchanges
    assert not any(group.traffic.outstanding.values())
    for member in cluster.members.values():
        assert member.session.member.stragglers.backlog.nbytes == 0
        assert all(not any(shard.queue._in_flight.values()) for shard in member.session.member.exchanges.shards)


def test_two_shards_that_find_different_members_late_do_not_cut_off_both() -> None:
    harness = ShardedHarness({"default": Policy(1, 8, lateness=Lateness(quorum=2, grace=0.0))})
    harness.assemble(3, plan_of(96))  # four slices, two for each shard
    harness.slow = True

    def push(shard: int, *ranks: int) -> None:
        for rank in ranks:
            for index in (2 * shard, 2 * shard + 1):
                harness.push_to(shard, rank, bucket(0), np.full(24, rank, np.float32), index=index)

    push(0, 0, 1)
    push(1, 0, 2)
    harness.wait(5.0)
    harness.flush()
    assert [log.text.split(" after")[0] for log in harness.logs if log.warning] == [
        "round 0 of group 'default' closed without 'w2' (rank 2)"
    ]
    push(1, 1)
    harness.flush()

    results = {(m.slice, m.weight, m.without) for m, _ in harness.sent(0) if isinstance(m, Result)}
    assert results == {(0, 2.0, (2,)), (1, 2.0, (2,)), (2, 3.0, ()), (3, 3.0, ())}
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert record.weights == (1.0, 1.0, 1.0)
    assert record.cut == ((2, 0, 2),)
