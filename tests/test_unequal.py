"""Unequal workers that train: exact means, equal bits, and shares that follow the measured times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradserver import (
    Balance,
    BalancedSampler,
    CadenceOptions,
    DataRanges,
    DistributedDataParallel,
    InvalidArgumentError,
    InvalidRankError,
    Job,
    LocalCluster,
    PlanMismatchError,
    UsageError,
    connect,
)
from gradserver.status import render
from gradserver.worker.client import Worker
from gradserver.worker.pacing.stopwatch import WallClock
from tests.cluster import AMONG_MEMBERS, members, together

SAMPLES = 96


class Layer(nn.Module):
    """A layer that takes ``seconds`` for each sample, by a clock of its own: see `timed`."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.seconds, self.now = seconds, 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.now += self.seconds * len(inputs)
        result: Tensor = self.layer(inputs)
        return result


def timed(model: DistributedDataParallel) -> DistributedDataParallel:
    """Measure ``model`` by the clock of its `Layer`, on which exchanges take no time."""
    module, pacing = model.module, model._rounds.pacing
    assert isinstance(module, Layer)
    assert pacing is not None
    pacing._watch = WallClock(lambda: 0.0, lambda: module.now)
    return model


def samples(count: int = SAMPLES) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(9))


def batches_of(inputs: Tensor, size: int) -> Sequence[Tensor]:
    return inputs.tensor_split(len(inputs) // size)


def loss_of(model: nn.Module, inputs: Tensor) -> Any:
    return model(inputs).square().mean()


def gradient(inputs: Tensor) -> Tensor:
    """Return the gradient of the mean loss over ``inputs``, by one process."""
    module = Layer()
    loss_of(module, inputs).backward()
    found = module.layer.weight.grad
    assert found is not None
    return found


def weight_of(module: nn.Module) -> Tensor:
    assert isinstance(module, Layer)
    return module.layer.weight.detach().clone()


# ── cadence ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_exchange_of_a_cadence_is_the_mean_over_all_batches_of_all_workers() -> None:
    data = batches_of(samples(16), 4)

    def train(worker: Worker) -> Tensor:
        model = DistributedDataParallel(
            Layer(), worker, cadence=CadenceOptions(anchor=1, speed_hint=(0, 3.0), max_anchor=4)
        )
        mine = data[:1] if worker.rank == 0 else data[1:]
        exchanged = []
        for inputs in mine:
            loss_of(model, inputs).backward()
            exchanged.append(model.exchanged)
        assert exchanged == [False] * (len(mine) - 1) + [True]
        pacing = model.pacing
        assert pacing is not None
        assert sum(pacing.ratios) == pytest.approx(1)
        pacing.nudge(0.5)
        assert min(pacing.counts) == 1
        found = model.module.layer.weight.grad  # type: ignore[union-attr]
        assert isinstance(found, Tensor)
        return found.clone()

    with LocalCluster(2) as cluster:
        first, second = cluster.run(train)

    assert torch.equal(first, second)
    assert torch.allclose(first, gradient(samples(16)), atol=1e-6)


def test_with_weights_of_samples_an_exchange_weighs_by_samples() -> None:
    data = samples(12).tensor_split([2, 6])

    def train(worker: Worker) -> Tensor:
        model = DistributedDataParallel(
            Layer(), worker, cadence=CadenceOptions(anchor=1, speed_hint=(1, 2.0), max_anchor=4)
        )
        for inputs in data[:2] if worker.rank == 0 else data[2:]:
            model.set_weight(len(inputs))
            loss_of(model, inputs).backward()
        found = model.module.layer.weight.grad  # type: ignore[union-attr]
        assert isinstance(found, Tensor)
        return found.clone()

    with LocalCluster(2) as cluster:
        found = cluster.run(train)[0]

    own = (gradient(data[0]) + gradient(data[1])) / 2  # a worker's batches count alike
    assert torch.allclose(found, (6 * own + 6 * gradient(data[2])) / 12, atol=1e-6)


def test_a_slow_worker_computes_fewer_batches_and_all_end_with_equal_weights() -> None:
    def train(worker: Worker) -> tuple[int, Tensor]:
        data = DataRanges(6 * SAMPLES, worker, batch_size=4)
        cadence = CadenceOptions(anchor=2)
        model = timed(DistributedDataParallel(Layer(3.0 if worker.rank else 1.0), worker, cadence=cadence))
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01), data=data)
        batches = 0
        for (inputs,) in job.batches(TensorDataset(samples(6 * SAMPLES))):
            loss_of(model, inputs).backward()
            job.step()
            batches += 1
        return batches, weight_of(model.module)

    with LocalCluster(2) as cluster:
        (fast, first), (slow, second) = cluster.run(train)

    assert torch.equal(first, second)
    assert fast + slow == 6 * SAMPLES // 4
    assert 2.5 < fast / slow < 3.1, (fast, slow)


