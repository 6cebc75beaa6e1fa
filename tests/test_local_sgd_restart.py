"""Local SGD with a coordinator that is killed: fragments under way arrive, with the bits of an undisturbed run."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradserver import LocalCluster
from tests.local_training import train
from tests.test_restart import WORLD, Group

PROGRAM = Path(__file__).with_name("local_training.py")
ROUNDS = 27


def undisturbed(rounds: int, _wire: str) -> int:
    with LocalCluster(WORLD, timeout=60.0) as cluster:
        (weights,) = set(cluster.run(lambda worker: train(worker, rounds)))
    return weights


@pytest.mark.parametrize(
    ("channel", "shards"),
    [
        ("tcp", 1),
        pytest.param("shm", 1, marks=pytest.mark.long),
        pytest.param("tcp", 2, marks=pytest.mark.long),
    ],
)
def test_fragments_survive_killed_coordinators(channel: str, shards: int, tmp_path: Path) -> None:
    chance = random.Random(f"{channel} {shards}")
    options = ("--shards", str(shards)) if shards > 1 else ()
    with ExitStack() as stack:
        group = Group(
            stack, tmp_path / "state", channel, "fp32", ROUNDS, options=options, program=PROGRAM, loaded="torch",
            undisturbed=undisturbed,
        )  # fmt: skip
        for number in (5, 16):
            group.workers[chance.randrange(WORLD)].expect(f"round {number} ")
            time.sleep(chance.random() * 0.03)  # anywhere between two exchanges
            group.kill()
            group.start()
            group.next_round(time.monotonic())
        group.check()
