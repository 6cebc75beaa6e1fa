"""Tests of rounds that do not wait for all members where several modules share a group: each round is of one section.

Members that wait for a round of one section stand in a line. `gradserver.engine.control.requests` has the table.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.commands import Command, Record, Send
from gradserver.engine.control.group.requests import Requests
from gradserver.engine.policy import Policy, in_mode, mode_of
from gradserver.engine.records import Begun, Computed
from gradserver.protocol.errors import LeftOutError, OutOfStepError, UnexpectedMessageError
from gradserver.protocol.messages import Failure, Granted, Propose, RequestRound, Result, Scope
from tests.engine_harness import SEATS, TIMEOUT, Harness, bucket, floats, plan_of, proposal
from tests.examples import examples

MODULES = [plan_of(2), plan_of(2), plan_of(2)]


def policy(name: str, staleness: int | None = None, **more: Any) -> Policy:
    mode, lateness = in_mode(mode_of(name, staleness), **more)
    return Policy(1, 4, mode=mode, lateness=lateness)


def group_of(world: int, chosen: Policy, modules: int = 2) -> Harness:
    harness = Harness({"default": chosen})
    harness.assemble(world)
    harness.agree_beside(MODULES[:modules], world)
    return harness


def request(
    harness: Harness, rank: int, section: int, version: int, first: int | None = None, later: tuple[int, ...] = ()
) -> list[Command]:
    first = version if first is None else first
    return harness.receive(SEATS + rank, RequestRound(version, first, section=section, later=later))


def granted(harness: Harness, rank: int) -> list[tuple[int, int, int]]:
    """Return round, section and staleness of each grant that was told."""
    return [(one.round, one.section, one.staleness) for one in harness.told(rank, Granted) if not one.refused]


def give(harness: Harness, rank: int, number: int, section: int, weight: float = 1.0) -> list[Command]:
    return harness.push(rank, bucket(number, section), floats(1.0, float(rank)), weight=weight)


def do_round(harness: Harness, number: int, section: int, *ranks: int) -> None:
    for rank in ranks:
        request(harness, rank, section, number)
    for rank in ranks:
        assert granted(harness, rank) == [(number, section, 0)]
        give(harness, rank, number, section)


def begun(commands: list[Command]) -> list[object]:
    return [one.record for one in commands if isinstance(one, Record) and isinstance(one.record, Begun)]


def test_a_round_is_of_the_section_of_those_that_have_requested_it() -> None:
    harness = group_of(3, policy("async"))
    commands = request(harness, 1, 1, 0)
    assert begun(commands) == [Begun("default", 1, 0, (Computed(1, 0),), (0, 2), 1)]
    assert granted(harness, 1) == [(0, 1, 0)]
    request(harness, 0, 0, 0)
    request(harness, 2, 1, 0)
    ended = give(harness, 1, 0, 1)
    assert begun(ended) == [Begun("default", 1, 1, (Computed(0, 0),), (1, 2), 0)], "member 0 has waited longest"
    assert granted(harness, 0) == [(1, 0, 0)], "the first round was of the other module"
    assert not granted(harness, 2)
    give(harness, 0, 1, 0)
    assert granted(harness, 2) == [(2, 1, 1)]


def test_a_member_in_another_line_is_not_waited_for() -> None:
    harness = group_of(2, policy("bounded", 0))
    request(harness, 0, 0, 0)
    assert not granted(harness, 0)
    request(harness, 1, 1, 0)
    assert granted(harness, 0) == [(0, 0, 0)], "the other one has chosen the other module"
    give(harness, 0, 0, 0)
    assert not granted(harness, 1), "its contribution would be too old, if member 0 has one to that module"
    request(harness, 0, 1, 1)
    assert granted(harness, 0) == granted(harness, 1) == [(1, 1, 0)]


def test_a_line_waits_for_one_request_of_each_other_member() -> None:
    """Test a quorum of two of three, one of which trains the second module alone for some rounds."""
    harness = group_of(4, policy("async", quorum=2))
    request(harness, 0, 0, 0)
    do_round(harness, 0, 1, 1, 2)
    assert not granted(harness, 0), "member 3 may come"
    request(harness, 3, 1, 0)
    assert granted(harness, 0) == [(1, 0, 0)], "no other member comes to this line next"
    give(harness, 0, 1, 0)
    request(harness, 1, 1, 2)
    assert granted(harness, 3) == [(2, 1, 1)]
    assert granted(harness, 1) == [(2, 1, 0)]


def test_a_contribution_that_waits_for_its_turn_holds_up_the_rounds_that_would_make_it_too_old() -> None:
    harness = group_of(2, policy("bounded", 0))
    request(harness, 0, 1, 0)
    request(harness, 1, 0, 0, later=(1,))
    assert not granted(harness, 0), "member 1 has a contribution to that module, too"
    assert granted(harness, 1) == [(0, 0, 0)]
    give(harness, 1, 0, 0)
    request(harness, 1, 1, 0, 1)
    assert granted(harness, 0) == granted(harness, 1) == [(1, 1, 0)]


def test_one_backward_through_two_modules_is_granted_a_round_of_each() -> None:
    harness = group_of(2, policy("async"))
    request(harness, 0, 0, 0, later=(1,))
    assert granted(harness, 0) == [(0, 0, 0)]
    give(harness, 0, 0, 0)
    request(harness, 0, 1, 0, 1)
    assert granted(harness, 0) == [(1, 1, 0)], "it is of the same version as the answered one, and another request"


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_is_counted_in_rounds_of_the_same_section(bound: int) -> None:
    harness = group_of(2, policy("async", bound))
    for number in range(3):
        do_round(harness, number, 1, 0)
    for number in range(bound):
        do_round(harness, 3 + number, 0, 0)
    request(harness, 1, 0, 0)
    assert granted(harness, 1) == [(3 + bound, 0, bound)]
    give(harness, 1, 3 + bound, 0)
    request(harness, 1, 1, 0, 4 + bound)
    if bound < 3:
        (answer,) = harness.told(1, Granted)
        assert (answer.refused, answer.staleness) == (True, 3)
    assert harness.group()["members"][1]["staleness"]["max"] == bound


def test_shards_are_told_the_section_of_a_round_without_its_opener() -> None:
    harness = group_of(2, policy("async"))
    request(harness, 0, 1, 0)
    assert harness.engine.data.groups["default"].stragglers.section == (0, 1)


def test_members_have_a_grace_in_each_line() -> None:
    harness = group_of(4, policy("async", quorum=2, grace=0.5))
    request(harness, 0, 0, 0)
    request(harness, 1, 0, 0)
    harness.wait(0.4)
    assert not granted(harness, 0)
    request(harness, 2, 1, 0)
    harness.wait(0.2)
    assert granted(harness, 0) == granted(harness, 1) == [(0, 0, 0)]


def test_a_member_that_requests_nothing_is_left_out_though_rounds_of_another_section_go_on() -> None:
    harness = group_of(4, policy("async", quorum=2))
    request(harness, 0, 0, 0)
    for number in range(3):
        for rank in (1, 2):
            request(harness, rank, 1, number)
        for rank in (1, 2):
            give(harness, rank, number, 1)
        harness.wait(TIMEOUT / 4)
    assert not granted(harness, 0)
    harness.sent(3)
    harness.wait(TIMEOUT / 2)
    assert isinstance(harness.failure(3, Scope.CONNECTION), LeftOutError)
    assert granted(harness, 0) == [(3, 0, 0)]


def test_when_no_member_has_data_one_more_round_ends_it() -> None:
    harness = group_of(2, policy("async"))
    do_round(harness, 0, 1, 0)
    harness.receive(SEATS, RequestRound(1, 1, follows=True))
    harness.receive(SEATS + 1, RequestRound(1, 1, follows=True))
    assert granted(harness, 0) == granted(harness, 1) == [(1, 0, 0)]


def test_a_request_of_no_section_costs_its_sender_the_connection() -> None:
    harness = group_of(2, policy("async"))
    request(harness, 0, 7, 0)
    assert isinstance(harness.refusal(SEATS), UnexpectedMessageError)


def test_members_in_other_rounds_cannot_agree_on_a_further_module() -> None:
    harness = group_of(2, policy("async"))
    do_round(harness, 0, 0, 0)
    for rank in (0, 1):
        harness.sent(rank)
    module = proposal(MODULES, 2)
    harness.receive(SEATS, Propose(module.hash, 1, beside=module.beside), MODULES[2].encoded)
    harness.receive(SEATS + 1, Propose(module.hash, 0, beside=module.beside), MODULES[2].encoded)
    error = harness.failure(0, Scope.PROPOSAL)
    assert isinstance(error, OutOfStepError)
    assert "'w1' (rank 1) wraps a module in round 0, and 'w0' (rank 0) in round 1" in str(error)
    assert "Wrap all modules before the first backward" in str(harness.failure(1, Scope.PROPOSAL))


def test_a_later_coordinator_counts_staleness_alike() -> None:
    requests = Requests()
    requests.restore({0: {0: 0}, 1: {1: 0}, 2: {0: 1}}, {0: 5, 1: 6, 2: 5})
    assert [requests.staleness_in(3, section, 0) for section in (5, 6, 7)] == [2, 1, 0]
    assert requests.staleness_in(3, 6, 2) == 0
    requests.recall(1)
    assert requests.waiting == {0: RequestRound(1, 2, section=5)}
    assert requests.staleness_in(2, 5, 0) == 1


# ── laws ──────────────────────────────────────────────────────────────────────────────────────────────

POLICIES = (
    *(policy("async"), policy("async", 1), policy("async", 2, quorum=2), policy("bounded", 0), policy("bounded", 1)),
    *(policy("bounded", 2, quorum=1), policy("bounded", 2, backup=1), policy("bounded", 1, quorum="75%", grace=0.05)),
)
policies = st.sampled_from(POLICIES)
reached = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(sorted)
actions = st.lists(
    st.tuples(st.sampled_from(["compute"] * 9 + ["follow", "lose", "wait", "again"]), st.integers(0, 3), reached),
    max_size=50,
)


class Player:
    """A member, as the worker's code is one: it applies all results in order, and pushes then."""

    def __init__(self, rank: int) -> None:
        self.rank, self.version = rank, 0
        self.queue: list[int] = []
        """Sections of contributions that wait; the first one is requested."""
        self.computed = 0
        """The version of all of them."""
        self.waits = self.follows = self.gone = False
        self.results: dict[int, Result] = {}
        self.grant: Granted | None = None
        self.made = self.counted = self.refused = 0

    def message(self) -> RequestRound:
        if self.follows:
            return RequestRound(self.version, self.version, True)
        first, *later = self.queue
        return RequestRound(self.computed, self.version, section=first, later=tuple(later))


