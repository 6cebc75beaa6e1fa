"""Tests that the oracle of `gradserver chaos` finds every planted fault, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradserver.engine.commands import Contribution, Reduce
from gradserver.engine.journal_state import Dated
from gradserver.engine.records import Epoch, Gap, Group, Round, RoundRecord, Start
from gradserver.protocol.digest import MODULUS, digest, places
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.means import mean_of
from gradserver.reducer import reduce
from gradserver.tools.chaos import generator, recount, tally
from gradserver.tools.chaos.contributions import Wired
from gradserver.tools.chaos.explain import People, search
from gradserver.tools.chaos.oracle import LAG, PATIENCE, Oracle
from gradserver.tools.chaos.workload import Workload

Array = np.ndarray[Any, Any]
Rows = dict[int, Array]
SEED = 5
NAMES = ("ada", "bob", "cyd", "dan")
ROUNDS = 8
EVERY = 1
"""The round before collectives."""
PLACES = places(generator.plan())
PARTS = range(len(generator.SIZES))


@pytest.fixture(scope="module", autouse=True)
def _made_once() -> Iterator[None]:
    """Make each contribution once for all worlds, and compare by a quicker hash: these are most of a world's time."""
    made: dict[tuple[int, str, int, int], Array] = {}
    values = generator.values

    def once(seed: int, name: str, number: int, part: int) -> Array:
        key = seed, name, number, part
        if key not in made:
            made[key] = values(*key)
        return made[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "values", once)
        patch.setattr(generator, "fingerprint", lambda vectors: hash(b"".join(vectors)) & (1 << 64) - 1)
        yield


def given(name: str, number: int, part: int) -> Array:
    return generator.values(SEED, name, number, part)


@dataclass
class Prints:
    """Fingerprints. Those of equal vectors, one after another, are computed once: members mostly have the same."""

    vectors: list[Array] = field(default_factory=list)
    last: int = 0

    def of(self, vectors: list[Array]) -> int:
        same = len(vectors) == len(self.vectors) and all(map(_equal, vectors, self.vectors))
        if not same:
            self.vectors, self.last = [vector.copy() for vector in vectors], generator.fingerprint(vectors)
        return self.last


