"""Sub-groups of real processes, one of which is killed, and of a coordinator that comes back."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradserver.protocol.errors import ConnectionLostError
from gradserver.worker.client import Worker
from tests.cluster import STARTED_WITHIN, Daemon, Program, joined, together, wait_until
from tests.test_subgroups import sub, summed

PROGRAM = Path(__file__).with_name("subgroup_program.py")
WORLD, VICTIM = 4, 2
GOES_ON_WITHIN = 1.0 + 4.0
"""From a death to the next collective without it: what is promised, and what a busy machine may add."""


@pytest.mark.parametrize("channel", ["tcp", "shm"])
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "all are needed"])
@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=str)
def test_a_worker_that_is_killed_or_freezes_is_lost_to_all_its_sub_groups(
    channel: str, elastic: bool, end: signal.Signals
) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "1:4" if elastic else "4", "--gather", "60"))

        def start(rank: int) -> Program:
            arguments = str(PROGRAM), daemon.url, str(rank), str(WORLD)
            return stack.enter_context(Program(*arguments, environment={"GRADSERVER_CHANNEL": channel}))

        workers = [start(rank) for rank in range(WORLD)]
        for worker in workers:
            worker.expect("ready", STARTED_WITHIN)
        workers[VICTIM].send_signal(end)
        killed, left = time.monotonic(), [worker for rank, worker in enumerate(workers) if rank != VICTIM]
        said = [worker.expect("smaller " if elastic else "error ") for worker in left]
        assert max(float(line.split()[0]) for line in said) - killed < GOES_ON_WITHIN
        if elastic:
            for worker in left:
                worker.tell()
            totals = [worker.expect("totals ") for worker in left]
            assert totals == ["[2.0, 3.0]", "[2.0, 2.0, 3.0]", "[2.0, 3.0]"]
        else:
            assert all("WorkerLostError: 'w2' (rank " in line for line in said), said
        assert [worker.end() for worker in left] == [0] * 3
        wait_until(lambda: not daemon.snapshot()["groups"], "all groups are forgotten")


def test_sub_groups_end_with_a_coordinator_that_comes_back_and_are_made_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        options = "--workers", "2", "--state-dir", str(tmp_path)
        daemon = stack.enter_context(Daemon(*options))
        workers = stack.enter_context(joined(daemon.url, 2))
        made = together(workers, lambda worker: sub(worker, 0, 1))
        assert together(made, lambda group: summed(group, 1)) == [2.0] * 2
        waiting = made[0].barrier(async_op=True)
        daemon.send_signal(signal.SIGKILL)
        daemon.end()
        stack.enter_context(Program("-m", "gradserver", "serve", "--bind", daemon.url, *options))
        with pytest.raises(ConnectionLostError, match=r"call subgroup\(\) again"):
            waiting.wait(20)
        assert together(workers, lambda worker: summed(worker, 1)) == [2.0] * 2

        def again(worker: Worker) -> float:
            return summed(sub(worker, 0, 1), worker.rank)

        assert together(workers, again) == [1.0] * 2
        assert made[0].closed
        for worker in workers:
            worker.close()  # while there is a coordinator that hears it


@pytest.mark.long
@pytest.mark.parametrize("channel", ["tcp", "shm"])
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "all are needed"])
def test_a_worker_that_was_frozen_hears_in_its_sub_groups_that_it_was_left_out(channel: str, elastic: bool) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "1:4" if elastic else "4", "--gather", "60"))

        def start(rank: int) -> Program:
            arguments = str(PROGRAM), daemon.url, str(rank), str(WORLD)
            return stack.enter_context(Program(*arguments, environment={"GRADSERVER_CHANNEL": channel}))

        workers = [start(rank) for rank in range(WORLD)]
        for worker in workers:
            worker.expect("ready", STARTED_WITHIN)
        workers[VICTIM].send_signal(signal.SIGSTOP)
        for worker in (workers[0], workers[1], workers[3]):
            worker.expect("smaller " if elastic else "error ")
        workers[VICTIM].send_signal(signal.SIGCONT)
        assert "LeftOutError: this worker, 'w2' (rank 2), was left out of group 'default'" in workers[VICTIM].expect(
            "error "
        )
        assert workers[VICTIM].end() == 0
