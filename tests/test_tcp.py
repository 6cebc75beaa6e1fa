"""Coordinator and workers as processes that talk over TCP, and what becomes of the others when one of them dies."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradserver.protocol.errors import (
    ClosedError,
    ConnectionLostError,
    CoordinatorStoppedError,
    GradServerError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.limits import COORDINATOR_SILENCE
from gradserver.protocol.messages import Ping, Present
from gradserver.transport.server import TcpServer
from gradserver.worker.client import Worker
from gradserver.worker.transport.beacon import Beacon
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import BUSY, Daemon, Program, Task, coordinator, errors, joined, together, wait_until, worker_program

DEATH_IS_NOTICED_WITHIN = 1.0 + BUSY
"""Seconds in which survivors hear of a process that was killed."""
SILENCE_IS_NOTICED_WITHIN = 3.0 + BUSY
"""Seconds in which they hear of one that is frozen."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("--quiet") as daemon:
        yield daemon


@pytest.fixture
def start(daemon: Daemon) -> Iterator[Start]:
    with ExitStack() as stack:
        yield Start(daemon.url, stack)


class Start:
    """Starts worker programs in a group of three at the test's daemon; the test ends them."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._url, self._stack = url, stack

    def __call__(self, name: str, rank: int, **arguments: Any) -> Program:
        return self._stack.enter_context(worker_program(self._url, name, rank, 3, **arguments))


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def end_of(survivor: Program, since: float) -> tuple[float, str, str]:
    """Return seconds from ``since`` to a survivor's error, its class and its text."""
    at, kind, text = json.loads(survivor.expect("error "))
    return at - since, kind, text


def exchanging(start: Start, *ranks: int) -> list[Program]:
    """Start workers of these ranks, which exchange until an error. All of them have begun."""
    workers = [start("exchange_until_error", rank) for rank in ranks]
    for worker in workers:
        worker.expect("exchanging")
    return workers


def told(survivors: Sequence[Program], kind: str, since: float, within: float) -> list[str]:
    """Return the text of the survivors' error of this class, at most so many seconds after ``since``."""
    texts = []
    for survivor in survivors:
        seconds, found, text = end_of(survivor, since)
        assert seconds < within
        assert found == kind
        texts.append(text)
    return texts


# ── exchanging ────────────────────────────────────────────────────────────────────────────────────────


def test_workers_in_processes_exchange_rounds(start: Start) -> None:
    workers = [start("rounds", rank, count=20, buckets=3, numel=300_000) for rank in range(3)]

    for worker in workers:
        worker.expect("ok")
        assert worker.end() == 0
        assert worker.complaints() == []


def test_worker_that_never_closes_ends_like_any_process(start: Start) -> None:
    workers = [start("leave_without_a_word", rank) for rank in range(3)]

    for worker in workers:
        assert worker.end() == 0
        assert worker.complaints() == []


def test_child_that_a_worker_forks_does_not_speak_for_it(start: Start) -> None:
    for worker in [start("fork", rank) for rank in range(3)]:
        worker.expect("ok")
        assert worker.end() == 0


@pytest.mark.long
def test_worker_whose_interpreter_is_busy_is_not_taken_for_dead(start: Start) -> None:
    workers = [start("compute", rank, seconds=6.0) for rank in range(3)]

    for worker in workers:
        worker.expect("ok")


def test_only_what_is_needed_travels() -> None:
    def traffic(server: TcpServer) -> tuple[int, int]:
        groups: Any = server._runtime.snapshot()["groups"]
        return groups["default"]["bytes_in"], groups["default"]["bytes_out"]

    with coordinator() as server, joined(server.url, 3) as workers:
        together(workers, lambda worker: worker.all_reduce(np.ones(6, np.int8), "sum"))
        assert traffic(server) == (18, 18)
        together(workers, lambda worker: worker.reduce_scatter(np.ones(6, np.int8), "sum"))
        assert traffic(server) == (36, 24)
        together(workers, lambda worker: worker.broadcast(np.ones(6, np.int8), 1))
        assert traffic(server) == (42, 36)
        together(workers, lambda worker: worker.all_gather(np.ones(6, np.int8)))
        assert traffic(server) == (60, 90)
        together(workers, lambda worker: worker.all_reduce(np.ones(1, np.float32), weight=float(worker.rank)))
        assert traffic(server) == (68, 102)


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_worker_said_before_it_left_counts() -> None:
    with coordinator() as server:
        for number in range(10):
            with joined(server.url, 2, group=f"group {number}") as (zero, one):
                zero.all_reduce(floats(1), async_op=True)
                zero.all_reduce(np.ones(1_000_000, np.float32), async_op=True)
                zero.close("its data is used up")

                assert one.all_reduce(floats(3)).tolist() == [2]
                assert (one.all_reduce(np.ones(1_000_000, np.float32)) == 1).all()
                with pytest.raises(
                    WorkerLeftError, match="'w0' .rank 0. left and is needed to go on: its data is used up"
                ):
                    one.barrier()


