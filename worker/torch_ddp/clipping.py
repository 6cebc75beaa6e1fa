"""Norms and clipping of a module's gradients: of what this worker gives, and of the mean that all get.

What a worker gives is clipped by the norm over all of its buckets. That is known when backward has ended, so nothing
is pushed before. The mean's norm comes with the results: clipping it needs no pass over the gradients but the
multiplication, and none if the norm is below the limit.

On the direct plane no coordinator sees the gradients. Members that clip sum up squares themselves, and give norms with
the commit. What all get of it is one number, though their processors may round differently. So clipping takes no trip
of its own there either, but for a first `MeanNorms.clip` that nothing has announced: then they compare the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gradserver.worker.client import Worker
from gradserver.worker.devices.squares import squares_of
from gradserver.worker.norms import check_limit, clip_factor, norm_of
from gradserver.worker.planes.plane import Outcome

if TYPE_CHECKING:
    from gradserver.worker.torch_ddp.buckets import GradientBucket


class MeanNorms:
    """Norms of the means of the latest round.

    Args:
        worker: worker that exchanges them.
        buckets: the buckets of gradients.
        are_wanted: true if each round is clipped.

    Attributes:
        are_wanted: true if the next round is to come with norms, as rounds are clipped.
    """

    def __init__(self, worker: Worker, buckets: Sequence[GradientBucket], are_wanted: bool) -> None:
        self._worker, self._buckets, self.are_wanted = worker, buckets, are_wanted
        self._squares: dict[int, tuple[float, ...]] = {}
        """Sums of squares by bucket, as numbers that are added up exactly."""
        self._unknown: list[int] = []
        """Buckets without one, which came over the direct plane before norms were wanted."""
        self._is_skipped = False

    def take(self, outcomes: Mapping[int, Outcome], skipped: bool) -> None:
        """Take the outcomes of a round, before anything changes its results."""
        self._is_skipped = skipped
        self._squares = {}
        for index in range(len(self._buckets)):
            told = outcomes[index].squares
            if told or not outcomes[index].present:
                self._squares[index] = tuple(number for pair in told.values() for number in pair)
        self._unknown = [index for index in range(len(self._buckets)) if index not in self._squares]

    def total(self) -> float:
        """Return the norm of all gradients together; NaN if the round is skipped, or there was none."""
        if self._is_skipped or not self._measured():
            return math.nan
        return norm_of(number for squares in self._squares.values() for number in squares)

    def by_bucket(self) -> dict[str, float]:
        """Return the norm of each bucket, by its key; NaN as in `total`."""
        measured = not self._is_skipped and self._measured()
        keys = {bucket.spec.key: index for index, bucket in enumerate(self._buckets)}
        return {key: norm_of(self._squares[index]) if measured else math.nan for key, index in keys.items()}

    def clip(self, limit: float) -> float:
        """Multiply the gradients so that their norm is at most ``limit``. Return the norm before. All members call it.

        Afterwards the norms are still those of the means as they came.
        """
        self.are_wanted = True
        if self._unknown and not self._is_skipped:
            self._measured()
            own = np.array([norm_of(squares) ** 2 for _, squares in sorted(self._squares.items())])
            self._worker.all_reduce(own, op="max")
            self._squares = {index: (float(squares),) for index, squares in enumerate(own)}
            self._unknown = []
        norm = self.total()
        if not self._is_skipped and (factor := clip_factor(norm, limit)) is not None:
            for bucket in self._buckets:
                others = [slot.parameter.grad for slot in bucket.slots if not slot.is_in_place]
                for tensor in (bucket.flat, *others):
                    if tensor is not None:
                        tensor.mul_(factor)
        return norm

    def _measured(self) -> bool:
        """Sum up squares where none came with a result. Return true if all are known."""
        if self._unknown:
            found = squares_of(self._buckets[index].flat for index in self._unknown)
            self._squares.update((index, (own,)) for index, own in zip(self._unknown, found, strict=True))
        return len(self._squares) == len(self._buckets)


def clip_own(flats: Sequence[Tensor], limit: float, damping: float = 1.0) -> float:
    """Multiply what this worker gives so that its norm over all buckets is ``limit`` at most. Return that before.

    It was multiplied by ``damping`` already, and counts as if it had been clipped before that.
    """
    norm = norm_of(squares_of(flats)) / damping
    if (factor := clip_factor(norm, limit)) is not None:
        for flat in flats:
            flat.mul_(factor)
    return norm


class WithNorms:
    """Base of a wrapped module: the norms of its exchanges, for its owner."""

    _rounds: Any  # the module's `Rounds`, which have norms

    @property
    def _norms(self) -> MeanNorms:
        norms: MeanNorms = self._rounds.norms
        return norms

    @property
    def grad_norm(self) -> float:
        """Norm of all averaged gradients of the last exchange together, before clipping. It is the same everywhere.

        The coordinator sends it with the results, so it takes no pass over the gradients. With a lossy wire it is that
        of the decoded result. It is NaN before the first exchange, and if the last one was skipped. On the direct plane
        it comes with the results if gradients are clipped. Else it is computed when it is first asked for, from the
        gradients as they are then.
        """
        return self._norms.total()

    @property
    def grad_norms(self) -> dict[str, float]:
        """Norm of each bucket's averaged gradients, by the bucket's key in ``plan``. See `grad_norm`."""
        return self._norms.by_bucket()

    @property
    def own_grad_norm(self) -> float | None:
        """Norm of what this worker gave to the last exchange, before clipping. None without ``max_grad_norm``."""
        norm: float | None = self._rounds.own_norm
        return norm

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the averaged gradients, by their norm over all parameters. Return the norm before.

        All workers call it, after ``backward()`` and before anything else changes the gradients. Gradients are
        multiplied by ``max_norm / (norm + 1e-6)`` if that is below 1, as by torch.nn.utils.clip_grad_norm_. But the
        norm is known already, and the bits are the same everywhere. On the direct plane the first call compares the
        workers' norms, and takes the largest. From the next exchange on, norms come with the results there, too.

        Raises:
            InvalidArgumentError: ``max_norm`` is not a finite number above 0.
        """
        limit = check_limit(max_norm, "max_norm")
        assert limit is not None
        with torch.no_grad():
            return self._norms.clip(limit)
