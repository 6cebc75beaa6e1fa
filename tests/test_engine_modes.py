"""Tests of rounds that do not wait for all members, at the coordinator: when one begins, and which members it takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.commands import Command, Record, Send
from gradserver.engine.control.group.requests import Requests
from gradserver.engine.events import Reduced, Undecodable
from gradserver.engine.policy import Policy, in_mode, mode_of
from gradserver.engine.records import Begun, Computed, Moded, Round
from gradserver.protocol.errors import DeadlineError, LeftOutError, MalformedMessageError, UnexpectedMessageError
from gradserver.protocol.limits import KEPT_ROUNDS, MIB
from gradserver.protocol.messages import Failure, Granted, Membership, RequestRound, Result, Scope, Welcome
from tests.engine_harness import SEATS, TIMEOUT, Harness, bucket, floats, plan_of
from tests.examples import examples


def policy(name: str, staleness: int | None = None, size: tuple[int, int] = (1, 4), **more: Any) -> Policy:
    mode, lateness = in_mode(mode_of(name, staleness), **more)
    return Policy(*size, mode=mode, lateness=lateness)


def group_of(world: int, chosen: Policy) -> Harness:
    harness = Harness({"default": chosen})
    harness.assemble(world, plan_of(2))
    return harness


def request(
    harness: Harness, rank: int, version: int, first: int | None = None, follows: bool = False
) -> list[Command]:
    first = version if first is None else first
    return harness.receive(SEATS + rank, RequestRound(version, first, follows))


def granted(harness: Harness, rank: int) -> list[tuple[int, bool]]:
    return [(one.round, one.refused) for one in harness.told(rank, Granted)]


def give(harness: Harness, rank: int, number: int, weight: float = 1.0) -> list[Command]:
    return harness.push(rank, bucket(number), floats(1.0, float(rank)), weight=weight)


def do_round(harness: Harness, number: int, *ranks: int, version: int | None = None) -> None:
    """Have these members contribute to a round that begins with the last of their requests."""
    for rank in ranks:
        request(harness, rank, number if version is None else version)
    for rank in ranks:
        assert granted(harness, rank) == [(number, False)]
        give(harness, rank, number)


def records(commands: list[Command]) -> list[object]:
    return [command.record for command in commands if isinstance(command, Record)]


def test_an_asynchronous_round_takes_whoever_has_come_and_the_others_hear_of_it() -> None:
    harness = group_of(3, policy("async"))
    begun = request(harness, 1, 0)
    assert records(begun) == [Begun("default", 1, 0, (Computed(1, 0),), (0, 2))]
    assert granted(harness, 1) == [(0, False)]
    request(harness, 0, 0)
    request(harness, 2, 0)
    assert not granted(harness, 0), "one round is open at a time"
    ended = give(harness, 1, 0)

    written = [one.record.round if isinstance(one, Round) else one for one in records(ended)]
    assert written == [0, Begun("default", 1, 1, (Computed(0, 0), Computed(2, 0)), (1,))]
    for rank in range(3):
        (result,) = harness.told(rank, Result)
        assert (result.key, result.weight, result.without, result.over) == (bucket(0), 1.0, (0, 2), True)
    assert granted(harness, 0) == granted(harness, 2) == [(1, False)]
    assert not granted(harness, 1)
    shown = harness.group()["members"]
    assert shown[0]["staleness"] == {"mean": 1.0, "max": 1, "contributions": 1, "refused": 0}
    assert shown[1]["staleness"]["mean"] == 0.0


def test_what_begins_is_written_before_it_is_told_and_behind_the_round_before() -> None:
    harness = group_of(2, policy("async"))
    do_round(harness, 0, 0)
    request(harness, 1, 0)
    commands = give(harness, 1, 1) if granted(harness, 1) == [(1, False)] else []
    request(harness, 0, 1)
    harness.sent(0)
    commands += request(harness, 1, 2)
    for at, command in enumerate(commands):
        if isinstance(command, Send) and isinstance(command.message, Granted):
            assert any(isinstance(one, Begun) and one.round == command.message.round for one in records(commands[:at]))


@pytest.mark.parametrize(("bound", "rounds"), [(0, 0), (1, 1), (2, 2)])
def test_a_bounded_round_waits_for_a_member_before_its_contribution_is_too_old(bound: int, rounds: int) -> None:
    harness = group_of(3, policy("bounded", bound, quorum=1))
    for number in range(rounds):
        do_round(harness, number, 0)
    request(harness, 0, rounds)
    request(harness, 2, 0)
    assert not granted(harness, 0), "member 1 has computed at version 0 all this time"
    request(harness, 1, 0)
    assert granted(harness, 0) == granted(harness, 1) == granted(harness, 2) == [(rounds, False)]


def test_half_of_the_members_begin_a_bounded_round() -> None:
    harness = group_of(4, policy("bounded", 3))
    request(harness, 3, 0)
    assert not granted(harness, 3)
    request(harness, 1, 0)
    assert granted(harness, 1) == granted(harness, 3) == [(0, False)]


def test_members_have_a_grace_when_there_is_a_quorum() -> None:
    harness = group_of(3, policy("async", quorum=2, grace=0.5))
    request(harness, 0, 0)
    harness.wait(5.0)
    request(harness, 1, 0)
    harness.wait(0.4)
    assert not granted(harness, 0)
    harness.wait(0.2)
    assert granted(harness, 0) == granted(harness, 1) == [(0, False)]
    for rank in (0, 1):
        give(harness, rank, 0)
    for rank in range(3):
        request(harness, rank, 1 if rank < 2 else 0)
    assert granted(harness, 2) == [(1, False)], "with all of them nothing is waited for"


def test_a_contribution_that_is_too_old_is_refused() -> None:
    harness = group_of(2, policy("async", 1))
    do_round(harness, 0, 0)
    do_round(harness, 1, 0)
    assert not records(request(harness, 1, 0)), "no round begins with it"
    assert granted(harness, 1) == [(2, True)]
    assert "'w1' (rank 1) to round 2 is refused, as it is 2 updates late, and 1 are allowed" in harness.logs[-1].text
    request(harness, 1, 2)
    assert granted(harness, 1) == [(2, False)], "the next one is not too old"
    assert harness.group()["members"][1]["staleness"] == {"mean": 0.0, "max": 0, "contributions": 1, "refused": 1}


def test_members_without_data_are_not_waited_for_and_end_together() -> None:
    harness = group_of(3, policy("bounded", 0))
    for rank in (0, 1):
        request(harness, rank, 0, follows=True)
    request(harness, 2, 0)
    assert granted(harness, 2) == [(0, False)]
    give(harness, 2, 0)
    for rank in (0, 1):
        request(harness, rank, 1, follows=True)
    assert not granted(harness, 0)
    commands = request(harness, 2, 1, follows=True)
    assert records(commands) == [Begun("default", 1, 1, (Computed(0, 1), Computed(1, 1), Computed(2, 1)), ())]
    for rank in range(3):
        assert granted(harness, rank) == [(1, False)]
        give(harness, rank, 1, weight=0.0)
    (result,) = [one for one in harness.told(0, Result) if one.key.number == 1]
    assert (result.weight, result.present) == (0.0, False)


def test_a_member_without_data_may_have_some_again() -> None:
    harness = group_of(2, policy("async"))
    request(harness, 0, 0, follows=True)
    request(harness, 0, 0)
    assert granted(harness, 0) == [(0, False)]


def test_a_member_that_requests_nothing_for_too_long_is_left_out() -> None:
    harness = group_of(3, policy("bounded", 0))
    request(harness, 0, 0)
    harness.wait(TIMEOUT - 0.1)
    request(harness, 1, 0)
    assert harness.silent(2)
    harness.wait(0.2)
    assert isinstance(harness.failure(2, Scope.CONNECTION), LeftOutError)
    assert "waited 10 s (--round-timeout) for its request" in str(harness.logs[-1].text)
    assert granted(harness, 0) == granted(harness, 1) == [(0, False)]


def test_a_group_that_needs_all_members_ends_and_names_those_that_request_nothing() -> None:
    harness = group_of(2, policy("bounded", 0, (2, 2)))
    request(harness, 0, 0)
    harness.wait(TIMEOUT)
    error = harness.failure(0, Scope.REQUEST)
    assert isinstance(error, DeadlineError)
    assert error.missing == ("'w1' (rank 1)",)
    request(harness, 1, 0)
    assert str(harness.failure(1, Scope.REQUEST)) == str(error)


@pytest.mark.parametrize("size", [(1, 4), (2, 2)])
def test_a_member_that_gives_nothing_to_its_round_holds_the_others_up_no_longer_than_the_timeout(
    size: tuple[int, int],
) -> None:
    harness = group_of(2, policy("async", size=size))
    request(harness, 0, 0)
    request(harness, 1, 0)
    harness.wait(TIMEOUT - 0.1)
    assert not granted(harness, 1)
    harness.wait(0.2)
    if size == (1, 4):
        assert granted(harness, 0) == [(0, False)]
        assert isinstance(harness.failure(0, Scope.CONNECTION), LeftOutError)
        (result,) = harness.told(1, Result)
        assert (result.key, result.weight) == (bucket(0), 0.0), "the round is over without any contribution"
        assert granted(harness, 1) == [(1, False)]
    else:
        assert isinstance(harness.failure(1, Scope.REQUEST), DeadlineError)


def test_a_member_that_departs_is_not_waited_for() -> None:
    harness = group_of(3, policy("bounded", 0))
    request(harness, 0, 0)
    request(harness, 1, 0)
    harness.lose(2)
    assert granted(harness, 0) == granted(harness, 1) == [(0, False)]
    harness.lose(1)
    give(harness, 0, 0)
    assert [one.weight for one in harness.told(0, Result)] == [1.0]


def test_a_request_that_departs_is_none() -> None:
    harness = group_of(3, policy("async", quorum=2))
    request(harness, 0, 0)
    harness.lose(0)
    harness.told(1, Membership)
    request(harness, 1, 0)
    assert not granted(harness, 1)
    request(harness, 2, 0)
    assert granted(harness, 1) == [(0, False)]


def test_a_group_that_breaks_tells_members_that_wait_for_a_round() -> None:
    harness = group_of(3, policy("bounded", 2, (3, 3)))
    request(harness, 0, 0)
    harness.lose(2)
    assert "'w2' (rank 2)" in str(harness.failure(0, Scope.REQUEST))
    request(harness, 1, 0)
    assert "'w2' (rank 2)" in str(harness.failure(1, Scope.REQUEST))


def test_rounds_wait_for_a_member_that_leaves_too_much_unread() -> None:
    harness = Harness({"default": policy("async")}, checked=False)
    numel = 20 * MIB  # 80 MiB: more than a backlog has room for
    harness.assemble(2, plan_of(numel))
    group = harness.engine.control.groups["default"]
    for number in range(KEPT_ROUNDS - 1):
        request(harness, 0, number)
        assert granted(harness, 0) == [(number, False)]
        group.rounds.begin(number + 1)  # as if all its results were there
    request(harness, 0, KEPT_ROUNDS - 1)
    assert not granted(harness, 0)
    request(harness, 1, 0)
    assert granted(harness, 0) == granted(harness, 1) == [(KEPT_ROUNDS - 1, False)]


def test_an_answer_that_was_lost_is_given_again() -> None:
    harness = group_of(2, policy("async"))
    request(harness, 0, 0)
    request(harness, 0, 0)
    assert granted(harness, 0) == [(0, False)] * 2
    harness.receive(SEATS, RequestRound(0, 0, pushes=True))
    assert harness.silent(0)
    assert harness.engine.control.groups["default"].requests.waiting == {}


@pytest.mark.parametrize(
    ("chosen", "message", "said"),
    [
        (Policy(1, 4), RequestRound(0, 0), "rounds wait for all members"),
        (policy("async"), RequestRound(1, 0), "requests a round that cannot be"),
        (policy("async"), RequestRound(5, 5), "of which 0 is the latest round"),
        (policy("async"), RequestRound(0, 7), "of which 0 is the latest round"),
    ],
)
def test_a_request_that_cannot_be_costs_its_sender_the_connection(
    chosen: Policy, message: RequestRound, said: str
) -> None:
    harness = group_of(2, chosen)
    harness.receive(SEATS, message)
    error = harness.refusal(SEATS)
    assert isinstance(error, UnexpectedMessageError)
    assert said in str(error)


def test_members_and_the_ledger_are_told_of_the_mode() -> None:
    harness = Harness({"default": policy("bounded", 3)})
    written = [*harness.join(SEATS, "w0", rank=0, world=1)]
    (welcome,) = harness.told(0, Welcome)
    assert (welcome.mode, welcome.staleness, welcome.damping, welcome.late) == ("bounded", 3, "none", "drop")
    assert Moded("default", "bounded", 3, "none") in records(written)
    assert harness.group()["mode"] == "bounded, staleness 3 at most"


def test_what_was_granted_of_a_void_round_waits_again() -> None:
    requests = Requests()
    for member_id in (0, 2):
        requests.ask(member_id, RequestRound(3, 3))
    requests.begin(4, (0, 2), 0)
    requests.recall(4)
    assert (requests.begun, requests.cohort, requests.waiting) == (4, {0: 3, 2: 3}, {})
    requests.ask(2, RequestRound(3, 4, pushes=True))
    requests.recall(3)
    assert (requests.begun, requests.cohort) == (3, {})
    assert requests.waiting == {0: RequestRound(3, 4), 2: RequestRound(3, 4, pushes=True)}


# ── laws ──────────────────────────────────────────────────────────────────────────────────────────────

POLICIES = (
    *(policy("async"), policy("async", 1), policy("async", 2, quorum=2), policy("bounded", 0), policy("bounded", 1)),
    *(policy("bounded", 2, quorum=1), policy("bounded", 2, backup=1)),
)
policies = st.sampled_from(POLICIES)
actions = st.lists(
    st.tuples(st.sampled_from(["compute"] * 8 + ["follow", "lose", "wait", "again"]), st.integers(0, 3)), max_size=40
)


class Player:
    """A member, as the worker's code is one: it applies all results in order, and then pushes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.version, self.asked = rank, 0, -1
        self.follows = self.gone = False
        self.results: dict[int, Result] = {}
        self.counted: list[int] = []
        self.refused = 0


