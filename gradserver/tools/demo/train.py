"""The training loop, one for the workers and for the reference in a single process, so that they stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradserver.tools.demo.corpus import Corpus
from gradserver.tools.demo.reports import Step
from gradserver.tools.demo.settings import Settings

# Adam divides a gradient by its size. Where a gradient is little more than rounding error, the usual 1e-8 turns that
# error into a full step. Then two runs that differ in the order of a sum diverge within a hundred steps.
ADAM_EPSILON = 3e-5


def train(
    model: nn.Module,
    corpus: Corpus,
    settings: Settings,
    rows: Sequence[int],
    exchange_seconds: Callable[[], float] = lambda: 0.0,
) -> Iterator[Step]:
    """Train `model` on the given rows of every global batch, and yield each step once it is complete.

    `exchange_seconds` returns the time spent exchanging gradients so far.
    """
    optimizer = make_optimizer(model)
    begin, waited = time.perf_counter(), exchange_seconds()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        loss = mean_loss(model, *corpus.batch(step, rows))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        now, total = time.perf_counter(), exchange_seconds()
        yield Step(step, loss.item(), norm.item(), now - begin, total - waited)
        begin, waited = now, total


def make_optimizer(model: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
    """Make AdamW. Its learning rate is set before each step. ``fused`` is as in torch: one kernel for all of them."""
    options = {"betas": (0.9, 0.95), "eps": ADAM_EPSILON, "weight_decay": 0.1, "fused": fused}
    return torch.optim.AdamW(model.parameters(), lr=0.0, **options)  # type: ignore[arg-type]


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy in nats per byte, averaged over two [rows, time] tensors: a scalar."""
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, settings: Settings) -> float:
    """Compute the mean loss on held-out text, in nats per byte."""
    return mean_loss(model, *corpus.validation(settings.validation_rows)).item()
