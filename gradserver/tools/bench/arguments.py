"""Parsers of values on the command line. Their errors show valid values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradserver.arguments import codec, number
from gradserver.protocol.planes import AUTO, DIRECT, SHM, TCP
from gradserver.tools.bench.spec import BACKENDS, FLOAT_BYTES, WIRES

T = TypeVar("T")

_PLANES = (AUTO, TCP, SHM, DIRECT)
"""Planes of the suite `train`, where each worker has a host."""

MAX_BYTES = 4 << 30
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNITS |= {f"{letter}IB": _UNITS[letter] for letter in "KMG"}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def size(text: str) -> int:
    """Parse a size in whole fp32 elements: ``4KiB`` or ``4K`` (4096), ``26MB`` (26 000 000), ``8B``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.strip(), re.IGNORECASE)
    scale = _UNITS.get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write 4KiB or 4K (4096 bytes), 26MB (26,000,000), 8B"
        )
    nbytes = round(float(match[1]) * scale)
    if nbytes % FLOAT_BYTES or not 2 * FLOAT_BYTES <= nbytes <= MAX_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text} is {nbytes} bytes: sizes are multiples of {FLOAT_BYTES}, from 8 bytes to {MAX_BYTES >> 30} GiB"
        )
    return nbytes


def rate(text: str) -> float:
    """Parse a link's rate, such as ``1gbit`` or ``100mbit``, to bytes per second."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text.strip(), re.IGNORECASE)
    scale = _RATES.get(match[2].lower()) if match else None
    if match is None or scale is None or not 10**6 <= float(match[1]) * scale <= 400 * 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write 100mbit or 2.5gbit (1mbit to 400gbit)")
    return float(match[1]) * scale / 8


def algorithm(text: str) -> str:
    """Parse the name of a congestion control. The kernel checks whether it has it."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,14}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a congestion control, such as cubic, reno or bbr"
        )
    return text


def wire(text: str) -> str:
    """Parse the name of a wire format."""
    if text not in WIRES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a wire format; the formats are {', '.join(WIRES)}")
    return text


def contender(text: str) -> tuple[str, str]:
    """Parse a contender of the suite `train`: ``tcp/int8``, ``direct``, ``ddp/powersgd:2``. fp32 need not be named."""
    way, _, wire = text.partition("/")
    if way == "ddp":
        hook, _, rank = wire.partition(":")
        if hook == "powersgd":
            return way, f"powersgd:{whole(1, 64)(rank or '1')}"
        if wire in ("", "fp32", "bf16"):
            return way, wire or "fp32"
        raise argparse.ArgumentTypeError(f"{text!r}: torch's wrapper has ddp/fp32, ddp/bf16, ddp/powersgd:RANK")
    if way in BACKENDS:
        if wire in ("", "fp32"):
            return way, "fp32"
        raise argparse.ArgumentTypeError(f"{text!r}: the backend of torch.distributed has fp32 alone")
    if way not in _PLANES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a contender: write WAY/WIRE with {', '.join((*_PLANES, 'ddp', *BACKENDS))}"
        )
    return way, codec(wire or "fp32")


def parameters(text: str) -> int:
    """Parse a number of parameters: ``25M`` or ``100000``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)", text.strip(), re.IGNORECASE)
    count = round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2].upper()]) if match else 0
    if not 10**4 <= count <= 10**10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters: write 25M (10K to 10G)")
    return count


def whole(low: int, high: int) -> Callable[[str], int]:
    """Make a parser of whole numbers from `low` to `high`."""
    return number(int, low, high, limits="{:,} to {:,}")


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Make a parser of comma-separated values, each at most once."""

    def parse_all(text: str) -> list[T]:
        values = [parse(part.strip()) for part in text.split(",")]
        if len({*map(repr, values)}) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} contains a value twice")
        return values

    return parse_all


def one_of(*names: str) -> Callable[[str], str]:
    """Make a parser of one of these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; the names are {', '.join(names)}")
        return text

    return parse


def picture(text: str) -> Path:
    """Parse the path of a picture, in a folder that exists."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r}: the picture is a PNG; its name must end with .png")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: the folder {path.absolute().parent} does not exist")
    return path
