"""Parsers of command lines that name the flag or the command that was probably meant, and take no abbreviations."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.nearest import did_you_mean


def open_missing_streams() -> None:
    """Open the standard streams that the caller has closed, on the null device: a socket would get their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - it stays open


def print_all(stream: TextIO) -> None:
    """Let ``stream`` print any text, whatever the locale: a sign that it does not have as its code.

    Bytes of paths that the locale could not decode are printed as they are.
    """
    if isinstance(stream, io.TextIOWrapper):
        codecs.register_error(print_all.__qualname__, _instead)
        with suppress(OSError):  # of a descriptor that another one has taken the place of
            stream.reconfigure(errors=print_all.__qualname__)


def _instead(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what is printed instead of signs that cannot be."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    try:
        return signs.encode("ascii", "surrogateescape"), error.end
    except UnicodeEncodeError:
        return signs.replace("…", "...").encode("ascii", "backslashreplace"), error.end


class Command(argparse.ArgumentParser):
    """Parser of a command. `fill` adds its arguments when they are needed, not before.

    Starting a coordinator therefore does not import what the benchmark's arguments need.
    """

    def __init__(self, fill: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # in a script, it could be another flag's tomorrow
        self._fill = fill

    def error(self, message: str) -> NoReturn:
        """Print one line about a wrong argument, and where to find the right ones; the usage of serve has 14 lines."""
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{end} `{self.prog} --help` shows the options\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Add the arguments, then parse. Every way of parsing calls this, and so does the help of a command."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here, where the command is known
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._nearest_flag(unknown)}")
        return known, unknown

    def _nearest_flag(self, unknown: list[str]) -> str:
        """Return the flag that the first unknown one was probably meant to be, if there is one."""
        first = unknown[0].partition("=")[0]
        return did_you_mean(first, [*self._flags()]) if first.startswith("--") else ""

    def _flags(self) -> Iterator[str]:
        """Yield the long flags that the help shows."""
        for action in self._actions:
            if action.help is not argparse.SUPPRESS:
                yield from (flag for flag in action.option_strings if flag.startswith("--"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise the error of a value that is none of the choices: with the nearest of them, and all."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        nearest = did_you_mean(str(value), choices)
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{nearest} (choose from {', '.join(choices)})")


class Quoted(Command):
    """Parser of a command's options that stand in another one's: its errors are InvalidArgumentErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of a wrong argument."""
        raise InvalidArgumentError(message)
