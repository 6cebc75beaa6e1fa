"""The oracle: compares the results of all members with the contributions that workers report, and with the ledger.

Workers' lines say which of them contributed to a round. A worker that finished it contributed in full. A worker that
began it and was lost contributed in full, in part, or not at all. The results themselves show which: they have to be
the mean of such a set, bit by bit. Then the ledger has to say the same. The oracle checks each round once the ledger is
some rounds further, so that all evidence of it is there:

    members' results differ                                     diverged, and so are weights that do
    a round is direct at one member, and void at another        diverged
    a result is the mean without a worker that finished it      lost, also if the worker counts in part
    a result is the mean with something counted twice           double
    a result is no mean of any such set                         wrong
    weights are not those before it - 0.01 · mean               wrong
    the ledger has no record of it                              lost, unless the disk was full
    the ledger's contributors, weights, slices are others       lost if it lacks a worker, else wrong
    the ledger's digests are others                             wrong
    a worker finishes it twice                                  double
    a collective behind it does not have each member once       fault
    no round was finished for too long                          a stall
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gradserver.engine.journal_state import Dated
from gradserver.engine.records import Durable, Epoch, Gap, Group, Halt, Round, RoundRecord, Start
from gradserver.tools.chaos import generator, recount
from gradserver.tools.chaos.book import Book, Disk, Found, Settled
from gradserver.tools.chaos.contributions import Contributions, Means
from gradserver.tools.chaos.evidence import Met, Report
from gradserver.tools.chaos.explain import Account, Case, People, explain, search, slices_of
from gradserver.tools.chaos.replica import Replica
from gradserver.tools.chaos.workload import EXACT, Bucket, Workload

_GROUP: Final = "default"
"""Group of the workers."""
DIRECT_SECTION: Final = 1
"""Section of the commits of rounds that members reduce among themselves (`gradserver.tools.chaos.program`)."""
LAG: Final = 32
"""Rounds by which the ledger is ahead of the checks, so that late reports and repeated rounds are there."""
PATIENCE: Final = 100
"""Limit of the rounds in which a worker takes part before it contributes."""
_REMEMBERED: Final = 4096
_TOLD: Final = 100
"""Limit of the findings that are described and explained; more are only counted."""


class Oracle:
    """Oracle that takes records and lines in any order, and reports faults in them.

    Attributes:
        found: number of findings of each kind: wrong, double, lost, diverged, fault.
        findings: descriptions of the first of them.
        checked: number of rounds that were recomputed.
        unwritten: number of these that the ledger lacks because the disk was full.
        expected: number of contributions that members should have made.
        counted: number of contributions that counted in full.
        cut: number of contributions that counted in part.
        meetings: number of rounds behind which collectives were checked.
        halves: number of sub-groups with sums that were checked.
        among: number of rounds behind which the large sum was made among the workers.
        ways: number of rounds that went each way, if workers may reduce among themselves.
        staleness: number of contributions of each staleness.
        completions: times at which rounds were finished.
        longest: longest time without a finished round, and its beginning.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._replica = Replica(workload)
        self._contributions, self._means = Contributions(workload, self._replica), Means(workload)
        self._is_lost = False
        """True behind a result that is no mean, if later ones follow from it: they are only compared."""
        self._books: dict[int, Book] = {}
        self._attached: dict[int, list[tuple[int, str]]] = {}
        """Names of each member id in the ledger, with the round from which on each has it."""
        self._disk = Disk()
        self._next, self._newest = 0, -1
        self._knows_weights = True
        """False behind weights that do not follow from the means."""
        self._settled: dict[int, Settled] = {}
        self._digests: dict[int, tuple[int, ...]] = {}
        """Digests of each bucket's result that the ledger must have."""
        self._group_at: float | None = None
        self._known: set[str] = set()
        self._coming_in: Counter[str] = Counter()
        """Number of rounds in which each worker has taken part without contributing."""
        self.found: Counter[str] = Counter()
        self.findings: list[str] = []
        self.checked = self.unwritten = self.expected = self.counted = self.cut = self.meetings = 0
        self.halves = self.among = 0
        self.ways: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.completions: deque[float] = deque(maxlen=1 << 20)
        self.longest = (0.0, 0.0)

    # ── evidence ──────────────────────────────────────────────────────────────────────────────────────────

    def take(self, dated: Dated) -> None:
        """Take a record of the ledger; it may come more than once. Those of the leaders' sub-groups are left out."""
        record = dated.record
        if getattr(record, "group", _GROUP) != _GROUP:
            return
        match record:
            case Group():
                if self._group_at is not None and dated.clock != self._group_at:
                    self._say("lost", f"the group began again after round {self._newest}")
                self._group_at = dated.clock
            case Durable():
                self._workload = self._workload.sliced(record.grain)
            case Epoch(_, _, number, members):
                for member_id, name in members:
                    self._attached.setdefault(member_id, [])
                    if not self._attached[member_id] or self._attached[member_id][-1][1] != name:
                        self._attached[member_id].append((number, name))
            case Round(_, _, found):
                self._take_round(found)
            case Gap(_, since):
                self._disk.took_again(since, dated.clock)
            case Start():
                self._disk.began_anew(dated.clock)
            case Halt(_, _, number, error, reason):
                self._say("lost", f"the group was halted in round {number}: {error}: {reason}")
            case _:
                pass

    def hear(self, line: Mapping[str, Any]) -> None:
        """Take a line of a worker or of the run."""
        match line["kind"]:
            case "gives" if line["round"] >= self._next:
                self._contributions.give(line["name"], line["round"])
                self._book(line["round"]).began[line["name"]] = line["rank"], line["at"]
            case "round" | "replayed":
                self._hear_report(Report.of(line))
            case "meets" if line["round"] >= self._next:
                self._book(line["round"]).meets.add(line["name"])
            case "met" if line["round"] >= self._next:
                self._book(line["round"]).met[line["name"]] = Met.of(line)
            case "entered":
                self._contributions.join(line["name"], line["round"])
            case "event" if line["event"] in ("coordinator", "shard"):
                self._means.lose(line["at"])
            case "full":
                self._disk.fill(line["at"])
            case "fault":
                self._say("fault", f"{line['name']}: {line['text']}")
            case _:
                pass

    def settle(self, everything: bool = False) -> None:
        """Check all rounds with complete evidence; with ``everything`` all rounds."""
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
        """Number of rounds in the ledger that are not yet checked."""
        return self._newest + 1 - self._next

    def _book(self, number: int) -> Book:
        return self._books.setdefault(number, Book())

    def _hear_report(self, report: Report) -> None:
        name, number = report.name, report.round
        self._known.add(name)
        self.staleness[report.staleness] += report.gave
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
        if way := book.way():
            self.ways[way] += 1
            if "and" in way:
                self._say("diverged", f"round {number}: it was {way}, at different members")
        people = book.people(lambda name: self._contributions.counts(name, number))
        buckets, (_, moment) = self._workload.buckets(number), book.moments()
        seen = self._agreed(number, len(buckets), book.reports)
        makers = self._contributions, self._means
        cases = [Case(self._workload, number, one, *makers, self._means.owes(one, moment)) for one in buckets]
        found = None if self._is_lost else self._account_for(cases, people, seen, self._told(number, book.record))
        accounts = [account for _, account in found] if found is not None else None
        self._count(people, buckets, accounts)
        self._audit(number, book, people, cases, found)
        self._check_meeting(number, book)
        weights = self._step(number, found, book.reports)
        whole = {name for name in people.sure if found is not None}
        slices = [bucket.slices for bucket in buckets]
        whole |= {name for name in people.perhaps if accounts and slices_of(name, buckets, accounts) == slices}
        self._settled[number] = Settled(seen, weights, frozenset(whole), frozenset(book.reports))
        self._settled.pop(number - _REMEMBERED, None)
        self._digests.pop(number - _REMEMBERED, None)
        self._end(number, people, cases, found)

    def _end(self, number: int, people: People, cases: Sequence[Case], found: Found | None) -> None:
        """Follow what is owed behind the round. Without its means that is not known."""
        for case, (made, _) in zip(cases, found or (), strict=False):
            self._means.end(case.bucket, made)
        self._contributions.end(number, (*people.sure, *people.perhaps))
        is_local = self._workload.is_local
        is_known = found is not None and (self._knows_weights or not is_local)
        self._is_lost |= (is_local or self._workload.wire != EXACT) and bool(people.sure) and not is_known

    def _note_completion(self, book: Book) -> None:
        """Note when the round was finished, by the ledger, or by the first worker that finished it."""
        moments = [report.at for report in book.reports.values()] if book.record is None else [book.record.completed]
        if not moments:
            return
        if self.completions:
            self.longest = max(self.longest, (min(moments) - self.completions[-1], self.completions[-1]))
        self.completions.append(min(moments))

    def _agreed(self, number: int, buckets: int, reports: Mapping[str, Report]) -> tuple[int, ...]:
        """Return the results of the majority, by bucket. All members must have the same."""
        agreed = []
        for part in range(buckets) if reports else ():
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
        elif report.gave and name not in settled.whole and self._contributions.counts(name, number):
            self._say("lost", f"round {number}: {name} took part to its end, late, and did not count in full")

    # ── contributors, as results show ─────────────────────────────────────────────────────────────────────

    def _account_for(
        self, cases: Sequence[Case], people: People, seen: Sequence[int], told: Sequence[str]
    ) -> Found | None:
        """Find each bucket's mean and its contributors. None if no result was reported, or one is no mean.

        The search begins with the order of the last bucket, and that which the ledger has ``told``. Behind a lossy wire
        several orders can have one result, and another remainder, which shows only in a later round. Ranks do not
        always tell the order: those of a worker that is lost and of one that joins are of different memberships.
        """
        found: Found = []
        for case, one in zip(cases, seen, strict=False):
            fit = search(case, people, one, [*(account.order for _, account in found[-1:]), told])
            if fit is None:
                kind, text = "wrong", "is wrong, as many were before it"
                if self.found.total() < _TOLD:
                    strangers = sorted(self._known.difference(people.sure, people.perhaps))
                    kind, text = explain(case, people, strangers, one)
                self._say(kind, f"round {case.number}, bucket {case.bucket.place}: members got {text}")
                return None
            found.append(fit)
        return found or None

    def _count(self, people: People, buckets: Sequence[Bucket], accounts: Sequence[Account] | None) -> None:
        """Count contributions."""
        self.expected += len(people.sure)
        self.counted += len(people.sure) if accounts is not None else 0
        whole = [bucket.slices for bucket in buckets]
        for name in people.perhaps if accounts is not None else ():
            slices = slices_of(name, buckets, accounts or ())
            if not any(slices) and self._coming_in[name]:
                continue  # it was lost before anything of it could count
            self.expected += 1
            self.counted += slices == whole
            self.cut += any(slices) and slices != whole

    # ── comparison with the ledger ────────────────────────────────────────────────────────────────────────

    def _audit(self, number: int, book: Book, people: People, cases: Sequence[Case], found: Found | None) -> None:
        """Compare the ledger with the results of members."""
        record, (begun, done) = book.record, book.moments()
        if record is None:
            if self._disk.was_full(done, done):
                self.unwritten += 1
            else:
                self._say("lost", f"the ledger has no round {number}")
            return
        if not record.results and self._disk.was_full(begun, done):
            self.unwritten += 1
            return  # a restarted coordinator cannot know of workers that came meanwhile
        self._audit_people(number, record, people, None if found is None else [account for _, account in found])
        is_direct = self._workload.seed & generator.COARSE and record.section == DIRECT_SECTION
        if found is not None and not is_direct:  # of a direct round the coordinator has not seen the gradients
            self._audit_digests(number, record, cases, found)

    def _audit_people(
        self, number: int, record: RoundRecord, people: People, accounts: Sequence[Account] | None
    ) -> None:
        cut = {(member_id, part): slices for member_id, part, slices in record.cut}
        departed = {member_id for member_id, _, _ in record.cut}
        buckets = self._workload.buckets(number)
        whole = [bucket.slices for bucket in buckets]
        said: dict[str, tuple[float, list[int]]] = {}
        for member_id, weight in enumerate(record.weights):
            if weight > 0:
                slices = [cut.get((member_id, one.part), 0) for one in buckets] if member_id in departed else whole
                if any(slices) or not self._workload.is_local:  # of local SGD the word before the means can be all
                    said[self._name(member_id, number)] = weight, slices
        made = dict.fromkeys(people.sure, whole)
        if accounts is not None:
            made |= {name: slices for name in people.perhaps if any(slices := slices_of(name, buckets, accounts))}
        for name in sorted(said.keys() | made.keys()):
            due = self._contributions.weight(name, number)
            if name not in said:
                what = "took part to its end and is missing" if name in people.sure else "is missing, but it counted"
                self._say("lost", f"round {number}, in the ledger: {name} {what}")
            elif name not in made:
                if accounts is not None:
                    self._say("wrong", f"round {number}, in the ledger: {name} counts, but it is not in the results")
            elif said[name][0] != due:
                text = f"{name} counts with weight {said[name][0]:g} instead of {due:g}"
                self._say("wrong", f"round {number}, in the ledger: {text}")
            elif said[name][1] != made[name]:
                kind = "lost" if name in people.sure else "wrong"
                text = f"{name} counts with {said[name][1]} slices of the buckets instead of {made[name]}"
                self._say(kind, f"round {number}, in the ledger: {text}")

    def _audit_digests(self, number: int, record: RoundRecord, cases: Sequence[Case], found: Found) -> None:
        if record.results:
            own = [made.digest(case.bucket) for case, (made, _) in zip(cases, found, strict=True)]
            told = [record.results[case.bucket.place] for case in cases]
            if not self._workload.is_local:  # of which the word before the means is in no report
                self._digests[number] = tuple(own)
            for case, made, said in zip(cases, own, told, strict=True):
                if made != said:
                    text = f"the ledger has digest {said:016x} instead of {made:016x}"
                    self._say("wrong", f"round {number}, bucket {case.bucket.place}: {text}")
        if not record.inputs or self._workload.is_local:
            return
        inputs: Counter[str] = Counter()
        for case, (_, account) in zip(cases, found, strict=True):
            for name in account.order:
                given = self._contributions.given(name, number, case.bucket)
                inputs[name] += given.digest(case.bucket, account.cut.get(name))
        for member_id, weight in enumerate(record.weights):
            name = self._name(member_id, number)
            if weight and name in inputs and inputs[name] % recount.MODULUS != record.inputs[member_id]:
                self._say("wrong", f"round {number}: what was summed of {name} is not its contribution")

    def _told(self, number: int, record: RoundRecord | None) -> tuple[str, ...]:
        """Return the contributors to a round that the ledger has, in the order of member ids."""
        weights = () if record is None else record.weights
        return tuple(self._name(member_id, number) for member_id, weight in enumerate(weights) if weight > 0)

    def _name(self, member_id: int, number: int) -> str:
        # A learner contributes to one round before it is a member, and no other worker can have its member id then.
        names = [name for since, name in self._attached.get(member_id, ()) if since <= number + 1]
        return names[-1] if names else f"member {member_id}"

    # ── collectives and weights ───────────────────────────────────────────────────────────────────────────

    def _check_meeting(self, number: int, book: Book) -> None:
        self.meetings += bool(book.met)
        self.halves += len({met.half for met in book.met.values() if met.half})
        self.among += any(met.among for met in book.met.values())
        for text in book.wrong_collectives(number):
            self._say("fault", f"behind round {number}{text}")

    def _step(self, number: int, found: Found | None, reports: Mapping[str, Report]) -> int:
        """Check the weights after the round. Return those of the majority, 0 if none were reported."""
        told = {name: report.weights for name, report in reports.items()}
        agreed = self._compare(number, "weights", told) if told else 0
        self._knows_weights &= found is not None
        if not self._knows_weights:
            return agreed
        self._replica.step(number, [made.values for made, _ in found or ()])
        if agreed and agreed != self._replica.fingerprint():
            self._say("wrong", f"round {number}: weights are not {self._replica.rule}")
            self._knows_weights = False
        return agreed

    def _say(self, kind: str, text: str) -> None:
        self.found[kind] += 1
        if len(self.findings) < _TOLD:
            self.findings.append(f"{kind}: {text}")
