"""One worker of the suite `modes`, started as ``python -m gradserver.tools.bench.mode_worker``.

It takes requests on standard input and answers on standard output, one line of JSON each. So one start, and one import
of torch, is enough for the trainings of a scenario:

    {"do": "alone", "seconds": …}          train a copy without exchange          {"rate": …}
    {"do": "train", "mode": …, "url": …}   train as a mode says                   what `Outcome` has
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass
from itertools import cycle
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

import gradserver
from gradserver import Worker
from gradserver.status import fetch
from gradserver.tools.bench.machine import await_kernels
from gradserver.tools.bench.mode_kinds import KINDS, Batch, Update, equal_batches
from gradserver.tools.bench.modes import Mode, Scenario
from gradserver.tools.common.processes import reserve_stdout
from gradserver.tools.demo.corpus import Corpus
from gradserver.tools.demo.model import GPT, state_sha256
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.train import mean_loss, validation_loss

_TIMEOUT: Final = 300.0
_WARM: Final = 2
"""Steps before a measurement: the first ones allocate."""
_STEPS_OF_COST: Final = 15
"""Steps that say how long a sample takes."""


@dataclass(frozen=True)
class Outcome:
    """Measurements of one worker.

    Attributes:
        began: moment when all workers were ready, in seconds of this machine's monotonic clock.
        ended: moment when the training was over.
        loss: loss on held-out text.
        weights: hash of the weights, the same at all workers.
        nbytes: bytes between the coordinator and all workers, both ways; 0 at all ranks but the first.
        batches: moment of the end, and number of samples, of each of this worker's batches.
        processor: seconds of processor time, of all threads.
        staleness: mean staleness of this worker's contributions, in rounds.
        most_stale: the largest.
    """

    began: float
    ended: float
    loss: float
    weights: str
    nbytes: int
    batches: list[tuple[float, int]]
    processor: float
    staleness: float = 0.0
    most_stale: int = 0


class Device:
    """A device that is ``slowness`` times slower than this one: it waits in each step, and takes no core meanwhile.

    It waits before each block's forward, and twice as long before each block's backward, as computation is spread over
    a step. So gradients are there as early as they would be on a slower device. Its speed is steady, though this
    machine's is not: it waits as long as the median of its last steps says.
    """

    def __init__(self, slowness: float) -> None:
        self._slowness = slowness
        self._began = self._part = 0.0
        self._costs: deque[float] = deque([0.0], maxlen=_STEPS_OF_COST)
        """Seconds of a sample in the last steps. Time spent in waiting does not count."""

    def slow_down(self, module: GPT) -> None:
        """Compute ``module`` as slowly as the device does."""
        if self._slowness > 1:
            for block in module.blocks:
                block.register_forward_hook(self._computed)

    def begin(self, samples: int, blocks: int) -> None:
        """Begin a step of so many samples."""
        self._part = median(self._costs) * samples * (self._slowness - 1) / (3 * blocks)
        self._began = time.thread_time()

    def _computed(self, _block: nn.Module, _inputs: object, output: Tensor) -> None:
        time.sleep(self._part)
        if output.requires_grad:
            output.register_hook(self._differentiated)  # type: ignore[no-untyped-call]

    def _differentiated(self, _gradient: Tensor) -> None:
        time.sleep(2 * self._part)

    def end(self, samples: int) -> None:
        """End a step."""
        self._costs.append((time.thread_time() - self._began) / samples)


class Trainer:
    """The trainings of one worker, one after the other."""

    def __init__(self, settings: Settings, scenario: Scenario, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._corpus = Corpus.standard_library(settings.context, settings.seed)
        self._device = Device(scenario.slowness[rank])
        self._copy = self._new_model()
        self._update = Update(settings, self._copy)
        self._batches = cycle(list(equal_batches(settings, rank))[:16])
        for _ in range(_WARM):
            self._alone()

    def _new_model(self) -> GPT:
        module = GPT(self._settings)
        self._device.slow_down(module)
        return module

    def rate(self, seconds: float) -> float:
        """Train a copy without exchange, for so many seconds. Return the samples per second."""
        began, samples = time.monotonic(), 0
        while (now := time.monotonic()) - began < seconds:
            samples += self._alone()
        return samples / (now - began)

    def _alone(self) -> int:
        batch = next(self._batches)
        self._begin(batch)
        self._backward(self._copy, batch)
        self._update(0.0)
        self._update.optimizer.zero_grad()
        self._device.end(len(batch))
        return len(batch)

    def _begin(self, batch: Batch) -> None:
        self._device.begin(len(batch), self._settings.blocks)

    def _backward(self, model: nn.Module, batch: Batch) -> None:
        mean_loss(model, *read(self._corpus, batch)).backward()  # type: ignore[no-untyped-call]

    def train(self, mode: Mode, worker: Worker, url: str) -> Outcome:
        """Train this worker's share of the samples."""
        settings, device = self._settings, self._device
        module = self._new_model()
        update = Update(settings, module)
        trained = KINDS[mode.kind](module, worker, update, mode.options)
        batches: list[tuple[float, int]] = []
        before = _traffic(url, worker)
        worker.barrier()
        began, processor = time.monotonic(), time.process_time()
        with trained.block():
            for batch in trained.batches:
                self._begin(batch)
                self._backward(trained.model, batch)
                for progress in trained.updates(batch[0][0] / settings.steps):
                    update(progress)
                    update.optimizer.zero_grad()
                device.end(len(batch))
                batches.append((time.monotonic(), len(batch)))
        ended, processor = time.monotonic(), time.process_time() - processor
        worker.barrier()
        nbytes = _traffic(url, worker) - before
        loss = validation_loss(module, self._corpus, settings)
        weights = state_sha256(module)
        return Outcome(began, ended, loss, weights, nbytes, batches, processor, *trained.staleness())


