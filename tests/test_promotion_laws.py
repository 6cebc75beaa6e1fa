"""The laws of learners that become members of a durable group. Processes may be lost between any two commands.

A worker joins, catches up and is promoted at the end of a round. The coordinator, a data shard or connections are lost
meanwhile, most of all just behind a record of it: an `Entered`, an `Epoch`, a `Boundary`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.commands import Command, Record
from gradserver.engine.declared import Kind as RecordKind
from gradserver.engine.records import Boundary, Entered, Epoch, Round
from gradserver.protocol.exchange import Kind
from tests.crash_harness import Trap
from tests.elastic_harness import Step
from tests.examples import examples
from tests.sharded_join_harness import Joinable, Latecomer
from tests.test_engine_crash_laws import answers
from tests.test_shard_laws import RATES, small_shares
from tests.test_sharded_crash_laws import (
    boundaries_are_the_same_for_all,
    nobody_was_left_out,
    one_then_other,
    plan_joins,
    plan_losses,
)

ALONE = (1.0,)
"""Rates of a coordinator without further data shards."""


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shares():
        yield


class Course(NamedTuple):
    """The parameters of a run."""

    world: int
    buckets: list[int]
    program: list[Step]
    joins: list[int]
    traps: list[Trap]
    fuses: list[int]
    kills: dict[int, int]
    breaks: dict[int, int]
    seed: int
    deaths: dict[int, int]


class Promoting(Joinable):
    """A group with members that read all, nothing or some of what is on its way when a connection ends."""

    def read_before(self, count: int) -> int:
        return self.random.choice([0, count, self.random.randint(0, count)])

    def die(self, which: int) -> None:
        """Let a member die, unless it is the last. Each process that it is connected to notices sooner or later."""
        if len(self.members) < 2:
            return
        member_id = sorted(self.members)[which % len(self.members)]
        member = self.gone[member_id] = self.members.pop(member_id)
        for place, line in member.lines.items():
            self.harness.waiting.pop(line, None)
            self.notices.append(partial(self.tell_of_end, self.process_at(member, place), line, "it died"))
        member.lines = {}


steps = st.one_of(st.just(Step()), st.just(Step()), st.builds(Step, st.just(Kind.ALL_REDUCE), st.integers(1, 10)))
traps = st.builds(Trap, st.sampled_from([Boundary, Epoch, Entered]), st.integers(0, 9))
member_ids = st.integers(0, 2)
nothing: st.SearchStrategy[dict[int, int]] = st.just({})
losses = st.dictionaries(st.integers(0, 150), st.integers(0, 3), max_size=2)


def courses(
    kills: st.SearchStrategy[dict[int, int]], deaths: st.SearchStrategy[dict[int, int]] = nothing
) -> st.SearchStrategy[Course]:
    return st.builds(
        Course,
        world=st.integers(1, 3),
        buckets=st.lists(st.integers(1, 9), min_size=1, max_size=2),
        program=st.lists(steps, min_size=5, max_size=9),
        joins=st.lists(st.integers(0, 40), min_size=1, max_size=2),
        traps=st.lists(traps, max_size=4),
        fuses=st.lists(st.integers(0, 60), max_size=2),
        kills=kills,
        breaks=st.dictionaries(st.integers(0, 120), member_ids, max_size=2),
        seed=st.integers(0, 2**20),
        deaths=deaths,
    )


def course_of(seed: int, *, shards: bool) -> Course:
    """Return a course that ``seed`` decides."""
    chance = random.Random(seed)
    return Course(
        world=chance.randint(1, 3),
        buckets=[chance.randint(1, 9) for _ in range(chance.randint(1, 2))],
        program=[chance.choice((Step(), Step(), Step(Kind.ALL_REDUCE, 7))) for _ in range(chance.randint(5, 9))],
        joins=[chance.randint(0, 40) for _ in range(chance.randint(1, 2))],
        traps=[
            Trap(chance.choice((Boundary, Epoch, Entered)), chance.randint(0, 9)) for _ in range(chance.randint(0, 4))
        ],
        fuses=[chance.randint(0, 60) for _ in range(chance.randint(0, 1))],
        kills={chance.randint(0, 150): chance.randint(0, 3) for _ in range(chance.randint(0, 2) * shards)},
        breaks={chance.randint(0, 120): chance.randint(0, 2) for _ in range(chance.randint(0, 1))},
        seed=seed,
        deaths={},
    )


Plant = Callable[[list[Command]], list[Command]]


def run(
    course: Course, rates: tuple[float, ...] = ALONE, plant: Plant | None = None, sections: tuple[int, ...] = ()
) -> Joinable:
    cluster = Promoting(course.world, course.buckets, course.program, course.seed, rates, sections)
    plan_losses(cluster, course.kills, course.fuses, course.breaks)
    plan_joins(cluster, course.joins)
    for step, which in course.deaths.items():
        cluster.at[step] = partial(one_then_other, cluster.at.get(step, lambda: None), partial(cluster.die, which))
    cluster.harness.traps = list(course.traps)
    cluster.harness.plant = plant or cluster.harness.plant
    cluster.run()
    return cluster


@given(courses(nothing))
@settings(max_examples=examples(40))
def test_a_coordinator_that_is_lost_during_a_promotion_costs_no_member_anything(course: Course) -> None:
    nobody_was_left_out(run(course))


@given(courses(losses), st.sampled_from(RATES))
@settings(max_examples=examples(20))
def test_a_data_shard_that_is_lost_during_a_promotion_costs_no_member_anything(
    course: Course, rates: tuple[float, ...]
) -> None:
    nobody_was_left_out(run(course, rates))


def who_joins_mixes_no_sections_in_run(seed: int) -> None:
    """Run with three modules that share the group."""
    chance = random.Random(seed)
    program = [Step(section=chance.randint(0, 2)) for _ in range(chance.randint(5, 9))]
    course = course_of(seed, shards=True)._replace(program=program, buckets=[chance.randint(1, 9) for _ in range(3)])
    cluster = run(course, (ALONE, *RATES)[seed % (len(RATES) + 1)], sections=(1, 1, 1))
    nobody_was_left_out(cluster)
    for number in range(len(program)):
        cluster.exchanged_in(number)


@pytest.mark.parametrize("seed", [22])
def test_a_contributor_is_a_member_also_if_nothing_is_written_after_the_round(seed: int) -> None:
    promotions_cost_nothing_in_run(seed)


@given(courses(losses, losses), st.sampled_from([ALONE, *RATES]))
@settings(max_examples=examples(20))
def test_members_that_die_meanwhile_cost_the_others_no_round_and_all_get_the_same(
    course: Course, rates: tuple[float, ...]
) -> None:
    program = [Step()] * len(course.program)  # what becomes of collectives depends on when a member dies
    those_left_have_the_same(run(course._replace(program=program), rates))


def those_left_have_the_same(cluster: Joinable) -> None:
    """Check that all remaining members have finished, with the exact mean of their gradients and some others'."""
    assert all(member.finished for member in cluster.members.values()), "a member waits"
    for (key, index), got in answers(cluster).items():
        (outcome,) = set(got.values())
        pushed = cluster.pushed[key, index]
        operation = next(iter(pushed.values())).operation
        gone = [member_id for member_id in pushed if member_id in cluster.gone]
        some = [set(lost) for count in range(len(gone) + 1) for lost in combinations(gone, count)]
        counted = [{member_id: task for member_id, task in pushed.items() if member_id not in lost} for lost in some]
        assert outcome in [cluster.outcome(those, index, operation) for those in counted]
    assert sorted(set(cluster.rounds())) == list(range(len(cluster.program)))
    boundaries_are_the_same_for_all(cluster)


