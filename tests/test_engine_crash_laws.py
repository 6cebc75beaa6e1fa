"""The laws of durable groups: coordinators are lost between any two commands, members and connections at any time.

`gradserver.protocol.messages.recovery` claims that nothing is lost which any present member has or needs. Here programs
are run while all of that happens, and the claim is compared with what members have in the end.

Members are models here. `tests.test_session_laws` drives the real ones in their place. These laws stay since they run
four to five times as many scripts a second: they look for faults of the engine alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.protocol.errors import (
    ConnectionLostError,
    DeadlineError,
    GradServerError,
    LeftOutError,
    MembershipChangedError,
    WorkerLostError,
)
from gradserver.protocol.exchange import PERSONAL, WORLD_BOUND, ExchangeKey, Kind, Stream
from tests.crash_harness import Crashing
from tests.elastic_harness import Step
from tests.engine_harness import Outcome, small_slices
from tests.examples import examples

SLICE = 16
"""Bytes of a slice in these tests: four elements of float32."""


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(SLICE):
        yield


_MAY_FAIL = (MembershipChangedError, ConnectionLostError, WorkerLostError)
rounds = st.lists(st.just(Step()), min_size=1, max_size=4)
kinds = st.sampled_from([Kind.ALL_REDUCE, Kind.BARRIER, Kind.BROADCAST, Kind.ALL_GATHER, Kind.TRANSFER])
collectives = st.builds(Step, kinds, st.integers(1, 10), st.integers(0, 4), st.integers(0, 4))
programs = st.lists(st.one_of(st.just(Step()), collectives), min_size=1, max_size=6)
personal = st.builds(Step, st.sampled_from(sorted(PERSONAL)), st.integers(1, 10), st.integers(0, 4))
"""Kinds with bytes of its own for each member: no other member has what is lost of these on its way."""
all_programs = st.lists(st.one_of(st.just(Step()), collectives, personal, personal), min_size=1, max_size=6)
sizes = st.lists(st.integers(1, 14), min_size=1, max_size=3)
worlds = st.integers(1, 4)
fuses = st.lists(st.integers(0, 40), min_size=1, max_size=8)
seeds = st.integers(0, 2**20)
member_ids = st.integers(0, 3)
happenings = st.dictionaries(
    st.integers(0, 120),
    st.tuples(member_ids, st.sampled_from(["dies", "breaks", "breaks unnoticed", "waits"])),
    max_size=5,
)


def run(
    world: int,
    buckets: list[int],
    program: list[Step],
    crashes: list[int],
    seed: int,
    happens: dict[int, tuple[int, str]] | None = None,
    along: list[int] | None = None,
    cluster: Crashing | None = None,
) -> Crashing:
    cluster = cluster or Crashing(world, buckets, program, seed, crashes)
    cluster.dies_along = along or []
    for step, (member_id, what) in (happens or {}).items():
        can: dict[str, Callable[[], object]] = {
            "dies": partial(cluster.remove, member_id),
            "breaks": partial(cluster.break_line, member_id),
            "breaks unnoticed": partial(cluster.break_line, member_id, False),
            "waits": partial(cluster.harness.wait, 0.3),
        }
        cluster.at[step] = can[what]
    cluster.run()
    return cluster


def answers(cluster: Crashing) -> dict[tuple[ExchangeKey, int], dict[int, Outcome]]:
    """Return what present members have got, by exchange, slice and member id."""
    found: dict[tuple[ExchangeKey, int], dict[int, Outcome]] = {}
    for member_id, member in cluster.members.items():
        for task in member.history:
            for index, outcome in task.answers.items():
                found.setdefault((task.key, index), {})[member_id] = outcome
    return found


@given(worlds, sizes, programs, fuses, seeds)
@settings(max_examples=examples(50))
def test_a_coordinator_that_is_lost_at_any_point_costs_no_member_anything(
    world: int, buckets: list[int], program: list[Step], crashes: list[int], seed: int
) -> None:
    nothing_was_lost(run(world, buckets, program, crashes, seed), world)


def nothing_was_lost(cluster: Crashing, world: int) -> None:
    """Check that all have the bits of an undisturbed run, and that each round was written."""
    assert len(cluster.members) == world, "a member was left out"
    assert all(member.finished for member in cluster.members.values()), "a member waits"
    for member in cluster.members.values():
        assert not any(task.error for task in member.history)
    for (key, index), got in answers(cluster).items():
        ends = {key.source, key.target} if key.stream == Stream.TRANSFER else set(range(world))
        assert set(got) == ends
        for member_id, outcome in got.items():
            task = next(task for task in cluster.members[member_id].history if task.key == key)
            weight, payload = cluster.expected(key, index, task.operation)
            payload = payload if cluster.members[member_id].gets(task) else None
            assert outcome == (weight, payload)
    written = cluster.rounds()
    assert sorted(set(written)) == list(range(sum(step.kind is None for step in cluster.program)))
    assert written == sorted(written)
    cluster.check_records()


@given(worlds, sizes, rounds, fuses, seeds, happenings, st.lists(st.integers(-1, 3), max_size=4))
@settings(max_examples=examples(75))
def test_after_deaths_and_cuts_the_remaining_members_hold_the_same_and_lose_no_round(
    world: int,
    buckets: list[int],
    program: list[Step],
    crashes: list[int],
    seed: int,
    happens: dict[int, tuple[int, str]],
    along: list[int],
) -> None:
    those_left_agree(run(world, buckets, program, crashes, seed, happens, along))


def those_left_agree(cluster: Crashing) -> None:
    """Check that all present members have finished, with equal results, and that each round was written."""
    if not cluster.members:
        return  # the last one had been left out, and heard of it when the others were dead
    assert all(member.finished for member in cluster.members.values()), "a member waits"
    count = sum(step.kind is None for step in cluster.program)
    found = answers(cluster)
    for number in range(count):
        for part in cluster.exchanged_in(number):
            for index in range(-(-cluster.buckets[part] // 4)):
                got = found[ExchangeKey(Stream.BUCKET, number, part), index]
                assert set(got) == set(cluster.members)
                assert len(set(got.values())) == 1, "members hold different results"
        assert len({member.boundaries[number] for member in cluster.members.values()}) == 1
    assert sorted(set(cluster.rounds())) == list(range(count))
    for member in cluster.gone.values():
        assert member.failure is None or isinstance(member.failure, LeftOutError)
    cluster.check_records()


@example(3, [9], [Step(), Step(Kind.GATHER, 1, 0)], [21], 0, {0: (0, "dies"), 12: (1, "breaks")}, [2])
@example(3, [9], [Step(), Step(Kind.SCATTER, 1, 0)], [21], 0, {0: (0, "dies"), 12: (1, "breaks")}, [2])
@example(  # a member has heard that the first scatter failed, and another begins it when the books were opened again
    4,
    [14],
    [
        Step(Kind.SCATTER, 5, 2),
        Step(Kind.TRANSFER, 4, 0, 1),
        Step(Kind.REDUCE_SCATTER, 6, 2),
        Step(Kind.SCATTER, 4, 3),
        Step(Kind.GATHER, 2, 2),
        Step(),
    ],
    [35, 36],
    835332,
    {
        27: (3, "breaks unnoticed"),
        26: (1, "breaks unnoticed"),
        64: (3, "breaks"),
        7: (1, "breaks unnoticed"),
        32: (0, "dies"),
    },
    [1, -1, 3, 2],
)
@given(worlds, sizes, all_programs, fuses, seeds, happenings, st.lists(st.integers(-1, 3), max_size=4))
@settings(max_examples=examples(60))
def test_collectives_end_the_same_for_all_or_say_why_not(
    world: int,
    buckets: list[int],
    program: list[Step],
    crashes: list[int],
    seed: int,
    happens: dict[int, tuple[int, str]],
    along: list[int],
) -> None:
    cluster = run(world, buckets, program, crashes, seed, happens, along)

    assert all(member.finished for member in cluster.members.values()), "a member waits"
    for (key, index), got in answers(cluster).items():
        payloads = {member_id: payload for member_id, (_, payload) in got.items() if payload is not None}
        operation = next(iter(cluster.pushed[key, index].values())).operation
        if operation.kind in WORLD_BOUND:
            assert all(found == cluster.portion(member_id, key, index) for member_id, found in payloads.items()), key
        if operation.kind not in PERSONAL:
            assert len(set(payloads.values())) <= 1, key
    for member in cluster.members.values():
        for task in member.history:
            assert task.error is None or isinstance(task.error, _MAY_FAIL) or waited_for_the_dead(cluster, task.error)
    cluster.check_records()


def waited_for_the_dead(cluster: Crashing, error: GradServerError) -> bool:
    """Return whether a wait ran out for members that died after their connections had broken unnoticed."""
    dead = {f"'w{member_id}'" for member_id in cluster.gone}
    return isinstance(error, DeadlineError) and {who.split()[0] for who in error.missing} <= dead


@given(worlds, sizes, rounds, seeds, st.dictionaries(st.integers(0, 80), member_ids, max_size=6), st.booleans())
@settings(max_examples=examples(40))
def test_connections_that_break_cost_no_member_anything(
    world: int, buckets: list[int], program: list[Step], seed: int, breaks: dict[int, int], noticed: bool
) -> None:
    what = "breaks" if noticed else "breaks unnoticed"
    cluster = run(world, buckets, program, [], seed, {step: (member_id, what) for step, member_id in breaks.items()})

    assert cluster.crashes == 0
    assert len(cluster.members) == world, "a member was left out"
    assert all(member.finished for member in cluster.members.values()), "a member waits"
    for (key, index), got in answers(cluster).items():
        operation = next(task.operation for task in cluster.members[0].history if task.key == key)
        assert set(got.values()) == {cluster.expected(key, index, operation)}


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_runs_lose_nothing(part: int) -> None:
    for seed in range(400 * part, 400 * (part + 1)):
        holds_in_run(seed)


def holds_in_run(seed: int) -> None:
    """Run programs with losses: in even runs members are lost, too."""
    chance = random.Random(seed)
    world, buckets = chance.randint(1, 4), [chance.randint(1, 14) for _ in range(chance.randint(1, 3))]
    program = [Step()] * chance.randint(1, 4)
    crashes = [chance.randint(0, 40) for _ in range(8)]
    if seed % 2:
        nothing_was_lost(run(world, buckets, program, crashes, seed), world)
        return
    kinds_of = ["dies", "breaks", "breaks unnoticed", "waits"]
    happens = {chance.randint(0, 120): (chance.randint(0, 3), chance.choice(kinds_of)) for _ in range(5)}
    along = [chance.randint(-1, 3) for _ in range(4)]
    those_left_agree(run(world, buckets, program, crashes, seed, happens, along))