def _equal(one: Array, other: Array) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@dataclass
class World:
    """A group with correct rounds, unless a test plants a fault.

    ``rows`` may change what is summed in a round: by member id, what each gives to a bucket. ``results`` may change
    what a member of that name gets, and the ledger under the name of ""; ``records`` what is written, ``lines`` what
    workers say.
    """

    rows: Callable[[int, int, Rows], Rows] = lambda _number, _part, rows: rows
    results: Callable[[int, int, str, Array], Array] = lambda _number, _part, _name, result: result
    records: Callable[[RoundRecord], list[RoundRecord]] = lambda record: [record]
    weights: Callable[[int, str, list[Array]], None] = lambda _number, _name, _weights: None
    lines: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda line: [line]
    departs: int = -1
    """The round in which the last one is lost, having given ``gives`` slices of each bucket."""
    gives: tuple[int, ...] = (0, 0, 0, 1)
    joins: int = -1
    """The first round to which the last one contributes."""
    gap: Dated | None = None
    """The record of lost records."""
    full: float | None = None
    """The time at which the run has filled the disk."""
    rule: str = recount.PLAIN
    """Rule of the group's mean."""
    said: str = ""
    """Rule that the oracle goes by, if it is another one."""

    def judged(self, rounds: int = ROUNDS) -> Oracle:
        oracle = Oracle(Workload(SEED, 1, self.said or self.rule))
        first = NAMES if self.joins < 0 else NAMES[:-1]
        for dated in (Group("default", len(NAMES), 20.0), Epoch("default", 1, 0, tuple(enumerate(first)), "complete")):
            oracle.take(Dated(0.0, dated))
        weights = {name: [np.zeros(size, np.float32) for size in generator.SIZES] for name in NAMES}
        for number in range(rounds):
            self._round(oracle, number, weights)
            oracle.settle()
        if self.full is not None:
            oracle.hear({"kind": "full", "at": self.full})
        if self.gap is not None:
            oracle.take(self.gap)
        oracle.settle(everything=True)
        return oracle

    def _round(self, oracle: Oracle, number: int, weights: dict[str, list[Array]]) -> None:
        gone = 0 <= self.departs < number or number < self.joins
        there = NAMES[:-1] if gone else NAMES
        losing = number == self.departs
        finished = NAMES[:-1] if gone or losing else NAMES
        if number == self.joins:
            weights[NAMES[-1]] = [vector.copy() for vector in weights[NAMES[0]]]
        weighs = [generator.weight(SEED, name, number) if name in there else 0.0 for name in NAMES]
        last = len(NAMES) - 1
        for rank, name in enumerate(there):
            self._say(oracle, {"kind": "gives", "name": name, "round": number, "rank": rank, "at": number + 0.01})
        inputs = [0] * len(NAMES)
        ledger: list[int] = []
        lines: dict[str, list[int]] = {name: [] for name in finished}
        prints = Prints()
        for part in PARTS:
            own = {member_id: given(name, number, part) for member_id, name in enumerate(there)}
            share = recount.shares(1)[part]
            cut = {str(last): frozenset(range(self.gives[part]))} if losing else {}
            summed = self.rows(number, part, own)
            rows = [(str(member_id), weighs[member_id % len(NAMES)], row) for member_id, row in sorted(summed.items())]
            result = recount.bucket(share, rows, cut, generator.SIZES[part], self.rule)
            for member_id, row in summed.items():
                spans = [share.layout.span(index) for index in cut.get(str(member_id), range(share.layout.count))]
                if weighs[member_id % len(NAMES)] and spans:
                    inputs[member_id % len(NAMES)] += digest(row[: spans[-1][1]], PLACES[part])
            ledger.append(digest(self.results(number, part, "", result), PLACES[part]))
            for name in finished:
                got = self.results(number, part, name, result.copy())
                lines[name].append(prints.of([got]))
                weights[name][part] -= got * generator.STEP
        if losing:
            epoch = Epoch("default", 2, number + 1, tuple(enumerate(NAMES[:-1])), "'dan' was lost")
            oracle.take(Dated(number + 0.05, epoch))
        record = RoundRecord(
            number, tuple(weighs), number, number + 0.1, 0, (), tuple(value % MODULUS for value in inputs),
            tuple(ledger), tuple((last, part, self.gives[part]) for part in PARTS if self.gives[part] and losing),
        )  # fmt: skip
        if number == self.joins:
            oracle.take(Dated(number + 0.05, Epoch("default", 2, number + 1, tuple(enumerate(NAMES)), "'dan' joined")))
        for written in self.records(record):
            oracle.take(Dated(number + 0.1, Round("default", 1, written)))
        for name in finished:
            self.weights(number, name, weights[name])
            line = {"kind": "round", "name": name, "round": number, "rank": NAMES.index(name), "results": lines[name]}
            self._say(oracle, {**line, "weights": prints.of(weights[name]), "at": number + 0.1})
        if number == EVERY:
            self._meet(oracle, number, finished)

    def _meet(self, oracle: Oracle, number: int, names: tuple[str, ...]) -> None:
        total = sum((tally.tally(name, number) for name in names), np.zeros(tally.LENGTH, np.int64)).tolist()
        codes = [tally.code(name, number) for name in names]
        for rank, name in enumerate(names):
            self._say(oracle, {"kind": "meets", "name": name, "round": number, "at": number + 0.2})
            met = {"kind": "met", "name": name, "round": number, "rank": rank, "at": number + 0.3}
            half = [other for place, other in enumerate(names) if place % 2 == rank % 2]
            half_sum = sum((tally.tally(other, number) for other in half), np.zeros(tally.LENGTH, np.int64)).tolist()
            met |= {"half": half, "half_sum": half_sum, "among": rank == 0}
            self._say(oracle, {**met, "sums": {"a sum": list(total)}, "gathered": codes, "broadcast": codes[0]})

    def _say(self, oracle: Oracle, line: dict[str, Any]) -> None:
        for each in self.lines(line):
            oracle.hear(each)


