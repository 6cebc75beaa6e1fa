"""Tests of a member of a durable group, with a scripted coordinator that returns: the member's half."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    ConnectionLostError,
    CoordinatorStoppedError,
    DeadlineError,
    GradServerError,
    LeftOutError,
    MalformedMessageError,
    MembershipChangedError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Stream, operation_of
from gradserver.protocol.limits import SLICE_BYTES
from gradserver.protocol.messages import (
    BePresent,
    Failure,
    Inquire,
    Leave,
    Message,
    Missing,
    Present,
    Propose,
    Push,
    Result,
    RoundDone,
    Scope,
)
from gradserver.protocol.messages.recovery import (
    Fetch,
    Held,
    Holding,
    Resume,
    Resumed,
    Span,
    Standing,
    State,
    unpack_spans,
)
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.transport import reconnect
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import TIMEOUT, Task, wait_until
from tests.scripted import TOKEN, Scripted, joining

NUMEL = SLICE_BYTES // 4
CREDIT = 16 * SLICE_BYTES
PLAN = simple_plan([("long", 3 * NUMEL), ("short", 10)], FLOAT32)
LONG, SHORT = ExchangeKey(Stream.BUCKET, 0, 0), ExchangeKey(Stream.BUCKET, 0, 1)


class Scene:
    """A worker, the plan agreed on, and its present coordinator."""

    def __init__(self, stack: ExitStack, plan: Plan = PLAN, **options: object) -> None:
        self._stack = stack
        self.now = stack.enter_context(Scripted())
        task = joining(self.now.url, **options)
        self.worker: Worker = self.now.admit(task, CREDIT)
        stack.callback(self.worker._session.traffic.channel.close)
        agreeing = Task(self.worker.agree, plan)
        self.now.agree()
        self.plan = agreeing.result()
        lasting, resumption = self.worker._session._lasting, self.worker._session.resumption
        assert isinstance(lasting, reconnect.ReconnectingChannel)
        assert resumption is not None
        self.lasting, self.resumption = lasting, resumption
        self.data = [np.full(bucket.numel, 1.0 + index, np.float32) for index, bucket in enumerate(plan.buckets)]

    def again(self, generation: int = 0) -> tuple[Resume, Holding, list[Span]]:
        """Let the coordinator die, and another one take its place."""
        self.now.die()
        self.now = self._stack.enter_context(Scripted(self.now.url))
        return self.reopen(generation)

    def reopen(self, generation: int) -> tuple[Resume, Holding, list[Span]]:
        asks = self.now.hear(Resume, 10.0)
        self.now.say(Resumed(2, generation))
        holding = self.now.hear(Holding)
        return asks, holding, unpack_spans(self.now.payloads[0])

    def pushes(self, *expected: tuple[ExchangeKey, int]) -> list[bytes]:
        """Return the payloads of pushes, of which these have to come next."""
        found = []
        for key, index in expected:
            push = self.now.hear(Push)
            assert (push.key, push.slice) == (key, index)
            found += self.now.payloads
        return found

    def answer(
        self, key: ExchangeKey, index: int, value: float, length: int = NUMEL, weights: tuple[float, ...] = (1.0,)
    ) -> bytes:
        payload = np.full(length, value, np.float32).tobytes()
        counted = weights if key.stream == Stream.BUCKET else ()
        self.now.say(Result(key, index, 1.0, True, weights=counted), [payload])
        return payload


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def test_what_was_not_answered_is_sent_again_and_what_was_is_not(scene: Scene) -> None:
    long = scene.worker.push(0, scene.data[0], weight=2.0)
    given = scene.pushes((LONG, 0), (LONG, 1), (LONG, 2))
    scene.answer(LONG, 0, 7.0)
    wait_until(lambda: scene.data[0][0] == 7.0, "the first result has come")

    asks, holding, spans = scene.again()
    assert asks == Resume("default", 0, TOKEN, 1, scene.plan.hash)
    assert (holding.generation, holding.round, holding.weight) == (0, 0, 2.0)
    assert spans == [Span(State.HELD, LONG, 0, 1, (1.0,))]
    scene.answer(LONG, 2, 9.0)  # others had it
    scene.now.say(Standing(0, 0))
    assert scene.pushes((LONG, 1)) == given[1:2]
    scene.answer(LONG, 1, 8.0)
    long.wait()
    assert [scene.data[0][index * NUMEL] for index in range(3)] == [7.0, 8.0, 9.0]

    short, finishing = scene.worker.push(1, scene.data[1]), Task(scene.worker.finish_round)
    scene.pushes((SHORT, 0))
    scene.answer(SHORT, 0, 3.0, 10)
    scene.now.say(RoundDone(0, 1))
    finishing.result()
    assert short.done()
    assert scene.worker.round == 1


def test_nothing_is_pushed_before_standing_and_what_is_begun_meanwhile_comes_after_it(scene: Scene) -> None:
    scene.again()
    scene.worker.push(1, scene.data[1])
    assert scene.now.hears_nothing(0.1)
    scene.now.say(Standing(0, 0))
    scene.pushes((SHORT, 0))


def test_the_standing_of_an_earlier_recovery_means_nothing(scene: Scene) -> None:
    scene.worker.push(1, scene.data[1])
    scene.pushes((SHORT, 0))
    scene.again(generation=4)
    scene.now.say(Resumed(2, 5))
    scene.now.say(Standing(4, 0))
    assert scene.now.hear(Holding).generation == 5
    assert scene.now.hears_nothing(0.1)
    scene.now.say(Standing(5, 0))
    scene.pushes((SHORT, 0))


def test_a_recovery_begins_on_a_connection_that_stands(scene: Scene) -> None:
    handle = scene.worker.push(1, scene.data[1])
    scene.pushes((SHORT, 0))
    scene.now.say(Resumed(1, 1))
    assert scene.now.hear(Holding).weight == 1.0
    scene.now.say(Standing(1, 0))
    scene.pushes((SHORT, 0))
    scene.answer(SHORT, 0, 5.0, 10)
    handle.wait()
    assert (scene.data[1] == 5.0).all()


def test_what_a_member_holds_is_said_behind_a_push_that_another_thread_is_about_to_send(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that after Holding, and the coordinator's Standing, it would count, and be pushed again."""
    taken, go, send = threading.Event(), threading.Event(), TcpChannel.send

    def slow_send(channel: TcpChannel, message: Message, *rest: Any, **options: Any) -> None:
        if type(message) is Push and not taken.is_set():
            taken.set()
            assert go.wait(TIMEOUT)
        send(channel, message, *rest, **options)

    monkeypatch.setattr(TcpChannel, "send", slow_send)
    pushing = Task(scene.worker.push, 1, scene.data[1])
    assert taken.wait(TIMEOUT)
    scene.now.say(Resumed(1, 1))
    wait_until(lambda: scene.resumption.is_held(0), "the worker has heard that a recovery has begun")

    assert scene.now.hears_nothing(0.2)
    go.set()
    scene.pushes((SHORT, 0))
    assert scene.now.hear(Holding).generation == 1
    scene.now.say(Standing(1, 0))
    scene.pushes((SHORT, 0))
    scene.answer(SHORT, 0, 5.0, 10)
    pushing.result().wait()


