"""The oracle of `gradserver chaos` finds every fault that is planted in what it goes by, and none where none is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gradserver.chaos import generator, recount
from gradserver.chaos.oracle import LAG, Oracle
from gradserver.engine.events import Contribution, Reduce
from gradserver.engine.records import Dated, Epoch, Gap, Group, Round, RoundRecord, Start
from gradserver.reducer import reduce
from protocol.digest import MODULUS, digest, places
from protocol.exchange import ExchangeKey, Stream

Array = np.ndarray[Any, Any]
Rows = dict[int, Array]
SEED = 5
NAMES = ("ada", "bob", "cyd", "dan")
ROUNDS = 8
PLACES = places(generator.plan())
PARTS = range(len(generator.SIZES))


def given(name: str, number: int, part: int) -> Array:
    return generator.values(SEED, name, number, part)


@dataclass
class World:
    """A group whose rounds are as they must be, unless somebody plants a fault.

    ``rows`` may change what is summed in a round: by seat, what each gives to a bucket. ``results`` may change what a
    member of that name gets, and the ledger under the name of ""; ``records`` what is written down.
    """

    rows: Callable[[int, int, Rows], Rows] = lambda _number, _part, rows: rows
    results: Callable[[int, int, str, Array], Array] = lambda _number, _part, _name, result: result
    records: Callable[[RoundRecord], list[RoundRecord]] = lambda record: [record]
    weights: Callable[[int, str, list[Array]], None] = lambda _number, _name, _weights: None
    departs: int = -1
    """The round in which the last one is lost, having given one slice of the last bucket only."""
    gap: Dated | None = None
    """What tells of records that were lost."""
    full: float | None = None
    """When the run has filled the disk."""

    def judged(self, rounds: int = ROUNDS) -> Oracle:
        oracle = Oracle(SEED)
        for dated in (Group("g", len(NAMES), 20.0), Epoch("g", 1, 0, tuple(enumerate(NAMES)), "complete")):
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
        gone = 0 <= self.departs < number
        there = NAMES[:-1] if gone else NAMES
        losing = number == self.departs
        finished = NAMES[:-1] if gone or losing else NAMES
        weighs = [generator.weight(SEED, name, number) if name in there else 0.0 for name in NAMES]
        cut = {len(NAMES) - 1: frozenset({0})} if losing else {}
        inputs = [0] * len(NAMES)
        ledger: list[int] = []
        lines: dict[str, list[int]] = {name: [] for name in finished}
        for part in PARTS:
            own = {seat: given(name, number, part) for seat, name in enumerate(there)}
            if losing and part < len(PARTS) - 1:
                del own[len(NAMES) - 1]
            summed = self.rows(number, part, own)
            share = recount.shares(1)[part]
            rows = [(seat, weighs[seat % len(NAMES)], row) for seat, row in sorted(summed.items())]
            result = recount.bucket(share, rows, cut, generator.SIZES[part])
            for seat, row in summed.items():
                stop = share.layout.span(0)[1] if seat in cut else row.size
                if weighs[seat % len(NAMES)]:
                    inputs[seat % len(NAMES)] += digest(row[:stop], PLACES[part])
            ledger.append(digest(self.results(number, part, "", result), PLACES[part]))
            for name in finished:
                got = self.results(number, part, name, result.copy())
                lines[name].append(digest(got, PLACES[part]))
                weights[name][part] -= got * generator.STEP
        if losing:
            epoch = Epoch("g", 2, number + 1, tuple(enumerate(NAMES[:-1])), "'dan' was lost")
            oracle.take(Dated(number + 0.05, epoch))
        record = RoundRecord(
            number, tuple(weighs), number, number + 0.1, 0, (), tuple(value % MODULUS for value in inputs),
            tuple(ledger), ((3, 3, 1),) if losing else (),
        )  # fmt: skip
        for written in self.records(record):
            oracle.take(Dated(number + 0.1, Round("g", 1, written)))
        for name in finished:
            self.weights(number, name, weights[name])
            line = {"kind": "round", "name": name, "round": number, "rank": NAMES.index(name), "results": lines[name]}
            oracle.hear({**line, "weights": generator.weights_digest(weights[name]), "at": number + 0.1})


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

    oracle = World(rows=twice).judged()
    assert oracle.found["double"] == 2  # members have it, and so has the ledger
    assert "round 5, bucket 3: members got the mean with bob in it twice" in oracle.findings[0]


def test_a_contribution_of_an_earlier_round() -> None:
    def stale(number: int, part: int, rows: Rows) -> Rows:
        return {**rows, 2: given("cyd", number - 1, part)} if (number, part) == (5, 0) else rows

    oracle = World(rows=stale).judged()
    assert oracle.found["double"] == 2
    assert "with what cyd gave to round 4" in oracle.findings[0]
    assert "what was summed of cyd is not what it gave" in oracle.findings[2]


def test_a_contribution_that_is_said_to_count_and_does_not() -> None:
    def without(number: int, part: int, rows: Rows) -> Rows:
        return {seat: row for seat, row in rows.items() if (number, part, seat) != (5, 2, 0)}

    oracle = World(rows=without).judged()
    assert "lost: round 5, bucket 2: members got the mean without ada, which is said to have counted" in oracle.findings


def test_a_contribution_that_does_not_count_though_its_giver_finished_the_round() -> None:
    def forgotten(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, weights=(0.0, *record.weights[1:]))] if record.round == 3 else [record]

    oracle = World(records=forgotten).judged()
    assert "lost: round 3: ada took part to its end, and did not count" in oracle.findings


def test_a_weight_that_is_not_what_was_given() -> None:
    def heavier(record: RoundRecord) -> list[RoundRecord]:
        return [replace(record, weights=(2.0, *record.weights[1:]))] if record.round == 3 else [record]

    assert "wrong: round 3: ada counted with weight 2, and gave 1" in World(records=heavier).judged().findings


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


def test_a_step_that_nobody_should_have_made() -> None:
    def astray(number: int, _name: str, weights: list[Array]) -> None:
        if number == 2:
            weights[1][3] += 1

    only(World(weights=astray).judged(), "wrong", "round 2: weights are not those before it minus 0.01 times the mean")


def test_who_reports_late_is_compared_too() -> None:
    oracle = World().judged()
    line = {"kind": "round", "name": "bob", "round": 1, "rank": 1, "results": [1, 2, 3, 4], "weights": 1, "at": 9.0}
    oracle.hear(line)
    only(oracle, "diverged", "round 1: results of bob are not those of the others")


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

    oracle = World(departs=4, records=longer).judged()
    assert "round 4, bucket 3: members got" in oracle.findings[0]


def test_rounds_that_a_full_disk_did_not_take_are_checked_against_who_was_there() -> None:
    def full(record: RoundRecord) -> list[RoundRecord]:
        return [] if 3 <= record.round <= 5 else [record]

    def wrong(number: int, part: int, _name: str, result: Array) -> Array:
        if (number, part) == (4, 3):
            result[0] += 1
        return result

    gap = Dated(5.9, Gap(3, 3.0, "no space left on device"))
    for departs in (-1, 4):
        oracle = World(records=full, departs=departs, gap=gap).judged()
        assert not oracle.found, oracle.findings
        assert oracle.unwritten == 3
    oracle = World(records=full, gap=Dated(5.9, Start(2, "", 0, 0.0, 0.0)), full=3.0).judged()
    assert (oracle.found, oracle.unwritten) == ({}, 3), "a coordinator that died with them cannot tell"
    assert World(records=full, gap=Dated(5.9, Start(2, "", 0, 0.0, 0.0))).judged().found["lost"] == 3
    oracle = World(records=full, results=wrong, gap=gap).judged()
    assert "round 4, bucket 3: no set of members gives what they got" in oracle.findings[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_rule_of_means_is_the_reducers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = [1.0] * 5 if seed == 0 else [float(value) for value in rng.integers(0, 9, 5) / 4]
    bucket = generator.plan().buckets[2]
    rows = [given(f"w{seat}", seed, 2) for seat in range(5)]
    contributions = [
        Contribution(seat, weight, row.tobytes())
        for seat, (weight, row) in enumerate(zip(weights, rows, strict=True))
        if weight
    ]
    key = ExchangeKey(Stream.BUCKET, 0, 2)
    nbytes = rows[0].nbytes
    command = Reduce(
        "g", 1, key, 0, bucket.operation, 0, nbytes, rows[0].size, {}, contributions, [], True, None
    )  # fmt: skip
    made = reduce(command)
    assert isinstance(made, np.ndarray | memoryview | bytes)
    assert bytes(made) == recount.mean(list(zip(weights, rows, strict=True)), rows[0].size).tobytes()


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