@given(policies, actions, st.integers(2, 4))
@settings(max_examples=examples(25), deadline=None)
def test_whatever_members_do_updates_are_one_log_and_no_member_waits(
    chosen: Policy, steps: list[tuple[str, int]], world: int
) -> None:
    harness = group_of(world, chosen)
    harness.checked = False  # it is checked once in each step
    players = [Player(rank) for rank in range(world)]
    for what, which in steps:
        player = players[which % world]
        _act(harness, player, what, [one for one in players if not one.gone])
        _hear(harness, players, chosen)
        harness.engine.validate()
    for _ in range(200):
        _hear(harness, players, chosen)
        here = [one for one in players if not one.gone]
        idle = [one for one in here if one.asked < 0]
        if not idle:
            assert all(one.follows for one in here), "a member waits"
            break
        for player in idle:
            player.follows = True
            _ask(harness, player)
    numbers = {number for player in players for number in player.results}
    assert numbers == set(range(len(numbers)))
    for number in numbers:
        found = [player.results[number] for player in players if number in player.results]
        assert len({(one.weight, one.without) for one in found}) == 1


def _act(harness: Harness, player: Player, what: str, here: list[Player]) -> None:
    if player.gone:
        return
    if what == "lose" and len(here) > 1:
        player.gone = True
        harness.lose(player.rank)
    elif what == "wait":
        harness.wait(0.1)
    elif what == "again" and player.asked >= 0:
        harness.receive(SEATS + player.rank, RequestRound(player.asked, player.version, player.follows))
    elif what in ("compute", "follow") and player.asked < 0:
        player.follows = what == "follow"
        _ask(harness, player)


