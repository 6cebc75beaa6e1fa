"""Workers that join a durable group, while books are opened or the coordinator is lost, one step at a time."""

from __future__ import annotations

import pytest

from gradserver.engine.policy import Policy
from gradserver.engine.records import Boundary, Closed, Round
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import JoinRefusedError, LeftOutError, MembershipChangedError, PlanMismatchError
from gradserver.protocol.exchange import Kind, Op, Operation
from gradserver.protocol.messages import (
    Agreed,
    Enter,
    Entered,
    Failure,
    Join,
    Membership,
    Propose,
    Ready,
    Result,
    RoundDone,
    Serve,
    Transfer,
    Welcome,
)
from gradserver.protocol.messages.recovery import Resume, Resumed, Span, Standing, State
from tests.crash_harness import CrashError
from tests.engine_harness import SEATS, all_reduce, bucket, collective, plan_of
from tests.test_engine_resuming import BACK, ONE, Group

PLAN = plan_of(4)


class Joinable(Group):
    """One of ``world`` that can be joined: it has finished round 0."""

    def __init__(self, world: int = 2, minimum: int = 1) -> None:
        super().__init__(world, PLAN, Policy(minimum, 8))
        self.tokens = [welcome.token for welcome in self.welcomes]
        for rank in range(world):
            self.harness.receive(SEATS + rank, Serve())
        self.round(0, range(world))
        for rank in range(world):
            self.harness.sent(rank)

    def round(self, number: int, ranks: range | tuple[int, ...]) -> None:
        for rank in ranks:
            self.harness.push(rank, bucket(number), ONE)
        (reduce,) = self.harness.reduces
        self.harness.reduces.clear()
        self.harness.answer(reduce)

    def join(self, place: int, name: str) -> Welcome:
        """Let a worker join, by the connection of ``place``, and wait for the state."""
        harness, connection = self.harness, SEATS + place
        harness.receive(connection, Join("default", name, -1, 0, 60.0))
        (welcome,) = harness.only((place,), Welcome)
        harness.receive(connection, Serve())
        harness.receive(connection, Propose(PLAN.hash), PLAN.encoded)
        harness.receive(connection, Enter(0, True))
        assert [type(message) for message, _ in harness.sent(place)] == [Agreed]
        return welcome

    def come_back(self, member_id: int, token: str, epoch: int = 1) -> list[object]:
        self.harness.receive(BACK + member_id, Resume("default", member_id, token, epoch, PLAN.hash, True))
        return self.told(member_id)

    def names(self) -> list[str]:
        return [str(member["name"]) for member in self.harness.group()["members"]]


def entered(world: int = 2) -> tuple[Joinable, Welcome]:
    """Make a worker with member id ``world`` that has joined, and contributes to round 2."""
    group = Joinable(world)
    welcome = group.join(world, "spot")
    group.round(1, range(world))
    for rank in range(world):
        group.harness.sent(rank)
    group.harness.receive(SEATS + world, Ready(1))
    assert Entered(2) in group.told(world, SEATS)
    return group, welcome


def test_a_contributor_is_a_member_for_a_coordinator_that_comes_back() -> None:
    group, welcome = entered()
    for member_id in (0, 1, 2):
        group.harness.push(member_id, bucket(2), ONE)
    group.harness.restart()

    assert group.names() == ["w0", "w1", "spot"]
    assert group.come_back(2, welcome.token)[0] == Resumed(2, 3)
    group.come_back(0, group.tokens[0])
    group.come_back(1, group.tokens[1])
    for member_id in (0, 1, 2):
        group.hold(member_id, 2)
    assert all(Standing(3, 2) in group.told(member_id) for member_id in (0, 1, 2))


def test_behind_a_round_with_a_new_member_a_coordinator_that_comes_back_says_the_epoch_that_was_said() -> None:
    group, _ = entered()
    group.round(2, range(3))
    said = {
        message for member_id in range(2) for message in group.told(member_id, SEATS) if isinstance(message, RoundDone)
    }
    written = [record for record in group.harness.records if isinstance(record, Round | Boundary)]

    group.harness.restart()

    assert [type(record) for record in written[-2:]] == [Round, Boundary]
    assert {(done.round, done.epoch) for done in said} == {(2, 2)}
    assert group.harness.engine.control.groups["default"].rounds.told == (2, 2)


def test_a_learner_that_has_begun_a_round_when_the_others_agree_on_another_plan_has_to_join_again() -> None:
    group, _ = entered()
    group.harness.push(2, bucket(2), ONE)
    other = plan_of(4, 4)
    for rank in range(2):
        group.told(rank, SEATS)
        group.harness.receive(SEATS + rank, Propose(other.hash, 2), other.encoded)

    assert isinstance(group.harness.refusal(SEATS + 2), PlanMismatchError)
    assert group.names() == ["w0", "w1"]
    for rank in range(2):
        assert Agreed(other.hash, 2) in group.told(rank, SEATS), "what a learner has begun halts no group"


