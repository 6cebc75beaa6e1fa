"""Messages are numbered: what a relay lost, repeated or swapped is noticed, and harms nobody's results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from protocol.errors import ConnectionLostError, WorkerLostError
from protocol.messages import Ping, Result
from protocol.numbers import GAP_SECONDS, MAX_EARLY, Inbox, numbered, split
from protocol.wire import decode, encode
from tests.cluster import PATIENCE, Task, coordinator, together
from tests.relay import Frames, Swap, Tamper, relay, twice
from worker.client import Worker
from worker.connect import connect

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


@given(st.permutations(range(1, 8)), st.data())
def test_whatever_is_repeated_or_swapped_comes_once_and_in_order(order: list[int], data: st.DataObject) -> None:
    repeated = data.draw(st.lists(st.sampled_from(order), max_size=5))
    arriving = data.draw(st.permutations(order + repeated))
    inbox: Inbox[int] = Inbox()

    taken = [due for number in arriving for due in inbox.take(number, number, 0.0)]

    assert taken == sorted(order)
    assert inbox.deadline is None
    inbox.check(1e9)


@given(st.sets(st.integers(1, 10), min_size=1, max_size=9))
def test_what_is_behind_something_lost_is_never_taken(lost: set[int]) -> None:
    inbox: Inbox[int] = Inbox()

    taken = [due for number in range(1, 11) if number not in lost for due in inbox.take(number, number, 0.0)]

    assert taken == list(range(1, min(lost)))
    if any(number not in lost for number in range(min(lost), 11)):
        assert inbox.deadline == GAP_SECONDS
        inbox.check(GAP_SECONDS / 2)
        with pytest.raises(ConnectionLostError, match=f"message {min(lost)} was lost on the way"):
            inbox.check(GAP_SECONDS)


def test_a_deadline_is_that_of_what_is_missing_now() -> None:
    inbox: Inbox[int] = Inbox()
    assert list(inbox.take(2, 2, 1.0)) == []
    assert list(inbox.take(4, 4, 1.1)) == []
    assert inbox.deadline == 1.0 + GAP_SECONDS
    assert list(inbox.take(1, 1, 1.15)) == [1, 2]
    assert inbox.deadline == 1.15 + GAP_SECONDS


def test_only_so_many_are_kept() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(2, MAX_EARLY + 2):
        inbox.take(number, number, 0.0)
    inbox.take(MAX_EARLY + 1, 0, 0.0)
    with pytest.raises(ConnectionLostError, match="message 1 was lost on the way: 2 came"):
        inbox.take(MAX_EARLY + 2, 0, 0.0)


# ── a whole system ────────────────────────────────────────────────────────────────────────────────────


def give(worker: Worker, number: int) -> Any:
    return worker.all_reduce(np.full(70_000, worker.rank + number, np.float32))


class Two:
    """Two workers, the first of which reaches its coordinator through a relay."""

    def __init__(self, stack: ExitStack, tamper: Tamper) -> None:
        server = stack.enter_context(coordinator())
        through = stack.enter_context(relay(server.url, tamper))

        def join(rank: int) -> Worker:
            return connect((through, server.url)[rank], rank, 2, name=f"w{rank}", timeout=PATIENCE, channel="tcp")

        self.workers = [stack.enter_context(worker) for worker in together(range(2), join)]

    def exchange(self, count: int) -> None:
        for number in range(count):
            arrays = together(self.workers, give, number)
            assert all((array == number + 0.5).all() for array in arrays)


@pytest.mark.parametrize("tamper", [twice, Swap()])
def test_messages_that_come_twice_or_in_another_order_are_as_if_they_did_not(tamper: Tamper) -> None:
    with ExitStack() as stack:
        Two(stack, tamper).exchange(20)


class Loser:
    """Loses one message, once it is told to."""

    def __init__(self, upwards: bool, behind: int) -> None:
        self._upwards, self._behind = upwards, behind
        self.armed = False

    def __call__(self, upwards: bool, _number: int, frames: Frames) -> Sequence[Frames]:
        if not self.armed or upwards != self._upwards:
            return [frames]
        message, _ = decode([split(frames[0])[1], *frames[1:]])
        if not upwards and not isinstance(message, Result):
            return [frames]
        self._behind -= 1
        if self._behind == 0:
            self.armed = False
            return []
        return [frames]


@pytest.mark.parametrize("upwards", [True, False], ids=["to the coordinator", "to the worker"])
@pytest.mark.parametrize("behind", [1, 3], ids=["the last", "in the midst"])
def test_a_message_that_was_lost_costs_its_connection_and_soon(upwards: bool, behind: int) -> None:
    loser = Loser(upwards, behind)
    numel = 1_250_000 if behind > 1 else 100
    with ExitStack() as stack:
        two = Two(stack, loser)
        two.exchange(2)
        loser.armed = True
        since = time.monotonic()
        tasks = [Task(worker.all_reduce, np.ones(numel, np.float32)) for worker in two.workers]

        assert "was lost on the way" in str(tasks[0].error(ConnectionLostError))
        assert time.monotonic() - since < NOTICED_WITHIN + 5.0, "nobody asked whether something is missing"
        Task(two.workers[1].barrier).error(WorkerLostError)


def test_a_relay_that_changes_nothing_changes_nothing() -> None:
    with ExitStack() as stack:
        Two(stack, lambda _up, _number, frames: [frames]).exchange(3)
