"""Training in groups with rounds that do not wait for all workers: one backward leads to several updates, or to none.

Each course notes what every replica contributes, and its weights after each update. Then one process repeats the log of
updates, from the contributions of each round.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradserver import DistributedDataParallel, Job, LocalCluster, ShardSampler
from gradserver.protocol.errors import UsageError
from gradserver.worker.client import Worker
from tests.cluster import wait_until
from tests.models import Convolutional, Transformer, images, loss_of, optimizer_state, state_of, tokens
from tests.replicas import distance, gradients, same, sgd
from tests.seeded import seeded

torch.set_num_threads(1)

MODES: tuple[dict[str, Any], ...] = ({"mode": "async"}, {"mode": "bounded", "staleness": 2})


class Course:
    """Replicas that train together, and what each has contributed and had.

    Attributes:
        given: for each round, the contributions that counted, by rank.
        had: for each round, the weights of every replica after it.
        staleness: that of each contribution.
    """

    def __init__(self, make: Callable[[], nn.Module] = Transformer, **options: Any) -> None:
        self.make, self.options = make, options
        self.given: dict[int, dict[int, dict[str, Tensor]]] = defaultdict(dict)
        self.had: dict[int, list[dict[str, Tensor]]] = defaultdict(list)
        self.staleness: list[int] = []
        self.lock = threading.Lock()
        self.slow: dict[int, Callable[[int], object]] = {}
        """Functions that ranks call before their backward of a step."""

    def train(self, worker: Worker, steps: int = 12) -> dict[str, Tensor]:
        model = DistributedDataParallel(seeded(0, self.make), worker, **self.options)
        optimizer = sgd(model)
        rank = worker.rank
        for step in range(steps):
            if rank in self.slow:
                self.slow[rank](step)
            optimizer.zero_grad()
            version = worker.round
            loss_of(model, *tokens(step * 8 + rank, 3)).backward()
            contribution = gradients(model.module)
            for _ in model.updates():
                optimizer.step()
                with self.lock:
                    self.had[worker.round - 1].append(state_of(model.module))
            with self.lock:
                self.staleness.append(worker.staleness)
                damped = {name: value * worker.damping for name, value in contribution.items()}
                self.given[version + worker.staleness][rank] = damped
        return self.follow(model, optimizer, worker)

    def follow(self, model: DistributedDataParallel, optimizer: Any, worker: Worker) -> dict[str, Tensor]:
        """Apply what the others still do, until none has a batch."""
        with model.join([optimizer, lambda: self.note(model, worker)]):
            pass
        return state_of(model.module)

    def note(self, model: DistributedDataParallel, worker: Worker) -> None:
        with self.lock:
            self.had[worker.round - 1].append(state_of(model.module))

    def check(self, world: int) -> None:
        """Check that all had the same bits after each update, and that each update is the mean of its round's."""
        module = seeded(0, self.make)
        optimizer = sgd(module)
        assert sorted(self.given) == sorted(self.had)
        for number in sorted(self.given):
            there = self.had[number]
            assert len(there) == world, number
            assert all(same(there[0], other) for other in there[1:]), number
            cohort = self.given[number]
            for name, parameter in module.named_parameters():
                parameter.grad = torch.stack([one[name] for one in cohort.values()]).mean(dim=0)
            optimizer.step()
            assert distance(there[0], state_of(module)) < 1e-5, number


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["mode"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["view", "copy"])
def test_all_replicas_apply_the_same_updates_in_the_same_order(mode: dict[str, Any], options: dict[str, Any]) -> None:
    course = Course(**options)
    with LocalCluster(3, timeout=20.0, **mode) as cluster:
        results = cluster.run(course.train)

    assert all(same(results[0], other) for other in results)
    assert len(course.staleness) == 36
    assert sum(len(cohort) for cohort in course.given.values()) == 36, "each contribution counts once"
    if "staleness" in mode:
        assert max(course.staleness) <= mode["staleness"]
    course.check(3)


def test_a_slow_replica_is_stale_and_no_other_waits_for_it() -> None:
    course = Course()
    course.slow[1] = lambda step: wait_until(lambda: len(course.given) >= 12 or step, "the other has done its steps")
    with LocalCluster(2, timeout=20.0, mode="async") as cluster:
        cluster.run(course.train)

    assert max(course.staleness) >= 12
    course.check(2)


def test_contributions_are_damped_by_their_staleness() -> None:
    course = Course()
    course.slow[1] = lambda step: wait_until(lambda: len(course.given) >= 4 or step, "the other has gone on")
    with LocalCluster(2, timeout=20.0, mode="async", damping="inverse") as cluster:
        cluster.run(course.train)

    assert max(course.staleness) >= 4
    course.check(2)


def test_contributions_that_are_too_stale_are_dropped_and_lead_to_no_update() -> None:
    counts: dict[int, int] = defaultdict(int)

    def train(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        for step in range(6):
            if worker.rank == 1 and step == 0:
                wait_until(lambda: counts[0] >= 6, "the other has done its steps")
            loss_of(model, *tokens(step, 3)).backward()
            before = worker.round
            for _ in model.updates():
                optimizer.step()
            if worker.rank == 1 and step == 0:
                assert worker.round == before + 6, "all updates of the others are applied"
                assert all(parameter.grad is None for parameter in model.parameters())
            counts[worker.rank] += 1
        with model.join(optimizer):
            pass
        return state_of(model.module)

    with LocalCluster(2, timeout=20.0, mode="async", staleness=3) as cluster:
        first, second = cluster.run(train)
        assert cluster.snapshot()["groups"]["local"]["round"] == 12, "11 contributions counted, and the end"  # type: ignore[index]
    assert same(first, second)


def test_gradients_that_were_accumulated_wait_for_their_round_as_a_whole() -> None:
    def train(worker: Worker) -> tuple[dict[str, Tensor], int]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        updates = 0
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, *tokens(2 * step, 2)).backward()
            loss_of(model, *tokens(2 * step + 1, 2)).backward()
            for _ in model.updates():
                updates += 1
                optimizer.step()
        return state_of(model.module), updates

    with LocalCluster(1, timeout=20.0, mode="async") as cluster:
        ((weights, updates),) = cluster.run(train)
    with LocalCluster(1, timeout=20.0) as cluster:
        ((expected, _),) = cluster.run(train)

    assert updates == 4
    assert same(weights, expected)


