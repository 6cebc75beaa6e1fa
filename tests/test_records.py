"""Tests of records: what is written of a group, before which messages, and as which bytes."""

from __future__ import annotations

import struct
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.engine.commands import Command, Log, Record, Send
from gradserver.engine.data_records import Claim, Committed, Data, Holder, Order, Used
from gradserver.engine.declared import KINDS, Kind
from gradserver.engine.journal_state import Dated, JournalState
from gradserver.engine.policy import OnNonFinite, OnOutlier, Policy
from gradserver.engine.records import (
    MAX_BODY_BYTES,
    Begun,
    Boundary,
    Chosen,
    Closed,
    Commits,
    Computed,
    Cut,
    Durable,
    Entered,
    Epoch,
    Gap,
    Group,
    Halt,
    Handling,
    Moded,
    Outlier,
    Plan,
    Reset,
    Round,
    RoundRecord,
    Snapshot,
    Spent,
    Start,
    Stragglers,
    Subgroup,
    Told,
    decode,
    encode,
)
from gradserver.protocol.errors import LimitExceededError, MalformedMessageError
from gradserver.protocol.limits import MAX_COUNTER, MAX_TEXT, MAX_TIMEOUT, MAX_WEIGHT
from gradserver.protocol.messages import Membership, RoundDone
from gradserver.protocol.offers import Offer
from tests.declarations import built
from tests.engine_harness import Harness, bucket, floats, plan_of
from tests.sharded_harness import ShardedHarness

ORDER = Order(50_000, 2**64 - 1, True)
START = Start(3, "0.1.0", 4711, 1.7e9, 12.5)
FULL = RoundRecord(7, (1.0, 0.25), 5.0, 6.5, 1, ((5.0, 5.25), (5.5, 6.5)), (1, 2**64 - 1), (0, 3, 9))
RECORDS: list[Kind] = [
    START,
    Snapshot(4),
    Gap(12, 99.5, "no space left on device"),
    Group("default", 2, 60.0),
    Epoch("default", 1, 0, ((0, "w0"), (1, "ü")), "complete with 2 workers"),
    Plan("default", 1, 0, plan_of(3, 0, 100)),
    Round("default", 1, FULL),
    Round("default", 1, RoundRecord(8, (1.0,), 5.0, 6.5, 0)),
    Round("default", 2, RoundRecord(9, (1.0, 0.0), 5.0, 6.5, 0, cut=((1, 0, 3), (1, 2, 1)))),
    Round("default", 2, RoundRecord(10, (1.0,), 5.0, 6.5, 0, section=3)),
    Round("default", 1, FULL, (Committed("data", 2, 1, True, ((0, 5), (7, 9))), Committed("data", 2, 0, False, ()))),
    Cut("default", 1, 7, (1, 1023), "round 7 closed without 'w1' (rank 1)"),
    Halt("default", 1, 8, "NonFiniteError", "'w1' contributed NaN"),
    Handling("default", OnNonFinite.PROPAGATE),
    Handling("default", OnNonFinite.HALT, outliers=OnOutlier.LEAVE_OUT),
    Outlier("default", 3, 40, 1, 9.75, -0.5, True, "w1"),
    Outlier("default", 3, 80, 1, 1.0, 0.0, False, ""),
    Spent("default", 123_456_789),
    Stragglers("default", True),
    Commits("default"),
    Moded("default", "bounded", 4, "inverse"),
    Moded("default", "async", -1, "none"),
    Begun("default", 3, 9, (Computed(0, 7), Computed(2, 9)), (1,)),
    Subgroup("default/1", "default", (0, 2, 1023)),
    Chosen("default", 1, "tcp", "'w0' has no torch", False, (Told(1, Offer(host="node-1")),)),
    Durable("default", "secret", (10.0, 2.5)),
    Boundary("default", 7, 3),
    Entered("default", 8, ((2, "w2"),)),
    Reset("default", 8),
    Closed("default", 1, 8, "everybody has left"),
    Data("default", "data", ORDER, "'w0' (rank 0)", 2, True, ((5, 7),), (Holder(1, ((9, 12),), 4, 2, ((10, 12),)),)),
    Claim("default", "data", 1, 4, 2, ((10, 12),)),
    Used("default", "data", 1, 8, 2, ((10, 11),)),
    Used("default", "data", 1, 8, 2, ((11, 12),), True),
]


