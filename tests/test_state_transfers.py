"""Tests of how long the others wait for a learner's state: only state that has come buys time."""

from __future__ import annotations

import numpy as np
import pytest

from gradserver.engine.policy import Policy
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import DeadlineError, JoinRefusedError, WorkerLostError
from gradserver.protocol.exchange import STATE_TAG, ExchangeKey, Kind, Op, Operation, Pool, is_state
from gradserver.protocol.limits import (
    MAX_STATE_ATTEMPTS,
    SLICE_BYTES,
    STATE_ASK_SECONDS,
    STATE_REST_SECONDS,
    STATE_STALL_SECONDS,
)
from gradserver.protocol.messages import (
    Enter,
    Entered,
    Failure,
    Propose,
    Ready,
    Result,
    RoundDone,
    Serve,
    StateFailed,
    Transfer,
)
from tests.engine_harness import SEATS, Harness, bucket, floats, plan_of, transfer

LEARNER = 7
"""Its connection."""
SECONDS, RATE = 40.0, 8.0
ROUND_TIMEOUT = 1800.0
PLAN = plan_of(4)


class Training(Harness):
    """Two members that train, and one that joins and is waited for."""

    def __init__(self, minimum: int = 1) -> None:
        super().__init__({"default": Policy(minimum, 8, state_seconds=SECONDS, state_rate=RATE)})
        for rank in range(2):
            self.join(SEATS + rank, f"w{rank}", rank=rank, world=2, timeout=ROUND_TIMEOUT)
        self.inbox.clear()
        self.agree(PLAN, 2)
        for rank in range(2):
            self.receive(SEATS + rank, Serve())
        self.round = 0

    def enter(self, name: str = "late", line: int = LEARNER, waits: bool = True) -> None:
        self.join(SEATS + line, name, timeout=ROUND_TIMEOUT)
        self.receive(SEATS + line, Propose(PLAN.hash), PLAN.encoded)
        self.receive(SEATS + line, Enter(0, waits))

    def train(self) -> list[Transfer]:
        """Train for a round. Return the states that are sent after it."""
        for rank in range(2):
            self.push(rank, bucket(self.round), floats(1, 2, 3, 4))
        done = [m for m in self.told(0, RoundDone) if m.round == self.round]
        if not done:
            return []
        self.round += 1
        return list(done[0].transfers)

    def waits(self) -> bool:
        """Return whether the members have given a round, and the learner has not."""
        return bool(self.open_exchanges())

    def begin(self) -> Transfer:
        """Begin: the learner gets a state, and the members have given the next round."""
        self.enter()
        (told,) = self.train()
        assert not self.train()
        assert self.waits()
        return told

    def part(self, told: Transfer, index: int, nbytes: int, member_id: int = 2) -> None:
        """Let so much of the state come."""
        key = ExchangeKey(2, index, STATE_TAG + told.number, told.donor, member_id)
        operation = Operation(Kind.TRANSFER, Op.NONE, UINT8, nbytes)
        self.push(LEARNER, key, operation=operation)
        self.push(told.donor, key, np.zeros(nbytes, np.uint8).tobytes(), operation=operation)

    def half(self, told: Transfer, member_id: int, line: int, index: int = 0) -> None:
        """Send one end of a part of the state."""
        key = ExchangeKey(2, index, STATE_TAG + told.number, told.donor, told.learner)
        payload = np.zeros(8, np.uint8).tobytes() if member_id == told.donor else None
        self.push(line, key, payload, operation=Operation(Kind.TRANSFER, Op.NONE, UINT8, 8))

    def states(self) -> list[ExchangeKey]:
        """Return the states on their way."""
        return [key for key in self.engine.data.groups["default"].exchanges if is_state(key)]

    def ended(self, line: int = LEARNER) -> str:
        """Return what the learner was told as the others went on without it."""
        errors = [error for error in self.failures(line) if isinstance(error, DeadlineError)]
        assert SEATS + line in self.closed
        (error,) = errors
        done = [message for message in self.told(1, RoundDone) if message.round == self.round]
        assert done, "the others wait"
        self.round += 1
        return error.message

    def failures(self, line: int) -> list[Exception]:
        return [message.exception() for message in self.told(line, Failure)]


def test_a_learner_that_says_nothing_is_given_up_in_seconds() -> None:
    driven = Training()
    driven.begin()

    driven.wait(STATE_ASK_SECONDS - 0.1)
    assert driven.waits()
    driven.wait(0.1)

    text = driven.ended()
    assert "waited 3.0 s in round 1 for 'late' (rank 2), and goes on without it" in text
    assert "it did not ask for the state that 'w0' (rank 0) was to send it" in text
    assert not driven.waits()


@pytest.mark.parametrize("others", [False, True])
def test_a_learner_to_which_a_few_bytes_come_now_and_then_is_given_up(others: bool) -> None:
    """Test a learner that sends something itself, too: that is no state."""
    driven = Training()
    told = driven.begin()
    for index in range(2):
        driven.part(told, index, 4)
        if others:
            own = transfer(index, 2, 1)
            driven.push(LEARNER, own, bytes(64), operation=Operation(Kind.TRANSFER, Op.NONE, UINT8, 64))
        assert driven.waits()
        driven.wait(2.5)
    driven.part(told, 2, 4)
    driven.wait(3.1)

    assert "too few for the 7.62939e-06 MiB a second" in driven.ended()