def only(oracle: Oracle, kind: str, text: str) -> None:
    assert set(oracle.found) == {kind}, oracle.findings
    assert any(text in finding for finding in oracle.findings), oracle.findings


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    oracle = World().judged(rounds=LAG + 5)
    assert (oracle.checked, oracle.behind, oracle.found) == (LAG + 5, 0, {}), oracle.findings
    zero = sum(generator.weight(SEED, name, number) == 0 for name in NAMES for number in range(LAG + 5))
    assert zero > 0
    assert oracle.expected == oracle.counted == len(NAMES) * (LAG + 5) - zero


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("everybody", [True, False])
def test_a_wrong_bit(part: int, everybody: bool) -> None:
    def wrong(number: int, bucket: int, name: str, result: Array) -> Array:
        if (number, bucket) == (4, part) and (everybody or name == "bob"):
            result = result.copy()
            result[-1:].view(np.uint32)[:] ^= 1
        return result

    oracle = World(results=wrong).judged()
    if everybody:
        only(oracle, "wrong", f"round 4, bucket {part}: members got")
    else:
        only(oracle, "diverged", f"round 4: bucket {part} of bob is not that of 3 others")


def test_a_contribution_in_the_sum_twice() -> None:
    def twice(number: int, part: int, rows: Rows) -> Rows:
        return {**rows, 1 + len(NAMES): rows[1]} if (number, part) == (5, 3) else rows

    only(World(rows=twice).judged(), "double", "round 5, bucket 3: members got the mean with bob in it twice")


def test_a_contribution_of_an_earlier_round() -> None:
    def stale(number: int, part: int, rows: Rows) -> Rows:
        return {**rows, 2: given("cyd", number - 1, part)} if (number, part) == (5, 0) else rows

    only(
        World(rows=stale).judged(),
        "double",
        "round 5, bucket 0: members got the mean with the contribution of cyd to round 4",
    )


def test_a_contribution_that_is_said_to_count_and_does_not() -> None:
    def without(number: int, part: int, rows: Rows) -> Rows:
        return {member_id: row for member_id, row in rows.items() if (number, part, member_id) != (5, 2, 0)}

    only(World(rows=without).judged(), "lost", "round 5, bucket 2: members got the mean without ada, which took part")


def test_a_contribution_that_does_not_count_though_its_giver_finished_the_round() -> None:
    def forgotten(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, weights=(0.0, *record.weights[1:]))] if record.round == 3 else [record]

    oracle = World(records=forgotten).judged()
    only(oracle, "lost", "round 3, in the ledger: ada took part to its end and is missing")


def test_a_weight_that_is_not_what_was_given() -> None:
    def heavier(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, weights=(2.0, *record.weights[1:]))] if record.round == 3 else [record]

    only(World(records=heavier).judged(), "wrong", "round 3, in the ledger: ada counts with weight 2 instead of 1")


@pytest.mark.parametrize("number", [0, 4, ROUNDS - 1])
def test_a_hole_in_the_ledger(number: int) -> None:
    oracle = World(records=lambda record: [] if record.round == number else [record]).judged()
    what = "was finished by members, and the ledger ends before it" if number == ROUNDS - 1 else "the ledger has no"
    assert any(finding.startswith("lost") and what in finding for finding in oracle.findings), oracle.findings


def test_a_record_that_is_written_twice_is_no_fault() -> None:
    assert not World(records=lambda record: [record, record]).judged().found


def test_a_member_whose_weights_differ() -> None:
    def astray(number: int, name: str, weights: list[Array]) -> None:
        if (number, name) == (2, "cyd"):
            weights[1][3] += 1

    oracle = World(weights=astray).judged()
    assert oracle.found == {"diverged": ROUNDS - 2}
    assert oracle.findings[0] == "diverged: round 2: weights of cyd is not that of 3 others"