def test_a_worker_alone_exchanges_each_batch_of_a_cadence() -> None:
    with connect(world_size=1) as worker:
        model = DistributedDataParallel(Layer(), worker, cadence=True)
        for inputs in batches_of(samples(8), 4):
            loss_of(model, inputs).backward()
            assert model.exchanged
            model.zero_grad()


def test_an_anchor_of_0_turns_the_cadence_off_and_nothing_else() -> None:
    with connect(world_size=1) as worker:
        plain = DistributedDataParallel(Layer(), worker)
        off = DistributedDataParallel(Layer(), worker, cadence=CadenceOptions(max_anchor=0))

    assert off.plan.hash == plain.plan.hash


def clear(model: nn.Module, _: Any) -> None:
    model.zero_grad()


def change(_: nn.Module, optimizer: Any) -> None:
    optimizer.step()


@pytest.mark.parametrize(("harm", "said"), [(clear, "gradients were cleared"), (change, "weights were changed")])
def test_a_step_between_two_exchanges_is_an_error(harm: Callable[..., None], said: str) -> None:
    def train(worker: Worker) -> None:
        model = DistributedDataParallel(Layer(), worker, cadence=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs in batches_of(samples(8), 4):
            loss_of(model, inputs).backward()
            harm(model, optimizer)

    with LocalCluster(2) as cluster, pytest.raises(UsageError, match=f"{said}.*model.exchanged"):
        cluster.run(train)


def test_members_with_other_options_do_not_agree() -> None:
    def wrap(worker: Worker) -> None:
        DistributedDataParallel(Layer(), worker, cadence=CadenceOptions(anchor=2 + worker.rank))

    with LocalCluster(2) as cluster, pytest.raises(PlanMismatchError, match="anchor=2.*anchor=3"):
        cluster.run(wrap)


def test_several_modules_have_no_cadence() -> None:
    with connect(world_size=1) as worker:
        model = DistributedDataParallel(Layer(), worker, cadence=True)
        other = DistributedDataParallel(Layer(), worker)
        assert other.exchanged
        with pytest.raises(UsageError, match="one wrapped module"):
            loss_of(model, samples(4)).backward()


# ── balance ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_of_unequal_parts_is_that_of_the_whole_batch() -> None:
    inputs = samples(20)

    def train(worker: Worker) -> tuple[int, Tensor]:
        data = BalancedSampler(20, worker, batch_size=20, shuffle=False)
        model = DistributedDataParallel(Layer(), worker, balance=Balance(data, speed_hint=(1, 3.0)))
        (mine,) = data
        loss_of(model, inputs[mine]).backward()
        found = model.module.layer.weight.grad  # type: ignore[union-attr]
        assert isinstance(found, Tensor)
        return len(mine), found.clone()

    with LocalCluster(2) as cluster:
        (large, first), (small, second) = cluster.run(train)

    assert (large, small) == (15, 5)
    assert torch.equal(first, second)
    assert torch.allclose(first, gradient(inputs), atol=1e-6)


def read_ahead(batches: Iterable[list[int]], ahead: int) -> Iterator[list[int]]:
    """Yield ``batches``, so many of which are drawn before they are needed, as a loader with processes does it."""
    drawn: deque[list[int]] = deque()
    for batch in batches:
        drawn.append(batch)
        if len(drawn) > ahead:
            yield drawn.popleft()
    yield from drawn


@pytest.mark.parametrize("ahead", [0, 4])
def test_each_sample_is_used_once_and_sizes_follow_the_times(ahead: int) -> None:
    """New sizes hold from a step that no worker has drawn, though they read ahead, and not equally far."""
    inputs = samples(24 * 16)

    def train(worker: Worker) -> tuple[list[int], list[int], Tensor]:
        data = BalancedSampler(len(inputs), worker, batch_size=16, seed=3)
        balance = Balance(data, calibration_steps=3, rebalance_interval=4)
        model = timed(DistributedDataParallel(Layer(3.0 if worker.rank else 1.0), worker, balance=balance))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        used, sizes = [], []
        for indices in read_ahead(data, ahead * (worker.rank == 0)):
            optimizer.zero_grad()
            loss_of(model, inputs[indices]).backward()
            optimizer.step()
            used += indices
            sizes.append(len(indices))
        return used, sizes, weight_of(model.module)

    with LocalCluster(2) as cluster:
        (fast, large, first), (slow, small, second) = cluster.run(train)

    assert torch.equal(first, second)
    assert sorted(fast + slow) == list(range(len(inputs)))
    assert [a + b for a, b in zip(large, small, strict=True)] == [16] * 24
    assert large == [8] * (3 + ahead) + [12] * (21 - ahead)


class Fixed(torch.optim.SGD):
    """An optimizer of a `Layer` that takes ``seconds`` by its clock, for a batch of any size."""

    def __init__(self, module: Layer, seconds: float) -> None:
        super().__init__(module.parameters(), lr=0.01)
        self._of = module, seconds

    def step(self, *_: Any) -> None:  # type: ignore[override]
        module, seconds = self._of
        module.now += seconds
        super().step()


def test_parts_leave_time_for_the_steps_of_optimizers_and_for_nothing_else_between() -> None:
    inputs = samples(24 * 40)

    def train(worker: Worker) -> list[int]:
        data = BalancedSampler(len(inputs), worker, batch_size=24, seed=3)
        balance = Balance(data, calibration_steps=2, rebalance_interval=1)
        layer, other = Layer(1.0), Layer()
        model = timed(DistributedDataParallel(layer, worker, balance=balance))
        optimizer, sizes = Fixed(layer, 8.0 * worker.rank), []
        another = Fixed(other, 1e3)
        for indices in data:
            optimizer.zero_grad()
            loss_of(model, inputs[indices]).backward()
            optimizer.step()
            loss_of(other, inputs[:1]).backward()
            another.step()  # of another module
            layer.now += 1e3 * (1 - worker.rank)  # one worker evaluates
            sizes.append(len(indices))
        return sizes

    with LocalCluster(2) as cluster:
        quick, slow = cluster.run(train)

    assert (quick[0], slow[0]) == (12, 12)
    assert (quick[-1], slow[-1]) == (16, 8), "so that 16 and 8 + 8 take as long"


def test_ranges_are_balanced_too() -> None:
    def train(worker: Worker) -> tuple[list[int], Tensor]:
        data = DataRanges(16 * 24, worker, batch_size=8, prefetch=0)
        balance = Balance(data, calibration_steps=3, rebalance_interval=4)
        model = timed(DistributedDataParallel(Layer(3.0 if worker.rank else 1.0), worker, balance=balance))
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01), data=data)
        sizes = []
        for (inputs,) in job.batches(TensorDataset(samples(16 * 24))):
            loss_of(model, inputs).backward()
            job.step()
            sizes.append(len(inputs))
        return sizes, weight_of(model.module)

    with LocalCluster(2) as cluster:
        (large, first), (small, second) = cluster.run(train)

    assert torch.equal(first, second)
    assert sum(large) + sum(small) == 16 * 24
    assert large[:3] == small[:3] == [8, 8, 8]
    assert large[3:20] == [12] * 17
    assert small[3:20] == [4] * 17


