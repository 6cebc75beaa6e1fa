"""Membership and plans: each row of the control half's table, by events alone."""

from __future__ import annotations

import json

import pytest

from gradserver.engine import Engine
from gradserver.engine.commands import Close, Send
from gradserver.engine.control.group.applicants import TOLD_AFTER_SECONDS, TOLD_EVERY_SECONDS
from gradserver.engine.events import Garbled
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    CoordinatorStoppedError,
    DeadlineError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
    LimitExceededError,
    MalformedMessageError,
    PlanMismatchError,
    UnexpectedMessageError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.limits import (
    CREDIT_BYTES,
    MAX_GROUPS,
    MAX_NAME_BYTES,
    MAX_TEXT,
    MAX_WORLD_SIZE,
    MIN_CREDIT_BYTES,
)
from gradserver.protocol.messages import (
    Agreed,
    Failure,
    Inquire,
    Leave,
    Message,
    Missing,
    Notice,
    Ping,
    Propose,
    Push,
    Result,
    Scope,
    Status,
    Welcome,
)
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.protocol.wire import decode, encode
from tests.engine_harness import SEATS, TIMEOUT, Harness, all_reduce, bucket, collective, floats, plan_of


def welcome(harness: Harness, connection: int) -> Welcome:
    ((message, _),) = harness.inbox.pop(connection)
    assert isinstance(message, Welcome)
    return message


# ── forming ───────────────────────────────────────────────────────────────────────────────────────────


def test_applicants_wait_until_the_last_one_has_come() -> None:
    harness = Harness()

    harness.join(1, "a", world=3)
    harness.join(2, "b", world=3)
    assert not harness.inbox
    assert harness.group()["state"] == "forming"
    assert [w["name"] for w in harness.group()["waiting"]] == ["a", "b"]

    harness.join(3, "c", world=3)
    names = ("a", "b", "c")
    assert [welcome(harness, c) for c in (1, 2, 3)] == [
        Welcome("default", rank, 1, harness.credit, names, member_ids=(0, 1, 2), timeout=10.0, needs_all=True, places=3)
        for rank in range(3)
    ]
    assert harness.group()["state"] == "active"


def test_ranks_that_were_asked_for_are_given_and_the_others_go_by_order_of_arrival() -> None:
    harness = Harness()
    for connection, rank in ((1, -1), (2, 0), (3, -1), (4, 2)):
        harness.join(connection, f"on {connection}", rank=rank, world=4)

    assert {connection: welcome(harness, connection).rank for connection in (1, 2, 3, 4)} == {2: 0, 1: 1, 4: 2, 3: 3}


def test_a_group_of_one_is_complete_at_once() -> None:
    harness = Harness()
    harness.join(1, "alone", world=1)

    assert welcome(harness, 1) == Welcome(
        "default", 0, 1, harness.credit, ("alone",), member_ids=(0,), timeout=10.0, needs_all=True, places=1
    )


def test_the_coordinator_may_be_told_the_world_size_and_workers_then_need_not_say_it() -> None:
    harness = Harness({"default": 2})
    harness.join(1, "a")
    harness.join(2, "b", world=2)

    assert welcome(harness, 2).rank == 1


def test_groups_are_apart_and_every_membership_has_its_own_epoch() -> None:
    harness = Harness()
    for group in ("one", "two"):
        for connection in (1, 2):
            harness.join(connection + 10 * len(harness.engine.control.groups), group=group, world=2)

    assert sorted(harness.engine.control.groups) == ["one", "two"]
    assert [harness.group(name)["epoch"] for name in ("one", "two")] == [1, 2]


def test_a_group_forms_again_after_the_last_has_left_with_a_new_epoch() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.leave(0)
    harness.leave(1)
    assert harness.engine.control.groups == {}
    assert harness.engine.data.groups == {}

    harness.join(1, world=2)
    harness.join(2, world=2)

    assert welcome(harness, 1).epoch == 2
    assert harness.group()["round"] == 0


def test_the_timeout_of_a_group_is_the_longest_that_a_member_asked_for() -> None:
    harness = Harness()
    harness.join(SEATS, rank=0, world=2, timeout=5.0)
    harness.join(SEATS + 1, rank=1, world=2, timeout=9.0)

    assert harness.engine.control.groups["default"].timeout == 9.0


