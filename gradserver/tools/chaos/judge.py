"""The oracle as a process that follows a run: ``python -m gradserver.tools.chaos.judge FOLDER WORKLOAD``.

It runs beside the run, at a low priority. It prints its progress as a line of JSON every few seconds. When it reads
``end`` on standard input, it checks the rest and prints its verdict.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradserver.tools.chaos.evidence import HEARD, LEDGER, HeardTail, LedgerTail
from gradserver.tools.chaos.oracle import Oracle
from gradserver.tools.chaos.workload import Workload

_EVERY_SECONDS = 2.0
_SETTLED = 5.0
"""Seconds after which an event is over."""
_LOOK, _LEAST = 15.0, 4.0
"""Seconds before an event, and after its end, in which rounds are counted; and the minimum of these seconds."""


class Judge:
    """Reader that feeds the oracle with the files of a run."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.oracle = Oracle(workload)
        self._ledger, self._heard = LedgerTail(folder / LEDGER), HeardTail(folder / HEARD)
        self._spans: dict[str, float] = {}
        """Times at which the run's parts began."""
        self._events: list[tuple[str, float]] = []

    def follow(self, everything: bool = False) -> None:
        """Read new evidence, and check the rounds of which all evidence is there."""
        records = list(self._ledger.read())  # first: the workers' reports of these rounds are then there
        for line in self._heard.read():
            if line["kind"] == "event":
                self._events.append((line["event"], line["at"]))
            elif line["kind"] in ("begun", "storm", "calm", "end"):
                self._spans[line["kind"]] = line["at"]
            self.oracle.hear(line)
        for dated in records:
            self.oracle.take(dated)
        self.oracle.settle(everything)

    def progress(self) -> dict[str, Any]:
        """Return the progress."""
        oracle = self.oracle
        return {"checked": oracle.checked, "behind": oracle.behind, "found": dict(oracle.found)}

    def verdict(self) -> dict[str, Any]:
        """Return the verdict."""
        oracle, spans = self.oracle, self._spans
        moments = list(oracle.completions)
        end = spans.get("end", moments[-1] if moments else 0.0)
        begun = spans.get("begun", moments[0] if moments else 0.0)
        stall = max(oracle.longest, (end - moments[-1], moments[-1])) if moments else (end - begun, begun)
        return {
            **self.progress(),
            "rounds": oracle.checked,
            "unwritten": oracle.unwritten,
            "contributions": oracle.expected,
            "committed": oracle.counted,
            "in_part": oracle.cut,
            "meetings": oracle.meetings,
            "halves": oracle.halves,
            "among": oracle.among,
            "ways": dict(oracle.ways),
            "staleness": {str(late): count for late, count in sorted(oracle.staleness.items()) if count},
            "findings": oracle.findings,
            "longest_stall": stall[0],
            "longest_stall_at": stall[1] - begun,
            "resumed": self._resumed(moments),
            "rates": {
                "calm": calm_rate(moments, spans),
                "storm": _rate(moments, spans.get("storm"), spans.get("calm")),
            },
            "before_and_after": before_and_after(moments, [at for _, at in self._events], spans),
        }

    def _resumed(self, moments: list[float]) -> dict[str, list[float]]:
        """Collect the times from each event to the next finished round, by kind."""
        found: dict[str, list[float]] = {}
        place = 0
        for kind, at in self._events:
            while place < len(moments) and moments[place] <= at:
                place += 1
            if place < len(moments):
                found.setdefault(kind, []).append(moments[place] - at)
        return found


def calm_rate(moments: list[float], spans: Mapping[str, float]) -> float | None:
    """Compute the rounds a second before and after the storm, taken together, as the machine may have changed."""
    rounds = seconds = 0.0
    for begin, end, settled in (("begun", "storm", 0.0), ("calm", "end", _SETTLED)):
        if begin not in spans or end not in spans:
            continue
        start, stop = spans[begin] + settled, spans[end]
        if (rate := _rate(moments, start, stop)) is not None:
            rounds, seconds = rounds + rate * (stop - start), seconds + stop - start
    return rounds / seconds if seconds else None


def before_and_after(moments: list[float], times: list[float], spans: Mapping[str, float]) -> list[float]:
    """Compute the ratio of the rate after an event to the rate just before it, for ``times`` that stand alone.

    The machine's own changes of speed take longer, and therefore do not count.
    """
    if "begun" not in spans or "end" not in spans:
        return []
    ratios = []
    lasts, followings = [spans["begun"] - _SETTLED, *times[:-1]], [*times[1:], spans["end"]]
    for last, at, following in zip(lasts, times, followings, strict=True) if times else ():
        if min(at - last, following - at) < _SETTLED + _LEAST:
            continue
        before = _rate(moments, max(last + _SETTLED, at - _LOOK), at)
        after = _rate(moments, at + _SETTLED, min(following, at + _SETTLED + _LOOK))
        if before and after is not None:
            ratios.append(after / before)
    return ratios


def _rate(moments: list[float], start: float | None, stop: float | None) -> float | None:
    """Compute the rounds a second."""
    if start is None or stop is None or stop <= start:
        return None
    return sum(start <= moment < stop for moment in moments) / (stop - start)


def main() -> int:
    """Follow a run until its end."""
    os.nice(10)
    folder, workload = sys.argv[1:]
    judge = Judge(Path(folder), Workload.from_json(workload))
    while not select.select([sys.stdin], [], [], _EVERY_SECONDS)[0]:
        judge.follow()
        print(json.dumps(judge.progress()), flush=True)
    judge.follow(everything=True)
    print(json.dumps(judge.verdict()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
