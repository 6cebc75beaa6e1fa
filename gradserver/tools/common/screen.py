"""Output to standard output: plain lines everywhere, colours and a live line on terminals."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from itertools import zip_longest
from typing import TextIO

from gradserver.protocol.harmless import harmless, one_line

WIDTH = 79  # columns; a longer live line would wrap and could not be taken back

BOLD, DIM, RED, GREEN, CYAN = "1", "2", "31;1", "32;1", "36;1"

_LIVE_SECONDS = 0.1  # between two drawings of the live line
_EIGHTHS = " ▏▎▍▌▋▊▉"


Fact = tuple[str, str]
"""Name and text of a line in a table of two columns."""


class Screen:
    """Writer to `stream`. It uses control codes only on a terminal that supports them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._colour = self._is_terminal and not os.environ.get("NO_COLOR")
        self._encoding = stream.encoding or "ascii"
        self._live = False
        self._drawn = 0.0

    def line(self, text: str = "") -> None:
        """Print a line."""
        self._write(f"{self._cleared()}{text}\n")

    def live(self, text: str) -> None:
        """Show a line that the next one replaces. Does nothing where that is impossible."""
        now = time.monotonic()
        if self._is_terminal and (not self._live or now - self._drawn >= _LIVE_SECONDS):
            self._write(f"{self._cleared()}{self.style(one_line(text)[:WIDTH], DIM)}")
            self._live, self._drawn = True, now

    def clear(self) -> None:
        """Clear the live line."""
        self._write(self._cleared())

    def facts(self, *facts: Fact) -> None:
        """Print a table of two columns."""
        for name, text in facts:
            pieces = textwrap.wrap(one_line(text), WIDTH - 12, break_long_words=False, break_on_hyphens=False)
            for label, piece in zip_longest([name], pieces or [""], fillvalue=""):
                self.line(f"  {self.style(f'{label:10}', DIM)}{piece}".rstrip())

    def verdict(self, passed: bool, text: str) -> None:
        """Print PASS or FAIL, and a text."""
        self.line(f"{self.style('PASS', GREEN) if passed else self.style('FAIL', RED)}  {harmless(text)}")

    def style(self, text: str, code: str) -> str:
        """Style `text` with a colour or weight, where there are any."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and text else text

    def bar(self, share: float, width: int) -> str:
        """Draw a bar over `share` (0 to 1) of `width` columns, padded to that width."""
        share = min(1.0, max(0.0, share)) if share == share else 0.0
        if not self._can_print(_EIGHTHS):
            return ("#" * round(share * width)).ljust(width)
        full, rest = divmod(round(share * width * 8), 8)
        return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)

    def _can_print(self, text: str) -> bool:
        try:
            text.encode(self._encoding)
        except (LookupError, UnicodeEncodeError):
            return False
        return True

    def _cleared(self) -> str:
        was, self._live = self._live, False
        return "\r\x1b[2K" if was else ""

    def _write(self, text: str) -> None:
        self._stream.write(text.encode(self._encoding, "replace").decode(self._encoding))
        self._stream.flush()


def discard_output() -> None:
    """Send standard output to nowhere, as its reader has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def duration(seconds: float) -> str:
    """Describe a duration roughly: ``20 s``, ``a minute``, ``5 minutes``."""
    if seconds < 45:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    return "a minute" if minutes <= 1 else f"{minutes} minutes"