def read(corpus: Corpus, batch: Batch) -> tuple[Tensor, Tensor]:
    """Make inputs and targets of samples: two [samples, context] tensors."""
    rows: dict[int, list[int]] = {}
    for step, row in batch:
        rows.setdefault(step, []).append(row)
    parts = [corpus.batch(step, found) for step, found in rows.items()]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


def _traffic(url: str, worker: Worker) -> int:
    """Return the bytes that the coordinator has had and given so far; 0 at all ranks but the first."""
    if worker.rank:
        return 0
    group = fetch(url)["groups"][worker.group]
    return int(group["bytes_in"]) + int(group["bytes_out"])


def answer(trainer: Trainer, settings: Settings, rank: int, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request, and return the answer."""
    if request["do"] == "alone":
        return {"rate": trainer.rate(request["seconds"])}
    mode, url = Mode.from_json(request["mode"]), request["url"]
    how: dict[str, Any] = {"name": f"worker-{rank}", "timeout": _TIMEOUT, "wire": mode.wire}
    with gradserver.connect(url, rank, settings.workers, plane="tcp", **how) as worker:
        outcome = asdict(trainer.train(mode, worker, url))
    gc.collect()  # hooks and their module refer to each other
    return outcome


def main() -> int:
    """Answer requests until the parent ends this process, or has ended itself."""
    parser = argparse.ArgumentParser(prog="gradserver.tools.bench.mode_worker")
    parser.add_argument("--settings", type=Settings.from_json, required=True, help="as Settings.to_json writes")
    parser.add_argument("--scenario", type=Scenario.from_json, required=True, help="as Scenario.to_json writes")
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    tell = reserve_stdout()
    torch.set_num_threads(1)
    await_kernels()
    settings, rank = arguments.settings, arguments.rank
    trainer = Trainer(settings, arguments.scenario, rank)
    for line in sys.stdin:
        try:
            tell(json.dumps(answer(trainer, settings, rank, json.loads(line))))
        except Exception as error:  # any error: the parent shows it and ends the run
            traceback.print_exc()
            tell(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
