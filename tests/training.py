"""Some steps of a small transformer: by several workers, or by one process on the same samples.

Run as ``training.py URL RANK CASES``, a case being (world size, recipe): joins one group after another and
prints, as JSON lines, what each ended with.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradserver
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.examples import examples
from tests.models import Transformer, tokens

STEPS = min(examples(30), 50)
"""Steps of each training: fewer in the fast suite, which begins to differ by a fault in the first ones."""
ROWS = 12
"""Rows of the global batch: they can be shared evenly among 1, 2, 3 or 4."""


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    Attributes:
        name: how tests call it.
        adam: AdamW instead of SGD with momentum.
        tied: embedding and head are one parameter.
        branch: there is a branch that no loss uses.
        micro: micro-batches that a step's rows are split into; all but the last inside ``no_sync``.
        tokens: rows have different lengths, and workers weigh their mean loss by their number of tokens.
    """

    name: str
    adam: bool = False
    tied: bool = False
    branch: bool = False
    micro: int = 1
    tokens: bool = False

    def model(self) -> Transformer:
        return Transformer(tied=self.tied, branch=self.branch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("sgd"),
        Recipe("adamw", adam=True),
        Recipe("tied", tied=True),
        Recipe("unused", branch=True),
        Recipe("accumulated", micro=3),
        Recipe("by tokens", tokens=True),
        Recipe("by tokens, accumulated", tokens=True, micro=2),
    )
}


def train(worker: Worker, recipe: Recipe, exchanged: bool = True) -> nn.Module:
    """Train on this rank's rows, interleaved, of every global batch; without exchange, every rank for itself."""
    module = recipe.model()
    model = DistributedDataParallel(module, worker, find_unused_parameters=recipe.branch)
    optimizer = recipe.optimizer(module)
    for step in range(STEPS):
        inputs, targets = batch(step, recipe)
        rows = slice(worker.rank, None, worker.world_size)
        mine = targets[rows]
        if recipe.tokens:
            model.set_weight(count(mine))
        optimizer.zero_grad()
        pieces = list(zip(split(inputs[rows], recipe), split(mine, recipe), strict=True))
        for number, (piece, target) in enumerate(pieces):
            loss = sum_of_losses(model(piece), target) / count(mine)
            if exchanged and number == len(pieces) - 1:
                loss.backward()
            else:
                with model.no_sync():
                    loss.backward()
        optimizer.step()
    return module


def train_alone(recipe: Recipe) -> nn.Module:
    """Train one process on the whole of every batch, without any wrapper."""
    module = recipe.model()
    optimizer = recipe.optimizer(module)
    for step in range(STEPS):
        inputs, targets = batch(step, recipe)
        optimizer.zero_grad()
        (sum_of_losses(module(inputs), targets) / count(targets)).backward()
        optimizer.step()
    return module


def batch(step: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a global batch, [ROWS, time]; with tokens to weigh, rows of different lengths."""
    inputs, targets = tokens(step, ROWS)
    if recipe.tokens:
        lengths = 1 + (torch.arange(ROWS) * 5 + step) % targets.shape[1]
        targets = targets.masked_fill(torch.arange(targets.shape[1]) >= lengths[:, None], -100)
    return inputs, targets


def sum_of_losses(logits: Tensor, targets: Tensor) -> Any:  # torch has not typed backward()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def count(targets: Tensor) -> int:
    """Count the tokens that there is a loss for."""
    return int((targets != -100).sum())


def split(rows: Tensor, recipe: Recipe) -> Iterable[Tensor]:
    return rows.tensor_split(recipe.micro)


def weights(module: nn.Module) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def digest(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters."""
    return hashlib.sha256(weights(module).numpy().tobytes()).hexdigest()


def distance(module: nn.Module, other: nn.Module) -> float:
    """Return the relative distance of all weights, ``|a - b| / |b|``, in double precision."""
    a, b = weights(module).double(), weights(other).double()
    return float((a - b).norm() / b.norm())


def main(url: str, rank: int, cases: list[tuple[int, str]]) -> None:
    """Take part in one group after another, of those that this rank fits into."""
    torch.set_num_threads(1)
    for world_size, name in cases:
        if rank < world_size:
            with gradserver.connect(url, rank, world_size, group=f"{world_size} {name}", timeout=60) as worker:
                module = train(worker, RECIPES[name])
            print("trained " + json.dumps([world_size, name, digest(module)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
