"""Sub-groups of real processes, one of which is killed, and of a coordinator that comes back."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import BUSY, STARTED_WITHIN, Daemon, Program, joined, together, wait_until
from tests.test_subgroups import sub, summed

PROGRAM = Path(__file__).with_name("subgroup_program.py")
WORLD, VICTIM = 4, 2
GOES_ON_WITHIN = 1.0 + BUSY
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


@pytest.mark.parametrize(
    ("shards", "workers_option"),
    [(1, "3"), (2, "1:4"), *(pytest.param(*one, marks=pytest.mark.long) for one in [(1, "1:4"), (2, "3")])],
)
def test_sub_groups_go_on_with_a_coordinator_that_comes_back(workers_option: str, shards: int, tmp_path: Path) -> None:
    """Test with two sub-groups that overlap, one with a barrier under way, and the other with calls after each loss."""
    with ExitStack() as stack:
        options = "--workers", workers_option, "--gather", "60", "--state-dir", str(tmp_path), "--shards", str(shards)
        daemon = stack.enter_context(Daemon(*options))
        workers = stack.enter_context(joined(daemon.url, 3))
        first = together(workers[:2], lambda worker: sub(worker, 0, 1))
        second = together(workers[1:], lambda worker: sub(worker, 1, 2))
        epochs = [group.epoch for group in (*first, *second)]
        assert together(first, lambda group: summed(group, 1)) == [2.0] * 2
        waiting = first[0].barrier(async_op=True)
        process: Program = daemon
        for _ in range(2):
            process.send_signal(signal.SIGKILL)
            process.end()
            process = stack.enter_context(Program("-m", "gradserver", "serve", "--bind", daemon.url, *options))
            assert together(second, lambda group: summed(group, 100_000, 100_000)) == [200_000.0] * 2
        first[1].barrier()
        waiting.wait(20)
        assert together(workers, lambda worker: summed(worker, 1)) == [3.0] * 3
        assert together([*first, *second], lambda group: summed(group, group.rank)) == [1.0] * 4
        assert [group.epoch for group in (*first, *second)] == epochs
        for group in first:
            group.close()
        assert together(second, lambda group: summed(group, 1)) == [2.0] * 2
        for worker in workers:
            worker.close()  # while there is a coordinator that hears it


@pytest.mark.parametrize("shards", [1, 2])
def test_a_call_that_waits_for_others_outlives_the_coordinator(shards: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        options = "--workers", "2", "--state-dir", str(tmp_path), "--shards", str(shards)
        daemon = stack.enter_context(Daemon(*options))
        workers = stack.enter_context(joined(daemon.url, 2))
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(sub, workers[0], 0, 1)
            wait_until(lambda: "default/1" in daemon.snapshot()["groups"], "it has asked")
            daemon.send_signal(signal.SIGKILL)
            daemon.end()
            stack.enter_context(Program("-m", "gradserver", "serve", "--bind", daemon.url, *options))
            assert together(workers, lambda worker: summed(worker, 1)) == [2.0] * 2  # both have noticed
            made = sub(workers[1], 0, 1), asked.result(20)
        assert together(made, lambda group: summed(group, 1)) == [2.0] * 2
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("channel", [pytest.param("tcp", marks=pytest.mark.long), "shm"])
def test_a_member_that_dies_without_a_coordinator_is_lost_to_its_sub_groups(channel: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        options = "--workers", "1:4", "--gather", "60", "--state-dir", str(tmp_path), "--dead-after", "2"
        daemon = stack.enter_context(Daemon(*options))

        def start(rank: int) -> Program:
            arguments = str(PROGRAM), daemon.url, str(rank), str(WORLD)
            return stack.enter_context(Program(*arguments, environment={"GRADSERVER_CHANNEL": channel}))

        workers = [start(rank) for rank in range(WORLD)]
        for worker in workers:
            worker.expect("ready", STARTED_WITHIN)
        for process in (daemon, workers[VICTIM]):
            process.send_signal(signal.SIGKILL)
            process.end()
        stack.enter_context(Program("-m", "gradserver", "serve", "--bind", daemon.url, *options))
        left = [worker for rank, worker in enumerate(workers) if rank != VICTIM]
        for worker in left:
            worker.expect("smaller ")
            worker.tell()
        assert [worker.expect("totals ") for worker in left] == ["[2.0, 3.0]", "[2.0, 2.0, 3.0]", "[2.0, 3.0]"]
        assert [worker.end() for worker in left] == [0] * 3


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
