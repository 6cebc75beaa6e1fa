"""Train with Lightning: one argument of its strategy names the backend.

    python examples/trainers/lightning_ddp.py
    python examples/trainers/lightning_ddp.py --backend gloo

With ``--rounds`` gradients are rounds of gradserver, by its hook. In the end each rank prints a digest of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

import gradserver.torch


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.error = MeanSquaredError()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        outputs = self.network(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        self.error(outputs, targets)
        self.log("error", self.error, on_step=False, on_epoch=True)  # one number over all ranks
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gradserver")
    parser.add_argument("--rounds", action="store_true", help="gradients as rounds of gradserver")
    given = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    points = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(points, points.sin().sum(dim=1, keepdim=True)), batch_size=8)
    model = Regression()
    rounds: dict[str, Any] = {}
    if given.rounds:
        rounds = {"ddp_comm_state": gradserver.torch.Rounds(module=model), "ddp_comm_hook": gradserver.torch.hook}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=given.backend, **rounds),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.network.parameters())
    figures = ", ".join(f"{name} {float(value):.6f}" for name, value in sorted(trainer.callback_metrics.items()))
    digest = hashlib.sha256(weights).hexdigest()
    print(f"rank {trainer.global_rank} on {given.backend}: {figures}, weights {digest}", flush=True)


if __name__ == "__main__":
    main()
