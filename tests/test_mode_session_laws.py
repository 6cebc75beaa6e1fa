"""The laws of rounds that do not wait for all, with all of the workers' real code: any process is lost at any time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tests.examples import examples
from tests.mode_session_group import MODES, ModeGroup, ModeOf
from tests.session_scripts import (
    Happenings,
    check,
    hold,
    script_of_full_disks,
    script_of_meetings,
    script_of_modes,
    script_of_modules,
)
from tests.test_session_laws import fuses, happenings, joins, many_rates, preemptions, seeds, sharded

pytestmark = pytest.mark.usefixtures("session_code")

modes = st.sampled_from(MODES)
worlds = st.integers(1, 4)
buckets = st.lists(st.integers(1, 40), min_size=1, max_size=2)
modules = st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=2), min_size=2, max_size=3)
contributions = st.integers(1, 4)


@given(worlds, buckets, contributions, modes, fuses, happenings, seeds, preemptions)
@settings(max_examples=examples(20), deadline=None)
def test_lost_coordinators_and_connections_cost_no_contribution(
    world: int,
    sizes: list[int],
    count: int,
    mode: ModeOf,
    crashes: list[int],
    breaks: Happenings,
    seed: int,
    chance: float,
) -> None:
    group = ModeGroup(world, sizes, count, mode, seed, (1.0,), crashes, chance)
    hold(group, (breaks, group.break_line))


@given(worlds, buckets, contributions, modes, fuses, happenings, happenings, sharded, seeds)
@settings(max_examples=examples(20), deadline=None)
def test_lost_data_shards_cost_no_contribution(
    world: int,
    sizes: list[int],
    count: int,
    mode: ModeOf,
    crashes: list[int],
    breaks: Happenings,
    losses: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = ModeGroup(world, sizes, count, mode, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (losses, group.world.kill_any_shard))


@given(worlds, buckets, contributions, modes, fuses, joins, happenings, many_rates, seeds)
@settings(max_examples=examples(20), deadline=None)
def test_workers_die_and_join_and_all_apply_the_same_updates(
    world: int,
    sizes: list[int],
    count: int,
    mode: ModeOf,
    crashes: list[int],
    comes: Happenings,
    deaths: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = ModeGroup(world, sizes, count, mode, seed, rates, crashes)
    hold(group, (comes, group.join), (deaths, group.kill))


@given(worlds, modules, contributions, modes, fuses, happenings, joins, happenings, many_rates, seeds)
@settings(max_examples=examples(30), deadline=None)
def test_several_modules_are_one_log_whatever_is_lost(
    world: int,
    sizes: list[list[int]],
    count: int,
    mode: ModeOf,
    crashes: list[int],
    breaks: Happenings,
    comes: Happenings,
    deaths: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = ModeGroup(world, sizes, count, mode, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (comes, group.join), (deaths, group.kill))


@pytest.mark.parametrize("seed", [21, 57, 80, 136, 224, 362])
def test_a_round_keeps_its_contributions_though_its_beginning_was_not_written(seed: int) -> None:
    check(script_of_full_disks(seed))


@pytest.mark.parametrize("seed", [14, 30, 44])
def test_a_collective_goes_on_without_a_learner_that_came_while_it_was_open(seed: int) -> None:
    check(script_of_meetings(seed))


@pytest.mark.long
def test_coordinators_with_full_disks_are_lost() -> None:
    for seed in range(400):
        check(script_of_full_disks(seed))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_hundreds_of_runs_keep_all_laws(part: int) -> None:
    for seed in range(60 * part, 60 * (part + 1)):
        holds_in_run(seed)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_hundreds_of_runs_with_several_modules_keep_all_laws(part: int) -> None:
    for seed in range(60 * part, 60 * (part + 1)):
        several_modules_hold_in_run(seed)


def several_modules_hold_in_run(seed: int) -> None:
    """Run with several modules, and with losses as ``seed`` decides."""
    check(script_of_modules(seed))


def holds_in_run(seed: int) -> None:
    """Run with losses, as ``seed`` decides: in even runs members die and join, too."""
    check(script_of_modes(seed))
