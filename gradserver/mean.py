"""Parts of every reduction: weights, values that are not finite, errors, scratch memory, and types to compute in."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.engine.commands import Reduce
from gradserver.engine.events import Broken, NonFinite, Sifted, Undecodable
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import DType, numpy_dtype
from gradserver.protocol.exchange import Op

log = logging.getLogger("gradserver")

Array = npt.NDArray[Any]
Outcome = Buffer | tuple[Buffer, ...] | NonFinite | Sifted | Undecodable | Broken | None
"""Outcome of a reduction: the result's bytes (if they are kept), or the reason for no result."""

FOLDS: Final = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
"""Functions of the operations that take one contribution after the other."""
_MAX_CAUSE: Final = 500
"""Limit of the characters of an exception's text that are sent to members."""


def weigh(weights: Sequence[float]) -> tuple[bool, float, Sequence[float]]:
    """Return whether all weights are equal, the divisor of the sum, and the factors of contributions if they are not.

    Factors are weights times a power of two. This changes no bits, and keeps ``w·g`` in the range of ``g``.
    """
    if not weights or min(weights) == max(weights):
        return True, len(weights), weights
    scale = -math.frexp(max(weights))[1]
    scaled = [math.ldexp(weight, scale) for weight in weights]
    return False, sum(scaled), scaled


_ZEROS: Final = np.zeros(4096, np.float32)


def is_finite(values: Array) -> bool:
    """Return whether every element is finite. NaN is both the largest and the smallest; a sum takes twice as long."""
    if values.size <= _ZEROS.size and values.dtype is _ZEROS.dtype:  # zero times Inf or NaN is NaN: one call
        return math.isfinite(np.dot(values, _ZEROS[: values.size]))
    return math.isfinite(np.maximum.reduce(values)) and math.isfinite(np.minimum.reduce(values))


def shares_of(weights: Sequence[float]) -> list[float]:
    """Compute each contribution's share of a mean. They add up to 1, or a little less or more."""
    _, _, scaled = weigh(weights)
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def first_non_finite(values: Array) -> int | None:
    """Find the first element that is not finite; None if all are."""
    with np.errstate(invalid="ignore"):
        if is_finite(values):
            return None
    return int(np.flatnonzero(~np.isfinite(values))[0])


