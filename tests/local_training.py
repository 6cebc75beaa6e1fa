"""Local SGD that survives a coordinator: a `tests.restart_training`. Fragments stream while a member computes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from gradserver import LocalSGD
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.alike import digest_of_all
from tests.restart_training import run

EVERY, FRAGMENTS, DELAY = 9, 3, 2
STEP_SECONDS = 0.005
"""Length of a step, so that a coordinator is killed in the midst of some."""


def train(
    worker: Worker,
    rounds: int,
    after: Callable[[int], None] = lambda _: None,
    pushing: Callable[[int, bool], None] = lambda *_: None,
) -> int:
    """Train for so many exchanges. Return a digest of the group's weights and of the outer optimizer's momenta."""
    del pushing
    torch.set_num_threads(1)
    module, member = nn.Sequential(nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 300), nn.Tanh()), worker.rank
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.1, 0.1, generator=generator)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    model = LocalSGD(module, worker, optimizer, every=EVERY, fragments=FRAGMENTS, delay=DELAY)
    model.set_weight(1.0 + member)
    model.on_boundary(lambda: after(model.round - 1))
    generator = torch.Generator().manual_seed(member)
    while model.round < rounds:
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        time.sleep(STEP_SECONDS)
        optimizer.step()
    return digest_of_all([*model.weights().values(), *(one["momentum_buffer"] for one in model.outer.state.values())])


if __name__ == "__main__":
    run(train)