# ── refusals and their reasons ────────────────────────────────────────────────────────────────────────


def test_a_rank_that_is_taken_is_refused_with_the_name_of_its_owner() -> None:
    harness = Harness()
    harness.join(1, "first", rank=0, world=2)
    harness.now = 3.0
    harness.join(2, "second", rank=0, world=2)

    error = harness.refusal(2)
    assert isinstance(error, JoinRefusedError)
    assert "rank 0 of group 'default' is taken by 'first', which has waited for 3.0 s" in str(error)
    assert [w["name"] for w in harness.group()["waiting"]] == ["first"], "the first one goes on waiting"


def test_a_rank_out_of_range_is_refused() -> None:
    harness = Harness()
    harness.join(1, "late", rank=2, world=2)

    error = harness.refusal(1)
    assert isinstance(error, InvalidRankError)
    assert "'late' wants rank 2, but the ranks of group 'default' are 0 to 1" in str(error)
    assert harness.engine.control.groups == {}, "a refused worker leaves no group behind"


def test_a_world_size_that_is_not_the_others_is_refused() -> None:
    harness = Harness()
    harness.join(1, "a", world=2)
    harness.join(2, "b", world=3)

    error = harness.refusal(2)
    assert isinstance(error, InvalidWorldSizeError)
    assert "'b' wants a world size of 3, but group 'default' has 2" in str(error)


def test_a_world_size_that_is_not_the_coordinators_is_refused() -> None:
    harness = Harness({"default": 2})
    harness.join(1, "a", world=3)

    error = harness.refusal(1)
    assert isinstance(error, InvalidWorldSizeError)
    assert "'a' wants a world size of 3, but the coordinator was started with 2" in str(error)


def test_without_a_world_size_the_error_says_how_to_give_it() -> None:
    harness = Harness()
    harness.join(1, "a")

    error = harness.refusal(1)
    assert isinstance(error, InvalidWorldSizeError)
    assert "world_size=" in str(error)
    assert "--workers" in str(error)


@pytest.mark.parametrize("world", [-1, MAX_WORLD_SIZE + 1])
def test_a_world_size_that_cannot_be_is_refused(world: int) -> None:
    harness = Harness()
    harness.join(1, "a", world=world)

    assert "a world size is 1 to 1024" in str(harness.refusal(1))
    with pytest.raises(InvalidWorldSizeError, match="group 'x': a world size is 1 to 1024"):
        Engine({"x": world})


def test_there_are_only_so_many_groups() -> None:
    harness = Harness(checked=False)
    for number in range(MAX_GROUPS):
        harness.join(number, group=f"g{number}", world=2)
    harness.join(9999, group="one more", world=2)

    assert isinstance(harness.refusal(9999), LimitExceededError)
    harness.join(9998, group="g0", world=2)
    assert welcome(harness, 9998).group == "g0", "the groups there are can still be joined"


def test_a_complete_group_is_closed_to_others_and_says_in_which_round_it_is() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.join(7, "late", world=2)

    error = harness.refusal(7)
    assert isinstance(error, JoinRefusedError)
    assert "complete and it is in round 0; 'late' cannot be added" in str(error)
    assert "when these have left: 'w0' (rank 0), 'w1' (rank 1)" in str(error)


def test_a_broken_group_says_why_it_broke_to_applicants() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.lose(1, "heartbeats stopped")
    harness.join(7, "late", world=2)

    error = harness.refusal(7)
    assert isinstance(error, JoinRefusedError)
    assert "'w1' (rank 1) was lost and is needed to go on: heartbeats stopped" in str(error)
    assert "when these have left: 'w0' (rank 0)" in str(error)


def test_joining_twice_on_one_connection_costs_the_place() -> None:
    harness = Harness()
    harness.join(1, "a", world=2)
    harness.join(1, "a again", world=2)

    assert isinstance(harness.refusal(1), UnexpectedMessageError)
    assert harness.engine.control.groups == {}


@pytest.mark.parametrize("world", [1, 2, 64, MAX_WORLD_SIZE])
def test_whatever_names_are_let_in_a_welcome_that_carries_them_fits_into_a_header(world: int) -> None:
    harness = Harness(checked=False)
    name, group = "x" * MAX_NAME_BYTES, "g" * MAX_NAME_BYTES
    harness.join(0, name, world=world, group=group)
    while 0 in harness.closed:
        assert isinstance(harness.refusal(0), InvalidArgumentError)
        harness.closed.clear()
        name = name[:-1]
        harness.join(0, name, world=world, group=group)
    assert len(name) >= 50
    for connection in range(1, world):
        harness.join(connection, name, world=world, group=group)

    assert len(encode(welcome(harness, 0))) > world * len(name)


