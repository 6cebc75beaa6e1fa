"""The contenders of the suite `train`: steps of a small GPT, and backwards that are emulated by waiting."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import gradserver
import gradserver.torch
from gradserver.tools.bench.contenders import Contestant, bucket_sizes, wrong
from gradserver.tools.bench.cost import Phases, Usage, median_of
from gradserver.tools.bench.many import ManyInThreads, ManyParameters
from gradserver.tools.bench.member import Member, pattern
from gradserver.tools.bench.spec import Case, Contender
from gradserver.tools.demo.corpus import Corpus
from gradserver.tools.demo.model import GPT, state_sha256
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.train import mean_loss, validation_loss

LEARNING_RATE = 1e-3
_ONE_BUCKET_MB = 1 << 20


class Step(Contestant):
    """Complete training steps: forward, backward with an exchange, clipping, AdamW.

    All replicas begin with the same weights, and have the same samples at the same step. Options: `settings` of the
    model; `engine`; and for a PowerSGD hook `start`, the step at which it begins to compress. Engines:

        ours      the wrapper of this project
        ddp       torch's wrapper over gloo, or with a plane over the backend of this project
        own       `gradserver.torch.DistributedDataParallel` over that backend
        alone     no exchange: this measures computing alone
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
        self._usages: list[Usage] = []
        self._phases: list[Phases] = []
        self._last_gradient = 0.0
        for parameter in self.model.parameters():
            hooked: Any = parameter  # torch has not typed the method
            hooked.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def _wrap(self, model: nn.Module) -> nn.Module:
        # The seed gives all of them the same weights: nothing of them needs to travel over a slow link.
        if self.engine == "ours":
            return gradserver.DistributedDataParallel(model, self.member.links[self.spec.link], init_sync=False)
        if self.engine == "alone":
            return model
        group = self.member.process_group(self.spec.plane) if self.spec.plane else None
        if self.engine == "own":
            return gradserver.torch.DistributedDataParallel(model, process_group=group, init_sync=False)
        hook, _, rank = self.spec.wire.partition(":")
        # Of several buckets at once PowerSGD makes its reductions in the order in which gloo's threads come to them,
        # which differs between ranks. They then meet the wrong ones, and the process is aborted.
        cap = _ONE_BUCKET_MB if hook == "powersgd" else None
        replica = nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=cap
        )
        if hook == "bf16":
            # Torch knows its hook by name, and refuses it for CPUs; it works with gloo as well.
            over_gloo = partial(default_hooks.bf16_compress_hook)
            vars(over_gloo).update(__name__="bf16_over_gloo", __qualname__="bf16_over_gloo")
            replica.register_comm_hook(None, over_gloo)
        elif hook == "powersgd":
            state = PowerSGDState(None, int(rank), self.spec.options["start"])
            replica.register_comm_hook(state, powerSGD_hook)
        return replica

    def once(self) -> None:
        """Train one step, on samples that depend only on the step's number and the rank."""
        before, began = self.member.usage(), time.perf_counter()
        rows = self.settings.rows_of(self.member.rank)
        self.optimizer.zero_grad()
        loss = mean_loss(self.replica, *self.corpus.batch(self.steps, rows))
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = time.perf_counter()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.steps += 1
        last = self._last_gradient
        self._phases.append(Phases(forward - began, last - forward, backward - last, time.perf_counter() - backward))
        self._usages.append(self.member.usage() - before)

    def check(self) -> dict[str, Any]:
        """Hash the replica, which must be bit-identical to the others, and compute its loss on held-out text."""
        if not self.steps:
            return {"wrong": 0}
        found: dict[str, Any] = {"wrong": 0, "steps": float(self.steps), **self._figures()}
        found["loss"] = validation_loss(self.model, self.corpus, self.settings)
        if self.engine == "alone":
            return found
        if self.engine == "ddp" and self.spec.wire == "fp32":
            _of_torch[self.settings] = self.steps, [one.detach().clone() for one in self.model.parameters()]
        elif self.engine != "ddp" and (peer := _of_torch.get(self.settings)) and peer[0] == self.steps:
            found["distance"] = distance(self.model, peer[1])
        return {**found, "sha256": state_sha256(self.model)}

    def _figures(self) -> dict[str, float]:
        return {**median_of(self._phases).to_json(), **median_of(self._usages).to_json()}

    def close(self) -> None:
        """Forget the replica: its wrapper and its gradients are in circles of references."""
        del self.replica, self.model, self.optimizer
        gc.collect()


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


def distance(model: nn.Module, peer: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of two weights at the same place."""
    pairs = zip(model.parameters(), peer, strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


_of_torch: dict[Settings, tuple[int, list[torch.Tensor]]] = {}
"""Steps and weights of the replica that torch's own wrapper has trained last, by the training's settings."""
_corpora: dict[tuple[int, int], Corpus] = {}


def _corpus(settings: Settings) -> Corpus:
    """Read the corpus once, for all contenders of this process."""
    key = (settings.context, settings.seed)
    if key not in _corpora:
        _corpora[key] = Corpus.standard_library(*key)
    return _corpora[key]


TRAINING_KINDS: dict[str, Callable[[Member, Case, Contender], Contestant]] = {
    "step": Step,
    "blocks": GlooBlocks,
    "parameters": ManyParameters,
    "parameter threads": ManyInThreads,
}
