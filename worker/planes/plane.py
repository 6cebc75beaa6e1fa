"""The interface of a plane: buckets go in, and come back as the mean of all members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from gradserver.worker.member.waiter import NotFinite


class Outcome(Protocol):
    """Outcome of a bucket in a round, known when the round is finished: a `gradserver.worker.handle.Handle`.

    Attributes:
        weight: sum of the weights that counted.
        present: true if some member contributed data.
        left_alone: byte ranges without a contribution, in which the result is what was there before.
        not_finite: outcome for gradients that are not finite; None if there were none.
    """

    weight: float
    present: bool
    left_alone: tuple[tuple[int, int], ...]
    not_finite: NotFinite | None


class Plane(Protocol):
    """The way of one module's buckets to the other members, and of the results back."""

    def new_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a bucket, in memory that this plane reads and writes without a copy where it can."""

    def before_forward(self) -> None:
        """Prepare for a forward, in the thread that will call ``backward()``."""

    def note_writer(self, index: int, device: torch.device) -> None:
        """Note that a gradient of bucket ``index`` was computed on the calling thread's stream."""

    @property
    def pushed(self) -> bool:
        """True if anything of the present round was pushed."""

    def push(self, index: int, flat: Tensor, weight: float, present: bool = True) -> None:
        """Contribute ``flat`` to bucket ``index``; it holds the result after `finish`, and is left alone until then."""

    def wait(self, index: int) -> Outcome:
        """Wait for the result of a bucket on the CPU that was pushed in this round."""

    def overwritten(self, index: int, flat: Tensor) -> None:
        """Note that ``flat`` does not hold the last result any more."""

    def finish(self) -> Mapping[int, Outcome]:
        """Wait until every result is in its bucket. Return the outcomes, by bucket, and open the next round."""