def test_names_that_are_too_long_are_refused_before_any_member_has_to_hear_them() -> None:
    harness = Harness()
    harness.join(1, "ü" * MAX_NAME_BYTES, world=2)
    harness.join(2, group="g" * (MAX_NAME_BYTES + 1), world=2)

    assert f"is {2 * MAX_NAME_BYTES} bytes long, the limit is {MAX_NAME_BYTES}" in str(harness.refusal(1))
    assert f"is {MAX_NAME_BYTES + 1} bytes long, the limit is {MAX_NAME_BYTES}" in str(harness.refusal(2))
    assert harness.engine.control.groups == {}


def test_whatever_is_said_about_many_long_names_fits_into_a_header() -> None:
    harness = Harness(checked=False)
    name = "\\" * 50  # its repr is twice as long
    for rank in range(MAX_WORLD_SIZE):
        harness.join(SEATS + rank, name, rank=rank, world=MAX_WORLD_SIZE)
    harness.inbox.clear()
    harness.propose(0, plan_of(1))
    harness.push(1, collective(0), floats(1), operation=all_reduce(1))
    harness.receive(SEATS + 1, Inquire(collective(0)))
    harness.wait(TIMEOUT)
    harness.receive(SEATS + 2, Push(bucket(9), 0))
    harness.join(7, "late", world=MAX_WORLD_SIZE)

    said = [message for connection in (SEATS, SEATS + 1, SEATS + 2, 7) for message, _ in harness.inbox[connection]]
    assert [type(message) for message in said] == [Failure, Missing, Failure, Failure, Failure]
    for message in said:
        assert decode([encode(message)])[0] == message


@pytest.mark.parametrize("name", ["\x1b[2J", "two\nlines", "\udc80"])
def test_names_that_could_upset_a_terminal_are_refused(name: str) -> None:
    harness = Harness()
    harness.join(1, name, world=2)
    harness.join(2, group=name, world=2)

    for connection in (1, 2):
        assert "must be printable text" in str(harness.refusal(connection))


# ── deadlines ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_applicant_whose_time_is_up_is_told_which_ranks_are_missing() -> None:
    harness = Harness()
    harness.join(1, "a", rank=1, world=4)
    harness.join(2, "b", rank=2, world=4, timeout=2 * TIMEOUT)
    assert harness.engine.next_deadline() == TOLD_AFTER_SECONDS

    harness.wait(TOLD_AFTER_SECONDS)
    assert harness.engine.next_deadline() == TIMEOUT
    assert harness.wait(TIMEOUT - TOLD_AFTER_SECONDS - 0.1) == []
    harness.wait(0.1)

    error = harness.refusal(1)
    assert isinstance(error, JoinTimeoutError)
    assert error.missing == ("rank 0", "rank 3")
    assert "2 of 4 workers after 10 s: 'a' (rank 1), 'b' (rank 2) came; missing: rank 0, rank 3" in str(error)
    assert harness.engine.next_deadline() == 2 * TIMEOUT, "the other one has more time"


@pytest.mark.parametrize(
    ("ranks", "missing"), [((-1, -1), "1 more, of any rank"), ((-1, 0), "1 of rank 1, rank 2"), ((0, 2), "rank 1")]
)
def test_missing_ranks_are_named_as_well_as_they_can_be(ranks: tuple[int, int], missing: str) -> None:
    harness = Harness()
    for connection, rank in enumerate(ranks):
        harness.join(connection, rank=rank, world=3, timeout=TIMEOUT + connection)
    harness.wait(TIMEOUT)

    error = str(harness.refusal(0))
    assert f"missing: {missing}. Start them in time" in error
    assert "connect(timeout=…)" in error


