"""The training script of `before_ddp.py` for gradserver. Killed at any moment and started again, it goes on.

    gradserver serve --workers 2                    # in one terminal: on tcp://127.0.0.1:7411

    export GRADSERVER_URL=tcp://127.0.0.1:7411      # in two others
    python examples/after_ddp.py

Rank 0 prints the loss after each epoch.
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradserver

EPOCHS, BATCH, CHECKPOINTS = 4, 32, os.environ.get("CHECKPOINTS", "checkpoints")


def texts(count, seed):
    symbols = torch.randint(16, (count, 24), generator=torch.Generator().manual_seed(seed))
    for place in range(2, 24):
        symbols[:, place] = (3 * symbols[:, place - 1] + symbols[:, place - 2]) % 16
    return TensorDataset(symbols)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols, self.places = nn.Embedding(16, 64), nn.Embedding(23, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 16)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(23))

    def forward(self, symbols):
        return self.head(self.block(self.symbols(symbols) + self.places.weight, src_mask=self.mask, is_causal=True))


def loss_of(model, symbols):
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model(symbols[:, :-1]).flatten(0, 1).float(), symbols[:, 1:].flatten())


def main():
    worker = gradserver.connect()
    torch.manual_seed(0)
    train, test = texts(1024, 1), texts(128, 2)
    model = gradserver.DistributedDataParallel(Model(), worker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    sampler = gradserver.ShardSampler.for_worker(train, worker, seed=17)
    job = gradserver.Job(
        model, optimizer, scheduler, data=sampler, checkpoint=CHECKPOINTS, every=10, clip_grad_norm=1.0
    )
    for epoch in range(sampler.epoch, EPOCHS):
        for (symbols,) in job.batches(DataLoader(train, BATCH, sampler=sampler), epochs=epoch + 1):
            loss_of(model, symbols).backward()
            job.step()
        with torch.no_grad():
            loss = loss_of(model.module, test.tensors[0][worker.rank :: worker.world_size])
        worker.all_reduce(loss)
        if worker.rank == 0:
            print(f"epoch {epoch}, step {job.round}: loss {loss.item():.3f}", flush=True)
    worker.close()


if __name__ == "__main__":
    main()