def test_results_are_kept_until_those_of_the_next_round_and_said_once_more(scene: Scene) -> None:
    last = finish(scene, 0, 6.0)
    scene.worker.push(1, scene.data[1])
    key = ExchangeKey(Stream.BUCKET, 1, 1)
    scene.pushes((key, 0))
    scene.answer(key, 0, 4.0, 10)

    _, holding, spans = scene.again()
    assert holding.round == 1
    assert spans == [Span(State.HELD, LONG, 0, 3, (1.0,)), Span(State.HELD, key, 0, 1, (1.0,))]
    scene.now.say(Fetch(0, LONG, 1))
    assert scene.now.hear(Held) == Held(0, LONG, 1, 1.0, True, weights=(1.0,))
    assert scene.now.payloads == [last]


def test_contributors_are_named_for_each_slice(scene: Scene) -> None:
    scene.worker.push(0, scene.data[0])
    scene.pushes((LONG, 0), (LONG, 1), (LONG, 2))
    scene.answer(LONG, 0, 7.0, weights=(1.0, 0.0, 2.0))
    scene.answer(LONG, 1, 7.0, weights=(1.0,))
    wait_until(lambda: scene.data[0][NUMEL] == 7.0, "two results have come")

    _, _, spans = scene.again()

    assert spans == [Span(State.HELD, LONG, 0, 1, (1.0, 0.0, 2.0)), Span(State.HELD, LONG, 1, 2, (1.0,))]
    scene.now.say(Fetch(0, LONG, 0))
    assert scene.now.hear(Held) == Held(0, LONG, 0, 1.0, True, weights=(1.0, 0.0, 2.0))


