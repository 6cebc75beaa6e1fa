"""The kinds of modes: `KINDS` has a function for each, which wraps a module and says what a loop does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np
from torch import nn
from torch.optim import Optimizer

import gradserver
from gradserver import Worker
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.train import make_optimizer

Place = tuple[int, int]
"""Step and row of a sample."""
Batch = list[Place]

_LEAST_PART: Final = 8
"""Samples in a batch of a cadence, at least, if there are two in one batch of the other modes."""
_LEAST_PARTS: Final = 2


class Update:
    """The update of a module: the learning rate, clipping, and the optimizer's step.

    Attributes:
        settings: the training.
        optimizer: the optimizer.
    """

    def __init__(self, settings: Settings, module: nn.Module) -> None:
        self.settings = settings
        self.optimizer: Optimizer = make_optimizer(module, fused=True)
        self._parameters = list(module.parameters())

    def __call__(self, progress: float) -> None:
        """Update, when a share ``progress`` of the training is done."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(progress * self.settings.steps)
        nn.utils.clip_grad_norm_(self._parameters, self.settings.clip_norm)
        self.optimizer.step()


class Trained(NamedTuple):
    """A module as a mode trains it.

    Attributes:
        model: what the loop calls.
        block: makes the context of the loop, for workers with different numbers of batches.
        batches: the samples of each of this worker's batches.
        updates: yields for each update that a backward leads to, with the share of the training that is done. It gets
            the share that is behind the batch.
        staleness: returns mean and largest staleness of the contributions so far.
    """

    model: nn.Module
    block: Callable[[], AbstractContextManager[None]]
    batches: Iterable[Batch]
    updates: Callable[[float], Iterable[float]] = lambda progress: (progress,)
    staleness: Callable[[], tuple[float, int]] = lambda: (0.0, 0)


def wrap_synchronous(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in each step."""
    model = gradserver.DistributedDataParallel(module, worker, **options)

    def repeat() -> None:  # by a worker that has run out of batches: all have as many
        update(worker.round / update.settings.steps)

    return Trained(model, lambda: model.join(repeat), equal_batches(update.settings, worker.rank))


def wrap_balanced(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in each step, of parts of its batch that follow the speeds."""
    settings, total = update.settings, update.settings.global_batch
    data = gradserver.BalancedSampler(settings.samples, worker, batch_size=total, shuffle=False)
    model = gradserver.DistributedDataParallel(module, worker, balance=data, **options)
    return _of_samples(model, worker, update, (_places(batch, settings) for batch in data))


def wrap_ranges(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in each step, of ranges that the coordinator hands out, as long as the speeds allow."""
    data = _ranges(worker, update.settings, update.settings.batch)
    model = gradserver.DistributedDataParallel(module, worker, balance=data, **options)
    return _of_samples(model, worker, update, _taken(data, update.settings))


def wrap_cadence(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients of several batches, more of them at faster workers.

    Batches are parts of those of other modes, so that an update is of as many samples. The more parts there are, the
    better their numbers follow the speeds, and the more time goes into what a batch costs whatever its size.
    """
    settings = update.settings
    parts = min(max(settings.batch // _LEAST_PART, _LEAST_PARTS), settings.batch)
    cadence = gradserver.CadenceOptions(anchor=parts, max_total=parts * settings.workers, **options)
    model = gradserver.DistributedDataParallel(module, worker, cadence=cadence)
    data = _ranges(worker, settings, settings.batch // parts)
    return _of_samples(model, worker, update, _taken(data, settings))


def wrap_unawaited(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in rounds that do not wait for all workers. Faster workers take more of the samples."""
    data = _ranges(worker, update.settings, update.settings.batch)
    model = gradserver.DistributedDataParallel(module, worker, **options)
    return _of_samples(model, worker, update, _taken(data, update.settings))


def wrap_local(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange changes of parameters every few steps. With ``balance``, faster workers take more of the samples."""
    model, settings = gradserver.LocalSGD(module, worker, update.optimizer, **options), update.settings
    if not options.get("balance"):
        return Trained(model, model.join, equal_batches(settings, worker.rank))
    batches = _taken(_ranges(worker, settings, settings.batch), settings)
    return Trained(model, model.join, _weighed(model, batches))


def equal_batches(settings: Settings, rank: int) -> Iterator[Batch]:
    """Yield a worker's rows of each step."""
    rows = settings.rows_of(rank)
    return ([(step, row) for row in rows] for step in range(settings.steps))


def _of_samples(
    model: gradserver.DistributedDataParallel, worker: Worker, update: Update, batches: Iterator[Batch]
) -> Trained:
    """Weigh each batch by its samples. The learning rate follows the samples behind the updates.

    Where rounds do not wait for all, workers apply the same updates at different steps of their own. The samples behind
    the updates are the same everywhere.
    """
    done = 0.0
    late: list[int] = []

    def note() -> float:
        nonlocal done
        done += model.total_weight
        return min((done - model.total_weight) / update.settings.samples, 1.0)

    def updates(_progress: float) -> Iterator[float]:
        for _ in model.updates():
            yield note()
        late.append(worker.staleness)

    def staleness() -> tuple[float, int]:
        return sum(late) / max(len(late), 1), max(late, default=0)

    return Trained(model, lambda: model.join(lambda: update(note())), _weighed(model, batches), updates, staleness)


def _weighed(
    model: gradserver.DistributedDataParallel | gradserver.LocalSGD, batches: Iterable[Batch]
) -> Iterator[Batch]:
    for batch in batches:
        model.set_weight(len(batch))
        yield batch


def _ranges(worker: Worker, settings: Settings, batch: int) -> gradserver.DataRanges:
    return gradserver.DataRanges(settings.samples, worker, batch_size=batch, shuffle=False)


def _taken(data: gradserver.DataRanges, settings: Settings) -> Iterator[Batch]:
    return (_places(np.asarray(batch).tolist(), settings) for batch in data.batches())


def _places(samples: Iterable[int], settings: Settings) -> Batch:
    return [divmod(sample, settings.global_batch) for sample in samples]


KINDS: Final[dict[str, Callable[[nn.Module, Worker, Update, dict[str, Any]], Trained]]] = {
    "synchronous": wrap_synchronous,
    "balanced": wrap_balanced,
    "ranges": wrap_ranges,
    "cadence": wrap_cadence,
    "unawaited": wrap_unawaited,
    "local": wrap_local,
}
"""The ways to train, by the kind of a mode."""
