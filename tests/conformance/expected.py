"""The list of torch's tests that do not pass, and the figures of whole runs: what a run is compared with.

Both are files beside this one, which people edit: `expected.toml` and `figures.toml`. Their first lines say how.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.conformance.crew import GOOD, Kind, Outcome
from tests.conformance.suite import GLOO

LIST: Final = Path(__file__).with_name("expected.toml")
FIGURES: Final = Path(__file__).with_name("figures.toml")

_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("tests", "worlds", "gloo", "gradserver"), tuple),
    "kind": Kind,
    "world": int,
}
"""Values of the files that are no strings, and their types."""
Outcomes = Mapping[str, Outcome]
"""Outcomes by the name of the test."""


def version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version of torch, without what follows them."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Tests that do not pass for one reason."""

    reason: str
    tests: tuple[str, ...]
    backend: str = "gradserver"
    kind: Kind = Kind.FAIL
    """The outcome of each of them."""
    worlds: tuple[int, ...] = (2, 4, 8)
    since: str = "0"
    """The first version of torch for which this holds."""
    before: str = "1000"
    """The first version of torch for which it does not hold any more."""

    def holds(self, backend: str, world: int, torch: str) -> bool:
        """Return true if it is about this backend and world, and this version of torch."""
        applies = version(self.since) <= version(torch) < version(self.before)
        return applies and backend == self.backend and world in self.worlds


def entries(path: Path = LIST) -> list[Entry]:
    """Read the list."""
    tables: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8")).get("entry", [])
    return [Entry(**{key: _READ.get(key, str)(value) for key, value in table.items()}) for table in tables]


def kinds(listed: Sequence[Entry], backend: str, world: int, torch: str) -> dict[str, Kind]:
    """Return what is expected of each test that does not pass."""
    return {test: entry.kind for entry in listed if entry.holds(backend, world, torch) for test in entry.tests}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Numbers of tests of a run that passed, did not pass, and were skipped: with gloo, and with this backend."""

    torch: str
    world: int
    gloo: tuple[int, int, int]
    gradserver: tuple[int, int, int]
    date: str = ""


def figures(path: Path = FIGURES) -> list[Figures]:
    """Read the figures of whole runs."""
    tables: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8")).get("run", [])
    return [Figures(**{key: _READ.get(key, str)(value) for key, value in table.items()}) for table in tables]


def counted(outcomes: Outcomes) -> tuple[int, int, int]:
    """Count the tests that passed, did not pass, and were skipped."""
    counts = Counter(outcome.kind for outcome in outcomes.values())
    return counts[Kind.PASS], sum(counts[kind] for kind in Kind if kind not in GOOD), counts[Kind.SKIP]


def drift(outcomes: Outcomes, expected: Mapping[str, Kind], beside: Outcomes) -> Iterator[str]:
    """Yield a line for each test that is not as the list says. ``beside`` is what came of the same tests with gloo.

    A test that gloo runs must run: a skip counts as passed nowhere. One that gloo skips may run, if it passes.
    """
    for test, outcome in outcomes.items():
        kind, listed = outcome.kind, expected.get(test)
        if listed is not None:
            if kind == Kind.PASS:
                yield f"{test} passes. Take it from the list."
            elif kind != listed:
                yield f"{test}: {outcome}. The list expects '{listed}'."
        elif kind not in GOOD:
            yield f"{test}: {outcome}. The list does not have it."
        elif kind == Kind.SKIP and test in beside and beside[test].kind != Kind.SKIP:
            yield f"{test} is skipped ({outcome.why}), and gloo runs it."
    for test in expected.keys() - outcomes.keys():
        yield f"{test} is in the list, and this torch has no such test."


def drift_of_figures(
    rows: Sequence[Figures], torch: str, world: int, counts: Mapping[str, tuple[int, int, int]]
) -> Iterator[str]:
    """Yield a line for each figure of a whole run that is not as it is written down. Other versions have none."""
    for row in rows:
        if (version(row.torch), row.world) == (version(torch), world):
            for backend, now in counts.items():
                before = row.gloo if backend == GLOO else row.gradserver
                if now != before:
                    yield f"{backend}: {told(now)}. The figures say {told(before)}."


def told(counts: tuple[int, int, int]) -> str:
    """Return such counts in words."""
    return "{} passed, {} not, {} skipped".format(*counts)
