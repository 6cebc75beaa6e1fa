"""Element types on the wire: the numeric types of torch.

Each has a code, a size and the numpy type that the coordinator computes with. numpy has no bfloat16 and no 8-bit floats
of its own; `ml_dtypes` has them. ``complex32`` has no numpy type at all: it is summed as pairs of float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from gradserver.protocol.errors import DTypeError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)  # one object for each type: identity is equality, and fast
class DType:
    """One element type. ``code`` is what travels; ``itemsize`` in bytes; ``kind`` as numpy's: f i u b c."""

    code: int
    name: str
    itemsize: int
    kind: str

    @property
    def is_floating(self) -> bool:
        """True if the type can be averaged: real or complex floating point."""
        return self.kind in "fc"


_TABLE: Final = (
    # code, name, bytes, kind
    (0, "float32", 4, "f"),
    (1, "float16", 2, "f"),
    (2, "bfloat16", 2, "f"),
    (3, "float64", 8, "f"),
    (4, "uint8", 1, "u"),
    (5, "int8", 1, "i"),
    (6, "int16", 2, "i"),
    (7, "int32", 4, "i"),
    (8, "int64", 8, "i"),
    (9, "uint16", 2, "u"),
    (10, "uint32", 4, "u"),
    (11, "uint64", 8, "u"),
    (12, "bool", 1, "b"),
    (13, "complex32", 4, "c"),
    (14, "complex64", 8, "c"),
    (15, "complex128", 16, "c"),
    (16, "float8_e4m3fn", 1, "f"),
    (17, "float8_e5m2", 1, "f"),
    (18, "float8_e4m3fnuz", 1, "f"),
    (19, "float8_e5m2fnuz", 1, "f"),
    (20, "float8_e8m0fnu", 1, "f"),
)

BY_CODE: Final = {row[0]: DType(*row) for row in _TABLE}
BY_NAME: Final = {dtype.name: dtype for dtype in BY_CODE.values()}
_ML_DTYPES: Final = frozenset(name for name in BY_NAME if name.startswith(("bfloat", "float8")))

FLOAT32: Final = BY_NAME["float32"]
UINT8: Final = BY_NAME["uint8"]


def dtype_of(name: str) -> DType:
    """Return the type called ``name`` (torch's name without ``torch.``). DTypeError if it cannot travel."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise DTypeError(f"element type {name!r} cannot travel; these can: {', '.join(BY_NAME)}") from None


@cache
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type with the same bits; for complex32 that of one half of it (float16)."""
    import numpy as np

    if dtype.name == "complex32":
        return np.dtype(np.float16)
    if dtype.name in _ML_DTYPES:
        import ml_dtypes

        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return extension
    return np.dtype(dtype.name)
