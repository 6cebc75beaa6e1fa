"""The laws of durable groups with data shards: any process is lost between any two commands, the coordinator too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.events import Received
from gradserver.protocol.exchange import Kind
from gradserver.protocol.messages import Attend, Join, Leave, Welcome
from tests.elastic_harness import Step
from tests.engine_harness import TIMEOUT
from tests.examples import examples
from tests.sharded_crash_harness import Sharded, Spread, Waiting
from tests.sharded_join_harness import Joinable, Latecomer
from tests.test_engine_crash_laws import answers, nothing_was_lost
from tests.test_shard_laws import many_rates, small_shares


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shares():
        yield


kinds = st.sampled_from([Kind.ALL_REDUCE, Kind.BARRIER])
N, A = Step(), Step(Kind.ALL_REDUCE, 1)
steps = st.one_of(st.just(Step()), st.builds(Step, kinds, st.integers(1, 10)))
programs = st.lists(steps, min_size=1, max_size=5)
sizes = st.lists(st.integers(1, 14), min_size=1, max_size=3)
worlds = st.integers(1, 3)
fuses = st.lists(st.integers(0, 80), max_size=5)
seeds = st.integers(0, 2**20)
kills = st.dictionaries(st.integers(0, 200), st.integers(0, 3), max_size=4)
breaks = st.dictionaries(st.integers(0, 200), st.integers(0, 2), max_size=3)


def run(
    world: int,
    buckets: list[int],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    breaks: dict[int, int] | None = None,
) -> Sharded:
    cluster = Sharded(world, buckets, program, seed, rates)
    plan_losses(cluster, kills, crashes, breaks or {})
    cluster.run()
    return cluster


def plan_losses(cluster: Sharded, kills: dict[int, int], crashes: list[int], breaks: dict[int, int]) -> None:
    """Plan losses of coordinators, shards and connections at these steps; where both are due, the shard is lost."""
    cluster.fuses = list(crashes)
    for step, member_id in breaks.items():
        cluster.at[step] = partial(cluster.break_line, member_id)
    for step, which in kills.items():
        cluster.at[step] = partial(cluster.kill_any, which)


@given(worlds, sizes, programs, seeds, many_rates, kills, fuses, breaks)
@example(1, [1], [N, A, A, N, N], 9134, (3.0, 0.5, 1.0), {}, [7], {})  # a shard without a slice says late that it is up
@settings(max_examples=examples(30))
def test_a_shard_or_a_coordinator_that_is_lost_at_any_point_costs_no_member_anything(
    world: int,
    buckets: list[int],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    breaks: dict[int, int],
) -> None:
    nothing_was_lost(run(world, buckets, program, seed, rates, kills, crashes, breaks), world)


@pytest.mark.long
@pytest.mark.timeout(600)  # it computes all that time, and others may beside it
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_runs_lose_nothing(part: int) -> None:
    for seed in range(200 * part, 200 * (part + 1)):
        nothing_is_lost_in_run(seed)


@pytest.mark.parametrize("seed", [522])
def test_a_joiner_that_contributes_may_lose_its_connection_to_a_shard_first(seed: int) -> None:
    """Test a coordinator that has yet to write that it is a member. It resumes its session all the same."""
    nothing_is_lost_in_run(seed)


def nothing_is_lost_in_run(seed: int) -> None:
    chance = random.Random(seed)
    world, buckets = chance.randint(1, 3), [chance.randint(1, 14) for _ in range(chance.randint(1, 3))]
    program = [chance.choice((Step(), Step(), Step(Kind.ALL_REDUCE, 7))) for _ in range(chance.randint(1, 5))]
    kills = {chance.randint(0, 200): chance.randint(0, 3) for _ in range(3)}
    crashes = [chance.randint(0, 100) for _ in range(chance.randint(0, 4))]
    breaks = {chance.randint(0, 200): chance.randint(0, 2) for _ in range(2)}
    rates = chance.choice([(1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)])
    nothing_was_lost(run(world, buckets, program, seed, rates, kills, crashes, breaks), world)
    if seed % 3 == 0:
        program += [Step()] * 3
        joins = [chance.randint(0, 250) for _ in range(chance.randint(1, 3))]
        nobody_was_left_out(run_and_join(world, buckets, program, seed, rates, kills, crashes[:2], breaks, joins))


@pytest.mark.parametrize("then", ["it is told again", "the shard is lost again"])
def test_a_round_that_is_done_again_is_over_when_the_coordinator_says_so_again(then: str) -> None:
    """Test that results are lost with the shard, and made again: the member waits for that round's end once more."""
    cluster = Sharded(1, [4, 4], [Step(), Step(section=1), Step()], 0, (0.0, 1.0), sections=(1, 1))
    (member,) = cluster.members.values()
    give_all(cluster, member)
    let_shards_report(cluster)
    assert cluster.harness.waiting[member.lines[0]], "the coordinator says that the round is over"
    while cluster.harness.waiting[member.lines[0]]:
        cluster.read_line(member, 0)
    come_back(cluster, member, (0, 1))
    cluster.settle()
    give_all(cluster, member)
    while cluster.harness.waiting[member.lines[1]]:
        cluster.read_line(member, 1)
    assert all(task.done for task in member.tasks)
    assert member.round == 0, "it goes on before it is told again that the round is over"
    if then == "the shard is lost again":
        cluster.kill_any(0)
    cluster.run()

    nothing_was_lost(cluster, 1)