def test_workers_that_wait_hear_after_a_while_and_again_which_others_came() -> None:
    harness = Harness()
    harness.join(SEATS + 1, "a", rank=0, world=3, timeout=60.0)
    harness.join(SEATS + 9, "x", group="critics", world=2, timeout=60.0)
    harness.wait(TOLD_AFTER_SECONDS - 0.1)
    assert harness.silent(1, 9)
    harness.wait(0.1)
    (told,) = harness.told(1, Notice)
    assert told.text == (
        "group 'default' has waited for workers for 5 s: 1 of 3 came: 'a' (rank 0); missing: ranks 1, 2. This "
        "coordinator also serves: group 'critics' has 'x'. This worker waits for another 55 s, as timeout=60 of "
        "connect says"
    )
    assert harness.told(9, Notice)[0].text.startswith(
        "group 'critics' has waited for workers for 5 s: 1 of 2 came: 'x'. "
    )
    assert [log.text for log in harness.logs if log.text.startswith("group 'default' has waited")] == [
        told.text.partition(". This worker")[0]
    ]
    harness.wait(TOLD_EVERY_SECONDS - 0.1)
    assert harness.silent(1)
    harness.wait(0.1)
    assert "has waited for workers for 35 s" in harness.told(1, Notice)[0].text


def test_a_worker_that_comes_later_hears_as_soon_as_the_first() -> None:
    harness = Harness()
    harness.join(SEATS + 1, "a", world=3, timeout=60.0)
    harness.wait(TOLD_AFTER_SECONDS + 1)
    harness.join(SEATS + 2, "b", world=3, timeout=60.0)
    harness.wait(TOLD_AFTER_SECONDS)
    assert "2 of 3 came: 'a', 'b'. This worker" in harness.told(2, Notice)[0].text
    harness.join(SEATS + 3, "c", world=3)
    harness.wait(TOLD_EVERY_SECONDS)
    assert not harness.told(2, Notice), "the group is complete"


def test_the_status_counts_workers_that_came_joined_and_were_lost_also_of_groups_that_have_ended() -> None:
    harness = Harness()
    harness.join(SEATS, world=2)
    totals = {"came": 1, "joined": 0, "lost": 0, "rounds": 0}
    assert harness.engine.snapshot(0.0)["totals"] == totals
    harness.join(SEATS + 1, world=2)
    assert harness.engine.snapshot(0.0)["totals"] == totals | {"came": 2, "joined": 2}
    harness.lose(0, ended=True)
    harness.leave(1)
    assert harness.engine.snapshot(0.0)["groups"] == {}
    assert harness.engine.snapshot(0.0)["totals"] == totals | {"came": 2, "joined": 2, "lost": 1}


def test_many_workers_that_wait_fit_into_one_notice() -> None:
    harness = Harness()
    for number in range(40):
        harness.join(SEATS + number, f"{number}" + "n" * 80, world=60, timeout=60.0)
        harness.join(SEATS + 100 + number, f"{number}" + "n" * 80, group=f"{number}" + "g" * 100, world=2, timeout=60.0)
    harness.wait(TOLD_AFTER_SECONDS)
    text = harness.told(0, Notice)[0].text
    assert " and 32 more" in text
    assert len(text) <= MAX_TEXT


def test_an_applicant_whose_time_is_up_makes_room() -> None:
    harness = Harness()
    harness.join(1, "slow", rank=0, world=2)
    harness.wait(TIMEOUT)
    assert harness.engine.control.groups == {}
    assert harness.engine.next_deadline() is None

    harness.join(2, "a", rank=0, world=2)
    harness.join(3, "b", rank=1, world=2)

    assert welcome(harness, 2).names == ("a", "b")


def test_time_does_not_run_for_a_group_that_waits_for_nothing() -> None:
    harness = Harness()
    harness.assemble(2)

    assert harness.engine.next_deadline() is None
    assert harness.wait(1e9) == []


@pytest.mark.parametrize("lost", [False, True])
def test_an_applicant_that_goes_is_forgotten(lost: bool) -> None:
    harness = Harness()
    harness.join(SEATS + 5, rank=0, world=2)
    harness.join(SEATS + 9, rank=-1, world=3, group="other")
    harness.lose(5) if lost else harness.leave(5)
    assert list(harness.engine.control.groups) == ["other"]

    harness.assemble(2)

    assert harness.group()["state"] == "active"


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_that_all_propose_is_agreed_on() -> None:
    harness = Harness()
    harness.assemble(3)
    plan = plan_of(4, 2)

    for rank in (2, 0):
        harness.propose(rank, plan)
        assert harness.silent(0, 1, 2)
    harness.propose(1, plan)

    assert harness.only(range(3), Agreed) == [Agreed(plan.hash, 0)] * 3
    assert harness.group()["plan"] == {"buckets": 2, "bytes": 24}
    assert harness.engine.next_deadline() is None


