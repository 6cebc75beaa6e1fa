"""Tests of control: how elastic groups form, shrink, pause and end."""

from __future__ import annotations

import pytest

from gradserver.engine.events import Disconnected
from gradserver.engine.identities import numbered
from gradserver.engine.policy import Policy
from gradserver.protocol.errors import (
    ConnectionLostError,
    DeadlineError,
    InvalidWorldSizeError,
    JoinTimeoutError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.messages import Agreed, Failure, Leave, Membership, Result, RoundDone, Serve, Welcome
from gradserver.protocol.messages.recovery import Resume
from tests.crash_harness import Fused
from tests.engine_harness import SEATS, TIMEOUT, Harness, bucket, collective, floats, plan_of
from tests.test_engine_departures import BARRIER


def harness(minimum: int = 2, maximum: int = 4, gather: float = 2.0) -> Harness:
    return Harness({"default": Policy(minimum, maximum, gather)})


def welcomes(driven: Harness, *ranks: int) -> list[Welcome]:
    return driven.only(ranks, Welcome)


def active(minimum: int, world: int, *sizes: int) -> Harness:
    driven = harness(minimum, 8)
    driven.assemble(world, plan_of(*sizes) if sizes else None)
    return driven


# ── beginning ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_group_that_has_its_minimum_waits_for_more_and_begins() -> None:
    driven = harness()
    driven.join(SEATS, "a")
    driven.wait(2.0)
    driven.join(SEATS + 1, "b")
    assert driven.silent(0, 1)
    driven.wait(1.5)
    driven.join(SEATS + 2, "c")
    driven.wait(0.25)
    assert driven.silent(0, 1, 2)

    driven.wait(0.25)

    names = ("a", "b", "c")
    assert welcomes(driven, 0, 1, 2) == [
        Welcome("default", rank, 1, driven.credit, names, member_ids=(0, 1, 2), timeout=10.0, places=4)
        for rank in range(3)
    ]
    assert driven.group()["state"] == "active"
    assert driven.group()["world_size"] == 3


def test_it_begins_at_once_with_its_maximum() -> None:
    driven = harness(1, 2)
    for index in range(2):
        driven.join(SEATS + index)

    assert len(welcomes(driven, 0, 1)) == 2


def test_it_begins_at_once_with_as_many_as_all_applicants_ask_for() -> None:
    driven = harness(1, 8)
    for index in range(3):
        assert driven.silent(0)
        driven.join(SEATS + index, world=3)

    assert len(welcomes(driven, 0, 1, 2)) == 3


def test_a_wished_world_size_is_waited_for_no_longer_than_others() -> None:
    driven = harness(2, 8)
    for index in range(2):
        driven.join(SEATS + index, world=5)
    driven.wait(2.0)

    assert len(welcomes(driven, 0, 1)) == 2


def test_an_applicant_with_less_patience_than_gathering_takes_is_in_it_all_the_same() -> None:
    driven = harness(1, 8, gather=30.0)
    driven.join(SEATS, timeout=3.0)
    driven.wait(3.0)

    assert len(welcomes(driven, 0)) == 1


def test_gathering_ends_when_too_few_are_left_and_begins_anew() -> None:
    driven = harness()
    for index in range(2):
        driven.join(SEATS + index)
    driven.wait(1.0)
    driven.lose(1)
    driven.join(SEATS + 2)
    driven.wait(1.5)
    assert driven.silent(0, 2)
    driven.wait(0.5)

    assert len(welcomes(driven, 0, 2)) == 2


def test_an_applicant_that_is_left_alone_waits_on() -> None:
    driven = harness()
    for index in range(2):
        driven.join(SEATS + index)
    driven.lose(1)
    driven.wait(2.0)

    assert driven.silent(0)


def test_ranks_that_were_asked_for_give_the_order_and_leave_no_gap() -> None:
    driven = harness(2, 8)
    driven.join(SEATS, "last", rank=5)
    driven.join(SEATS + 1, "first", rank=1)
    driven.wait(2.0)

    assert welcomes(driven, 1)[0].rank == 0
    assert welcomes(driven, 0)[0].names == ("first", "last")


@pytest.mark.parametrize("world", [1, 5])
def test_a_world_size_that_can_never_be_is_refused(world: int) -> None:
    driven = harness()
    driven.join(SEATS, "w", world=world)

    error = driven.refusal(SEATS)
    assert isinstance(error, InvalidWorldSizeError)
    assert (
        str(error)
        == f"'w' wants a world size of {world}, but the coordinator was started with 2 to 4 for group 'default'"
    )


def test_too_few_applicants_are_told_how_many_are_missing() -> None:
    driven = harness(3, MAX_WORLD_SIZE)
    driven.join(SEATS, "w")
    driven.wait(TIMEOUT)

    error = driven.refusal(SEATS)
    assert isinstance(error, JoinTimeoutError)
    told = "group 'default' has 1 of 3 or more workers after 10 s: 'w' came; missing: 2 more, of any rank. Start them"
    assert str(error).startswith(told)


@pytest.mark.parametrize(("least", "most"), [(0, 2), (3, 2), (1, MAX_WORLD_SIZE + 1)])
def test_a_policy_that_cannot_be_is_refused(least: int, most: int) -> None:
    with pytest.raises(InvalidWorldSizeError, match="1 ≤ MIN ≤ MAX"):
        Policy(least, most)


def test_other_groups_of_the_same_coordinator_are_fixed() -> None:
    driven = harness()
    driven.assemble(2, group="other")
    driven.lose(1)

    assert driven.group("other")["state"] == "broken"


# ── shrinking ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("politely", [False, True])
def test_the_others_hear_at_once_of_a_departure_and_that_they_go_on(politely: bool) -> None:
    driven = active(1, 3, 4)
    if politely:
        driven.leave(1)
    else:
        driven.lose(1)

    what = "left in round 0 (done)" if politely else "was lost in round 0 (connection reset)"
    reason = f"'w1' (rank 1) {what}; 2 workers go on"
    assert driven.only([0, 2], Membership) == [Membership(2, (0, 2), ("w0", "w2"), reason, not politely)] * 2
    assert driven.logs[-1].text == f"group 'default': {reason}, membership epoch 2"
    assert driven.logs[-1].warning is not politely
    assert driven.group()["members"] == [
        {"rank": 0, "seat": 0, "name": "w0"},
        {"rank": 1, "seat": 2, "name": "w2"},
    ]


def test_two_departures_are_two_epochs_and_one_step_for_members() -> None:
    driven = active(1, 4, 1)
    driven.lose(0)
    driven.lose(2)
    assert [news.epoch for news in driven.told(1, Membership)] == [2, 3]
    for rank in (1, 3):
        driven.push(rank, bucket(0), floats(1))

    assert driven.told(1, RoundDone) == [RoundDone(0, 3)]


def test_the_error_that_a_member_left_with_is_the_reason() -> None:
    driven = active(1, 2, 4)
    driven.receive(SEATS + 1, Leave("it raised RuntimeError: out of memory", failed=True))

    (news,) = driven.told(0, Membership)
    assert news.lost
    assert news.reason == (
        "'w1' (rank 1) was lost in round 0 (it raised RuntimeError: out of memory); 1 worker goes on"
    )


def test_a_plan_that_waited_for_a_departed_member_is_settled() -> None:
    driven = active(1, 3)
    plan = plan_of(4)
    for rank in (0, 2):
        driven.propose(rank, plan)
    assert driven.silent(0, 2)

    driven.lose(1)

    for rank in (0, 2):
        driven.told(rank, Membership)
        assert driven.told(rank, Agreed) == [Agreed(plan.hash, 0)]


def test_what_the_gone_had_proposed_has_no_vote() -> None:
    driven = active(1, 3)
    driven.propose(1, plan_of(9))
    driven.lose(1)
    for rank in (0, 2):
        driven.told(rank, Membership)
        driven.propose(rank, plan_of(4))

    assert len(driven.only([0, 2], Agreed)) == 2


def test_the_last_one_ends_the_group() -> None:
    driven = active(1, 2)
    driven.lose(0)
    driven.lose(1)

    assert driven.engine.control.groups == {}
    driven.assemble(1)


# ── boundaries and pauses ─────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_waits_when_the_last_member_goes_before_a_round_is_told_to_connect_again() -> None:
    driven = active(1, 1, 1)
    driven.join(SEATS + 1)
    assert [message.joins for message, _ in driven.sent(1) if isinstance(message, Welcome)] == [True]
    driven.lose(0)

    error = driven.refusal(SEATS + 1)
    assert isinstance(error, WorkerLostError)
    assert str(error).endswith("is gone before its first round: connect again, and the group begins anew")


def test_a_round_is_over_after_its_last_result() -> None:
    driven = active(1, 2, 1, 1)
    for part in range(2):
        for rank in range(2):
            driven.push(rank, bucket(0, part), floats(1))

    for rank in range(2):
        assert [result.over for result in driven.told(rank, Result)] == [False, True]
        assert driven.silent(rank)


def test_after_a_departure_its_end_is_told_once_and_then_results_say_it_again() -> None:
    driven = active(1, 3, 1)
    driven.lose(2)
    for number in range(2):
        for rank in range(2):
            driven.push(rank, bucket(number), floats(1))

    for rank in range(2):
        assert driven.told(rank, RoundDone) == [RoundDone(0, 2)]
        assert [result.over for result in driven.told(rank, Result)] == [False, True]


def test_while_a_worker_joins_results_do_not_say_that_a_round_is_over() -> None:
    driven = active(1, 2, 1)
    driven.receive(SEATS, Serve())
    driven.join(SEATS + 5, "late")
    for number in range(2):
        for rank in range(2):
            driven.push(rank, bucket(number), floats(1))

    for rank in range(2):
        assert [done.round for done in driven.told(rank, RoundDone)] == [0, 1]
        assert not any(result.over for result in driven.told(rank, Result))


def paused() -> Harness:
    driven = active(2, 2, 1)
    driven.lose(1)
    driven.told(0, Membership)
    driven.push(0, bucket(0), floats(1))
    return driven


def test_below_the_minimum_a_round_is_finished_and_no_other_begins() -> None:
    driven = paused()

    assert [type(message) for message, _ in driven.sent(0)] == [Result]
    assert driven.group()["state"] == "paused"
    says = "waiting for workers: group 'default' has 1, at least 2 are needed to go on; it waits 10 s"
    assert driven.logs[-1].text == says
    assert driven.logs[-1].warning


def test_a_pause_ends_at_the_groups_deadline_with_an_error_that_says_how_many_are_missing() -> None:
    driven = paused()
    driven.sent(0)
    driven.wait(TIMEOUT - 0.01)
    assert driven.silent(0)
    driven.wait(0.01)

    error = driven.refusal(SEATS)
    assert isinstance(error, DeadlineError)
    assert str(error) == (
        "group 'default' waited 10 s for workers after round 0: it has 1, 'w0' (rank 0), "
        "and at least 2 are needed to go on"
    )
    assert error.missing == ("1 more, of any rank",)
    assert driven.engine.next_deadline() is None
    driven.assemble(2)


def test_a_member_that_leaves_a_pause_ends_it() -> None:
    driven = paused()
    driven.lose(0)

    assert driven.engine.control.groups == {}
    assert driven.engine.next_deadline() is None


def test_whatever_else_is_due_when_a_pause_ends_ends_with_it() -> None:
    driven = Fused({"default": Policy(2, 3)})
    driven.assemble(2, plan_of(1))
    driven.leave(1)
    driven.push(0, bucket(0), floats(1))
    driven.answer(driven.reduces.pop())
    assert driven.group()["state"] == "paused"
    driven.lose(0)
    driven.sent(0)

    driven.wait(1000.0)  # as if the coordinator had been stopped, and continued

    assert driven.engine.control.groups == {}
    driven.assemble(2)


def test_a_report_that_comes_when_its_group_has_ended_is_of_no_use() -> None:
    driven = Fused({"default": Policy(1, 3)})
    driven.assemble(2, plan_of(1))
    driven.push(0, bucket(0), floats(1))
    driven.lose(0)
    driven.lose(1)

    driven.wait(1000.0)  # data reports the late members of a group that all have left by then

    assert driven.engine.control.groups == {}
    driven.assemble(2)


def test_a_worker_that_waits_for_a_place_and_freezes_is_told_that_it_was_given_up() -> None:
    driven = Harness({"default": Policy(1, 1, rejoin=10.0)})
    driven.join(SEATS, "a")
    driven.join(SEATS + 1, "b")
    welcomes(driven, 0)

    driven.feed(Disconnected(SEATS + 1, "nothing was heard of it for 3 s", silent=True))

    assert isinstance(driven.refusal(SEATS + 1), ConnectionLostError)
    assert driven.group()["waiting"] == []
    assert driven.silent(0)


def test_collectives_go_on_below_the_minimum() -> None:
    driven = active(2, 2)
    driven.lose(1)
    driven.told(0, Membership)
    driven.push(0, collective(0), operation=BARRIER)

    assert len(driven.only([0], Result)) == 1


def test_departures_are_worker_errors_that_name_the_rank_of_then() -> None:
    driven = active(1, 3)
    driven.lose(0)
    driven.leave(2)

    departed = driven.engine.data.groups["default"].members.departed
    assert isinstance(departed[0], WorkerLostError)
    assert departed[0].fields == {"worker": "w0", "rank": 0}
    assert isinstance(departed[2], WorkerLeftError)
    assert departed[2].fields == {"worker": "w2", "rank": 1}


def test_nothing_of_a_fixed_group_changes() -> None:
    driven = Harness()
    driven.assemble(2, plan_of(1))
    for rank in range(2):
        driven.push(rank, bucket(0), floats(1))
        assert not driven.told(rank, RoundDone)
    for rank in range(2):
        assert [type(message) for message, _ in driven.sent(rank)] == [Result]
    driven.push(0, bucket(1), floats(1))
    driven.lose(1)

    assert [type(message) for message, _ in driven.sent(0)] == [Failure]


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────


def called_the_same(count: int = 3) -> Harness:
    driven = harness(1, 4)
    for rank in range(count):
        driven.join(SEATS + rank, "same", rank=rank, world=count)
    return driven


def test_workers_of_one_name_are_numbered_when_a_group_begins_and_the_log_says_what_to_do() -> None:
    driven = called_the_same()

    for rank, welcome in enumerate(welcomes(driven, 0, 1, 2)):
        assert welcome.rank == rank
        assert welcome.names == ("same", "same-2", "same-3")
    warnings = [log.text for log in driven.logs if log.warning]
    assert len(warnings) == 2
    assert "another worker is called 'same' already, so rank 1 is called 'same-2': give each" in warnings[0]
    assert "GRADSERVER_NAME" in warnings[0]


@pytest.mark.parametrize(
    ("names", "become"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a-2", "a"], ["a", "a-2", "a-3"]),
        (["a", "a", "a-2"], ["a", "a-3", "a-2"]),
        (["x" * 128] * 2, ["x" * 128, "x" * 123 + "-2"]),
        (["ü" * 64] * 2, ["ü" * 64, "ü" * 61 + "-2"]),
    ],
)
def test_a_number_is_one_that_no_worker_has(names: list[str], become: list[str]) -> None:
    assert numbered(names) == become


def test_a_numbered_worker_gets_its_own_seat_again_under_the_shared_name() -> None:
    driven = called_the_same()
    driven.inbox.clear()
    driven.agree(plan_of(4), 3)
    driven.receive(SEATS, Serve())
    driven.lose(1)

    driven.join(SEATS + 7, "same")

    (welcome,) = driven.told(7, Welcome)
    assert welcome.names == ("same", "same-2", "same-3")
    assert (welcome.rank, welcome.member_ids) == (1, (0, 1, 2))
    driven.join(SEATS + 8, "same")
    assert driven.silent(8), "there is no place of that name"


def test_a_durable_groups_members_of_one_name_come_back_each_to_its_own_seat() -> None:
    driven = Fused({"default": Policy(1, 8)})
    for rank in range(2):
        driven.join(SEATS + rank, "same", rank=rank, world=2)
    tokens = [driven.told(rank, Welcome)[0].token for rank in range(2)]
    assert tokens[0] != tokens[1]

    driven.restart()
    for rank in range(2):
        driven.receive(SEATS + 50 + rank, Resume("default", rank, tokens[rank], 1, ""))

    assert [member["name"] for member in driven.group()["members"]] == ["same", "same-2"]
    assert not driven.closed
