"""The laws of rounds that members reduce among themselves, with all of the workers' real code: any process is lost.

A round counts as all its members reduced it, and they hold the same bits. Or it is void for all, and they do the same
round over the coordinator, with the same contributions. No member waits for a word that does not come.
`tests.direct_session_group` has the laws. `FAULTS` are planted, and each must be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.data import commits
from gradserver.protocol.exchange import BUCKET, ExchangeKey
from gradserver.worker.member.machine import Member
from gradserver.worker.member.rounds import Rounds
from tests.direct_session_group import DirectGroup, counted_directly
from tests.examples import examples
from tests.session_group import Act
from tests.session_scripts import check, script_of_direct_rounds

pytestmark = pytest.mark.usefixtures("session_code")

DIRECT = Act(direct=True)
Happenings = dict[int, list[int]]
Plant = Callable[[pytest.MonkeyPatch], None]
fuses = st.lists(st.integers(0, 80), max_size=4)
buckets = st.lists(st.integers(1, 40), min_size=1, max_size=3)
happenings = st.dictionaries(st.integers(0, 400), st.lists(st.integers(0, 3), min_size=1, max_size=1), max_size=3)
many_rates = st.sampled_from([(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0)])
modules = st.lists(buckets, min_size=1, max_size=2)
acts = st.builds(
    Act, st.just("round"), st.just(1), st.just(0), st.integers(0, 1), st.sampled_from([True, True, True, False])
)
refusals = st.sampled_from([0.0, 0.1, 0.5])


@given(
    st.integers(1, 4), modules, st.lists(acts, min_size=1, max_size=6), fuses, happenings, happenings, happenings,
    many_rates, refusals, st.integers(0, 2**20), st.sampled_from([0.0, 0.0, 0.05]),
)  # fmt: skip
@example(3, [[8]], [DIRECT] * 3, [30], {}, {10: [1]}, {}, (1.0, 1.0), 0.5, 3, 0.0)
@settings(max_examples=examples(20))
def test_a_round_counts_as_all_members_reduced_it_or_is_void_for_all(
    world: int,
    modules: list[list[int]],
    program: list[Act],
    crashes: list[int],
    breaks: Happenings,
    deaths: Happenings,
    learners: Happenings,
    rates: tuple[float, ...],
    refusals: float,
    seed: int,
    chance: float,
) -> None:
    program = [act._replace(section=act.section % len(modules)) for act in program]
    group = DirectGroup(world, modules, program, seed, rates, crashes, None, chance, refusals)
    for happens, what in ((breaks, group.break_line), (deaths, group.kill), (learners, group.join)):
        for step, numbers in happens.items():
            group.world.at[step] += [partial(what, number) for number in numbers]
    group.run()
    group.check()


def test_rounds_without_losses_are_direct() -> None:
    group = DirectGroup(3, [[8], [20]], [DIRECT, Act(section=1, direct=True)] * 3, 1, (1.0, 1.0), refusals=0.0)
    group.run()
    group.check()
    assert counted_directly(group) == 6


class RefusedGroup(DirectGroup):
    """A group in which the first member takes the second round for void. The coordinator is lost at that moment."""

    def refuses(self, uid: int, number: int) -> bool:
        """Tell whether a process cannot reduce a round."""
        if (uid, number) != (0, 1):
            return False
        self.world.harness.fuse = 0
        return True


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("seed", range(6))
def test_a_refusal_is_not_lost_with_the_coordinator(rates: tuple[float, ...], seed: int) -> None:
    """Test a coordinator that is lost between a refusal and the round that goes over it, in another shard's slices."""
    group = RefusedGroup(2, [[2]], [DIRECT] * 3, seed, rates)
    group.run()
    group.check()
    assert group.world.crashes
    assert group.voids[1] == {0, 1}


def test_no_word_is_lost_while_a_shard_has_yet_to_stand() -> None:
    """Test a script in which a word was lost. `tests.test_member` has that moment alone, as chance is not the same."""
    check(script_of_direct_rounds(1226))


