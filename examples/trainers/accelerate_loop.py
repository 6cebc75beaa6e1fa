"""Train with Accelerate. On CPUs it takes a group that is there already; on GPUs it makes one by the backend's name.

    torchrun --nproc-per-node=2 examples/trainers/accelerate_loop.py
    torchrun --nproc-per-node=2 examples/trainers/accelerate_loop.py --backend gloo

In the end each rank prints a digest of its weights.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gradserver")
    given = parser.parse_args()

    if torch.cuda.is_available():
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=given.backend)])
    else:
        dist.init_process_group(
            given.backend
        )  # Accelerate allows gloo, mpi and ccl only on CPUs, if it makes the group
        accelerator = Accelerator(cpu=True)
    set_seed(0)
    points = torch.randn(200, 8)
    loader = DataLoader(TensorDataset(points, points.sin().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
    parameters = accelerator.unwrap_model(model).cpu().parameters()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    figures = f"losses {[round(one, 6) for one in losses.tolist()]}"
    digest = hashlib.sha256(weights).hexdigest()
    print(f"rank {accelerator.process_index} on {given.backend}: {figures}, weights {digest}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