def test_the_minority_is_told_the_first_difference_and_the_others_proposals_stand() -> None:
    harness = Harness()
    harness.assemble(3)
    harness.propose(0, Plan((Bucket("b", FLOAT32, (Component("w", (3, 5)),)),)))
    common = Plan((Bucket("b", FLOAT32, (Component("w", (3, 4)),)),))
    harness.propose(1, common)
    harness.propose(2, common)

    error = harness.failure(0, Scope.PROPOSAL)
    assert isinstance(error, PlanMismatchError)
    assert "'w1' (rank 1) has w (3×4, float32, mean) in bucket 'b'" in str(error)
    assert "'w0' (rank 0) has w (3×5, float32, mean) in bucket 'b'" in str(error)
    assert harness.silent(1, 2)

    harness.propose(0, common)
    assert harness.only(range(3), Agreed) == [Agreed(common.hash, 0)] * 3


def test_in_a_tie_the_plan_of_the_lowest_rank_is_the_reference() -> None:
    harness = Harness()
    harness.assemble(4)
    for rank, size in ((3, 7), (1, 7), (2, 5), (0, 5)):
        harness.propose(rank, plan_of(size))

    for rank in (1, 3):
        assert "'w0' (rank 0) has b0 (5, float32" in str(harness.failure(rank, Scope.PROPOSAL))
    assert harness.silent(0, 2)
    for rank in (1, 3):
        harness.propose(rank, plan_of(5))
    assert len(harness.only(range(4), Agreed)) == 4


def test_several_plans_that_differ_from_most_are_all_told() -> None:
    harness = Harness()
    harness.assemble(4)
    for rank, size in enumerate((6, 5, 5, 7)):
        harness.propose(rank, plan_of(size))

    for rank, size in ((0, 6), (3, 7)):
        assert f"'w{rank}' (rank {rank}) has b0 ({size}, " in str(harness.failure(rank, Scope.PROPOSAL))


def test_members_that_did_not_propose_in_time_are_named_to_those_that_did() -> None:
    harness = Harness()
    harness.assemble(3)
    harness.propose(1, plan_of(4))
    assert harness.engine.next_deadline() == TIMEOUT
    harness.wait(TIMEOUT)

    error = harness.failure(1, Scope.PROPOSAL)
    assert isinstance(error, DeadlineError)
    assert error.missing == ("'w0' (rank 0)", "'w2' (rank 2)")
    assert "waited 10 s for 'w0' (rank 0), 'w2' (rank 2) to propose one" in str(error)
    assert harness.silent(0, 2)
    assert len(harness.agree(plan_of(4), 3)) == 3, "the group can still agree"


def test_a_second_proposal_before_the_first_is_settled_costs_the_connection() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.propose(0, plan_of(4))
    harness.propose(0, plan_of(4))

    assert isinstance(harness.refusal(SEATS), UnexpectedMessageError)
    assert harness.group()["state"] == "broken"


def test_a_plan_that_is_garbage_costs_only_its_senders_connection() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.propose(0, plan_of(4))
    harness.receive(SEATS + 1, Propose("hash"), b"garbage")

    assert isinstance(harness.refusal(SEATS + 1), LimitExceededError)
    error = harness.failure(0, Scope.PROPOSAL)
    assert isinstance(error, WorkerLostError)
    assert (error.worker, error.rank) == ("w1", 1)
    assert "it broke the protocol" in str(error)


def test_another_plan_can_be_agreed_on_between_rounds_and_rounds_count_on() -> None:
    harness = Harness()
    harness.assemble(2, plan_of(1))
    for rank in range(2):
        harness.push(rank, bucket(0), floats(1))
    harness.inbox.clear()

    assert harness.agree(plan_of(2, 2), 2) == [Agreed(plan_of(2, 2).hash, 1)] * 2
    for rank in range(2):
        harness.push(rank, bucket(1, 1), floats(1, 2))

    assert list(harness.array(0)) == [1, 2]


