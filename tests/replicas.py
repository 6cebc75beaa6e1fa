"""Replicas on a LocalCluster, one process to compare them with, and how to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradserver import DistributedDataParallel, LocalCluster
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from tests.models import loss_of, state_of, tokens

ROWS = 12
"""Rows of a step's batch, over all workers."""
STEPS = 4


def on(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 10.0, **options: Any) -> list[Any]:
    """Return the results of ``fn(worker, …)`` on each of ``world`` workers."""
    with LocalCluster(world, timeout=timeout) as cluster:
        return cluster.run(fn, *args, **options)


def alone(fn: Callable[[Worker], Any]) -> Any:
    """Return the result of ``fn(worker)`` on a worker that is alone in its group."""
    return on(1, fn)[0]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with all that makes a gradient of zeros differ from none."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def shard(rank: int, world: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Return one worker's rows."""
    return (tensor[rank::world] for tensor in tensors)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether all is equal, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest relative distance of two tensors with one name."""
    assert one.keys() == other.keys()
    return max(float((one[k].double() - v.double()).norm() / v.double().norm()) for k, v in other.items())


def reference(module: nn.Module, steps: int = STEPS) -> dict[str, Tensor]:
    """Train in one process, with all rows in one batch."""
    optimizer = sgd(module)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, *tokens(step, ROWS)).backward()
        optimizer.step()
    return state_of(module)


def train(worker: Worker, make: Callable[[int], nn.Module], **options: Any) -> dict[str, Tensor]:
    """Train a replica that starts with weights of its own, on its share of the rows."""
    model = DistributedDataParallel(make(worker.rank), worker, **options)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *shard(worker.rank, worker.world_size, *tokens(step, ROWS))).backward()
        optimizer.step()
    return state_of(model.module)


def assert_like_one_process(results: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    """Check that all workers have the same bits, and those of one process, but for rounding."""
    assert all(same(results[0], other) for other in results[1:])
    assert distance(results[0], expected) < 1e-6


Pushed = list[tuple[str, float, bool]]


def pushes(worker: Worker) -> Pushed:
    """Note what this worker pushes from now on: key, weight, and whether there was data."""
    noted: Pushed = []
    push = worker.push

    def note(bucket: int, data: Any, *, weight: float = 1.0, present: bool = True, **more: Any) -> Handle:
        assert worker.plan is not None
        noted.append((worker.plan.buckets[bucket].key, weight, present))
        return push(bucket, data, weight=weight, present=present, **more)

    worker.push = note  # type: ignore[method-assign]
    return noted


def note_backward(block: nn.Module, noted: Pushed, key: str) -> None:
    """Note when the gradient of the block's input is there, which is after those of its parameters."""

    def before_forward(_: nn.Module, args: tuple[Any, ...]) -> None:
        args[0].register_hook(lambda _: noted.append((key, 0.0, False)))

    block.register_forward_pre_hook(before_forward)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient that exists."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