def names(commands: list[Command]) -> list[str]:
    """Return the records that are to be written, by kind."""
    return [type(command.record).__name__ for command in commands if isinstance(command, Record)]


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────


def test_every_kind_of_record_is_among_them() -> None:
    assert {type(record) for record in RECORDS} == set(KINDS.values())


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_read_as_they_were_written(record: Kind) -> None:
    assert decode(*encode(record)) == record


@given(st.one_of([built(kind) for kind in KINDS.values() if kind is not Round]))
def test_any_record_is_read_as_it_was_written(record: Kind) -> None:
    assert decode(*encode(record)) == record


@given(st.data(), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_any_round_is_read_as_it_was_written(data: st.DataObject, world: int, buckets: int, hashed: bool) -> None:
    lag = st.integers(0, 1 << 20).map(lambda ticks: ticks / 1024)  # what takes four bytes, exactly
    weight = st.floats(0, MAX_WEIGHT)
    digest = st.integers(0, 2**64 - 1)
    record = RoundRecord(
        data.draw(st.integers(0, MAX_COUNTER)),
        tuple(data.draw(weight) for _ in range(world)),
        1024.0,
        1024.0 + data.draw(lag),
        data.draw(st.integers(0, world - 1)),
        tuple((1024.0 + data.draw(lag), 1024.0 + data.draw(lag)) for _ in range(world)),
        tuple(data.draw(digest) for _ in range(world * hashed)),
        tuple(data.draw(digest) for _ in range(buckets * hashed)),
    )
    assert decode(*encode(Round("g", 1, record))) == Round("g", 1, record)


def test_a_round_of_many_takes_about_a_kilobyte() -> None:
    """Test 32 workers and 30 buckets, as the design allows for."""
    world, buckets = 32, 30
    record = RoundRecord(10**6, (1.0,) * world, 1.0, 2.0, 0, ((1.0, 2.0),) * world, (7,) * world, (9,) * buckets)
    assert len(encode(Round("default", 1, record))[1]) < 60 + 28 * world + 8 * buckets


@given(st.integers(0, 255), st.binary(max_size=200))
def test_other_bytes_are_refused(code: int, body: bytes) -> None:
    with pytest.raises((MalformedMessageError, LimitExceededError)):
        decode(code, body)


@given(st.sampled_from(RECORDS), st.data())
def test_a_changed_record_is_another_one_or_refused(record: Kind, data: st.DataObject) -> None:
    code, body = encode(record)
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MalformedMessageError, LimitExceededError):
        assert type(decode(code, bytes(changed))) is type(record)