def test_what_a_worker_said_before_it_left_counts_behind_a_backlog(daemon: Daemon) -> None:
    with joined(daemon.url, 8) as workers:
        daemon.send_signal(signal.SIGSTOP)
        handles = [[worker.all_reduce(floats(1), async_op=True) for _ in range(100)] for worker in workers]
        closing = Task(workers[0].close, "its data is used up")
        wait_until(lambda: workers[0].closed, "it is leaving")
        daemon.send_signal(signal.SIGCONT)
        closing.result()

        for handle in (handle for of_worker in handles[1:] for handle in of_worker):
            assert handle.wait().tolist() == [1]
        for error in errors(WorkerLeftError, workers[1:], lambda worker: worker.barrier()):
            assert "'w0' (rank 0) left and is needed to go on: its data is used up" in str(error)


def test_reason_of_a_worker_that_failed_arrives() -> None:
    with coordinator() as server:
        for number in range(30):
            with joined(server.url, 2, group=f"group {number}") as (zero, one):
                waiting = Task(one.barrier)
                zero.abort("it raised ValueError: no")

                assert "'w0' (rank 0) was lost and is needed to go on: it raised ValueError: no" in str(
                    waiting.error(WorkerLostError)
                )


# ── workers that die ──────────────────────────────────────────────────────────────────────────────────


def test_survivors_of_a_killed_worker_are_told_its_name_soon(start: Start) -> None:
    *survivors, victim = exchanging(start, 0, 2, 1)

    killed = time.monotonic()
    victim.send_signal(signal.SIGKILL)

    for text in told(survivors, "WorkerLostError", killed, DEATH_IS_NOTICED_WITHIN):
        assert "'w1' (rank 1) was lost after round" in text
        assert text.endswith("its process ended")


def test_survivors_of_a_worker_killed_in_the_middle_of_a_round_are_told_its_name_soon(start: Start) -> None:
    survivors = [start("exchange_until_error", rank) for rank in (0, 2)]
    victim = start("stop_halfway", 1)
    victim.expect("halfway")

    killed = time.monotonic()
    victim.send_signal(signal.SIGKILL)

    for text in told(survivors, "WorkerLostError", killed, DEATH_IS_NOTICED_WITHIN):
        assert text.partition(" and is")[0] == "'w1' (rank 1) was lost after round 2"


def test_survivors_of_a_frozen_worker_are_told_its_name_soon(start: Start) -> None:
    *survivors, victim = exchanging(start, 0, 2, 1)

    frozen = time.monotonic()
    victim.send_signal(signal.SIGSTOP)

    for text in told(survivors, "WorkerLostError", frozen, SILENCE_IS_NOTICED_WITHIN):
        assert "'w1' (rank 1) was lost" in text
    victim.send_signal(signal.SIGCONT)
    assert end_of(victim, frozen)[1] == "LeftOutError"


def test_death_of_one_group_is_nothing_to_another(daemon: Daemon, start: Start) -> None:
    others = exchanging(start, 0, 1, 2)
    with joined(daemon.url, 2, group="innocent") as workers:

        def work(worker: Worker) -> None:
            for number in range(300):
                assert worker.all_reduce(floats(worker.rank + number)).tolist() == [0.5 + number]

        tasks = [Task(work, worker) for worker in workers]
        others[0].send_signal(signal.SIGKILL)
        others[1].expect("error ")

        for task in tasks:
            task.result()


# ── coordinators that end ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_wait_are_told_why_the_coordinator_stopped(daemon: Daemon, number: signal.Signals) -> None:
    with joined(daemon.url, 2) as workers:
        tasks: list[Task[Any]] = [Task(workers[0].recv, floats(0), 1), Task(workers[1].barrier)]
        assert not any(task.ended(0.05) for task in tasks)

        daemon.send_signal(number)

        for task in tasks:
            assert f"the coordinator was stopped (it received {number.name})" in str(
                task.error(CoordinatorStoppedError)
            )
        assert daemon.end() == 0


def test_moment_that_passes_while_the_coordinator_has_no_processor_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        """A clock that gives each reading 5 ms late."""

        def monotonic(self) -> float:
            now = time.monotonic()
            time.sleep(0.005)
            return now

    with coordinator() as server:
        asked: list[int] = []

        def ask(milliseconds: int) -> None:
            server._monitor.probe_at(time.monotonic() + milliseconds / 1000)
            asked.append(milliseconds)

        def acts_in(milliseconds: int) -> None:
            server.look(partial(ask, milliseconds))
            wait_until(lambda: milliseconds in asked, "the coordinator knows the moment")
            wait_until(lambda: server._monitor.due is None, f"the coordinator acts, {milliseconds} ms later")

        monkeypatch.setattr("gradserver.transport.server.time", Late())
        for milliseconds in range(1, 10):
            acts_in(milliseconds)


