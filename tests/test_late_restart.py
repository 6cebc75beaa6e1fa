"""Tests of killed coordinators of groups with a quorum or backups: the ledger says what the weights are made of."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gradserver.engine.declared import Kind
from gradserver.engine.records import Cut, Durable, Plan, Round
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import Entry, scan
from tests.late_training import Recount, weights_of
from tests.test_restart import WORLD, Group

PROGRAM = Path(__file__).with_name("late_training.py")
QUORUM, BACKUP = ("--quorum", "2", "--grace", "0.02"), ("--backup", "1")


def records(directory: Path) -> list[Kind]:
    """Return what was written."""
    entries = [entry for _, path in files_of(directory) for entry in scan(path.read_bytes())]
    return [entry.read().record for entry in entries if isinstance(entry, Entry)]


def counts_in_part(directory: Path) -> bool:
    """Return whether some contribution counts in part. Then the ledger does not say in which slices of each shard."""
    return any(record.record.cut for record in records(directory) if isinstance(record, Round))


def recounted(directory: Path) -> int:
    """Return the weights that follow from the ledger."""
    found = records(directory)
    (plan,) = {record.plan.hash: record.plan for record in found if isinstance(record, Plan)}.values()
    (rates,) = {record.rates for record in found if isinstance(record, Durable)}
    rounds = {record.record.round: record.record for record in found if isinstance(record, Round)}
    assert sorted(rounds) == list(range(len(rounds)))
    torch.set_num_threads(1)  # as at the workers: sums of several threads have other bits
    again = Recount(plan, rates, WORLD)
    for _, record in sorted(rounds.items()):
        again.take(record)
    return weights_of(again.model)


@pytest.mark.parametrize(
    ("channel", "options", "shards"),
    [
        ("tcp", QUORUM, 1),
        pytest.param("shm", QUORUM, 1, marks=pytest.mark.long),
        pytest.param("tcp", BACKUP, 1, marks=pytest.mark.long),
        pytest.param("shm", BACKUP, 1, marks=pytest.mark.long),
        pytest.param("tcp", QUORUM, 2, marks=pytest.mark.long),
        pytest.param("shm", BACKUP, 2, marks=pytest.mark.long),
    ],
)
def test_weights_follow_from_the_ledger_of_killed_coordinators(
    channel: str, options: tuple[str, ...], shards: int, tmp_path: Path
) -> None:
    rounds, chance, times = 60, random.Random(f"{channel} {options} {shards}"), []
    more = ("--shards", str(shards)) if shards > 1 else ()
    with ExitStack() as stack:
        turns = ("turns",) * (options == BACKUP)
        options = (*options, *more)
        state = tmp_path / "state"
        group = Group(
            stack, state, channel, "fp32", rounds, *turns, options=options, program=PROGRAM, loaded="torch"
        )  # fmt: skip
        for number in (6, 20, 34, 48):
            group.workers[chance.randrange(WORLD)].expect(f"round {number} ")
            time.sleep(chance.random() * 0.1)  # anywhere in a round
            killed = time.monotonic()
            group.kill()
            group.start()
            times.append(group.next_round(time.monotonic()) - killed)
        (weights,) = group.weights()
    print("seconds from a kill to the end of a round:", times)
    assert weights == recounted(tmp_path / "state") or (shards > 1 and counts_in_part(tmp_path / "state"))
    assert group.recorded() == set(range(rounds))
    assert any(isinstance(record, Cut) for record in records(tmp_path / "state")), "nobody was late"
    assert max(times) < 10.0
