"""Tests of a session in an elastic group: what it says of memberships, and when it takes another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import (
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    GradServerError,
    MalformedMessageError,
    MembershipChangedError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.messages import Failure, Membership, Push, Result, RoundDone, Scope, Transfer, Welcome
from gradserver.protocol.offers import Offer
from gradserver.protocol.plan import simple_plan
from gradserver.worker.handle import Handle
from gradserver.worker.learner import receive
from gradserver.worker.session import Session, ShardReceiver
from tests.cluster import Task, wait_until
from tests.test_session import CREDIT, NAMES, Tape, agree, bucket, collective, joined_session, memory
from tests.test_session_shards import URLS, Shards

NEWS = Membership(8, (1, 2), ("w1", "w2"), "'w0' (rank 0) was lost in round 0 (it died); 2 workers go on", True)
SHARDS = {"shards": URLS, "rates": (1.0, 1.0, 1.0), "token": "secret"}
GATHER = Operation(Kind.ALL_GATHER, Op.NONE, UINT8, 3 << 20)


def elastic_session(tape: Tape, **shards: Any) -> Session:
    """Make member 1 of three, with the ``shards`` of the Welcome."""
    return joined_session(tape, member_ids=(0, 1, 2), **shards)


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def session(tape: Tape) -> Session:
    return elastic_session(tape)


def place(session: Session) -> tuple[int, int, tuple[str, ...]]:
    return session.membership.epoch, session.membership.rank, session.membership.names


BEFORE = (7, 1, NAMES)
AFTER = (8, 0, ("w1", "w2"))


def gather(session: Session) -> Handle:
    return session.collective(GATHER, memory(3), lambda *_: None)


def one_round(session: Session, tape: Tape, number: int = 0) -> Handle:
    """Exchange everything of a round but its end."""
    if number == 0:
        agree(session, tape, simple_plan([("b0", 2)], FLOAT32))
    handle = session.push_bucket(0, np.zeros(8, np.uint8), 1.0, True)
    session.receive(Result(bucket(number), 0, 3.0, False), ())
    return handle


def changed() -> GradServerError:
    return MembershipChangedError("call it again", epoch=8)


def test_what_depends_on_the_world_size_says_in_which_membership_it_was_called(session: Session, tape: Tape) -> None:
    gather(session)
    session.collective(Operation(Kind.BARRIER, Op.NONE, UINT8, 0), None, None)

    pushes = [message for message in tape.take() if isinstance(message, Push)]
    assert [(push.key.number, push.slice, push.epoch) for push in pushes[:2]] == [(0, 0, 7), (0, 1, 0)]
    assert {push.epoch for push in pushes[1:]} == {0}


def test_every_shard_is_told_the_membership() -> None:
    tape = Shards()
    session = elastic_session(tape, **SHARDS)
    tape.shards.clear()
    gather(session)

    first = {where: message for (message, _), where in reversed(list(zip(tape.sent, tape.shards, strict=True)))}
    assert [push.epoch for _, push in sorted(first.items()) if isinstance(push, Push)] == [7, 7, 7]


def test_a_membership_that_was_told_of_is_not_in_force_before_the_round_is_over(session: Session, tape: Tape) -> None:
    one_round(session, tape)
    told: list[Membership] = []
    session.on_membership(told.append)
    session.receive(NEWS, ())
    finishing = Task(session.finish_round, None)
    assert not finishing.ended(0.05)
    assert place(session) == BEFORE
    assert told == []

    session.receive(RoundDone(0, 8), ())

    finishing.result()
    assert place(session) == AFTER
    assert session.round == 1
    assert told == [NEWS]


def test_the_end_of_a_round_may_come_before_any_wait_for_it(session: Session, tape: Tape) -> None:
    one_round(session, tape)
    session.receive(NEWS, ())
    session.receive(RoundDone(0, 7), ())
    session.finish_round(None)

    assert place(session) == BEFORE


@pytest.mark.parametrize("waits", [True, False])
def test_the_end_of_a_round_may_overtake_the_membership_that_it_brings(
    session: Session, tape: Tape, waits: bool
) -> None:
    one_round(session, tape)
    if not waits:
        session.receive(RoundDone(0, 8), ())
    finishing = Task(session.finish_round, None)
    if waits:
        assert not finishing.ended(0.05)
        session.receive(RoundDone(0, 8), ())
    assert not finishing.ended(0.05)
    assert session.round == 0

    session.receive(NEWS, ())

    finishing.result()
    assert place(session) == AFTER
    assert session.round == 1


def test_a_member_that_comes_with_a_round_is_there_after_it(session: Session, tape: Tape) -> None:
    """Test a membership in force before: a collective after the round before is called again in it."""
    came = Membership(8, (1, 2, 3), ("w1", "w2", "spot"), "'w0' was lost, 'spot' joined in round 1", True, (3,), 1)
    session.receive(came, ())
    session.receive(RoundDone(0, 7), ())
    one_round(session, tape)
    session.finish_round(None)
    handle = gather(session)
    session.receive(Failure.of(changed(), Scope.EXCHANGE, ExchangeKey(Stream.COLLECTIVE, 0, 1)), ())
    with pytest.raises(MembershipChangedError):
        handle.wait()
    assert place(session) == AFTER

    one_round(session, tape, 1)
    session.receive(RoundDone(1, 8), ())
    session.finish_round(None)

    assert place(session) == (8, 0, ("w1", "w2", "spot"))


def test_memberships_may_overtake_one_another(session: Session, tape: Tape) -> None:
    one_round(session, tape)
    session.receive(Membership(9, (1,), ("w1",), "w2 left", False), ())
    session.receive(RoundDone(0, 9), ())
    session.finish_round(None)
    session.receive(NEWS, ())
    session.boundaries.adopt(NEWS.epoch, 1)

    assert place(session) == (9, 0, ("w1",))


def test_a_round_that_does_not_end_says_so_and_can_be_waited_for_again(session: Session, tape: Tape) -> None:
    one_round(session, tape)
    with pytest.raises(DeadlineError, match="round 0 is not over after 0.01 s: the group waits for more workers"):
        session.finish_round(0.01)
    session.receive(RoundDone(0, 7), ())
    session.finish_round(None)

    assert session.round == 1


def test_a_wait_for_the_end_of_a_round_hears_of_a_lost_connection(session: Session, tape: Tape) -> None:
    one_round(session, tape)
    finishing = Task(session.finish_round, None)
    assert not finishing.ended(0.02)
    session.lost(ConnectionLostError("it broke"))

    finishing.error(ConnectionLostError)


def test_two_memberships_are_one_step(session: Session, tape: Tape) -> None:
    one_round(session, tape)
    session.receive(NEWS, ())
    session.receive(Membership(9, (1,), ("w1",), "w2 left", False), ())
    session.receive(RoundDone(0, 9), ())
    session.finish_round(None)

    assert place(session) == (9, 0, ("w1",))


def test_a_collective_that_says_so_is_where_the_membership_changes(session: Session) -> None:
    handle = gather(session)
    session.receive(NEWS, ())
    session.receive(Failure.of(changed(), Scope.EXCHANGE, collective(0)), ())
    assert handle.done()
    assert place(session) == BEFORE

    with pytest.raises(MembershipChangedError):
        handle.wait()

    assert place(session) == AFTER


def test_a_shard_that_speaks_of_a_membership_first_is_waited_with_until_it_was_told_of() -> None:
    session = elastic_session(Shards(), **SHARDS)
    handle = gather(session)
    ShardReceiver(session, 1).receive(Failure.of(changed(), Scope.EXCHANGE, collective(0)), ())
    waiting = Task(handle.wait)
    assert not waiting.ended(0.05)

    session.receive(NEWS, ())

    waiting.error(MembershipChangedError)
    assert place(session) == AFTER


def test_a_learner_takes_the_state_from_another_when_the_first_one_does_not_send_it(tape: Tape) -> None:
    """Test that it waits for no deadline, whether it asked for a part before it heard of that or asks after it."""
    session = joined_session(tape, member_ids=(0, 1, 2), joins=True)
    first, second = Transfer(1, 0, 1), Transfer(2, 2, 1)
    session.receive(RoundDone(3, 7, (first,)), ())
    receiving = Task(receive, session, first)
    wait_until(lambda: any(isinstance(message, Push) for message, _ in tape.sent), "it has asked for a part")

    session.receive(RoundDone(4, 7, (second,)), ())

    receiving.error(WorkerLostError)
    with pytest.raises(WorkerLostError, match="the member that was to send its state does not"):
        receive(session, first)
    receiving = Task(receive, session, second)
    assert not receiving.ended(0.05)
    session.close("the test is over")
    receiving.error(ClosedError)


def test_weights_that_differ_from_slice_to_slice_are_told_by_the_largest(session: Session) -> None:
    handle = session.collective(Operation(Kind.ALL_REDUCE, Op.SUM, UINT8, 2 << 20), memory(2), memory(2))
    for index, weight in enumerate((3.0, 2.0)):
        session.receive(Result(collective(0), index, weight, False), ())
    handle.wait()

    assert handle.weight == 3.0


@pytest.mark.parametrize(
    "message",
    [
        Membership(8, (0, 2), ("w0", "w2"), "this one is gone", True),
        Membership(8, (1, 2), ("w1",), "a name too few", True),
        Membership(8, (1, 2), ("w1", "w2"), "an offer too few", True, offers=(Offer(host="a"),)),
        Welcome("group", 1, 7, CREDIT, NAMES, member_ids=(0, 1)),
    ],
)
def test_memberships_that_cannot_be_are_refused(session: Session, message: Membership | Welcome) -> None:
    with pytest.raises(MalformedMessageError):
        session.receive(message, ())