@given(st.sampled_from(RECORDS), st.data())
def test_a_record_that_is_cut_off_or_goes_on_is_refused(record: Kind, data: st.DataObject) -> None:
    code, body = encode(record)
    with pytest.raises(MalformedMessageError):
        decode(code, body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(MalformedMessageError):
        decode(code, body + b"\0")


def doubles(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


@pytest.mark.parametrize(
    "fields",
    [
        [1, doubles(-1.0), 1.0, 0, b"", b"", b""],
        [1, doubles(float("nan")), 1.0, 0, b"", b"", b""],
        [1, doubles(1.0), -1.0, 0, b"", b"", b""],
        [1, doubles(1.0), 2 * MAX_TIMEOUT, 0, b"", b"", b""],
        [1, doubles(1.0), 1.0, 1, b"", b"", b""],
        [1, doubles(), 1.0, 0, b"", b"", b""],
        [1, doubles(1.0), 1.0, 0, bytes(4), b"", b""],
        [1, doubles(1.0), 1.0, 0, np.full(2, np.inf, np.float32).tobytes(), b"", b""],
        [1, doubles(1.0), 1.0, 0, b"", bytes(16), b""],
        [1, doubles(1.0), 1.0, 0, b"", b"", bytes(7)],
        [1, doubles(1.0), 1.0, 0, b"", b"", bytes(8 * 16_385)],
        [1, doubles(*[1.0] * 1025), 1.0, 0, b"", b"", b""],
    ],
)
def test_rounds_that_cannot_be_are_refused(fields: list[object]) -> None:
    with pytest.raises(MalformedMessageError):
        decode(7, msgpack.packb(["g", 1, 0.0, *fields]))


def test_what_is_too_long_is_refused_unread_and_long_text_is_cut() -> None:
    with pytest.raises(LimitExceededError):
        decode(1, memoryview(bytes(MAX_BODY_BYTES + 1)))
    found = decode(*encode(Closed("g", 1, 8, "x" * (MAX_TEXT + 1))))
    assert isinstance(found, Closed)
    assert found.reason == "x" * MAX_TEXT


# ── what still matters ────────────────────────────────────────────────────────────────────────────────


def some_records(group: str) -> list[Kind]:
    return [
        Group(group, 2, 60.0),
        Epoch(group, 1, 0, ((0, "a"), (1, "b")), "complete"),
        Plan(group, 1, 0, plan_of(3)),
        Round(group, 1, FULL),
        Plan(group, 1, 8, plan_of(4)),
        Data(group, "data", ORDER, "'a'", 0, False, ((0, 50_000),), ()),
        Claim(group, "data", 1, 1, 0, ((0, 40),)),
        Used(group, "data", 1, 7, 0, ((5, 20),)),
        Used(group, "data", 1, 8, 0, ((20, 40),)),
        Round(group, 1, FULL, (Committed("data", 0, 1, False, ((0, 30),)),)),
        Halt(group, 1, 8, "NonFiniteError", "NaN"),
        Epoch(group, 1, 8, ((0, "a"),), "'b' was lost"),
        Closed(group, 1, 8, "'a' left"),
    ]


@given(st.lists(st.sampled_from([START, *some_records("g"), *some_records("h")]), max_size=30))
def test_what_is_restated_says_all_that_was_written_before(written: list[Kind]) -> None:
    books, again = JournalState(), JournalState()
    for number, record in enumerate(written):
        books.apply(Dated(float(number), record))
    for dated in books.records():
        again.apply(dated)
    assert again.records() == books.records()
    assert len(books.records()) <= 1 + 2 * 8


def test_what_has_ended_is_not_restated() -> None:
    books = JournalState()
    for number, record in enumerate([START, *some_records("g"), *some_records("h")[:-1]]):
        books.apply(Dated(float(number), record))
    found = [record for _, record in books.records()]
    assert {record.of_group for record in found} == {"", "h"}
    assert [type(record).__name__ for record in found] == [
        "Start",
        "Group",
        "Epoch",
        "Epoch",
        "Plan",
        "Round",
        "Halt",
        "Data",
    ]
    assert [clock for clock, _ in books.records()] == [0, 14, 14, 25, 18, 23, 24, 22]
    assert found[-1] == Data("h", "data", ORDER, "'a'", 0, True, ((30, 50_000),), ()), "'b' has departed"
    books.apply(Dated(22.0, START))
    assert books.records() == [(22.0, START)]


# ── what is told when ─────────────────────────────────────────────────────────────────────────────────


def test_a_group_is_written_down_before_its_members_are_told() -> None:
    harness = Harness()
    harness.join(100, "w0", rank=0, world=2)
    commands = harness.join(101, "w1", rank=1, world=2)
    assert [type(command) for command in commands[:2]] == [Record, Record]
    assert [command.record for command in commands if isinstance(command, Record)] == [
        Group("default", 2, 10.0),
        Epoch("default", 1, 0, ((0, "w0"), (1, "w1")), "complete with 2 workers"),
    ]


def test_a_plan_is_written_down_before_it_is_agreed() -> None:
    harness = Harness()
    harness.assemble(2)
    plan = plan_of(3)
    assert names(harness.propose(0, plan)) == []
    commands = harness.propose(1, plan)
    assert commands[0] == Record(Plan("default", 1, 0, plan))


def test_a_plan_is_written_down_once_when_all_shards_know_it() -> None:
    harness = ShardedHarness(rates=(1.0, 1.0))
    written: list[Kind] = []
    handle = harness.engine.handle

    def listening(event: object, now: float) -> list[Command]:
        commands = handle(event, now)  # type: ignore[arg-type]
        written.extend(command.record for command in commands if isinstance(command, Record))
        return commands

    harness.engine.handle = listening  # type: ignore[method-assign]
    plan = plan_of(1 << 20)
    harness.assemble(2, plan)
    assert [record for record in written if isinstance(record, Plan)] == [Plan("default", 1, 0, plan)]


def test_a_round_is_written_with_arrivals_and_cuts() -> None:
    harness = Harness()
    harness.assemble(2, plan_of(3, 2))
    harness.now = 1.0
    harness.push(1, bucket(0, 1), floats(1, 1), weight=0.0)
    harness.now = 2.0
    harness.push(0, bucket(0, 0), floats(1, 2, 3), weight=4.0)
    harness.push(1, bucket(0, 0), floats(9, 9, 9), weight=0.0)
    harness.now = 3.5
    commands = harness.push(0, bucket(0, 1), floats(3, 3), weight=4.0)
    record = RoundRecord(0, (4.0, 0.0), 1.0, 3.5, 0, ((2.0, 3.5), (1.0, 2.0)))
    assert [command for command in commands if isinstance(command, Record)] == [Record(Round("default", 1, record))]


def test_a_halt_is_written_before_any_member_is_told() -> None:
    harness = Harness()
    harness.assemble(2, plan_of(2))
    harness.push(0, bucket(0), floats(1, float("nan")))
    commands = harness.push(1, bucket(0), floats(1, 1))
    told = [index for index, command in enumerate(commands) if isinstance(command, Send)]
    (written,) = [index for index, command in enumerate(commands) if isinstance(command, Record)]
    assert written < min(told)
    record = commands[written]
    assert isinstance(record, Record)
    assert isinstance(record.record, Halt)
    assert (record.record.error, record.record.round) == ("NonFiniteError", 0)
    assert "'w0' (rank 0) contributed nan" in record.record.reason


def test_a_loss_or_leave_is_written_first_and_the_last_one_closes_the_group() -> None:
    harness = Harness()
    harness.assemble(3, plan_of(2))
    harness.push(0, bucket(0), floats(1, 1))
    first = harness.lose(1, "reset")
    assert isinstance(first[0], Record)
    assert isinstance(first[0].record, Halt), "it is known why a member is missing as soon as it is known that it is"
    assert first[1] == Record(Epoch("default", 1, 0, ((0, "w0"), (2, "w2")), "'w1' (rank 1) was lost (reset)"))
    assert any(isinstance(command, Send) for command in first[2:])
    second = harness.leave(0, "done")
    assert second[0] == Record(Epoch("default", 1, 0, ((2, "w2"),), "'w0' (rank 0) left (done)"))
    third = harness.leave(2, "done")
    assert third[0] == Record(Closed("default", 1, 0, "'w2' (rank 2) left (done), the last worker"))
    assert names(third) == ["Closed"]


def test_a_data_shard_that_is_lost_is_written_down_as_what_it_ended() -> None:
    harness = ShardedHarness(rates=(1.0, 1.0))
    harness.assemble(2)
    (halt,) = [command.record for command in harness.lose_shard(1) if isinstance(command, Record)]
    assert isinstance(halt, Halt)
    assert halt.error == "ConnectionLostError"
    assert "was lost, and its slices with it" in halt.reason


def test_groups_end_with_their_coordinator() -> None:
    harness = Harness()
    harness.assemble(2)
    harness.join(7, "other", world=2, group="forming")
    commands = harness.stop("SIGTERM")
    assert commands[0] == Record(Closed("default", 1, 0, "the coordinator was stopped (SIGTERM)"))
    assert names(commands) == ["Closed"]


def test_nothing_is_written_of_a_group_that_did_not_begin() -> None:
    harness = Harness()
    commands = harness.join(100, "w0", rank=0, world=2)
    commands += harness.wait(1000.0)
    assert names(commands) == []
    assert any(isinstance(command, Log) for command in commands)


def test_an_elastic_group_writes_down_its_epochs_and_rounds_before_it_tells_of_them() -> None:
    harness = Harness({"default": Policy(2, 8, 2.0)})
    harness.assemble(3, plan_of(2))
    lost = harness.lose(1, "reset")
    assert lost[0] == Record(
        Epoch("default", 2, 0, ((0, "w0"), (2, "w2")), "'w1' (rank 1) was lost in round 0 (reset)")
    )
    assert any(isinstance(command, Send) and isinstance(command.message, Membership) for command in lost)
    harness.now = 1.0
    harness.push(0, bucket(0), floats(1, 1))
    commands = harness.push(2, bucket(0), floats(3, 3))
    told = [isinstance(command, Send) and isinstance(command.message, RoundDone) for command in commands]
    (written,) = [index for index, command in enumerate(commands) if isinstance(command, Record)]
    assert written < told.index(True)
    record = RoundRecord(0, (1.0, 0.0, 1.0), 1.0, 1.0, 2, ((1.0, 1.0),) * 3)
    assert commands[written] == Record(Round("default", 2, record))
