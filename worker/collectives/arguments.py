"""Arguments of collectives: names of reductions, roots under torch's names, weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.exchange import Op
from gradserver.protocol.limits import MAX_WEIGHT

if TYPE_CHECKING:
    from torch.distributed import ReduceOp

ReductionName: TypeAlias = Literal[
    "mean", "avg", "sum", "min", "max", "product", "prod", "MEAN", "AVG", "SUM", "MIN", "MAX", "PRODUCT", "PROD"
]
Reduction: TypeAlias = "ReductionName | ReduceOp.RedOpType"
"""The name of a reduction, or torch's constant (``torch.distributed.ReduceOp.SUM``)."""
Maybe: TypeAlias = int | None
"""A rank, which need not be given."""

_OPS = {op.name.lower(): op for op in (Op.MEAN, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT)}
_SYNONYMS = {"avg": Op.MEAN, "prod": Op.PRODUCT}


def check_weight(weight: float) -> float:
    """Return ``weight`` as a float. InvalidArgumentError unless it is finite, not negative and at most 1e30."""
    if weight == 1.0:
        return 1.0
    try:
        value = float(weight)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or not 0.0 <= value <= MAX_WEIGHT:
        raise InvalidArgumentError(f"a weight is a number from 0 to {MAX_WEIGHT:g}, not {weight!r}")
    return value


def op_of(name: object) -> Op:
    """Return the reduction of this name, ours or torch's."""
    try:
        return _OPS[name]  # type: ignore[index]  # whatever it is
    except (KeyError, TypeError):
        pass
    said = name if isinstance(name, str) else getattr(name, "name", None)  # torch.distributed.ReduceOp.SUM has a name
    found = None
    if isinstance(said, str):
        found = _OPS.get(said.lower()) or _SYNONYMS.get(said.lower())
    if found is None:
        known = ", ".join([*_OPS, *_SYNONYMS])
        raise InvalidArgumentError(f"op is {name!r}, and must be one of {known}, or torch's ReduceOp of such a name")
    return found


def root_of(root: int, name: str, synonym: int | None) -> int:
    """Return a root, which may be given by torch's name."""
    if synonym is not None and root not in (0, synonym):
        raise InvalidArgumentError(f"root is {root!r} and {name} is {synonym!r}: they mean the same, give one")
    return root if synonym is None else synonym


def peer_of(name: str, value: int | None, torchs: str, synonym: int | None) -> int | None:
    """Return another rank, which may be given by torch's name."""
    if value is not None and synonym is not None and value != synonym:
        raise InvalidArgumentError(f"{name} is {value!r} and {torchs} is {synonym!r}: they mean the same, give one")
    return value if synonym is None else synonym
