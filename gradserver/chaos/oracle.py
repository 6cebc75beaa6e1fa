"""The oracle: from what workers say that they gave, to what every member must have got, and did or did not.

Workers' own lines say who contributed to a round: those who finished it did so for sure and in full, those who began it
and were lost did so as a whole, in part, or not at all. Which, the results themselves say: they have to be the mean of
such a set, bit by bit. Then the ledger has to say the same. For each round, once the ledger is some rounds further, so
that nothing of it is still to come:

    members' results differ                                     diverged, and so are weights that do
    a result is the mean without somebody who finished it       lost, also if that one counts in part
    a result is the mean with something counted twice           double
    a result is no mean of any such set                         wrong
    weights are not those before it - 0.01 · mean               wrong
    the ledger has no record of it                              lost, unless the disk was full
    the ledger's contributors, weights, slices are others       lost if it leaves somebody out, else wrong
    the ledger's digests are others                             wrong
    a worker finishes it twice                                  double
    a collective behind it does not have each member once       fault
    no round was finished for too long                          a stall
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gradserver.chaos import generator, recount, tally
from gradserver.chaos.evidence import Met, Report
from gradserver.chaos.explain import Account, Case, People, explain, search
from gradserver.engine.journal_state import Dated
from gradserver.engine.records import Closed, Epoch, Gap, Group, Halt, Round, RoundRecord, Start

Array = npt.NDArray[Any]

LAG: Final = 32
"""Rounds by which the ledger is ahead of what is checked: late reports and rounds that were done again are there."""
PATIENCE: Final = 100
"""Rounds in which a worker may take part without contributing, before it does."""
_REMEMBERED: Final = 4096
_TOLD: Final = 100
"""Findings that are put into words, and explained; more are only counted."""


@dataclass(slots=True)
class Book:
    """What is known of one round."""

    record: RoundRecord | None = None
    began: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The rank of each worker when it began to contribute, and when that was."""
    reports: dict[str, Report] = field(default_factory=dict)
    meets: set[str] = field(default_factory=set)
    """Those who began with the collectives behind it."""
    met: dict[str, Met] = field(default_factory=dict)
    """What they got, by name."""

    def people(self, seed: int, number: int) -> People:
        """Those who may have contributed something that weighs anything."""
        weighty = {name for name in (*self.began, *self.reports) if generator.weight(seed, name, number)}
        finished = sorted(self.reports.values(), key=lambda report: report.rank)
        sure = tuple(report.name for report in finished if report.gave and report.name in weighty)
        ranks = [self.began[name][0] if name in self.began else -1 for name in sure]
        perhaps = {
            name: max((place + 1 for place, other in enumerate(ranks) if other < rank), default=0)
            for name, (rank, _) in sorted(self.began.items(), key=lambda item: item[1])
            if name not in self.reports and name in weighty
        }
        return People(sure, perhaps)

    def moments(self) -> tuple[float, float]:
        """When the first worker began with it, and when the first one had finished it."""
        ends = [report.at for report in self.reports.values()]
        return min([at for _, at in self.began.values()] + ends, default=0.0), min(ends, default=0.0)


class Settled(NamedTuple):
    """What remains of a round that was checked."""

    results: tuple[int, ...]
    weights: int
    whole: frozenset[str]
    """Those who counted in full."""
    reported: frozenset[str]