def test_while_its_state_comes_fast_enough_a_learner_is_waited_for_but_not_longer_than_was_said() -> None:
    driven = Training()
    told = driven.begin()
    for index in range(int(SECONDS)):
        assert driven.waits()
        driven.part(told, index, 32)
        driven.wait(1.0)

    assert "the others wait 40 s at most (--state-timeout)" in driven.ended()


def test_a_donor_has_a_while_to_begin_and_the_learner_to_make_its_own_what_came() -> None:
    driven = Training()
    told = driven.begin()
    key = ExchangeKey(2, 0, STATE_TAG + told.number, told.donor, 2)
    driven.push(LEARNER, key, operation=Operation(Kind.TRANSFER, Op.NONE, UINT8, 4))
    driven.wait(SECONDS / 8 - 0.1)
    driven.push(told.donor, key, bytes(4), operation=Operation(Kind.TRANSFER, Op.NONE, UINT8, 4))
    driven.wait(STATE_STALL_SECONDS - 0.1)
    assert driven.waits()

    driven.receive(SEATS + LEARNER, Ready(told.number))

    assert driven.told(LEARNER, Entered)
    assert driven.waits(), "for its contribution"
    driven.wait(SECONDS)
    assert SEATS + LEARNER not in driven.closed


@pytest.mark.parametrize("after", [0.0, 0.1])
def test_it_does_not_matter_how_soon_after_the_learner_asked_the_first_bytes_come(after: float) -> None:
    """Test that without more of them it is given up as if they had been there already."""
    driven = Training()
    told = driven.begin()
    driven.half(told, told.learner, LEARNER)
    driven.wait(after)
    driven.half(told, told.donor, told.donor)
    driven.half(told, told.learner, LEARNER, 1)
    driven.wait(STATE_STALL_SECONDS - 0.1)
    assert driven.waits()
    driven.wait(0.2 + 8 / RATE)

    assert "8 bytes of the state of 'w0' (rank 0) had come, too few" in driven.ended()


def test_after_waiting_in_vain_the_others_train_for_longer_before_they_wait_again() -> None:
    driven = Training()
    driven.begin()
    driven.wait(STATE_ASK_SECONDS)
    driven.ended()

    driven.enter("another", LEARNER + 1)
    for _ in range(8):
        assert not driven.train(), "a state is sent for which they wait"
        assert not driven.waits()
        driven.wait(STATE_ASK_SECONDS)
    driven.wait(STATE_ASK_SECONDS)

    assert driven.train()


def test_a_name_that_was_waited_for_in_vain_too_often_may_not_join_for_a_while() -> None:
    driven = Training()
    for attempt in range(MAX_STATE_ATTEMPTS):
        driven.enter(line=LEARNER + attempt)
        (_,) = driven.train()
        driven.train()
        driven.wait(STATE_ASK_SECONDS)
        driven.ended(LEARNER + attempt)
        driven.wait(30.0)

    driven.enter(line=90)
    error, *_ = driven.failures(90)
    assert isinstance(error, JoinRefusedError)
    assert "waited 3 times for 'late' to get the state, in vain: it may join again in 570 s" in error.message
    driven.wait(STATE_REST_SECONDS)
    driven.enter(line=91)
    assert driven.train()


def test_asking_for_the_state_again_and_again_is_no_way_to_be_waited_for() -> None:
    driven = Training()
    driven.enter()
    for _ in range(MAX_STATE_ATTEMPTS):
        assert SEATS + LEARNER not in driven.closed
        (told,) = driven.train()
        driven.wait(STATE_ASK_SECONDS - 1)
        driven.receive(SEATS + LEARNER, Enter(told.number, True))
        driven.wait(30.0)

    assert SEATS + LEARNER in driven.closed


def test_what_is_the_donors_fault_is_not_held_against_a_learner() -> None:
    driven = Training()
    told = driven.begin()

    driven.receive(SEATS + told.donor, StateFailed(told.number, "no memory"))

    assert not driven.engine.control.groups["default"].learners.in_vain
    (done,) = driven.told(0, RoundDone)
    (again,) = done.transfers
    assert again.donor != told.donor


def test_with_too_few_to_train_they_wait_as_long_as_the_state_comes() -> None:
    driven = Training(minimum=2)
    driven.lose(1)
    driven.enter()
    driven.push(0, bucket(0), floats(1, 2, 3, 4))
    (done,) = driven.told(0, RoundDone)
    (told,) = done.transfers
    for index in range(int(SECONDS) + 20):
        driven.part(told, index, 32)
        driven.wait(1.0)

    assert SEATS + LEARNER not in driven.closed


