"""The position of a job in its data, and the generators of random numbers that it draws from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gradserver.protocol.errors import DisagreementError, InvalidArgumentError, StateError, UsageError
from gradserver.protocol.ranges import pack, unpack
from gradserver.worker.client import Worker
from gradserver.worker.data.balanced import BalancedSampler
from gradserver.worker.data.ranges import DataRanges
from gradserver.worker.data.sampler import ShardSampler
from gradserver.worker.torch_ddp.alike import gather, named
from gradserver.worker.tree import Tree


class Position:
    """The part of an epoch that was used, by this worker and by all.

    Samples count when a loader has given them to the training loop, not when it has read them ahead.

    Args:
        sampler: the job's; the same on every worker, but for its rank.
        place: the rank and world size by which each epoch is dealt; None: always those of the sampler.
    """

    def __init__(self, sampler: ShardSampler, place: Callable[[], tuple[int, int]] | None = None) -> None:
        self.sampler = sampler
        self._place = place
        self.running = False
        """True if a loop goes over the data now."""
        self._used: int | None = None
        """Samples used of this worker's shard; None between epochs."""
        self._counted: int | None = None
        """As many of them as were behind the weights after the last step."""
        self._counts: list[int] = []
        """The same of each rank of the sampler, as last heard."""
        self._resumed = False

    def loader(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> DataLoader[Any]:
        """Return a loader of ``dataset`` for `batches`."""
        return DataLoader(dataset, sampler=self.sampler, **options)

    def epochs(self, stop: int) -> Iterator[int]:
        """Yield each epoch from the present one on, up to ``stop``."""
        while self.sampler.epoch < stop:
            yield self.sampler.epoch
            if self._place is not None:
                self.sampler.rank, self.sampler.world_size = self._place()
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self._used, self._counted, self._counts = None, None, []

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader`` in the present epoch."""
        size = self._batch_size(loader)
        begun, total = self.sampler.start, self.sampler.start + len(self.sampler)
        self._used = self._counted = begun
        for batch in self._iterate(loader):
            self._used = min(self._used + size, total)
            yield batch
        self._used = self._counted = total

    def count(self) -> None:
        """Note that all samples that were used are behind the weights now."""
        self._counted = self._used

    def own(self, waits: bool = False) -> Tree:
        """Return this worker's part of the position, for the others.

        It is that of the last step if this worker ``waits``: what it has used since then is behind gradients that wait
        for their round.
        """
        used = self._counted if waits else self._used
        return {"rank": self.sampler.rank, "of": self.sampler.world_size, "used": used}

    def for_who_joins(self) -> Tree:
        """Return this worker's position, for a learner."""
        sampler = self.sampler
        return {
            "order": sampler.order,
            "epoch": sampler.epoch,
            "begun": self._used is not None,
            "start": self._used or 0,
        }

    def join(self, there: Tree) -> None:
        """Begin where a member is: in the present epoch, as far in this worker's own shard as it is in its own.

        Some of these samples are others' in this epoch; the next one is dealt among all. Raises StateError.
        """
        self._check_order(there)
        self.sampler.set_epoch(there["epoch"])
        self.sampler.set_epoch(there["epoch"], start=min(there["start"], len(self.sampler)))
        self._resumed, self._used = there["begun"], self.sampler.start if there["begun"] else None
        self.count()

    def of_all(self, told: Sequence[Tree]) -> Tree:
        """Return the position for a checkpoint, from the parts of all workers."""
        sampler, counts = self.sampler, self._counts or [0] * self.sampler.world_size
        for one in told:
            if one["of"] == sampler.world_size:  # a worker that joined in this epoch has a shard of its own
                counts[one["rank"]] = one["used"] or 0
        begun = any(one["used"] is not None for one in told)
        self._counts = counts if begun else []
        done = [*sampler.done, tuple(counts)] if begun else list(sampler.done)
        return {"order": sampler.order, "epoch": sampler.epoch, "begun": begun, "done": done}

    def resume(self, saved: Tree) -> None:
        """Continue where a checkpoint says. StateError if it is about other data."""
        self._check_order(saved)
        self.sampler.set_epoch(saved["epoch"], done=saved["done"])
        self._resumed = saved["begun"]
        self._used = self.sampler.start if saved["begun"] else None
        self.count()
        same_workers = len(saved["done"]) > len(self.sampler.done)
        self._counts = list(saved["done"][-1]) if same_workers else []

    def _check_order(self, saved: Tree) -> None:
        if saved["order"] != self.sampler.order:
            raise StateError(f"its data is {saved['order']}, and this job's is {self.sampler.order}")

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin an epoch. A loader draws a seed then; in an epoch that is resumed that was done before."""
        state = chance() if self._resumed else None
        batches = iter(loader)
        if state is not None:
            set_chance(state)
        self._resumed = False
        return batches

    def _batch_size(self, loader: DataLoader[Any]) -> int:
        sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
        if sampler is not self.sampler:
            raise UsageError(
                "job.batches needs a loader that draws from the job's own data=: DataLoader(dataset, sampler=data, …)"
            )
        return getattr(loader.batch_sampler, "batch_size", 1)


class RangesPosition:
    """The position in data that the coordinator hands out. The coordinator knows what is used up.

    Args:
        data: the job's.
    """

    def __init__(self, data: DataRanges) -> None:
        self.data = data
        self.running = False
        """True if a loop goes over the data now."""

    def loader(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> DataLoader[Any]:
        """Return a loader of ``dataset`` for `batches`."""
        sampler: Any = self.data  # torch declares more of it than it needs
        return DataLoader(dataset, batch_sampler=sampler, **options)

    def epochs(self, stop: int) -> Iterator[int]:
        """Yield each epoch from the present one on, up to ``stop``; again, if samples came back."""
        return self.data.epochs(stop)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader`` that this worker gets."""
        return self.data.batches(loader)

    def count(self) -> None:
        """Do nothing: a contribution says what is behind it."""

    def own(self, waits: bool = False) -> Tree:  # noqa: ARG002  # as that of a sampler
        """Return this worker's part of the position: nothing."""
        return None

    def of_all(self, _told: Sequence[Tree]) -> Tree:
        """Return the position for a checkpoint. Between two rounds it is the same for all."""
        epoch, done = self.data.locate()
        return {"order": self.data.order, "epoch": epoch, "done": pack(done)}

    def resume(self, saved: Tree) -> None:
        """Continue where a checkpoint says. StateError if it is about other data."""
        if saved["order"] != self.data.order:
            raise StateError(f"its data is {saved['order']}, and this job's is {self.data.order}")
        self.data.go_on(saved["epoch"], unpack(saved["done"]))

    def for_who_joins(self) -> Tree:
        """Return what the coordinator does not know."""
        return {"order": self.data.order}

    def join(self, there: Tree) -> None:
        """Begin where the others are, which the coordinator knows. StateError if that is other data."""
        if there["order"] != self.data.order:
            raise StateError(f"its data is {there['order']}, and this job's is {self.data.order}")


class StepsPosition:
    """The position in data of which each step takes a batch of all workers together.

    Args:
        data: the job's.
    """

    def __init__(self, data: BalancedSampler) -> None:
        self.data = data
        self.running = False
        """True if a loop goes over the data now."""

    def loader(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> DataLoader[Any]:
        """Return a loader of ``dataset`` for `batches`."""
        return DataLoader(dataset, batch_sampler=self.data, **options)

    def epochs(self, stop: int) -> Iterator[int]:
        """Yield each epoch from the present one on, up to ``stop``."""
        while self.data.epoch < stop:
            yield self.data.epoch
            self.data.set_epoch(self.data.epoch + 1)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader`` in the present epoch."""
        if loader.batch_sampler is not self.data:
            raise UsageError(
                "job.batches needs a loader that draws from the job's own data=: DataLoader(…, batch_sampler=data)"
            )
        yield from loader

    def count(self) -> None:
        """Do nothing: the sampler counts rounds."""

    def own(self, waits: bool = False) -> Tree:  # noqa: ARG002  # as that of a sampler
        """Return this worker's part of the position: it is the same for all."""
        return None

    def of_all(self, _told: Sequence[Tree]) -> Tree:
        """Return the position for a checkpoint, or for a learner."""
        return {"order": self.data.order, "epoch": self.data.epoch, "step": self.data.step}

    def resume(self, saved: Tree) -> None:
        """Continue where a checkpoint says. StateError if it is about other data."""
        if saved["order"] != self.data.order:
            raise StateError(f"its data is {saved['order']}, and this job's is {self.data.order}")
        self.data.set_epoch(saved["epoch"], saved["step"])

    def for_who_joins(self) -> Tree:
        """Return this worker's position, for a learner."""
        return self.of_all(())

    def join(self, there: Tree) -> None:
        """Begin where a member is. The first decision in which this worker counts says from where on it has a share."""
        self.resume(there)


# ── chance ────────────────────────────────────────────────────────────────────────────────────────────


def chance() -> Tree:
    """Return the states of this process's generators: torch's on CPU and present CUDA device, Python's, numpy's."""
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
    }
    cuda: Any = torch.cuda  # torch has not typed the method
    if cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_chance(state: Tree) -> None:
    """Set the generators to these states."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def check_data(data: object) -> None:
    """Raise InvalidArgumentError if this is no data that a job can take."""
    if not isinstance(data, ShardSampler | DataRanges | BalancedSampler):
        raise InvalidArgumentError(
            f"data is a {type(data).__name__}, and must be a gradserver.ShardSampler, BalancedSampler or DataRanges: "
            f"an object with a state_dict can go into state="
        )


def check_same_data(data: ShardSampler | DataRanges | BalancedSampler, worker: Worker) -> None:
    """Compare what all members give as data, for kinds of which each member deals by itself. It is a collective.

    A sampler for another rank or world size than the worker's may be of data that only this worker has.

    Raises:
        DisagreementError: members would use some samples twice and others never. The error names two of them.
    """
    if isinstance(data, DataRanges) or worker.world_size == 1:  # the coordinator compares the former
        return
    own = isinstance(data, BalancedSampler) or (data.rank, data.world_size) == (worker.rank, worker.world_size)
    told = gather(worker, data.order if own else None)
    ranks = [rank for rank, order in enumerate(told) if order is not None]
    for rank in ranks:
        first, usual, order = ranks[0], told[ranks[0]], told[rank]
        if order != usual:
            raise DisagreementError(
                f"{named(worker.names, [first])} has data= with {_told(usual, order)}, and "
                f"{named(worker.names, [rank])} with {_told(order, usual)}: some samples would be used twice, and "
                f"others never. Give the same at all workers"
            )


def _told(order: Tree, other: Tree) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in order.items() if value != other.get(key)) or "nothing else"


def position_of(
    data: ShardSampler | DataRanges | BalancedSampler, worker: Worker
) -> Position | RangesPosition | StepsPosition:
    """Return the position in ``data``. Epochs are dealt by the worker's present rank, if that can change."""
    if isinstance(data, BalancedSampler):
        return StepsPosition(data)
    if isinstance(data, DataRanges):
        return RangesPosition(data)
    own = (data.rank, data.world_size) == (worker.rank, worker.world_size)
    changes = own and not worker._session.membership.needs_all
    return Position(data, (lambda: (worker.rank, worker.world_size)) if changes else None)
