"""Train with torch's own DistributedDataParallel: the backend's name is the only word that changes.

    torchrun --nproc-per-node=2 examples/trainers/torchrun_ddp.py
    torchrun --nproc-per-node=2 examples/trainers/torchrun_ddp.py --backend gloo

In the end each rank prints a digest of its weights. All are equal, and with two ranks those of gloo.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradserver.torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gradserver")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each update")
    parser.add_argument("--rounds", action="store_true", help="gradients as rounds of gradserver, by its hook")
    given = parser.parse_args()

    dist.init_process_group(given.backend)
    torch.manual_seed(0)
    points = torch.randn(256, 8)
    data = TensorDataset(points, points.sin().sum(dim=1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    if given.rounds:
        model.register_comm_hook(gradserver.torch.Rounds(module=model.module), gradserver.torch.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader, start=1):
            model.require_backward_grad_sync = number % given.accumulate == 0
            (F.mse_loss(model(inputs), targets) / given.accumulate).backward()  # type: ignore[no-untyped-call]
            if model.require_backward_grad_sync:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {dist.get_rank()} on {given.backend}: weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
