"""Tests of what each side learns of the other's end, without an intended goodbye."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from gradserver.protocol.errors import (
    ConnectionLostError,
    CoordinatorError,
    CoordinatorStoppedError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.worker.connect import connect
from tests.cluster import Daemon, Program, joined

_SCRIPT = """
import sys, gradserver
worker = gradserver.connect(sys.argv[1], rank=1, world_size=2, name="script")
worker.barrier()
{end}
"""


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "in the background"])
@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (signal.SIGTERM, CoordinatorStoppedError, "it received SIGTERM"),
        (signal.SIGKILL, ConnectionLostError, "its process ended, or the network to it failed"),
    ],
)
def test_an_idle_worker_learns_at_its_next_call_how_the_coordinator_ended(
    number: signal.Signals, kind: type[CoordinatorError], text: str, background: bool
) -> None:
    with Daemon() as daemon, joined(daemon.url, 2) as workers:
        daemon.send_signal(number)
        daemon.end()

        def call() -> None:
            if background:
                workers[0].all_reduce(np.ones(3, np.float32), async_op=True).wait()
            else:
                workers[0].barrier()

        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        ("", WorkerLeftError, r"'script' \(rank 1\) left and is needed to go on: its process ended"),
        ("raise RuntimeError('no memory')", WorkerLostError, "it raised RuntimeError: no memory"),
    ],
    ids=["returns", "raises"],
)
def test_a_script_that_ends_without_closing_says_why(end: str, kind: type[Exception], text: str) -> None:
    with (
        Daemon() as daemon,
        Program("-c", _SCRIPT.format(end=end), daemon.url) as script,
        connect(daemon.url, rank=0, world_size=2, timeout=20) as worker,
    ):
        worker.barrier()
        script.end()

        with pytest.raises(kind, match=text):
            worker.barrier()
