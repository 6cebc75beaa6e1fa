"""A training of two modules in a group where rounds do not wait for all, as ``modules_log_training.py URL RANK WORLD``.

The second module, a critic, is trained twice as often as the first one, which is trained through it. Each process says
the digest of both modules after each update of the log. It waits at step `HELD`, between the two modules, until it is
told to go on, if it has ``held`` as a further argument.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

import gradserver
from gradserver import DistributedDataParallel
from gradserver.protocol.digest import digest
from gradserver.worker.client import Worker
from tests.replicas import sgd
from tests.worker_programs import say, told

STEPS, HELD = 6, 2
SLOW = 0.02
"""Seconds that the last rank needs more for each batch."""

After = Callable[[DistributedDataParallel], object]


class Modules:
    """The two modules of a worker, each with its optimizer.

    Attributes:
        after: called after each update, with its model.
    """

    def __init__(self, worker: Worker, after: After = lambda _: None) -> None:
        torch.manual_seed(3)
        self.worker, self.after = worker, after
        self.maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)), worker)
        self.critic = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), worker)
        self.optimizers = {one: sgd(one) for one in (self.maker, self.critic)}

    def update(self, *models: DistributedDataParallel) -> None:
        """Make the updates that the last backward leads to."""
        for one in models[0].updates():
            self.apply(one)

    def apply(self, model: DistributedDataParallel) -> None:
        """Make one update."""
        self.optimizers[model].step()
        self.optimizers[model].zero_grad()
        self.after(model)

    def train_critic(self, seed: int) -> None:
        """Train the critic with samples, and with what the other module makes."""
        noise, real = batch(seed)
        self.optimizers[self.critic].zero_grad()
        (self.critic(self.maker(noise).detach()).mean() - self.critic(real).tanh().mean()).backward()
        self.update(self.critic)

    def train_maker(self, seed: int) -> None:
        """Train the other module through the critic, which gets no gradients of that."""
        noise, _ = batch(seed)
        self.optimizers[self.maker].zero_grad()
        with self.critic.no_sync():
            (-self.critic(self.maker(noise)).mean()).backward()
        self.optimizers[self.critic].zero_grad()
        self.update(self.maker)

    def digest(self) -> int:
        """Return the digest of all parameters and of all momenta."""
        tensors: list[Tensor] = []
        for model, optimizer in self.optimizers.items():
            tensors += [parameter.detach() for parameter in model.module.parameters()]
            states = optimizer.state_dict()["state"]
            tensors += [states[number]["momentum_buffer"] for number in sorted(states)]
        return digest(torch.cat([one.flatten() for one in tensors]).numpy().view("uint8"), 0)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 5, generator=generator)


def train(
    worker: Worker,
    after: Callable[[Modules, DistributedDataParallel], object],
    between: Callable[[int], object] = lambda _: None,
    steps: int = STEPS,
) -> Modules:
    """Train, and apply the others' updates until no worker has a batch. ``between`` is called between two modules."""
    modules = Modules(worker, lambda model: after(modules, model))
    with ExitStack() as stack:
        for one in (modules.maker, modules.critic):
            stack.enter_context(one.join(lambda one=one: modules.apply(one)))  # type: ignore[misc]
        for step in range(steps + worker.rank):
            for more in range(2):
                modules.train_critic(100 * step + 10 * worker.rank + more)
            between(step)
            modules.train_maker(100 * step + 10 * worker.rank + 5)
    return modules


def main(url: str, rank: int, world: int, *held: str) -> None:
    torch.set_num_threads(1)
    with gradserver.connect(url, rank, world, name=f"w{rank}", timeout=60.0) as worker:

        def after(modules: Modules, model: DistributedDataParallel) -> None:
            which = "maker" if model is modules.maker else "critic"
            say(f"update {worker.round - 1} {which} {modules.digest()}")

        def between(step: int) -> None:
            if rank == world - 1:
                time.sleep(SLOW)  # it computes for longer
            if held and step == HELD:
                say("held")
                told()

        modules = train(worker, after, between)
        say(f"end {worker.round} {modules.digest()}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
