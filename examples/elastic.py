"""A job that workers join, and that continues when they die or freeze. A script that starts later joins the others.

    gradserver serve --workers 1:8 --state-dir state   # in one terminal: on tcp://127.0.0.1:7411

    export GRADSERVER_URL=tcp://127.0.0.1:7411         # in any number of others
    python examples/elastic.py

Kill a worker with `kill -9`, and start it again: it gets the state from another worker, and trains with the others.
Stop one with Ctrl-Z, and continue it with `fg` after some seconds: it hears that the others went on without it, and
joins again. Kill the coordinator and start it again: the workers wait for it.
"""

from __future__ import annotations

import hashlib
import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradserver

SAMPLES, BATCH, EPOCHS = 3000, 20, 5
PAUSE = float(os.environ.get("PAUSE", "0.1"))  # seconds after each round: time to disturb the job


def train(worker: gradserver.Worker) -> None:
    """Train from the round that the group is in to the end."""
    points = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points, (points[:, 1] > torch.sin(2 * points[:, 0])).float())
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    model = gradserver.DistributedDataParallel(network, worker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = gradserver.DataRanges(len(dataset), worker, batch_size=BATCH, seed=17)
    job = gradserver.Job(model, optimizer, data=data)
    print(f"{worker.name}: from round {job.round}", flush=True)
    for inputs, targets in job.batches(dataset, epochs=EPOCHS):
        model.set_weight(len(inputs))
        loss = F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        job.step()
        time.sleep(PAUSE)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
    print(f"{worker.name}: round {job.round}, weights {hashlib.sha256(weights).hexdigest()}", flush=True)


def main() -> None:
    while True:
        try:
            with gradserver.connect() as worker:
                return train(worker)
        except (gradserver.LeftOutError, gradserver.ConnectionLostError) as error:
            print(f"{error}\njoining again", flush=True)


if __name__ == "__main__":
    main()