def test_a_step_that_no_worker_should_have_made() -> None:
    def astray(number: int, _name: str, weights: list[Array]) -> None:
        if number == 2:
            weights[1][3] += 1

    only(World(weights=astray).judged(), "wrong", "round 2: weights are not those before it minus 0.01 times the mean")


def test_a_late_report_is_compared_too() -> None:
    oracle = World().judged()
    line = {"kind": "round", "name": "eve", "round": 1, "rank": 1, "results": [1, 2, 3, 4], "weights": 1, "at": 9.0}
    oracle.hear(line)
    only(oracle, "diverged", "round 1: results of eve are not those of the others")


def test_the_longest_stall_is_measured() -> None:
    def pause(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, completed=record.completed + 30.0) if record.round > 3 else record]

    seconds, since = World(records=pause).judged().longest
    assert seconds == pytest.approx(31.0)
    assert since == pytest.approx(3.1)


def test_a_departure_in_the_midst_of_a_round_is_no_fault() -> None:
    oracle = World(departs=4).judged()
    assert not oracle.found, oracle.findings
    assert oracle.cut == 1


def test_a_prefix_that_is_longer_than_the_ledger_says() -> None:
    def longer(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, cut=((3, 3, 2),)) if record.cut else record]

    text = "round 4, in the ledger: dan counts with [0, 0, 0, 2] slices of the buckets instead of [0, 0, 0, 1]"
    only(World(departs=4, records=longer).judged(), "wrong", text)


def test_rounds_that_a_full_disk_did_not_take_are_checked_against_the_members() -> None:
    def full(record: RoundRecord) -> list[RoundRecord]:
        return [] if 3 <= record.round <= 5 else [record]

    def wrong(number: int, part: int, _name: str, result: Array) -> Array:
        if (number, part) == (4, 3):
            result[0] += 1
        return result

    gap = Dated(5.9, Gap(3, 3.0, "no space left on device"))
    for departs, gives in ((-1, (0, 0, 0, 1)), (4, (0, 0, 0, 1)), (4, (1, 1, 0, 0)), (4, (1, 0, 1, 1))):
        oracle = World(records=full, departs=departs, gives=gives, gap=gap).judged()
        assert not oracle.found, oracle.findings
        assert oracle.unwritten == 3
    oracle = World(records=full, gap=Dated(5.9, Start(2, "", 0, 0.0, 0.0)), full=3.0).judged()
    assert (oracle.found, oracle.unwritten) == ({}, 3), "a coordinator that died with them cannot tell"
    assert World(records=full, gap=Dated(5.9, Start(2, "", 0, 0.0, 0.0))).judged().found["lost"] == 3
    oracle = World(records=full, results=wrong, gap=gap).judged()
    assert "round 4, bucket 3: members got" in oracle.findings[0]


def test_a_survivor_that_counts_in_part_is_lost() -> None:
    def in_part(number: int, part: int, _name: str, result: Array) -> Array:
        return part_of_bob if (number, part) == (4, 3) else result

    rows = [(name, generator.weight(SEED, name, 4), given(name, 4, 3)) for name in NAMES]
    part_of_bob = recount.bucket(recount.shares(1)[3], rows, {"bob": frozenset({1})}, generator.SIZES[3])

    def said(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, cut=((1, 0, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1)))] if record.round == 4 else [record]

    oracle = World(results=in_part, records=said).judged()
    only(oracle, "lost", "round 4, bucket 3: members got the mean with a part of bob only, which took part to the end")
    assert "lost: round 4, in the ledger: bob counts with [1, 1, 1, 1] slices" in oracle.findings[1]


def test_records_of_sub_groups_are_no_evidence() -> None:
    oracle = World().judged()
    oracle.take(Dated(99.0, Epoch("default.leaders", 7, 3, tuple(enumerate(NAMES)), "another group")))
    oracle.settle(everything=True)
    assert not oracle.found, oracle.findings