def finish(scene: Scene, number: int, value: float) -> bytes:
    """Exchange a whole round. Return the result of a long slice."""
    handles = [scene.worker.push(index, data) for index, data in enumerate(scene.data)]
    keys = [ExchangeKey(Stream.BUCKET, number, part) for part in range(2)]
    scene.pushes(*((keys[0], index) for index in range(3)), (keys[1], 0))
    payload = [scene.answer(keys[0], index, value) for index in range(3)][-1]
    scene.answer(keys[1], 0, value, 10)
    scene.now.say(RoundDone(number, 1))
    for handle in handles:
        handle.wait()
    scene.worker.finish_round()
    return payload


def test_a_result_that_comes_before_its_bucket_is_begun_waits_for_it(scene: Scene) -> None:
    scene.again()
    scene.answer(LONG, 1, 2.0)
    scene.answer(SHORT, 0, 3.0, 10)
    scene.now.say(Standing(0, 0))
    wait_until(lambda: not scene.resumption.is_held(0), "it has heard that")
    scene.worker.push(1, scene.data[1]).wait()
    assert (scene.data[1] == 3.0).all()
    scene.worker.push(0, scene.data[0])
    scene.pushes((LONG, 0), (LONG, 2))
    wait_until(lambda: scene.data[0][NUMEL] == 2.0, "its result is there")


def test_collectives_are_named_again_and_their_results_are_held(scene: Scene) -> None:
    operation = operation_of(Kind.ALL_REDUCE, Op.SUM, FLOAT32, NUMEL + 1)
    tensor = np.ones(NUMEL + 1, np.float32).view(np.uint8)
    handle = scene.worker._session.collective(operation, tensor, tensor, background=True)  # of a group of one
    key = ExchangeKey(Stream.COLLECTIVE, 0)
    scene.pushes((key, 0), (key, 1))
    scene.answer(key, 0, 2.0)
    wait_until(lambda: tensor.view(np.float32)[0] == 2.0, "the first result has come")
    _, _, spans = scene.again()
    assert sorted(spans) == [Span(State.LACKING, key, 1, 2, (), 4), Span(State.HELD, key, 0, 1, (), SLICE_BYTES)]
    scene.now.say(Standing(0, 0))
    push = scene.now.hear(Push)
    assert (push.slice, push.operation) == (1, operation)
    scene.answer(key, 1, 2.0, 1)
    handle.wait()
    _, _, spans = scene.again(1)
    assert spans == [Span(State.HELD, key, 0, 1, (), SLICE_BYTES), Span(State.HELD, key, 1, 2, (), 4)]


