"""Train with Ray Train: its configuration of torch names the backend.

    python examples/trainers/ray_train.py
    python examples/trainers/ray_train.py --backend gloo

Workers are actors of Ray on this machine. In the end each rank prints a digest of its weights.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Train on one worker."""
    import hashlib

    import torch
    import torch.distributed as dist
    from ray.train import report
    from ray.train.torch import prepare_data_loader, prepare_model
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    points = torch.randn(128, 8)
    data = TensorDataset(points, points.sin().sum(dim=1, keepdim=True))
    loader = prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    model = prepare_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(config["epochs"]):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if dist.get_rank() == 0 and epoch % 100 == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    print(f"rank {dist.get_rank()} on {config['backend']}: weights {digest}", flush=True)
    report({"loss": loss.item(), "weights": digest})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gradserver")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()

    # A worker of Ray is a process that Ray ends: the coordinator that rank 0 starts ends with it.
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=200_000_000)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(given),
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend=given.backend, timeout_s=120),
        run_config=RunConfig(storage_path=tempfile.mkdtemp(), name="gradserver"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
