"""Tests of what scripts give a job: places of checkpoints, and data that is to be the same at all workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradserver import BalancedSampler, DistributedDataParallel, Job, ShardSampler
from gradserver.protocol.errors import DisagreementError, StateError
from gradserver.worker.client import Worker
from tests.replicas import alone, on


def job_of(worker: Worker, **options: Any) -> Job:
    model = DistributedDataParallel(nn.Linear(1, 1), worker)
    return Job(model, torch.optim.SGD(model.parameters(), 0.1), **options)


def one_round(job: Job) -> None:
    job.model(torch.ones(2, 1)).sum().backward()
    job.step()


def saved(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


# ── places ───────────────────────────────────────────────────────────────────────────────────────────


def test_checkpoints_stay_where_they_began_when_the_script_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test what a script does that is given a folder for each run: a second start finds the first one's checkpoint."""
    run = tmp_path / "run"
    run.mkdir()

    def train(worker: Worker) -> int:
        monkeypatch.chdir(tmp_path)
        job = job_of(worker, checkpoint="checkpoints", every=1)
        began = job.round
        monkeypatch.chdir(run)
        one_round(job)
        job.save()
        job.save("by_hand")
        job.load("by_hand")
        return began

    assert [alone(train), alone(train)] == [0, 1]
    assert saved(run) == ["by_hand"]
    assert saved(tmp_path) == ["checkpoints", "run"]


def test_the_home_of_a_user_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(other)

    def train(worker: Worker) -> int:
        job = job_of(worker, checkpoint="~/runs")
        one_round(job)
        job.save()
        job.save(Path("~/by_hand"))
        return job_of(worker, checkpoint=Path("~/runs")).round

    assert alone(train) == 1
    assert (saved(home), saved(other)) == (["by_hand", "runs"], [])


def test_a_folder_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StateError, match="runs begins in the present folder, which has been removed: give a path that"):
        alone(lambda worker: job_of(worker, checkpoint="runs"))
    assert alone(lambda worker: job_of(worker, checkpoint=tmp_path / "runs").round) == 0


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────


def sharded(worker: Worker, length: int = 16, **options: Any) -> Any:
    return ShardSampler.for_worker(range(length), worker, **options)


def balanced(worker: Worker, length: int = 16, **options: Any) -> Any:
    return BalancedSampler(range(length), worker, **{"batch_size": 4, **options})


@pytest.mark.parametrize(
    ("make", "given", "parts"),
    [
        (sharded, lambda rank: {"seed": rank}, ("seed 0", "seed 1")),
        (sharded, lambda rank: {"length": 16 + rank // 2}, ("length 16", "length 17")),
        (sharded, lambda rank: {"shuffle": rank != 2}, ("shuffle True", "shuffle False")),
        (sharded, lambda rank: {"uneven": "keep" if rank == 2 else "pad"}, ("uneven 'pad'", "uneven 'keep'")),
        (balanced, lambda rank: {"seed": rank // 2}, ("seed 0", "seed 1")),
        (balanced, lambda rank: {"batch_size": 4 + rank // 2}, ("batch_size 4", "batch_size 5")),
    ],
)
def test_workers_with_other_data_are_told(make: Callable[..., Any], given: Callable[[int], Any], parts: Any) -> None:
    def work(worker: Worker) -> str:
        with pytest.raises(DisagreementError) as caught:
            job_of(worker, data=make(worker, **given(worker.rank)))
        return str(caught.value)

    told = on(3, work)
    assert len(set(told)) == 1
    for part in (*parts, "'worker-0' (rank 0)", "some samples would be used twice", "the same at all workers"):
        assert part in told[0]


def test_the_same_data_and_data_of_a_workers_own_are_taken() -> None:
    def work(worker: Worker) -> int:
        for make in (sharded, balanced):
            job_of(worker, data=make(worker, seed=3))
        return job_of(worker, data=ShardSampler(range(4 + worker.rank), 0, 1)).round

    assert on(3, work) == [0, 0, 0]
