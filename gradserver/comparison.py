"""Comparison of contributions with each other, for a part of the blocks of a mean while these are in cache.

The squared norms of n contributions and of their mean give unbiased estimates of two figures: the squared norm of the
true gradient, and the noise of a sample. See McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model
of Large-Batch Training", 2018, appendix A.1. A contribution of weight b has the expected square |G|² + tr(Σ)/b; the
mean of all, of weight B, has |G|² + tr(Σ)/B.

A contribution is also compared with the mean of the others. One that is much larger than the median is taken at the
median's length there, so that it does not turn the mean around: else all others would point away from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np

from gradserver.engine.commands import Measured, Measures
from gradserver.mean import Array, shares_of

_RUN: Final = 8192
"""Elements of one product: with more of them libraries start threads of their own."""
_LEAST: Final = 1e-28
_MOST: Final = 1e37
"""Bounds of sums of squares that float32 has room for, with the products in them."""
_LARGE: Final = 2.0
"""Norm over the median norm above which a contribution counts with the median norm."""
_JUMP: Final = 16.0
"""Sum of squares of a mean, over the usual one, from which on a block stands out."""
_ALL: Final = 1 - 1e-6
"""Share of one contribution above which the others have none to speak of."""
_KEPT: Final = 0.75
"""Share of the usual sum of squares that one round leaves."""


def is_due(measures: Measures, block: int, squares: float) -> bool | None:
    """Tell whether a block that is due stands out; None if it is not due. ``squares`` are those of its mean.

    The ``block`` is known by its number in the bucket.
    """
    if measures.stride == 1:
        return False
    usual: dict[int, float] | None = measures.usual.content
    if usual is None:
        usual = measures.usual.content = {}
    before = usual.get(block)
    stands_out = before is not None and squares > _JUMP * before
    if math.isfinite(squares):
        usual[block] = squares if before is None else _KEPT * before + (1 - _KEPT) * min(squares, _JUMP * before)
    return stands_out if stands_out or (block + measures.turn) % measures.stride == 0 else None


def compare(
    measures: Measures,
    of: Sequence[tuple[int, float]],
    rows: Sequence[Array | None],
    mean: Array,
    of_mean: float,
    is_plain: bool,
    stood_out: bool,
    parts: int = 1,
) -> None:
    """Compare the contributions to one block.

    Args:
        measures: where to put the comparison, if there is something to compare.
        of: member id and weight of each.
        rows: values of each: float32 or float64, or None for zeros.
        mean: their mean. It need not be the plain one.
        of_mean: sum of squares of the mean.
        is_plain: whether it is the plain weighted mean.
        stood_out: as in `Measured`.
        parts: values of an element.
    """
    rows = [row for (_, weight), row in zip(of, rows, strict=True) if weight > 0]
    of = [one for one in of if one[1] > 0]
    shares = shares_of([weight for _, weight in of])
    if len(of) < 2 or max(shares) > _ALL:
        return
    squares = [0.0 if row is None else square(row) for row in rows]
    if not all(map(_fits, squares, rows)):
        rows = [None if row is None else row.astype(np.float64) for row in rows]
        mean = mean.astype(np.float64)
        squares = [0.0 if row is None else square(row) for row in rows]
    signal, noise = _estimates(squares, of_mean, [weight for _, weight in of]) if is_plain else (0.0, 0.0)
    scales = _scales(squares)
    if is_plain and min(scales) < 1.0:
        mean = _scaled(rows, shares, scales, mean.size)
        of_mean = square(mean)
    members = []
    for (member_id, _), row, own, share, scale in zip(of, rows, squares, shares, scales, strict=True):
        inner, others = 0.0 if row is None else _dot(row, mean), of_mean
        if is_plain:  # without its own part
            part, rest = share * scale, 1 - share
            others = (of_mean - 2 * part * inner + part * part * own) / rest**2
            inner = (inner - part * own) / rest
        members.append((member_id, own, inner, max(others, 0.0)))
    measures.found.append(Measured(stood_out, mean.size // parts, signal, noise, members))


def _estimates(squares: Sequence[float], of_mean: float, weights: Sequence[float]) -> tuple[float, float]:
    """Estimate the squared norm of the true gradient, and the trace of the covariance of a sample of weight 1."""
    small, inverse = sum(squares) / len(squares), sum(1 / weight for weight in weights) / len(weights)
    noise = (small - of_mean) / (inverse - 1 / sum(weights))  # infinite or NaN at worst, and then not reported
    return small - noise * inverse, noise


def _scales(squares: Sequence[float]) -> list[float]:
    """Return the factor of each contribution that takes it to the median norm, if it is much larger; else 1."""
    usual = median(squares)
    if len(squares) == 2:
        usual = min(squares)
    return [math.sqrt(usual / one) if one > _LARGE**2 * usual else 1.0 for one in squares]


def _scaled(rows: Sequence[Array | None], shares: Sequence[float], scales: Sequence[float], size: int) -> Array:
    """Return the mean with the norms of some contributions scaled."""
    mean = np.zeros(size, np.float64)
    for row, share, scale in zip(rows, shares, scales, strict=True):
        if row is not None and scale > 0:
            mean += row.astype(np.float64) * (share * scale)
    return mean


def square(values: Array) -> float:
    """Return the sum of squares of ``values``."""
    return _dot(values, values)


def _fits(squares: float, row: Array | None) -> bool:
    """Tell whether a sum of squares has lost nothing in float32."""
    return _LEAST < squares < _MOST or (squares == 0.0 and (row is None or not row.any()))


def _dot(one: Array, other: Array) -> float:
    """Return the sum of products. It need not be the same on every machine, as no result depends on it."""
    whole = one.size - one.size % _RUN
    total = float(np.dot(one[whole:], other[whole:]))
    if whole:  # in one call, as each gives up the interpreter's lock and waits for it
        runs = np.matmul(one[:whole].reshape(-1, 1, _RUN), other[:whole].reshape(-1, _RUN, 1))
        total += float(np.add.reduce(runs, axis=None, dtype=np.float64))
    return total
