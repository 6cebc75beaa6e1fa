"""Expected robust means, by the published rules (`gradserver.protocol.means`), once more and apart from the product.

Values are sorted as they are, by a stable sort: of equal ones that of the lower member id comes first. Norms and
distances are of units of 65,536 elements. Squares are summed in fp32 by 256 columns, and these without rounding:

    median, trimmed:B   v₍ₖ₎ … v₍ₙ₋₁₋ₖ₎ of each element, averaged in their order with the weights of their members
    clipped:C           g · min(1, C · median ‖g‖ / ‖g‖) of each unit, averaged; of two norms in the middle the lower
    krum:F              of each unit the n − F − 2 with the least sum of distances² to as many others, averaged
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Weighted = Sequence[tuple[float, Array]]
"""Contributions with their weights, in the order of member ids."""
Plain = Callable[[Weighted, int], Array]
"""The weighted mean of contributions of so many elements."""

UNIT: Final = 65_536
_COLUMNS: Final = 256
_EPSILON: Final = 1e-9
"""Rounding of a share of a number of members, such as 0.1 of 30."""


def mean(rule: str, plain: Plain, given: Weighted, size: int) -> Array:
    """Compute the mean of contributions of positive weight, by a ``rule`` such as ``trimmed:0.25``."""
    kind, _, text = rule.partition(":")
    count, parameter = len(given), float(text or 0)
    if kind in ("median", "trimmed"):
        trimmed = (count - 1) // 2 if kind == "median" else int(parameter * count + _EPSILON)
        return _middle(plain, given, trimmed)
    result = np.empty(size, np.float32)
    for start in range(0, size, UNIT):
        stop = min(start + UNIT, size)
        unit = [(weight, row[start:stop]) for weight, row in given]
        chosen = _clipped(unit, parameter) if kind == "clipped" else _nearest(unit, int(parameter))
        result[start:stop] = plain(chosen, stop - start)
    return result


def _middle(plain: Plain, given: Weighted, trimmed: int) -> Array:
    values, weights = np.stack([row for _, row in given]), np.array([weight for weight, _ in given], np.float32)
    order = np.argsort(values, axis=0, kind="stable")[trimmed : len(given) - trimmed]
    kept = np.take_along_axis(values, order, axis=0)
    if len(order) == 1 or weights.min() == weights.max():
        found = plain([(1.0, row) for row in kept], kept.shape[1])
    else:
        total, divisor = np.zeros_like(kept[0]), np.zeros_like(kept[0])
        for row, places in zip(kept, order, strict=True):
            total += row * weights[places]
            divisor += weights[places]
        found = total / divisor
    return found + np.float32(0)  # no negative zero


def _clipped(unit: Weighted, times: float) -> Weighted:
    norms = [math.sqrt(_squares(row)) for _, row in unit]
    limit = times * sorted(norms)[(len(norms) - 1) // 2]
    return [
        (weight, row * np.float32(limit / norm) if norm > limit else row)
        for (weight, row), norm in zip(unit, norms, strict=True)
    ]


def _nearest(unit: Weighted, faulty: int) -> Weighted:
    count = len(unit)
    if count < 3:
        return unit
    most = count - max(min(faulty, (count - 3) // 2), 0) - 2
    scores = []
    for one, (_, row) in enumerate(unit):
        distances = [math.sqrt(_squares(row - other)) ** 2 for place, (_, other) in enumerate(unit) if place != one]
        scores.append((math.fsum(sorted(distances)[:most]), one))
    return [unit[place] for place in sorted(place for _, place in sorted(scores)[:most])]


def _squares(row: Array) -> float:
    """Sum up the squares of a unit."""
    squared = row * row
    whole = squared.size // _COLUMNS * _COLUMNS
    columns = np.zeros(_COLUMNS, np.float32)
    for line in squared[:whole].reshape(-1, _COLUMNS):
        columns += line
    return math.fsum([*columns.tolist(), *squared[whole:].tolist()])
