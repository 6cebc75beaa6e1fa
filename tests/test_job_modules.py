"""Tests of a job of several models: which model an update is of, workers without batches, learners, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradserver import (
    DistributedDataParallel,
    InvalidArgumentError,
    Job,
    LocalCluster,
    OutOfStepError,
    ShardSampler,
    StateError,
    UsageError,
)
from gradserver.worker.client import Worker
from gradserver.worker.job.checkpoint import read
from tests.replicas import on, same

SAMPLES = 19
_CHANCE = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(SAMPLES, 4, generator=_CHANCE), torch.randn(SAMPLES, 3, generator=_CHANCE))


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


with torch.random.fork_rng():
    torch.manual_seed(1)
    MODULES = Generator(), Critic()


def gan_of(worker: Worker, named: bool = True, **options: Any) -> Job:
    models = [DistributedDataParallel(deepcopy(module), worker) for module in MODULES]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.5), None]
    sampler = ShardSampler.for_worker(DATA, worker, seed=3, uneven="keep")
    if not named:
        return Job(models, optimizers, schedulers, data=sampler, **options)
    names = "generator", "critic"
    return Job(
        dict(zip(names, models, strict=True)),
        dict(zip(names, optimizers, strict=True)),
        dict(zip(names, schedulers, strict=True)),
        data=sampler,
        **options,
    )


def train(worker: Worker, /, epochs: int = 2, after: Callable[[Job], None] = lambda _: None, **options: Any) -> Any:
    """Train a GAN that updates its generator in every second batch. Return its state and number of updates."""
    job = gan_of(worker, **options)
    generator, critic = job.models["generator"], job.models["critic"]
    batches = 0

    def step(*models: DistributedDataParallel) -> None:
        job.step(*models, before=lambda: nn.utils.clip_grad_norm_(critic.parameters(), 0.5))
        after(job)

    for real, noise in job.batches(DATA, epochs, step, batch_size=3):
        (critic(generator(noise).detach()).square() + (critic(real) - 1).square()).mean().backward()
        step(critic)
        batches += 1
        if job.round % 3 == 1:
            (critic(generator(noise)) - 1).square().mean().backward()
            step(generator)
            assert all(parameter.grad is None for parameter in critic.parameters())
    return state_of(job), job.round, batches


def state_of(job: Job) -> dict[str, Tensor]:
    return {f"{name}.{key}": t.clone() for name, m in job.models.items() for key, t in m.module.state_dict().items()}


@pytest.mark.parametrize("world", [2, 3])
def test_a_worker_without_batches_does_what_the_others_do(world: int) -> None:
    runs = on(world, train)
    assert all(same(run[0], runs[0][0]) for run in runs)
    assert len({run[1] for run in runs}) == 1
    assert len({run[2] for run in runs}) == 2, "all had as many batches"


def test_with_a_list_and_all_at_once() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], int]:
        job = gan_of(worker, named=False)
        one, two = job.models["0"], job.models["1"]
        for real, noise in job.batches(DATA, batch_size=4):
            (two(one(noise)).square() + two(real)).mean().backward()
            job.step()
        return state_of(job), job.round

    runs = on(3, work)
    assert all(same(run[0], runs[0][0]) and run[1] == runs[0][1] for run in runs)


def test_the_others_go_on_when_a_worker_dies() -> None:
    def after(job: Job) -> None:
        if job.round == 4 and job.model.worker.rank == 2:
            cluster.kill(2)

    with LocalCluster(3, elastic=(1, 3), timeout=10.0) as cluster:
        runs = cluster.run(train, after=after)
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_learner_comes_to_the_top_of_the_loop_first(at: int, saves: bool, tmp_path: Path) -> None:
    """Test a join after any update: also where the generator's gradients are there and are not applied.

    At the top of the loop the others may be about to save, before the first round of the learner.
    """
    options: dict[str, Any] = {"checkpoint": tmp_path, "every": 1} if saves else {}
    entered: list[int] = []

    def after(job: Job) -> None:
        worker = job.model.worker
        if job.round == at and worker.rank == 0 and not entered:
            entered.append(0)
            cluster.add()
        if job.entered:
            entered.append(job.entered)

    with LocalCluster(2, elastic=(1, 3), timeout=20.0) as cluster:
        runs = [run for run in cluster.run(train, epochs=6, after=after, **options) if run is not None]
    assert len(entered) > 1, "no worker joined"
    assert len(runs) >= 2
    assert all(same(run[0], runs[0][0]) and run[1] == runs[0][1] for run in runs)


@pytest.mark.parametrize("at", [1, 2, 4, 5, 12])
def test_bits_are_those_of_the_undisturbed_run(tmp_path: Path, at: int) -> None:
    whole = on(2, train, epochs=3)

    def stop(job: Job) -> None:
        if job.round == at and job.model.worker.rank == 1:
            job.stop()

    def work(worker: Worker) -> Any:
        try:
            return train(worker, epochs=3, checkpoint=tmp_path, after=stop)
        except BaseException as error:
            return error

    on(2, work)
    tree = read(tmp_path / "latest").tree
    assert sorted(tree["model"]) == sorted(tree["optimizer"]) == ["critic", "generator"]
    runs = on(2, train, epochs=3, checkpoint=tmp_path)
    assert all(same(run[0], whole[0][0]) and run[1] == whole[0][1] for run in runs)


def test_saved_and_loaded_by_hand(tmp_path: Path) -> None:
    def saving(worker: Worker) -> dict[str, Tensor]:
        job = gan_of(worker)
        for real, _ in job.batches(DATA, batch_size=4):
            job.models["critic"](real).mean().backward()
            job.step("critic")
            if job.round == 2:
                job.save(tmp_path / "two")
                return state_of(job)
        raise AssertionError

    def loading(worker: Worker) -> dict[str, Tensor]:
        job = gan_of(worker)
        job.load(tmp_path / "two")
        assert job.round == 2
        return state_of(job)

    def other(worker: Worker) -> None:
        with pytest.raises(StateError, match=r"not the state of a job that trains the models \['0', '1'\]"):
            gan_of(worker, named=False).load(tmp_path / "two")

    assert same(on(2, saving)[0], on(2, loading)[1])
    on(2, other)


def test_jobs_that_update_in_another_order_are_told() -> None:
    def work(worker: Worker) -> None:
        job = gan_of(worker)
        for real, noise in job.batches(DATA, batch_size=2):
            (job.models["critic"](job.models["generator"](noise)) + job.models["critic"](real)).mean().backward()
            job.step("generator" if worker.rank else "critic")

    with pytest.raises(OutOfStepError, match="update other models: all workers must update their models in the same"):
        on(2, work)


def test_gradients_that_were_dropped_are_no_update() -> None:
    def work(worker: Worker) -> None:
        job = gan_of(worker)
        for _, noise in job.batches(DATA, batch_size=8):
            job.models["critic"](job.models["generator"](noise)).mean().backward()
            job.step("generator")
            with pytest.raises(UsageError, match="'critic' has no gradients: they came in the same backward"):
                job.step("critic")
            return

    on(1, work)


def test_what_does_not_belong_together() -> None:
    def work(worker: Worker) -> None:
        one, two = (DistributedDataParallel(Critic(), worker) for _ in range(2))
        adam = torch.optim.Adam(one.parameters())
        with pytest.raises(InvalidArgumentError, match="optimizer is a list or a mapping as model is, not a Adam"):
            Job([one, two], adam)
        with pytest.raises(InvalidArgumentError, match=r"optimizer has \['0'\], and model has \['0', '1'\]"):
            Job([one, two], [adam])
        with pytest.raises(InvalidArgumentError, match="model '1' is a Critic: wrap it first"):
            Job([one, two.module], [adam, adam])  # type: ignore[list-item]
        with pytest.raises(InvalidArgumentError, match="one model has one optimizer"):
            Job(one, [adam])
        with pytest.raises(InvalidArgumentError, match="a model is in this job twice"):
            Job([one, one], [adam, adam])
        with pytest.raises(InvalidArgumentError, match="is none of those of model '1'"):
            Job([one, two], [adam, adam])
        with pytest.raises(InvalidArgumentError, match="this job has no model 'three'"):
            Job([one, two], [adam, torch.optim.Adam(two.parameters())]).step("three")

    on(1, work)