def test_an_epoch_of_a_sampler_without_a_model_is_dealt_evenly_and_begins_anywhere() -> None:
    class Rank:
        rank, world_size = 1, 3

    data = BalancedSampler(23, Rank(), batch_size=9, shuffle=False)
    assert (data.steps, len(data)) == (3, 3)
    assert list(data) == [[3, 4, 5], [12, 13, 14], [20, 21]]
    assert list(data) == [[3, 4, 5], [12, 13, 14], [20, 21]]

    data.set_epoch(1, step=1)
    assert len(data) == 2
    assert list(data) == [[12, 13, 14], [20, 21]]
    with pytest.raises(InvalidArgumentError, match="an epoch has 3 steps"):
        data.set_epoch(0, step=4)
    short = BalancedSampler(20, Rank(), batch_size=9, shuffle=False)
    assert len(short) == len(list(short)) == 2  # two samples are left for three workers
    assert len(list(BalancedSampler(23, Rank(), batch_size=9, drop_last=True))) == 2
    with pytest.raises(InvalidArgumentError, match="too small for 3 workers"):
        BalancedSampler(20, Rank(), batch_size=2)


def test_arguments_that_cannot_be_are_errors() -> None:
    with connect(world_size=1) as worker:
        data = BalancedSampler(8, worker, batch_size=4)
        balanced = DistributedDataParallel(Layer(), worker, balance=data).pacing
        assert balanced is not None
        assert (balanced.counts, balanced.ratios) == ((1,), (1.0,))
        with pytest.raises(UsageError, match="nudge is for a cadence"):
            balanced.nudge(0.5)
        with pytest.raises(UsageError, match="choose one"):
            DistributedDataParallel(Layer(), worker, cadence=True, balance=data)
        with pytest.raises(InvalidArgumentError, match="balance is a gradserver.BalancedSampler or .* not list"):
            DistributedDataParallel(Layer(), worker, balance=[1, 2])  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="a gradserver.Balance of one, not a Balance of int"):
            DistributedDataParallel(Layer(), worker, balance=Balance(3))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="cadence is a gradserver.CadenceOptions"):
            DistributedDataParallel(Layer(), worker, cadence=10)  # type: ignore[arg-type]
        with pytest.raises(InvalidRankError, match="names rank 4"):
            DistributedDataParallel(Layer(), worker, balance=Balance(data, speed_hint=(4, 2.0)))