class ToldGroup(DirectGroup):
    """A group that is lost as soon as one member was told in the first round that the second one is void.

    Coordinator, data shards and the member that refused are lost together, before another member hears of the refusal.
    """

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        program = [chance.choice([DIRECT, Act()]), DIRECT, DIRECT]
        rates = chance.choice([(1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0)])
        super().__init__(3, [[8, 8, 8, 8]], program, seed, rates, (), None, chance.choice([0.05, 0.3]))
        self.refuser: int | None = None
        self.told = False

    def refuses(self, uid: int, number: int) -> bool:
        """Tell whether a process cannot reduce a round: the first one that begins the second."""
        if number != 1 or self.refuser is not None:
            return False
        self.refuser = uid
        return True

    def run(self) -> None:
        """Run the script, and look at what members are told."""
        commit_failed = Rounds.commit_failed

        def hears(member: Rounds, key: ExchangeKey, error: Any) -> Any:
            found = commit_failed(member, key, error)
            if key.number == 1 and member.number == 0 and self.refuser is not None and not self.told:
                self.told = True
                self.world.at[self.world.steps + 1].append(self._lose)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rounds, "commit_failed", hears)
            super().run()

    def _lose(self) -> None:
        assert self.refuser is not None
        self.world.harness.fuse = 0
        self.kill(self.refuser)
        for _ in range(3):
            self.world.kill_any_shard(0)


@pytest.mark.parametrize("seed", [3, 113, 131, 272, 280])
def test_what_a_member_was_told_is_not_lost_with_all_that_said_it(seed: int) -> None:
    group = ToldGroup(seed)
    check(group)
    assert group.told


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────


def _forget_refusals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "refuse_again", lambda *_: None)


def _forget_what_was_told(patch: pytest.MonkeyPatch) -> None:
    """Begin a round again without a word, where others have told that it is void."""
    patch.setattr(Member, "begin_again", lambda self: self.rounds.begin_again() and None)


def _say_nothing_behind_a_recovery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commits, "recovered", lambda *_: None)


def _void_commits_in_a_recovery(patch: pytest.MonkeyPatch) -> None:
    """Make the commit of a round void, whatever members hold of it."""

    def departed(group: Any, effects: Any) -> None:
        for key in commits._without_results(group):
            commits.void(group, key, "a member departed", effects)

    patch.setattr(commits, "departed", departed)


def _heed_the_plan_first(patch: pytest.MonkeyPatch) -> None:
    """Pass over a word about a commit that the coordinator has yet to tell of."""
    commit_failed = Rounds.commit_failed

    def known(self: Rounds, key: Any, error: Any) -> Any:
        is_known = key.stream == BUCKET and self.plan is not None and not self.plan.is_vacant(key.part)
        return commit_failed(self, key, error) if is_known else None

    patch.setattr(Rounds, "commit_failed", known)


def _take_commits_of_any_membership(patch: pytest.MonkeyPatch) -> None:
    why_void = commits.why_void

    def why(group: Any, member_id: int, key: Any, epoch: int) -> str:
        return why_void(group, member_id, key, epoch and group.members.epoch_of(key.number))

    patch.setattr(commits, "why_void", why)


def _commit_without_the_departed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commits, "departed", commits._end_memberships)


def _void_at_its_sender_alone(patch: pytest.MonkeyPatch) -> None:
    """Tell of a void commit to the one that asks, as of any failed exchange."""
    tell = commits._tell

    def to_one(group: Any, key: Any, error: Any, effects: Any) -> None:
        if getattr(error, "epoch", 0):
            tell(group, key, error, effects)

    patch.setattr(commits, "_tell", to_one)


FAULTS: dict[str, tuple[Plant, int]] = {
    "a refusal is lost with the coordinator": (_forget_refusals, 0),
    "a word is forgotten that a member was told": (_forget_what_was_told, 77),
    "no member hears behind a recovery which memberships have ended": (_say_nothing_behind_a_recovery, 330),
    "a departure makes a commit void although a member holds its result": (_void_commits_in_a_recovery, 277),
    "a word that comes before the plan is forgotten": (_heed_the_plan_first, 139),
    "a commit of a membership that has ended counts": (_take_commits_of_any_membership, 22),
    "a commit is complete without a member that departs": (_commit_without_the_departed, 64),
    "no member hears that a commit is void before it gives its own": (_void_at_its_sender_alone, 3),
}
"""Faults, each with the first script that finds it."""
SCRIPTS_OF: dict[Plant, Callable[[int], DirectGroup]] = {
    _forget_refusals: lambda seed: RefusedGroup(2, [[2]], [DIRECT] * 3, seed),
    _forget_what_was_told: ToldGroup,
}
"""Scripts of faults that show too seldom in those of `tests.session_scripts`."""


def finds(plant: Plant, seed: int) -> bool:
    """Tell whether a law does not hold in a script, with a fault."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            check(SCRIPTS_OF.get(plant, script_of_direct_rounds)(seed))
        except Exception:
            return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, seed = FAULTS[name]
    assert any(finds(plant, one) for one in (seed, *range(300))), f"no law says that something is wrong: {name}"


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_all_laws_hold_in_many_scripts(part: int) -> None:
    for seed in range(150 * part, 150 * (part + 1)):
        check(script_of_direct_rounds(seed))
