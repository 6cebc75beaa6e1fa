"""The training loop: one for the workers and for the single-process reference, so that the two cannot drift."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradserver.demo.corpus import Corpus
from gradserver.demo.settings import Settings


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of one process did. `loss` is the mean over this process's own rows, in nats per byte."""

    step: int
    loss: float
    seconds: float
    exchange_seconds: float  # share of `seconds` spent waiting for the exchange of gradients


def train(
    model: nn.Module,
    corpus: Corpus,
    settings: Settings,
    rows: Sequence[int],
    exchange_seconds: Callable[[], float] = lambda: 0.0,
) -> Iterator[Step]:
    """Trains `model` on the given rows of every global batch and yields each step once it is complete.

    `exchange_seconds` returns the time spent exchanging gradients since the start of the run.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    begin, waited = time.perf_counter(), exchange_seconds()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        inputs, targets = corpus.batch(step, rows)
        loss = mean_loss(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        now, total = time.perf_counter(), exchange_seconds()
        yield Step(step, loss.item(), now - begin, total - waited)
        begin, waited = now, total


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats per byte, averaged over two [rows, time] tensors: a scalar."""
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, settings: Settings) -> float:
    """Mean loss on held-out text, in nats per byte."""
    return mean_loss(model, *corpus.validation(settings.validation_rows)).item()
