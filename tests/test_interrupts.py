"""Tests that a signal handler which raises during a call loses nothing: what was begun can be waited for again."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from gradserver.protocol.limits import SLICE_BYTES
from gradserver.worker.client import Worker
from gradserver.worker.interrupts import admits, uninterrupted, watch
from gradserver.worker.transport.line import Line
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import PATIENCE, Task, members

RAISED, CALLS = 10, 3000
"""The number of raised errors, and the number of calls after which the handler stops."""
NUMEL = SLICE_BYTES // 4 * 2 + 5
"""Three slices of float32."""


class HandlerError(Exception):
    """The error that the handler raises."""


class Pest:
    """Sends the main thread a signal at random moments. Its handler raises in calls that can be repeated."""

    def __init__(self, seed: int) -> None:
        self.raised = 0
        self._may_raise = False
        self._over = threading.Event()
        self._chance = random.Random(seed)
        self._main = threading.get_ident()

    def __call__(self, call: Callable[[], object]) -> None:
        """Make ``call`` until no handler has interrupted it."""
        while True:
            try:
                self._may_raise = True
                call()
                self._may_raise = False
                return
            except HandlerError:
                self.raised += 1

    def heed(self, *_: object) -> None:
        if self._may_raise:
            self._may_raise = False
            raise HandlerError

    def pester(self) -> None:
        while not self._over.wait(self._chance.uniform(0, 0.002)):
            signal.pthread_kill(self._main, signal.SIGUSR1)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        before = signal.signal(signal.SIGUSR1, self.heed)
        thread = threading.Thread(target=self.pester)
        thread.start()
        try:
            yield
        finally:
            self._may_raise = False
            self._over.set()
            thread.join()
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("channel", ["memory", "shm", "tcp"])
def test_a_wait_that_a_signal_handler_interrupts_can_be_waited_for_again(channel: str) -> None:
    pest = Pest(seed=7)
    with members(channel, 2) as (one, other):
        theirs = Task(_sums, other)
        with pest.at_work():
            for call in range(1, CALLS):
                tensor = np.full(NUMEL, call, np.float32)
                handle = one.all_reduce(tensor, "sum", async_op=True)
                pest(handle.wait)
                assert tensor.min() == tensor.max() == call
                if pest.raised >= RAISED:
                    break
        one.all_reduce(np.zeros(NUMEL, np.float32), "sum")
        theirs.result()
    assert pest.raised >= RAISED


@pytest.mark.parametrize("waits", [True, False])
def test_a_handler_that_is_new_does_not_interrupt_the_first_message(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a handler that the main thread has not seen before it takes messages, in a wait and in a look."""
    taking: list[bool] = []
    interrupted: list[bool] = []

    def heed(*_: object) -> None:
        interrupted.append(bool(taking))
        raise HandlerError

    def take(channel: TcpChannel, line: Line, signalled: bool = False) -> bool:
        taking.append(True)
        signal.raise_signal(signal.SIGUSR1)
        taking.clear()
        return original(channel, line, signalled)

    original, never = TcpChannel._take, threading.Lock()
    before = signal.getsignal(signal.SIGUSR1)
    with members("tcp", 1) as (worker,):
        channel = worker._session.traffic.channel
        worker.barrier()
        signal.signal(signal.SIGUSR1, heed)
        try:
            with monkeypatch.context() as patch, suppress(HandlerError):
                patch.setattr(TcpChannel, "_take", take)
                with never:
                    if waits:
                        channel.wait(never, PATIENCE)
                    channel.look()
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert True not in interrupted, "the handler waits for its turn, which is where the thread only waits"
    assert interrupted or not waits


def _sums(worker: Worker) -> None:
    """Add nothing to what the other one gives, until that is nothing too."""
    tensor = np.ones(NUMEL, np.float32)
    while tensor.any():
        tensor[:] = 0
        worker.all_reduce(tensor, "sum")


def test_what_has_begun_ends_before_the_handler_runs() -> None:
    steps: list[str] = []

    def heed(*_: object) -> None:
        steps.append("handler")
        raise HandlerError

    @admits
    def wait() -> None:
        signal.raise_signal(signal.SIGUSR1)
        threading.Event().wait(PATIENCE)  # the handler ends this, if the signal comes again
        steps.append("waited in vain")

    @uninterrupted
    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        steps.append("the work is done")

    @uninterrupted
    def work_and_wait() -> None:
        work()
        wait()

    def work_then_wait() -> None:
        work()
        wait()

    before = signal.signal(signal.SIGUSR1, heed)
    try:
        watch()
        for call in (work_then_wait, work_and_wait, wait):
            with pytest.raises(HandlerError):
                call()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps == 2 * ["the work is done", "handler"] + ["handler"]