def test_the_root_of_a_broadcast_keeps_what_it_gave_for_those_that_lack_it(scene: Scene) -> None:
    key, given = ExchangeKey(Stream.COLLECTIVE, 0), np.full(5, 3.5, np.float32)
    operation = operation_of(Kind.BROADCAST, Op.NONE, FLOAT32, 5, 0)
    handle = scene.worker._session.collective(operation, given.view(np.uint8), None, background=True)
    scene.pushes((key, 0))
    scene.now.say(Result(key, 0, 1.0, False))
    handle.wait()
    given[:] = 9.0

    _, _, spans = scene.again()

    assert spans == [Span(State.HELD, key, 0, 1, (), 20)]
    scene.now.say(Fetch(0, key, 0))
    assert scene.now.hear(Held) == Held(0, key, 0, 1.0, True)
    assert scene.now.payloads == [np.full(5, 3.5, np.float32).tobytes()]


def test_a_member_without_bytes_of_a_slice_can_say_that_it_is_answered(scene: Scene) -> None:
    """Another connection breaks during a recovery, and the coordinator asks this member and not the root."""
    key, given = ExchangeKey(Stream.COLLECTIVE, 0), np.ones(NUMEL + 1, np.float32)
    operation = operation_of(Kind.GATHER, Op.NONE, FLOAT32, NUMEL + 1, 1)
    handle = scene.worker._session.collective(operation, given.view(np.uint8), None, background=True)
    scene.pushes((key, 0), (key, 1))
    scene.again()
    scene.answer(key, 0, 2.0)

    scene.now.say(Fetch(0, key, 0))

    assert scene.now.hear(Held) == Held(0, key, 0, 1.0, False)
    assert scene.now.payloads == []
    scene.now.say(Standing(0, 0))
    scene.pushes((key, 1))
    scene.now.say(Result(key, 1, 1.0, False))
    handle.wait()


@pytest.mark.parametrize(
    ("error", "state"),
    [(DeadlineError("too late"), State.FAILED), (MembershipChangedError("it changed", epoch=1), State.CHANGED)],
)
def test_what_has_failed_is_said_and_whether_it_is_called_again(
    scene: Scene, error: GradServerError, state: State
) -> None:
    key, given = ExchangeKey(Stream.COLLECTIVE, 0), np.ones(5, np.float32).view(np.uint8)
    operation = operation_of(Kind.ALL_REDUCE, Op.SUM, FLOAT32, 5)
    handle = scene.worker._session.collective(operation, given, given, background=True)
    scene.pushes((key, 0))
    scene.now.say(Failure.of(error, Scope.EXCHANGE, key))
    with pytest.raises(type(error)):
        handle.wait()

    _, _, spans = scene.again()

    assert spans == [Span(state, key, 0, 1)]


def test_a_plan_that_was_not_agreed_on_is_proposed_again() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(Scripted())
        worker = first.admit(joining(first.url), CREDIT)
        stack.callback(worker._session.traffic.channel.close)
        agreeing = Task(worker.agree, PLAN)
        first.hear(Propose)
        first.die()
        second = stack.enter_context(Scripted(first.url))
        assert second.hear(Resume).plan == ""
        second.say(Resumed(2, 0))
        second.agree()
        second.hear(Holding)
        second.say(Standing(0, 0))
        assert agreeing.result().hash == worker.plan.hash  # type: ignore[union-attr]


def test_a_connection_that_breaks_while_resuming_is_tried_again(scene: Scene) -> None:
    scene.worker.push(1, scene.data[1])
    scene.pushes((SHORT, 0))
    for _ in range(2):
        scene.now.die()
        scene.now = scene._stack.enter_context(Scripted(scene.now.url))
        scene.now.hear(Resume)
    scene.again()
    scene.again(1)
    scene.now.say(Standing(1, 0))
    scene.pushes((SHORT, 0))


