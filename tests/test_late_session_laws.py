"""The laws of durable groups with a quorum or backups, with all of the workers' real code, and with data shards."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.policy import Lateness
from tests.examples import examples
from tests.late_session_group import LateGroup
from tests.session_scripts import Happenings, hold
from tests.test_session_laws import fuses, happenings, many_rates, seeds

pytestmark = pytest.mark.usefixtures("session_code")

policies = st.one_of(
    st.builds(Lateness, quorum=st.integers(1, 3), grace=st.just(0.005), keeps=st.booleans()),
    st.builds(Lateness, percent=st.sampled_from([30.0, 60.0]), grace=st.just(0.005), keeps=st.booleans()),
    st.builds(Lateness, backup=st.integers(1, 2), grace=st.just(0.0), keeps=st.booleans()),
)
worlds = st.integers(2, 4)
buckets = st.lists(st.integers(1, 40), min_size=1, max_size=3)
rounds = st.integers(1, 6)


@given(worlds, buckets, rounds, policies, fuses, happenings, happenings, many_rates, seeds)
@settings(max_examples=examples(25), deadline=None)
def test_lost_coordinators_and_shards_leave_no_late_member_out(
    world: int,
    sizes: list[int],
    count: int,
    lateness: Lateness,
    crashes: list[int],
    breaks: Happenings,
    losses: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = LateGroup(world, sizes, count, lateness, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (losses if len(rates) > 1 else {}, group.world.kill_any_shard))


@given(worlds, buckets, rounds, policies, fuses, happenings, happenings, many_rates, seeds)
@settings(max_examples=examples(25), deadline=None)
def test_members_that_are_left_go_on_with_what_the_ledger_says(
    world: int,
    sizes: list[int],
    count: int,
    lateness: Lateness,
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = LateGroup(world, sizes, count, lateness, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (deaths, group.kill))


@given(worlds, buckets, rounds, policies, fuses, happenings, happenings, many_rates, seeds)
@example(  # the only one dies that had the last round, and one of the others has yet to hear of the end before
    4, [1], 4, Lateness(backup=2, grace=0.0, keeps=False), [50], {}, {3: [0]}, (1.0, 1.0, 1.0), 176
)
@settings(max_examples=examples(25), deadline=None)
def test_workers_that_join_meanwhile_hold_the_same(
    world: int,
    sizes: list[int],
    count: int,
    lateness: Lateness,
    crashes: list[int],
    joins: Happenings,
    deaths: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = LateGroup(world, sizes, count, lateness, seed, rates, crashes)
    hold(group, (joins, group.join), (deaths, group.kill))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_hundreds_of_runs_agree_with_the_ledger(part: int) -> None:
    for seed in range(60 * part, 60 * (part + 1)):
        holds_in_run(seed)


def holds_in_run(seed: int) -> None:
    """Run with losses, as ``seed`` decides: in even runs members die, too."""
    chance, keeps = Random(seed), bool(seed // 2 % 2)
    lateness = chance.choice(
        [
            Lateness(quorum=1, grace=0.005, keeps=keeps),
            Lateness(quorum=2, grace=0.005, keeps=keeps),
            Lateness(backup=1, grace=0.0, keeps=keeps),
        ]
    )
    rates = chance.choice([(1.0,), (1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)])
    sizes = [chance.randint(1, 40) for _ in range(chance.randint(1, 3))]
    crashes = [chance.randint(0, 120) for _ in range(chance.randint(0, 4))]
    group = LateGroup(chance.randint(2, 4), sizes, chance.randint(2, 6), lateness, seed, rates, crashes)
    events = {chance.randint(0, 800): [chance.randint(0, 3)] for _ in range(chance.randint(0, 3))}
    more = {chance.randint(0, 800): [chance.randint(0, 3)] for _ in range(chance.randint(0, 2))}
    if len(rates) == 1 and seed % 2:
        more = {}
    hold(group, (events, group.break_line), (more, group.world.kill_any_shard if seed % 2 else group.kill))
