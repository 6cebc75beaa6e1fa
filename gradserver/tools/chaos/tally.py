"""Tallies: contributions to collective sums, with digits that show which workers are in the sum, and how often.

A tally is `LENGTH` numbers of 64 bits. Each worker has its own hexadecimal digit in one of them, which is 1. The last
number is a code of the worker and the round. The sum of tallies names the workers. A digit 2 is a contribution that
counted twice, and a digit 0 is one that did not count. Another sum of codes shows one of another round.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Tally = npt.NDArray[np.int64]

LENGTH: Final = 32
LARGE: Final = 5000
"""Number of tallies in a tensor of two slices."""
_DIGITS: Final = 15
"""Digits of each number: a digit can grow to 15, and the sum stays below 2^63."""
_PLACES: Final = (LENGTH - 1) * _DIGITS
_WORKERS: Final = 256
"""Number of places of the workers w0, w1, …; all other workers share the places behind them."""
_UNKNOWN: Final = 6
"""Number of workers of which all combinations are tried."""


def tally(name: str, number: int) -> Tally:
    """Make the contribution of ``name`` to a sum behind round ``number``."""
    row = np.zeros(LENGTH, np.int64)
    place, digit = divmod(_place(name), _DIGITS)
    row[place] = 16**digit
    row[-1] = code(name, number)
    return row


def code(name: str, number: int) -> int:
    """Encode a worker and a round in 40 bits."""
    return (zlib.crc32(f"{name} {number}".encode()) << 8) + zlib.crc32(name.encode()) % 256


def fits(seen: Sequence[int], number: int, sure: Collection[str], perhaps: Collection[str]) -> bool:
    """Return whether ``seen`` is the sum of all ``sure`` workers, each once, and of some of the others."""
    rest = np.array(seen, np.int64) - sum((tally(name, number) for name in sure), np.zeros(LENGTH, np.int64))
    others = [tally(name, number) for name in sorted(perhaps)[:_UNKNOWN]]
    nothing: list[Any] = [np.zeros(LENGTH, np.int64)]
    return any(
        np.array_equal(rest, sum(some, nothing[0]))
        for count in range(len(others) + 1)
        for some in itertools.combinations(others, count)
    )


def explain(seen: Sequence[int], sure: Collection[str], perhaps: Collection[str]) -> str:
    """Describe how often each worker is in a sum that does not fit."""
    if len(seen) != LENGTH:
        return "it is not a tally"
    known = {_place(name): name for name in (*perhaps, *sure)}
    found = []
    for place in range(_PLACES):
        digit = seen[place // _DIGITS] // 16 ** (place % _DIGITS) % 16
        name = known.get(place)
        if name is None and digit:
            found.append(f"another worker {digit} times")
        elif digit > 1 or (name in sure and not digit):
            found.append(f"{name} {digit} times")
    return f"it has {', '.join(found)}" if found else "it has each worker once, but with values of another round"


def _place(name: str) -> int:
    if name[:1] == "w" and name[1:].isdecimal() and int(name[1:]) < _WORKERS:
        return int(name[1:])
    return _WORKERS + zlib.crc32(name.encode()) % (_PLACES - _WORKERS)
