"""A training script for torch's DistributedDataParallel, as many are. `after_ddp.py` is the same for gradserver.

    torchrun --nproc-per-node 2 examples/before_ddp.py

Rank 0 prints the loss after each epoch.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, CHECKPOINT = 4, 32, os.environ.get("CHECKPOINT", "before.pt")


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
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = texts(1024, 1), texts(128, 2)
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    sampler = DistributedSampler(train, seed=17)
    loader, step, first = DataLoader(train, BATCH, sampler=sampler), 0, 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first, step = saved["epoch"] + 1, saved["step"]
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for (symbols,) in loader:
            optimizer.zero_grad()
            loss_of(model, symbols).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
        if dist.get_rank() == 0:
            both = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save({"model": model.module.state_dict(), **both, "epoch": epoch, "step": step}, CHECKPOINT)
        with torch.no_grad():
            loss = loss_of(model.module, test.tensors[0][dist.get_rank() :: dist.get_world_size()])
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, step {step}: loss {loss.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