Found = list[tuple[Array, Account]]
"""Each bucket's mean, and whose it is."""


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
        meetings: collectives of which it was checked who is in them.
        completions: when each round was finished.
        longest: the longest time without a finished round, and when it began.
    """

    def __init__(self, seed: int, shards: int = 1) -> None:
        self._seed = seed
        self._shares = recount.shares(shards)
        self._whole = [share.layout.count for share in self._shares]
        self._books: dict[int, Book] = {}
        self._seats: dict[int, list[tuple[int, str]]] = {}
        """Who had each seat, as the ledger says: from which round on."""
        self._gaps: list[tuple[float, float]] = []
        self._full: list[float] = []
        """Since when the disk may have been full without a word of it in the ledger."""
        self._next = 0
        self._newest = -1
        self._weights: list[Array] | None = [np.zeros(size, np.float32) for size in generator.SIZES]
        self._settled: dict[int, Settled] = {}
        self._digests: dict[int, tuple[int, ...]] = {}
        """The ledger's, of each bucket's result, as they have to be."""
        self._group_at: float | None = None
        self._known: set[str] = set()
        self._coming_in: Counter[str] = Counter()
        """In how many rounds each has taken part without contributing."""
        self.found: Counter[str] = Counter()
        self.findings: list[str] = []
        self.checked = self.unwritten = self.expected = self.counted = self.cut = self.meetings = 0
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
            case Epoch(_, _, number, members):
                for seat, name in members:
                    self._seats.setdefault(seat, [])
                    if not self._seats[seat] or self._seats[seat][-1][1] != name:
                        self._seats[seat].append((number, name))
            case Round(_, _, found):
                self._take_round(found)
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
            case "gives" if line["round"] >= self._next:
                self._book(line["round"]).began[line["name"]] = line["rank"], line["at"]
            case "round" | "replayed":
                self._hear_report(Report.of(line))
            case "meets" if line["round"] >= self._next:
                self._book(line["round"]).meets.add(line["name"])
            case "met" if line["round"] >= self._next:
                self._book(line["round"]).met[line["name"]] = Met.of(line)
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

    def _book(self, number: int) -> Book:
        return self._books.setdefault(number, Book())

    def _hear_report(self, report: Report) -> None:
        name, number = report.name, report.round
        self._known.add(name)
        self._coming_in[name] = 0 if report.gave else self._coming_in[name] + 1
        if self._coming_in[name] == PATIENCE:
            self._say("lost", f"round {number}: {name} has taken part in {PATIENCE} rounds, and contributed to none")
        settled = self._settled.get(number)
        reports = self._book(number).reports if number >= self._next else {}
        if name in reports or (settled is not None and name in settled.reported):
            self._say("double", f"round {number}: {name} has finished it twice")
        reports.setdefault(name, report)
        if settled is not None:
            self._compare_late(report, settled)
            self._settled[number] = settled._replace(reported=settled.reported | {name})

    def _take_round(self, record: RoundRecord) -> None:
        number = record.round
        if number >= self._next:
            self._book(number).record = record
            self._newest = max(self._newest, number)
        elif number in self._digests and record.results and record.results != self._digests[number]:
            self._say("wrong", f"round {number} was written down once more, with other results")

    # ── one round ─────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, number: int, book: Book) -> None:
        self.checked += 1
        self._note_completion(book)
        people = book.people(self._seed, number)
        seen = self._agreed(number, book.reports)
        cases = [Case(self._seed, number, part, share, {}) for part, share in enumerate(self._shares)]
        found = self._account_for(cases, people, seen)
        means = [mean for mean, _ in found] if found is not None else None
        accounts = [account for _, account in found] if found is not None else None
        self._count(people, accounts)
        self._audit(number, book, people, cases, found)
        self._check_meeting(number, book)
        weights = self._step(number, means, book.reports)
        whole = {name for name in people.sure if found is not None}
        whole |= {name for name in people.perhaps if accounts and self._slices(name, accounts) == self._whole}
        self._settled[number] = Settled(seen, weights, frozenset(whole), frozenset(book.reports))
        self._settled.pop(number - _REMEMBERED, None)
        self._digests.pop(number - _REMEMBERED, None)

    def _note_completion(self, book: Book) -> None:
        """When the round was done: as the ledger says, or whoever finished it first."""
        moments = [report.at for report in book.reports.values()] if book.record is None else [book.record.completed]
        if not moments:
            return
        if self.completions:
            self.longest = max(self.longest, (min(moments) - self.completions[-1], self.completions[-1]))
        self.completions.append(min(moments))

    def _agreed(self, number: int, reports: Mapping[str, Report]) -> tuple[int, ...]:
        """The results that most have, by bucket; they must be everybody's."""
        agreed = []
        for part in range(len(generator.SIZES)) if reports else ():
            by_name = {name: report.results[part] for name, report in reports.items()}
            agreed.append(self._compare(number, f"bucket {part}", by_name))
        return tuple(agreed)

    def _compare(self, number: int, what: str, by_name: Mapping[str, int]) -> int:
        counts = Counter(by_name.values())
        most = counts.most_common(1)[0][0]
        if len(counts) > 1:
            others = ", ".join(sorted(name for name, value in by_name.items() if value != most))
            self._say("diverged", f"round {number}: {what} of {others} is not that of {counts[most]} others")
        return most

    def _compare_late(self, report: Report, settled: Settled) -> None:
        number, name = report.round, report.name
        if settled.results and report.results != settled.results:
            self._say("diverged", f"round {number}: results of {name} are not those of the others")
        elif settled.weights and report.weights != settled.weights:
            self._say("diverged", f"round {number}: weights of {name} are not those of the others")
        elif report.gave and name not in settled.whole and generator.weight(self._seed, name, number):
            self._say("lost", f"round {number}: {name} took part to its end, late, and did not count in full")

    # ── who contributed, as results show ──────────────────────────────────────────────────────────────────

    def _account_for(self, cases: Sequence[Case], people: People, seen: Sequence[int]) -> Found | None:
        """Each bucket's mean, and whose it is. None if nobody has told of a result, or one is no mean."""
        found: Found = []
        for case, one in zip(cases, seen, strict=False):
            fit = search(case, people, one, found[-1][1].order if found else None)
            if fit is None:
                kind, text = "wrong", "is wrong, as many were before it"
                if self.found.total() < _TOLD:
                    strangers = sorted(self._known.difference(people.sure, people.perhaps))
                    kind, text = explain(case, people, strangers, one)
                self._say(kind, f"round {case.number}, bucket {case.part}: members got {text}")
                return None
            found.append(fit)
        return found or None

    def _slices(self, name: str, accounts: Sequence[Account]) -> list[int]:
        """How many slices of ``name`` counted in each bucket."""
        return [account.slices(name, whole) for account, whole in zip(accounts, self._whole, strict=True)]

    def _count(self, people: People, accounts: Sequence[Account] | None) -> None:
        """Whose contributions count."""
        self.expected += len(people.sure)
        self.counted += len(people.sure) if accounts is not None else 0
        for name in people.perhaps if accounts is not None else ():
            slices = self._slices(name, accounts or ())
            if not any(slices) and self._coming_in[name]:
                continue  # it was lost before anything of it could count
            self.expected += 1
            self.counted += slices == self._whole
            self.cut += any(slices) and slices != self._whole

    # ── what the ledger says of it ────────────────────────────────────────────────────────────────────────

    def _audit(
        self,
        number: int,
        book: Book,
        people: People,
        cases: Sequence[Case],
        found: Found | None,
    ) -> None:
        """Compare the ledger with what members got."""
        record, (begun, done) = book.record, book.moments()
        if record is None:
            if self._was_full(done, done):
                self.unwritten += 1
            else:
                self._say("lost", f"the ledger has no round {number}")
            return
        if not record.results and self._was_full(begun, done):
            self.unwritten += 1
            return  # a coordinator that came back cannot know of those who came meanwhile
        self._audit_people(number, record, people, None if found is None else [account for _, account in found])
        if found is not None:
            self._audit_digests(number, record, cases, found)

    def _audit_people(
        self, number: int, record: RoundRecord, people: People, accounts: Sequence[Account] | None
    ) -> None:
        cut = {(seat, part): slices for seat, part, slices in record.cut}
        departed = {seat for seat, _, _ in record.cut}
        parts = range(len(self._whole))
        said: dict[str, tuple[float, list[int]]] = {}
        for seat, weight in enumerate(record.weights):
            if weight > 0:
                slices = [cut.get((seat, part), 0) for part in parts] if seat in departed else self._whole
                said[self._name(seat, number)] = weight, slices
        made = dict.fromkeys(people.sure, self._whole)
        if accounts is not None:
            made |= {name: slices for name in people.perhaps if any(slices := self._slices(name, accounts))}
        for name in sorted(said.keys() | made.keys()):
            due = generator.weight(self._seed, name, number)
            if name not in said:
                what = "took part to its end, and did not count" if name in people.sure else "is left out, and counts"
                self._say("lost", f"round {number}, in the ledger: {name} {what}")
            elif name not in made:
                if accounts is not None:
                    self._say("wrong", f"round {number}, in the ledger: {name} counts, and gave nothing to the results")
            elif said[name][0] != due:
                text = f"{name} counted with weight {said[name][0]:g}, and gave {due:g}"
                self._say("wrong", f"round {number}, in the ledger: {text}")
            elif said[name][1] != made[name]:
                kind = "lost" if name in people.sure else "wrong"
                text = f"{name} counts for {said[name][1]} slices of the buckets, and gave {made[name]}"
                self._say(kind, f"round {number}, in the ledger: {text}")

    def _audit_digests(self, number: int, record: RoundRecord, cases: Sequence[Case], found: Found) -> None:
        if record.results:
            own = [
                recount.ledger_digest(mean, case.part, case.share) for case, (mean, _) in zip(cases, found, strict=True)
            ]
            self._digests[number] = tuple(own)
            for part, (made, told) in enumerate(zip(own, record.results, strict=True)):
                if made != told:
                    self._say("wrong", f"round {number}, bucket {part}: the ledger has {told:016x} for {made:016x}")
        if not record.inputs:
            return
        inputs: Counter[str] = Counter()
        for case, (_, account) in zip(cases, found, strict=True):
            for name in account.order:
                _, _, row = case.given(name)
                inputs[name] += recount.ledger_digest(row, case.part, case.share, account.cut.get(name))
        for seat, weight in enumerate(record.weights):
            name = self._name(seat, number)
            if weight and name in inputs and inputs[name] % recount.MODULUS != record.inputs[seat]:
                self._say("wrong", f"round {number}: what was summed of {name} is not what it gave")

    def _name(self, seat: int, number: int) -> str:
        # Who joins contributes to one round before it is a member, and nobody else can have its seat then.
        names = [name for since, name in self._seats.get(seat, ()) if since <= number + 1]
        return names[-1] if names else f"seat {seat}"

    def _was_full(self, start: float, stop: float) -> bool:
        """Whether the disk was full at any time from ``start`` to ``stop``, so that not all was written down."""
        return any(since - 1 < stop and start < until + 1 for since, until in self._gaps)

    # ── what else there is ────────────────────────────────────────────────────────────────────────────────

    def _check_meeting(self, number: int, book: Book) -> None:
        """Collectives: everybody who is through with them is in each, once, and nobody else who did not call them."""
        if not book.met:
            return
        self.meetings += 1
        sure, perhaps = set(book.met), book.meets.difference(book.met)
        any_of = next(iter(book.met.values()))
        for what in any_of.sums:
            sums = {name: tuple(met.sums.get(what, ())) for name, met in book.met.items()}
            if len(set(sums.values())) > 1:
                self._say("fault", f"behind round {number}: members got {len(set(sums.values()))} results of {what}")
            for seen in set(sums.values()):
                if len(seen) != tally.LENGTH or not tally.fits(seen, number, sure, perhaps):
                    why = tally.explain(seen, sure, perhaps) if len(seen) == tally.LENGTH else "it is none"
                    self._say("fault", f"behind round {number}, {what}: {why}")
        self._check_gathered(number, book, perhaps)

    def _check_gathered(self, number: int, book: Book, perhaps: set[str]) -> None:
        by_code = {tally.code(name, number): name for name in (*book.met, *perhaps)}
        ranked = [met.name for met in sorted(book.met.values(), key=lambda met: met.rank)]
        for name, met in book.met.items():
            names = [by_code.get(code, "somebody else") for code in met.gathered]
            strangers = [other for other in names if other not in book.met and other not in perhaps]
            if strangers or len(set(names)) < len(names) or [one for one in names if one in book.met] != ranked:
                self._say("fault", f"behind round {number}: {name} gathered {', '.join(names)} from {ranked}")
        given = {met.broadcast for met in book.met.values() if met.broadcast is not None}
        if len(given) > 1 or not given <= by_code.keys():
            self._say("fault", f"behind round {number}: a broadcast brought {sorted(given)}, which no member gave")

    def _step(self, number: int, means: Sequence[Array] | None, reports: Mapping[str, Report]) -> int:
        """Check weights after the round; those that most have, 0 if nobody has told."""
        told = {name: report.weights for name, report in reports.items()}
        agreed = self._compare(number, "weights", told) if told else 0
        if means is None:
            self._weights = None
        if self._weights is None or means is None:
            return agreed
        for weights, result in zip(self._weights, means, strict=True):
            weights -= result * generator.STEP
        if agreed and agreed != generator.fingerprint(self._weights):
            self._say("wrong", f"round {number}: weights are not those before it minus 0.01 times the mean")
            self._weights = None
        return agreed

    def _say(self, kind: str, text: str) -> None:
        self.found[kind] += 1
        if len(self.findings) < _TOLD:
            self.findings.append(f"{kind}: {text}")
