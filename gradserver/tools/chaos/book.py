"""Evidence and results of one round, for the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gradserver.engine.records import RoundRecord
from gradserver.tools.chaos import tally
from gradserver.tools.chaos.contributions import Wired
from gradserver.tools.chaos.evidence import Met, Report
from gradserver.tools.chaos.explain import Account, People


@dataclass(slots=True)
class Book:
    """Evidence of one round."""

    record: RoundRecord | None = None
    began: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Rank of each worker when it began to contribute, and the time of that."""
    reports: dict[str, Report] = field(default_factory=dict)
    meets: set[str] = field(default_factory=set)
    """Workers that began with the collectives behind the round."""
    met: dict[str, Met] = field(default_factory=dict)
    """Results of these collectives, by name."""

    def people(self, counts: Callable[[str], bool]) -> People:
        """Return the possible contributors of which the contribution ``counts``: it has a weight above 0."""
        weighty = {name for name in (*self.began, *self.reports) if counts(name)}
        finished = sorted(self.reports.values(), key=lambda report: report.rank)
        sure = tuple(report.name for report in finished if report.gave and report.name in weighty)
        ranks = [self.began[name][0] if name in self.began else -1 for name in sure]
        perhaps = {
            name: max((place + 1 for place, other in enumerate(ranks) if other < rank), default=0)
            for name, (rank, _) in sorted(self.began.items(), key=lambda item: item[1])
            if name not in self.reports and name in weighty
        }
        return People(sure, perhaps)

    def way(self) -> str:
        """Return how the round went: "direct", "void", "coordinator", or several of them if members contradict.

        A worker that joins gives to the coordinator, while the others begin among themselves, in vain.
        """
        ways = {report.way for report in self.reports.values() if report.gave and report.way}
        return "void" if ways == {"void", "coordinator"} else " and ".join(sorted(ways))

    def moments(self) -> tuple[float, float]:
        """Return when the first worker began with the round, and when the first one finished it."""
        ends = [report.at for report in self.reports.values()]
        return min([at for _, at in self.began.values()] + ends, default=0.0), min(ends, default=0.0)

    def wrong_collectives(self, number: int) -> Iterator[str]:
        """Describe faults of the collectives behind the round.

        Each worker that finished them has to be in each sum once, and no other worker that did not call them.
        """
        if not self.met:
            return
        sure, perhaps = set(self.met), self.meets.difference(self.met)
        any_of = next(iter(self.met.values()))
        for what in any_of.sums:
            sums = {name: tuple(met.sums.get(what, ())) for name, met in self.met.items()}
            if len(set(sums.values())) > 1:
                yield f": members got {len(set(sums.values()))} results of {what}"
            for seen in set(sums.values()):
                if len(seen) != tally.LENGTH or not tally.fits(seen, number, sure, perhaps):
                    yield f", {what}: {tally.explain(seen, sure, perhaps)}"
        yield from self._wrong_gathered(number, perhaps)
        yield from self._wrong_halves(number, perhaps)

    def _wrong_halves(self, number: int, perhaps: set[str]) -> Iterator[str]:
        """Describe faults of the sums in sub-groups. Each has to have its own members, and no other worker."""
        for half in sorted({met.half for met in self.met.values() if met.half}):
            what, inside = f"the sub-group of {', '.join(half)}", {name for name in half if name in self.met}
            for name in sorted(inside):
                if self.met[name].half != half:
                    yield f", {what}: {name} was in that of {', '.join(self.met[name].half) or 'none'}"
            sums = {met.half_sum for met in self.met.values() if met.half == half}
            if len(sums) > 1:
                yield f", {what}: its members got {len(sums)} results"
            for seen in sums:
                lost = perhaps.intersection(half)
                if len(seen) != tally.LENGTH or not tally.fits(seen, number, inside, lost):
                    yield f", {what}: {tally.explain(seen, inside, lost)}"

    def _wrong_gathered(self, number: int, perhaps: set[str]) -> Iterator[str]:
        by_code = {tally.code(name, number): name for name in (*self.met, *perhaps)}
        ranked = [met.name for met in sorted(self.met.values(), key=lambda met: met.rank)]
        for name, met in self.met.items():
            names = [by_code.get(code, "another worker") for code in met.gathered]
            strangers = [other for other in names if other not in self.met and other not in perhaps]
            if strangers or len(set(names)) < len(names) or [one for one in names if one in self.met] != ranked:
                yield f": {name} gathered {', '.join(names)} from {ranked}"
        given = {met.broadcast for met in self.met.values() if met.broadcast is not None}
        if len(given) > 1 or not given <= by_code.keys():
            yield f": a broadcast returned {sorted(given)}, which no member sent"


class Settled(NamedTuple):
    """Results of a round that was checked."""

    results: tuple[int, ...]
    weights: int
    whole: frozenset[str]
    """Workers that counted in full."""
    reported: frozenset[str]


class Disk:
    """The coordinator's disk: the times at which it was full, so that the ledger may lack records."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []
        self._full: list[float] = []
        """Times from which on it may have been full without a record of it in the ledger."""

    def fill(self, at: float) -> None:
        """Note that it is full from now on."""
        self._full.append(at)

    def took_again(self, since: float, at: float) -> None:
        """Note that it has taken records again, and none since."""
        self._gaps.append((since, at))
        self._full = [one for one in self._full if one > at]

    def began_anew(self, at: float) -> None:
        """Note a new coordinator: the one before may have ended before it could record that it could not write."""
        self._gaps += [(one, at) for one in self._full if one < at]
        self._full = [one for one in self._full if one > at]

    def was_full(self, start: float, stop: float) -> bool:
        """Return whether it was full at any time from ``start`` to ``stop``, so that records may be missing."""
        return any(since - 1 < stop and start < until + 1 for since, until in self._gaps)


Found = list[tuple[Wired, Account]]
"""Mean of each bucket, and its contributors."""
