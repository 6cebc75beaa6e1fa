"""Tests that the in-process channel keeps what the channel interface promises."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import ClosedError, GradServerError, UsageError
from gradserver.protocol.in_process import InProcessChannel, in_process_pair
from gradserver.protocol.messages import Leave, Message, Ping, Status


class Recorder:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.received: list[tuple[Message, Sequence[Buffer]]] = []
        self.errors: list[GradServerError] = []

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        self.received.append((message, payloads))

    def lost(self, error: GradServerError) -> None:
        self.errors.append(error)


@pytest.fixture
def ends() -> tuple[InProcessChannel, Recorder, InProcessChannel, Recorder]:
    worker, coordinator = in_process_pair("channel of 'w0'")
    at_worker, at_coordinator = Recorder(), Recorder()
    worker.attach(at_worker)
    coordinator.attach(at_coordinator)
    return worker, at_worker, coordinator, at_coordinator


Ends = tuple[InProcessChannel, Recorder, InProcessChannel, Recorder]


def test_messages_arrive_in_order_and_on_the_other_side_only(ends: Ends) -> None:
    worker, at_worker, coordinator, at_coordinator = ends

    for number in range(3):
        worker.send(Leave(str(number)))
    coordinator.send(Ping())

    assert [message for message, _ in at_coordinator.received] == [Leave("0"), Leave("1"), Leave("2")]
    assert [message for message, _ in at_worker.received] == [Ping()]


def test_message_and_payloads_are_the_very_same_objects(ends: Ends) -> None:
    worker, _, _, at_coordinator = ends
    message, payload = Status(), bytearray(b"{}")

    worker.send(message, [payload])

    ((received, (buffer,)),) = at_coordinator.received
    assert received is message
    assert buffer is payload


def test_the_message_was_handled_when_send_returns_also_when_the_receiver_answers_at_once(ends: Ends) -> None:
    worker, at_worker, coordinator, _ = ends

    class Echo(Recorder):
        def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
            coordinator.send(message, payloads)

    coordinator.attach(Echo())
    worker.send(Leave("echo"))

    assert [message for message, _ in at_worker.received] == [Leave("echo")]


def test_the_other_side_learns_once_that_this_one_closed(ends: Ends) -> None:
    worker, at_worker, coordinator, at_coordinator = ends
    worker.send(Leave("done"))

    worker.close()
    worker.close()
    coordinator.close()

    assert len(at_coordinator.received) == 1, "what was sent before is delivered"
    assert [type(error) for error in at_coordinator.errors] == [ClosedError]
    assert "channel of 'w0' (worker) closed" in str(at_coordinator.errors[0])
    assert at_worker.errors == [], "the side that closes knows"


@pytest.mark.parametrize("closer", [0, 2])
def test_a_closed_channel_refuses_to_send(ends: Ends, closer: int) -> None:
    worker, at_worker, coordinator, at_coordinator = ends
    (worker, coordinator)[closer // 2].close()

    for end in (worker, coordinator):
        with pytest.raises(ClosedError, match="channel of 'w0'"):
            end.send(Ping())
    assert not at_worker.received
    assert not at_coordinator.received


def test_a_receiver_may_close_a_channel_that_is_lost(ends: Ends) -> None:
    worker, at_worker, coordinator, _ = ends

    class Closes(Recorder):
        def lost(self, error: GradServerError) -> None:
            super().lost(error)
            coordinator.close()

    closes = Closes()
    coordinator.attach(closes)
    worker.close()

    assert len(closes.errors) == 1
    assert at_worker.errors == []


def test_a_message_is_not_dropped_before_a_receiver_is_attached() -> None:
    worker, _ = in_process_pair()

    with pytest.raises(UsageError, match="no other side is attached"):
        worker.send(Ping())


def test_waiting_ends_when_a_message_lets_go_of_the_lock_or_time_is_up(ends: Ends) -> None:
    worker, at_worker, coordinator, _ = ends
    done = threading.Lock()
    done.acquire()

    class LetsGo(Recorder):
        def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
            super().receive(message, payloads)
            done.release()

    worker.attach(LetsGo())

    assert not worker.wait(done, 0.001)
    coordinator.send(Ping())
    assert worker.wait(done, 0.001)
    assert at_worker.received == []


def test_messages_arrive_without_being_waited_for(ends: Ends) -> None:
    worker, at_worker, coordinator, _ = ends

    worker.watch(lambda: True)
    coordinator.send(Ping())

    assert len(at_worker.received) == 1


def test_a_memory_channel_is_a_channel() -> None:
    end: Channel = in_process_pair()[0]

    assert isinstance(end, InProcessChannel)
