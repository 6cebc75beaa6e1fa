"""Tests of a small training beside a member or a learner that attacks it: its weights are right, and it continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gradserver import GradServerError, Worker, connect
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import DeadlineError
from gradserver.protocol.limits import MAX_CLAIMED, MIB, PROTOCOL_VERSION
from gradserver.protocol.messages import Enter, Failure
from gradserver.protocol.messages.recovery import Holding, Resume, Resumed
from gradserver.protocol.plan import simple_plan
from gradserver.worker.donor import HEAD
from tests.cluster import Daemon, Task, wait_until
from tests.engine_harness import Array
from tests.strangers import Stranger

NUMEL = 3000
PLAN = simple_plan([("w", NUMEL)], FLOAT32)
START = np.linspace(-1, 1, NUMEL, dtype=np.float32)


def gradient(rank: int, number: int, weights: Array) -> Array:
    """Return a gradient of a toy loss: it depends on the worker, and on all that was before."""
    return (weights * np.float32(0.5 + rank) + np.float32(number % 7 - 3)).astype(np.float32)


def step(weights: Array, mean: Array) -> None:
    weights -= np.float32(0.01) * mean


class Training:
    """Two workers that train until they are told to stop, and a third one that does something else beside them."""

    def __init__(self, url: str) -> None:
        self.url, self.rounds, self.stop_at = url, 0, 1 << 40
        self.weights = [START.copy(), START.copy()]
        self.attacker: Worker | None = None

    def begin(self, third: bool) -> None:
        """Begin. ``third``: the attacker is a member from the start, and then keeps the others waiting in round 3."""
        world = 2 + third
        joining = [Task(connect, self.url, rank=r, world_size=world, name=f"w{r}", channel="tcp") for r in range(world)]
        workers = [task.result() for task in joining]
        self.agreed = threading.Barrier(world)
        self.tasks = [Task(self._train, worker) for worker in workers[:2]]
        if third:
            self.attacker = workers[2]
            self.attacker.agree(PLAN)
            self.agreed.wait()
            for _ in range(3):
                self.attacker.push(0, np.zeros(NUMEL, np.float32), weight=0.0)
                self.attacker.finish_round()
        wait_until(lambda: self.rounds >= 3, "they train")

    def _train(self, worker: Worker) -> None:
        weights, rank = self.weights[worker.rank], worker.rank
        worker.serve_state(lambda: {"weights": weights})
        worker.agree(PLAN)
        self.agreed.wait()
        while worker.round < self.stop_at:
            mean = gradient(rank, worker.round, weights)
            worker.push(0, mean)
            worker.finish_round()
            step(weights, mean)
            if not rank:
                self.rounds = worker.round
        worker.close()

    def end(self) -> None:
        """Stop both, and compare their weights with those of a training by themselves."""
        self.stop_at = self.rounds + 50
        for task in self.tasks:
            task.result()
        right = START.copy()
        for number in range(self.stop_at):
            one, other = (gradient(rank, number, right) for rank in range(2))
            step(right, (one + other) / np.float32(2))
        for weights in self.weights:
            assert weights.tobytes() == right.tobytes()

    def stands_still(self, seconds: float, over: threading.Event) -> float:
        """Return how many seconds are in pauses of more than one, in which no round ends.

        It looks from now on until it is ``over`` and the two have trained a hundred more rounds, for so many seconds at
        most.
        """
        began = last = time.monotonic()
        paused, rounds, until = 0.0, self.rounds, 1 << 40
        while (now := time.monotonic()) < began + seconds and rounds < until:
            if self.rounds != rounds:
                paused += now - last if now > last + 1 else 0.0
                last, rounds = now, self.rounds
            if over.is_set():
                until = min(until, rounds + 100)
            time.sleep(0.01)
        return paused + (now - last if now > last + 1 else 0.0)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Run a coordinator of durable groups, and check its memory in the end."""
    with Daemon("--workers", "2:8", "--state-dir", str(tmp_path)) as found:
        idle = found.memory()
        yield found
        assert found.memory("VmHWM") - idle < 300 * MIB
        assert found.running


def resume(attacker: Worker, epoch: int) -> Resume:
    welcome = attacker._session.membership
    return Resume("default", welcome.member_ids[welcome.rank], welcome.token, epoch, PLAN.hash)


def resumes_in_no_epoch(training: Training) -> None:
    """Say again and again that it knows of epochs which were never given."""
    attacker = training.attacker
    assert attacker is not None
    message = resume(attacker, MAX_CLAIMED)
    for _ in range(20):
        with Stranger(training.url) as stranger:
            stranger.send(message)
            assert isinstance(stranger.hear(), Failure)
    wrong = bytes([PROTOCOL_VERSION])
    with Stranger(training.url) as stranger:  # and one that no number of this size can be sent of
        stranger.say(b"GS" + wrong + b"\x97\x17\xa7default\x02\xa1t\xcf\x40" + bytes(7) + b"\xa0\xc2")
        assert isinstance(stranger.hear(), Failure)
    attacker.close()


def holds_a_round_of_the_future(training: Training) -> None:
    """Return with its own token, and say that it is a thousand million rounds ahead."""
    attacker = training.attacker
    assert attacker is not None
    with Stranger(training.url) as stranger:
        stranger.send(resume(attacker, attacker.epoch))
        resumed = stranger.hear()
        assert isinstance(resumed, Resumed)
        stranger.send(Holding(resumed.generation, 10**9, 1.0), bytes(2))
        told = stranger.error()
        assert "in round 1000000000" in told.message
    with pytest.raises(GradServerError):
        attacker.finish_round()
    attacker.close()


@pytest.mark.parametrize("attack", [resumes_in_no_epoch, holds_a_round_of_the_future])
def test_numbers_that_cannot_be_cost_the_others_nothing(daemon: Daemon, attack: Callable[[Training], None]) -> None:
    training = Training(daemon.url)
    training.begin(third=True)

    attack(training)

    training.end()


def joins(training: Training) -> Worker:
    attacker = connect(training.url, name="attacker", channel="tcp")
    attacker.agree(PLAN)
    attacker._session.tell(Enter(0, True))
    return attacker


def says_nothing(attacker: Worker) -> None:
    """Let the others wait for it, and do not ask for the state that it is sent."""


def takes_the_first_bytes(attacker: Worker) -> None:
    """Take the first bytes, and no more."""
    transfer, _ = attacker._session.next_instruction(None)
    attacker._session.state_part(transfer, 0, np.empty(HEAD.size, np.uint8)).wait()


@pytest.mark.long
@pytest.mark.parametrize("attack", [says_nothing, takes_the_first_bytes])
def test_a_learner_that_never_comes_in_costs_the_others_seconds(
    daemon: Daemon, attack: Callable[[Worker], None]
) -> None:
    training = Training(daemon.url)
    training.begin(third=False)

    over = threading.Event()
    with joins(training) as attacker:
        still = Task(training.stands_still, 60.0, over)
        attack(attacker)
        wait_until(lambda: attacker._session.closed, "it is out")
        over.set()
        with pytest.raises(DeadlineError, match="goes on without it"):
            attacker._session.check_open()

    assert still.result(120.0) < 0.2 * 60
    training.end()