def test_buffers_are_those_of_a_member_of_the_round_and_the_same_everywhere() -> None:
    def train(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(seeded(0, lambda: Convolutional(1)), worker)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(8):
                loss_of(model, *images(step * 2 + worker.rank, 4)).backward()
                for _ in model.updates():
                    optimizer.step()
        return state_of(model.module)

    with LocalCluster(2, timeout=20.0, mode="async") as cluster:
        first, second = cluster.run(train)

    assert same(first, second)
    untrained = state_of(Convolutional(1))
    changed = [name for name in first if "running_mean" in name and not torch.equal(first[name], untrained[name])]
    assert changed, "a forward's statistics reach all members, however late it is"


def test_a_loop_that_leaves_updates_out_is_told_what_to_write() -> None:
    def train(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        loss_of(model, *tokens(0, 3)).backward()
        with pytest.raises(UsageError, match=r"mode 'async' .*for _ in model\.updates\(\): optimizer\.step\(\)"):
            loss_of(model, *tokens(1, 3))

    with LocalCluster(1, timeout=20.0, mode="async") as cluster:
        cluster.run(train)


def test_a_synchronous_backward_leads_to_one_update() -> None:
    def train(worker: Worker) -> list[int]:
        model = DistributedDataParallel(Transformer(), worker)
        counts = []
        for step in range(2):
            loss_of(model, *tokens(step, 3)).backward()
            counts.append(sum(1 for _ in model.updates()))
        return counts

    with LocalCluster(2, timeout=20.0) as cluster:
        assert cluster.run(train) == [[1, 1], [1, 1]]


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────


Used = list[tuple[int, list[int]]]
"""Samples of each batch, and the round in which its gradients counted."""


def linear_job(worker: Worker, /, epochs: int, **options: Any) -> tuple[Job, list[Tensor], Used]:
    """Train on 64 samples, and return the job, its state, and what this worker used."""
    data = TensorDataset(torch.arange(64).float().unsqueeze(1) / 64, torch.arange(64))
    model = DistributedDataParallel(seeded(0, lambda: nn.Linear(1, 1)), worker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = ShardSampler.for_worker(data, worker, seed=3, uneven="keep")
    job = Job(model, optimizer, data=sampler, **options)
    used: Used = []
    for inputs, numbers in job.batches(data, epochs=epochs, batch_size=4):
        version = worker.round
        model(inputs).square().mean().backward()
        job.step()
        used.append((version + worker.staleness, numbers.tolist()))
    return job, [*state_of(model.module).values(), *optimizer_state(optimizer)], used


@pytest.mark.parametrize("mode", [*MODES, {"mode": "async", "wire": "int8"}], ids=["async", "bounded", "lossy"])
def test_a_job_is_saved_and_goes_on_with_another_number_of_workers(mode: dict[str, Any], tmp_path: Path) -> None:
    with LocalCluster(3, timeout=20.0, **mode) as cluster:
        before = cluster.run(linear_job, 1, checkpoint=tmp_path, every=4)
    with LocalCluster(2, timeout=20.0, **mode) as cluster:
        after = cluster.run(linear_job, 2, checkpoint=tmp_path, every=4)

    for results in (before, after):
        first = results[0][1]
        assert all(torch.equal(a, b) for _, state, _ in results for a, b in zip(first, state, strict=True))
    (start,) = {job.resumed for job, _, _ in after}
    assert start is not None, "it goes on from a checkpoint"
    (number,) = re.findall(r"\d+", start.stem)
    counted = [one for _, _, used in before for at, numbers in used if at < int(number) for one in numbers]
    again = [one for _, _, used in after for _, numbers in used for one in numbers]
    assert sorted(counted + again) == sorted([*range(64)] * 2), "each sample counts once in each epoch"


def test_a_worker_joins_a_job_that_does_not_wait() -> None:
    weights: dict[int, dict[str, dict[str, Tensor]]] = defaultdict(dict)
    lock = threading.Lock()
    with LocalCluster(2, elastic=(1, 4), timeout=20.0, mode="async") as cluster:

        def train(worker: Worker) -> int:
            model = DistributedDataParallel(Convolutional(len(weights)), worker)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            job = Job(model, optimizer)
            entered, step = job.entered, 0
            while job.round < 40:
                inputs, targets = images(step * 4 + worker.rank, 4)
                loss_of(model, inputs, targets).backward()
                job.step(after=lambda: note(job, model, worker))
                step += 1
                if worker.name == "worker-0" and step == 5:
                    cluster.add()
            return entered

        def note(job: Job, model: DistributedDataParallel, worker: Worker) -> None:
            with lock:
                weights[job.round][worker.name] = state_of(model.module)

        entered = cluster.run(train)

    assert len(entered) == 3
    assert entered[2] > 0
    for number, there in weights.items():
        first = next(iter(there.values()))
        assert all(same(first, other) for other in there.values()), (number, list(there))
    assert "worker-2" in weights[40]
