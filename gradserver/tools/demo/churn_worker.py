"""One worker of a demo run in which workers are killed and others join: an elastic training script.

The runner starts it as ``python -m gradserver.tools.demo.churn_worker``. When it is ready, it waits for a line on
standard input, so that the parent chooses the time at which it joins. It prints its reports to standard output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gradserver import DataRanges, DistributedDataParallel, GradServerError, Job, Worker, connect
from gradserver.protocol.ranges import count
from gradserver.tools.demo.corpus import Corpus
from gradserver.tools.demo.model import GPT
from gradserver.tools.demo.reports import Joined, Ready, Report, Round, TooLate
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.train import make_optimizer, mean_loss
from gradserver.tools.demo.worker import assess, parser_of, prepare

Sample = tuple[Tensor, Tensor, int]
"""Inputs, targets, and number of a sample."""


def main() -> int:
    """Train with the settings of the arguments."""
    parser = parser_of("gradserver.tools.demo.churn_worker")
    parser.add_argument("--url", required=True, help="the coordinator")
    parser.add_argument("--name", required=True, help="name of this worker")
    parser.add_argument("--founds", action="store_true", help="whether the group begins with it")
    parser.add_argument("--save", type=Path, required=True, help="file for the trained weights, for rank 0")
    arguments = parser.parse_args()
    settings: Settings = arguments.settings

    tell, corpus, model = prepare(settings, arguments.threads)
    optimizer = make_optimizer(model)  # torch loads modules for the first one, which takes seconds
    tell(Ready(corpus.sha256))
    if not sys.stdin.readline():
        return 1  # the parent has ended
    world = settings.workers if arguments.founds else None
    try:
        worker = connect(arguments.url, world_size=world, name=arguments.name, wire=settings.wire)
        course = Course(settings, model, optimizer, worker, tell)
    except GradServerError as error:
        tell(TooLate(str(error), time.monotonic()))
        return 0
    with worker:
        course.run(corpus)
        rank = worker.rank
    if rank == 0:
        torch.save(model.state_dict(), arguments.save)
    tell(assess(model, corpus, settings, rank, sample=True))
    return 0


class Samples(Dataset[Sample]):
    """Samples of an undisturbed run, in its order: number n is row n mod B of step n div B."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self._corpus, self._settings = corpus, settings

    def __len__(self) -> int:
        return self._settings.samples

    def __getitem__(self, number: int) -> Sample:
        step, row = divmod(number, self._settings.global_batch)
        inputs, targets = self._corpus.batch(step, [row])
        return inputs[0], targets[0], number


class Course:
    """Training of one worker. After construction it has the group's state, and is about to begin."""

    def __init__(
        self,
        settings: Settings,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        worker: Worker,
        tell: Callable[[Report], None],
    ) -> None:
        self._settings, self._optimizer, self._worker, self._tell = settings, optimizer, worker, tell
        self._replica = DistributedDataParallel(model, worker)
        self._data = DataRanges(settings.samples, worker, batch_size=settings.batch, shuffle=False)
        self._job = Job(self._replica, self._optimizer, data=self._data)  # a learner receives the state here
        self._used = self._count_used()
        self._share()
        self._loss: Tensor | None = None
        self._numbers: list[int] = []
        self._began, self._waited = time.monotonic(), self._replica.exchange_seconds
        tell(Joined(self._began, *(worker.arrival or ())))

    def run(self, corpus: Corpus) -> None:
        """Train on the leases of the coordinator, until every sample is used."""
        for inputs, targets, numbers in self._job.batches(Samples(corpus, self._settings), step=self.step):
            self._replica.set_weight(len(inputs))
            self._loss, self._numbers = mean_loss(self._replica, inputs, targets), numbers.tolist()
            self._loss.backward()  # type: ignore[no-untyped-call]
            self.step()

    def step(self) -> None:
        """Step with all others, also without a batch, and report the round."""
        self._job.step(before=self._prepare)
        self._used = self._count_used()
        self._share()
        now, waited = time.monotonic(), self._replica.exchange_seconds
        number, workers = self._job.round - 1, self._worker.world_size
        loss = None if self._loss is None else self._loss.item()
        spent, exchange = now - self._began, waited - self._waited
        self._tell(Round(number, loss, self._numbers, self._used, workers, spent, exchange, now))
        self._began, self._waited = now, waited
        self._loss, self._numbers = None, []

    def _prepare(self) -> None:
        """Clip the gradient, and set the learning rate by the samples used so far, equal at all workers."""
        rate = self._settings.learning_rate_at(self._used / self._settings.global_batch)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(self._replica.parameters(), self._settings.clip_norm)

    def _count_used(self) -> int:
        _, used = self._data.locate()
        return count(used)

    def _share(self) -> None:
        """Divide the batch of an undisturbed step among all present members."""
        worker = self._worker
        self._data.batch_size = len(range(worker.rank, self._settings.global_batch, worker.world_size))


if __name__ == "__main__":
    sys.exit(main())
