"""Elements of compiled loops: the compiler's options, types of arrays, and numbers as bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import carray, float32, float64, int64, njit, types, uint8, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

_F = TypeVar("_F", bound=Callable[..., Any])

MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
INFINITY: Final = np.uint32(0x7F80_0000)

# What callers give may be read-only, and lie anywhere. What functions here give each other may not.
ROW = types.Array(float32, 1, "C")
FLOATS = types.Array(float32, 1, "C", aligned=False)
READ_FLOATS = types.Array(float32, 1, "C", readonly=True, aligned=False)
BYTES = types.Array(uint8, 1, "C", aligned=False)
READ_BYTES = types.Array(uint8, 1, "C", readonly=True, aligned=False)
OFFSETS = types.Array(int64, 1, "C")
READ_OFFSETS = types.Array(int64, 1, "C", readonly=True)
SUMS = types.Array(float64, 1, "C")
WORDS = types.Array(uint64, 1, "C")
READ_WORDS = types.Array(uint64, 1, "C", readonly=True, aligned=False)


def compiled(signature: Any = None, **more: Any) -> Callable[[_F], _F]:
    """Compile a function, or load it: at once for a signature, else within those that call it."""
    options = {"nogil": True, "cache": True, "error_model": "numpy", **more}
    return cast(Callable[[_F], _F], njit(**options) if signature is None else njit(signature, **options))


_inner = cast(Callable[[Any], Any], intrinsic)


def _pointer(_context: Any, _address: Any, dtype: Any) -> Any:
    target = types.CPointer(dtype.dtype)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(target))

    return target(types.uint64, dtype), generate


def _float_bits(_context: Any, _number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _bits_float(_context: Any, _number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _round_even(_context: Any, _number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.nearbyint.f32"), arguments)

    return types.float32(types.float32), generate


pointer = _inner(_pointer)
"""Make a pointer of an address."""
bits_of = _inner(_float_bits)
"""Read a float32 as bits."""
number_of = _inner(_bits_float)
"""Read bits as a float32."""
round_even = _inner(_round_even)
"""Round to an integer, ties to even: one instruction, where ``round`` is many."""


@compiled()
def magnitude_of(number: Any) -> Any:
    """Return a number's bits without the sign: these keep the order of magnitudes, and NaN is beyond Inf."""
    return uint32(bits_of(number) & MAGNITUDE)


@compiled()
def row_of(array: Any) -> Any:
    """Read an array that lies anywhere."""
    return carray(pointer(uint64(array.ctypes.data), np.float32), array.size)
