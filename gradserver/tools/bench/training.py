"""The contenders of the suite `train`: steps of a small GPT, and backwards that are emulated by waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradserver
from gradserver.tools.bench.contenders import Contestant, bucket_sizes, wrong
from gradserver.tools.bench.member import Member, pattern
from gradserver.tools.bench.spec import Case, Contender
from gradserver.tools.demo.corpus import Corpus
from gradserver.tools.demo.model import GPT, state_sha256
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.train import mean_loss, validation_loss

LEARNING_RATE = 1e-3


class Step(Contestant):
    """Complete training steps: forward, backward with an exchange, clipping, AdamW.

    Options: `settings` of the model, and `engine`: ``ours``, ``gloo``, ``gloo-bf16`` or ``alone``, which trains
    each replica without an exchange and so measures computing alone. With `warm` a step that is not counted comes
    first: a training finds its own data in the caches.
    """

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self.settings = Settings(**spec.options["settings"])
        self.engine: str = spec.options["engine"]
        self.corpus = _corpus(self.settings)
        self.model = GPT(self.settings)
        self.replica = self._wrap(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.steps = 0
        if self.engine == "gloo":
            _of_torch.append(self)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.engine == "ours":
            return gradserver.DistributedDataParallel(model, self.member.links[self.spec.link])
        if self.engine == "alone":
            return model
        replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.engine == "gloo-bf16":
            # Torch knows its hook by name, and refuses it for CPUs; it works with gloo as well.
            hook = partial(default_hooks.bf16_compress_hook)
            vars(hook).update(__name__="bf16_over_gloo", __qualname__="bf16_over_gloo")
            replica.register_comm_hook(None, hook)
        return replica

    def timed(self, count: int) -> float:
        """Measure steps."""
        if self.spec.options.get("warm"):
            self.once()
        return super().timed(count)

    def once(self) -> None:
        """Train one step, on samples that depend only on the step's number and the rank."""
        rows = self.settings.rows_of(self.member.rank)
        self.optimizer.zero_grad()
        mean_loss(self.replica, *self.corpus.batch(self.steps, rows)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.steps += 1

    def check(self) -> dict[str, Any]:
        """Hash the replica, which must be bit-identical to the others, and compute its loss on held-out text."""
        found: dict[str, Any] = {"wrong": 0}
        if self.engine != "alone":
            found["sha256"] = state_sha256(self.model)
        if self.steps:
            found["loss"] = validation_loss(self.model, self.corpus, self.settings)
            found["steps"] = float(self.steps)
        if self.engine == "ours" and _of_torch and _of_torch[-1].steps == self.steps:
            found["distance"] = distance(self.model, _of_torch[-1].model)
        return found

    def close(self) -> None:
        """Forget the replica."""
        if self in _of_torch:
            _of_torch.remove(self)


class GlooBlocks(Contestant):
    """Counterpart of `Rounds` for gloo: an asynchronous all_reduce for each block, all awaited at the end."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self._blocks = [torch.zeros(size) for size in bucket_sizes(case.numel, spec.options["blocks"])]
        self._wait: float = spec.options.get("wait_s", 0.0) / len(self._blocks)

    def once(self) -> None:
        """Emulate one backward."""
        works = []
        for block in reversed(self._blocks):
            if self._wait:
                time.sleep(self._wait)
            works.append(dist.all_reduce(block, async_op=True))
        for work in works:
            work.wait()

    def check(self) -> dict[str, Any]:
        """Check as `Gloo.check` does."""
        for block in self._blocks:
            block.copy_(pattern(block.numel(), self.member.rank, self.member.workers))
        self.align()
        self.once()
        count = sum(wrong(block / self.member.workers, 0.0) for block in self._blocks)
        for block in self._blocks:
            block.zero_()
        return {"wrong": count}


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two weights at the same place."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


_of_torch: list[Step] = []
"""The replica of torch's own wrapper over gloo, of the present case."""
_corpora: dict[tuple[int, int], Corpus] = {}


def _corpus(settings: Settings) -> Corpus:
    """Read the corpus once, for all contenders of this process."""
    key = (settings.context, settings.seed)
    if key not in _corpora:
        _corpora[key] = Corpus.standard_library(*key)
    return _corpora[key]


TRAINING_KINDS: dict[str, Callable[[Member, Case, Contender], Contestant]] = {"step": Step, "blocks": GlooBlocks}