def test_all_hear_of_a_member_that_came_in_without_their_hearing() -> None:
    group, welcome = entered()
    group.harness.restart()

    heard = [
        news
        for member_id in (0, 1)
        for news in group.come_back(member_id, group.tokens[member_id])
        if isinstance(news, Membership)
    ]

    assert [news.names for news in heard] == [("w0", "w1", "spot")] * 2
    assert {news.epoch for news in heard} == {group.harness.engine.control.groups["default"].members.epoch}
    assert all("'spot' (rank 2) joined in round 2" in news.reason for news in heard)
    assert isinstance(group.come_back(2, welcome.token, welcome.epoch)[1], Membership)


def test_a_group_has_ended_if_a_coordinator_is_lost_as_it_writes_that_the_last_contributor_left() -> None:
    group, welcome = entered(1)
    group.harness.leave(0)
    group.harness.fuse = 1
    with pytest.raises(CrashError):
        group.harness.leave(1)
    assert not any(isinstance(record, Closed) for record in group.harness.records)

    group.harness.restart()

    assert not group.harness.engine.control.groups
    group.harness.receive(BACK + 1, Resume("default", 1, welcome.token, 1, PLAN.hash))
    assert "as its last worker had gone: call connect again" in str(group.harness.refusal(BACK + 1))


def test_results_that_have_what_a_joiner_gave_are_of_a_member() -> None:
    group, welcome = entered()
    for member_id in (0, 1, 2):
        group.harness.push(member_id, bucket(2), ONE)
    group.harness.restart()
    for member_id, token in enumerate([*group.tokens, welcome.token]):
        group.come_back(member_id, token)

    for member_id in (0, 1, 2):
        group.hold(member_id, 2, Span(State.HELD, bucket(2), 0, 1))

    record = group.harness.engine.control.groups["default"].rounds.ledger[-1]
    assert (record.round, record.weights) == (2, (1.0, 1.0, 1.0))
    assert any(isinstance(message, RoundDone) for message in group.told(2))


def test_a_seat_that_a_coordinator_does_not_know_is_left_out() -> None:
    group = Joinable()
    welcome = group.join(2, "spot")
    group.harness.restart()
    group.harness.receive(BACK + 2, Resume("default", 2, welcome.token, 1, PLAN.hash))

    error = group.harness.refusal(BACK + 2)

    assert isinstance(error, LeftOutError)
    assert "this worker, with member id 2, came back to group 'default' when the others had gone on without it" in str(
        error
    )


def test_a_seat_is_not_its_former_members() -> None:
    group = Joinable(3)
    group.harness.lose(2)
    group.harness.wait(1.0)
    for number, name in enumerate(["a", "b", "c", "d", "e"]):
        group.join(3 + number, name)
    group.join(8, "last")  # all other ids were used: it gets that of the member that is away
    member_ids = group.harness.engine.control.groups["default"].members.identities.names
    assert member_ids[2] == "last"

    group.harness.receive(BACK + 2, Resume("default", 2, group.tokens[2], 1, PLAN.hash))

    assert isinstance(group.harness.refusal(BACK + 2), JoinRefusedError)


def test_books_that_are_opened_for_a_member_cost_a_joiner_its_state_and_no_more() -> None:
    group = Joinable()
    group.join(2, "spot")
    group.round(1, (0, 1))
    (done,) = [message for message in group.told(2, SEATS) if isinstance(message, RoundDone)]
    assert done.transfers[0].learner == 2
    group.harness.lose(1)

    group.come_back(1, group.tokens[1])

    error = group.harness.refusal(SEATS + 2)
    assert isinstance(error, LeftOutError)
    assert "workers that were about to join have to join again" in error.message
    assert group.names() == ["w0", "w1"]


def test_members_are_asked_what_they_hold_behind_all_results_that_they_are_sent() -> None:
    """Test a round that waits for a learner alone, which is turned away when a member returns."""
    group = Joinable(2)
    group.join(2, "spot")
    group.round(1, range(2))
    group.told(1, SEATS)
    for member_id in range(2):
        group.harness.push(member_id, bucket(2))

    group.come_back(0, group.tokens[0])

    assert group.told(1, SEATS) == [Resumed(1, 2)]
    group.hold(0, 2)
    group.hold(1, 2, connection=SEATS)
    assert group.told(1, SEATS) == [Standing(2, 2)]


def test_a_recovery_makes_a_member_of_a_contributor() -> None:
    group, _ = entered()
    group.told(2, SEATS)

    group.harness.lose(1)
    group.come_back(1, group.tokens[1])

    assert group.names() == ["w0", "w1", "spot"]
    assert [type(message) for message in group.told(2, SEATS)] == [Membership, Resumed]


def test_a_joiner_that_contributes_may_lose_its_connection() -> None:
    group, welcome = entered()
    group.harness.lose(2)
    assert group.names() == ["w0", "w1", "spot"]

    assert group.come_back(2, welcome.token, welcome.epoch)[0] == Resumed(1, 3)


