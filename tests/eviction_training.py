"""A training with a worker that has a wrong scale, as ``eviction_training.py URL RANK``: it uses an epoch up."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch import nn

from gradserver import DataRanges, DistributedDataParallel, Worker, connect
from tests.worker_programs import say

WORLD, BAD = 4, 2
LENGTH, BATCH = 3200, 8


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data: a linear function with noise."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(LENGTH, 20, generator=generator)
    weights = torch.randn(20, 3, generator=generator)
    return inputs, inputs @ weights + 0.1 * torch.randn(LENGTH, 3, generator=generator)


INPUTS, TARGETS = samples()


def loss_of(module: nn.Module, indices: Any) -> torch.Tensor:
    difference: torch.Tensor = module(INPUTS[indices]) - TARGETS[indices]
    return difference.square().mean()


def loss_with(weights: dict[str, torch.Tensor]) -> float:
    """Return the loss over all samples."""
    module = nn.Linear(20, 3)
    module.load_state_dict(weights)
    with torch.no_grad():
        return float(loss_of(module, slice(None)))


def train(worker: Worker, factor: float, taken: list[list[int]]) -> dict[str, torch.Tensor]:
    """Use all samples up, with a loss times ``factor``. Return the weights, and note the samples of each round."""
    torch.manual_seed(0)
    module = nn.Linear(20, 3)
    model = DistributedDataParallel(module, worker)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.15)
    data = DataRanges(LENGTH, worker, batch_size=BATCH, seed=5)
    while not data.finished():
        indices = data.take()
        taken.append(indices.tolist())
        model.set_weight(len(indices))
        optimizer.zero_grad()
        loss = loss_of(model, indices) if len(indices) else 0.0 * model(INPUTS[:1]).sum()
        (factor * loss).backward()
        optimizer.step()
    return {name: value.clone() for name, value in module.state_dict().items()}


def main(url: str, rank: int) -> None:
    torch.set_num_threads(1)
    with connect(url, rank, WORLD, name=f"w{rank}", timeout=30.0) as worker:
        weights = train(worker, 10.0 if rank == BAD else 1.0, [])
    say(f"loss {loss_with(weights)}")
    say(f"weights {hashlib.sha256(b''.join(one.numpy().tobytes() for one in weights.values())).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