@pytest.mark.long
@pytest.mark.timeout(600)  # it computes all that time, and others may beside it
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_promotions_cost_no_member_anything(part: int) -> None:
    for seed in range(300 * part, 300 * (part + 1)):
        promotions_cost_nothing_in_run(seed)
        who_joins_mixes_no_sections_in_run(seed)


def promotions_cost_nothing_in_run(seed: int) -> int:
    """Return how many became members."""
    promoted = 0
    for rates in (ALONE, RATES[seed % len(RATES)]):
        cluster = run(course_of(seed, shards=rates != ALONE), rates)
        nobody_was_left_out(cluster)
        promoted += sum(isinstance(member, Latecomer) for member in cluster.members.values())
    return promoted


# ── the laws find these faults ────────────────────────────────────────────────────────────────────────


def _is(command: Command, *kinds: type[RecordKind]) -> bool:
    return isinstance(command, Record) and isinstance(command.record, kinds)


def _boundary_before_round(commands: list[Command]) -> list[Command]:
    if not any(_is(command, Round) for command in commands):
        return commands
    return sorted(commands, key=lambda command: not _is(command, Boundary))


def _written_behind(commands: list[Command]) -> list[Command]:
    return sorted(commands, key=lambda command: isinstance(command, Record))


def _never_written(kind: type[RecordKind]) -> Plant:
    return lambda commands: [command for command in commands if not _is(command, kind)]


FAULTS: dict[str, Plant] = {
    "the boundary is written before its round": _boundary_before_round,
    "all is told before it is written": _written_behind,
    "no boundary is written": _never_written(Boundary),
    "no member is written down as entered": _never_written(Entered),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_is_written_of_a_promotion_is_found(fault: str) -> None:
    assert any(breaks_a_law(course_of(seed, shards=False), FAULTS[fault]) for seed in range(80))


def breaks_a_law(course: Course, plant: Plant) -> bool:
    try:
        nobody_was_left_out(run(course, plant=plant))
    except AssertionError:
        return True
    return False