def test_only_where_no_coordinator_answers_pauses_between_attempts_become_longer(scene: Scene) -> None:
    pauses: list[float] = []
    wait = scene.lasting._closing.wait

    def wait_so_long(seconds: float) -> bool:
        pauses.append(seconds)
        return wait(seconds)

    scene.lasting._closing.wait = wait_so_long  # type: ignore[assignment, method-assign]
    broken = Failure.of(ConnectionLostError("the other side has noticed it"), Scope.CONNECTION)
    scene.now.say(broken)
    for generation in range(4):
        scene.reopen(generation)
        scene.now.say(broken)
    scene.now.hear(Resume)
    assert pauses == [reconnect.RETRY_SECONDS] * 4

    for _ in range(3):
        scene.now.die()
        scene.now = scene._stack.enter_context(Scripted(scene.now.url))
        scene.now.hear(Resume)
    assert max(pauses) == 8 * reconnect.RETRY_SECONDS


def test_a_connection_that_breaks_just_before_the_member_waits_for_what_stands_is_tried_again(scene: Scene) -> None:
    broken: list[TcpChannel] = []
    restate = scene.resumption.restate

    def restate_too_late(channel: TcpChannel) -> Handle:
        if not broken:  # as when a second data shard is lost while the worker shares memory with the first
            broken.append(channel)
            scene.lasting.broke(channel, ConnectionLostError("another process has taken the place of a data shard"))
        return restate(channel)

    scene.resumption.restate = restate_too_late  # type: ignore[assignment, method-assign]
    scene.worker.push(1, scene.data[1])
    scene.pushes((SHORT, 0))
    scene.again(generation=1)

    scene.reopen(2)  # and not when the wait for the first has run out
    scene.now.say(Standing(2, 0))
    scene.pushes((SHORT, 0))


@pytest.mark.parametrize("late", [False, True], ids=["before Standing", "after it"])
def test_a_result_that_is_wrong_on_the_next_connection_too_is_an_error_that_names_it(scene: Scene, late: bool) -> None:
    waiting = Task(scene.worker.push(1, scene.data[1]).wait)
    scene.pushes((SHORT, 0))
    scene.answer(SHORT, 0, 3.0, 11)
    scene.reopen(1)
    if late:
        scene.now.say(Standing(1, 0))
        scene.pushes((SHORT, 0))
    scene.answer(SHORT, 0, 3.0, 11)
    assert "came with 44 bytes, 40 are due" in str(waiting.error(MalformedMessageError))
    assert scene.worker.closed


def test_waiting_is_said_and_has_an_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reconnect, "SAY_SO_EVERY", 0.2)
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        scene = Scene(stack, reconnect=0.5)
        handle = scene.worker.push(1, scene.data[1])
        scene.now.die()
        with pytest.raises(ConnectionLostError, match=r"tried for 0\.\d s .* connection refused.*--state-dir"):
            handle.wait()
    assert "waiting for the coordinator at tcp://" in caplog.text
    assert "(connection refused); round 0 goes on when it is back, giving up after 0.5 s" in caplog.text