def let_shards_report(cluster: Sharded) -> None:
    """Deliver all that shards have said to the coordinator."""
    for process in cluster.harness.minds:
        while cluster.harness.up[process]:
            cluster.harness.pass_up(process)


def come_back(cluster: Sharded, member: Spread, places: Sequence[int]) -> None:
    """Let the first member lose its connections, resume, and say at ``places`` what it holds."""
    cluster.break_line(0, False)
    cluster.resume(member)
    cluster.settle()
    for place in places:
        cluster.hold_at(member, place)


def give_all(cluster: Sharded, member: Spread) -> None:
    """Push all that it can, and reduce that. No member has heard of the results."""
    while pushable := member.pushable():
        cluster.push_at(member, *pushable[0])
    while cluster.harness.reduces:
        cluster.reduce(cluster.harness.reduces[0])


# ── workers that join while books are open ────────────────────────────────────────────────────────────


joins = st.lists(st.integers(0, 250), min_size=1, max_size=3)
long_programs = st.lists(st.one_of(st.just(Step()), st.just(Step()), st.just(Step()), steps), min_size=3, max_size=9)


def run_and_join(
    world: int,
    buckets: list[int],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    breaks: dict[int, int],
    joins: list[int],
) -> Joinable:
    """Run as `run`, with workers that join in the same steps."""
    cluster = Joinable(world, buckets, program, seed, rates)
    plan_losses(cluster, kills, crashes, breaks)
    plan_joins(cluster, joins)
    cluster.run()
    return cluster


def plan_joins(cluster: Joinable, joins: list[int]) -> None:
    """Plan a join in each of these steps, after what else happens there."""
    for step in joins:
        cluster.at[step] = partial(one_then_other, cluster.at.get(step, lambda: None), cluster.join)


