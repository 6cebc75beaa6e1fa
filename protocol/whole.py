"""Whole numbers that a caller gives."""

from __future__ import annotations

from operator import index

from gradserver.protocol.errors import InvalidArgumentError


def whole_number(
    value: object, name: str, least: int = 0, error: type[InvalidArgumentError] = InvalidArgumentError
) -> int:
    """Return ``value`` as an int of at least ``least``, else raise ``error`` with ``name``.

    It takes whatever stands for an integer (numpy's, too). Neither a string such as ``"2"``, as in an environment
    variable, nor a bool is one.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]  # the check
    except TypeError:
        number = None
    if number is None:
        raise error(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if number < least:
        raise error(f"{name} must be at least {least}, not {number}")
    return number
