"""One worker of the suite `large`, started as ``python -m gradserver.tools.bench.large_worker``.

It trains a few steps and prints one line of JSON: what `Outcome` has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradserver
from gradserver.protocol.digest import digest
from gradserver.tools.bench.machine import await_kernels
from gradserver.tools.common.processes import reserve_stdout
from gradserver.tools.demo.model import GPT
from gradserver.tools.demo.settings import Settings

LEARNING_RATE = 0.01
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Outcome:
    """Measurements of one worker.

    Attributes:
        device: its device, by name.
        channel: path of its gradients.
        nbytes: bytes of gradients, each way in each step.
        seconds: duration of each step.
        losses: loss of each step, of this worker's own tokens.
        gradients: digest of the last step's averaged gradients: the same at all workers.
        device_bytes: most memory of the device that was in use; 0 on the CPU.
    """

    device: str
    channel: str
    nbytes: int
    seconds: list[float]
    losses: list[float]
    gradients: int
    device_bytes: int = 0


def main() -> int:
    """Train with the settings of the arguments."""
    parser = argparse.ArgumentParser(prog="gradserver.tools.bench.large_worker")
    parser.add_argument("--settings", type=Settings.from_json, required=True, help="as Settings.to_json writes")
    parser.add_argument("--url", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--channel", required=True, help="tcp or shm")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--wire", default="fp32", help="format in which gradients travel")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    tell = reserve_stdout()
    torch.set_num_threads(arguments.threads)
    await_kernels()
    settings: Settings = arguments.settings
    model = GPT(settings).to(arguments.device, DTYPES[arguments.dtype])
    how = {"name": f"worker-{arguments.rank}", "plane": arguments.channel, "wire": arguments.wire}
    with gradserver.connect(arguments.url, arguments.rank, settings.workers, timeout=600.0, **how) as worker:
        replica = gradserver.DistributedDataParallel(model, worker)
        outcome = train(replica, settings, arguments.rank, arguments.device)
        tell(json.dumps(asdict(outcome)))
    sys.stdin.readline()  # the parent takes a process that ends for one that failed, until it has all answers
    return 0


def train(replica: gradserver.DistributedDataParallel, settings: Settings, rank: int, device: torch.device) -> Outcome:
    """Train on tokens that are drawn by step and rank."""
    optimizer = torch.optim.SGD(replica.parameters(), lr=LEARNING_RATE)
    seconds, losses = [], []
    for step in range(settings.steps):
        inputs, targets = (part.to(device) for part in tokens(settings, step, rank))
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(replica(inputs).flatten(0, -2).float(), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    on_device = device.type == "cuda"
    return Outcome(
        device=torch.cuda.get_device_name(device) if on_device else "CPU",
        channel=replica.worker.channel,
        nbytes=sum(bucket.numel * bucket.dtype.itemsize for bucket in replica.plan.buckets),
        seconds=seconds,
        losses=losses,
        gradients=digest_of_gradients(replica.module),
        device_bytes=torch.cuda.max_memory_allocated(device) if on_device else 0,
    )


def tokens(settings: Settings, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both [batch, context]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randint(settings.vocabulary, (settings.batch, settings.context + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def digest_of_gradients(module: nn.Module) -> int:
    """Return a digest of all gradients, which is equal if all their bits are."""
    total = 0
    for number, parameter in enumerate(module.parameters()):
        assert parameter.grad is not None
        bits = parameter.grad.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        total += (2 * number + 1) * digest(bits)
    return total % (1 << 64)


if __name__ == "__main__":
    sys.exit(main())