def test_the_first_contribution_of_a_worker_that_joins() -> None:
    assert not World(joins=3).judged().found

    def without(number: int, _part: int, rows: Rows) -> Rows:
        return {member_id: row for member_id, row in rows.items() if (number, member_id) != (3, 3)}

    def unsaid(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, weights=(*record.weights[:3], 0.0)) if record.round == 3 else record]

    oracle = World(joins=3, rows=without, records=unsaid).judged()
    only(oracle, "lost", "round 3, bucket 0: members got the mean without dan, which took part to the end")


def test_lost_members_are_placed_by_their_ranks() -> None:
    people = People(("a", "d"), {"b": 1, "c": 1, "e": 2})
    assert people.ordered(["b", "c", "e"]) == ("a", "b", "c", "d", "e")
    assert people.ordered(["c"]) == ("a", "c", "d")


def test_of_two_orders_with_one_result_the_ledgers_is_taken() -> None:
    """Test a worker that is lost, and another one that joins: each had rank 1 when it began. Its ids tell the order."""
    people = People(("ada", "cyd"), {"bob": 1})
    case: Any = SimpleNamespace(
        given=lambda name: (name, 1.0, None), fits=lambda *_: Wired(np.zeros(1)), parts_of=lambda _: iter([{}])
    )
    told = ("ada", "cyd", "bob")
    found = search(case, people, 0, [told])
    assert found is not None
    assert found[1].order == told
    for wrong in (("ada", "bob"), ("ada", "cyd", "dan"), ("ada", "cyd", "cyd"), ()):
        assert not people.may_be(wrong)


def test_a_ledger_whose_digests_say_nothing() -> None:
    def nothing(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, inputs=(0,) * len(NAMES), results=(0,) * len(PARTS))]

    oracle = World(records=nothing).judged()
    only(oracle, "wrong", "round 0, bucket 0: the ledger has digest 0000000000000000 instead of")
    assert "wrong: round 0: what was summed of ada is not its contribution" in oracle.findings


def test_a_round_that_is_direct_at_one_member_and_void_at_another() -> None:
    def going(ways: dict[tuple[int, str], str]) -> Oracle:
        def lines(line: dict[str, Any]) -> list[dict[str, Any]]:
            way = ways.get((line["round"], line["name"]), ways.get((line["round"], ""), "direct"))
            return [{**line, "way": way} if line["kind"] == "round" else line]

        return World(lines=lines).judged(4)

    oracle = going({(1, ""): "void", (2, ""): "coordinator", (3, ""): "void", (3, "bob"): "coordinator"})
    assert not oracle.found, oracle.findings
    assert oracle.ways == {"direct": 1, "void": 2, "coordinator": 1}
    only(going({(2, "bob"): "void"}), "diverged", "round 2: it was direct and void, at different members")


def test_a_worker_that_finishes_a_round_twice() -> None:
    twice = World(lines=lambda line: [line, line] if (line["kind"], line["name"]) == ("round", "bob") else [line])
    assert twice.judged(2).found == {"double": 2}
    oracle = World().judged()
    line = {"kind": "round", "name": "bob", "round": 1, "rank": 1, "results": [], "weights": 0, "at": 9.0}
    oracle.hear(line)
    assert "double: round 1: bob has finished it twice" in oracle.findings


def test_a_worker_that_never_comes_to_contribute() -> None:
    oracle = Oracle(Workload(SEED))
    line = {"kind": "replayed", "name": "eve", "rank": 1, "results": [1, 2, 3, 4], "weights": 1, "at": 9.0}
    for number in range(PATIENCE + 5):
        oracle.hear({**line, "round": number})
    only(oracle, "lost", f"eve has taken part in {PATIENCE} rounds, and contributed to none")


