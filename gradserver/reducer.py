"""Combines contributions: the only place where gradients meet.

Sums run in rank order, in fp32 or wider (integers in their own type, where they wrap), so that the
same contributions give the same bits whenever they arrive and however tensors are cut. A mean is
``sum(w·g) / sum(w)``; when all weights are equal it is ``sum(g) / n``, which rounds less; a single
contribution is its own mean, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.engine.events import Contribution, NonFinite, Reduce
from protocol.dtypes import DType, numpy_dtype
from protocol.exchange import Kind, Op
from protocol.wire import Buffer

Array = npt.NDArray[Any]

_UFUNCS: Final = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
_WIDE: Final = {"float64": np.float64, "complex128": np.float64}


def reduce(command: Reduce) -> Buffer | NonFinite:
    """The combination of ``command``'s contributions, in new memory; or what keeps it from being one."""
    contributions, operation = command.contributions, command.operation
    if operation.kind is Kind.ALL_GATHER:
        return b"".join(c.payload for c in contributions if c.payload is not None)
    if operation.op is Op.FIRST:
        return bytes(contributions[0].payload or b"")
    with np.errstate(all="ignore"):  # what is not finite is looked for, and reported with its owner
        if operation.op is Op.MEAN:
            return _mean(contributions, operation.dtype)
        return _fold(contributions, operation.op, operation.dtype)


def _fold(contributions: Sequence[Contribution], op: Op, dtype: DType) -> Buffer:
    """Sum, minimum, maximum or product."""
    elements = _number_type(dtype, op)
    size = next(len(c.payload) for c in contributions if c.payload is not None)
    result: Array | None = None
    for contribution in contributions:
        if contribution.payload is None:
            values = np.zeros(size // dtype.itemsize, elements)
        else:
            values = _widen(contribution.payload, dtype, elements)
        if result is None:
            result = values.copy()
        elif dtype.kind == "c" and op is Op.PRODUCT:
            result = _multiply(result, values)
        else:
            result = _UFUNCS[op](result, values, out=result)
    assert result is not None
    return _narrow(result, dtype)


def _multiply(left: Array, right: Array) -> Array:
    """The product of complex numbers: numpy's own rounds otherwise at the edge of an array than in its middle."""
    result = np.empty_like(left)
    result.real = left.real * right.real - left.imag * right.imag
    result.imag = left.real * right.imag + left.imag * right.real
    return result


def _mean(contributions: Sequence[Contribution], dtype: DType) -> Buffer | NonFinite:
    elements = _number_type(dtype, Op.SUM)
    given = [c for c in contributions if c.payload is not None]
    if len(contributions) == 1:
        payload = bytes(given[0].payload or b"")
        return payload if _is_finite(_widen(payload, dtype, elements)) else _blame(given, dtype)
    weights = [c.weight for c in contributions]
    equal = min(weights) == max(weights)
    if not equal:  # a power of two changes no bits, and keeps w·g from leaving the range of g
        scale = -math.frexp(max(weights))[1]
        weights = [math.ldexp(weight, scale) for weight in weights]
    total: Array | None = None
    for contribution, weight in zip(contributions, weights, strict=True):
        if contribution.payload is None:
            continue
        values = _widen(contribution.payload, dtype, elements)
        if not equal:
            values = values * elements.type(weight)
        if total is not None:
            np.add(total, values, out=total)
        else:
            total = values.copy() if equal else values
    assert total is not None
    np.divide(total, elements.type(len(weights) if equal else sum(weights)), out=total)
    return _narrow(total, dtype) if _is_finite(total) else _blame(given, dtype)


def _is_finite(values: Array) -> bool:
    """Whether every element is. A finite sum proves it in one pass without a temporary."""
    return math.isfinite(abs(np.add.reduce(values))) or bool(np.isfinite(values).all())


def _blame(given: Sequence[Contribution], dtype: DType) -> NonFinite:
    """The first contribution, in rank order, that has an element which is not finite."""
    elements = _number_type(dtype, Op.SUM)
    for contribution in given:
        values = _widen(contribution.payload or b"", dtype, elements)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            value = values[bad[0]]
            what = "NaN" if np.isnan(value) else "Inf" if value > 0 else "-Inf"
            per_element = 2 if dtype.kind == "c" else 1
            return NonFinite(contribution.rank, int(bad[0]) // per_element, what)
    return NonFinite(-1, 0, "Inf")


@cache
def _number_type(dtype: DType, op: Op) -> np.dtype[Any]:
    """What to compute in. Complex numbers add as pairs of real ones, and multiply as themselves."""
    if dtype.kind in "iub":
        return numpy_dtype(dtype)
    if dtype.kind == "c" and op is Op.PRODUCT:
        return np.dtype(np.complex128 if dtype.name == "complex128" else np.complex64)
    return np.dtype(_WIDE.get(dtype.name, np.float32))


def _widen(payload: Buffer, dtype: DType, elements: np.dtype[Any]) -> Array:
    """``payload`` as an array of ``elements``: a view where the bits allow it, else a wider copy."""
    if dtype.name == "complex32":
        halves = np.frombuffer(payload, np.float16).astype(np.float32)
        return halves.view(elements)
    if dtype.kind == "c":
        return np.frombuffer(payload, elements)
    if dtype.name == "bfloat16":  # the upper half of a float32: ten times faster than an element-wise cast
        bits = np.frombuffer(payload, np.uint16).astype(np.uint32)
        return np.left_shift(bits, 16, out=bits).view(np.float32)
    return np.frombuffer(payload, numpy_dtype(dtype)).astype(elements, copy=False)


def _narrow(values: Array, dtype: DType) -> Buffer:
    """``values`` in the bits of ``dtype``, rounded to nearest, as bytes."""
    if dtype.name == "complex32":
        values = values.view(np.float32).astype(np.float16)
    elif dtype.kind != "c":
        values = values.astype(numpy_dtype(dtype), copy=False)
    return values.view(np.uint8).data
