"""The laws of durable groups with a quorum or backups: what is lost with a coordinator, and what late members gave."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.policy import Lateness
from tests.engine_harness import small_slices
from tests.examples import examples
from tests.late_crash_harness import LateSessions

WORLD, ROUNDS = 3, 4


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(8 * WORLD * ROUNDS):
        yield


policies = st.one_of(
    st.builds(Lateness, quorum=st.integers(1, 3), keeps=st.booleans()),
    st.builds(Lateness, percent=st.sampled_from([30.0, 60.0, 100.0]), keeps=st.booleans()),
    st.builds(Lateness, backup=st.integers(1, 2), grace=st.just(0.0), keeps=st.booleans()),
)
sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
fuses = st.lists(st.integers(0, 60), max_size=6)
deaths = st.dictionaries(st.integers(0, 120), st.integers(0, 2), min_size=1, max_size=2)
breaks = st.dictionaries(st.integers(0, 120), st.integers(0, 2), max_size=4)
seeds = st.integers(0, 2**20)


@given(policies, sizes, fuses, breaks, seeds)
@settings(max_examples=examples(60), deadline=None)
def test_a_lost_coordinator_leaves_no_late_member_out_and_no_gradient_counts_twice(
    lateness: Lateness, buckets: list[int], crashes: list[int], broken: dict[int, int], seed: int
) -> None:
    holds(run(lateness, buckets, crashes, broken, {}, seed), nobody_dies=True)


@given(policies, sizes, fuses, breaks, deaths, seeds)
@settings(max_examples=examples(60), deadline=None)
def test_after_deaths_of_members_those_left_hold_the_same_and_the_ledger_says_what_counted(
    lateness: Lateness,
    buckets: list[int],
    crashes: list[int],
    broken: dict[int, int],
    dead: dict[int, int],
    seed: int,
) -> None:
    holds(run(lateness, buckets, crashes, broken, dead, seed), nobody_dies=False)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_runs_with_late_members_lose_nothing(part: int) -> None:
    for seed in range(300 * part, 300 * (part + 1)):
        holds_in_run(seed)


def holds_in_run(seed: int) -> None:
    """Run with losses, as ``seed`` decides: in even runs members die, too."""
    chance = random.Random(seed)
    keeps, dies = chance.random() < 0.5, seed % 2 == 0
    lateness = chance.choice(
        [Lateness(quorum=1, keeps=keeps), Lateness(quorum=2, keeps=keeps), Lateness(backup=1, grace=0.0, keeps=keeps)]
    )
    buckets = [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
    crashes = [chance.randint(0, 60) for _ in range(chance.randint(0, 6))]
    broken = {chance.randint(0, 120): chance.randint(0, 2) for _ in range(chance.randint(0, 3))}
    dead = {chance.randint(0, 120): chance.randint(0, 2) for _ in range(chance.randint(1, 2))} if dies else {}
    holds(run(lateness, buckets, crashes, broken, dead, seed), nobody_dies=not dies)


def run(
    lateness: Lateness, buckets: list[int], crashes: list[int], broken: dict[int, int], dead: dict[int, int], seed: int
) -> LateSessions:
    cluster = LateSessions(WORLD, buckets, ROUNDS, seed, crashes, lateness)
    cluster.breaks, cluster.deaths = dict(broken), dict(dead)
    cluster.run()
    return cluster


def holds(cluster: LateSessions, nobody_dies: bool) -> None:
    """Check that all come to the end with the same results, and that each gradient counted as the ledger says."""
    first, *others = cluster.members
    for member in cluster.members:
        assert member.session.round == ROUNDS, "a member waits"
    if nobody_dies:
        assert len(cluster.members) == WORLD, "a member was left out"
    for member in others:
        assert member.results == first.results, "members hold different bits"
    agrees_with_the_ledger(cluster)
    counts_once(cluster)


def agrees_with_the_ledger(cluster: LateSessions) -> None:
    told, ledger = cluster.told[cluster.members[0].rank], cluster.ledger()
    assert sorted(ledger) == list(range(ROUNDS))
    for number, record in ledger.items():
        for member_id in range(WORLD):
            given_ = [
                [
                    len(w) > member_id and w[member_id] != 0
                    for w in (told[number, part, index].weights for index in range(count))
                ]
                for part, count in enumerate(cluster.slices)
            ]
            assert all(one == sorted(one, reverse=True) for one in given_), "what counted is no prefix"
            counts = [sum(one) for one in given_]
            weight = record.weights[member_id] if member_id < len(record.weights) else 0.0
            assert (weight > 0) == any(counts)
            said = {part: slices for giver, part, slices in record.cut if giver == member_id}
            if weight > 0 and said:
                assert counts == [said.get(part, 0) for part in range(len(counts))]
            elif weight > 0:
                assert counts == list(cluster.slices)


def counts_once(cluster: LateSessions) -> None:
    first = cluster.members[0]
    found = cluster.counted(first.rank)
    for where, told in cluster.told[first.rank].items():
        assert told.weight == pytest.approx(sum(map(abs, told.weights)))
        for member in cluster.members:
            assert cluster.told[member.rank][where] == told
    totals: dict[tuple[int, int, int, int], float] = {}  # by giver, round, bucket and slice
    for (giver, number, (_, part, index)), weight in found.items():
        totals[giver, number, part, index] = totals.get((giver, number, part, index), 0.0) + weight
    for member in cluster.members:
        for number, part, index in cluster.places():
            weight = cluster.weights[member.rank][number]
            counted = totals.get((member.rank, number, part, index), 0.0)
            if cluster.policy.lateness is not None and cluster.policy.lateness.keeps:
                assert counted + cluster.kept(member, number, part, index) == pytest.approx(weight, rel=1e-9)
            else:
                weights = cluster.told[first.rank][number, part, index].weights
                counts = len(weights) > member.rank and weights[member.rank] != 0
                assert counted == pytest.approx(weight if counts else 0.0, rel=1e-9)
    for giver, number, part, index in totals:
        assert totals[giver, number, part, index] <= cluster.weights[giver][number] * (1 + 1e-9), "counted twice"
