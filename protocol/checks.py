"""Checks of values from the wire. Each takes any value and returns it with its type, or raises.

Values come from msgpack. Its integers have 64 bits, and the size of containers was limited when they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgpack

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import MAX_FRAME_BYTES, MAX_LIST, MAX_TEXT

T = TypeVar("T")
Fact = str | int | tuple[str, ...]
"""A field of an error."""


def integer(low: int, high: int) -> Callable[[Any], int]:
    """Return a check of integers."""

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise MalformedMessageError(f"expected an integer from {low} to {high}, got {brief(value)}")
        return value

    return check


def number(low: float, high: float) -> Callable[[Any], float]:
    """Return a check of floating numbers."""

    def check(value: Any) -> float:
        if type(value) is not float or not low <= value <= high:  # NaN fails both comparisons
            raise MalformedMessageError(f"expected a number from {low} to {high}, got {brief(value)}")
        return value

    return check


def text(longest: int) -> Callable[[Any], str]:
    """Return a check of text."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > longest:
            raise MalformedMessageError(f"expected text of at most {longest} characters, got {brief(value)}")
        return value

    return check


def ascii_text(longest: int) -> Callable[[Any], str]:
    """Return a check of printable ASCII. On a terminal it upsets nothing, and a character is a byte."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > longest or not value.isascii() or not value.isprintable():
            raise MalformedMessageError(f"expected printable ASCII of at most {longest} characters, got {brief(value)}")
        return value

    return check


def choice(names: Sequence[str]) -> Callable[[Any], str]:
    """Return a check of text that is one of ``names``."""

    def check(value: Any) -> str:
        if type(value) is not str or value not in names:
            raise MalformedMessageError(f"expected one of {', '.join(names)}, got {brief(value)}")
        return value

    return check


def flag(value: Any) -> bool:
    """Check true and false."""
    if type(value) is not bool:
        raise MalformedMessageError(f"expected true or false, got {brief(value)}")
    return value


def listed(check: Callable[[Any], T], most: int) -> Callable[[Any], tuple[T, ...]]:
    """Return a check of lists, and of each of their items."""

    def check_all(value: Any) -> tuple[T, ...]:
        if type(value) is not list or len(value) > most:
            raise MalformedMessageError(f"expected a list of at most {most} items, got {brief(value)}")
        return tuple(check(item) for item in value)

    return check_all


def numbers(low: float, high: float, most: int) -> Callable[[Any], tuple[float, ...]]:
    """Return a check of lists of floating numbers. It is `listed` and `number` together, in a fraction of the time."""
    each = listed(number(low, high), most)

    def check(value: Any) -> tuple[float, ...]:
        if type(value) is not list or not 0 < len(value) <= most or set(map(type, value)) != {float}:
            return each(value)
        total = sum(value)  # NaN, if any of them is
        return tuple(value) if low <= min(value) and max(value) <= high and total == total else each(value)

    return check


def optional(check: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Return a check of what may be left out."""
    return lambda value: None if value is None else check(value)


def facts(value: Any) -> dict[str, Fact]:
    """Check an error's fields."""
    if type(value) is not dict:
        raise MalformedMessageError(f"expected an error's fields, got {brief(value)}")
    return {_text(name): _fact(item) for name, item in value.items()}


def _fact(value: Any) -> Fact:
    if type(value) is list:
        return _texts(value)
    if type(value) is int:
        return value
    return _text(value)


_text = text(MAX_TEXT)
_texts = listed(_text, MAX_LIST)


def brief(value: Any) -> str:
    """Describe a value, however large it is."""
    if isinstance(value, (str, bytes, list, dict)):
        return f"{type(value).__name__} of length {len(value)}"
    return repr(value)[:60]


def unpack(data: Buffer, what: str, most: int, maps: bool) -> list[Any]:
    """Unpack the list in ``data`` (msgpack), with at most ``most`` items in each list; ``maps`` allows maps.

    Raises:
        MalformedMessageError: the data is no such list. ``what`` describes it.
    """
    try:
        unpacked = msgpack.unpackb(
            data,
            use_list=True,
            raw=False,
            strict_map_key=True,
            max_str_len=4 * MAX_TEXT,
            max_bin_len=MAX_FRAME_BYTES,
            max_ext_len=0,
            max_array_len=most,
            max_map_len=64 if maps else 0,
        )
    except Exception as error:  # msgpack raises errors of many types, all of them about these bytes
        raise MalformedMessageError(f"{what}: {str(error)[:120]}") from None
    if type(unpacked) is not list:
        raise MalformedMessageError(what)
    return unpacked
