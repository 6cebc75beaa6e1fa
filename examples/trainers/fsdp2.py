"""Train with FSDP2 on a mesh of two dimensions: replicas of shards, with a backend for each dimension.

    torchrun --nproc-per-node=4 examples/trainers/fsdp2.py --replicate gradserver --shard gloo
    torchrun --nproc-per-node=2 examples/trainers/fsdp2.py --shards 2 --shard gradserver

Weights and optimizer go through a checkpoint of torch.distributed.checkpoint in the middle. In the end each rank prints
a digest of the whole weights.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def saved_and_loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save all state, spoil the weights, and load it."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    weights, steps = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": steps}, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load({"model": weights, "optimizer": steps}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicate", default="gradserver", help="backend between replicas, and of the default group")
    parser.add_argument("--shard", default="gradserver", help="backend between the shards of one replica")
    parser.add_argument("--shards", type=int, default=2, help="ranks of one replica")
    given = parser.parse_args()

    dist.init_process_group(given.replicate)
    shape = (dist.get_world_size() // given.shards, given.shards)
    override: Any = {"shard": given.shard, "replicate": given.replicate}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"), backend_override=override)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            saved_and_loaded(model, optimizer)
    sha = hashlib.sha256()
    for parameter in model.parameters():
        whole: Any = parameter
        sha.update(whole.full_tensor().detach().numpy().tobytes())
    kinds = f"replicate {given.replicate}, shard {given.shard}"
    print(f"rank {dist.get_rank()} on {kinds}: weights {sha.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
