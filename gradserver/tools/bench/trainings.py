"""Trainings that a suite carries out one after the other, with a process for each worker."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol

from gradserver.json_text import json_text
from gradserver.tools.bench import machine
from gradserver.tools.common.processes import RunError, available_cores, ended_by_signals


class Finished(Protocol):
    """A training that has ended."""

    @property
    def is_same(self) -> bool:
        """True if all workers that should have the same bits have them."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""


def print_heading(title: str) -> None:
    """Print what is trained, and the machine."""
    print(f"{title}\n  {machine.describe()['cpu']}, {available_cores()} cores; torch {machine.versions()['torch']}")


def carry_out(trainings: Iterable[Finished], as_json: bool) -> int:
    """Carry out ``trainings``, each when it is asked for, and print a document of all if it is to be JSON.

    Returns:
        The exit status: 0, or 1 if a training failed or its workers differ, or 130 after Ctrl-C.
    """
    finished: list[Finished] = []
    try:
        with ended_by_signals():
            finished.extend(trainings)
    except (RunError, OSError) as error:
        print(f"gradserver bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if as_json:
        document = {"machine": machine.describe(), "versions": machine.versions()}
        print(json_text({**document, "runs": [one.to_json() for one in finished]}, indent=2))
    return 0 if all(one.is_same for one in finished) else 1
