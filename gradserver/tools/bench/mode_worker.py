"""One worker of the suite `modes`, started as ``python -m gradserver.tools.bench.mode_worker``.

It trains as its mode says, and prints one line of JSON: what `Outcome` has. `KINDS` has a function for each kind of
mode: it wraps a module.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradserver
from gradserver import Worker
from gradserver.status import fetch
from gradserver.tools.bench.modes import Mode, Scenario
from gradserver.tools.common.processes import reserve_stdout
from gradserver.tools.demo.corpus import Corpus
from gradserver.tools.demo.model import GPT, state_sha256
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.train import make_optimizer, mean_loss, validation_loss

_TIMEOUT: Final = 300.0
_WARM: Final = 2
"""Steps before the measurement: the first ones allocate."""


@dataclass(frozen=True)
class Outcome:
    """Measurements of one worker.

    Attributes:
        seconds: duration of the training, from the moment when all workers are ready.
        steps: batches that this worker has trained on.
        loss: loss on held-out text.
        weights: hash of the weights, the same at all workers.
        nbytes: bytes between the coordinator and all workers, both ways; 0 at all ranks but the first.
        staleness: mean staleness of this worker's contributions, in rounds.
        most_stale: the largest.
        samples: samples in this worker's batches.
    """

    seconds: float
    steps: int
    loss: float
    weights: str
    nbytes: int
    staleness: float = 0.0
    most_stale: int = 0
    samples: int = 0


Place = tuple[int, int]
"""Step and row of a sample."""


class Update:
    """The update of a module: the learning rate, clipping, and the optimizer's step.

    Attributes:
        settings: the training.
        optimizer: the optimizer.
    """

    def __init__(self, settings: Settings, module: nn.Module) -> None:
        self.settings = settings
        self.optimizer: Optimizer = make_optimizer(module)
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
        updates: yields for each update that a backward leads to, with the share of the training that is done. It gets
            the share of this worker's batches.
        staleness: returns mean and largest staleness of the contributions so far.
        batches: the samples of each of this worker's batches; None for its rows of each step.
    """

    model: nn.Module
    block: Callable[[], AbstractContextManager[None]]
    updates: Callable[[float], Iterable[float]] = lambda progress: (progress,)
    staleness: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
    batches: Iterable[list[Place]] | None = None


def wrap_alone(module: nn.Module, _worker: Worker, _update: Update, _options: dict[str, Any]) -> Trained:
    """Train without exchange: what a step costs by itself."""
    return Trained(module, nullcontext)


