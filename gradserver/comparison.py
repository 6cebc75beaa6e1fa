"""Comparison of contributions with each other, for a part of the elements of a mean while these are in cache.

The squared norms of n contributions and of their mean give unbiased estimates of two figures: the squared norm of the
true gradient, and the noise of a sample. See McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model
of Large-Batch Training", 2018, appendix A.1. A contribution of weight b has the expected square |G|² + tr(Σ)/b; the
mean of all, of weight B, has |G|² + tr(Σ)/B.

Of a block that is due, some rows are looked at: they are copied side by side, and two calls make the sums of all
contributions. So the time is that of a few calls, however large the round is. It is mostly that of the interpreter,
which the reduction has driven out of the caches: 0.1 ms for a block. All others cost one comparison of two numbers.

A contribution is also compared with the mean of the others. One that is much larger than the median is taken at the
median's length there, so that it does not turn the mean around: else all others would point away from it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import add
from statistics import median
from typing import Final

import numpy as np

from gradserver.engine.commands import Measured, Measures, Reduce
from gradserver.mean import Array, scratch, shares_of, types_of, widen
from gradserver.protocol.dtypes import FLOAT32, DType
from gradserver.protocol.exchange import Op
from gradserver.protocol.kernels import active
from gradserver.squares import ROW, dots

_SEEN: Final = 2048
"""Elements of a large block that are looked at, of each contribution."""
_RUN: Final = 8192
"""Elements of one product, for more of which libraries start threads, and of a block of which all are looked at."""
_TABLE: Final = -1
"""Number of the scratch memory for contributions side by side."""
_LEAST: Final = 1e-28
_MOST: Final = 1e37
"""Bounds of sums of squares that float32 has room for, with the products in them."""
_LARGE: Final = 2.0
"""Norm over the median norm above which a contribution counts with the median norm."""
_JUMP: Final = 16.0
"""Sum of squares of a mean, over the usual one, from which on a block stands out."""
_WILD: Final = 1e6
"""The same over what the rows that were looked at stand for."""
_ALL: Final = 1 - 1e-6
"""Share of one contribution above which the others have none to speak of."""
_DUE: Final = -1.0
"""Sum of squares that each block has more than."""
_KEPT: Final = 0.75
"""Share of the usual sum of squares that one round leaves."""


def is_due(measures: Measures, start: int, stop: int, squares: float) -> bool | None:
    """Tell whether a block that is due stands out; None if it is not due. ``squares`` are those of its mean.

    The block has the elements from ``start`` up to ``stop`` of the bucket. Its usual squares are followed when it is
    due or stands out.
    """
    stride, turn, unit, _, _ = measures
    limits = _limits_of(measures)
    first = start // unit
    is_its_turn = -(first + turn) % stride < -(-stop // unit) - first
    limit = limits.get(start, 0.0)
    stands_out = 0 < limit < squares  # nothing is known of zeros either
    if limit and not (stands_out or is_its_turn):
        return None
    following = _KEPT * limit + (1 - _KEPT) * _JUMP * min(squares, limit) if limit else _JUMP * squares
    if math.isfinite(following):
        limits[start] = following
    return stands_out if limit or is_its_turn else None


def _limits_of(measures: Measures) -> dict[int, float]:
    """Return the sums of squares of means, by the block's first element, from which on a block stands out."""
    if measures.usual.content is None:
        measures.usual.content = {}
    limits: dict[int, float] = measures.usual.content
    return limits