def test_the_log_names_both_sides_of_a_wait() -> None:
    driven = Training()
    driven.begin()

    texts = [log.text for log in driven.logs]
    assert (
        "group 'default': round 1 waits for 'late' (rank 2), to which 'w0' (rank 0) sends its state, 40 s at most"
        in texts
    )


@pytest.mark.parametrize("politely", [True, False])
def test_a_listener_with_all_of_the_state_needs_its_donor_no_more(politely: bool) -> None:
    driven = Training()
    driven.enter(waits=False)
    (told,) = driven.train()
    assert not told.waits
    driven.half(told, told.donor, told.donor)

    driven.leave(told.donor) if politely else driven.lose(told.donor)
    driven.half(told, told.learner, LEARNER)
    driven.receive(SEATS + LEARNER, Ready(told.number))
    driven.inbox.pop(SEATS + LEARNER)
    driven.push(1 - told.donor, bucket(1), floats(1, 2, 3, 4))

    heard = [message for message, _ in driven.sent(LEARNER)]
    assert [m.key for m in heard if isinstance(m, Result)] == [bucket(1)], "it catches up with the others"
    assert Entered(2) in heard
    assert [m.transfers for m in heard if isinstance(m, RoundDone)] == [()], "it gets the state anew"


def test_a_listener_that_lacks_some_of_the_state_gets_that_of_another_member() -> None:
    driven = Training()
    driven.enter(waits=False)
    (told,) = driven.train()
    driven.half(told, told.donor, told.donor)

    driven.lose(told.donor)
    driven.half(told, told.learner, LEARNER)
    driven.half(told, told.learner, LEARNER, 1)
    (failure,) = driven.failures(LEARNER)
    assert isinstance(failure, WorkerLostError)
    driven.receive(SEATS + LEARNER, Enter(told.number))
    driven.push(1, bucket(1), floats(1, 2, 3, 4))

    (done,) = [message for message in driven.told(LEARNER, RoundDone) if message.round == 1]
    assert done.transfers == (Transfer(told.number + 1, 1, told.learner, False),)


@pytest.mark.parametrize("another", [False, True])
def test_a_donor_whose_learner_is_lost_in_the_midst_of_a_part_stays_a_member(another: bool) -> None:
    """Test that the rest of the part, which is on its way already, breaks no rule."""
    driven = Training()
    driven.enter()
    (told,) = driven.train()
    key = ExchangeKey(2, 0, STATE_TAG + told.number, told.donor, told.learner)
    operation = Operation(Kind.TRANSFER, Op.NONE, UINT8, SLICE_BYTES + 8)
    driven.push(LEARNER, key, operation=operation)
    driven.push(LEARNER, key, index=1)
    if another:
        driven.enter("another", LEARNER + 1)
    driven.lose(LEARNER)

    driven.push(told.donor, key, bytes(SLICE_BYTES), operation=operation)
    driven.push(told.donor, key, bytes(8), index=1)

    assert SEATS + told.donor not in driven.closed
    assert driven.states() == []
    assert all(isinstance(failure, WorkerLostError) for failure in driven.failures(told.donor))


@pytest.mark.parametrize("expected", [False, True])
def test_a_state_for_the_seats_former_worker_goes_nowhere(expected: bool) -> None:
    """Test a worker in the same member that is to get another one, too."""
    driven = Training()
    told = driven.begin()
    driven.lose(LEARNER)
    driven.round += 1
    driven.enter(line=LEARNER + 1, waits=False)
    if expected:
        (other,) = driven.train()
        assert other.learner == told.learner

    driven.half(told, told.donor, told.donor)

    (failure,) = driven.failures(told.donor)
    assert isinstance(failure, WorkerLostError)
    assert "this state is not waited for any more" in str(failure)
    assert driven.states() == []
    assert driven.engine.data.groups["default"].traffic.outstanding[told.donor, Pool.SENDS] == 0


def test_a_state_goes_nowhere_when_the_seats_next_worker_is_gone_too() -> None:
    driven = Training()
    driven.enter(waits=False)
    (told,) = driven.train()
    driven.half(told, told.learner, LEARNER)
    driven.half(told, told.donor, told.donor)
    driven.lose(LEARNER)
    driven.enter(line=LEARNER + 1)
    driven.lose(LEARNER + 1)

    driven.half(told, told.donor, told.donor, 1)

    (failure,) = driven.failures(told.donor)
    assert isinstance(failure, WorkerLostError)
    assert SEATS + told.donor not in driven.closed
    assert driven.states() == []


def test_a_state_of_the_seats_former_worker_is_not_waited_for() -> None:
    driven = Training()
    driven.enter(waits=False)
    (told,) = driven.train()
    driven.half(told, told.donor, told.donor)
    driven.half(told, told.learner, LEARNER)
    driven.lose(told.donor)
    driven.inbox.clear()

    driven.join(SEATS + LEARNER + 1, "w0", timeout=ROUND_TIMEOUT)
    driven.half(told, told.learner, LEARNER, 1)

    (failure,) = driven.failures(LEARNER)
    assert isinstance(failure, WorkerLostError)
    assert driven.states() == []
