"""Gradients of a late worker that did not count: kept, and added to what it gives to the same slices next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import DType, numpy_dtype
from gradserver.protocol.exchange import Layout
from gradserver.protocol.limits import MAX_WEIGHT

OWED_WEIGHT: Final = 1e-300
"""Weight of zeros to which a worker without a batch adds what it has kept. Beside any other weight it vanishes."""
_WIDE = {"float64": np.float64, "complex64": np.complex64, "complex128": np.complex128}


class Contribution(NamedTuple):
    """One slice of what was given. ``data`` None stands for zeros."""

    weight: float
    data: Bytes | None


class CarryOver:
    """Contributions that did not count, by bucket and slice. Not safe to share: the session's lock guards it.

    It holds one copy of the gradients at most, and none of a worker that is in time.
    """

    def __init__(self) -> None:
        self._slices: dict[int, dict[int, Contribution]] = {}
        self._since: dict[int, dict[int, int]] = {}
        """Round that the oldest part of each slice was first given to, by bucket: of what is kept, or given since."""
        self._last: dict[int, int] = {}
        """Round that each bucket was given to last, with something that was kept."""

    @property
    def since(self) -> int | None:
        """The round that the oldest of what is kept was first given to; None if nothing is kept."""
        kept = (self._since[part][index] for part, there in self._slices.items() for index in there)
        return min(kept, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(0 if c.data is None else c.data.size for there in self._slices.values() for c in there.values())

    def put(self, part: int, index: int, contribution: Contribution, number: int = 0) -> None:
        """Slice ``index`` of bucket ``part`` did not count in round ``number``.

        ``data`` is the keeper's from now on.
        """
        self._slices.setdefault(part, {})[index] = contribution
        since = self._since.setdefault(part, {})
        if index not in since or self._last.get(part) != number:
            since[index] = number

    def add_to(
        self,
        part: int,
        data: Bytes,
        weight: float,
        layout: Layout,
        dtype: DType,
        sifts: bool = False,
        number: int = 0,
        damps: bool = False,
    ) -> Mapping[int, float]:
        """Add what is kept of bucket ``part`` to ``data``, which is given with ``weight``; it is kept no more.

        If the group ``sifts`` gradients, what is not finite does not count, and what is kept waits for the next ones.
        A slice becomes (w0·g0 + w1·g1) / (w0 + w1), and weighs w0 + w1. Gives these weights, by slice. If the group
        ``damps`` what is kept, what was first given s rounds before round ``number`` is multiplied by 1 / (1 + s).
        """
        heavier: dict[int, float] = {}
        before, self._last[part] = self._last.get(part, -1), number
        there = self._slices.pop(part, {})
        since = self._since[part] = {index: self._since[part][index] for index in there}
        for index, contribution in there.items():
            kept_weight, kept = contribution
            start, stop = (element * layout.itemsize for element in layout.span(index))
            if sifts and not is_finite(Contribution(weight, data[start:stop]), dtype):
                self.put(part, index, contribution, number)
                continue
            first = since[index]
            factor = (1 + max(before - first, 0)) / (1 + number - first) if damps else 1.0
            _add(data[start:stop], weight, kept, kept_weight, dtype, factor)
            heavier[index] = min(weight + kept_weight, MAX_WEIGHT)
        return heavier

    def has(self, part: int) -> bool:
        """Return true if anything of bucket ``part`` is kept."""
        return part in self._slices

    def forget(self, but: Collection[int] = ()) -> None:
        """Forget all, ``but`` what is there of these buckets: the rest is too old, or of what is exchanged no more."""
        self._slices = {part: slices for part, slices in self._slices.items() if part in but}
        self._since = {part: since for part, since in self._since.items() if part in but}


def is_finite(contribution: Contribution, dtype: DType) -> bool:
    """Return true if all elements of a slice are finite."""
    if contribution.data is None:
        return True
    values = contribution.data.view(numpy_dtype(dtype))
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.astype(_WIDE.get(dtype.name, np.float32))).all())


def _add(data: Bytes, weight: float, kept: Bytes | None, kept_weight: float, dtype: DType, factor: float = 1.0) -> None:
    """``data`` becomes the mean of both, computed in float32 or wider. Only the ratio of the weights matters.

    What is ``kept`` is multiplied by ``factor`` before.
    """
    stored = numpy_dtype(dtype)
    wide: Any = _WIDE.get(dtype.name, np.float32)
    own, larger = data.view(stored), max(weight, kept_weight)
    ours, theirs = weight / larger, kept_weight / larger
    with np.errstate(all="ignore"):  # what is not finite is found where it is summed
        total = own.astype(wide) * ours
        if kept is not None:
            total += kept.view(stored).astype(wide) * (theirs * factor)
        own[:] = (total / (ours + theirs)).astype(stored)