def changed(sums: Callable[[Array], Array]) -> Oracle:
    """Return the findings if a sum behind a round is another one."""

    def lines(line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["kind"] == "met":
            line["sums"] = {what: sums(np.array(one, np.int64)).tolist() for what, one in line["sums"].items()}
        return [line]

    return World(lines=lines).judged(EVERY + 1)


def test_collectives_have_each_member_once() -> None:
    oracle = World().judged(EVERY + 1)
    assert (oracle.meetings, oracle.halves, oracle.among) == (1, 2, 1)


def in_halves(change: Callable[[dict[str, Any]], object]) -> Oracle:
    """Return the findings if what workers say of the sums in sub-groups is something else."""

    def lines(line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["kind"] == "met":
            change(line)
        return [line]

    return World(lines=lines).judged(EVERY + 1)


def test_a_wrong_sum_in_a_sub_group() -> None:
    def plus(line: dict[str, Any], name: str, at: int = EVERY) -> None:
        if "ada" in line["half"]:
            line["half_sum"] = (np.array(line["half_sum"]) + tally.tally(name, at)).tolist()

    where = f"behind round {EVERY}, the sub-group of ada, cyd: it has"
    only(in_halves(lambda line: plus(line, "cyd")), "fault", f"{where} cyd 2 times")
    only(in_halves(lambda line: plus(line, "bob")), "fault", f"{where} another worker 1 times")
    only(in_halves(lambda line: line.update(half_sum=[0] * tally.LENGTH)), "fault", f"{where} ada 0 times, cyd 0 times")
    only(in_halves(lambda line: line.update(half_sum=[1])), "fault", "the sub-group of bob, dan: it is not a tally")


def test_members_of_a_sub_group_with_different_sums_or_members() -> None:
    def alone(line: dict[str, Any]) -> None:
        if line["name"] == "cyd":
            line.update(half=["cyd"], half_sum=tally.tally("cyd", EVERY).tolist())

    def another(line: dict[str, Any]) -> None:
        if line["name"] == "cyd":
            line["half_sum"] = [0] * tally.LENGTH

    only(in_halves(another), "fault", "the sub-group of ada, cyd: its members got 2 results")
    only(in_halves(alone), "fault", "the sub-group of ada, cyd: cyd was in that of cyd")


@pytest.mark.parametrize("counts", [True, False])
def test_a_member_that_is_lost_in_a_sub_group_counts_or_does_not(counts: bool) -> None:
    def lines(line: dict[str, Any]) -> list[dict[str, Any]]:
        if (line["kind"], line["name"]) == ("met", "bob") and not counts:
            line["half_sum"] = tally.tally("bob", EVERY).tolist()
        return [] if (line["kind"], line["name"]) == ("met", "dan") else [line]

    assert not (oracle := World(lines=lines).judged(EVERY + 1)).found, oracle.findings
    bob, eve = tally.tally("bob", EVERY), tally.tally("eve", EVERY)
    only(changed(lambda total: total + bob), "fault", f"behind round {EVERY}, a sum: it has bob 2 times")
    only(changed(lambda total: total - bob), "fault", f"behind round {EVERY}, a sum: it has bob 0 times")
    only(changed(lambda total: total + eve), "fault", f"behind round {EVERY}, a sum: it has another worker 1 times")
    earlier = tally.tally("bob", EVERY - 1)
    only(changed(lambda total: total - bob + earlier), "fault", "but with values of another round")
    only(changed(lambda total: total[:3]), "fault", "a sum: it is not a tally")


@pytest.mark.parametrize("counts", [False, True])
def test_a_worker_that_is_lost_in_a_collective_may_be_in_it(counts: bool) -> None:
    def lines(line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["kind"] != "met":
            return [line]
        if not counts:
            line["sums"]["a sum"] = (np.array(line["sums"]["a sum"]) - tally.tally("cyd", EVERY)).tolist()
            line["gathered"] = [code for code in line["gathered"] if code != tally.code("cyd", EVERY)]
        return [line] if line["name"] != "cyd" else []

    assert not (oracle := World(lines=lines).judged(EVERY + 1)).found, oracle.findings


def test_what_is_gathered_and_broadcast_is_of_present_members() -> None:
    def gathered(name: str, codes: list[int], broadcast: int | None) -> Oracle:
        def lines(line: dict[str, Any]) -> list[dict[str, Any]]:
            if (line["kind"], line["name"]) == ("met", name):
                line |= {"gathered": codes, "broadcast": broadcast}
            return [line]

        return World(lines=lines).judged(EVERY + 1)

    codes = [tally.code(name, EVERY) for name in NAMES]
    assert not gathered("bob", codes, codes[0]).found
    assert not gathered("bob", codes, None).found
    for wrong in (codes[::-1], codes[:3], [*codes, codes[0]], [*codes[:3], tally.code("dan", EVERY - 1)]):
        only(gathered("bob", wrong, codes[0]), "fault", f"behind round {EVERY}: bob gathered")
    only(gathered("bob", codes, codes[1]), "fault", "a broadcast returned")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("part", PARTS)
def test_the_ledgers_digest_is_the_published_one(part: int, shards: int) -> None:
    share, row = recount.shares(shards)[part], given("ada", 3, part)
    assert recount.ledger_digest(row, part, share) == digest(row, PLACES[part])
    for index in range(share.layout.count):
        start, stop = share.layout.span(index)
        assert recount.ledger_digest(row, part, share, [index]) == digest(row[start:stop], PLACES[part] + 4 * start)


@pytest.mark.parametrize("rule", ["median", "trimmed:0.25", "clipped:1", "krum:1"])
def test_robust_means_are_recomputed_from_what_counts_by_the_ledger(rule: str) -> None:
    assert not World(rule=rule, departs=1).judged(3).found
    only(World(rule=recount.PLAIN, said=rule).judged(2), "wrong", "which is not the mean of the contributions")
    only(World(rule=rule, rows=_without_the_first).judged(1), "lost", "the mean without ada, which took part")


def _without_the_first(_number: int, _part: int, rows: Rows) -> Rows:
    return {member_id: row for member_id, row in rows.items() if member_id}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "rule", ["plain", "median", "trimmed:0.2", "trimmed:0.45", "clipped:1", "clipped:1.02", "krum:1"]
)
def test_the_rules_of_means_are_the_reducers(rule: str, seed: int) -> None:
    part = 3 if rule[0] in "ck" else 2  # of several units
    rng = np.random.default_rng(seed)
    weights = [1.0] * 5 if seed == 0 else [float(value) for value in rng.integers(0, 9, 5) / 4]
    bucket = generator.plan().buckets[part]
    rows = [given(f"w{member_id}", seed, part) for member_id in range(5)]
    contributions = [
        Contribution(member_id, weight, row.tobytes())
        for member_id, (weight, row) in enumerate(zip(weights, rows, strict=True))
        if weight
    ]
    key = ExchangeKey(Stream.BUCKET, 0, part)
    nbytes = rows[0].nbytes
    command = Reduce(
        "default", 1, key, 0, bucket.operation, 0, nbytes, rows[0].size, None, contributions, [], True, None
    )  # fmt: skip
    made = reduce(command._replace(mean=mean_of(rule)))
    assert isinstance(made, np.ndarray | memoryview | bytes)
    assert bytes(made) == recount.mean(list(zip(weights, rows, strict=True)), rows[0].size, rule).tobytes()


def test_what_is_contributed_stays_what_it_is() -> None:
    found = [digest(given("ada", 7, part)) for part in PARTS]
    assert found == [0x5511C5781282A32A, 0x0BEC415896CBF768, 0x047DCFEE68432214, 0x591C417A7B9DD9BD]
    other = [generator.values(SEED + 1, "ada", 7, 0), given("bob", 7, 0), given("ada", 8, 0), given("ada", 7, 0)[1:]]
    assert all((row[:100] != given("ada", 7, 0)[:100]).any() for row in other)


def test_which_slices_a_number_can_mean_with_several_shards() -> None:
    share = recount.shares(2)[3]
    first, second = share.interval(0), share.interval(1)
    found = set(recount.prefixes(share, 1))
    assert found == {frozenset({first[0]}), frozenset({second[0]})}
    assert list(recount.prefixes(share, share.layout.count)) == [frozenset(range(share.layout.count))]
