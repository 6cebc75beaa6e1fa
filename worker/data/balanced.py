"""Batches that are cut among unequal workers: each gets a share of every batch by its measured speed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from itertools import islice

from torch.utils.data import Sampler

from gradserver.protocol.balance import shard_sizes
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.nearest import names_keywords
from gradserver.protocol.whole import whole_number
from gradserver.worker.data.permutation import epoch_permutation, key_half, length_of
from gradserver.worker.data.sampler import HasRank
from gradserver.worker.data.sharding import check_rank


class BalancedSampler(Sampler[list[int]]):
    """Batch sampler of one worker: its share of each batch of all workers together.

    For example:

        data = gradserver.BalancedSampler(dataset, worker, batch_size=256)     # samples of all workers together
        model = gradserver.DistributedDataParallel(network, worker, balance=data)
        loader = DataLoader(dataset, batch_sampler=data, num_workers=4)
        for epoch in range(10):
            data.set_epoch(epoch)
            for inputs, targets in loader: ...

    All workers draw the same order for an epoch. Step t takes the samples from t·batch_size on, and each worker a part
    of them, in the order of ranks. At first the parts are equal. The wrapped model measures how long each worker
    computes, and sets the sizes of later steps by that. A loader reads ahead; so new sizes hold from the first step
    that no worker has drawn. The gradients of a worker weigh as many samples as its part has.

    Each batch that a loader yields belongs to one backward. Every sample of an epoch is used once, but for the last
    ones if they are fewer than workers. When a worker is lost, the samples that it had drawn are lost for the epoch. In
    an epoch in which a worker joins, a few are used twice.

    Args:
        dataset_or_length: any object with a length, or the number of samples; the same on every worker.
        worker: worker from `connect` or `LocalCluster`.
        batch_size: number of samples in a batch of all workers together.
        shuffle: true for a new order in each epoch, the same on every worker.
        seed: 0 … 2⁶⁴ - 1, the same on every worker.
        drop_last: true to omit the last batch if it is smaller than the others.

    Attributes:
        epoch: number of the present epoch.
        steps: number of steps in an epoch.

    Raises:
        InvalidArgumentError: the batch is smaller than the number of workers, or an argument is out of range.
    """

    @names_keywords
    def __init__(
        self,
        dataset_or_length: Sized | int,
        worker: HasRank,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.length = length_of(dataset_or_length)
        self.batch_size = whole_number(batch_size, "batch_size", least=1)
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._seed = key_half(seed, "seed")
        rank, world = check_rank(worker.rank, worker.world_size)
        full, self._rest = divmod(self.length, self.batch_size)
        self.steps = full + (self._rest > 0 and not drop_last)
        self._lock = threading.Lock()
        self._shares: deque[tuple[int, int, tuple[float, ...]]] = deque()
        """First step, rank and ratios of each decision that may still hold. Steps count over all epochs."""
        shard_sizes((1 / world,) * world, self.batch_size)
        self._decided((1 / world,) * world, rank, 0)
        self._next = 0
        self._drawn: deque[int] = deque()
        """Sizes of the batches that were dealt, and that the training has not used."""
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Number of the present epoch."""
        return self._epoch

    @property
    def order(self) -> dict[str, int | bool | str]:
        """Parameters that determine an epoch's order and its steps. They are the same on every worker."""
        return {
            "length": self.length,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "batch_size": self.batch_size,
            "drop_last": self._drop_last,
        }

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Choose the order of the next iteration, and the step at which it begins.

        Args:
            epoch: 0 … 2⁶⁴ - 1, the same on every worker.
            step: number of steps of this epoch to omit, the same on every worker, as they were done before a stop.

        Raises:
            InvalidArgumentError: an argument is out of range.
        """
        epoch, step = key_half(epoch, "epoch"), whole_number(step, "step")
        if step > self.steps:
            raise InvalidArgumentError(f"cannot start at step {step}: an epoch has {self.steps} steps")
        with self._lock:
            self._epoch, self._next = epoch, epoch * self.steps + step
            self._drawn.clear()

    def __len__(self) -> int:
        """The number of batches that the next iteration gives."""
        left = (self._epoch + 1) * self.steps - self._next
        return max(left - (0 < self._rest < len(self._shares[-1][2]) and not self._drop_last), 0)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this worker's part of each batch, from the present step to the end of the epoch."""
        epoch = self._epoch
        order = epoch_permutation(self.length, self._seed, epoch) if self._shuffle else None
        with self._lock:
            self._drawn.clear()
            if self._next >= (epoch + 1) * self.steps or self._next < epoch * self.steps:
                self._next = epoch * self.steps
        while True:
            with self._lock:
                step = self._next - epoch * self.steps
                if epoch != self._epoch or not 0 <= step < self.steps:
                    return
                part = self._part(step * self.batch_size, self._next)
                self._next += 1
                if not part:
                    return
                self._drawn.append(len(part))
            yield list(part) if order is None else order[part.start : part.stop].tolist()

    def _part(self, begin: int, step: int) -> range:
        """Return the positions of this worker in the batch that begins at ``begin``."""
        while len(self._shares) > 1 and self._shares[1][0] <= step:
            self._shares.popleft()
        _, rank, ratios = self._shares[0]
        batch = min(self.batch_size, self.length - begin)
        if batch < len(ratios):
            return range(begin, begin)
        sizes = shard_sizes(ratios, batch)
        first = begin + sum(sizes[:rank])
        return range(first, first + sizes[rank])

    # ── for the wrapped model ─────────────────────────────────────────────────────────────────────────

    @property
    def step(self) -> int:
        """Number of steps of the present epoch that the training has used."""
        return self._next - len(self._drawn) - self._epoch * self.steps

    @property
    def drawn(self) -> int:
        """Number of steps that were dealt, over all epochs."""
        return self._next

    def samples(self, batches: int) -> int:
        """Return the samples in the next batches that the training uses."""
        with self._lock:
            return sum(islice(self._drawn, batches))

    def used(self, batches: int) -> None:
        """Note that the training has used so many batches."""
        with self._lock:
            for _ in range(min(batches, len(self._drawn))):
                self._drawn.popleft()

    def deal(self, ratios: Sequence[float], rank: int, step: int, jumps: bool = False) -> None:
        """Deal by other ratios, from ``step`` on. The sampler of a worker that has just joined ``jumps`` there.

        Raises:
            InvalidArgumentError: the batch is too small for so many workers.
        """
        shard_sizes(ratios, self.batch_size)
        with self._lock:
            self._decided(ratios, rank, max(step, self._next))
            if jumps:
                self._next = max(self._next, step)

    def _decided(self, ratios: Sequence[float], rank: int, step: int) -> None:
        while self._shares and self._shares[-1][0] >= step:
            self._shares.pop()
        self._shares.append((step, rank, tuple(ratios)))
