"""A small training in a group with a quorum, in which one worker is slow; and its recomputation from the ledger.

Run as ``late_training.py URL RANK WORLD ROUNDS WIRE [TURNS]``. It prints each round when it is done, and at last its
weights. The last worker is slow; with ``TURNS`` all are in turn, as with backups a slower one falls behind for ever.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradserver
from gradserver.engine.commands import Contribution, Reduce
from gradserver.engine.records import RoundRecord
from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.digest import digest
from gradserver.protocol.exchange import ExchangeKey, Layout, Op, Stream
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table
from gradserver.reducer import reduce
from gradserver.worker.client import Worker
from gradserver.worker.member.carryover import CarryOver, Contribution as Late
from tests.worker_programs import say

SEED = 7
SLOW_SECONDS = 0.15
STEP_SECONDS = 0.045
"""About what a step takes, with those in which a worker is slow."""


def new_model() -> nn.Module:
    """Return the model as it is before the first round."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(32, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 5))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: Callable[[Tensor], Tensor], rank: int, number: int) -> Any:  # torch has not typed backward()
    """Return the loss of a rank's batch of a round."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    rows = torch.randn(8, 32, generator=generator)
    return nn.functional.cross_entropy(model(rows), torch.randint(0, 5, (8,), generator=generator))


def weights_of(model: nn.Module) -> int:
    """Return a digest of the model's weights."""
    return digest(np.concatenate([p.detach().numpy().ravel() for p in model.parameters()]).view(np.uint8), 0)


def train(worker: Worker, rounds: int, in_turns: bool) -> int:
    """Train for so many rounds. Return the weights of the model."""
    world, rank = worker.world_size, worker.rank
    module = new_model()
    model, optimizer = gradserver.DistributedDataParallel(module, worker, bucket_cap_mb=0.5), optimizer_of(module)
    for number in range(rounds):
        optimizer.zero_grad()
        if number % 4 == 1 and rank == (number // 4 % world if in_turns else world - 1):
            time.sleep(SLOW_SECONDS)
        loss_of(model, rank, number).backward()
        optimizer.step()
        say(f"round {number} {time.monotonic()}")
    return weights_of(module)


class Recount:
    """The training once more, in one process: the ledger says which contributions count.

    Args:
        plan: the buckets.
        rates: those of data shards.
        world: the number of workers.
    """

    def __init__(self, plan: Plan, rates: Sequence[float], world: int) -> None:
        self.model = new_model()
        self._optimizer = optimizer_of(self.model)
        self._parameters = dict(self.model.named_parameters())
        self._plan, self._table = plan, Table(world, tuple(rates))
        self._table.set_plan(plan)
        self._carry = [CarryOver() for _ in range(world)]

    def take(self, record: RoundRecord) -> None:
        """Compute the next round."""
        given = [self._gradients(rank, record.round) for rank in range(len(self._carry))]
        for part, bucket in enumerate(self._plan.buckets):
            if bucket.operation.op is not Op.MEAN or not bucket.numel:
                continue
            key = ExchangeKey(Stream.BUCKET, record.round, part)
            layout = self._table.share(key, bucket.operation).layout
            heavier = [
                carry.add_to(part, flat[part], 1.0, layout, bucket.operation.dtype)
                for carry, flat in zip(self._carry, given, strict=True)
            ]
            for index in range(layout.count):
                counts = [rank for rank in range(len(given)) if index < counted(record, rank, part, layout)]
                self._combine(key, layout, index, counts, given, heavier)
            self._write(part, given[0][part])
        self._optimizer.step()

    def _gradients(self, rank: int, number: int) -> dict[int, Bytes]:
        """Return what a rank contributes to the buckets of a round, without what it carries over."""
        self._optimizer.zero_grad()
        loss_of(self.model, rank, number).backward()
        found: dict[int, Bytes] = {}
        for part, bucket in enumerate(self._plan.buckets):
            if bucket.operation.op is Op.MEAN:
                grads = [self._parameters[one.name].grad for one in bucket.components]
                flat = np.concatenate([grad.numpy().ravel() for grad in grads if grad is not None])
                found[part] = flat.view(np.uint8).copy()
        return found

    def _combine(
        self,
        key: ExchangeKey,
        layout: Layout,
        index: int,
        counts: Collection[int],
        given: Sequence[dict[int, Bytes]],
        heavier: Sequence[Mapping[int, float]],
    ) -> None:
        """Compute the mean of a slice, in place of what rank 0 gave. Keep what does not count."""
        start, stop = layout.span(index)
        where = slice(start * layout.itemsize, stop * layout.itemsize)
        weights = [more.get(index, 1.0) for more in heavier]
        rows = [Contribution(rank, weights[rank], given[rank][key.part][where].data) for rank in counts]
        for rank in set(range(len(given))).difference(counts):
            self._carry[rank].put(key.part, index, Late(weights[rank], given[rank][key.part][where].copy()))
        operation = self._plan.buckets[key.part].operation
        nbytes = layout.nbytes(index)
        mean = reduce(Reduce("", 1, key, index, operation, start, nbytes, stop - start, None, rows, (), keep=True))
        assert isinstance(mean, Buffer)
        given[0][key.part][where] = np.frombuffer(mean, np.uint8)

    def _write(self, part: int, flat: Bytes) -> None:
        begin, values = 0, torch.from_numpy(flat.view(np.float32).copy())
        for one in self._plan.buckets[part].components:
            parameter = self._parameters[one.name]
            parameter.grad = values[begin : begin + one.numel].view(parameter.shape)
            begin += one.numel


def counted(record: RoundRecord, rank: int, part: int, layout: Layout) -> int:
    """Return up to which slice of a bucket the contribution of ``rank`` counts."""
    if rank >= len(record.weights) or record.weights[rank] == 0:
        return 0
    said = {bucket: slices for giver, bucket, slices in record.cut if giver == rank}
    return said.get(part, 0) if said else layout.count


def main(url: str, rank: int, world: int, rounds: int, wire: str, in_turns: bool) -> None:
    torch.set_num_threads(1)
    with gradserver.connect(url, rank, world, name=f"w{rank}", timeout=60.0, wire=wire) as worker:
        weights = train(worker, rounds, in_turns)
    say(f"weights {weights}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], len(sys.argv) > 6)
