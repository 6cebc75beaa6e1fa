"""The laws of groups with several sections in their plan: a round is of one section, the same at all members.

Members go through a program of rounds of one section or another. Some have run out of data, and follow: they ask what
the others exchange, and take part in that with nothing. Meanwhile members die, the coordinator and data shards are
lost, and others join.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.protocol.exchange import Kind
from tests.crash_harness import Crashing
from tests.elastic_harness import Step
from tests.examples import examples
from tests.sharded_crash_harness import Sharded
from tests.sharded_join_harness import Joinable
from tests.test_engine_crash_laws import nothing_was_lost, run, those_left_agree
from tests.test_shard_laws import many_rates, small_shares
from tests.test_sharded_crash_laws import joins, nobody_was_left_out, plan_joins, plan_losses


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shares():
        yield


_THIRD, _REDUCED = Step(section=2), Step(Kind.ALL_REDUCE, 3)
Sizes = tuple[list[int], tuple[int, ...]]
"""Elements of all buckets, and how many of these each section has."""

a_round = st.builds(Step, section=st.integers(0, 2))
programs = st.lists(
    st.one_of(a_round, a_round, st.builds(Step, st.just(Kind.ALL_REDUCE), st.integers(1, 10))), min_size=1, max_size=7
)
rounds = st.lists(a_round, min_size=1, max_size=5)
modules = st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=2), min_size=2, max_size=3)
worlds = st.integers(1, 4)
fuses = st.lists(st.integers(0, 40), max_size=6)
seeds = st.integers(0, 2**20)
ends = st.dictionaries(st.integers(0, 3), st.integers(0, 4), max_size=3)
"""From which round on a member has no data."""
happenings = st.dictionaries(
    st.integers(0, 120),
    st.tuples(st.integers(0, 3), st.sampled_from(["dies", "breaks", "breaks unnoticed", "waits"])),
    max_size=5,
)
along = st.lists(st.integers(-1, 3), max_size=4)
kills = st.dictionaries(st.integers(0, 200), st.integers(0, 3), max_size=4)
breaks = st.dictionaries(st.integers(0, 200), st.integers(0, 2), max_size=3)


def sizes_of(modules: list[list[int]]) -> Sizes:
    return [size for module in modules for size in module], tuple(map(len, modules))


def each_is_one_section(cluster: Crashing) -> None:
    for number in range(sum(step.kind is None for step in cluster.program)):
        cluster.exchanged_in(number)


def crashing(
    world: int, modules: list[list[int]], program: list[Step], crashes: list[int], seed: int, ends: dict[int, int]
) -> Crashing:
    buckets, sections = sizes_of(modules)
    cluster = Crashing(world, buckets, program, seed, crashes, sections=sections)
    cluster.data_ends = ends
    return cluster


@given(worlds, modules, programs, fuses, seeds, ends)
@settings(max_examples=examples(40))
def test_a_coordinator_that_is_lost_at_any_point_costs_no_section_anything(
    world: int, modules: list[list[int]], program: list[Step], crashes: list[int], seed: int, ends: dict[int, int]
) -> None:
    cluster = crashing(world, modules, program, crashes, seed, ends)
    cluster.run()

    nothing_was_lost(cluster, world)
    each_is_one_section(cluster)


@given(worlds, modules, rounds, fuses, seeds, ends, happenings, along)
@settings(max_examples=examples(60))
def test_after_deaths_and_cuts_the_remaining_members_are_in_the_same_section(
    world: int,
    modules: list[list[int]],
    program: list[Step],
    crashes: list[int],
    seed: int,
    ends: dict[int, int],
    happens: dict[int, tuple[int, str]],
    along: list[int],
) -> None:
    cluster = crashing(world, modules, program, crashes, seed, ends)
    run(world, [], program, crashes, seed, happens, along, cluster)

    those_left_agree(cluster)


def sharded(
    kind: type[Sharded],
    world: int,
    modules: list[list[int]],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    breaks: dict[int, int],
    ends: dict[int, int],
) -> Sharded:
    buckets, sections = sizes_of(modules)
    cluster = kind(world, buckets, program, seed, rates, sections=sections)
    cluster.data_ends = ends
    plan_losses(cluster, kills, crashes, breaks)
    return cluster


@given(st.integers(1, 3), modules, programs, seeds, many_rates, kills, fuses, breaks, ends)
@settings(max_examples=examples(20))
def test_a_data_shard_that_is_lost_at_any_point_costs_no_section_anything(
    world: int,
    modules: list[list[int]],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    breaks: dict[int, int],
    ends: dict[int, int],
) -> None:
    cluster = sharded(Sharded, world, modules, program, seed, rates, kills, crashes, breaks, ends)
    cluster.run()

    nothing_was_lost(cluster, world)
    each_is_one_section(cluster)


@given(st.integers(1, 3), modules, programs, seeds, many_rates, kills, fuses, breaks, joins)
@example(2, [[1, 1], [13], [3, 1]], [_THIRD, _REDUCED], 986, (1.0, 1.0, 1.0), {}, [38, 0, 1], {151: 0}, [88])
@example(2, [[1, 1], [13], [3, 1]], [_THIRD, _REDUCED], 986, (1.0, 1.0, 1.0), {81: 0}, [38], {}, [84])
@settings(max_examples=examples(6))
def test_a_learner_takes_part_in_the_section_that_the_others_exchange(
    world: int,
    modules: list[list[int]],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    breaks: dict[int, int],
    joins: list[int],
) -> None:
    cluster = sharded(
        Joinable, world, modules, [*program, Step(section=1), Step()], seed, rates, kills, crashes, breaks, {}
    )
    assert isinstance(cluster, Joinable)
    plan_joins(cluster, joins)
    cluster.run()

    nobody_was_left_out(cluster)
    each_is_one_section(cluster)


@pytest.mark.long
@pytest.mark.timeout(600)  # it computes all that time, and others may beside it
@pytest.mark.parametrize("part", range(4))
def test_hundreds_of_runs_mix_no_sections(part: int) -> None:
    for seed in range(150 * part, 150 * (part + 1)):
        no_sections_are_mixed_in_run(seed)


def no_sections_are_mixed_in_run(seed: int) -> None:
    chance = random.Random(seed)
    world = chance.randint(1, 4)
    sizes = [[chance.randint(1, 14) for _ in range(chance.randint(1, 2))] for _ in range(chance.randint(2, 3))]
    program = [Step(section=chance.randint(0, 2)) for _ in range(chance.randint(1, 6))]
    crashes = [chance.randint(0, 40) for _ in range(8)]
    out_of_data = {chance.randint(0, 3): chance.randint(0, 4) for _ in range(chance.randint(0, 3))}
    cluster = crashing(world, sizes, program, crashes, seed, out_of_data)
    what = ["dies", "breaks", "breaks unnoticed", "waits"]
    happens = {chance.randint(0, 120): (chance.randint(0, 3), chance.choice(what)) for _ in range(5)}
    those_left_agree(run(world, [], program, crashes, seed, happens, [chance.randint(-1, 3)] * 4, cluster))
    losses = {chance.randint(0, 200): chance.randint(0, 3) for _ in range(3)}
    breaks = {chance.randint(0, 200): chance.randint(0, 2) for _ in range(2)}
    rates = chance.choice([(1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)])
    few = min(world, 3)
    spread = sharded(Sharded, few, sizes, program, seed, rates, losses, crashes[:3], breaks, out_of_data)
    spread.run()
    nothing_was_lost(spread, few)
    each_is_one_section(spread)


def test_a_member_behind_lacks_nothing_at_a_shard_without_a_part_of_the_section() -> None:
    """Test one that has heard the end of the round, and one that has not; the coordinator alone has what they hold."""
    cluster = sharded(Sharded, 2, [[3], [1]], [Step(section=1)], 0, (1.0, 1.0, 1.0), {0: 0}, [], {}, {})
    cluster.run()

    nothing_was_lost(cluster, 2)
    each_is_one_section(cluster)
