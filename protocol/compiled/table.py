"""The table of compiled kernels. Importing this imports numba, and loads or compiles all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.compiled import loops, means, sparse
from gradserver.protocol.compiled.loops import BF16, BFLOAT16, FLOAT16, FP16, FP32, INT8
from gradserver.protocol.kernels import Bytes, Floats, Given, Kernels, Words

_CODECS: Final = (BF16, FP16, INT8)
_HALVES: Final = {"bfloat16": BFLOAT16, "float16": FLOAT16, "complex32": FLOAT16}
_ELEMENTS: Final = {"float32": FP32, "complex64": FP32, **_HALVES}
"""Kinds by element type. Complex numbers are pairs."""


def _decode(kind: int, data: Bytes, out: Floats) -> None:
    loops.decode(kind, data, out, False, 1.0)


def _add(kind: int, data: Bytes, total: Floats, weight: np.float32 | None) -> None:
    loops.decode(kind, data, total, True, 1.0 if weight is None else weight)


def _combine(
    kind: int, given: Given, offset: int, size: int, before: Floats, after: Floats, out: Bytes, arrived: Floats
) -> float:
    rows = given.addresses, offset, given.weights, *_divide(given.divisor)
    return float(means.combine(kind, size, *rows, before, after, out, arrived))


def _hand_out(kind: int, given: Given, targets: Words, offset: int, size: int, limit: float) -> int:
    more = offset, given.weights, *_divide(given.divisor), limit
    return int(means.hand_out(kind, size, given.addresses, targets, *more))


def _divide(divisor: float) -> tuple[float, bool]:
    """Return what to divide by, or what to multiply by, and whether it is that."""
    multiplies = math.frexp(divisor)[0] == 0.5
    return 1 / divisor if multiplies else divisor, multiplies


def _products(kind: int, blocks: Sequence[npt.NDArray[Any] | None], seen: int, step: int, offset: int) -> list[float]:
    addresses = np.array([0 if block is None else block.ctypes.data for block in blocks], np.uint64)
    sums = np.zeros(2 * len(blocks) - 1)
    loops.products(kind, addresses, seen, step, offset, sums)
    found: list[float] = sums.tolist()
    return found


TABLE: Final = Kernels(
    encode={kind: partial(loops.encode, kind) for kind in _CODECS},
    decode={kind: partial(_decode, kind) for kind in _CODECS},
    add={kind: partial(_add, kind) for kind in _CODECS},
    compensate={kind: partial(loops.compensate, kind) for kind in _CODECS},
    combine={kind: partial(_combine, kind) for kind in _CODECS},
    average={name: partial(_combine, kind) for name, kind in _HALVES.items()},  # numpy is quicker with float32
    hand_out={name: partial(_hand_out, kind) for name, kind in _ELEMENTS.items()},
    digest=loops.digest,
    rows=loops.rows,
    largest=sparse.largest,
    keep_largest=sparse.keep_largest,
    keep_drawn=sparse.keep_drawn,
    add_at=sparse.add_at,
    products={name: partial(_products, kind) for name, kind in _ELEMENTS.items()},
)
