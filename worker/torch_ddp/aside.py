"""Gradients of one module that wait, while updates by other gradients are applied.

    state   event                                       next    what happens
    ──────  ──────────────────────────────────────────  ──────  ─────────────────────────────────────────────────────
    HERE    an update begins, of any module             HIDDEN  no parameter has a gradient; they lie in the buckets
    HIDDEN  it is of this module                        MOVED   the buckets get other memory, for the result
    HIDDEN  the gradients are to be used                HERE    parameters have them again
    MOVED   the same                                    HERE    the buckets are in their memory again
    any     the gradients are dropped                   HERE    there are none

So an optimizer that has parameters of several modules steps those of the updated one alone, as torch's optimizers pass
over parameters without a gradient. Memory for the result takes one more copy of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradserver.worker.torch_ddp.buckets import BufferBucket, FlatBucket, GradientBucket, bring


class Exchange(Protocol):
    """The rounds of a module: `gradserver.worker.torch_ddp.rounds.Rounds`."""

    gradients: list[GradientBucket]
    buffers: list[BufferBucket]

    def new_memory(self, bucket: FlatBucket) -> Tensor:
        """Return memory for a bucket."""


class Aside:
    """The gradients of one module, and the values of its buffers, out of the way of updates.

    Args:
        rounds: the module's rounds.
        as_view: whether a ``.grad`` is a view of its bucket.
    """

    def __init__(self, rounds: Exchange, as_view: bool) -> None:
        self._rounds = rounds
        self._as_view = as_view
        self._have: list[Sequence[bool]] | None = None
        """For each bucket, which parameters have a gradient, while these are hidden."""
        self._moved: list[Tensor] = []
        """The memory of each bucket's gradients, if the buckets have other memory meanwhile."""
        self._values: list[list[Tensor] | None] = []
        """Values of the buffers in each bucket; None where the forward has not changed any."""
        self._spare: list[Tensor] = []
        """The other memory of each bucket, when nothing is moved."""

    @property
    def is_hidden(self) -> bool:
        """True if gradients are hidden."""
        return self._have is not None

    def hide(self) -> None:
        """Take the gradients from the parameters. Nothing happens if they are hidden already."""
        if self._have is None:
            self._have = [bring(bucket.slots, self._as_view) for bucket in self._rounds.gradients]
            self.clear()

    def move(self) -> None:
        """Make room in the buckets for a result, if gradients are hidden there."""
        if self._have is None or self._moved:
            return
        for index, bucket in enumerate(self._rounds.gradients):
            self._moved.append(bucket.flat)
            bucket.place(self._spare[index] if self._spare else self._rounds.new_memory(bucket))
        self._spare = []
        self._values = [bucket.values() if bucket.changed() else None for bucket in self._rounds.buffers]

    def bring_back(self, factor: float = 1.0) -> None:
        """Give the parameters their gradients again, times ``factor``."""
        if factor != 1.0:
            self.hide()
        have, self._have = self._have, None
        if have is None:
            return
        for index, (bucket, there) in enumerate(zip(self._rounds.gradients, have, strict=True)):
            if self._moved:
                self._spare.append(bucket.flat)
                bucket.place(self._moved[index])
            if factor != 1.0:
                bucket.flat.mul_(factor)
            for slot, has in zip(bucket.slots, there, strict=True):
                slot.parameter.grad = None if not has else slot.view if self._as_view else slot.view.clone()
        for buffers, values in zip(self._rounds.buffers, self._values, strict=bool(self._values)):
            if values is not None:
                buffers.set_values(values)
        self._moved, self._values = [], []

    def drop(self) -> None:
        """Forget the gradients, wherever they are."""
        self._spare = self._moved or self._spare
        self._have, self._moved, self._values = None, [], []
        self.clear()

    def clear(self) -> None:
        """Leave no parameter with a gradient."""
        for bucket in self._rounds.gradients:
            for slot in bucket.slots:
                slot.parameter.grad = None
