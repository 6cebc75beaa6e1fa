"""Buckets on the hierarchical plane, in pieces: the host sums up one while the leaders exchange those before it.

    piece          0         1         2         3         …
    host      ► sum ────► sum ────► sum ────► sum
    leaders              ► push ──► push ──► push      ◄ result, slice by slice
    host                                    ► broadcast ► broadcast

So a link between hosts has something to carry from the first piece of the first bucket on. The host has all but the
last piece when the last result comes. Sums in the host take long beside the computation, which has the processors.
"""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import Tensor

from gradserver.protocol.limits import MIB
from gradserver.worker.planes.communicator import Reduction, Signal
from gradserver.worker.planes.flat import Arrived

PIECE_BYTES: Final = 2 * MIB
"""Bytes of a piece, a whole number of slices. At 10 Gbit/s it takes 1.7 ms, and one call of gloo about 0.2 ms."""
_MOST_PIECES: Final = 32
"""Pieces of one bucket."""


def cut(tensor: Tensor) -> list[Tensor]:
    """Return the pieces of a bucket, one behind the other.

    One on a CUDA device is one piece: NCCL sums it up in less time than a link takes for a piece. The copies to the
    host are in pieces of their own (`gradserver.worker.devices.copies`).
    """
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.is_cuda or nbytes <= PIECE_BYTES:
        return [tensor]
    size = PIECE_BYTES * -(-nbytes // (PIECE_BYTES * _MOST_PIECES))
    return list(torch.split(tensor, size // tensor.element_size()))


class Pieces:
    """A bucket in a pass at one member.

    Args:
        result: the bucket's elements, where its result will be.
        signal: what is woken when a result has come.

    Attributes:
        tensors: pieces of ``result``.
        up: at a host of several members, the sum of each piece.
        down: the broadcast of each piece, as far as they were begun.
    """

    def __init__(self, result: Tensor, signal: Signal) -> None:
        self.result, self.tensors = result, cut(result)
        self.up: list[Reduction] = []
        self.down: list[Reduction | Arrived] = []
        self._signal = signal
        self._missing = [one.numel() * one.element_size() for one in self.tensors]
        """Bytes of each piece's result that have not come."""
        self._step = self._missing[0]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket."""
        return self.result.numel() * self.result.element_size()

    @property
    def is_handed_out(self) -> bool:
        """True if the broadcasts of all pieces were begun."""
        return len(self.down) == len(self.tensors)

    def end_of(self, number: int) -> int:
        """Return the byte behind piece ``number``."""
        return min(self._step * (number + 1), self.nbytes)

    def come(self, start: int, stop: int) -> None:
        """Note that these bytes of the result are there, each once. Any thread may call this, and does not wait."""
        touched = range(start // self._step, -(-stop // self._step))
        with self._lock:
            for number in touched:
                begin, end = self._step * number, self.end_of(number)
                self._missing[number] -= min(stop, end) - max(start, begin)
        if any(self.has_come(number) for number in touched):
            self._signal.wake()

    def complete(self) -> None:
        """Note that all of the result is there."""
        with self._lock:
            self._missing = [0] * len(self.tensors)
        self._signal.wake()

    def has_come(self, number: int) -> bool:
        """Tell whether the result of piece ``number`` is there."""
        return not self._missing[number]
