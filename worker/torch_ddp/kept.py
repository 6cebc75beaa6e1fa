"""Gradients that stay where they are, as a contribution, while their bucket has them multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradserver.worker.torch_ddp.buckets import GradientBucket


@dataclass(frozen=True)
class KeptGradients:
    """A bucket's gradients: see `gradserver.worker.planes.plane.Kept`.

    Attributes:
        bucket: the bucket.
        as_view: whether ``.grad`` is a view of the bucket when it has the contribution as it is.
        new_memory: makes memory for it.
    """

    bucket: GradientBucket
    as_view: bool
    new_memory: Callable[[], Tensor]

    def flat(self) -> Tensor:
        """Return a copy of the gradients."""
        return torch.cat([slot.kept for slot in self.bucket.slots])

    def scale_again(self) -> None:
        """Bring them, multiplied, into the bucket once more."""
        for slot in self.bucket.slots:
            slot.scale_again()

    def move(self) -> Tensor:
        """Give the bucket's memory up, and take them as they are into other memory."""
        return self.bucket.move(self.as_view, self.new_memory)
