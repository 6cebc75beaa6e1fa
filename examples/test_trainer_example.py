"""A trainer's own tests with gradserver. Workers are threads; there is no port, no sleep and no mock.

    pytest examples/test_trainer_example.py

The trainer under test takes a worker, as it does between processes.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

import gradserver

INPUTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(dim=1, keepdim=True).sin()


def train(worker: gradserver.Worker, steps: int = 5, *, exchange: bool = True, poisoned_rank: int = -1) -> Tensor:
    """Train, and return the last weights. This is the trainer under test."""
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    model = gradserver.DistributedDataParallel(network, worker)  # all begin with rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = INPUTS[worker.rank :: worker.world_size], TARGETS[worker.rank :: worker.world_size]
    if worker.rank == poisoned_rank:
        inputs = torch.full_like(inputs, torch.nan)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        if exchange:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(network.parameters()).detach()


@pytest.fixture
def cluster() -> gradserver.LocalCluster:
    return gradserver.LocalCluster(world_size=3, timeout=10.0)


def test_replicas_are_identical(cluster: gradserver.LocalCluster) -> None:
    with cluster:
        first, *others = cluster.run(train)
    assert all(torch.equal(first, other) for other in others)


def test_without_the_exchange_replicas_diverge(cluster: gradserver.LocalCluster) -> None:
    """Check that the test above can fail."""
    with cluster:
        first, *others = cluster.run(train, exchange=False)
    assert not any(torch.equal(first, other) for other in others)


def test_a_nan_stops_the_training_and_is_traced_to_its_worker(cluster: gradserver.LocalCluster) -> None:
    with cluster, pytest.raises(gradserver.NonFiniteError) as caught:
        cluster.run(train, poisoned_rank=2)
    assert caught.value.rank == 2
    assert caught.value.parameter == "0.weight"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