class Table:
    """Members at a coordinator, and the laws that hold at each message."""

    def __init__(self, chosen: Policy, world: int) -> None:
        self.chosen = chosen
        self.harness = group_of(world, chosen, 3)
        self.harness.checked = False  # it is checked once in each step
        self.players = [Player(rank) for rank in range(world)]
        self.rest: list[Player] = []
        """Members with further contributions of a backward, that have yet to request a round for the next one."""

    @property
    def here(self) -> list[Player]:
        return [one for one in self.players if not one.gone]

    def act(self, player: Player, what: str, sections: list[int]) -> None:
        if player.gone:
            return
        if what == "lose" and len(self.here) > 1:
            player.gone = True
            self.harness.lose(player.rank)
        elif what == "wait":
            self.harness.wait(0.1)
        elif what == "again" and player.waits:
            self.harness.receive(SEATS + player.rank, player.message())
        elif what in ("compute", "follow") and not player.waits:
            player.queue = [] if what == "follow" else list(sections)
            player.computed, player.follows = player.version, what == "follow"
            player.made += len(player.queue)
            self.ask(player)

    def ask(self, player: Player) -> None:
        player.waits = True
        self.harness.receive(SEATS + player.rank, player.message())

    def hear(self) -> None:
        """Have all members take what was sent to them, until nothing more comes."""
        turns = 0
        while not self.harness.silent(*(one.rank for one in self.here)) or any(one.grant for one in self.here):
            turns += 1
            assert turns < 1000, [(one.rank, one.version, one.grant, sorted(one.results)) for one in self.here]
            for player in self.players:
                for message, _ in self.harness.sent(player.rank):
                    if not player.gone:
                        self.take(player, message)
                if not player.gone:
                    self.go_on(player)
            for player in self.players:
                if player.gone:
                    player.grant = None

    def take(self, player: Player, message: object) -> None:
        match message:
            case Result():
                player.results[message.key.number] = message
            case Granted() if player.waits and message.round >= player.version:  # else it answers an earlier request
                assert message.applied <= min(one.version for one in self.here), "all have applied these"
                player.grant = message
            case Failure():
                raise AssertionError(message.text)

    def staleness(self, player: Player, number: int, section: int) -> int:
        return sum(player.results[one].key.part == section for one in range(player.computed, number))

    def go_on(self, player: Player) -> None:
        """Apply results, and push or drop the contribution when its round has come."""
        while player.version in player.results and (player.grant is None or player.grant.round > player.version):
            player.version += 1
            if player.follows and player.waits and player.grant is None:
                self.ask(player)
        grant = player.grant
        if grant is None or grant.round != player.version or player.version in player.results:
            return
        player.grant, player.waits, number = None, False, grant.round
        if player.follows:
            give(self.harness, player.rank, number, grant.section, 0.0)
            player.follows = False
            return
        section = player.queue.pop(0)
        assert grant.section == section, "a round of another section is granted"
        assert grant.staleness == self.staleness(player, number, section)
        assert grant.refused != self.chosen.mode.takes(grant.staleness)
        player.refused += grant.refused
        player.counted += not grant.refused
        if not grant.refused:
            give(self.harness, player.rank, number, section)
        if player.queue:
            self.rest.append(player)

    def settle(self) -> None:
        """Let all hear, and request rounds for what they have computed already."""
        self.hear()
        while self.rest:
            rest, self.rest = self.rest, []
            for player in rest:
                if not player.gone:
                    self.ask(player)
            self.hear()


