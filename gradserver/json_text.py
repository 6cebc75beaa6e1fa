"""JSON for other programs: of the status, the ledger, and the results of commands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def json_text(value: Any, indent: int | None = None, default: Callable[[Any], object] | None = None) -> str:
    """Return ``value`` as JSON. Numbers that are not finite become null: JSON has none, and most readers refuse them.

    Args:
        value: mappings, lists and tuples of texts, numbers, booleans and None.
        indent: as for `json.dumps`.
        default: converts values of other types; without it they are a TypeError.
    """
    try:
        return json.dumps(value, indent=indent, default=default, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, default=default, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return the same with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
