"""Tests of fp16 with a GradScaler: gradients that overflow are passed on, and every worker skips and rescales alike.

The models and data are the same for gradserver and for torch's DDP over gloo: its processes run this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradserver
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.cluster import STARTED_WITHIN, Program, coordinator, joined, together
from tests.seeded import seeded
from tests.training import digest

pytestmark = pytest.mark.timeout(300)

WORLD, STEPS, BATCH = 2, 40, 32
INITIAL_SCALE = 2.0**28
"""So large that the first steps overflow."""


class Trained(NamedTuple):
    """The end of a training. Scales are those after each step; inf was found where they fell."""

    loss: float
    scales: list[float]
    weights: str


def layers() -> list[nn.Module]:
    return [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]


def model() -> nn.Module:
    return seeded(7, lambda: nn.Sequential(*layers()))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, 16, generator=generator)
    return inputs, (inputs[:, :4] * inputs[:, 4:8]).tanh()


def train(wrapped: nn.Module, rank: int) -> Trained:
    """Train with the usual loop."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, growth_interval=8)
    scales, total = [], 0.0
    for step in range(STEPS):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(wrapped(inputs).float(), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        total = loss.item()
    return Trained(total, scales, digest(wrapped))


def with_gradserver(worker: Worker) -> Trained:
    return train(DistributedDataParallel(model(), worker), worker.rank)


def over_gloo(rank: int, rendezvous: str) -> None:
    """Run one process of torch's own."""
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=WORLD)
    found = train(nn.parallel.DistributedDataParallel(model()), rank)
    print(f"trained {json.dumps(found)}", flush=True)
    dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(found: list[Trained]) -> None:
    """Check that all have skipped the same steps, some of them, and are equal."""
    first, *others = found
    assert {(one.weights, tuple(one.scales)) for one in others} == {(first.weights, tuple(first.scales))}
    assert min(first.scales) < INITIAL_SCALE, "nothing overflowed"
    assert any(later > earlier for earlier, later in zip(first.scales, first.scales[1:], strict=False)), "no growth"


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "topk:0.1"])
def test_grad_scaler_trains_and_skips_alike_everywhere(wire: str) -> None:
    with gradserver.LocalCluster(WORLD, nonfinite="propagate", wire=wire) as cluster:
        check(cluster.run(with_gradserver))
        assert cluster.snapshot()["groups"]["local"]["nonfinite"]["policy"] == "propagate"  # type: ignore[index]


@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_grad_scaler_has_the_same_bits_over_every_channel(channel: str) -> None:
    with gradserver.LocalCluster(WORLD, nonfinite="propagate") as cluster:
        expected = cluster.run(with_gradserver)
    with coordinator(nonfinite="propagate") as server, joined(server.url, WORLD, channel=channel) as workers:
        assert together(workers, with_gradserver) == expected


@pytest.mark.long
def test_grad_scaler_comes_as_far_as_with_torch(tmp_path: Path) -> None:
    with gradserver.LocalCluster(WORLD, nonfinite="propagate") as cluster:
        ours = cluster.run(with_gradserver)
    with ExitStack() as stack:
        arguments = "-m", "tests.test_scaling", str(tmp_path / "rendezvous")
        programs = [stack.enter_context(Program(*arguments, str(rank), loaded="torch")) for rank in range(WORLD)]
        theirs = [Trained(*json.loads(program.expect("trained ", STARTED_WITHIN))) for program in programs]
    assert ours[0].scales == theirs[0].scales
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=0.01)


if __name__ == "__main__":
    over_gloo(int(sys.argv[2]), sys.argv[1])