def wrap_synchronous(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in each step."""
    model = gradserver.DistributedDataParallel(module, worker, **options)
    return Trained(model, lambda: model.join(update.optimizer))


def wrap_local(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange changes of parameters every few steps."""
    model = gradserver.LocalSGD(module, worker, update.optimizer, **options)
    return Trained(model, model.join)


def wrap_unawaited(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in rounds that do not wait for all workers.

    Workers apply the same updates at different steps of their own. So the learning rate follows the samples that are
    behind the updates, which are the same everywhere.
    """
    model = gradserver.DistributedDataParallel(module, worker, **options)
    model.set_weight(len(update.settings.rows_of(worker.rank)))
    total = update.settings.samples
    late: list[int] = []
    done = 0.0

    def note() -> float:
        nonlocal done
        done += model.total_weight
        return min((done - model.total_weight) / total, 1.0)

    def updates(_progress: float) -> Iterator[float]:
        for _ in model.updates():
            yield note()
        late.append(worker.staleness)

    def staleness() -> tuple[float, int]:
        return sum(late) / len(late), max(late)

    return Trained(model, lambda: model.join(lambda: update(note())), updates, staleness)


def wrap_balanced(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in each step, of parts of its batch that follow the speeds."""
    settings, total = update.settings, update.settings.global_batch
    data = gradserver.BalancedSampler(settings.samples, worker, batch_size=total, shuffle=False)
    model = gradserver.DistributedDataParallel(module, worker, balance=data, **options)
    return _of_samples(model, update, ([divmod(sample, total) for sample in batch] for batch in data))


def wrap_ranges(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients in each step, of ranges that the coordinator hands out, as long as the speeds allow."""
    data = _ranges(worker, update.settings)
    model = gradserver.DistributedDataParallel(module, worker, balance=data, **options)
    return _of_samples(model, update, _places(data, update.settings))


def wrap_cadence(module: nn.Module, worker: Worker, update: Update, options: dict[str, Any]) -> Trained:
    """Exchange gradients of several batches, more of them at faster workers."""
    data, cadence = _ranges(worker, update.settings), gradserver.CadenceOptions(**options)
    model = gradserver.DistributedDataParallel(module, worker, cadence=cadence)
    return _of_samples(model, update, _places(data, update.settings))


def _of_samples(model: gradserver.DistributedDataParallel, update: Update, batches: Iterator[list[Place]]) -> Trained:
    """Weigh each batch by its samples. The learning rate follows the samples behind the updates."""
    done = 0.0

    def note() -> float:
        nonlocal done
        done += model.total_weight
        return min((done - model.total_weight) / update.settings.samples, 1.0)

    def weighed() -> Iterator[list[Place]]:
        for batch in batches:
            model.set_weight(len(batch))
            yield batch

    def updates(_progress: float) -> Iterator[float]:
        for _ in model.updates():
            yield note()

    return Trained(model, lambda: model.join(lambda: update(note())), updates, batches=weighed())


def _ranges(worker: Worker, settings: Settings) -> gradserver.DataRanges:
    return gradserver.DataRanges(settings.samples, worker, batch_size=settings.batch, shuffle=False)


def _places(data: gradserver.DataRanges, settings: Settings) -> Iterator[list[Place]]:
    return ([divmod(sample, settings.global_batch) for sample in batch.tolist()] for batch in data.batches())


KINDS: Final[dict[str, Callable[[nn.Module, Worker, Update, dict[str, Any]], Trained]]] = {
    "alone": wrap_alone,
    "synchronous": wrap_synchronous,
    "local": wrap_local,
    "unawaited": wrap_unawaited,
    "balanced": wrap_balanced,
    "ranges": wrap_ranges,
    "cadence": wrap_cadence,
}
"""The ways to train, by the kind of a mode."""


def train(settings: Settings, mode: Mode, scenario: Scenario, worker: Worker, url: str) -> Outcome:
    """Train this worker's share of the samples."""
    rank = worker.rank
    corpus, module = Corpus.standard_library(settings.context, settings.seed), GPT(settings)
    update = Update(settings, module)
    trained = KINDS[mode.kind](module, worker, update, mode.options_of(rank, scenario.slowness))
    steps, rows = mode.steps_of(rank, settings.steps, scenario.slowness), settings.rows_of(rank)
    cost = _warm_up(settings, corpus, rows)
    worker.barrier()
    before = _traffic(url, worker)
    worker.barrier()
    began = time.perf_counter()
    count = samples = 0
    with trained.block():
        for batch in trained.batches or ([(step, row) for row in rows] for step in range(steps)):
            computed = time.thread_time()  # waiting does not count
            mean = mean_loss(trained.model, *read(corpus, batch))
            # before the gradients are there: no other waits for them then
            slow_down(cost * len(batch), scenario.slowness[rank])
            mean.backward()  # type: ignore[no-untyped-call]
            for progress in trained.updates(count / steps):
                update(progress)
                update.optimizer.zero_grad()
            cost = (time.thread_time() - computed) / len(batch)
            count, samples = count + 1, samples + len(batch)
    seconds = time.perf_counter() - began
    worker.barrier()
    nbytes = _traffic(url, worker) - before
    loss = validation_loss(module, corpus, settings)
    return Outcome(seconds, count, loss, state_sha256(module), nbytes, *trained.staleness(), samples=samples)


def read(corpus: Corpus, batch: list[Place]) -> tuple[Tensor, Tensor]:
    """Make inputs and targets of samples: two [samples, context] tensors."""
    rows: dict[int, list[int]] = {}
    for step, row in batch:
        rows.setdefault(step, []).append(row)
    parts = [corpus.batch(step, found) for step, found in rows.items()]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


def slow_down(computed: float, slowness: float) -> None:
    """Wait as long as a worker that is ``slowness`` times slower would compute more than a step before this one."""
    if slowness > 1:
        time.sleep(computed * (slowness - 1))


def _warm_up(settings: Settings, corpus: Corpus, rows: range) -> float:
    """Train some steps that do not count. Return the seconds that a sample takes."""
    module, began = GPT(settings), 0.0
    for step in range(_WARM):
        began = time.thread_time()
        mean_loss(module, *corpus.batch(step, rows)).backward()  # type: ignore[no-untyped-call]
    return (time.thread_time() - began) / len(rows)


def _traffic(url: str, worker: Worker) -> int:
    """Return the bytes that the coordinator has had and given so far; 0 at all ranks but the first."""
    if worker.rank:
        return 0
    group = fetch(url)["groups"][worker.group]
    return int(group["bytes_in"]) + int(group["bytes_out"])


def main() -> int:
    """Train with the settings of the arguments."""
    parser = argparse.ArgumentParser(prog="gradserver.tools.bench.mode_worker")
    parser.add_argument("--settings", type=Settings.from_json, required=True, help="as Settings.to_json writes")
    parser.add_argument("--mode", type=Mode.from_json, required=True, help="as Mode.to_json writes")
    parser.add_argument("--scenario", type=Scenario.from_json, required=True, help="as Scenario.to_json writes")
    parser.add_argument("--url", required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    tell = reserve_stdout()
    torch.set_num_threads(1)
    mode: Mode = arguments.mode
    how: dict[str, Any] = {"name": f"worker-{arguments.rank}", "timeout": _TIMEOUT, "wire": mode.wire}
    world = arguments.settings.workers
    with gradserver.connect(arguments.url, arguments.rank, world, plane="tcp", **how) as worker:
        outcome = train(arguments.settings, mode, arguments.scenario, worker, arguments.url)
        tell(json.dumps(asdict(outcome)))
    sys.stdin.readline()  # the parent takes a process that ends for one that failed, until it has all answers
    return 0


if __name__ == "__main__":
    sys.exit(main())
