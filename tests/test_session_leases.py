"""Tests of a worker's questions about data, and of what it says it used, with a channel that only records."""

from __future__ import annotations

import pytest

from gradserver.protocol.errors import ClosedError, DeadlineError, DisagreementError
from gradserver.protocol.messages import Failure, Push, Result, RoundDone, Scope
from gradserver.protocol.messages.leases import Claim, Claimed, Located, Register, Used
from gradserver.protocol.ranges import pack
from gradserver.worker.client import Worker
from gradserver.worker.data.ranges import DataRanges
from gradserver.worker.session import Session
from tests.cluster import Task
from tests.test_session import Tape, agree, answer, bucket, joined_session, memory, plan_of, push
from tests.test_session_shards import URLS

CLAIM = Claim("data", 1, 0, 4, 0)


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def session(tape: Tape) -> Session:
    found = joined_session(tape)
    agree(found, tape, plan_of(1, 1))
    return found


def ranges_of(session: Session, tape: Tape) -> DataRanges:
    """Return ten samples in their order, with the first four as the next batch."""
    data = DataRanges(10, Worker(session), batch_size=4, shuffle=False, prefetch=0)
    tape.reply = None
    task = Task(data.take)
    while Register("data", 10, 0, False, 0, 0) not in [message for message, _ in tape.sent]:
        assert not task.ended(0.001)
    session.receive(Located("data", 0), (b"",))
    while CLAIM not in [message for message, _ in tape.sent]:
        assert not task.ended(0.001)
    session.receive(Claimed("data", 1, 0, False), (pack(((0, 4),)),))
    assert task.result().tolist() == [0, 1, 2, 3]
    tape.take()
    return data


def test_what_was_used_is_said_before_the_first_push_of_a_round_and_once(session: Session, tape: Tape) -> None:
    ranges_of(session, tape)
    push(session, 1)
    push(session, 0)
    assert [type(message) for message, _ in tape.sent] == [Used, Push, Push]
    assert tape.sent[0] == (Used("data", 0, 0), (pack(((0, 4),)),))
    tape.take()
    for part in (0, 1):
        answer(session, bucket(0, part), 0, memory(1).data, over=True)
    session.finish_round(1.0)
    push(session, 0)
    assert [type(message) for message in tape.take()] == [Push], "nothing was used in this round"


def test_with_several_shards_it_is_said_of_every_round(tape: Tape) -> None:
    session = joined_session(tape, URLS, (1.0, 1.0, 1.0), "secret")
    agree(session, tape, plan_of(1))
    DataRanges(10, Worker(session), batch_size=4)
    push(session, 0)
    assert tape.sent[0] == (Used("data", 0, 0), (b"",))


def test_what_a_round_that_closed_without_this_worker_used_is_used_in_the_next(session: Session, tape: Tape) -> None:
    data = ranges_of(session, tape)
    assert data.use(0) == ((0, 4),)
    assert data.use(0) == ((0, 4),), "the same for the same round"
    data.carry()
    assert data.use(1) == ((0, 4),)
    assert data.use(2) == ()


def test_what_a_worker_gave_too_late_it_says_to_have_used_when_it_counts(tape: Tape) -> None:
    session = joined_session(tape, member_ids=(0, 1, 2), late="keep")
    agree(session, tape, plan_of(1))
    data = ranges_of(session, tape)
    push(session, 0)
    assert tape.take()[0] == Used("data", 0, 0)
    session.receive(Result(bucket(0, 0), 0, 1.0, True, without=(1,)), (memory(1).data,))
    session.receive(RoundDone(0, 7), ())
    session.finish_round(1.0)
    push(session, 0)
    assert (Used("data", 0, 1), (pack(((0, 4),)),)) in tape.sent
    answer(session, bucket(1, 0), 0, memory(1).data)
    session.receive(RoundDone(1, 7), ())
    session.finish_round(1.0)
    assert data.use(2) == ()


def test_what_a_worker_drops_it_returns_with_its_next_claim_whether_it_was_heard_to_use_it_or_not(tape: Tape) -> None:
    session = joined_session(tape, member_ids=(0, 1, 2), late="drop")
    agree(session, tape, plan_of(1))
    data = ranges_of(session, tape)
    push(session, 0)
    session.receive(Result(bucket(0, 0), 0, 1.0, True, without=(1,)), (memory(1).data,))
    session.receive(RoundDone(0, 7), ())
    session.finish_round(1.0)
    tape.take()
    task = Task(data.finished)
    asked = Claim("data", 2, 0, 0, 1), (pack(((0, 4),)),)
    while asked not in tape.sent:
        assert not task.ended(0.001)
    assert asked in session.member.again(), "until it has an answer"
    session.receive(Claimed("data", 2, 0, False), (b"",))
    assert not task.result()
    assert data.use(1) == ()


def test_on_a_new_connection_what_is_open_is_said_and_asked_again(session: Session, tape: Tape) -> None:
    data = ranges_of(session, tape)
    push(session, 0)
    asked = session.ask(Claim("data", 2, 0, 4, 1))
    assert session.member.again() == [(Used("data", 0, 0), (pack(((0, 4),)),)), (Claim("data", 2, 0, 4, 1), ())]
    session.receive(Claimed("data", 1, 0, False), (pack(((0, 4),)),))
    assert not asked.done(), "that was the answer to an earlier one"
    session.receive(Claimed("data", 2, 0, True), (b"",))
    assert asked.wait() == (Claimed("data", 2, 0, True), ())
    push(session, 1)
    for part in (0, 1):
        answer(session, bucket(0, part), 0, memory(1).data, over=True)
    session.finish_round(1.0)
    assert data.epoch == 0
    assert session.member.again() == [], "that round is over"


def test_a_wait_for_an_answer_ends_with_the_reason_for_its_absence(session: Session, tape: Tape) -> None:
    asked = session.ask(CLAIM)
    with pytest.raises(DeadlineError, match="has not said within 0.01 s what there is of data 'data'"):
        asked.wait(0.01)
    error = DisagreementError("'w1' uses other data")
    session.receive(Failure(Scope.DATA, "DisagreementError", error.message, {"data": "data"}), ())
    with pytest.raises(DisagreementError, match="'w1' uses other data"):
        asked.wait()
    asked = session.ask(CLAIM)
    session.lost(ClosedError("gone"))
    with pytest.raises(ClosedError, match="gone"):
        asked.wait()
    assert [type(message) for message in tape.take()] == [Claim, Claim]
