"""An elastic job with Accelerate: workers join and die while it trains, and the coordinator may be killed.

    gradserver serve --workers 1:8 --state-dir state   # in one terminal: on tcp://127.0.0.1:7411

    export GRADSERVER_URL=tcp://127.0.0.1:7411         # in any number of others
    python examples/trainers/accelerate_elastic.py

To Accelerate each worker is the only process: a process group of torch has a fixed number of ranks. The job has the
batches, the steps and the state. A worker that starts later gets the state from another one.
"""

from __future__ import annotations

import hashlib
import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import gradserver.torch

SAMPLES, BATCH, EPOCHS = 1200, 10, 4
PAUSE = float(os.environ.get("PAUSE", "0.1"))  # seconds after each round: time to disturb the job


def train(worker: gradserver.Worker, accelerator: Accelerator) -> None:
    """Train from the round that the group is in to the end."""
    points = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points, points.sin().sum(dim=1, keepdim=True))
    network = accelerator.prepare(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    model = gradserver.torch.DistributedDataParallel(network, worker=worker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = gradserver.DataRanges(SAMPLES, worker, batch_size=BATCH, seed=17)
    job = gradserver.Job(model, optimizer, data=data, clip_grad_norm=1.0)
    print(f"{worker.name}: from round {job.round}", flush=True)
    for inputs, targets in job.batches(dataset, epochs=EPOCHS):
        model.set_weight(len(inputs))
        loss = nn.functional.mse_loss(model(inputs.to(accelerator.device)), targets.to(accelerator.device))
        accelerator.backward(loss)
        job.step()
        time.sleep(PAUSE)
    parameters = accelerator.unwrap_model(model).cpu().parameters()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    print(f"{worker.name}: round {job.round}, weights {hashlib.sha256(weights).hexdigest()}", flush=True)


def main() -> None:
    while True:
        try:
            with gradserver.connect() as worker:
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                    os.environ.pop(name, None)  # as `gradserver run` sets them: Accelerate would wait for the others
                return train(worker, Accelerator(cpu=not torch.cuda.is_available()))
        except (gradserver.LeftOutError, gradserver.ConnectionLostError) as error:
            print(f"{error}\njoining again", flush=True)


if __name__ == "__main__":
    main()
