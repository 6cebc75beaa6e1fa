"""Tests of a worker's side of the protocol, with a channel that only records what is sent."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Lock, Receiver
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import (
    ClosedError,
    ConnectionLostError,
    CoordinatorStoppedError,
    DeadlineError,
    JoinRefusedError,
    LimitExceededError,
    OutOfStepError,
    PlanMismatchError,
    UsageError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import SLICE_BYTES
from gradserver.protocol.messages import (
    Agreed,
    Failure,
    Inquire,
    Join,
    Leave,
    Message,
    Missing,
    Ping,
    Place,
    Propose,
    Push,
    Result,
    Scope,
    Welcome,
)
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.worker.handle import Handle
from gradserver.worker.session import Session
from tests.cluster import Task, wait_until

NAMES = ("w0", "w1", "w2")
CREDIT = 2 * SLICE_BYTES


class Tape:
    """A channel that records what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, Sequence[Buffer]]] = []
        self.shards: list[int] = []
        self.reply: Message | None = None
        """The answers to the next message, at once."""
        self.hears = True
        self.places: dict[int, Place] = {}
        """Addresses of memory that the coordinator sees."""
        self.closed = False
        self.broken = False

    def attach(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        self.shards.append(shard)
        if self.closed:
            raise ClosedError("this worker is closed")
        if self.broken:
            raise ConnectionLostError("the connection is gone")
        self.sent.append((message, payloads))
        reply, self.reply = self.reply, None
        if reply is not None:
            self._receiver.receive(reply, ())
        if isinstance(message, Leave) and self.hears:
            self._receiver.receive(message, ())  # as the coordinator does when it has heard everything

    def close(self) -> None:
        self.closed = True

    def wait(self, done: Lock, timeout: float) -> bool:
        return done.acquire(timeout=timeout)

    def watch(self, enough: Callable[[], bool]) -> None:
        pass

    def look(self) -> None:
        pass

    def empty(self, _nbytes: int) -> Bytes | None:
        return None

    def place_of(self, data: Bytes, _shard: int = 0) -> Place | None:
        return self.places.get(data.ctypes.data)

    def take(self) -> list[Message]:
        """Return what was sent since this was last called."""
        messages = [message for message, _ in self.sent]
        self.sent.clear()
        return messages

    def pushes(self) -> list[tuple[int, int]]:
        """Return the place of each Push that was sent since this was last called."""
        return [slice_of(message) for message in self.take() if isinstance(message, Push)]


def slice_of(push: Push) -> tuple[int, int]:
    """Return exchange (its number, or part for buckets) and slice."""
    return push.key.part if push.key.stream == Stream.BUCKET else push.key.number, push.slice


def joined_session(tape: Tape, *shards: Any, **more: Any) -> Session:
    """Make a session that joins as rank 1 of a group of three, with the ``shards`` and more of the Welcome."""
    session = Session(tape, timeout=10.0)
    joining = session.join(Join("group", "w1", 1, 3, 10.0))
    session.receive(
        Welcome("group", 1, 7, CREDIT, NAMES, *shards, **{"member_ids": tuple(range(len(NAMES))), **more}), ()
    )
    joining.wait()
    tape.take()
    return session


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def session(tape: Tape) -> Session:
    """Make rank 1 of a group of three."""
    return joined_session(tape)


def collective(number: int) -> ExchangeKey:
    return ExchangeKey(Stream.COLLECTIVE, number)


def bucket(number: int, part: int = 0) -> ExchangeKey:
    return ExchangeKey(Stream.BUCKET, number, part)


def memory(slices: float, fill: int = 1) -> Bytes:
    """Return as many bytes as fill ``slices`` slices."""
    return np.full(int(slices * SLICE_BYTES), fill, np.uint8)


def all_reduce(session: Session, data: Bytes, value: Any = None) -> Handle:
    return session.collective(Operation(Kind.ALL_REDUCE, Op.SUM, UINT8, data.size), data, data, value=value)


def answer(
    session: Session,
    key: ExchangeKey,
    index: int,
    payload: Buffer | None = None,
    weight: float = 3.0,
    over: bool = False,
) -> None:
    session.receive(Result(key, index, weight, payload is not None, over=over), () if payload is None else (payload,))


def agree(session: Session, tape: Tape, plan: Plan, first_round: int = 0) -> None:
    tape.reply = Agreed(plan.hash, first_round)
    session.agree(plan, None)
    tape.take()


def plan_of(*slices: float) -> Plan:
    """Return a plan of buckets of so many slices each, in bytes."""
    return simple_plan([(f"b{index}", int(size * SLICE_BYTES)) for index, size in enumerate(slices)], UINT8, Op.SUM)


def push(session: Session, part: int, fill: int = 1) -> tuple[Handle, Bytes]:
    assert session.plan is not None
    data = np.full(session.plan.buckets[part].numel, fill, np.uint8)
    return session.push_bucket(part, data, 1.0, True), data


# ── joining and agreeing ──────────────────────────────────────────────────────────────────────────────


def test_joining_is_done_when_welcomed(tape: Tape) -> None:
    session = Session(tape, timeout=10.0)
    join = Join("group", "w1", 1, 3, 10.0)

    handle = session.join(join)
    assert tape.take() == [join]
    assert not handle.done()
    with pytest.raises(UsageError, match="has not joined"):
        _ = session.membership

    session.receive(Welcome("group", 1, 7, CREDIT, NAMES, member_ids=tuple(range(len(NAMES)))), ())
    handle.wait()
    assert session.membership.epoch == 7


def test_joining_fails_with_the_coordinators_reason(tape: Tape) -> None:
    session = Session(tape, timeout=10.0)
    handle = session.join(Join("group", "w1", 1, 3, 10.0))

    session.receive(Failure.of(JoinRefusedError("rank 1 is taken"), Scope.CONNECTION), ())

    with pytest.raises(JoinRefusedError, match="rank 1 is taken"):
        handle.wait()


def test_plan_holds_from_the_round_that_the_coordinator_says(session: Session, tape: Tape) -> None:
    plan = plan_of(1)
    tape.reply = Agreed(plan.hash, 12)

    session.agree(plan, None)

    assert tape.sent == [(Propose(plan.hash, number=1), (plan.encoded,))]
    assert (session.plan, session.round) == (plan, 12)


def test_another_plan_can_be_proposed_after_one_was_rejected(session: Session, tape: Tape) -> None:
    tape.reply = Failure.of(PlanMismatchError("they differ"), Scope.PROPOSAL)
    with pytest.raises(PlanMismatchError, match="they differ"):
        session.agree(plan_of(1), None)

    agree(session, tape, plan_of(2))


def test_waiting_for_the_plan_can_be_repeated(session: Session, tape: Tape) -> None:
    plan = plan_of(1)
    with pytest.raises(DeadlineError, match="the plan is not agreed on after 0.01 s: not every member has proposed it"):
        session.agree(plan, 0.01)

    session.receive(Agreed(plan.hash, 5), ())  # between the two
    session.agree(plan, None)

    assert tape.take() == [Propose(plan.hash, number=1)]
    assert (session.plan, session.round) == (plan, 5)
    agree(session, tape, plan_of(2))


def test_plan_cannot_be_proposed_while_another_one_is(session: Session) -> None:
    with pytest.raises(DeadlineError):
        session.agree(plan_of(1), 0.01)

    with pytest.raises(UsageError, match="waits for the others to agree on another plan"):
        session.agree(plan_of(2), None)


def test_plan_that_cannot_be_sent_leaves_the_way_free_for_another(session: Session, tape: Tape) -> None:
    names = random.Random(0)
    too_large = simple_plan([(f"{index}{names.randbytes(1990).hex()}", 1) for index in range(2600)], UINT8, Op.SUM)
    with pytest.raises(LimitExceededError, match="the plan can be packed to"):
        session.agree(too_large, None)

    agree(session, tape, plan_of(1))


def test_plan_cannot_be_proposed_in_the_middle_of_a_round(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(1, 1))
    push(session, 0)

    with pytest.raises(OutOfStepError, match="round 0 is not finished"):
        session.agree(plan_of(1), None)


# ── pushing and results ───────────────────────────────────────────────────────────────────────────────


def test_tensor_is_pushed_slice_by_slice_and_the_first_says_what_it_is(session: Session, tape: Tape) -> None:
    data = memory(1.5)
    data[:] = np.arange(data.size) % 251

    all_reduce(session, data)

    operation = Operation(Kind.ALL_REDUCE, Op.SUM, UINT8, data.size)
    assert [message for message, _ in tape.sent] == [
        Push(collective(0), 0, 1.0, True, operation),
        Push(collective(0), 1, 1.0, True, None),
    ]
    assert b"".join(bytes(payload) for _, (payload,) in tape.sent) == data.tobytes()


def test_payload_is_the_tensors_own_memory(session: Session, tape: Tape) -> None:
    data = memory(0.5)

    all_reduce(session, data)

    ((_, (payload,)),) = tape.sent
    assert np.shares_memory(np.frombuffer(payload, np.uint8), data)


def test_collectives_are_numbered_in_the_order_in_which_they_are_called(session: Session, tape: Tape) -> None:
    for _ in range(3):
        all_reduce(session, memory(0.1))

    assert tape.pushes() == [(0, 0), (1, 0), (2, 0)]


def test_results_may_come_in_any_order(session: Session) -> None:
    data = memory(2)
    handle = all_reduce(session, data, value="the tensor")

    answer(session, collective(0), 1, bytes([2]) * SLICE_BYTES)
    assert not handle.done()
    answer(session, collective(0), 0, bytes([1]) * SLICE_BYTES)

    assert handle.done()
    assert handle.wait() == "the tensor"
    assert (data == np.repeat(np.array([1, 2], np.uint8), SLICE_BYTES)).all()
    assert (handle.weight, handle.present) == (3.0, True)


def test_result_without_contributions_is_zeros(session: Session) -> None:
    data = memory(0.5)
    handle = all_reduce(session, data)

    answer(session, collective(0), 0, None, weight=0.0)

    handle.wait()
    assert not data.any()
    assert (handle.weight, handle.present) == (0.0, False)


def test_results_that_nothing_waits_for_are_ignored(session: Session, tape: Tape) -> None:
    data = memory(2)
    all_reduce(session, data)
    answer(session, collective(0), 0, bytes(SLICE_BYTES))
    data[:] = 7

    answer(session, collective(0), 0, bytes(SLICE_BYTES))  # a second time
    answer(session, collective(0), 5, bytes(SLICE_BYTES))  # no such slice
    answer(session, collective(9), 0, bytes(SLICE_BYTES))  # not begun
    session.receive(Ping(), ())

    assert (data == 7).all()
    all_reduce(session, memory(2))
    assert tape.pushes()[-1] == (1, 0), "a slice's credit was given back twice"


def test_wait_finishes_once(session: Session) -> None:
    finished: list[int] = []
    handle = all_reduce(session, memory(0.1))
    handle.then(lambda: finished.append(1))
    answer(session, collective(0), 0, bytes(SLICE_BYTES // 10))

    assert finished == []
    handle.wait()
    handle.wait()
    assert finished == [1]


# ── credit ────────────────────────────────────────────────────────────────────────────────────────────


def test_no_more_is_in_flight_than_the_credit(session: Session, tape: Tape) -> None:
    all_reduce(session, memory(4))
    assert tape.pushes() == [(0, 0), (0, 1)]

    answer(session, collective(0), 1, bytes(SLICE_BYTES))
    assert tape.pushes() == [(0, 2)]

    answer(session, collective(0), 0, bytes(SLICE_BYTES))
    assert tape.pushes() == [(0, 3)]


def test_collectives_wait_for_credit_in_order(session: Session, tape: Tape) -> None:
    all_reduce(session, memory(3))
    all_reduce(session, memory(0.1))
    assert tape.pushes() == [(0, 0), (0, 1)]

    answer(session, collective(0), 0, bytes(SLICE_BYTES))
    assert tape.pushes() == [(0, 2)]


def test_collectives_transfers_and_buckets_do_not_wait_for_each_other(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(3))
    transfer = Operation(Kind.TRANSFER, Op.NONE, UINT8, 3 * SLICE_BYTES)
    data = memory(3)

    all_reduce(session, memory(3))
    session.transfer(transfer, (1, 2, 0), data, None)
    session.transfer(transfer, (2, 1, 0), None, data)
    push(session, 0)

    sent = Counter((message.key.stream, message.key.source) for message in tape.take() if isinstance(message, Push))
    streams = [(Stream.COLLECTIVE, -1), (Stream.TRANSFER, 1), (Stream.TRANSFER, 2), (Stream.BUCKET, -1)]
    assert sent == dict.fromkeys(streams, 2)


def test_first_unanswered_slice_of_the_plan_is_sent_beyond_the_credit(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(2, 3))

    push(session, 1)
    assert tape.pushes() == [(1, 0), (1, 1)]
    push(session, 0)
    assert tape.pushes() == [(0, 0)], "others may have filled their credit with bucket 0, and wait for this one"

    answer(session, bucket(0, 0), 0, bytes(SLICE_BYTES))
    assert tape.pushes() == [(0, 1)]
    answer(session, bucket(0, 0), 1, bytes(SLICE_BYTES))
    assert tape.pushes() == []
    answer(session, bucket(0, 1), 0, bytes(SLICE_BYTES))
    assert tape.pushes() == [(1, 2)]


# ── rounds ────────────────────────────────────────────────────────────────────────────────────────────


def test_round_goes_on_when_every_bucket_has_its_result(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(0.5, 0, 0.5), first_round=4)
    for part in (2, 0):
        push(session, part)
    for part in (0, 2):
        answer(session, bucket(4, part), 0, bytes(SLICE_BYTES // 2), over=part == 2)

    session.finish_round(None)

    assert session.round == 5
    tape.take()
    push(session, 0)
    ((message, _),) = tape.sent
    assert isinstance(message, Push)
    assert message.key == bucket(5, 0)


def test_bucket_cannot_be_pushed_twice_in_a_round(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(0.5))
    push(session, 0)

    with pytest.raises(OutOfStepError, match="bucket 'b0' was already pushed in round 0: finish the round"):
        push(session, 0)


def test_round_cannot_be_finished_before_every_bucket_was_pushed(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(0.5, 0.5, 0))
    push(session, 1)

    with pytest.raises(OutOfStepError, match=r"round 0 cannot be finished: these buckets were not pushed: \['b0'\]"):
        session.finish_round(None)


@pytest.mark.parametrize(("weight", "present"), [(0.0, True), (1.0, False), (0.0, False)])
def test_contribution_without_weight_or_data_is_not_sent_and_gets_the_result(
    session: Session, tape: Tape, weight: float, present: bool
) -> None:
    agree(session, tape, plan_of(0.5))
    tape.take()
    data = memory(0.5)

    handle = session.push_bucket(0, data, weight, present)

    assert tape.sent == [(Push(bucket(0), 0, weight, False, None), ())]
    answer(session, bucket(0), 0, bytes([5]) * data.size)
    handle.wait()
    assert (data == 5).all()


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────


def test_failed_exchange_fails_alone_and_gives_its_credit_back(session: Session, tape: Tape) -> None:
    failing, following = all_reduce(session, memory(4)), all_reduce(session, memory(2))
    tape.take()

    session.receive(Failure.of(DeadlineError("w2 did not come"), Scope.EXCHANGE, collective(0)), ())

    with pytest.raises(DeadlineError, match="w2 did not come"):
        failing.wait()
    assert tape.pushes() == [(1, 0), (1, 1)]
    answer(session, collective(0), 0, bytes(SLICE_BYTES))  # was on its way
    assert not following.done()
    answer(session, collective(1), 0, bytes(SLICE_BYTES))
    answer(session, collective(1), 1, bytes(SLICE_BYTES))
    following.wait()
    all_reduce(session, memory(4))
    assert tape.pushes() == [(2, 0), (2, 1)]


def test_exchange_that_fails_while_a_result_is_put_in_place_gives_its_credit_back_once(
    session: Session, tape: Tape
) -> None:
    data = memory(2)
    failure = Failure.of(DeadlineError("w2 did not come"), Scope.EXCHANGE, collective(0))

    def fail(start: int, stop: int, payload: Buffer | None) -> None:
        data[start:stop] = np.frombuffer(payload or b"", np.uint8)
        session.receive(failure, ())  # as another thread may at this very moment

    handle = session.collective(Operation(Kind.ALL_REDUCE, Op.SUM, UINT8, data.size), data, fail)
    answer(session, collective(0), 0, bytes(SLICE_BYTES))

    with pytest.raises(DeadlineError, match="w2 did not come"):
        handle.wait()
    tape.take()
    all_reduce(session, memory(4))
    assert tape.pushes() == [(1, 0), (1, 1)]


def test_every_raise_is_an_exception_of_its_own(session: Session) -> None:
    handle = all_reduce(session, memory(0.1))
    error = WorkerLostError("w2 was lost", worker="w2", rank=2)
    session.receive(Failure.of(error, Scope.EXCHANGE, collective(0)), ())

    with pytest.raises(WorkerLostError) as first:
        handle.wait()
    with pytest.raises(WorkerLostError) as second:
        handle.wait()

    assert first.value is not second.value
    assert (second.value.worker, second.value.rank) == ("w2", 2)


def test_failed_bucket_is_reported_again_when_it_is_pushed_again(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(0.5))
    push(session, 0)
    session.receive(Failure.of(WorkerLostError("w2 was lost"), Scope.EXCHANGE, bucket(0)), ())

    with pytest.raises(WorkerLostError, match="w2 was lost"):
        session.finish_round(None)
    with pytest.raises(WorkerLostError, match="w2 was lost"):
        push(session, 0)


def test_everything_fails_when_the_coordinator_lets_go(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(0.5))
    handles = [all_reduce(session, memory(0.1)), push(session, 0)[0]]

    session.receive(Failure.of(CoordinatorStoppedError("it received SIGTERM"), Scope.CONNECTION), ())
    session.lost(ConnectionLostError("the socket closed"))

    for handle in handles:
        with pytest.raises(CoordinatorStoppedError, match="it received SIGTERM"):
            handle.wait()
    with pytest.raises(CoordinatorStoppedError, match="it received SIGTERM"):
        all_reduce(session, memory(0.1))
    with pytest.raises(CoordinatorStoppedError, match="it received SIGTERM"):
        session.agree(plan_of(1), None)
    assert session.closed


def test_everything_fails_when_nothing_can_be_sent_any_more(session: Session, tape: Tape) -> None:
    waiting = all_reduce(session, memory(0.1))
    tape.broken = True

    handle = all_reduce(session, memory(0.1))

    for one in (waiting, handle):
        with pytest.raises(ConnectionLostError, match="the connection is gone"):
            one.wait()


# ── closing ───────────────────────────────────────────────────────────────────────────────────────────


def test_exchange_that_fails_while_a_worker_says_goodbye_harms_nothing(session: Session, tape: Tape) -> None:
    handle = all_reduce(session, memory(4))  # half of it waits for credit
    tape.reply = Failure.of(WorkerLostError("w2 was lost"), Scope.EXCHANGE, collective(0))

    session.close("its work was done")

    assert tape.closed
    with pytest.raises(WorkerLostError, match="w2 was lost"):
        handle.wait()


def test_nothing_is_sent_after_goodbye(session: Session, tape: Tape) -> None:
    all_reduce(session, memory(4))
    tape.reply = Result(collective(0), 0, 3.0, False)  # gives credit back

    session.close("its work was done")

    assert isinstance(tape.take()[-1], Leave)


def test_goodbye_without_an_answer_is_not_waited_for_long(session: Session, tape: Tape) -> None:
    tape.hears = False
    begun = time.monotonic()

    session.close("its work was done")

    assert tape.closed
    assert time.monotonic() - begun < 5.0


@pytest.mark.parametrize("failed", [False, True])
def test_closing_says_goodbye_once(session: Session, tape: Tape, failed: bool) -> None:
    session.close("its work was done", failed)
    session.close("again")

    assert tape.take() == [Leave("its work was done", failed)]
    assert tape.closed


def test_goodbye_is_cut_to_a_length_that_travels(session: Session, tape: Tape) -> None:
    session.close("x" * 100_000)

    (leave,) = tape.take()
    assert isinstance(leave, Leave)
    assert set(leave.reason) == {"x"}
    assert len(leave.reason) <= 500


def test_closing_fails_what_is_open_and_what_comes_later(session: Session) -> None:
    handle = all_reduce(session, memory(0.1))
    task = Task(handle.wait)

    session.close("its work was done")

    assert "its work was done" in str(task.error(ClosedError))
    with pytest.raises(ClosedError, match="its work was done"):
        all_reduce(session, memory(0.1))


# ── waiting ───────────────────────────────────────────────────────────────────────────────────────────


def test_wait_that_runs_out_asks_for_missing_workers_and_can_be_repeated(session: Session, tape: Tape) -> None:
    data = memory(0.1)
    handle = all_reduce(session, data)
    task = Task(handle.wait, 0.01)
    wait_until(lambda: tape.sent and tape.sent[-1][0] == Inquire(collective(0)), "it asks")

    session.receive(Missing(collective(0), ("'w0' (rank 0)", "'w2' (rank 2)")), ())

    error = task.error(DeadlineError)
    assert str(error) == (
        f"all_reduce(sum) of uint8[{data.size}] is not done after 0.01 s; still missing: 'w0' (rank 0), 'w2' (rank 2)"
    )
    assert error.missing == ("'w0' (rank 0)", "'w2' (rank 2)")
    answer(session, collective(0), 0, bytes(data.size))
    handle.wait(0.01)


def test_deadline_names_bucket_and_round(session: Session, tape: Tape) -> None:
    agree(session, tape, plan_of(0.5, 0.5), first_round=3)
    task = Task(push(session, 1)[0].wait, 0.01)
    wait_until(lambda: tape.sent and tape.sent[-1][0] == Inquire(bucket(3, 1)), "it asks")

    session.receive(Missing(bucket(3, 1), ()), ())

    error = task.error(DeadlineError)

    assert str(error) == "bucket 'b1' of round 3 is not done after 0.01 s"
    assert (error.bucket, error.round, error.missing) == ("b1", 3, ())


def test_result_that_comes_while_asking_counts(session: Session, tape: Tape) -> None:
    data = memory(0.1)
    task = Task(all_reduce(session, data, value="the tensor").wait, 0.01)
    wait_until(lambda: tape.sent and tape.sent[-1][0] == Inquire(collective(0)), "it asks")

    answer(session, collective(0), 0, bytes(data.size))
    session.receive(Missing(collective(0), ()), ())

    assert task.result() == "the tensor"


def test_coordinators_verdict_on_an_exchange_comes_before_the_workers_own(session: Session, tape: Tape) -> None:
    handle = all_reduce(session, memory(0.1))
    task = Task(handle.wait, 0.01)
    wait_until(lambda: tape.sent and tape.sent[-1][0] == Inquire(collective(0)), "it asks")

    session.receive(Failure.of(WorkerLostError("w2 was lost"), Scope.EXCHANGE, collective(0)), ())
    session.receive(Missing(collective(0), ()), ())

    assert "w2 was lost" in str(task.error(WorkerLostError))