def blame(given: Iterable[tuple[int, Array]], start: int, parts: int) -> NonFinite:
    """Find the first of the contributions ``given``, by member id, that is not finite. It begins with value ``start``.

    An element has so many ``parts``.
    """
    for member_id, values in given:
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            value = values[bad[0]]
            what = "NaN" if np.isnan(value) else "Inf" if value > 0 else "-Inf"
            return NonFinite(member_id, (start + int(bad[0])) // parts, what)
    return NonFinite(-1, start // parts, "Inf")


def broken_by(error: Exception, command: Reduce) -> Broken:
    """Make the outcome of a reduction that has raised ``error``."""
    log.error("%s of group %r could not be reduced", command.operation, command.group, exc_info=error)
    return Broken(f"{type(error).__name__}: {str(error)[:_MAX_CAUSE]}")


def in_range(values: Array, dtype: npt.DTypeLike) -> Array:
    """Convert means of finite numbers of ``dtype`` to it. Rounding alone may have moved them out of its range."""
    largest = np.finfo(dtype).max
    np.nan_to_num(values, copy=False, posinf=largest, neginf=-largest)
    return np.clip(values, -largest, largest).astype(dtype)


def mend_overflow(total: Array, rows: Sequence[tuple[float, Array]]) -> bool:
    """Compute the mean anew where the sum left its type's range. Return whether all of ``total`` is finite then.

    Only elements of which all contributions are finite change, each by these alone. So they have the same bits however
    tensors are cut. ``rows`` are all contributions, each with its share of the mean.
    """
    bad = np.flatnonzero(~np.isfinite(total))
    picked = [(share, row[bad]) for share, row in rows]
    whole = np.logical_and.reduce([np.isfinite(row) for _, row in picked])
    exact: Array = np.zeros(bad.size, np.float64)
    for share, row in picked:
        exact += row.astype(np.float64) * share
    total[bad[whole]] = in_range(exact[whole], total.dtype)
    return bool(whole.all())


def with_one_nan(values: Array) -> Array:
    """Give every NaN in ``values`` the same bits: which of two NaN a sum keeps is the processor's choice."""
    np.copyto(values, np.nan, where=np.isnan(values))
    return values


def add_up(rows: Sequence[tuple[float, Array]], equal: bool, total: Array) -> None:
    """Write the sum of ``rows`` to ``total``, in their order; each times its weight, unless weights are ``equal``."""
    (weight, first), *others = rows
    if equal and others:
        np.add(first, others.pop(0)[1], out=total)
        for _, row in others:
            np.add(total, row, out=total)
    elif equal:
        total[:] = first
    else:
        np.multiply(first, total.dtype.type(weight), out=total)
        product = scratch(1, first.size, first.dtype)
        for weight, row in others:
            np.multiply(row, total.dtype.type(weight), out=product)
            np.add(total, product, out=total)


def divide(total: Array, divisor: float) -> None:
    """Divide in place. For a power of two, a product has the same bits and is faster."""
    if math.frexp(divisor)[0] == 0.5:
        np.multiply(total, 1 / divisor, out=total)
    else:
        np.divide(total, total.dtype.type(divisor), out=total)


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.by_number: dict[int, npt.NDArray[np.uint8]] = {}


_blocks = _Blocks()


def scratch(number: int, numel: int, dtype: npt.DTypeLike) -> Array:
    """Return memory of this thread, the same for the same number. New memory would cost as much as the work in it.

    Earlier contents are overwritten.
    """
    nbytes = numel * np.dtype(dtype).itemsize
    block = _blocks.by_number.get(number)
    if block is None or block.size < nbytes:
        block = _blocks.by_number[number] = np.empty(nbytes, np.uint8)
    return block[:nbytes].view(dtype)


def multiply(left: Array, right: Array) -> Array:
    """Multiply complex numbers: numpy's own product rounds differently at the edge of an array than in its middle."""
    result = np.empty_like(left)
    result.real = left.real * right.real - left.imag * right.imag
    result.imag = left.real * right.imag + left.imag * right.real
    return result


_WIDE: Final = {"float64": np.float64, "complex128": np.float64}


@cache
def types_of(dtype: DType, op: Op) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Choose the type to compute in, and that of memory: its numbers, or bits that `widen` converts to them."""
    if op in (Op.NONE, Op.FIRST):  # bytes that are passed on
        return np.dtype(np.uint8), np.dtype(np.uint8)
    elements = _number_type(dtype, Op.SUM if op is Op.MEAN else op)
    if dtype.name in ("complex32", "bfloat16"):
        return elements, np.dtype(np.float16 if dtype.kind == "c" else np.uint16)
    return elements, elements if dtype.kind == "c" else numpy_dtype(dtype)


def _number_type(dtype: DType, op: Op) -> np.dtype[Any]:
    """Choose the type to compute in. Complex numbers add as pairs of real ones, and multiply as themselves."""
    if dtype.kind in "iub":
        return numpy_dtype(dtype)
    if dtype.kind == "c" and op is Op.PRODUCT:
        return np.dtype(np.complex128 if dtype.name == "complex128" else np.complex64)
    return np.dtype(_WIDE.get(dtype.name, np.float32))


def widen(row: Array, dtype: DType, elements: np.dtype[Any]) -> Array:
    """Convert stored values of ``dtype`` to numbers of type ``elements``: a copy, unless they are that already."""
    if dtype.name == "complex32":
        return row.astype(np.float32).view(elements)
    if dtype.name == "bfloat16":  # the upper half of a float32: ten times faster than an element-wise cast
        bits = row.astype(np.uint32)
        return np.left_shift(bits, 16, out=bits).view(np.float32)
    return row.astype(elements, copy=False)


def narrow(values: Array, dtype: DType, stored: np.dtype[Any]) -> Array:
    """Convert numbers to ``dtype``, rounded to nearest, in memory of type ``stored``."""
    if dtype.name == "complex32":
        return values.view(np.float32).astype(np.float16)
    return values.astype(numpy_dtype(dtype)).view(stored)


def fold(op: Op, is_complex: bool, rows: Sequence[Array | None], out: Array) -> Array:
    """Compute the sum, minimum, maximum or product of rows, in ``out`` or in new memory; None stands for zeros."""
    zeros = np.zeros_like(out)  # costs next to nothing before it is read
    result, *others = [zeros if values is None else values for values in rows]
    for values in others:
        result = multiply(result, values) if is_complex and op is Op.PRODUCT else FOLDS[op](result, values, out=out)
    if not others:
        out[:] = result
        return out
    return result
