"""The engine's laws with contributions that are not finite: one outcome at every member, for any order and shards.

Some contributions to buckets have a NaN or an infinity somewhere. Each slice's result must follow from what was given
to it: `verdict` computes it for one slice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.policy import OnNonFinite
from gradserver.engine.records import Round
from gradserver.protocol.exchange import ExchangeKey, Op, Operation, Stream, layout_of
from tests import test_shard_laws, test_sharded_crash_laws
from tests.crash_harness import Crashing, steady
from tests.elastic_harness import Cluster as ElasticCluster, Step, contribution
from tests.engine_harness import Array
from tests.examples import examples
from tests.sharded_crash_harness import Sharded
from tests.test_engine_crash_laws import fuses, happenings, nothing_was_lost, run as run_crashing, those_left_agree
from tests.test_engine_laws import SLICE, Cluster, Scenario, scenarios, seeds
from tests.test_shard_laws import many_rates, small_shares

SIFTING = [OnNonFinite.LEAVE_OUT, OnNonFinite.SKIP]
policies = st.sampled_from([*SIFTING, OnNonFinite.PROPAGATE])
BAD = (np.nan, np.inf, -np.inf)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shares():
        yield


def spoiled(values: Array | None, salt: object) -> Array | None:
    """Return ``values`` with one contribution in three that is not finite in one or two places."""
    chance = random.Random(f"spoiled {salt}")
    if values is None or chance.random() > 0.35:
        return values
    values = values.copy()
    for _ in range(chance.randint(1, 2)):
        values[chance.randrange(values.size)] = chance.choice(BAD)
    return values


@dataclass(frozen=True)
class Spoiled(Scenario):
    """A scenario in which some contributions to buckets are not finite."""

    def values(self, rank: int, key: ExchangeKey) -> Array | None:
        values = super().values(rank, key)
        return spoiled(values, (self.salt, rank, tuple(key))) if key.stream == Stream.BUCKET else values


def of(scenario: Scenario) -> Spoiled:
    kept = scenario.world, scenario.buckets, scenario.rounds, scenario.collectives, scenario.transfers, scenario.salt
    return Spoiled(*kept)


@dataclass
class Verdict:
    """The expected outcome of one slice: ranks that are not finite, the weight, and the mean (None: no bytes)."""

    bad: tuple[int, ...]
    weight: float
    mean: Array | None
    magnitude: Array | None = None


def verdict(scenario: Scenario, key: ExchangeKey, index: int, policy: OnNonFinite) -> Verdict:
    start, stop = layout_of(scenario.operations[key], scenario.world).span(index)
    weights = {rank: scenario.weight(rank, key) for rank in range(scenario.world)}
    given = {
        rank: values[start:stop].astype(np.float64)
        for rank, weight in weights.items()
        if weight > 0 and (values := scenario.values(rank, key)) is not None
    }
    bad = tuple(rank for rank, values in given.items() if not np.isfinite(values).all())
    if policy is OnNonFinite.PROPAGATE:
        bad = ()
    if bad and policy is OnNonFinite.SKIP:
        return Verdict(bad, 0.0, None)
    weight = sum(weight for rank, weight in weights.items() if rank not in bad)
    counting = {rank: values for rank, values in given.items() if rank not in bad}
    if not counting:
        return Verdict(bad, weight, None)
    with np.errstate(all="ignore"):
        mean = np.sum([weights[rank] * values for rank, values in counting.items()], axis=0) / weight
        magnitude = np.sum([np.abs(weights[rank] * values) for rank, values in counting.items()], axis=0) / weight
    return Verdict(bad, weight, mean, magnitude)


def matches(payload: bytes | None, due: Verdict) -> None:
    if due.mean is None or due.magnitude is None:
        assert payload is None
        return
    assert payload is not None
    got, finite = np.frombuffer(payload, np.float32), np.isfinite(due.mean)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(due.mean))
    np.testing.assert_array_equal(got[~finite], due.mean[~finite])
    assert np.all(np.abs(got[finite] - due.mean[finite]) <= 1e-6 * due.magnitude[finite]), (
        "the exact mean of those that count"
    )


def counts(scenario: Scenario, number: int) -> dict[tuple[int, int], int]:
    """Return the ledger's expected counts of a round: slices of a bucket in which a rank did not count."""
    found: dict[tuple[int, int], int] = {}
    for part, size in enumerate(scenario.buckets):
        key = ExchangeKey(Stream.BUCKET, number, part)
        for index in range(layout_of(scenario.operations[key], scenario.world).count if size else 0):
            for rank in verdict(scenario, key, index, OnNonFinite.LEAVE_OUT).bad:
                found[rank, part] = found.get((rank, part), 0) + 1
    return found


