"""Norms of averaged gradients, from the sums of squares that come with results, and the factor that clips them.

All members are sent the same sums, and add them up exactly before they round. So all have the same bits, whatever the
slices, the channels and the number of data shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.worker.tensors import is_torch

_EPSILON: Final = 1e-6
"""Addend of the norm that is divided by, as in torch.nn.utils.clip_grad_norm_."""


def norm_of(squares: Iterable[float]) -> float:
    """Return the square root of the exact sum of ``squares``, rounded; NaN or infinity if one of them is."""
    known = list(squares)
    if not all(map(math.isfinite, known)):
        return math.sqrt(abs(sum(known)))
    try:
        return math.sqrt(max(math.fsum(known), 0.0))
    except OverflowError:
        return math.inf


def clip_factor(norm: float, limit: float) -> float | None:
    """Return what gradients of this ``norm`` are multiplied by so that it is ``limit``; None if it is not above.

    It is torch's: ``limit / (norm + 1e-6)``, and NaN for a norm that is NaN.
    """
    factor = limit / (norm + _EPSILON)
    return None if factor >= 1.0 else factor


def check_limit(limit: float | None, name: str) -> float | None:
    """Return ``limit``, or raise InvalidArgumentError if it is no limit of a norm; ``name`` is its argument's."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
        raise InvalidArgumentError(f"{name} is {limit!r}, and must be a finite number above 0, or None")
    return float(limit)


def clip_local_norm(gradients: Iterable[Any], max_norm: float) -> float:
    """Clip what a worker is about to give, in place, by its norm over all ``gradients``. Return the norm before.

    It belongs between `local_mean` and the push: what workers give is clipped before it is weighed and averaged.

    Args:
        gradients: arrays or tensors of any shapes, with floating or complex elements.
        max_norm: the limit. The gradients are multiplied by ``max_norm / (norm + 1e-6)`` if that is below 1.

    Raises:
        InvalidArgumentError: ``max_norm`` is not a finite number above 0.
    """
    limit = check_limit(max_norm, "max_norm")
    assert limit is not None
    parts = list(gradients)
    norm = norm_of([squares_in(part) for part in parts])
    if (factor := clip_factor(norm, limit)) is not None:
        for part in parts:
            scale(part, factor)
    return norm


def squares_in(part: Any) -> float:
    """Return the sum of squares of an array or tensor, in float64."""
    if is_torch(part):
        values = part.detach().reshape(-1)
        return float((values.abs() if values.is_complex() else values).double().square().sum())
    values = np.abs(part).astype(np.float64).reshape(-1)
    return float(np.dot(values, values))


def scale(part: Any, factor: float) -> None:
    """Multiply an array or tensor in place."""
    if is_torch(part):
        part.detach().mul_(factor)
    else:
        np.multiply(part, np.asarray(factor, np.abs(part[:0]).dtype), out=part)
