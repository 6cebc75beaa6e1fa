"""The laws of durable groups with all of the workers' real code: any process is lost at any time.

The coordinator and its data shards are lost between any two commands, connections break between any two messages, and
workers die, join and return. `tests.session_group` has the laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.control.registry import Registry
from gradserver.engine.policy import Lateness, Policy
from gradserver.engine.records import Boundary, Entered, Epoch
from gradserver.protocol.exchange import Stream
from gradserver.worker.clock import Clock
from gradserver.worker.session import Session
from gradserver.worker.transport import rejoining
from tests.crash_harness import Trap
from tests.examples import examples
from tests.fibers import Scheduler, driving
from tests.session_group import COLLECTIVES, MAY_BE_LOST, Act, Group, LateGroup
from tests.session_scripts import (
    Happenings,
    check,
    hold,
    script,
    script_of_fixed_groups,
    script_of_halts,
    script_of_parts,
    script_of_promotions,
    script_of_slow_ways,
)
from tests.session_world import SLICE

pytestmark = pytest.mark.usefixtures("session_code")

ROUND = Act()
worlds = st.integers(1, 4)
buckets = st.lists(st.integers(1, 40), min_size=1, max_size=3)
modules = st.lists(buckets, min_size=1, max_size=2)
rounds = st.lists(st.just(ROUND), min_size=1, max_size=5)
collectives = st.builds(Act, st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 20), st.integers(0, 3))
programs = st.lists(st.one_of(st.just(ROUND), collectives), min_size=1, max_size=8)
portions = st.lists(
    st.builds(Act, st.sampled_from(sorted(MAY_BE_LOST)), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=6
)
"""Collectives with bytes of its own for each member."""
more_modules = st.lists(buckets, min_size=1, max_size=3)
fuses = st.lists(st.integers(0, 80), max_size=4)
many_fuses = st.lists(st.integers(0, 40), max_size=8)
few_fuses = st.lists(st.integers(0, 60), max_size=2)
traps = st.lists(st.builds(Trap, st.sampled_from([Boundary, Entered, Epoch]), st.integers(0, 9)), max_size=4)
"""Losses of a process that carries out what a promotion is written with, or what follows."""
many_rates = st.sampled_from([(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)])
sharded = many_rates.filter(lambda rates: len(rates) > 1)
seeds = st.integers(0, 2**20)
latenesses = st.one_of(
    st.builds(Lateness, quorum=st.integers(1, 3), keeps=st.booleans()),
    st.builds(Lateness, percent=st.sampled_from([30.0, 60.0, 100.0]), keeps=st.booleans()),
    st.builds(Lateness, backup=st.integers(1, 2), grace=st.just(0.0), keeps=st.booleans()),
)
preemptions = st.sampled_from([0.0, 0.0, 0.05])
joins = st.dictionaries(st.integers(0, 400), st.lists(st.integers(0, 3), min_size=1, max_size=1), max_size=3)
early = st.dictionaries(st.integers(0, 60), st.lists(st.integers(0, 3), min_size=1, max_size=1), min_size=1, max_size=2)
happenings = st.dictionaries(st.integers(0, 600), st.lists(st.integers(0, 3), min_size=1, max_size=1), max_size=4)


def rounds_of(count: int) -> st.SearchStrategy[Act]:
    """Return a strategy of rounds of one of so many modules."""
    return st.builds(Act, st.just("round"), section=st.integers(0, count - 1))


@given(worlds, buckets, rounds, many_fuses, happenings, seeds, preemptions)
@example(3, [5, 11], [ROUND, ROUND, ROUND], [51], {}, 200343, 0.05)  # it is lost while a member begins to leave
@settings(max_examples=examples(18))
def test_lost_coordinators_and_connections_cost_no_member_anything(
    world: int, sizes: list[int], program: list[Act], crashes: list[int], breaks: Happenings, seed: int, chance: float
) -> None:
    group = Group(world, [sizes], program, seed, (1.0,), crashes, preemption=chance)
    hold(group, (breaks, group.break_line))


@given(worlds, buckets, rounds, fuses, happenings, happenings, sharded, seeds, preemptions)
@example(3, [25, 17, 1], [ROUND, ROUND], [44, 57, 53], {}, {}, (0.0, 1.0), 57, 0.05)  # leaves before shards are back
@settings(max_examples=examples(18))
def test_lost_data_shards_cost_no_member_anything(
    world: int,
    sizes: list[int],
    program: list[Act],
    crashes: list[int],
    breaks: Happenings,
    losses: Happenings,
    rates: tuple[float, ...],
    seed: int,
    chance: float,
) -> None:
    group = Group(world, [sizes], program, seed, rates, crashes, preemption=chance)
    hold(group, (breaks, group.break_line), (losses, group.world.kill_any_shard))


@given(worlds, buckets, rounds, fuses, happenings, happenings, many_rates, seeds)
@example(2, [8], [ROUND], [], {2: [1]}, {10: [0]}, (1.0,), 1)  # the only one dies that has the results of the round
@settings(max_examples=examples(18))
def test_members_that_are_left_lose_no_round_and_hold_the_same(
    world: int,
    sizes: list[int],
    program: list[Act],
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = Group(world, [sizes], program, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (deaths, group.kill))


@given(worlds, buckets, programs, fuses, happenings, happenings, many_rates, seeds)
@example(3, [25], [ROUND, ROUND], [41], {}, {103: [0]}, (0.0, 1.0), 1)  # one member had heard the round's end before
@example(3, [1], [Act("max", 9), *5 * [ROUND]], [], {}, {0: [2]}, (1.0,), 1)  # one of the dead one's two slices counts
@settings(max_examples=examples(20))
def test_collectives_end_the_same_for_all_or_say_why_not(
    world: int,
    sizes: list[int],
    program: list[Act],
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = Group(world, [sizes], program, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (deaths, group.kill))


@given(st.integers(2, 4), portions, fuses, happenings, happenings, happenings, sharded, seeds, preemptions)
@settings(max_examples=examples(15))
def test_what_is_another_for_each_member_comes_from_all_shards_or_from_none(
    world: int,
    program: list[Act],
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    losses: Happenings,
    rates: tuple[float, ...],
    seed: int,
    chance: float,
) -> None:
    group = Group(world, [[9]], [*program, ROUND], seed, rates, crashes, preemption=chance)
    hold(group, (breaks, group.break_line), (deaths, group.kill), (losses, group.world.kill_any_shard))


@given(worlds, modules, st.data(), fuses, happenings, happenings, many_rates, seeds)
@settings(max_examples=examples(15))
def test_groups_of_several_modules_lose_no_round(
    world: int,
    sizes: list[list[int]],
    data: st.DataObject,
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    program = data.draw(st.lists(rounds_of(len(sizes)), min_size=1, max_size=6))
    group = Group(world, sizes, program, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (deaths, group.kill))


@given(worlds, modules, st.data(), fuses, happenings, happenings, joins, many_rates, seeds)
@settings(max_examples=examples(12))
def test_workers_that_join_while_all_else_is_lost_hold_what_members_hold(
    world: int,
    sizes: list[list[int]],
    data: st.DataObject,
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    learners: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    program = data.draw(st.lists(st.one_of(rounds_of(len(sizes)), collectives), min_size=1, max_size=4))
    group = Group(world, sizes, program + [ROUND] * 5, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (deaths, group.kill), (learners, group.join))


@pytest.mark.parametrize(
    ("world", "sizes", "program", "crashes", "breaks", "deaths", "learners", "rates", "seed"),
    [
        pytest.param(
            *(2, [[19, 30, 35], [32, 33]], [Act("broadcast_object", 10, 2)], [32, 33]),
            *({289: [1], 532: [1], 495: [1], 226: [0]}, {128: [1], 180: [0], 600: [3], 256: [1]}, {181: [0]}),
            *((1.0,), 14150),
            id="a learner is lost in the round in which its seat's former member counted",
        ),
        pytest.param(
            *(4, [[29, 24, 15], [16, 22]], [ROUND, Act("scatter", 20, 3)], [18, 71, 35]),
            *({152: [1]}, {447: [1], 139: [2], 430: [1], 410: [0]}, {152: [1]}, (3.0, 0.5, 1.0), 7819),
            id="the same, at several shards",
        ),
        pytest.param(
            *(1, [[25, 37], [24, 12]], [ROUND], []),
            *({152: [1], 256: [2], 407: [1], 272: [1]}, {470: [2], 178: [3], 251: [0], 350: [0]}),
            *({0: [2], 178: [3], 251: [0]}, (1.0,), 0),
            id="a state comes when its learner is gone, and the next one in its seat, too",
        ),
        pytest.param(
            *(4, [[24]], [ROUND, Act("max", 2), ROUND, Act("max", 10, 3)], [16, 8, 79]),
            *({174: [0], 209: [0]}, {398: [2]}, {398: [2]}, (0.0, 1.0), 253),
            id="a connection breaks again and again, to a coordinator that answers",
        ),
        pytest.param(
            *(1, [[12], [35, 15, 10]], [Act("max", 3, 2), *[Act("broadcast", 11)] * 2, Act(section=1)], [28, 70, 76]),
            *({96: [3], 215: [1], 478: [3], 593: [2]}, {528: [0], 46: [3], 588: [0], 600: [2]}),
            *({154: [3], 116: [3], 321: [3]}, (1.0, 1.0, 1.0), 102562),
            id="a connection breaks when a learner's first round is complete, and not over",
        ),
        pytest.param(
            *(2, [[18, 17, 19]], [ROUND], [49, 15], {256: [3], 188: [0], 264: [3]}, {256: [3], 188: [0], 264: [3]}),
            *({256: [3], 188: [0], 264: [3]}, (1.0, 1.0), 341),
            id="a member is lost in a recovery, and all that waited for it has weight 0",
        ),
        pytest.param(
            *(4, [[33], [1]], [ROUND], [], {274: [3], 266: [1], 5: [3]}, {32: [2], 119: [1], 9: [2], 581: [3]}),
            *({274: [3], 266: [1], 5: [3]}, (0.0, 1.0), 4070),
            id="a member is lost in a recovery, and all others have said what they hold",
        ),
        pytest.param(
            *(4, [[13, 38]], [Act("all_gather", 3)], [13, 38]),
            *({439: [2], 582: [3], 251: [1], 512: [1]}, {439: [2], 582: [3], 251: [1], 512: [1]}),
            *({0: [2], 3: [0]}, (1.0, 1.0), 0),
            id="of all that founded the group none is left",
        ),
    ],
)
def test_whichever_worker_is_lost_when_others_join_all_laws_hold(
    world: int,
    sizes: list[list[int]],
    program: list[Act],
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    learners: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = Group(world, sizes, program + [ROUND] * 5, seed, rates, crashes)
    hold(group, (breaks, group.break_line), (deaths, group.kill), (learners, group.join))


@pytest.mark.parametrize("rates", [(1.0,), pytest.param((1.0, 1.0), marks=pytest.mark.long)], ids=["one shard", "two"])
@pytest.mark.parametrize("lost", ["the coordinator", "its connection", "another one's"])
def test_a_worker_that_is_about_to_join_does_so_again(
    lost: str, rates: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in, seen = rejoining.let_in, set[tuple[int, bool]]()

    def noted(session: Session, *arguments: Any) -> None:
        seen.add((len(session.member.plans.settled), session.learner.asked is not None))
        let_in(session, *arguments)

    monkeypatch.setattr(rejoining, "let_in", noted)
    for step in range(2, 50, 4):
        program, policy = [Act(section=number % 2) for number in range(8)], Policy(3, 8)
        group = Group(3, [[8], [20]], program, step, rates, policy=policy)
        losses = {
            "the coordinator": partial(group.world.lose_soon, 0),
            "its connection": partial(group.break_line, 2),
            "another one's": partial(group.break_line, 0),
        }
        group.world.at[1].append(partial(group.kill, 2))  # the others wait for another worker
        group.world.at[2].append(partial(group.join, step))
        group.world.at[2 + step].append(losses[lost])
        check(group)
        assert [node.name for node in group.nodes if node.finished and node.rank < 0] == ["w2"]
        assert group.uids == 4, "no process was started again"
    assert seen or lost == "another one's", "it had to join again"


@given(worlds, more_modules, st.data(), few_fuses, traps, early, happenings, happenings, many_rates, seeds)
@settings(max_examples=examples(10))
def test_what_is_lost_in_the_midst_of_a_promotion_costs_no_other_member_anything(
    world: int,
    sizes: list[list[int]],
    data: st.DataObject,
    crashes: list[int],
    behind: list[Trap],
    learners: Happenings,
    transfers: Happenings,
    losses: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    program = data.draw(st.lists(rounds_of(len(sizes)), min_size=5, max_size=9))
    group = Group(world, sizes, program, seed, rates, crashes)
    group.world.traps = behind
    hold(group, (learners, group.join), (transfers, group.lose_in_transfer), (losses, group.world.kill_any_shard))


def test_a_group_that_its_last_contributor_has_left_is_over_for_the_next_coordinator_though_none_wrote_so() -> None:
    group = Group(2, [[17, 36], [22, 35]], [ROUND] * 5, 0, (1.0,), [27, 20])
    group.world.traps = [Trap(Epoch, 9)]
    hold(group, ({19: [2], 28: [0]}, group.join))


@given(
    st.integers(1, 3), buckets, st.integers(2, 5), latenesses, fuses, happenings, happenings, joins, many_rates, seeds
)
@example(
    1, [29], 5, Lateness(quorum=1, keeps=True), [11], {42: [0], 281: [0], 282: [1]}, {}, {69: [0]}, (1.0, 1.0, 1.0), 2
)  # a learner may contribute from the next round on, and all connections break
@example(3, [1] * 3, 5, Lateness(quorum=1), [0, 6, 6], {}, {}, {0: [0], 1: [0], 2: [0]}, (1.0,), 0)  # many begin anew
@settings(max_examples=examples(15))
def test_groups_that_wait_for_some_count_each_gradient_once(
    world: int,
    sizes: list[int],
    count: int,
    lateness: Lateness,
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    learners: Happenings,
    rates: tuple[float, ...],
    seed: int,
) -> None:
    group = LateGroup(world, [sizes], [ROUND] * count, seed, rates, crashes, Policy(1, 8, lateness=lateness))
    hold(group, (breaks, group.break_line), (deaths, group.kill), (learners, group.join))


@pytest.mark.parametrize("seeds", [(0, 4), pytest.param(range(12), marks=pytest.mark.long)], ids=["two", "all"])
@pytest.mark.parametrize("kind", ["all_to_all", "gather", "reduce_scatter", "scatter"])
def test_what_one_shard_has_answered_is_not_waited_for_at_another(kind: str, seeds: Sequence[int]) -> None:
    """Test a coordinator that is lost at each point of a collective with bytes of its own for each member.

    Each of the two seeds shows for every kind that the members which lack a part have to take part once more.
    """
    for fuse in range(8, 14):
        for seed in seeds:
            check(Group(3, [[9]], [Act(kind, 9), ROUND, ROUND], seed, (1.0, 1.0), [fuse]))


@pytest.mark.parametrize("step", [6, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["all_gather", "broadcast", "gather", "reduce_scatter", "sum"])
def test_a_collective_that_is_larger_than_the_credit_goes_on(
    kind: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test one of which members keep no results but the latest, in a coordinator that is lost at points all over it."""
    begin = Registry.__init__

    def begin_with_two_slices(self: Registry, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        self.credit = 2 * SLICE

    monkeypatch.setattr(Registry, "__init__", begin_with_two_slices)
    monkeypatch.setattr("gradserver.worker.member.retained.SLICE_BYTES", SLICE)
    for fuse in range(8, 48, step):
        for rates in ((1.0,), (1.0, 1.0)):
            group = Group(2, [[9]], [Act(kind, 60), ROUND], fuse, rates, [fuse])
            check(group)
            ends = [node.outcomes[0].error for node in group.nodes]
            assert not all(ends), f"{kind} fails at all, as if one could not take part once more: {ends}"


@pytest.mark.parametrize("kind", ["all_gather", "gather_object"])
def test_collectives_of_all_go_on_when_a_data_shard_was_replaced_twice(kind: str) -> None:
    """Test that the one that opens the group in its second recovery knows the membership."""
    group = Group(3, [[40]], [ROUND, ROUND, ROUND, Act(kind, 20), ROUND], 1, (1.0, 1.0))
    for step in (5, 150):
        group.world.at[step].append(partial(group.world.kill_any_shard, 0))
    group.run()
    group.check()
    assert all(node.outcomes[3].error is None for node in group.nodes)


@pytest.mark.parametrize(("rates", "seed"), [((1.0, 1.0), 6), ((0.0, 1.0), 1)])
def test_a_shard_that_is_replaced_knows_the_membership_without_a_learner_that_has_entered(
    rates: tuple[float, ...], seed: int
) -> None:
    """Test one that is lost in a collective before the learner's first round, in which the learner has no part."""
    group = Group(2, [[8]], [ROUND, ROUND, *[Act("gather", 19, 1), ROUND] * 5], seed, rates)
    world = group.world
    world.traps = [Trap(Entered, 1)]

    def lose_in_collective() -> None:
        groups = [group for mind in world.harness.minds.values() for group in mind.data.groups.values()]
        under_way = any(key.stream == Stream.COLLECTIVE for group in groups for key, _ in group.exchanges.items())
        if world.crashes and under_way:
            world.kill_any_shard(0)
        else:
            world.at[world.steps + 1].append(lose_in_collective)

    world.at[3] += [partial(group.join, 0), lose_in_collective]
    check(group)
    assert len(world.crashes) == 1
    assert len(world.losses) == 2


@pytest.mark.parametrize("seed", [1014, 1058])
def test_collectives_go_on_if_the_result_of_a_later_one_came_before_the_coordinator_was_lost(seed: int) -> None:
    check(script(seed))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_all_laws_hold_in_many_scripts(part: int) -> None:
    for seed in range(150 * part, 150 * (part + 1)):
        check(script(seed))


@pytest.mark.parametrize(
    ("rates", "fuse", "step", "seed"),
    [((1.0,), 7, 13, 49), ((1.0,), 3, 21, 18), ((1.0, 1.0), 11, 11, 9), ((1.0, 1.0), 6, 21, 13)],
)
def test_a_late_member_that_is_left_alone_ends_its_round_whichever_module_it_is_of(
    rates: tuple[float, ...], fuse: int, step: int, seed: int
) -> None:
    policy = Policy(1, 8, lateness=Lateness(quorum=1, grace=0.0))
    group = LateGroup(2, [[8], [20]], [Act(section=1), ROUND], seed, rates, [fuse], policy)
    group.world.at[step].append(partial(group.kill, 1))
    group.run()
    group.check()


@pytest.mark.parametrize("seed", [1505, 9000041, 9000111])
def test_a_donor_goes_on_when_its_learner_is_lost_behind_the_first_slice_of_a_part(seed: int) -> None:
    check(script_of_promotions(seed))


@pytest.mark.parametrize("seed", [2145])
def test_a_shard_without_a_push_of_a_closed_round_knows_its_module(seed: int) -> None:
    check(script_of_promotions(seed))


@pytest.mark.parametrize("seed", [7511])
def test_a_member_that_lacks_a_round_is_left_out_if_no_member_knows_its_module(seed: int) -> None:
    check(script_of_slow_ways(seed))


@pytest.mark.parametrize("seed", [30145])
def test_a_member_gets_the_results_of_a_round_before_its_first_one_that_is_done_again(seed: int) -> None:
    check(script_of_promotions(seed))


@pytest.mark.parametrize("seed", [5538])
def test_a_member_may_die_while_it_leaves_last(seed: int) -> None:
    check(script_of_slow_ways(seed))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_promotions_keep_all_laws_in_many_scripts(part: int) -> None:
    for seed in range(150 * part, 150 * (part + 1)):
        check(script_of_promotions(seed))


def few_or_long(*few: int, parts: int) -> list[Any]:
    """Return a few seeds for the usual tests, and parts of many for the long ones."""
    many = [range(150 * part, 150 * (part + 1)) for part in range(parts)]
    long = [pytest.param(each, marks=pytest.mark.long, id=f"from {each.start}") for each in many]
    return [pytest.param(few, id="few"), *long]


@pytest.mark.parametrize("seeds", few_or_long(*range(5), parts=6))
def test_all_laws_hold_where_some_messages_are_on_their_way_for_long(seeds: Sequence[int]) -> None:
    for seed in seeds:
        check(script_of_slow_ways(seed))


@pytest.mark.parametrize("seeds", few_or_long(8, 14, 38, parts=4))
def test_a_group_halts_at_all_members_or_at_none(seeds: Sequence[int]) -> None:
    """Test groups in which a data shard finds NaN, and something is lost before the coordinator hears of it."""
    for seed in seeds:
        check(script_of_halts(seed))


@pytest.mark.parametrize("seeds", few_or_long(1, 47, parts=4))
def test_a_group_that_needs_all_its_members_ends_alike_for_all_or_goes_on(seeds: Sequence[int]) -> None:
    """Test groups with as many members at least as at most. One loses its coordinator between two records."""
    for seed in seeds:
        check(script_of_fixed_groups(seed))


@pytest.mark.long
@pytest.mark.parametrize("part", range(5))
def test_what_is_another_for_each_member_keeps_all_laws_in_many_scripts(part: int) -> None:
    for seed in range(150 * part, 150 * (part + 1)):
        check(script_of_parts(seed))


@pytest.mark.parametrize("seed", range(10))
def test_no_connection_that_breaks_stops_the_clock_of_a_member_that_leaves(seed: int) -> None:
    chance = Random(seed)
    scheduler = Scheduler(chance, preemption=0.5)
    with driving(scheduler):
        clock = Clock()
        for body in (clock.run_on, clock.stop):
            scheduler.spawn(body)
        while fibers := scheduler.runnable():
            scheduler.resume(chance.choice(fibers))
        assert clock.runs
