"""Workers of an elastic group that others join, as processes. Run as ``join_training.py URL NAME OUT [OPTIONS]``.

They train with all that has state: AdamW, a scheduler, BatchNorm, a moving average. After each round they say its
number, rank, world size, epoch, and a digest of everything, and wait if they were told to. A learner that is to be
stopped in the midst of its state says so.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradserver
from gradserver.protocol.buffer import Bytes
from gradserver.protocol.digest import MODULUS, digest
from gradserver.protocol.messages import Transfer
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.tensors import bind
from tests.models import images, loss_of, optimizer_state, seeded, state_of
from tests.worker_programs import say, told


class Network(nn.Module):
    """Small, but for a parameter that makes its state take a while."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        seeded(self, 1)
        self.ballast = nn.Parameter(torch.zeros(ballast))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.conv(inputs))).mean((2, 3)))
        return logits + self.ballast[:5].sum() + 1e-3 * self.ballast.mean()


def digest_of(tensors: list[Tensor]) -> int:
    return sum(digest(bind(tensor, writes=False).data, 8 * index) for index, tensor in enumerate(tensors)) % MODULUS


def stop_at_part(worker: Worker, part: int) -> None:
    """Print when part ``part`` of a state is about to go, or to come, and wait for the test."""
    session = worker._session
    state_part = session.state_part

    def counted(transfer: Transfer, index: int, memory: Bytes) -> Handle:
        if index == part:
            say("halfway")
            told()
        return state_part(transfer, index, memory)

    session.state_part = session.traffic.state_part = counted  # type: ignore[method-assign]


def train(worker: Worker, out: Path, rounds: int, ballast: int, pause: float, hold: list[int]) -> None:
    model = gradserver.DistributedDataParallel(Network(ballast), worker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    job = gradserver.Job(model, optimizer, scheduler)
    say(f"entered {job.entered} {worker.rank} {worker.world_size}")
    generator = torch.Generator().manual_seed(len(worker.name) + worker.rank)
    while job.round < rounds:
        inputs, targets = images(int(torch.randint(1 << 30, (1,), generator=generator)), 4)
        loss_of(model, inputs, targets).backward()
        job.step()
        everything = [*state_of(model.module).values(), *optimizer_state(optimizer)]
        place = worker.rank, worker.world_size, worker.epoch
        say(f"round {job.round} {json.dumps([*place, digest_of(everything), time.monotonic()])}")
        if job.round in hold:
            told()
        time.sleep(pause)
    torch.save(state_of(model.module), out)


def main(url: str, name: str, out: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    part = options.pop("stop_at_part", None)
    timeout = options.pop("timeout", 60.0)
    shape: dict[str, Any] = {"rounds": 30, "ballast": 5, "pause": 0.0, "hold": [], **options}
    rank, world = shape.pop("rank", None), shape.pop("world", None)
    with gradserver.connect(url, rank, world, name=name, timeout=timeout) as worker:
        say("joined")
        if part is not None:
            stop_at_part(worker, part)
        train(worker, out, **shape)
    say("ok")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