# ── leaving, and being lost ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("leave", "kind", "says"),
    [
        (Leave("out of data"), WorkerLeftError, "'w1' (rank 1) left and is needed to go on: out of data"),
        (Leave("ValueError", True), WorkerLostError, "'w1' (rank 1) was lost and is needed to go on: ValueError"),
        (None, WorkerLostError, "'w1' (rank 1) was lost and is needed to go on: connection reset"),
    ],
)
def test_proposers_hear_which_member_is_gone(leave: Leave | None, kind: type[WorkerLeftError], says: str) -> None:
    harness = Harness()
    harness.assemble(3)
    harness.propose(0, plan_of(4))
    harness.lose(1) if leave is None else harness.receive(SEATS + 1, leave)

    error = harness.failure(0, Scope.PROPOSAL)
    assert type(error) is kind
    assert str(error) == says
    assert error.fields == {"worker": "w1", "rank": 1}
    assert harness.silent(2), "a member that waits for nothing is told when it wants something"

    harness.propose(2, plan_of(4))
    assert str(harness.failure(2, Scope.PROPOSAL)) == says


def test_the_first_reason_why_a_group_broke_stands() -> None:
    harness = Harness()
    harness.assemble(3)
    harness.leave(1)
    harness.lose(2)
    harness.propose(0, plan_of(4))

    assert isinstance(harness.failure(0, Scope.PROPOSAL), WorkerLeftError)
    assert "'w1' (rank 1) left" in harness.group()["broken"]


def test_a_loss_says_after_which_round() -> None:
    harness = Harness()
    harness.assemble(2, plan_of(1))
    for number in range(3):
        for rank in range(2):
            harness.push(rank, bucket(number), floats(1))
    harness.inbox.clear()
    harness.lose(1)
    harness.push(0, bucket(3), floats(1))

    assert "was lost after round 2 and is needed" in str(harness.failure(0, key=bucket(3)))


def test_a_member_that_leaves_is_answered_and_a_lost_one_is_not() -> None:
    harness = Harness()
    harness.assemble(3)

    assert Send(SEATS, Leave("done")) in harness.leave(0)
    assert not any(isinstance(c, Send) and c.connection == SEATS + 1 for c in harness.lose(1))


def test_a_member_departs_only_once() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.leave(0)
    before = harness.engine.snapshot(0)

    assert harness.leave(0) == []
    assert harness.lose(0) == []
    assert harness.engine.snapshot(0) == before


def test_a_connection_that_left_one_group_may_join_another_and_keeps_it_when_the_first_ends() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.leave(0)
    harness.join(SEATS, "again", world=1, group="other")
    harness.sent(0)
    harness.leave(1)
    assert list(harness.engine.data.groups) == ["other"]

    harness.agree(plan_of(1), 1)
    harness.push(0, bucket(0), floats(5))

    assert harness.array(0)[0] == 5


@pytest.mark.parametrize("lost", [False, True])
def test_a_loss_is_worth_a_warning_and_a_goodbye_is_not(lost: bool) -> None:
    harness = Harness()
    harness.assemble(2)
    harness.lose(0) if lost else harness.leave(0)

    assert any(log.warning for log in harness.logs) == lost
    assert any("'w0' (rank 0)" in log.text for log in harness.logs)


# ── strangers ─────────────────────────────────────────────────────────────────────────────────────────

STRANGE: list[tuple[Message, tuple[bytes, ...]]] = [
    (Push(collective(0), 0), (b"1234",)),
    (Push(collective(0), 0, 1.0, True, all_reduce(1)), (b"1234",)),
    (Push(bucket(0), 5, 1.0, False), ()),
    (Propose("hash"), (b"",)),
    (Propose("hash"), (plan_of(1).encoded,)),
    (Inquire(bucket(0)), ()),
    (Welcome("default", 0, 1, 1, ("w0", "w1")), ()),
    (Agreed("hash", 0), ()),
    (Result(bucket(0), 0, 1.0, False), ()),
    (Failure(Scope.CONNECTION, "WorkerLostError", "me"), ()),
    (Ping(), ()),
    (Status(), (b"{}",)),
]


