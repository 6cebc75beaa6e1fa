"""A training of a small transformer by four workers, of which one stops in the middle of a round.

Run as ``elastic_training.py URL SEAT OUT``. `alone` computes the expected result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradserver
from gradserver import LocalCluster
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.models import Transformer, loss_of, state_of, tokens
from tests.replicas import sgd, shard
from tests.worker_programs import say, told

WORLD = 4
STEPS = 8
ROWS = 12
VICTIM, FATAL = 2, 3
"""The worker that stops, and the step."""


def train(worker: Worker, member_id: int, after: Callable[[int], None]) -> dict[str, Tensor]:
    """Train on the rows that belong to ``member_id``, with any other members. ``after`` runs after each step."""
    model = DistributedDataParallel(Transformer(), worker)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *shard(member_id, WORLD, *tokens(step, ROWS))).backward()
        optimizer.step()
        after(step)
    return state_of(model.module)


def after_some_pushes(worker: Worker, step: int, count: int, do: Callable[[], None]) -> None:
    """Call ``do`` when ``worker`` has pushed ``count`` buckets of ``step``."""
    push = worker.push
    pushed = 0

    def counted(bucket: int, data: Any, *, weight: float = 1.0, present: bool = True, **more: Any) -> Handle:
        nonlocal pushed
        if worker.round == step:
            if pushed == count:
                do()
            pushed += 1
        return push(bucket, data, weight=weight, present=present, **more)

    worker.push = counted  # type: ignore[method-assign]


def alone(counting: Callable[[int, int], Collection[int]]) -> dict[str, Tensor]:
    """Return the weights that replicas must have, if ``counting(step, bucket)`` counted.

    A bucket is given by its place in the plan.
    """
    module = Transformer()
    optimizer = sgd(module)
    with LocalCluster(1) as cluster:
        plan = DistributedDataParallel(Transformer(), cluster.workers[0]).plan
    bucket_of = {component.name: part for part, bucket in enumerate(plan.buckets) for component in bucket.components}
    for step in range(STEPS):
        gradients = []
        for member_id in range(WORLD):
            optimizer.zero_grad()
            loss_of(module, *shard(member_id, WORLD, *tokens(step, ROWS))).backward()
            gradients.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        for name, parameter in module.named_parameters():
            counted = counting(step, bucket_of[name])
            parameter.grad = torch.stack([gradients[member_id][name] for member_id in counted]).sum(0) / len(counted)
        optimizer.step()
    return state_of(module)


def main(url: str, member_id: int, out: Path) -> None:
    torch.set_num_threads(1)
    with gradserver.connect(url, member_id, WORLD, name=f"w{member_id}", timeout=60.0) as worker:

        def stop() -> None:
            say("halfway")
            told()

        def after(step: int) -> None:
            say(f"step {step} {time.monotonic()} {worker.rank} {worker.world_size} {worker.epoch}")
            if step == FATAL:
                told()  # until the test has looked at the ledger

        if member_id == VICTIM:
            after_some_pushes(worker, FATAL, 2, stop)
        torch.save(train(worker, member_id, after), out)
    say("ok")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
