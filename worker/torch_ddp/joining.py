"""The checks of a block of `join`: does a worker without batches do what the loop does to weights?

A worker that has run out of batches steps by the averaged gradients, as the loop of the others should. If a loop does
more, these diverge:

    the loop                                              found by          when
    ────────────────────────────────────────────────────  ────────────────  ─────────────────────────────
    clips or unscales gradients, adds noise               `GivenGradients`  at its first step, beforehand
    clamps weights, steps a scheduler, or an average of   `check_alike`     at the end of the block
    weights that is a part of the module

The first check is local, and the second is one small collective for each block.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradserver.protocol.errors import DivergedError, UsageError
from gradserver.worker.client import Worker
from gradserver.worker.member.learner import Stage
from gradserver.worker.torch_ddp.alike import digest_of_all, gather, named
from gradserver.worker.torch_ddp.buckets import GradientBucket

_SAMPLED: Final = 64
_REMEDY: Final = (
    "Give model.join a function that does all of it, from clipping to schedulers and averages of weights, and call "
    "the same function in the loop"
)


class GivenGradients:
    """The averaged gradients of the latest exchange, as the loop got them."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[str, Tensor | None, int]] = {}
        self._flats: list[tuple[Tensor, int]] = []
        self._sampled: list[nn.Parameter] = []
        self._samples: list[Tensor] = []

    def note(self, buckets: Iterable[GradientBucket]) -> None:
        """Note the gradients, when an exchange has handed them out."""
        self._given.clear()
        self._flats = [(bucket.flat, bucket.flat._version) for bucket in buckets]
        ends = (slot.parameter for bucket in buckets for slot in (bucket.slots[0], bucket.slots[-1]))
        self._sampled = [parameter for parameter in ends if parameter.grad is not None]
        self._samples = [_sample(parameter.grad).clone() for parameter in self._sampled]
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            gradient = slot.parameter.grad
            self._given[id(slot.parameter)] = slot.name, gradient, 0 if gradient is None else gradient._version

    def check(self, optimizer: Optimizer) -> None:
        """Raise UsageError if ``optimizer`` is about to step by other gradients than those."""
        name = self._changed(optimizer)
        if name is not None:
            raise UsageError(
                f"in this block of model.join() the loop changes the averaged gradient of {name!r} between backward() "
                f"and the optimizer's step: it clips, or steps through a GradScaler, say. Workers that have run out of "
                f"batches would not do so, and replicas would diverge. {_REMEDY}. To clip only, wrap the module with "
                f"clip_grad_norm="
            )

    def _changed(self, optimizer: Optimizer) -> str | None:
        """Return the name of a parameter with another gradient; None if all are as they were given."""
        scaled = getattr(optimizer, "grad_scale", None) is not None or self._are_other_values()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if (given := self._given.get(id(parameter))) is not None:
                name, gradient, version = given
                now = parameter.grad
                if scaled or now is not gradient or (now is not None and now._version != version):
                    return name
        return None

    def _are_other_values(self) -> bool:
        """Return whether the gradients have changed by what counts for no change: a GradScaler, say."""
        if any(flat._version != version for flat, version in self._flats):
            return True
        there = [(parameter.grad, one) for parameter, one in zip(self._sampled, self._samples, strict=True)]
        return any(grad is not None and not _is_same(_sample(grad), one) for grad, one in there)


def _sample(gradient: Tensor | None) -> Tensor:
    """Return some elements of a gradient."""
    assert gradient is not None
    row = gradient.detach()
    while row.dim() > 1:
        row = row[row.shape[0] // 2]
    return row.reshape(-1)[:_SAMPLED]


def _is_same(now: Tensor, then: Tensor) -> bool:
    return now.shape == then.shape and bool(((now == then) | (then != then)).all())


def check_alike(worker: Worker, module: nn.Module, ignored: Collection[str], optimizers: Sequence[object]) -> None:
    """Compare weights and optimizers after the end of a block of `join` at all members. It is a collective.

    Raises:
        DivergedError: they differ. The error names the members that differ from most.
    """
    if worker.world_size == 1 or worker._session.stage is not Stage.MEMBER:
        return  # a learner takes part in collectives when its first round is over
    weights = [parameter for name, parameter in module.named_parameters() if name not in ignored]
    known = list(dict.fromkeys(one for one in optimizers if isinstance(one, Optimizer)))
    mine = {
        "weights": digest_of_all(weights),
        "states of optimizers": sum(digest_of_all(_states(one, weights)) for one in known),
        "learning rates and other options of optimizers": _options(known),
    }
    told = gather(worker, {**mine, "known": len(known)})
    most = max(one["known"] for one in told)  # a member without a step in its block knows of those in ``step`` only
    for what in mine:
        compared = [rank for rank, one in enumerate(told) if what == "weights" or one["known"] == most]
        column = {rank: str(told[rank][what]) for rank in compared}
        usual = Counter(column.values()).most_common(1)[0][0]  # the first of them in a draw, so the lowest rank's
        others = [rank for rank in compared if column[rank] != usual]
        if others:
            like = next(rank for rank in compared if column[rank] == usual)
            raise DivergedError(
                f"at the end of model.join() the {what} of {named(worker.names, others)} are not those of "
                f"{named(worker.names, [like])}. The loop does more to weights than optimizer.step(): it "
                f"clips gradients or weights, say, or steps a scheduler. {_REMEDY}"
            )


def _states(optimizer: Optimizer, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    for weight in weights:
        kept: dict[Any, Any] = optimizer.state.get(weight, {})
        yield from (kept[key] for key in sorted(kept, key=str) if isinstance(kept[key], Tensor))


def _options(optimizers: Sequence[Optimizer]) -> str:
    """Return a digest of all options, in any order of the optimizers."""
    told = sorted(
        repr([(key, value.tolist() if isinstance(value, Tensor) else value) for key, value in sorted(group.items())])
        for group in ({**group, "params": 0} for one in optimizers for group in one.param_groups)
    )
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