@pytest.mark.parametrize(("message", "payloads"), STRANGE, ids=lambda value: type(value).__name__)
def test_what_a_stranger_may_not_say_costs_its_own_connection_only(
    message: Message, payloads: tuple[bytes, ...]
) -> None:
    harness = Harness()
    harness.assemble(2)
    before = harness.engine.snapshot(0)
    harness.receive(7, message, *payloads)

    assert isinstance(harness.refusal(7), UnexpectedMessageError)
    assert harness.engine.snapshot(0) == before
    assert not harness.inbox


@pytest.mark.parametrize(("message", "payloads"), STRANGE, ids=lambda value: type(value).__name__)
def test_what_an_applicant_may_not_say_costs_its_place(message: Message, payloads: tuple[bytes, ...]) -> None:
    harness = Harness()
    harness.join(1, "good", world=2)
    harness.join(2, "bad", world=3, group="other")
    harness.receive(2, message, *payloads)

    assert isinstance(harness.refusal(2), UnexpectedMessageError)
    assert list(harness.engine.control.groups) == ["default"]


def test_bytes_that_are_no_message_cost_the_connection_they_came_on() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.propose(0, plan_of(1))
    harness.feed(Garbled(SEATS + 1, MalformedMessageError("a header that is not msgpack")))

    assert isinstance(harness.refusal(SEATS + 1), MalformedMessageError)
    assert "it broke the protocol: a header that is not msgpack" in str(harness.failure(0, Scope.PROPOSAL))


def test_a_stranger_may_leave_or_be_lost_without_a_word() -> None:
    harness = Harness()

    assert harness.receive(7, Leave("bye")) == []
    assert harness.lose(7) == []


# ── stopping, and looking at it ───────────────────────────────────────────────────────────────────────


def test_stopping_tells_every_applicant_and_member() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.join(7, world=2, group="forming")
    harness.lose(1)
    harness.stop("SIGTERM")

    for rank in (0, 7 - SEATS):
        error = harness.failure(rank, Scope.CONNECTION)
        assert isinstance(error, CoordinatorStoppedError)
        assert "the coordinator was stopped (SIGTERM)" in str(error)
    assert not harness.inbox


def test_a_credit_that_cannot_work_is_refused() -> None:
    Engine({}, MIN_CREDIT_BYTES)
    with pytest.raises(InvalidArgumentError, match="a credit of 2097151 bytes is too small: 2097152 at least"):
        Engine({}, MIN_CREDIT_BYTES - 1)


def test_the_credit_is_what_members_are_told() -> None:
    harness = Harness(credit=CREDIT_BYTES + 1)
    harness.join(1, world=1)

    assert welcome(harness, 1).credit == CREDIT_BYTES + 1


def test_a_refusal_is_sent_before_the_connection_is_closed() -> None:
    harness = Harness()
    commands = harness.join(1, rank=5, world=2)

    assert [type(command) for command in commands][:2] == [Send, Close]


def test_the_snapshot_is_json_and_shows_what_people_want_to_know() -> None:
    harness = Harness()
    harness.assemble(2, plan_of(2, 1))
    harness.join(7, "early", rank=1, world=2, group="forming")
    for rank in range(2):
        harness.now += 1.5
        harness.push(rank, bucket(0, 0), floats(1, 2))
        harness.push(rank, bucket(0, 1), floats(1))
    harness.push(0, bucket(1, 1), floats(1))
    harness.now += 0.25

    seen = json.loads(json.dumps(harness.engine.snapshot(harness.now)))

    assert seen["groups"]["forming"]["waiting"] == [{"name": "early", "rank": 1, "waits": 3.25}]
    group = seen["groups"]["default"]
    assert (group["state"], group["round"], group["epoch"], group["world_size"]) == ("active", 1, 1, 2)
    late = {"held_up": {"rounds": 1, "seconds": 1.5, "cause": "began late"}}
    assert group["members"] == [{"rank": 0, "name": "w0", "seat": 0}, {"rank": 1, "name": "w1", "seat": 1} | late]
    times = {"opened": 1.5, "completed": 3.0}
    assert group["last_round"] == {"round": 0, "weights": [1, 1], **times, "last": 1, "cut": []}
    assert group["bytes_in"] == 2 * 12 + 4
    assert group["bytes_out"] == 2 * 12
    assert group["slices"] == 2
    assert group["open"] == [{"what": "bucket 'b1' of round 1", "round": 1, "age": 0.25, "missing": ["'w1' (rank 1)"]}]
    assert group["outstanding"][0] > 0 == group["outstanding"][1]