def _ask(harness: Harness, player: Player) -> None:
    player.asked = player.version
    request(harness, player.rank, player.version, follows=player.follows)


def _hear(harness: Harness, players: list[Player], chosen: Policy) -> None:
    """Have all members take what was sent to them, until nothing more comes."""
    grants: dict[int, int] = {}
    while not harness.silent(*(one.rank for one in players if not one.gone)) or grants:
        for player in players:
            for message, _ in harness.sent(player.rank):
                match message:
                    case Result() if not player.gone:
                        player.results[message.key.number] = message
                    case Granted(number, refused, applied) if not player.gone and player.asked >= 0:
                        assert applied <= min(one.version for one in players if not one.gone), "all have applied these"
                        grants[player.rank] = number
                        if refused:
                            player.refused += 1
                            assert not chosen.mode.takes(number - player.asked)
                            player.asked, _ = -1, grants.pop(player.rank)
                    case Failure():
                        raise AssertionError(message.text)
            while player.version in player.results and grants.get(player.rank, -1) != player.version:
                player.version += 1
                if player.follows and player.asked >= 0 and player.rank not in grants and not player.gone:
                    _ask(harness, player)
            if not player.gone and grants.get(player.rank) == player.version and player.version not in player.results:
                number = grants.pop(player.rank)
                assert player.follows or chosen.mode.takes(number - player.asked), "too stale"
                player.asked = -1
                give(harness, player.rank, number, 0.0 if player.follows else 1.0)
            elif player.gone:
                grants.pop(player.rank, None)


def test_bytes_that_say_nothing_cost_the_others_nothing_if_their_sender_alone_was_granted_the_round() -> None:
    harness = Harness({"default": policy("async")}, lazy=True)
    harness.assemble(3, plan_of(2))
    request(harness, 1, 0)
    give(harness, 1, 0)
    reduce = harness.reduces.pop()
    nothing = Undecodable(1, MalformedMessageError("no values"))
    ended = harness.feed(Reduced(reduce.group, reduce.epoch, reduce.key, reduce.slice, nothing))

    (record,) = (one.record for one in records(ended) if isinstance(one, Round))
    assert (record.round, record.weights) == (0, (0.0, 0.0, 0.0))
    assert SEATS + 1 in harness.closed
    for rank in (0, 2):
        (result,) = harness.told(rank, Result)
        assert (result.weight, result.present) == (0.0, False)
    request(harness, 0, 1)
    assert granted(harness, 0) == [(1, False)]


def test_a_group_that_has_waited_in_vain_for_a_granted_round_waits_for_nothing_more() -> None:
    harness = group_of(2, policy("async", size=(2, 2)))
    request(harness, 0, 0)

    harness.wait(TIMEOUT)

    assert harness.group()["state"] == "broken"
    assert harness.engine.next_deadline() is None
