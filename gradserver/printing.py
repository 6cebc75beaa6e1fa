"""Lines for people, on a terminal. Texts of other processes cannot do more there than stand in their line."""

from __future__ import annotations

import sys
from typing import TextIO

from gradserver.protocol.harmless import one_line


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Print ``lines`` to ``stream``, standard output by default, each as one line."""
    print("\n".join(map(one_line, lines)), file=sys.stdout if stream is None else stream)


def complain(command: str, error: object) -> None:
    """Print an error of ``command`` to standard error. Its text may have several lines."""
    say(*f"{command}: {error}".split("\n"), stream=sys.stderr)
