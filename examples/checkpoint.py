"""A job that can be stopped at any time. Started again, it continues where it was.

    gradserver serve --workers 2                    # in one terminal: on tcp://127.0.0.1:7411

    export GRADSERVER_URL=tcp://127.0.0.1:7411      # in two others
    python examples/checkpoint.py

Stop one of them with `kill`, or all of them with `kill -9`. Start both again. In the end the weights are those of a run
that was not stopped.
"""

from __future__ import annotations

import hashlib
import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradserver

SAMPLES, BATCH, EPOCHS = 400, 20, 5
DIRECTORY = os.environ.get("CHECKPOINTS", "checkpoints")
PAUSE = float(os.environ.get("PAUSE", "0.1"))  # seconds after each round: time to stop the job


def main() -> None:
    points = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points, (points[:, 1] > torch.sin(2 * points[:, 0])).float())
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    with gradserver.connect() as worker:
        model = gradserver.DistributedDataParallel(network, worker)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        data = gradserver.ShardSampler.for_worker(dataset, worker, seed=17, uneven="keep")
        job = gradserver.Job(model, optimizer, scheduler, data=data, checkpoint=DIRECTORY, every=10)
        print(f"from round {job.round}", flush=True)
        if job.resumed is None:
            torch.manual_seed(worker.rank)  # for dropout; a job that continues has its generators back
        for inputs, targets in job.batches(DataLoader(dataset, BATCH, sampler=data), epochs=EPOCHS):
            loss = F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            job.step()
            time.sleep(PAUSE)
        job.save()
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
        print(f"round {job.round}: weights {hashlib.sha256(weights).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
