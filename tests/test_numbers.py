"""Tests of numbered messages: what a relay loses, repeats or swaps is noticed, and changes no result."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.errors import ConnectionLostError, LeftOutError, WorkerLostError
from gradserver.protocol.messages import Failure, Ping, Push, Result, Scope
from gradserver.protocol.transport.numbers import GAP_SECONDS, MAX_EARLY, Frames, Numbers, numbered, split
from gradserver.protocol.wire import encode
from gradserver.tools.chaos.relay import Fate
from gradserver.transport.handshake import Strangers
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import BUSY, PATIENCE, Task, coordinator, together
from tests.relay import Judge, Loser, relay, swapped, twice

NOTICED_WITHIN = 1.0 + GAP_SECONDS
"""Seconds until a Ping shows that something is missing, and it is not waited for any more."""

# ── by themselves ─────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 2**62), st.binary(max_size=100))
def test_a_number_goes_in_front_and_comes_off_again(number: int, rest: bytes) -> None:
    header = encode(Ping()) + rest

    found, left = split(numbered(header, number))

    assert (found, bytes(left)) == (number, header)
    assert split(header) == (0, header)


@given(st.binary(max_size=20))
def test_any_bytes_can_be_split(data: bytes) -> None:
    number, rest = split(data)

    assert 0 <= number < 2**63
    assert bytes(rest) == (data[8:] if number or len(rest) < len(data) else data)


def of(number: int) -> Frames:
    """Return a message that says its number."""
    return [numbered(b"%d" % number, number)]


def said(messages: Iterable[Frames]) -> list[int]:
    """Return the numbers that these messages say."""
    return [int(bytes(frames[0])) for frames in messages]


def test_what_is_sent_is_numbered_from_one_on() -> None:
    here, there = Numbers(), Numbers()
    for number in range(1, 4):
        assert said(there.take([here.numbered(b"%d" % number)], 0.0)) == [number]


def test_what_has_no_number_is_taken_as_it_comes() -> None:
    numbers = Numbers()
    numbers.take(of(2), 0.0)
    assert list(numbers.take([b"0"], 0.0)) == [[b"0"]]
    assert said(numbers.take(of(1), 0.0)) == [1, 2]


@given(st.permutations(range(1, 8)), st.data())
def test_whatever_is_repeated_or_swapped_comes_once_and_in_order(order: list[int], data: st.DataObject) -> None:
    repeated = data.draw(st.lists(st.sampled_from(order), max_size=5))
    arriving = data.draw(st.permutations(order + repeated))
    numbers = Numbers()

    taken = [due for number in arriving for due in said(numbers.take(of(number), 0.0))]

    assert taken == sorted(order)
    assert numbers.deadline is None
    numbers.check(1e9)


@given(st.sets(st.integers(1, 10), min_size=1, max_size=9))
def test_what_is_behind_something_lost_is_never_taken(lost: set[int]) -> None:
    numbers = Numbers()

    taken = [due for number in range(1, 11) if number not in lost for due in said(numbers.take(of(number), 0.0))]

    assert taken == list(range(1, min(lost)))
    if any(number not in lost for number in range(min(lost), 11)):
        assert numbers.deadline == GAP_SECONDS
        numbers.check(GAP_SECONDS / 2)
        with pytest.raises(ConnectionLostError, match=f"message {min(lost)} was lost on the way"):
            numbers.check(GAP_SECONDS)


def test_a_deadline_is_that_of_what_is_missing_now() -> None:
    numbers = Numbers()
    assert said(numbers.take(of(2), 1.0)) == []
    assert said(numbers.take(of(4), 1.1)) == []
    assert numbers.deadline == 1.0 + GAP_SECONDS
    assert said(numbers.take(of(1), 1.15)) == [1, 2]
    assert numbers.deadline == 1.15 + GAP_SECONDS


def test_only_so_many_are_kept() -> None:
    numbers = Numbers()
    for number in range(2, MAX_EARLY + 2):
        numbers.take(of(number), 0.0)
    numbers.take(of(MAX_EARLY + 1), 0.0)
    with pytest.raises(ConnectionLostError, match="message 1 was lost on the way: 2 came"):
        numbers.take(of(MAX_EARLY + 2), 0.0)


# ── of strangers ──────────────────────────────────────────────────────────────────────────────────────

WHO = b"\0who"


def test_the_first_message_of_a_stranger_may_come_second() -> None:
    strangers = Strangers()
    assert said(strangers.take(WHO, of(2), 0.0)) == []
    assert strangers.gap(WHO) is not None
    assert said(strangers.take(WHO, of(1), 0.0)) == [1, 2]
    assert strangers.gap(WHO) is None
    assert said(strangers.admit(WHO).take(of(3), 0.0)) == [3]


def test_a_lost_peer_is_unknown_whatever_comes_again() -> None:
    strangers = Strangers()
    strangers.take(WHO, of(1), 0.0)
    strangers.part(WHO)
    for number in (1, 2):
        with pytest.raises(ConnectionLostError, match="it was given up before"):
            strangers.take(WHO, of(number), 0.0)
    assert list(strangers.take(WHO, [b"status"], 0.0)) == [[b"status"]]
    assert strangers.is_past(WHO)


def test_what_a_peer_was_told_when_it_was_given_up_is_told_again() -> None:
    strangers, told = Strangers(), Failure.of(LeftOutError("the others went on"), Scope.CONNECTION)
    strangers.part(WHO, told)
    strangers.part(WHO)
    assert strangers.farewell(WHO) is told
    strangers.admit(WHO)
    strangers.part(WHO)
    assert strangers.farewell(WHO) is told
    for number in range(2000):
        strangers.part(b"%d" % number, told)
    assert strangers.farewell(WHO) is None


def test_of_strangers_little_is_kept() -> None:
    strangers = Strangers()
    with pytest.raises(ConnectionLostError, match="one of 5010 bytes came"):
        strangers.take(WHO, [*of(2), bytes(5001)], 0.0)
    for number in range(5000):
        strangers.take(b"\0%d" % number, of(2), 0.0)
    assert strangers.gap(b"\x000") is None
    assert strangers.gap(b"\x004999") is not None
    strangers.take(b"\0one more", of(1), 0.0)
    assert len(strangers._known) == 1024


# ── a whole system ────────────────────────────────────────────────────────────────────────────────────


def give(worker: Worker, number: int) -> Any:
    return worker.all_reduce(np.full(70_000, worker.rank + number, np.float32))


class Two:
    """Two workers, the first of which reaches its coordinator through a relay."""

    def __init__(self, stack: ExitStack, judge: Judge) -> None:
        server = stack.enter_context(coordinator())
        through = stack.enter_context(relay(server.url, judge))

        def join(rank: int) -> Worker:
            return connect((through, server.url)[rank], rank, 2, name=f"w{rank}", timeout=PATIENCE, channel="tcp")

        self.workers = [stack.enter_context(worker) for worker in together(range(2), join)]

    def exchange(self, count: int) -> None:
        for number in range(count):
            arrays = together(self.workers, give, number)
            assert all((array == number + 0.5).all() for array in arrays)


@pytest.mark.parametrize("judge", [twice, swapped])
def test_messages_that_come_twice_or_in_another_order_are_as_if_they_did_not(judge: Judge) -> None:
    with ExitStack() as stack:
        Two(stack, judge).exchange(20)


@pytest.mark.parametrize("upwards", [True, False], ids=["to the coordinator", "to the worker"])
@pytest.mark.parametrize("behind", [1, 3], ids=["the last", "in the midst"])
def test_a_message_that_was_lost_costs_its_connection_and_soon(upwards: bool, behind: int) -> None:
    loser = Loser(upwards, Push if upwards else Result, behind, armed=False)
    numel = 5_000_000 if behind > 1 else 100  # in messages of 4 MiB
    with ExitStack() as stack:
        two = Two(stack, loser)
        two.exchange(2)
        loser.armed = True
        since = time.monotonic()
        tasks = [Task(worker.all_reduce, np.ones(numel, np.float32)) for worker in two.workers]

        assert "was lost on the way" in str(tasks[0].error(ConnectionLostError))
        assert time.monotonic() - since < NOTICED_WITHIN + BUSY, "no side asked whether something is missing"
        Task(two.workers[1].barrier).error(WorkerLostError)


def test_a_relay_that_changes_nothing_changes_nothing() -> None:
    with ExitStack() as stack:
        Two(stack, lambda *_: Fate.PASSES).exchange(3)
