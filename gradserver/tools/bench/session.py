"""Output of one run of a suite: sections and rows as they are measured, and the documents at the end."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradserver.json_text import json_text
from gradserver.tables import counted
from gradserver.tools.bench import machine
from gradserver.tools.bench.advice import advise
from gradserver.tools.bench.fleet import Fleet, Measured, Needs
from gradserver.tools.bench.places import Place
from gradserver.tools.bench.report import NOTES, Row, Table, conclusion
from gradserver.tools.bench.spec import Case
from gradserver.tools.bench.stats import size_name
from gradserver.tools.common.screen import BOLD, CYAN, DIM, GREEN, RED, Screen

_WIDTH = 110  # of running text


class Session:
    """Collector of rows, which it shows on `screen` unless that is None."""

    def __init__(
        self, suite: str, layout: str, repetitions: int, sample_seconds: float, folder: Path, screen: Screen | None
    ) -> None:
        self.suite = suite
        self.rows: list[Row] = []
        self._layout = layout
        self._repetitions = repetitions
        self._sample_seconds = sample_seconds
        self._folder = folder
        self._screen = screen
        self._table = Table(layout)
        self._began = datetime.now(UTC)
        self._machine = machine.describe()  # before this run loads it
        self._fleets = 0

    def introduce(self) -> None:
        """Show the machine, and the legend of the table."""
        if self._screen is None:
            return
        here, versions = self._machine, machine.versions()
        self._screen.line(self._screen.style(f"gradserver bench {self.suite}", BOLD))
        self._screen.line()
        memory = f"{here['memory_bytes'] / 2**30:.0f} GiB"
        self._note(f"{here['cpu']}, {counted(here['cores'], 'core')}, {memory}, {here['system']}")
        self._note(", ".join(f"{name} {version}" for name, version in versions.items()))
        if here["load_before"] > here["cores"] / 2:
            busy = f"the load is {here['load_before']:g}: other programs use the cores, so expect wide quartiles"
            self._screen.line(f"  {self._screen.style(busy, RED)}")
        self._screen.line()
        for note in NOTES[self._layout if self._layout in NOTES else "all_reduce"]:
            self._note(note)

    @contextmanager
    def fleet(
        self, workers: int, needs: Needs, title: str, place: Place | None = None, layout: str | None = None
    ) -> Iterator[Fleet]:
        """Start processes, under a heading. Without a title, sections have theirs."""
        if title:
            self.section(title, layout or self._layout)
        self.live("starting processes: importing torch")
        self._fleets += 1
        with Fleet(workers, needs, self._folder / f"fleet-{self._fleets}", place) as fleet:
            yield fleet

    def section(self, title: str, layout: str) -> None:
        """Begin a table."""
        self._table = Table(layout)
        if self._screen is not None:
            self._screen.line()
            self._screen.line(self._screen.style(title, CYAN))
            for line in self._table.heading():
                self._screen.line(self._screen.style(line, DIM))

    def measure(
        self, fleet: Fleet, case: Case, *, repetitions: int | None = None, sample_seconds: float | None = None
    ) -> dict[str, Measured]:
        """Measure as `Fleet.measure` does, with the run's own numbers where none are given."""
        seconds = self._sample_seconds if sample_seconds is None else sample_seconds
        where = f"{fleet.workers} workers, {size_name(case.nbytes)}"
        return fleet.measure(
            case, repetitions or self._repetitions, seconds, lambda what: self.live(f"{where}: {what}")
        )

    def add(self, row: Row) -> None:
        """Show a row."""
        self.rows.append(row)
        if self._screen is not None:
            line = self._table.line(row)
            self._screen.line(self._screen.style(line, RED) if row.wrong else line)

    def conclude(self) -> int:
        """Show the conclusion. Return the exit status: 1 if any value was wrong."""
        failed = any(row.wrong or row.peer_wrong for row in self.rows)
        if self._screen is not None:
            self._screen.line()
            for sentence in self._sentences():
                for line in textwrap.wrap(sentence, _WIDTH, break_on_hyphens=False):
                    self._screen.line(self._screen.style(line, RED if failed else GREEN))
        return int(failed)

    def _sentences(self) -> list[str]:
        return [*advise(self.rows), conclusion(self.rows)]

    def interrupted(self) -> None:
        """Clear the live line, for the output that follows."""
        if self._screen is not None:
            self._screen.clear()

    def document(self, command: list[str], settings: dict[str, Any]) -> str:
        """Format all results as JSON."""
        return json_text(
            {
                "suite": self.suite,
                "date": self._began.isoformat(timespec="seconds"),
                "seconds": round((datetime.now(UTC) - self._began).total_seconds(), 1),
                "command": command,
                "settings": settings,
                "machine": self._machine,
                "versions": machine.versions(),
                "units": "times in seconds, bandwidths in bytes per second; a sample is the slowest rank's time",
                "rows": [row.to_json() for row in self.rows],
                "conclusion": " ".join(self._sentences()),
            },
            indent=2,
            default=str,
        )

    def _note(self, text: str) -> None:
        if self._screen is not None:
            self._screen.line(f"  {self._screen.style(text, DIM)}")

    def live(self, text: str) -> None:
        """Show the progress, until other output replaces it."""
        if self._screen is not None:
            self._screen.live(f"  {text}")
