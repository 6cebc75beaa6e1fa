"""Expected results of reductions, computed by other means: whole numbers, or twice the precision, at once."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from gradserver.protocol.dtypes import BY_NAME, DType
from gradserver.protocol.errors import UnsupportedOperationError
from gradserver.protocol.exchange import Op, check_reducible

OPS = (Op.MEAN, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT)


_COMBINE: dict[Op, Callable[[Any, Any], Any]] = {
    Op.SUM: operator.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: operator.mul,
}


def is_defined(op: Op, dtype: DType) -> bool:
    try:
        check_reducible(op, dtype)
    except UnsupportedOperationError:
        return False
    return True


def is_usable(name: str) -> bool:
    """Return whether this version of torch can do anything with an element type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it thinks of complex32
        try:
            torch.zeros(1, dtype=getattr(torch, name)).fill_(1)
        except (AttributeError, RuntimeError):
            return False
    return True


TYPES = [name for name in BY_NAME if is_usable(name)]
"""Element types that this version of torch has."""
REDUCTIONS = [
    pytest.param(name, op, id=f"{op.name.lower()}-{name}")
    for name in TYPES
    for op in OPS
    if is_defined(op, BY_NAME[name])
]
"""Every element type, with every operation that is defined for it."""


def samples(name: str, count: int, numel: int, seed: int = 0) -> list[torch.Tensor]:
    """Return ``count`` tensors. Integers take all values; others are small whole numbers with exact sums in float32.

    A float8_e8m0fnu has powers of two only, so all the tensors are equal.
    """
    dtype, random = getattr(torch, name), np.random.default_rng(seed)
    if name == "bool":
        return [torch.from_numpy(random.random(numel) < 0.7) for _ in range(count)]
    if BY_NAME[name].kind in "iu":
        size = numel * dtype.itemsize
        return [torch.frombuffer(bytearray(random.bytes(size)), dtype=dtype) for _ in range(count)]
    if name == "float8_e8m0fnu":
        return [torch.from_numpy(2.0 ** random.integers(-3, 4, numel)).to(torch.float32).to(dtype)] * count
    values = random.integers(-3, 4, (count, numel)).astype(np.complex128)
    if BY_NAME[name].kind == "c":
        values += 1j * random.integers(-3, 4, (count, numel))
        return [torch.from_numpy(row).to(dtype) for row in values]
    return [torch.from_numpy(row.real.copy()).to(torch.float32).to(dtype) for row in values]


def wide(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the numbers of ``tensor``, in Python's integers or double precision."""
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy()
    if tensor.is_floating_point():
        return tensor.to(torch.float64).numpy()
    return tensor.numpy().astype(object)


def expected(tensors: Sequence[torch.Tensor], op: Op, weights: Sequence[float] | None = None) -> np.ndarray[Any, Any]:
    """Return the numbers that reducing ``tensors`` should give, rounded once."""
    exact: np.ndarray[Any, Any]
    dtype, rows = tensors[0].dtype, [wide(tensor) for tensor in tensors]
    if op is Op.MEAN:
        weights = weights or [1.0] * len(rows)
        exact = reduce(operator.add, [weight * row for weight, row in zip(weights, rows, strict=True)]) / sum(weights)
    else:
        exact = reduce(_COMBINE[op], rows)
    if dtype is torch.bool:
        return exact.astype(bool).astype(object)
    if exact.dtype == object:
        bits = 8 * dtype.itemsize
        low = torch.iinfo(dtype).min
        return (exact - low) % (1 << bits) + low
    double = torch.from_numpy(exact)
    if double.is_complex():
        return wide(double.to(dtype))
    return wide(double.to(torch.float32).to(dtype) if dtype is not torch.float64 else double)
