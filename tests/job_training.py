"""A small job that the tests train, stop, and continue. Run as ``job_training.py RANK WORLD_SIZE CHECKPOINT``.

As a program it prints ``round N`` after each, and in the end ``weights`` and their digest. After the round that
PAUSE_AFTER in its environment names, it waits until it is told to go on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradserver
from gradserver import Job, ShardSampler
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.alike import digest_of
from tests.models import seeded

SAMPLES, BATCH, EPOCHS = 46, 5, 2
ROUNDS = 8
"""The rounds of three workers. Their shards are 16, 15 and 15 samples: one has four batches in each epoch, two have
three."""


class Network(nn.Module):
    """With a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))
        seeded(self, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        result: Tensor = self.layers(inputs - self.mean)
        return result


class Average:
    """A moving average of the weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.values = [parameter.detach().clone() for parameter in module.parameters()]

    def update(self) -> None:
        for value, parameter in zip(self.values, self._module.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


@dataclass
class Run:
    """The results of a training."""

    digest: int
    state: dict[str, Tensor]
    round: int
    resumed: Path | None


def train(
    worker: Worker,
    checkpoint: Path | None = None,
    *,
    every: int | None = None,
    epochs: int = EPOCHS,
    after: Callable[[Job], object] = lambda _: None,
    used: list[tuple[int, list[int]]] | None = None,
) -> Run:
    """Train to the end. ``after(job)`` is called after each round; ``used`` gets epoch and samples of each batch."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 3, generator=generator)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
    model = gradserver.DistributedDataParallel(Network(), worker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    average = Average(model)
    data = ShardSampler.for_worker(dataset, worker, seed=17, uneven="keep")
    job = Job(
        model, optimizer, scheduler, data=data, state={"average": average}, checkpoint=checkpoint, every=every, keep=2
    )

    def step() -> None:
        job.step(before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5), after=average.update)
        after(job)

    for batch, targets, numbers in job.batches(DataLoader(dataset, BATCH, sampler=data), epochs, step):
        if used is not None:
            used.append((data.epoch, numbers.tolist()))
        model.set_weight(len(batch))
        loss: Any = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        step()
    state = {**model.module.state_dict(), **{f"average.{n}": v.clone() for n, v in enumerate(average.values)}}
    state["rate"] = torch.tensor(scheduler.get_last_lr())
    return Run(digest_of(model), state, job.round, job.resumed)


def main() -> None:
    torch.set_num_threads(1)
    rank, world_size, checkpoint = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    pause = int(os.environ.get("PAUSE_AFTER", "-1"))

    def after(job: Job) -> None:
        print("round", job.round, flush=True)
        if job.round == pause:
            sys.stdin.readline()

    with gradserver.connect(rank=rank, world_size=world_size, name=f"w{rank}", timeout=20.0) as worker:
        run = train(worker, checkpoint, every=2, after=after)
    print("resumed", run.resumed and run.resumed.name, flush=True)
    print("weights", run.digest, flush=True)


if __name__ == "__main__":
    main()