def one_then_other(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Do both in the same step."""
    one()
    other()


def nobody_was_left_out(cluster: Joinable) -> None:
    """Check that each member has finished, with the exact results of those that counted; each round was written."""
    assert cluster.gone == {}, "a member was left out"
    assert all(member.finished for member in cluster.members.values()), "a member waits"
    for member in cluster.members.values():
        assert not any(task.error for task in member.history)
    for (key, index), got in answers(cluster).items():
        task = next(task for member in cluster.members.values() for task in member.history if task.key == key)
        assert set(got.values()) == {cluster.expected(key, index, task.operation)}
    written = cluster.rounds()
    assert sorted(set(written)) == list(range(sum(step.kind is None for step in cluster.program)))
    boundaries_are_the_same_for_all(cluster)
    cluster.check_records()


def boundaries_are_the_same_for_all(cluster: Joinable) -> None:
    """Check that after each round all that contributed to it have the same epoch and members."""
    found: dict[int, set[tuple[int, tuple[int, ...]]]] = {}
    for member in cluster.members.values():
        first = member.first if isinstance(member, Latecomer) else 0
        for number, boundary in member.boundaries.items():
            if number >= first:
                found.setdefault(number, set()).add(boundary)
    assert all(len(alike) == 1 for alike in found.values()), found


@given(worlds, sizes, long_programs, seeds, many_rates, kills, fuses, breaks, joins)
@settings(max_examples=examples(8))
def test_joins_while_shards_and_coordinators_are_lost_cost_no_member_anything(
    world: int,
    buckets: list[int],
    program: list[Step],
    seed: int,
    rates: tuple[float, ...],
    kills: dict[int, int],
    crashes: list[int],
    breaks: dict[int, int],
    joins: list[int],
) -> None:
    nobody_was_left_out(run_and_join(world, buckets, program, seed, rates, kills, crashes, breaks, joins))


def test_a_learner_hears_of_no_membership_in_which_it_was_not() -> None:
    """Test one that is a member before all shards have heeded that another one is."""
    program = [Step(Kind.ALL_REDUCE, 7), Step(), Step(), Step(), Step(), Step(), Step(), Step()]
    nobody_was_left_out(run_and_join(3, [4], program, 120, (1.0, 1.0, 1.0), {}, [], {189: 0, 240: 0}, [172, 81, 76]))


def say_of(cluster: Sharded, line: int) -> list[str]:
    """Return what has come on a connection, by its kinds."""
    return [type(message).__name__ for message, _ in cluster.harness.waiting.pop(line, ())]


def let_in(cluster: Sharded) -> tuple[int, list[int]]:
    """Let a worker join and attend both shards. Return its connections to the coordinator and to them."""
    harness = cluster.harness
    line = harness.number()
    harness.feed(Received(line, Join("default", "late", -1, 0, TIMEOUT)))
    cluster.settle()
    ((welcome, _),) = harness.waiting.pop(line)
    assert isinstance(welcome, Welcome)
    attend = Attend("default", welcome.epoch, welcome.member_ids[welcome.rank], welcome.token)
    lines = []
    for url in welcome.shards:
        lines.append(harness.number())
        harness.feed_at(int(url.rpartition(":")[2]), Received(lines[-1], attend))
    return line, lines


@pytest.mark.parametrize("first", ["the books", "the joiner"])
def test_a_learner_is_not_asked_what_it_holds(first: str) -> None:
    cluster = Sharded(2, [8], [Step()], 0, (1.0, 1.0, 1.0))
    lines: list[int] = []
    if first == "the joiner":
        _, lines = let_in(cluster)
    cluster.break_line(0, False)
    cluster.resume(cluster.members[0])
    cluster.settle()
    if first == "the books":
        _, lines = let_in(cluster)

    assert [say_of(cluster, line) for line in lines] == [["Attended"], ["Attended"]]
    assert not cluster.members[0].stands, "the members are"


@pytest.mark.parametrize("first", [0, 1])
def test_a_learner_that_leaves_in_a_recovery_sets_no_member_back(first: int) -> None:
    """Test that a shard begins no recovery anew: it would say again where that began, when the round is over."""
    cluster = Joinable(1, [1], [Step()] * 6, 0, (0.0, 1.0, 1.0))
    harness, (member,) = cluster.harness, cluster.members.values()
    line, _ = let_in(cluster)
    give_all(cluster, member)
    for place in (1, 2):
        while harness.waiting[member.lines[place]]:
            cluster.read_line(member, place)
    come_back(cluster, member, (0, 1, 2))
    harness.feed(Received(line, Leave("it has changed its mind")))
    shards = sorted(harness.minds, reverse=bool(first))
    for shard in shards:
        pass_all(harness.pass_up, harness.up[shard], shard)
    for shard in shards:
        pass_all(harness.pass_down, harness.down[shard], shard)
        pass_all(harness.pass_up, harness.up[shard], shard)

    assert round_of(cluster) == 1, "the coordinator is in a round that is over"
    cluster.join()
    cluster.run()
    nobody_was_left_out(cluster)


def pass_all(pass_one: Callable[[int], object], waiting: Waiting, shard: int) -> None:
    """Deliver all that waits on the way to or from a shard."""
    while waiting:
        pass_one(shard)


def round_of(cluster: Sharded) -> object:
    """Return the open round, as the coordinator shows it."""
    groups = cluster.harness.engine.snapshot(cluster.harness.now)["groups"]
    assert isinstance(groups, dict)
    return groups["default"]["round"]


@pytest.mark.parametrize("seed", range(3))
def test_a_contributor_is_a_member_for_the_next_coordinator_whatever_a_shard_has_yet_to_hear(seed: int) -> None:
    """Test a shard that does not know of another worker that joins, when the first round of this one is complete."""
    cluster = Joinable(1, [4], [Step()] * 8, seed, (1.0, 1.0))
    harness, (shard,) = cluster.harness, cluster.harness.minds
    cluster.join()
    (newcomer,) = cluster.waiting
    while not newcomer.inside:
        assert cluster.step()
    cluster.settle()
    cluster.join()
    for member in cluster.members.values():
        give_all(cluster, member)
    pass_all(harness.pass_up, harness.up[shard], shard)
    assert cluster.rounds()[-1] == newcomer.first, "its first round is written"
    cluster.crash()
    cluster.run()

    nobody_was_left_out(cluster)
