"""An elastic job in Lightning: workers join and die while it trains, and the coordinator may be killed.

    gradserver serve --workers 1:8 --state-dir state   # in one terminal: on tcp://127.0.0.1:7411

    export GRADSERVER_URL=tcp://127.0.0.1:7411         # in any number of others
    python examples/trainers/lightning_elastic.py

To Lightning each worker is the only process: a process group of torch has a fixed number of ranks. The job has the
batches, the steps and the state. A worker that starts later gets the state from another one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradserver.torch

SAMPLES, BATCH, EPOCHS = 1200, 10, 4
PAUSE = float(os.environ.get("PAUSE", "0.1"))  # seconds after each round: time to disturb the job


class Regression(lightning.LightningModule):
    def __init__(self, job: gradserver.Job) -> None:
        super().__init__()
        self.job, self.network = job, job.model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        self.network.set_weight(len(inputs))
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.log("loss", loss)
        self.log_dict(self.network.metrics())
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        closure: Callable[[], Any] = kwargs.get("optimizer_closure") or args[3]
        closure()  # training_step and backward
        self.job.step()
        time.sleep(PAUSE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer


class Batches:
    """Batches of all epochs that are left. Their number depends on how many workers there will be: this is the most.

    Lightning asks for a batch ahead of time where it knows no number. A job gives one at a time.
    """

    def __init__(self, job: gradserver.Job, dataset: TensorDataset) -> None:
        self.job, self.dataset = job, dataset

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.job.batches(self.dataset, epochs=EPOCHS))

    def __len__(self) -> int:
        return SAMPLES * EPOCHS


def train(worker: gradserver.Worker) -> None:
    """Train from the round that the group is in to the end."""
    points = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points, points.sin().sum(dim=1, keepdim=True))
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = gradserver.torch.DistributedDataParallel(network, worker=worker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job = gradserver.Job(model, optimizer, data=gradserver.DataRanges(SAMPLES, worker, batch_size=BATCH, seed=17))
    print(f"{worker.name}: from round {job.round}", flush=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,  # the job has the epochs
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(job), Batches(job, dataset))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
    print(f"{worker.name}: round {job.round}, weights {hashlib.sha256(weights).hexdigest()}", flush=True)


def main() -> None:
    while True:
        try:
            with gradserver.connect() as worker:
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                    os.environ.pop(name, None)  # as `gradserver run` sets them: Lightning would wait for the others
                return train(worker)
        except (gradserver.LeftOutError, gradserver.ConnectionLostError) as error:
            print(f"{error}\njoining again", flush=True)


if __name__ == "__main__":
    main()