@given(policies, actions, st.integers(2, 4))
@settings(max_examples=examples(40), deadline=None)
def test_whatever_members_compute_updates_are_one_log_and_no_member_waits(
    chosen: Policy, steps: list[tuple[str, int, list[int]]], world: int
) -> None:
    table = Table(chosen, world)
    for what, which, sections in steps:
        table.act(table.players[which % world], what, sections)
        table.settle()
        table.harness.engine.validate()
    for _ in range(300):
        table.settle()
        idle = [one for one in table.here if not one.waits]
        if len(idle) == len(table.here):
            break
        if not idle:
            table.harness.wait(0.1)  # a grace
            table.settle()
            assert any(not one.waits for one in table.here), "all members wait"
        for player in [one for one in table.here if not one.waits]:
            player.follows = True
            table.ask(player)
    else:
        pytest.fail("members go on without end")
    numbers = {number for player in table.players for number in player.results}
    assert numbers == set(range(len(numbers)))
    for number in numbers:
        found = [player.results[number] for player in table.players if number in player.results]
        assert len({(one.key, one.weight, one.without) for one in found}) == 1
    for player in table.here:
        assert player.counted + player.refused == player.made


def test_no_grant_is_told_before_it_is_written() -> None:
    harness = group_of(2, policy("async"))
    commands = request(harness, 0, 1, 0)
    written = [at for at, one in enumerate(commands) if isinstance(one, Record) and isinstance(one.record, Begun)]
    told = [at for at, one in enumerate(commands) if isinstance(one, Send) and isinstance(one.message, Granted)]
    assert max(written) < min(told)
