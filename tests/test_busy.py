"""Tests that others wait for a busy worker, however long ago it joined and whatever its own timeout is."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from gradserver.protocol.errors import DeadlineError, GradServerError, LeftOutError
from gradserver.worker import handle
from gradserver.worker.client import Worker
from tests.cluster import Daemon, Task, joined

TIMEOUT = 2.0
"""The timeout that the workers were told at joining."""
VERDICT = 0.2
"""Seconds that a worker leaves the coordinator: its error says more."""


def mean_of(worker: Worker) -> float:
    return float(worker.all_reduce(np.full(1, float(worker.rank), np.float32))[0])


@pytest.mark.parametrize(("channel", "workers"), [("shm", "2"), ("tcp", "2:2")], ids=["fixed", "elastic"])
def test_a_busy_worker_is_waited_for_longer_than_its_timeout_for_joining(
    monkeypatch: pytest.MonkeyPatch, channel: str, workers: str
) -> None:
    monkeypatch.setattr(handle, "VERDICT_SECONDS", VERDICT)
    with Daemon("--workers", workers) as daemon, joined(daemon.url, 2, timeout=TIMEOUT, channel=channel) as members:
        waiting = Task(mean_of, members[0])
        assert not waiting.ended(TIMEOUT + VERDICT + 0.3)
        assert mean_of(members[1]) == 0.5
        assert waiting.result() == 0.5


@pytest.mark.parametrize(("workers", "kind"), [("2", DeadlineError), ("1:2", LeftOutError)], ids=["fixed", "elastic"])
def test_the_error_of_a_round_that_waited_too_long_names_the_option(workers: str, kind: type[GradServerError]) -> None:
    with (
        Daemon("--workers", workers, "--round-timeout", "0.5") as daemon,
        joined(daemon.url, 2, timeout=20.0) as members,
    ):
        plan = _agree(members)
        early = Task(_round, members[0])
        if kind is DeadlineError:
            error: GradServerError = early.error(DeadlineError)
        else:
            early.result()
            error = Task(_round, members[1]).error(LeftOutError)
        assert plan == 1
        assert "waited 0.5 s (--round-timeout) for" in error.message


def test_a_data_shard_does_not_take_the_coordinators_round_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    from gradserver.cli import main

    assert main(["serve", "--join", "tcp://127.0.0.1:1", "--round-timeout", "5"]) != 0
    assert "--round-timeout is an option of coordinators, not of data shards" in capsys.readouterr().err


def test_the_log_explains_a_long_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(handle, "REMINDER_SECONDS", 0.05)
    reminded = threading.Event()
    with Daemon() as daemon, joined(daemon.url, 2) as workers, caplog.at_level(logging.WARNING, "gradserver"):
        watch = _Watch(reminded)
        logging.getLogger("gradserver").addHandler(watch)
        try:
            waiting = Task(mean_of, workers[0])
            assert reminded.wait(20)
            assert mean_of(workers[1]) == 0.5
            assert waiting.result() == 0.5
        finally:
            logging.getLogger("gradserver").removeHandler(watch)
    first = next(said for said in (record.getMessage() for record in caplog.records) if "all_reduce" in said)
    assert "is not done after 0.05 s; still missing: 'w1' (rank 1)" in first
    assert first.endswith("Waiting on, for 1802 s in all")


class _Watch(logging.Handler):
    """Sets an event when anything is logged."""

    def __init__(self, said: threading.Event) -> None:
        super().__init__()
        self._said = said

    def emit(self, _: logging.LogRecord) -> None:
        self._said.set()


def _agree(workers: list[Worker]) -> int:
    from gradserver.protocol.dtypes import FLOAT32
    from gradserver.protocol.plan import Bucket, Component, Plan

    plan = Plan((Bucket("b", FLOAT32, (Component("p", (4,)),)),))
    tasks = [Task(worker.agree, plan) for worker in workers]
    return len({task.result() for task in tasks})


def _round(worker: Worker) -> None:
    worker.push(0, np.ones(4, np.float32))
    worker.finish_round()
