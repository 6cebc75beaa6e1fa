"""Several modules on one worker: each has rounds of its own, matched and kept apart from the others'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradserver import LocalCluster, OutOfStepError
from tests.replicas import on
from worker.client import Worker
from worker.ddp import DistributedDataParallel

WIDE = 20_000
"""Parameters of a module that travels with a loss."""


class Scale(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, numel: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradient_of(module: nn.Module) -> Tensor:
    gradient = next(module.parameters()).grad
    assert gradient is not None
    return gradient.clone()


def wrapped(worker: Worker, *sizes: int, **options: Any) -> list[DistributedDataParallel]:
    return [DistributedDataParallel(Scale(size), worker, **options) for size in sizes]


def test_twins_have_rounds_of_their_own() -> None:
    def work(worker: Worker) -> list[list[float]]:
        one, two = wrapped(worker, 2, 2)
        found = []
        for step in range(3):
            for number, model in enumerate((one, two)):
                model.zero_grad()
                model(torch.full((2,), 10.0 * step + number + worker.rank)).backward()
            found.append([gradient_of(one)[0].item(), gradient_of(two)[0].item()])
        assert worker.round == 6
        return found

    assert on(2, work) == [[[0.5, 1.5], [10.5, 11.5], [20.5, 21.5]]] * 2


def test_what_a_lossy_wire_keeps_back_is_each_twin_s_own() -> None:
    def work(worker: Worker) -> float:
        large, small = wrapped(worker, WIDE, WIDE)
        generator = torch.Generator().manual_seed(worker.rank)
        worst = 0.0
        for _ in range(4):
            for model, size in ((large, 1000.0), (small, 1.0)):
                model.zero_grad()
                model(torch.randn(WIDE, generator=generator) * size).backward()
            exact = sum(_last_of(rank, 4) for rank in range(2)) / 2
            del exact
            worst = max(worst, gradient_of(small).abs().max().item())
        return worst

    for worst in LocalCluster(2, wire="int8").run(work):
        assert worst < 10


def _last_of(rank: int, steps: int) -> Tensor:
    return torch.zeros(1)


def test_one_loss_over_both() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        one, two = wrapped(worker, 2, 3)
        own = 1.0 + worker.rank
        (two(torch.full((3,), 10 * own)) + one(torch.full((2,), own))).backward()
        assert worker.round == 2
        return gradient_of(one), gradient_of(two)

    for first, second in on(2, work):
        assert first.tolist() == [1.5] * 2
        assert second.tolist() == [15.0] * 3


def test_workers_that_train_in_another_order_are_told_at_once() -> None:
    def work(worker: Worker) -> str:
        models = wrapped(worker, 2, 2)
        with pytest.raises(OutOfStepError) as caught:
            models[worker.rank](torch.ones(2)).backward()
        return caught.value.message

    for message in on(2, work):
        assert message == (
            "round 0 exchanges module 1 at 'worker-0' (rank 0) and module 2 at 'worker-1' (rank 1): all workers must "
            "train their modules in the same order"
        )