def test_time_without_a_coordinator_is_not_counted(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Test also that the worker says that the coordinator is back, as loudly as it said that it was lost."""
    handle = scene.worker.push(1, scene.data[1])
    waiting = Task(handle.wait, 0.5)
    scene.pushes((SHORT, 0))
    scene.now.die()
    assert not waiting.ended(0.7)
    scene.now = scene._stack.enter_context(Scripted(scene.now.url))
    scene.reopen(0)
    assert not waiting.ended(0.7)
    scene.now.say(Standing(0, 0))
    scene.pushes((SHORT, 0))
    scene.now.say(Missing(scene.now.hear(Inquire).key, ("w9",)))
    assert waiting.error(DeadlineError).missing == ("w9",)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(" is back after " in text for text in warnings), warnings


def test_a_member_that_was_left_out_is_told_so_everywhere(scene: Scene) -> None:
    handle = scene.worker.push(1, scene.data[1])
    scene.now.die()
    scene.now = scene._stack.enter_context(Scripted(scene.now.url))
    scene.now.hear(Resume)
    scene.now.say(Failure.of(LeftOutError("the others went on"), Scope.CONNECTION))
    with pytest.raises(LeftOutError):
        handle.wait()
    with pytest.raises(LeftOutError):
        scene.worker.push(0, scene.data[0])


def test_its_presence_outlives_connections_and_ends_when_it_is_out(scene: Scene) -> None:
    """Test that it returns by itself, when its worker has not done so yet."""
    name = "its beacon"
    scene.now.say(BePresent(name, 1.65))
    assert scene.now.hear(Present) == Present(name)
    assert scene.now.knows(name)

    scene.now.die()
    scene.now = scene._stack.enter_context(Scripted(scene.now.url))
    wait_until(lambda: scene.now.knows(name), "it is there again, unasked")
    scene.reopen(0)
    scene.now.say(BePresent(name, 1.65))
    scene.now.say(Standing(0, 0))
    assert scene.now.knows(name)

    scene.now.say(Failure.of(LeftOutError("the others went on"), Scope.CONNECTION))
    wait_until(lambda: not scene.now.knows(name), "it is gone")
    with pytest.raises(LeftOutError):
        scene.worker.push(0, scene.data[0])


def test_a_question_to_a_shard_that_has_no_connection_yet_is_dropped(scene: Scene) -> None:
    """Test what another thread asks while connections are made, one by one. It asks again."""
    scene.lasting.send(Inquire(ExchangeKey(Stream.BUCKET, 0, 0)), (), 1)
    scene.worker.push(1, scene.data[1])
    scene.pushes((SHORT, 0))


def test_a_coordinator_that_is_stopped_may_be_started_again(scene: Scene) -> None:
    scene.worker.push(1, scene.data[1])
    scene.pushes((SHORT, 0))
    scene.now.say(Failure.of(CoordinatorStoppedError("by SIGTERM"), Scope.CONNECTION))
    scene.again()
    scene.now.say(Standing(0, 0))
    scene.pushes((SHORT, 0))


def test_a_worker_that_is_closed_just_when_it_resumes_leaves_no_thread(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that it waits for no answer that it has begun to wait for behind the call which ends all such waits."""
    tries, interrupted, waits = threading.Event(), threading.Event(), threading.Event()
    resume, check, interrupt = scene.resumption.resume, scene.lasting._check_trying, scene.resumption.interrupt

    def resume_late(channel: TcpChannel) -> Handle:
        tries.set()
        assert interrupted.wait(TIMEOUT)
        try:
            return resume(channel)
        except GradServerError:
            waits.set()
            raise

    def check_and_wait() -> None:
        check()
        if interrupted.is_set():
            waits.set()

    def interrupt_early(error: GradServerError) -> None:
        interrupt(error)
        interrupted.set()
        assert waits.wait(TIMEOUT)

    monkeypatch.setattr(scene.resumption, "resume", resume_late)
    monkeypatch.setattr(scene.lasting, "_check_trying", check_and_wait)
    scene.now.die()
    scene.now = scene._stack.enter_context(Scripted(scene.now.url))
    assert tries.wait(TIMEOUT)
    monkeypatch.setattr(scene.resumption, "interrupt", interrupt_early)
    scene.worker.abort("the test is over")

    assert not scene.lasting._thread.is_alive()


def test_a_worker_that_leaves_waits_until_the_recovery_is_over(scene: Scene) -> None:
    finish(scene, 0, 6.0)
    scene.now.die()
    wait_until(lambda: not scene.lasting._up.is_set(), "the worker has noticed it")
    leaving = Task(scene.worker.close)
    scene.now = scene._stack.enter_context(Scripted(scene.now.url))
    _, _, spans = scene.reopen(0)
    assert len(spans) == 2
    scene.now.say(Fetch(0, LONG, 0))
    scene.now.hear(Held)
    scene.now.say(Standing(0, 1))
    scene.now.say(scene.now.hear(Leave))
    leaving.result()