# ── members come and go ───────────────────────────────────────────────────────────────────────────────


class Course:
    """A training on a cluster to which workers come and go; what each of them had in each round."""

    def __init__(self, rounds: int, wrap: Callable[[Worker], DistributedDataParallel]) -> None:
        self.cluster = LocalCluster(2, elastic=(1, 4), timeout=20.0, backlog=0)
        self.rounds, self.wrap = rounds, wrap
        self.at: dict[int, Callable[[], object]] = {}
        self.seen: dict[int, dict[str, tuple[Any, Tensor]]] = {}

    def train(self, worker: Worker) -> None:
        model = self.wrap(worker)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(worker.rank)
        while job.round < self.rounds:
            loss_of(model, torch.randn(4, 4, generator=generator)).backward()
            before = job.round
            job.step()
            if job.round == before:
                continue
            pacing = model._rounds.pacing
            assert pacing is not None
            rule: Any = pacing._pace.rule
            decided = rule.member_ids, rule.counts if hasattr(rule, "counts") else rule.ratios
            self.seen.setdefault(job.round, {})[worker.name] = decided, weight_of(model.module)
            if worker.rank == 0 and (happens := self.at.pop(job.round, None)) is not None:
                happens()

    def go(self) -> None:
        with self.cluster as cluster:
            cluster.run(self.train)


def by_cadence(worker: Worker) -> DistributedDataParallel:
    return DistributedDataParallel(Layer(), worker, cadence=CadenceOptions(anchor=2, max_anchor=4))


def by_balance(worker: Worker) -> DistributedDataParallel:
    data = BalancedSampler(10_000, worker, batch_size=16)
    return DistributedDataParallel(Layer(), worker, balance=Balance(data, calibration_steps=2, rebalance_interval=2))


