"""The laws of lossy wires with all of the workers' real code: nothing that a codec keeps back counts twice or is lost.

Unless the ledger says so: without files of its own a coordinator takes along what it owes, and so does a data shard.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.policy import Lateness, Policy
from tests.examples import examples
from tests.lossy_session_group import LossyGroup
from tests.session_scripts import Happenings, check, hold
from tests.test_late_session_laws import policies
from tests.test_session_laws import fuses, happenings, joins, many_rates, preemptions, seeds, worlds

NAMES = ("int8", "bf16", "fp16", "topk:0.3", "randomk:0.3")
ALONE = Lateness(quorum=1, grace=0.005, keeps=True)
ALONE_DROPS = Lateness(quorum=1, grace=0.005, keeps=False)
codecs = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)
buckets = st.lists(st.integers(1, 60), min_size=1, max_size=3)
rounds = st.integers(1, 6)


pytestmark = pytest.mark.usefixtures("session_code")


@given(worlds, buckets, codecs, rounds, fuses, happenings, happenings, preemptions, seeds)
@settings(max_examples=examples(20), deadline=None)
def test_a_coordinator_with_files_owes_what_the_one_before_owed(
    world: int,
    sizes: list[int],
    names: list[str],
    count: int,
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    chance: float,
    seed: int,
) -> None:
    group = LossyGroup(world, sizes, names, count, seed, (1.0,), crashes, preemption=chance)
    with tempfile.TemporaryDirectory() as directory:
        group.world.harness.keep_residuals(Path(directory))
        hold(group, (breaks, group.break_line), (deaths, group.kill))
    assert not group.is_reset()


@given(worlds, buckets, codecs, rounds, fuses, happenings, happenings, joins, many_rates, seeds)
@example(2, [40], ["topk:0.3"], 3, [27], {}, {}, {}, (3.0, 0.5, 1.0), 5)  # the round is over before all shards go on
@example(1, [1], ["int8"], 4, [48], {0: [0]}, {}, {0: [0], 2: [0]}, (1.0,), 0)  # the last member leaves to a learner
@settings(max_examples=examples(20), deadline=None)
def test_what_was_owed_is_kept_or_the_ledger_says_that_it_was_lost(
    world: int,
    sizes: list[int],
    names: list[str],
    count: int,
    crashes: list[int],
    breaks: Happenings,
    losses: Happenings,
    learners: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = LossyGroup(world, sizes, names, count, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (losses, group.world.kill_any_shard), (learners, group.join))
    lost = len(rates) > 1 or group.world.crashes
    assert lost or not group.is_reset()


@given(worlds, buckets, codecs, rounds, policies, fuses, happenings, happenings, joins, many_rates, seeds)
@example(
    2, [19], ["bf16"], 6, ALONE, [], {65: [1, 1], 80: [1], 101: [1]}, {127: [0]}, {}, (1.0,), 521
)  # a member makes two rounds alone, and dies with them
@example(
    *(2, [36], ["int8"], 6, ALONE_DROPS, [], {72: [1, 2, 1], 86: [1], 114: [1], 116: [1], 142: [1]}, {168: [0]}),
    *({}, (1.0,), 529),
)  # the round that it has made alone is closed for the other one, too
@settings(max_examples=examples(20), deadline=None)
def test_late_members_take_nothing_along_that_was_owed(
    world: int,
    sizes: list[int],
    names: list[str],
    count: int,
    lateness: Lateness,
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    learners: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = LossyGroup(world, sizes, names, count, seed, rates, crashes, Policy(1, 8, lateness=lateness))
    hold(group, (breaks, group.break_line), (deaths, group.kill), (learners, group.join))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_lossy_wires_keep_the_laws_in_many_scripts(part: int, tmp_path: Path) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        holds_in_script(seed, tmp_path / str(seed))


def holds_in_script(seed: int, directory: Path) -> None:
    """Run a group to which happens what ``seed`` decides."""
    chance = Random(seed)
    rates = chance.choice([(1.0,), (1.0,), (1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)])
    sizes = [chance.randint(1, 60) for _ in range(chance.randint(1, 3))]
    names, crashes = chance.sample(NAMES, chance.randint(1, 3)), [chance.randint(0, 80) for _ in range(3)]
    preemption = chance.choice([0.0, 0.0, 0.05])
    size, count = chance.randint(1, 4), chance.randint(1, 6)
    group = LossyGroup(size, sizes, names, count, seed, rates, crashes[seed % 4 :], preemption=preemption)
    if len(rates) == 1 and chance.random() < 0.7:
        directory.mkdir()
        group.world.harness.keep_residuals(directory)
    transfer, shard = group.lose_in_transfer, group.world.kill_any_shard
    what = [group.break_line, group.break_line, group.kill, group.join, group.join, transfer, shard]
    for _ in range(chance.randint(0, 5)):
        group.world.at[chance.randint(0, 500)].append(partial(chance.choice(what), chance.randint(0, 3)))
    check(group)
