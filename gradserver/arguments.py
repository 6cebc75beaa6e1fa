"""Numbers on the command line, with an error that says what they must be."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)


def number(kind: Callable[[str], N], low: N, high: N, what: str = "", limits: str = "{} to {}") -> Callable[[str], N]:
    """A parser of numbers.

    Args:
        kind: int or float.
        low: the least that it takes.
        high: the most.
        what: what the text should be; a whole number unless said otherwise.
        limits: how ``low`` and ``high`` are written.
    """
    allowed = f"{what} is {limits}" if what else limits

    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what or 'a whole number'}") from None
        if not low <= value <= high:  # NaN fails both comparisons
            raise argparse.ArgumentTypeError(f"{text} is out of range: {allowed.format(low, high)}")
        return value

    return parse
