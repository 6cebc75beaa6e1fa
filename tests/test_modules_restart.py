"""Several modules of one group, when workers, data shards and the coordinator are killed."""

from __future__ import annotations

import os
import random
import signal
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from gradserver.local import LocalCluster
from tests.cluster import wait_until
from tests.modules_training import MODULES, TURNS, train
from tests.test_restart import WORLD, Group, only_waits_for_others
from tests.test_shard_processes import children_of

PROGRAM = Path(__file__).with_name("modules_training.py")


@cache
def undisturbed(rounds: int, wire: str) -> int:
    with LocalCluster(WORLD, wire=wire) as cluster:
        return cluster.run(lambda worker: train(worker, rounds))[0]


def group_of(stack: ExitStack, directory: Path, channel: str, wire: str, rounds: int, *options: str) -> Group:
    what = stack, directory / "state", channel, wire, rounds
    return Group(*what, options=options, program=PROGRAM, undisturbed=undisturbed, least=2)


@pytest.mark.parametrize(
    ("channel", "wire", "shards"),
    [
        ("shm", "fp32", 2),
        pytest.param("tcp", "int8", 1, marks=pytest.mark.long),
        pytest.param("shm", "int8", 1, marks=pytest.mark.long),
        pytest.param("tcp", "fp32", 2, marks=pytest.mark.long),
    ],
)
def test_no_bit_depends_on_a_coordinator_that_is_killed(channel: str, wire: str, shards: int, tmp_path: Path) -> None:
    chance = random.Random(f"{channel} {wire}")
    with ExitStack() as stack:
        group = group_of(stack, tmp_path, channel, wire, 30, *(("--shards", str(shards)) if shards > 1 else ()))
        for number in (chance.randrange(2, 6), 10, 11 + chance.randrange(5)):
            group.workers[1].expect(f"round {number} ")
            group.kill()
            group.start()
        group.check()


def test_a_round_is_adopted_of_which_nothing_is_made_anew(tmp_path: Path) -> None:
    """Test one worker that stands still when all others have the round's results, and a coordinator killed then."""
    held = 3
    assert TURNS[held] != TURNS[held - 1]
    with ExitStack() as stack:
        what = stack, tmp_path / "state", "tcp", "fp32", 8, str(held)
        group = Group(*what, program=PROGRAM, undisturbed=undisturbed)
        late, others = group.workers[-1], group.workers[:-1]
        for worker in group.workers:
            worker.expect("held")
        wait_until(lambda: only_waits_for_others(group, len(MODULES[TURNS[held]])), "the last one has given everything")
        late.send_signal(signal.SIGSTOP)
        for worker in others:
            worker.tell()
        for worker in others:
            worker.expect(f"round {held} ")
        group.kill()
        group.start()
        late.send_signal(signal.SIGCONT)
        late.tell()
        group.check()


def test_a_worker_that_is_killed_costs_its_contribution_only(tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = group_of(stack, tmp_path, "tcp", "fp32", 30, "--shards", "2")
        group.workers[0].expect("round 9 ")
        group.workers[1].send_signal(signal.SIGKILL)
        assert len(group.weights(0, 2)) == 1
        assert group.recorded() == set(range(30))


@pytest.mark.long
def test_no_bit_depends_on_a_shard_that_is_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = group_of(stack, tmp_path, "tcp", "fp32", 40, "--shards", "3")
        for number in (4, 13, 22):
            group.workers[1].expect(f"round {number} ")
            os.kill(children_of(group.daemon.pid)[0], signal.SIGKILL)
        group.check()
