"""Numbers and codecs on the command line, with an error that says what they must be."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from protocol.limits import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from gradserver.engine.policy import Policy

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


def workers(text: str) -> int | Policy:
    """How many workers a group has: N, or MIN:MAX, or MIN: if it is elastic."""
    from gradserver.engine.policy import Policy
    from protocol.errors import InvalidWorldSizeError

    least, colon, most = text.partition(":")
    count = number(int, 1, MAX_WORLD_SIZE, "a number of workers")
    if not colon:
        return count(least)
    try:
        return Policy(count(least), count(most) if most else MAX_WORLD_SIZE)
    except InvalidWorldSizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def codec(text: str) -> str:
    """The whole name of a codec that saves bytes, or of fp32."""
    from protocol.codecs import codec_of  # here, as a command line is to come up without numpy
    from protocol.codecs.base import BLOCK
    from protocol.errors import InvalidArgumentError

    try:
        named = codec_of(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if named.nbytes(BLOCK) > 4 * BLOCK:
        raise argparse.ArgumentTypeError(f"{text} takes more bytes than fp32")
    return named.name