@pytest.mark.parametrize("wrap", [by_cadence, by_balance])
def test_members_decide_the_same_when_others_are_lost_and_join(wrap: Callable[[Worker], Any]) -> None:
    course = Course(24, wrap)
    course.at = {
        4: lambda: course.cluster.add(),
        8: lambda: course.cluster.kill(1),
        14: lambda: course.cluster.add(),
    }

    course.go()

    worlds = []
    for number, there in sorted(course.seen.items()):
        (decided, weights), *others = there.values()
        for other, its_weights in others:
            assert torch.equal(weights, its_weights), number
            assert other == decided, number
        worlds.append(len(decided[0]))
    assert {2, 3} <= set(worlds), worlds
    assert worlds[-1] >= 2, worlds


def test_a_balanced_job_goes_on_from_its_checkpoint_with_another_number_of_workers(tmp_path: Path) -> None:
    inputs = samples(12 * 8)
    used: list[int] = []

    def train(worker: Worker, stop: int) -> None:
        data = BalancedSampler(len(inputs), worker, batch_size=8, seed=1)
        model = DistributedDataParallel(Layer(), worker, balance=data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job = Job(model, optimizer, data=data, checkpoint=tmp_path)
        for batch, indices in job.batches(TensorDataset(inputs, torch.arange(len(inputs))), epochs=1):
            loss_of(model, batch).backward()
            job.step()
            used.extend(indices.tolist())
            if job.round == stop:
                job.save()
                return

    with LocalCluster(2) as cluster:
        cluster.run(train, 5)
    with LocalCluster(3) as cluster:
        cluster.run(train, 0)

    assert sorted(used) == list(range(len(inputs)))


# ── planes ─────────────────────────────────────────────────────────────────


def trained(worker: Worker, /, wrap: Callable[[Worker], DistributedDataParallel], rounds: int) -> tuple[Any, Tensor]:
    """Train a few rounds. Return the rounds' decisions and the weights."""
    model = timed(wrap(worker))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(worker.rank)
    decisions: list[Any] = []
    while len(decisions) < rounds:
        loss_of(model, torch.randn(4, 4, generator=generator)).backward()
        if model.exchanged:
            optimizer.step()
            optimizer.zero_grad()
            pacing = model.pacing
            assert pacing is not None
            decisions.append((pacing.counts, pacing.ratios))
    return decisions, weight_of(model.module)


def by_speeds(worker: Worker) -> DistributedDataParallel:
    """Wrap a layer of which rank 1's is three times as slow."""
    cadence = CadenceOptions(anchor=1, max_anchor=2)
    return DistributedDataParallel(Layer(3.0 if worker.rank == 1 else 1.0), worker, cadence=cadence)


@pytest.mark.parametrize("channel", ["tcp", "shm", *AMONG_MEMBERS])
def test_a_cadence_decides_the_same_on_every_plane(channel: str) -> None:
    with members(channel, 4) as workers:
        found = together(workers, partial(trained, wrap=by_speeds, rounds=4))

    for decisions, weights in found:
        assert decisions == found[0][0]
        assert torch.equal(weights, found[0][1])
    assert found[0][0][-1][0] == (3, 1, 3, 3)


# ── looking at it ─────────────────────────────────────────────────────────────────────────────────────


def test_the_status_shows_speed_share_and_batches_of_each_worker() -> None:
    def train(worker: Worker) -> None:
        model = DistributedDataParallel(
            Layer(), worker, cadence=CadenceOptions(anchor=1, max_anchor=1, speed_hint=(0, 3.0))
        )
        rounds = 0
        while rounds < 2:
            loss_of(model, samples(4)).backward()
            if model.exchanged:
                model.zero_grad()
                rounds += 1

    with LocalCluster(2) as cluster:
        cluster.run(train)
        snapshot: Any = cluster.snapshot()

    members = snapshot["groups"]["local"]["members"]
    assert [member["pace"]["unit"] for member in members] == ["batches", "batches"]
    assert sum(member["pace"]["share"] for member in members) == pytest.approx(1)
    assert all(member["pace"]["rate"] > 0 and member["pace"]["batches"] >= 1 for member in members)
    shown = "\n".join(render({"uptime": 0.0, "groups": {}, "url": ""}, {"uptime": 1.0, "url": "", **snapshot}))
    assert "batches/s" in shown
    assert "a round" in shown
