"""The law of durable sub-groups with all of the workers' real code: what is lost but members costs no member anything.

Each set of members has a sub-group. Coordinators, data shards and connections are lost at any place of rounds and
collectives of these and of their parent, and while sub-groups are made. All of them have each member in them, once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.control import subgroups
from gradserver.engine.control.group.plans import Plans
from gradserver.protocol.errors import ConnectionLostError, GradServerError, UnexpectedMessageError
from gradserver.protocol.messages import Failure, Message, Scope
from gradserver.protocol.messages.recovery import Resume
from gradserver.worker.session import Session
from gradserver.worker.subgroups import Subgroups
from gradserver.worker.transport.branches import Branch
from gradserver.worker.transport.lasting import LastingBranch
from tests.examples import examples
from tests.session_group import Act
from tests.session_scripts import Happenings, check, hold, script_of_splits, script_of_subgroups
from tests.subgroup_session_group import SubgroupGroup, SubgroupNode

pytestmark = pytest.mark.usefixtures("session_code")

happenings = st.dictionaries(st.integers(0, 600), st.lists(st.integers(0, 3), min_size=1, max_size=1), max_size=3)
first, here = st.integers(0, 5), (st.just(0), st.just(False))
rounds = st.builds(Act, st.just("round"), st.integers(0, 1), first, *here)
sums = st.builds(Act, st.just("sum"), st.integers(1, 40), first, *here)


@given(
    st.integers(1, 3),
    st.lists(st.one_of(rounds, sums), min_size=1, max_size=6),
    st.lists(st.integers(0, 120), max_size=4),
    happenings,
    happenings,
    st.sampled_from([(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0)]),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.0, 0.05]),
    st.booleans(),
)
@settings(max_examples=examples(8))
def test_sub_groups_lose_nothing_with_coordinators_shards_and_connections(
    size: int,
    program: list[Act],
    crashes: list[int],
    breaks: Happenings,
    losses: Happenings,
    rates: tuple[float, ...],
    seed: int,
    chance: float,
    early: bool,
) -> None:
    group = SubgroupGroup(size, program, seed, rates, crashes, chance)
    group.early = early
    hold(group, (breaks, group.break_line), (losses, group.world.kill_any_shard))


def _end_with_the_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Subgroups, "lose_passing", lambda self, _: self.lose(ConnectionLostError("it broke")))


def _hear_of_a_lost_shard_as_of_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Branch, "when_lost", lambda *_: None)


def _say_nothing_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LastingBranch, "revive", lambda *_: None)


def _make_another_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(subgroups, "begun_before", lambda *_: None)


def _lose_it_behind_its_welcome(patch: pytest.MonkeyPatch) -> None:
    def lose_passing(self: Subgroups[Session], error: GradServerError) -> None:
        for session in self.sessions:
            if not session.is_lasting:
                session.end(error)

    patch.setattr(Subgroups, "lose_passing", lose_passing)


def _miss_a_recovery_that_comes_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_is_durable", property(lambda self: self.resumption is not None))


def _take_a_plan_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Plans, "is_repeated", lambda *_: False)


Make = Callable[[int], SubgroupGroup]
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Make, int]] = {
    "a sub-group ends with its connection": (_end_with_the_connection, script_of_subgroups, 1),
    "a sub-group ends as a data shard has lost its coordinator": (
        _hear_of_a_lost_shard_as_of_the_end,
        script_of_subgroups,
        10,
    ),
    "a member does not resume in its sub-groups": (_say_nothing_anew, script_of_subgroups, 1),
    "a request that is repeated makes another sub-group": (_make_another_one, script_of_splits, 9),
    "a connection that breaks behind the Welcome takes the sub-group along": (
        _lose_it_behind_its_welcome,
        script_of_splits,
        63,
    ),
    "a recovery that comes with the Welcome is not heard": (_miss_a_recovery_that_comes_early, script_of_splits, 187),
    "a plan that two threads propose counts twice": (_take_a_plan_twice, script_of_splits, 444),
}
"""Faults, each with the script that finds it."""


def fails(make: Make, seed: int) -> bool:
    """Return true if the law does not hold in a script."""
    try:
        check(make(seed))
    except Exception:
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, make, seed = FAULTS[name]
    plant(monkeypatch)
    assert any(fails(make, one) for one in (seed, *range(150))), "the law holds"


@pytest.mark.parametrize(
    ("make", "seed"), [(script_of_subgroups, 493), *((script_of_splits, one) for one in (9, 63, 136, 187, 205, 216))]
)
def test_the_law_holds_in_scripts_in_which_it_did_not(make: Make, seed: int) -> None:
    check(make(seed))


def test_a_sub_group_that_has_ended_says_nothing_on_later_connections() -> None:
    group = SubgroupGroup(2, [Act("round", 0)] * 6, 1, (1.0, 1.0), (), 0.0)
    ended, resumed = list[str](), list[str]()

    def end() -> None:
        node = group.nodes[0]
        assert isinstance(node, SubgroupNode)
        (worker,) = [sub.worker for sub in node.subs if sub.ranks == (0, 1)]
        worker._session.receive(Failure.of(UnexpectedMessageError("it is over"), Scope.CONNECTION), ())
        assert worker.closed
        ended.append(worker._session.membership.group)
        group.break_line(0)

    def overhear(owner: object, message: Message, _: list[bytes]) -> None:
        if owner is group.nodes[0] and isinstance(message, Resume):
            resumed.append(message.group)

    group.world.at[20].append(end)
    group.world.overhear = overhear
    group.run()
    group.check()
    assert len(resumed) == 2
    assert ended[0] not in resumed


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_the_law_holds_in_many_scripts(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        check(script_of_subgroups(seed))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_calls_that_make_sub_groups_outlive_what_is_lost_in_many_scripts(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        check(script_of_splits(seed))