# ── L1, L3: identical, and exact over those that count ────────────────────────────────────────────────


@given(scenarios(), seeds, policies)
@settings(max_examples=examples(40))
def test_every_member_gets_what_the_policy_says_slice_by_slice(
    scenario: Scenario, seed: int, policy: OnNonFinite
) -> None:
    scenario = of(scenario)
    cluster = Cluster(scenario, seed, nonfinite=policy)
    cluster.run()

    assert cluster.unfinished() == []
    assert cluster.errors() == []
    for (key, index, rank), (weight, payload) in cluster.answers().items():
        if key.stream == Stream.BUCKET:
            due = verdict(scenario, key, index, policy)
            assert cluster.clients[rank].not_finite[key, index] == due.bad
            assert weight == due.weight
            matches(payload, due)
            assert len({answer for (k, i, _), answer in cluster.answers().items() if (k, i) == (key, index)}) == 1
    ledger = {record.round: record for record in cluster.harness.engine.control.groups["default"].rounds.ledger}
    assert sorted(ledger) == list(range(scenario.rounds))
    for number, record in ledger.items():
        due_counts = counts(scenario, number) if policy.sifts else {}
        assert {(member_id, part): slices for member_id, part, slices, _ in record.nonfinite} == due_counts
    cluster.leftovers()


# ── L2: reproducible ──────────────────────────────────────────────────────────────────────────────────


@given(scenarios(least_world=2), seeds, seeds, st.sampled_from([2 * SLICE, 1 << 20]), policies)
def test_the_same_contributions_have_the_same_outcome_in_whatever_order_they_come(
    scenario: Scenario, one: int, other: int, credit: int, policy: OnNonFinite
) -> None:
    first = Cluster(of(scenario), one, nonfinite=policy)
    second = Cluster(of(scenario), other, credit, nonfinite=policy)
    first.run()
    second.run()

    assert first.answers() == second.answers()
    for rank, client in first.clients.items():
        assert client.not_finite == second.clients[rank].not_finite


@given(scenarios(least_world=2), seeds, many_rates, policies)
@settings(max_examples=examples(40))
def test_the_outcome_is_the_same_with_several_shards(
    scenario: Scenario, seed: int, rates: tuple[float, ...], policy: OnNonFinite
) -> None:
    scenario = of(scenario)
    cluster = test_shard_laws.Cluster(scenario, seed, rates, nonfinite=policy)
    cluster.run()

    assert cluster.unfinished() == []
    for client in cluster.clients.values():
        for part in client.parts:
            if part.key.stream != Stream.BUCKET:
                continue
            for index, (weight, payload) in part.answers.items():
                start, stop = part.layout.span(index)
                due = _of_span(scenario, part.key, start, stop, policy)
                assert (part.not_finite[index], weight) == (due.bad, due.weight)
                matches(payload, due)


def _of_span(scenario: Scenario, key: ExchangeKey, start: int, stop: int, policy: OnNonFinite) -> Verdict:
    """Return the `verdict` on elements that are a slice when a bucket is shared among shards."""

    class Part(Spoiled):
        def values(self, rank: int, key: ExchangeKey) -> Array | None:
            values = super().values(rank, key)
            return None if values is None else values[start:stop]

    kept = scenario.world, scenario.buckets, scenario.rounds, (), (), scenario.salt
    return verdict(Part(*kept), key, 0, policy)


# ── members that die, coordinators that are lost ──────────────────────────────────────────────────────


def give(
    salt: int, steadily: bool, member_id: int, key: ExchangeKey, operation: Operation, attempt: int
) -> tuple[float, Array | None]:
    weight, values = (steady if steadily else contribution)(salt, member_id, key, operation, attempt)
    if key.stream == Stream.BUCKET and operation.op is Op.MEAN:
        values = spoiled(values, (salt, member_id, tuple(key)))
    return weight, values


