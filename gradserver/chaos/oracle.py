"""The oracle: from who contributed, as the ledger says, to what every member must have got, and did or did not.

For each round, once the ledger is some rounds further, so that nothing of it is still to come:

    the ledger has no record of it           lost, unless the disk was full and members' results fit their members
    a member's contribution does not count   lost
    members' results differ                  diverged, and so are weights that do
    a result is not the exact mean           double, if it is the mean with something counted twice; else wrong
    what was summed is not what was given    the same
    weights are not those before it - 0.01 · mean    wrong
    no round was finished for too long       a stall
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.chaos import generator, recount
from gradserver.chaos.evidence import Report
from gradserver.chaos.explain import Case, Placement, explain, search
from gradserver.chaos.recount import Giver
from gradserver.engine.records import Closed, Dated, Epoch, Gap, Group, Halt, Round, RoundRecord, Start
from protocol.digest import MODULUS, digest, places

Array = npt.NDArray[Any]

LAG: Final = 64
"""Rounds by which the ledger is ahead of what is checked: late reports and rounds that were done again are there."""
_REMEMBERED: Final = 4096
_TOLD: Final = 100
"""Findings that are put into words; more are only counted."""


@dataclass(slots=True)
class Book:
    """What is known of one round."""

    record: RoundRecord | None = None
    epoch: int = -1
    reports: list[Report] = field(default_factory=list)


class Oracle:
    """Takes records and lines in any order, and says what is wrong with them.

    Attributes:
        found: how many of each kind: wrong, double, lost, diverged, fault.
        findings: some of them in words.
        checked: rounds that were recomputed.
        unwritten: those of them that the ledger lacks because the disk was full.
        expected: contributions that members should have made.
        counted: those that did in full.
        cut: those that did in part.
        completions: when each was finished.
        longest: the longest time without a finished round, and when it began.
    """

    def __init__(self, seed: int, shards: int = 1) -> None:
        self._seed = seed
        self._shares = recount.shares(shards)
        self._places = places(generator.plan())
        self._books: dict[int, Book] = {}
        self._seats: dict[int, list[tuple[int, str]]] = {}
        """Who had each seat: from which round on."""
        self._members: list[tuple[int, int, frozenset[int]]] = []
        """Which seats were taken: from which round on, in which epoch."""
        self._gaps: list[tuple[float, float]] = []
        self._full: list[float] = []
        """Since when the disk may have been full without a word of it in the ledger."""
        self._next = 0
        self._newest = -1
        self._weights: list[Array] | None = [np.zeros(size, np.float32) for size in generator.SIZES]
        self._settled: dict[int, tuple[tuple[int, ...], int]] = {}
        self._group_at: float | None = None
        self.found: Counter[str] = Counter()
        self.findings: list[str] = []
        self.checked = self.unwritten = self.expected = self.counted = self.cut = 0
        self.completions: deque[float] = deque(maxlen=1 << 20)
        self.longest = (0.0, 0.0)

    # ── evidence ──────────────────────────────────────────────────────────────────────────────────────────

    def take(self, dated: Dated) -> None:
        """A record of the ledger; it may come more than once."""
        record = dated.record
        match record:
            case Group():
                if self._group_at is not None and dated.clock != self._group_at:
                    self._say("lost", f"the group began anew after round {self._newest}")
                self._group_at = dated.clock
            case Epoch(_, epoch, number, members):
                for seat, name in members:
                    self._seats.setdefault(seat, [])
                    if not self._seats[seat] or self._seats[seat][-1][1] != name:
                        self._seats[seat].append((number, name))
                if not self._members or self._members[-1][1] < epoch:
                    self._members.append((number, epoch, frozenset(seat for seat, _ in members)))
            case Round(_, epoch, found):
                self._take_round(epoch, found)
            case Gap(_, since):
                self._gaps.append((since, dated.clock))
                self._full = [at for at in self._full if at > dated.clock]
            case Start():  # who could not write may have ended before it could say so
                self._gaps += [(at, dated.clock) for at in self._full if at < dated.clock]
                self._full = [at for at in self._full if at > dated.clock]
            case Halt(_, _, number, error, reason):
                self._say("lost", f"the group was halted in round {number}: {error}: {reason}")
            case Closed(_, _, rounds, reason) if rounds:
                pass
            case _:
                pass

    def hear(self, line: Mapping[str, Any]) -> None:
        """What a worker or the run said."""
        match line["kind"]:
            case "round" | "replayed":
                report = Report.of(dict(line))
                if report.round in self._settled:
                    self._compare_late(report)
                else:
                    self._books.setdefault(report.round, Book()).reports.append(report)
            case "full":
                self._full.append(line["at"])
            case "fault":
                self._say("fault", f"{line['name']}: {line['text']}")
            case _:
                pass

    def settle(self, everything: bool = False) -> None:
        """Check all rounds of which everything is known; in the end all that there are."""
        last = self._newest if everything else self._newest - LAG
        while self._next <= last:
            self._check(self._next, self._books.pop(self._next, Book()))
            self._next += 1
        if everything:
            for number in sorted(self._books):
                if len(self._books[number].reports) > 1:
                    self._say("lost", f"round {number} was finished by members, and the ledger ends before it")

    @property
    def behind(self) -> int:
        """Rounds that are written down and not yet checked."""
        return self._newest + 1 - self._next

    def _take_round(self, epoch: int, record: RoundRecord) -> None:
        number = record.round
        if number < self._next:
            known = self._settled.get(number)
            if known is not None and record.results and record.results != known[0]:
                self._say("wrong", f"round {number} was written down once more, with other results")
            return
        book = self._books.setdefault(number, Book())
        book.record, book.epoch = record, epoch
        self._newest = max(self._newest, number)

    # ── one round ─────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, number: int, book: Book) -> None:
        self.checked += 1
        self._note_completion(book)
        results = self._agreed(number, book.reports)
        done_again = book.record is not None and not book.record.results
        if book.record is None or (done_again and self._was_full(book.reports)):
            means = self._search(number, book.reports)  # who came back cannot know of those who came meanwhile
        else:
            givers = self._givers(number, book.record)
            self._count(number, book.record, book.reports)
            means = self._recount(number, givers, book.record, results)
        self._step(number, means, book.reports)
        agreed = results or (book.record.results if book.record else ())
        weights = book.reports[0].weights if book.reports else 0
        self._settled[number] = agreed, weights
        self._settled.pop(number - _REMEMBERED, None)

    def _note_completion(self, book: Book) -> None:
        """When the round was done: as the ledger says, or whoever finished it first."""
        moments = [report.at for report in book.reports] if book.record is None else [book.record.completed]
        if not moments:
            return
        if self.completions:
            self.longest = max(self.longest, (min(moments) - self.completions[-1], self.completions[-1]))
        self.completions.append(min(moments))

    def _agreed(self, number: int, reports: Sequence[Report]) -> tuple[int, ...]:
        """The results that all members have, if they have the same ones."""
        for part in range(len(generator.SIZES)):
            self._compare(number, f"bucket {part}", {report.name: report.results[part] for report in reports})
        return reports[0].results if reports else ()

    def _compare(self, number: int, what: str, by_name: Mapping[str, int]) -> None:
        counts = Counter(by_name.values())
        if len(counts) > 1:
            most = counts.most_common(1)[0][0]
            others = ", ".join(sorted(name for name, value in by_name.items() if value != most))
            self._say("diverged", f"round {number}: {what} of {others} is not that of {counts[most]} others")

    def _compare_late(self, report: Report) -> None:
        results, weights = self._settled[report.round]
        if results and report.results != results:
            self._say("diverged", f"round {report.round}: results of {report.name} are not those of the others")
        elif weights and report.weights != weights:
            self._say("diverged", f"round {report.round}: weights of {report.name} are not those of the others")

    def _name(self, seat: int, number: int) -> str:
        # Who joins contributes to one round before it is a member, and nobody else can have its seat then.
        names = [name for since, name in self._seats.get(seat, ()) if since <= number + 1]
        return names[-1] if names else f"seat {seat}"

    def _present(self, number: int) -> frozenset[int]:
        """Who was there when the round began."""
        found = [seats for since, _, seats in self._members if since <= number]
        while len(self._members) > 64 and self._members[1][0] < self._next - LAG:
            del self._members[0]
        return found[-1] if found else frozenset()

    def _givers(self, number: int, record: RoundRecord) -> list[Giver]:
        """Who contributed, as the ledger says."""
        givers = []
        counts = {(seat, part): slices for seat, part, slices in record.cut}
        departed = {seat for seat, _, _ in record.cut}
        for seat, weight in enumerate(record.weights):
            if weight > 0:
                cut = tuple(counts.get((seat, part), 0) for part in range(len(generator.SIZES)))
                givers.append(Giver(seat, self._name(seat, number), weight, cut if seat in departed else None))
        return givers

    def _count(self, number: int, record: RoundRecord, reports: Sequence[Report]) -> None:
        """Whose contributions count; whoever finished the round must be among them."""
        finished = {report.name for report in reports if report.gave}
        whole = [share.layout.count for share in self._shares]
        gave = {seat for seat, weight in enumerate(record.weights) if weight > 0}
        for seat in sorted(self._present(number) | gave):
            name = self._name(seat, number)
            due = generator.weight(self._seed, name, number)
            weight = record.weights[seat] if seat < len(record.weights) else 0.0
            cut = [slices for departed, _, slices in record.cut if departed == seat]
            if due == 0:
                continue
            self.expected += 1
            if weight == 0:
                if name in finished:
                    self._say("lost", f"round {number}: {name} took part to its end, and did not count")
            elif weight != due:
                self._say("wrong", f"round {number}: {name} counted with weight {weight:g}, and gave {due:g}")
            elif not cut or sum(cut) == sum(whole):
                self.counted += 1
            else:
                self.cut += 1

    def _recount(
        self, number: int, givers: Sequence[Giver], record: RoundRecord, results: Sequence[int]
    ) -> list[Array] | None:
        """Make all results again; those that were handed out have to be these."""
        inputs: Counter[int] = Counter()
        means: list[Array] = []
        right = True
        for part in range(len(generator.SIZES)):
            rows = [(g.seat, g.weight, generator.values(self._seed, g.name, number, part)) for g in givers]
            told = [each[part] for each in (results, record.results) if each]
            chosen, result = self._choose(part, givers, rows, told)
            means.append(result)
            made = digest(result, self._places[part])
            for what, seen in (("members got", results), ("the ledger has", record.results)):
                if seen and seen[part] != made:
                    right = False
                    case = Case(self._seed, number, part, self._shares[part])
                    kind, text = explain(case, givers, chosen, seen[part])
                    self._say(kind, f"round {number}, bucket {part}: {what} {text}")
            if record.inputs:
                for seat, _, row in rows:
                    inputs[seat] += self._digest_of(part, row, chosen.get(seat))
        for giver in givers if record.inputs else ():
            if inputs[giver.seat] % MODULUS != record.inputs[giver.seat]:
                self._say("wrong", f"round {number}: what was summed of {giver.name} is not what it gave")
        return means if right else None

    def _choose(
        self,
        part: int,
        givers: Sequence[Giver],
        rows: Sequence[tuple[int, float, Array]],
        told: Sequence[int],
    ) -> tuple[dict[int, frozenset[int]], Array]:
        """Which slices the ledger's counts mean; with one data shard that is no question."""
        share, size = self._shares[part], generator.SIZES[part]
        cut = [giver for giver in givers if giver.cut is not None]
        options = [list(recount.prefixes(share, giver.cut[part])) for giver in cut if giver.cut is not None]
        first: tuple[dict[int, frozenset[int]], Array] | None = None
        for sets in itertools.product(*options):
            chosen = {giver.seat: which for giver, which in zip(cut, sets, strict=True)}
            result = recount.bucket(share, rows, chosen, size)
            first = first or (chosen, result)
            if not told or digest(result, self._places[part]) == told[0]:
                return chosen, result
        return first or ({}, recount.bucket(share, rows, {}, size))

    def _digest_of(self, part: int, row: Array, slices: Iterable[int] | None) -> int:
        at = self._places[part]
        if slices is None:
            return digest(row, at)
        spans = [self._shares[part].layout.span(index) for index in slices]
        return sum(digest(row[start:stop], at + 4 * start) for start, stop in spans)

    def _was_full(self, reports: Sequence[Report]) -> bool:
        """Whether the disk was full when a round was finished, so that not all was written down."""
        at = min((report.at for report in reports), default=0.0)
        return any(since - 1 < at < until + 1 for since, until in self._gaps)

    def _search(self, number: int, reports: Sequence[Report]) -> list[Array] | None:
        """A round that was not written down: its results must fit its members, if the disk was full just then."""
        if not self._was_full(reports):
            self._say("lost", f"the ledger has no round {number}")
            return None
        self.unwritten += 1
        sure = [report.name for report in sorted(reports, key=lambda report: report.rank) if report.gave]
        perhaps = sorted({self._name(seat, number) for seat in self._seats}.difference(sure))
        means: list[Array] = []
        placement: Placement = ()
        for part in range(len(generator.SIZES)):
            case = Case(self._seed, number, part, self._shares[part])
            found = search(case, sure, perhaps, reports[0].results[part], placement)
            if found is None:
                self._say("wrong", f"round {number}, bucket {part}: no set of members gives what they got")
                return None
            result, placement = found
            means.append(result)
        return means

    def _step(self, number: int, means: Sequence[Array] | None, reports: Sequence[Report]) -> None:
        """Weights after the round."""
        self._compare(number, "weights", {report.name: report.weights for report in reports})
        if means is None:
            self._weights = None
        if self._weights is None or means is None:
            return
        for weights, result in zip(self._weights, means, strict=True):
            weights -= result * generator.STEP
        if reports and reports[0].weights != generator.weights_digest(self._weights):
            self._say("wrong", f"round {number}: weights are not those before it minus 0.01 times the mean")
            self._weights = None

    def _say(self, kind: str, text: str) -> None:
        self.found[kind] += 1
        if len(self.findings) < _TOLD:
            self.findings.append(f"{kind}: {text}")