def test_a_joiner_that_has_entered_when_all_members_were_away_may_lose_its_connection() -> None:
    group = Joinable(1)
    welcome = group.join(1, "spot")
    group.round(1, range(1))
    group.harness.lose(0)
    assert group.harness.group()["state"] == "suspended"
    group.harness.receive(SEATS + 1, Ready(1))
    assert Entered(2) in group.told(1, SEATS)

    group.harness.lose(1)

    assert group.harness.group()["state"] == "suspended"
    assert group.names() == ["w0", "spot"]
    assert isinstance(group.come_back(1, welcome.token)[0], Resumed)


def test_a_joiner_that_does_not_contribute_is_gone_with_its_connection() -> None:
    group = Joinable()
    group.join(2, "spot")
    group.harness.lose(2)

    assert group.harness.group()["joining"] == []


def test_a_member_that_can_send_its_state_says_so_when_it_comes_back() -> None:
    group = Joinable()
    group.harness.restart()
    group.join(2, "spot")  # while no member has returned, it waits
    for member_id in (0, 1):
        group.come_back(member_id, group.tokens[member_id])
        group.told(member_id)
    for member_id in (0, 1):
        group.hold(member_id, 1)
    for member_id in (0, 1):
        group.harness.push(member_id + 50, bucket(1), ONE)
    (reduce,) = group.harness.reduces
    group.harness.answer(reduce)

    (done,) = [message for message in group.told(2, SEATS) if isinstance(message, RoundDone)]
    assert done.transfers == (Transfer(1, 0, 2, True),)


def test_an_epoch_that_was_not_written_down_is_never_used_again() -> None:
    group = Joinable()
    group.harness.restart()

    told = group.come_back(0, group.tokens[0], epoch=9)

    assert [type(message) for message in told] == [Resumed, Membership]
    news = told[1]
    assert isinstance(news, Membership)
    assert news.epoch == 10
    assert news.names == ("w0", "w1")
    assert [type(message) for message in group.come_back(1, group.tokens[1])] == [Resumed, Membership]


def test_a_group_with_too_few_left_lets_in_all_waiting_workers_at_once() -> None:
    group = Joinable(4, minimum=4)
    for rank in (1, 2, 3):
        group.harness.leave(rank)
    group.harness.sent(0)
    for place, name in enumerate(["a", "b", "c"], 4):
        group.join(place, name)
    group.round(1, (0,))

    (done,) = [message for message in group.told(0, SEATS) if isinstance(message, RoundDone)]

    assert [(transfer.donor, transfer.learner) for transfer in done.transfers] == [(0, 4), (0, 5), (0, 6)]
    assert all(transfer.waits for transfer in done.transfers)


@pytest.mark.parametrize("restarts", [1, 2])
def test_what_members_called_before_a_learner_came_does_not_wait_for_it_after_a_restart(restarts: int) -> None:
    group, welcome = entered()
    tokens = [*group.tokens, welcome.token]
    for _ in range(restarts):
        group.harness.restart()
        for member_id in (0, 1, 2):
            group.come_back(member_id, tokens[member_id])
        for member_id in (0, 1, 2):
            group.hold(member_id, 2, *([Span(State.LACKING, collective(0, 2), 0, 1)] if member_id < 2 else []))
            group.told(member_id)

    for member_id in (0, 1):  # behind round 1, of which the third knows nothing
        group.harness.push(50 + member_id, collective(0, 2), ONE, operation=all_reduce(4))
    (reduce,) = group.harness.reduces
    group.harness.answer(reduce)

    assert type(group.told(0)[-1]) is Result
    assert not any(isinstance(message, Result) for message in group.told(2))


def test_what_members_call_again_after_the_round_before_it_came_is_theirs_alone() -> None:
    """Test that they learn of it in the recovery, while it waits in its first round for them to begin it."""
    group, welcome = entered()
    tokens = [*group.tokens, welcome.token]
    group.harness.restart()
    heard = [[m for m in group.come_back(s, tokens[s]) if isinstance(m, Membership)] for s in (0, 1, 2)]
    for member_id in (0, 1, 2):
        group.hold(member_id, 2, *([Span(State.LACKING, collective(0, 2), 0, 1)] if member_id < 2 else []))
        group.told(member_id)
    news = heard[0][-1]
    assert (news.behind(1).names, news.behind(2).names) == (("w0", "w1"), ("w0", "w1", "spot"))

    operation = Operation(Kind.ALL_GATHER, Op.NONE, FLOAT32, 4)
    group.harness.push(50, collective(0, 2), ONE, operation=operation, epoch=1)
    (failure,) = [message for message in group.told(0) if isinstance(message, Failure)]
    error = failure.exception()
    assert isinstance(error, MembershipChangedError)
    assert error.epoch == news.epoch
    group.harness.push(51, collective(0, 2), ONE, operation=operation, epoch=1)
    for member_id in (0, 1):
        group.harness.push(50 + member_id, collective(1, 2), ONE, operation=operation, epoch=news.epoch)

    (reduce,) = group.harness.reduces
    assert (reduce.key, [given.member_id for given in reduce.contributions]) == (collective(1, 2), [0, 1])