def compare(
    measures: Measures,
    of: Sequence[tuple[int, float]],
    rows: Sequence[Array | None],
    mean: Array,
    of_mean: float,
    is_plain: bool,
    stood_out: bool,
    start: int = 0,
    parts: int = 1,
    dtype: DType = FLOAT32,
) -> None:
    """Compare the contributions to one block. If it stood out, or does so beside its rows, all of it is compared.

    Args:
        measures: where to put the comparison, if there is something to compare.
        of: member id and weight of each.
        rows: values of each, or None for zeros.
        mean: their mean. It need not be the plain one.
        of_mean: sum of squares of the mean.
        is_plain: whether it is the plain weighted mean.
        stood_out: as in `Measured`.
        start: first element of the block in its bucket.
        parts: values of an element.
        dtype: of the elements.
    """
    if min(weight for _, weight in of) <= 0:
        rows = [row for (_, weight), row in zip(of, rows, strict=True) if weight > 0]
        of = [one for one in of if one[1] > 0]
    weights = [weight for _, weight in of]
    shares = shares_of(weights)
    if len(of) < 2 or max(shares) > _ALL:
        return
    step = 1 if stood_out or mean.size <= _RUN else -(-mean.size // _SEEN)
    offset = (start // measures.unit + measures.turn // measures.stride) % step  # other rows in each round
    sums = Products((*rows, mean), step, offset, dtype)
    squares, inner, scale = sums.squares, sums.inner, mean.size / sums.seen
    of_seen, norms = squares.pop(), _scales(squares)
    if not stood_out and 0 < of_seen * scale * _WILD < of_mean:
        compare(measures, of, rows, mean, of_mean, is_plain, True, start, parts, dtype)
        return
    signal, noise = _estimates(squares, of_seen, weights) if is_plain else (0.0, 0.0)
    if is_plain and min(norms) < 1.0:
        of_seen, inner = sums.with_scaled(shares, norms)
    members = []
    for (member_id, _), own, product, share, norm in zip(of, squares, inner, shares, norms, strict=True):
        others = of_seen
        if is_plain:  # without its own part
            part, rest = share * norm, 1 - share
            others = (of_seen - 2 * part * product + part * part * own) / rest**2
            product = (product - part * own) / rest
        members.append((member_id, scale * own, scale * product, scale * max(others, 0.0)))
    measures.found.append(Measured(stood_out, mean.size // parts, scale * signal, scale * noise, members))


class Comparison:
    """Comparison of the contributions of one reduction, block by block.

    Args:
        command: the reduction.
        measures: what is to be measured of it.
        starts: the first element of each block in the bucket.
        parts: values of an element.

    Attributes:
        thresholds: for each block the sum of squares of its mean above which it is to be looked at.
    """

    def __init__(self, command: Reduce, measures: Measures, starts: Sequence[int], parts: int) -> None:
        self._command, self._measures, self._parts = command, measures, parts
        self._starts, self._stop = starts, command.first + command.numel
        self.thresholds = list(map(_limits_of(measures).get, starts, repeat(_DUE)))
        if not starts:
            return
        stride, turn, unit, _, _ = measures
        first = starts[0] // unit
        for its_turn in range((first + -(first + turn) % stride) * unit, self._stop, stride * unit):
            begin = max(bisect_right(starts, its_turn) - 1, 0)
            for block in range(begin, bisect_left(starts, its_turn + unit)):
                self.thresholds[block] = _DUE

    def compare(
        self, block: int, rows: Sequence[Array | None], places: Iterable[int], result: Array, squares: float
    ) -> None:
        """Compare the contributions to a block, which are those at ``places``, if it is due or stands out.

        The ``result`` has these ``squares``.
        """
        start, stop = self._starts[block], self._starts[block + 1] if block + 1 < len(self._starts) else self._stop
        if (special := is_due(self._measures, start, stop, squares)) is not None:
            given, operation = self._command.contributions, self._command.operation
            of = [(given[place].member_id, given[place].weight) for place in places]
            how = not self._command.mean.is_robust, special, start, self._parts, operation.dtype
            compare(self._measures, of, rows, result, squares, *how)


def _estimates(squares: Sequence[float], of_mean: float, weights: Sequence[float]) -> tuple[float, float]:
    """Estimate the squared norm of the true gradient, and the trace of the covariance of a sample of weight 1."""
    small, inverse = sum(squares) / len(squares), sum(1 / weight for weight in weights) / len(weights)
    noise = (small - of_mean) / (inverse - 1 / sum(weights))  # infinite or NaN at worst, and then not reported
    return small - noise * inverse, noise


def _scales(squares: Sequence[float]) -> list[float]:
    """Return the factor of each contribution that takes it to the median norm, if it is much larger; else 1."""
    usual = min(squares) if len(squares) == 2 else median(squares)
    return [math.sqrt(usual / one) if one > _LARGE**2 * usual else 1.0 for one in squares]


class Products:
    """Sums over some rows of a block of several contributions, of which the last one is their mean.

    Attributes:
        squares: sums of squares.
        inner: inner products with the last one of all others.
        seen: the number of values that were looked at.
    """

    def __init__(self, given: Sequence[Array | None], step: int, offset: int, dtype: DType) -> None:
        last = given[-1]
        assert last is not None
        if whole := last.size - last.size % (ROW * step):
            self._step, self._offset, self._stop = step, offset, last.size if step == 1 else whole
        else:
            self._step, self._offset, self._stop = 1, 0, last.size
        self.seen = self._stop // self._step
        self._given, self._dtype = given, dtype
        if (kernel := active().products.get(dtype.name)) is not None:
            sums = kernel(given, self.seen, self._step, self._offset)
            self.squares, self.inner = sums[: len(given)], sums[len(given) :]
        else:
            self._add_up()

    def _add_up(self) -> None:
        self.squares, self.inner = [0.0] * len(self._given), [0.0] * (len(self._given) - 1)
        for table in self._tables():
            found = dots(table, table).tolist()
            if not _fits(found, table):
                table = table.astype(np.float64)
                found = dots(table, table).tolist()
            self.squares = list(map(add, self.squares, found))
            self.inner = list(map(add, self.inner, dots(table[:-1], table[-1]).tolist()))

    def with_scaled(self, shares: Sequence[float], norms: Sequence[float]) -> tuple[float, list[float]]:
        """Return the sum of squares of the mean with the norms of some scaled, and its products with the others."""
        of_mean, inner = 0.0, [0.0] * len(shares)
        factors = np.multiply(shares, norms)
        for table in self._tables():
            wide = table[:-1].astype(np.float64)
            mean = np.einsum("i,ij->j", factors, wide)
            of_mean += float(np.dot(mean, mean))
            inner = list(map(add, inner, dots(wide, mean).tolist()))
        return of_mean, inner

    def _tables(self) -> Iterator[Array]:
        """Yield runs side by side, in memory that the next ones overwrite: one row in so many, or all of them."""
        if self._step > 1:
            shape = -1, self._step, ROW
            yield self._table(
                [None if one is None else one[: self._stop].reshape(shape)[:, self._offset] for one in self._given]
            )
            return
        for start in range(0, self._stop, _RUN):
            yield self._table([None if one is None else one[start : start + _RUN] for one in self._given])

    def _table(self, given: Sequence[Array | None]) -> Array:
        elements, _ = types_of(self._dtype, Op.MEAN)
        rows = [None if one is None else widen(one.reshape(-1), self._dtype, elements) for one in given]
        last = rows[-1]
        assert last is not None
        table = scratch(_TABLE, len(rows) * last.size, last.dtype).reshape(len(rows), last.size)
        for target, one in zip(table, rows, strict=True):
            target[...] = 0 if one is None else one
        return table


def square(values: Array) -> float:
    """Return the sum of squares of ``values``. It need not be the same on every machine, as no result depends on it."""
    whole = values.size - values.size % _RUN
    total = float(np.dot(values[whole:], values[whole:]))
    if whole:  # in one call, as each gives up the interpreter's lock and waits for it
        runs = values[:whole].reshape(-1, _RUN)
        total += float(np.add.reduce(dots(runs, runs), dtype=np.float64))
    return total


def _fits(squares: Sequence[float], table: Array) -> bool:
    """Tell whether sums of squares have lost nothing in float32."""
    if min(squares) > _LEAST and max(squares) < _MOST:
        return True
    small = [place for place, one in enumerate(squares) if not one > _LEAST]
    return max(squares) < _MOST and not any(squares[place] for place in small) and not table[small].any()
