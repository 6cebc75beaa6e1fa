"""Train a small network on several processes or machines. Rank, world size and coordinator come from the environment.

    gradserver serve --workers 2                    # in one terminal: on tcp://127.0.0.1:7411

    export GRADSERVER_URL=tcp://127.0.0.1:7411      # in two others
    python examples/train_ddp.py

In the end every worker prints the SHA-256 of its weights. All are equal.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradserver

SAMPLES, BATCH, EPOCHS = 444, 32, 5  # 14 batches, the last one smaller: shards differ in number and size


def samples() -> tuple[Tensor, Tensor]:
    """Return points in the plane, and 1.0 for each that lies above a wave, else 0.0."""
    points = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
    return points, (points[:, 1] > torch.sin(2 * points[:, 0])).float()


def digest(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters' bytes."""
    sha = hashlib.sha256()
    for parameter in module.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    points, above = samples()
    torch.manual_seed(1)  # every run is the same
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    with gradserver.connect() as worker:
        model = gradserver.DistributedDataParallel(network, worker)  # from here on all workers have rank 0's weights
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        batches = -(-SAMPLES // BATCH)
        for epoch in range(EPOCHS):
            total = torch.zeros(2)  # sum of the losses, and number of samples
            with model.join(optimizer):  # a worker with fewer batches takes part until all are done
                for batch in gradserver.shard_batches(batches, worker.rank, worker.world_size):
                    chosen = slice(batch * BATCH, (batch + 1) * BATCH)
                    loss = F.binary_cross_entropy_with_logits(model(points[chosen]).squeeze(1), above[chosen])
                    model.set_weight(len(points[chosen]))  # a mean over samples, not over workers
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    total += torch.tensor([loss.item(), 1.0]) * len(points[chosen])
            worker.all_reduce(total, op="sum")
            if worker.rank == 0:
                print(f"epoch {epoch}: loss {total[0] / total[1]:.4f} over {int(total[1])} samples", flush=True)
        print(f"rank {worker.rank} of {worker.world_size}: weights {digest(network)}", flush=True)


if __name__ == "__main__":
    main()