worlds, sizes = st.integers(1, 4), st.lists(st.integers(1, 14), min_size=1, max_size=3)
programs = st.lists(st.just(Step()), min_size=1, max_size=4)


@given(st.integers(2, 4), sizes, programs, seeds, st.sampled_from(SIFTING), st.integers(0, 60), st.integers(0, 3))
def test_a_death_changes_nothing_for_the_remaining_members(
    world: int, buckets: list[int], program: list[Step], seed: int, policy: OnNonFinite, step: int, member_id: int
) -> None:
    cluster = ElasticCluster(world, buckets, program, seed, partial(give, seed, False), nonfinite=policy)
    cluster.at[step] = lambda: (
        cluster.remove(member_id) if member_id in cluster.members and len(cluster.members) > 1 else None
    )
    cluster.run()

    for member in cluster.members.values():
        assert member.finished
    found: dict[tuple[ExchangeKey, int], set[tuple[float, bytes | None]]] = {}
    for member in cluster.members.values():
        for task in member.history:
            for index, outcome in task.answers.items():
                found.setdefault((task.key, index), set()).add(outcome)
    assert all(len(outcomes) == 1 for outcomes in found.values()), "the same bytes at all"


@given(worlds, sizes, programs, fuses, seeds, st.sampled_from(SIFTING))
@settings(max_examples=examples(40))
def test_a_coordinator_that_is_lost_changes_no_outcome(
    world: int, buckets: list[int], program: list[Step], crashes: list[int], seed: int, policy: OnNonFinite
) -> None:
    cluster = Crashing(world, buckets, program, seed, crashes, partial(give, seed, True), nonfinite=policy)
    cluster.run()

    nothing_was_lost(cluster, world)
    check_counts(cluster)


@given(
    st.integers(1, 3),
    sizes,
    programs,
    seeds,
    many_rates,
    test_sharded_crash_laws.kills,
    test_sharded_crash_laws.fuses,
    st.sampled_from(SIFTING),
)
# a shard without a slice says late that it is up, when another one has been lost
@example(1, [1], [Step()] * 4, 1759, (1.0, 1.0, 1.0), {38: 0}, [9], OnNonFinite.LEAVE_OUT)
@settings(max_examples=examples(30))
def test_a_shard_that_is_lost_changes_no_outcome(
    world: int,
    buckets: list[int],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    policy: OnNonFinite,
) -> None:
    cluster = Sharded(world, buckets, program, seed, rates, partial(give, seed, True), nonfinite=policy)
    cluster.fuses = list(crashes)
    for step, which in kills.items():
        cluster.at[step] = partial(cluster.kill_any, which)
    cluster.run()

    nothing_was_lost(cluster, world)
    check_counts(cluster)


def check_counts(cluster: Crashing) -> None:
    """Check the ledger's counts, for each round: slices of each bucket in which a contribution was not finite."""
    records = {one.record.round: one.record for one in cluster.harness.records if isinstance(one, Round)}
    for number, record in records.items():
        due: dict[tuple[int, int], int] = {}
        for (key, index), pushed in cluster.pushed.items():
            if key.stream == Stream.BUCKET and key.number == number:
                for member_id in cluster.not_finite_of(pushed, index, next(iter(pushed.values())).operation):
                    due[member_id, key.part] = due.get((member_id, key.part), 0) + 1
        assert {(member_id, part): slices for member_id, part, slices, _ in record.nonfinite} == due


@given(worlds, sizes, programs, fuses, seeds, st.sampled_from(SIFTING), happenings)
@settings(max_examples=examples(40))
def test_after_deaths_beside_it_the_remaining_members_hold_the_same(
    world: int,
    buckets: list[int],
    program: list[Step],
    crashes: list[int],
    seed: int,
    policy: OnNonFinite,
    happens: dict[int, tuple[int, str]],
) -> None:
    cluster = Crashing(world, buckets, program, seed, crashes, partial(give, seed, True), nonfinite=policy)
    those_left_agree(run_crashing(world, buckets, program, crashes, seed, happens, cluster=cluster))
