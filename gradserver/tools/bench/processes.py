"""The processes of a benchmark: requests and answers are lines of JSON over pipes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradserver.tools.common.processes import Child, Family, RunError, single_threaded

ERROR = '{"error":'
"""Beginning of an answer that reports an error."""


class Processes(Family):
    """Processes of a fleet, which answer requests. Leaving the context ends all that still run."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, {**single_threaded(), **(environment or {})})

    def lines(self, children: Sequence[Child], timeout: float) -> list[str]:
        """Wait for the next line of each of `children`.

        Raises:
            RunError: one of the run's processes reported an error, or has ended, or not all of `children` printed a
                line within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not all(child.lines for child in children):
            left = deadline - time.monotonic()
            for child in self.hear(left):
                for line in child.lines:
                    if line.startswith(ERROR):  # at once: the others may wait for this one for minutes
                        raise RunError(f"{child.name}: {json.loads(line)['error']}")
                if child.ended:
                    raise RunError(self.autopsy(child))
            if left <= 0:
                silent = ", ".join(child.name for child in children if not child.lines)
                raise RunError(f"nothing was heard from {silent} for {timeout:.0f} s")
        return [child.lines.pop(0) for child in children]

    def answers(self, children: Sequence[Child], timeout: float) -> list[dict[str, Any]]:
        """Wait for the next answer of each of `children`, as `lines` does."""
        return [json.loads(line) for line in self.lines(children, timeout)]


def ask(child: Child, request: Mapping[str, Any]) -> None:
    """Send one request."""
    child.say(json.dumps(request))