def test_stop_that_is_asked_for_when_all_is_over_is_nothing_to_a_coordinator() -> None:
    with coordinator() as server:
        pass
    server.request_stop("a signal that comes while the process ends")


def test_worker_that_computed_meanwhile_is_told_why_the_coordinator_stopped(daemon: Daemon) -> None:
    with joined(daemon.url, 2) as workers:
        together(workers, lambda worker: worker.barrier())
        daemon.send_signal(signal.SIGTERM)
        assert daemon.end() == 0

        for _ in range(2):
            with pytest.raises(CoordinatorStoppedError, match="it received SIGTERM"):
                workers[0].all_reduce(floats(1))
        with pytest.raises(CoordinatorStoppedError, match="it received SIGTERM"):
            workers[1].send(floats(1), 0)


def test_group_that_forms_is_told_why_the_coordinator_stopped(daemon: Daemon, start: Start) -> None:
    waiting = start("idle", 0)
    while not daemon.group().get("waiting"):
        assert waiting.running

    daemon.send_signal(signal.SIGTERM)

    assert waiting.end() == 1
    assert "CoordinatorStoppedError: the coordinator was stopped (it received SIGTERM)" in waiting.complaints()[-1]


def test_workers_of_a_killed_coordinator_lose_their_connection_soon(daemon: Daemon, start: Start) -> None:
    workers = exchanging(start, 0, 1, 2)

    killed = time.monotonic()
    daemon.send_signal(signal.SIGKILL)

    for text in told(workers, "ConnectionLostError", killed, DEATH_IS_NOTICED_WITHIN):
        assert f"lost the coordinator at {daemon.url}: its process ended, or the network to it failed" in text


def test_worker_that_computed_meanwhile_finds_its_coordinator_dead(daemon: Daemon) -> None:
    with joined(daemon.url, 2) as workers:
        together(workers, lambda worker: worker.barrier())
        daemon.send_signal(signal.SIGKILL)
        daemon.end()

        for worker in workers:
            with pytest.raises(ConnectionLostError, match=f"lost the coordinator at {daemon.url}"):
                worker.all_reduce(floats(1))


@pytest.mark.parametrize("silence", [2.0, pytest.param(COORDINATOR_SILENCE, marks=pytest.mark.long)])
def test_frozen_coordinator_is_noticed_soon(daemon: Daemon, silence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserver.protocol.transport.dealer.COORDINATOR_SILENCE", silence)
    with joined(daemon.url, 2) as (zero, _):
        waiting = Task(zero.barrier)
        assert not waiting.ended(0.05)
        daemon.send_signal(signal.SIGSTOP)

        waiting.error(ConnectionLostError, timeout=silence + 4.0)


def test_closing_does_not_wait_for_a_coordinator_that_is_gone(daemon: Daemon) -> None:
    with joined(daemon.url, 4) as workers:
        daemon.send_signal(signal.SIGKILL)
        with pytest.raises(ConnectionLostError):
            workers[0].barrier()
        durations = []
        for worker in workers:
            begun = time.monotonic()
            worker.close()
            durations.append(time.monotonic() - begun)

    assert max(durations) < DEATH_IS_NOTICED_WITHIN
    assert min(durations[1:]) < 0.5, "each tried to send its goodbye"


def test_closing_does_not_hang_when_a_presence_is_about_to_say_that_it_is_there(daemon: Daemon) -> None:
    channel = TcpChannel(daemon.url, 5.0)
    sent: list[GradServerError] = []

    class AboutToSay(Beacon):
        """Its thread gets to sending when it is closed."""

        def __init__(self) -> None: ...

        def close(self) -> None:
            if not sent:
                sent.append(Task(channel.send, Present("it")).error(ClosedError, 5.0))

    channel.attach_beacon(AboutToSay())

    Task(channel.close).result()

    assert isinstance(sent[0], ClosedError)


def test_a_thread_that_sends_while_a_loss_is_told_gets_that_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that it does not end the membership first, with the error of a worker that was closed."""
    with Daemon() as daemon, joined(daemon.url, 1, channel="tcp") as (worker,):
        session, seen = worker._session, list[BaseException]()
        lost = session.lost

        def told(error: GradServerError) -> None:
            try:
                session.traffic.channel.send(Ping())
            except GradServerError as meanwhile:
                seen.append(meanwhile)
            lost(error)

        monkeypatch.setattr(session, "lost", told)
        session.traffic.channel.watch(lambda: False)  # its own thread reads
        daemon.send_signal(signal.SIGKILL)
        wait_until(lambda: worker.closed, "the loss is noticed")
    assert [type(error) for error in seen] == [ConnectionLostError]
