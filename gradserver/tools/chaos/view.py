"""Output of a chaos run: its plan, a line for each event, its progress, and its results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradserver.tables import table
from gradserver.tools.chaos.fleet import Fleet
from gradserver.tools.chaos.schedule import Event, Schedule, Way
from gradserver.tools.common.screen import BOLD, CYAN, DIM, Screen

_STATUS_SECONDS = 10.0
"""Interval of status lines where a line cannot be replaced."""
_FINDINGS = 12
_LONG = 400


class View:
    """Printer of a run's output. It prints nothing without a screen."""

    def __init__(self, screen: Screen | None, is_terminal: bool) -> None:
        self._screen = screen
        self._is_terminal = is_terminal
        self._began = time.monotonic()
        self._told = self._began

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line."""
        if self._screen is not None:
            self._screen.line(self._screen.style(text, style) if style else text)

    def introduce(self, schedule: Schedule, ways: Mapping[str, Way], shards: int, seed: int, folder: Path) -> None:
        """Print the plan of the run."""
        if self._screen is None:
            return
        counts = Counter(event.kind for event in schedule.events)
        roads = Counter(ways.values())
        by = ", ".join(f"{count} {_WAYS[way]}" for way, count in roads.items())
        self.line("gradserver chaos", BOLD)
        self.line()
        self._screen.facts(
            ("workers", f"{len(ways)}: {by}"),
            *([("shards", f"{shards}")] if shards > 1 else []),
            ("events", f"{len(schedule.events)} in {schedule.calm - schedule.storm:.0f} s, drawn from seed {seed}"),
            ("", ", ".join(f"{count} {kind}" for kind, count in counts.most_common())),
            ("calm", f"the first {schedule.storm:.0f} s and the last {schedule.seconds - schedule.calm:.0f} s"),
            ("files", f"{folder}: all events are in plan.txt, with logs and reports of all processes beside it"),
        )
        self.line()

    def begun(self) -> None:
        """Note the time at which the run begins."""
        self._began = self._told = time.monotonic()

    def event(self, event: Event, fleet: Fleet, done: bool) -> None:
        """Print an event."""
        if self._screen is None:
            return
        mark = f"{self._elapsed():7.1f} s  round {max(fleet.round, 0):6}  "
        text = f"{event.kind:11} {event.target:11} "
        more = str(event) if done else "not running, or needed: skipped"
        self._screen.line(mark + self._screen.style(text, CYAN if done else DIM) + self._screen.style(more, DIM))

    def status(self, fleet: Fleet, schedule: Schedule, done: int) -> None:
        """Print the progress."""
        if self._screen is None:
            return
        judged = fleet.judged
        wrong = sum(judged["found"].values()) + len(fleet.faults)
        verdict = f"{wrong} FAULTS" if wrong else "no faults"
        text = (
            f"  {self._elapsed():5.0f} of {schedule.seconds:.0f} s, {fleet.inside} members, round {fleet.round}, "
            f"{done} events; {judged['checked']} rounds checked, {verdict}"
        )
        if self._is_terminal:
            self._screen.live(text)
        elif time.monotonic() - self._told >= _STATUS_SECONDS:
            self._told = time.monotonic()
            self._screen.line(text)

    def judging(self, progress: Mapping[str, Any]) -> None:
        """Print the progress of the oracle, which continues after the run."""
        if self._screen is not None:
            self._screen.live(f"  the oracle has checked {progress['checked']} rounds, {progress['behind']} remain")

    def conclude(self, result: Mapping[str, Any], wrongs: Sequence[str], folder: Path | None) -> None:
        """Print the results."""
        if self._screen is None:
            return
        self._screen.clear()
        self.line()
        rows = []
        for kind, count in sorted(result["events_by_kind"].items(), key=lambda item: -item[1]):
            following = result["next_round_after"].get(kind, {})
            back = result["back_after"].get(kind, {})
            rows.append([kind, count, _seconds(following, "median"), _seconds(following, "max"), *_both(back)])
        header = ["event", "count", "next round", "maximum", "back after", "maximum"]
        for line in table(header, rows):
            self.line(line)
        self.line()
        kept = result["throughput_kept"]
        rates = result["rounds_per_second"]
        self._screen.facts(
            ("rounds", f"{result['rounds']:,}, all recomputed {self._unwritten(result)}"),
            (
                "committed",
                f"{result['committed_share']:.2%} of {result['contributions']:,} contributions, "
                f"{result['in_part']} in part, {result['not_counted']} not",
            ),
            *([("killed", f"{result['kills']} workers")] if result["kills"] else []),
            *_planes(result["ways"]),
            *_staleness(result["staleness"]),
            ("together", f"collectives checked after {result['meetings']:,} rounds{_among(result)}"),
            ("in part", f"sums checked in {result['subgroups']:,} sub-groups"),
            ("wrong", f"{result['wrong']} wrong, {result['double']} double, {result['lost']} lost"),
            ("diverged", str(result["diverged"])),
            (
                "stall",
                f"{result['longest_stall']:.2f} s maximum, {result['longest_stall_at']:.1f} s after the beginning",
            ),
            ("speed", f"{_rate(rates['calm'])} calm, {_rate(rates['storm'])} in the storm: {_share(kept['storm'])}"),
            *_behind(kept["behind_each_event"]),
            ("left out", ", ".join(f"{count} {error}" for error, count in sorted(result["outs"].items())) or "none"),
        )
        for finding in result["findings"][:_FINDINGS]:
            self.line(f"  - {finding if len(finding) <= _LONG else finding[:_LONG] + '…'}")
        if len(result["findings"]) > _FINDINGS:
            self.line(f"  - and {len(result['findings']) - _FINDINGS} more")
        self.line()
        self._screen.verdict(not wrongs, f"{'; '.join(wrongs) or 'every round is the mean of its contributions'}.")
        if wrongs and folder is not None:
            self.line(f"      The logs and reports are in {folder}")

    def _unwritten(self, result: Mapping[str, Any]) -> str:
        count = result["rounds_unwritten"]
        return f"({count} from reports of members, as the disk was full)" if count else "from the ledger"

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


_WAYS = {
    Way.DIRECT: "with shared memory",
    Way.RELAY: "through a relay of messages",
    Way.WIRE: "through breakable connections",
    Way.PLAIN: "over TCP",
}


def _seconds(found: Mapping[str, float], what: str) -> str:
    return f"{found[what]:.2f} s" if found else "-"


def _both(found: Mapping[str, float]) -> tuple[str, str]:
    return _seconds(found, "median"), _seconds(found, "max")


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f} rounds/s"


def _behind(kept: Mapping[str, float]) -> list[tuple[str, str]]:
    """Describe the speed after an event, if enough events stood alone."""
    if not kept:
        return []
    text = f"{kept['median']:.1%} of it after an event: median of {kept['count']:.0f}, "
    return [("", f"{text}quartiles {kept['low']:.1%} and {kept['high']:.1%}")]


def _planes(ways: Mapping[str, int]) -> list[tuple[str, str]]:
    """Describe how rounds went, if workers reduced them among themselves."""
    if not ways:
        return []
    direct, void, rest = (ways.get(way, 0) for way in ("direct", "void", "coordinator"))
    text = f"{direct:,} rounds among workers, {void:,} void and done again over the coordinator, {rest:,} more over it"
    return [("plane", text)]


def _among(result: Mapping[str, Any]) -> str:
    """Describe how many of the large sums were made among the workers, if any was."""
    count = result["sums_among_workers"]
    return f", {count:,} of their large sums made among workers" if count else ""


def _staleness(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Describe how stale contributions were, if any was."""
    total, stale = sum(counts.values()), sum(int(late) * count for late, count in counts.items())
    if not stale:
        return []
    return [("staleness", f"{stale / total:.2f} updates in the mean, {max(map(int, counts))} at most")]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
