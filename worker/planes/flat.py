"""The ways of buckets on the direct plane: all members reduce in one communicator, or there is one member alone."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gradserver.protocol.exchange import Op
from gradserver.worker.planes.communicator import Communicator, Reduction, Signal


def divisor(world: int) -> int:
    """Return what contributions are divided by before they are summed up, so that narrow types hold the sum.

    It is a power of two, and so rounds nothing; not less than the number of members.
    """
    return 1 << (world - 1).bit_length()


class Arrived:
    """A result that is there."""

    def wait(self, timeout: float) -> None:
        """Return at once."""


ARRIVED: Final = Arrived()


class Flat:
    """One level: see `gradserver.worker.planes.plane.Way`.

    Args:
        communicator: communicator of all members.
        world: number of members.
        hosts: number of hosts that they are on.
    """

    def __init__(self, communicator: Communicator, world: int, hosts: int) -> None:
        self._communicator, self._world = communicator, world
        self.on_host = communicator if hosts == 1 < world else None
        self._signal = Signal()

    def memory(self, index: int, like: Tensor) -> Tensor:  # noqa: ARG002  (Way's signature)
        """Return memory for a result."""
        return torch.empty_like(like)

    def open(self, weight: float, signal: Signal) -> None:  # noqa: ARG002
        """Begin a pass."""
        self._signal = signal

    def mean(self, index: int, weighed: Tensor) -> Reduction:  # noqa: ARG002
        """Begin to sum up contributions."""
        return self.combine(weighed, Op.SUM)

    def combine(self, tensor: Tensor, op: Op) -> Reduction:
        """Begin to replace ``tensor`` by its combination."""
        return self._communicator.all_reduce(tensor, op, self._signal)

    def broadcast(self, tensor: Tensor, rank: int) -> Reduction:
        """Begin to replace ``tensor`` by that of ``rank``."""
        return self._communicator.broadcast(tensor, rank, self._signal)

    def close(self) -> None:
        """End a pass."""

    def divide(self, result: Tensor, weight: float, out: Tensor) -> None:
        """Divide a sum by the sum of weights."""
        torch.div(result, weight / divisor(self._world), out=out)


class Alone:
    """The way of a worker without a coordinator, which is alone for good: what it combines is the combination."""

    on_host: Communicator | None = None

    def memory(self, index: int, like: Tensor) -> Tensor:  # noqa: ARG002  (Way's signature)
        """Return memory for a result."""
        return torch.empty_like(like)

    def open(self, weight: float, signal: Signal) -> None:
        """Begin a pass."""

    def mean(self, index: int, weighed: Tensor) -> Arrived:  # noqa: ARG002
        """Leave a contribution as it is."""
        return ARRIVED

    def combine(self, tensor: Tensor, op: Op) -> Arrived:  # noqa: ARG002
        """Leave ``tensor`` as it is."""
        return ARRIVED

    def broadcast(self, tensor: Tensor, rank: int) -> Arrived:  # noqa: ARG002
        """Leave ``tensor`` as it is."""
        return ARRIVED

    def close(self) -> None:
        """End a pass."""

    def divide(self, result: Tensor, weight: float, out: Tensor) -> None:
        """Divide a contribution by its weight."""
        torch.div(result, weight / divisor(1), out=out)
