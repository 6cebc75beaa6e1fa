"""Contributions to a direct round, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gradserver.worker.member.waiter import NotFinite
from gradserver.worker.planes.flat import divisor
from gradserver.worker.planes.plane import Kept

NO_DATA: Final = 1e-200
"""Weights below stand for a worker without a sample, which contributes nothing."""


class Given(NamedTuple):
    """A contribution: ``flat`` has it until the round is over, or ``copy`` does, or ``kept``.

    With ``kept``, ``flat`` is where it is reduced.
    """

    flat: Tensor
    weight: float
    present: bool
    copy: Tensor | None
    kept: Kept | None

    def weigh(self, world: int, out: Tensor) -> None:
        """Put it times its weight, and divided for so many members, into ``out``. A kept one is there already."""
        if not self.present or self.weight < NO_DATA:
            out.zero_()
        elif self.kept is None:
            torch.mul(self.flat, self.weight / divisor(world), out=out)


def weight_of(given: Iterable[Given]) -> float:
    """Return the weight of a member in a round: that of its contributions. It is 0 without any."""
    return max((one.weight for one in given), default=0.0)


@dataclass
class DirectOutcome:
    """Outcome of a bucket: see `gradserver.worker.planes.plane.Outcome`."""

    weight: float = 0.0
    present: bool = True
    left_alone: tuple[tuple[int, int], ...] = ()
    not_finite: NotFinite | None = None
    squares: dict[int, tuple[float, ...]] = field(default_factory=dict)
