"""Parsers of numbers, sizes and codecs on the command line. Their errors name the allowed values."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gradserver.protocol.limits import KIB, MAX_NAME_BYTES, MAX_RATE, MAX_WORLD_SIZE, MIB

if TYPE_CHECKING:
    from gradserver.engine.policy import Policy
    from gradserver.protocol.audits import Audit
    from gradserver.protocol.means import Mean

N = TypeVar("N", int, float)


def number(kind: Callable[[str], N], low: N, high: N, what: str = "", limits: str = "{} to {}") -> Callable[[str], N]:
    """Make a parser of numbers.

    Args:
        kind: int or float.
        low: the lowest number that it accepts.
        high: the highest.
        what: name of such a number; empty for a whole number.
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


def folder(text: str) -> Path:
    """Parse the path of a folder. No shell has expanded ``~`` behind ``=``, within quotes, or in a file of settings."""
    return Path(os.path.expanduser(text))


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Make a parser of numbers of seconds."""
    return number(float, low, high, "a number of seconds", "{:g} to {:g}")


def add_seconds(
    parser: argparse._ActionsContainer, flag: str, low: float, high: float, text: str, default: float | None = None
) -> None:
    """Add an option that takes a number of seconds from ``low`` to ``high``, with ``text`` as its help."""
    parser.add_argument(flag, type=seconds(low, high), default=default, metavar="S", help=text)


def workers(text: str) -> Policy:
    """Parse the size of a group: N, or MIN:MAX or MIN: of an elastic one."""
    from gradserver.engine.policy import Policy
    from gradserver.protocol.errors import InvalidWorldSizeError

    least, colon, most = text.partition(":")
    count = number(int, 1, MAX_WORLD_SIZE, "a number of workers")
    if not colon:
        return Policy.of(count(least))
    try:
        return Policy(count(least), count(most) if most else MAX_WORLD_SIZE)
    except InvalidWorldSizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def workers_of(text: str) -> tuple[str, Policy]:
    """Parse NAME=SIZE or SIZE. The name is empty if none is given, and ``*`` for groups that are not named."""
    name, equals, size = text.rpartition("=")
    if equals and (not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with a valid name of a group")
    return name, workers(size)


ANY: Final = ("any",)
"""Names of groups that stand for every name."""


def names(text: str) -> tuple[str, ...]:
    """Parse names of groups, with commas between them; `ANY` for all."""
    found = tuple(name.strip() for name in text.split(","))
    for name in found:
        if not name or not name.isprintable():
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of names, separated by commas")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise argparse.ArgumentTypeError(f"{name[:40]!r}… is longer than {MAX_NAME_BYTES} bytes")
    return found


def quorum(text: str) -> int | str:
    """Parse a number of workers, or a share of them."""
    if not text.endswith("%"):
        return number(int, 1, MAX_WORLD_SIZE, "a number of workers (or a share such as 75%)", "{} to {}")(text)
    share = number(float, 1.0, 100.0, "a share in percent", "{:g} to {:g}")
    share(text[:-1])
    return text


def mean(text: str) -> Mean:
    """Parse the name of a mean, such as ``trimmed:0.25``."""
    from gradserver.protocol.errors import InvalidArgumentError
    from gradserver.protocol.means import mean_of

    try:
        return mean_of(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def audit(text: str) -> Audit:
    """Parse a policy about audits, such as ``0.01:1e-3``."""
    from gradserver.protocol.audits import audit_of
    from gradserver.protocol.errors import InvalidArgumentError

    try:
        return audit_of(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def mib(text: str) -> int:
    """Parse a number of MiB as bytes."""
    return number(int, 2, 1 << 20, "a number of MiB")(text) << 20


def url(text: str) -> str:
    """Take the URL of a coordinator, as tcp://HOST:PORT."""
    from gradserver.protocol.errors import InvalidArgumentError
    from gradserver.protocol.url import parse_url

    try:
        parse_url(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


_UNITS: Final = {"KiB": KIB, "MiB": MIB, "GiB": 1024 * MIB, "TiB": 1024 * 1024 * MIB}


def size(text: str) -> int:
    """Parse a number of bytes with its unit."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([KMGT]iB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: a number and KiB, MiB, GiB or TiB, such as 500MiB")
    return int(float(match[1]) * _UNITS[match[2]])


_BITS: Final = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}


def rate(text: str) -> float:
    """Parse the rate of a link, such as ``200mbit``, as Gbit/s; a number without a unit is of these."""
    match = re.fullmatch(r"(.+?) ?([kmg]bit)", text.lower())
    value, unit = (text, 1.0) if match is None else (match[1], _BITS[match[2]])
    return number(float, 0, MAX_RATE / unit, "a rate in Gbit/s (or with a unit: 200mbit)", "{:g} to {:g}")(value) * unit


def sync(text: str) -> float | None:
    """Parse the seconds between two syncs; 0 for one behind every round, None for none."""
    if text in ("none", "round"):
        return None if text == "none" else 0.0
    return number(float, 0.01, 3600, "none, round, or a number of seconds", "{:g} to {:g}")(text)


def codec(text: str) -> str:
    """Parse the full name of a codec that saves bytes, or of fp32."""
    from gradserver.protocol.codecs import codec_of  # imported here: the command line starts without numpy
    from gradserver.protocol.codecs.base import BLOCK
    from gradserver.protocol.errors import InvalidArgumentError

    try:
        named = codec_of(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if named.nbytes(BLOCK) > 4 * BLOCK:
        raise argparse.ArgumentTypeError(f"{text} takes more bytes than fp32")
    return named.name
