"""Tests of unasked results: their receivers, that they equal all others, and that the unread ones are bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.data.half import Data
from gradserver.engine.policy import Policy
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import LeftOutError, UnexpectedMessageError
from gradserver.protocol.exchange import Op, unasked_cost
from gradserver.protocol.limits import MIB, MIN_SLICE_COST, SLICE_BYTES
from gradserver.protocol.messages import HERE, Leave, Push, Result, RoundDone, Taken
from gradserver.protocol.plan import simple_plan
from gradserver.worker.member.backlog import Backlog
from gradserver.worker.session import Session
from tests.engine_harness import (
    SEATS,
    Array,
    Harness,
    all_reduce,
    bucket,
    collective,
    floats,
    plan_of,
    small_slices,
)
from tests.examples import examples
from tests.sharded_harness import ShardedHarness
from tests.test_session import Tape, agree, joined_session, memory, push
from tests.test_session_shards import URLS, Shards
from tests.test_shard_laws import small_shares

SLICE = 8
"""Bytes in these tests: two elements."""
OBSERVER = 2
"""The member of a worker that is about to become a member: it takes no part, and listens."""


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(SLICE):
        yield


def observe(data: Data, first: int = 0) -> None:
    """Let the last of three members listen from round ``first`` on, and take no part."""
    group = data.groups["default"]
    group.members.identities.depart(OBSERVER)
    group.table.world_size = 2
    group.listeners.rounds[OBSERVER] = first


def observed(*sizes: int, first: int = 0, backlog: int = 64 * MIB) -> Harness:
    harness = Harness({"default": Policy(1, 8, backlog=backlog)})
    harness.assemble(3, plan_of(*sizes))
    observe(harness.engine.data, first)
    return harness


def one_round(harness: Harness, number: int = 0, size: int = 6, part: int = 0) -> None:
    for index in range(-(-size // 2)):
        for rank in (0, 1):
            harness.push(rank, bucket(number, part), floats(*[rank] * min(2, size - 2 * index)), index=index)


def results(harness: Harness, rank: int) -> dict[tuple[int, int, int], tuple[Result, bytes | None]]:
    """Return results for ``rank``, by round, bucket and slice, without ends of rounds."""
    found: dict[tuple[int, int, int], tuple[Result, bytes | None]] = {}
    for message, payloads in harness.sent(rank):
        if isinstance(message, Result):
            where = message.key.number, message.key.part, message.slice
            assert where not in found, "the same result twice"
            found[where] = message, bytes(payloads[0]) if payloads else None
    return found


# ── what the data half sends ──────────────────────────────────────────────────────────────────────────


def test_a_listener_gets_the_results_of_all_buckets_from_its_round_on_as_all_do() -> None:
    harness = observed(6, first=1)

    for number in range(3):
        one_round(harness, number)

    heard, everybody = results(harness, OBSERVER), results(harness, 0)
    assert heard == {where: outcome for where, outcome in everybody.items() if where[0] >= 1}
    assert len(heard) == 6
    assert results(harness, 1) == everybody


def test_a_collective_is_nothing_to_a_listener() -> None:
    harness = observed(6)
    for rank in (0, 1):
        harness.push(rank, collective(0), floats(1, 2), operation=all_reduce(2))

    assert results(harness, OBSERVER) == {}


def test_a_member_that_has_pushed_gets_one_result_whether_it_listens_or_not() -> None:
    harness = observed(6)
    harness.engine.data.groups["default"].listeners.rounds[1] = 0

    one_round(harness)

    assert len(results(harness, 1)) == 3
    assert harness.engine.data.groups["default"].listeners.unread[1] == 0


def test_results_travel_slice_by_slice_to_a_listener_also_if_the_others_share_memory() -> None:
    harness = observed(5)
    memories: list[Array] = [floats(1, 2, 3, 4, 5), floats(3, 4, 5, 6, 7)]
    for rank, there in enumerate(memories):
        harness.receive(SEATS + rank, Push(bucket(0), 0, 1.0, True, None, 3, HERE), there.data.cast("B"))

    heard = results(harness, OBSERVER)

    assert [result.placed for result, _ in heard.values()] == [False] * 3
    assert b"".join(payload or b"" for _, payload in heard.values()) == memories[0].tobytes()
    assert memories[0].tolist() == memories[1].tolist() == [2, 3, 4, 5, 6]
    placed = results(harness, 0)
    assert [(result.placed, result.slices) for result, _ in placed.values()] == [(True, 3)]


def test_zeros_are_told_and_not_sent() -> None:
    harness = observed(6)
    for rank in (0, 1):
        harness.receive(SEATS + rank, Push(bucket(0), 0, 1.0, False))

    assert results(harness, OBSERVER) == {(0, 0, 0): (Result(bucket(0), 0, 2.0, False), None)}


def test_a_result_names_members_that_did_not_count_in_it() -> None:
    harness = Harness({"default": Policy(1, 8)})
    harness.assemble(3, plan_of(4))
    harness.push(1, bucket(0), floats(1, 1))
    for rank in (0, 2):
        for index in range(2):
            harness.push(rank, bucket(0), floats(1, 1), index=index)
    harness.lose(1)

    lacking = {where[2]: result.without for where, (result, _) in results(harness, 0).items()}
    assert lacking == {0: (), 1: (1,)}


# ── what is unread is bounded ─────────────────────────────────────────────────────────────────────────


def test_a_listener_that_reads_too_little_is_left_out_and_the_others_go_on() -> None:
    harness = observed(6, backlog=4 * SLICE)
    one_round(harness, 0)
    assert harness.engine.data.groups["default"].listeners.unread[OBSERVER] == 3 * SLICE
    harness.sent(OBSERVER)

    one_round(harness, 1)

    messages = [message for message, _ in harness.sent(OBSERVER) if not isinstance(message, RoundDone)]
    assert messages[0] == Result(bucket(1), 0, 2.0, True)
    error = messages[-1].exception()  # type: ignore[union-attr]
    assert isinstance(error, LeftOutError)
    assert "left out of group 'default' in round 1" in str(error)
    assert "--backlog" in str(error)
    assert SEATS + OBSERVER in harness.closed
    harness.sent(0)
    one_round(harness, 2)
    assert len(results(harness, 0)) == 3


def test_what_was_read_makes_room() -> None:
    harness = observed(6, backlog=4 * SLICE)

    for number in range(5):
        one_round(harness, number)
        harness.receive(SEATS + OBSERVER, Taken(3 * SLICE))

    assert len(results(harness, OBSERVER)) == 15
    assert harness.engine.data.groups["default"].listeners.unread[OBSERVER] == 0


def test_no_listener_can_have_read_more_than_was_sent() -> None:
    harness = observed(6, backlog=4 * SLICE)
    harness.receive(SEATS + OBSERVER, Taken(1 << 40))
    one_round(harness, 0)

    assert harness.engine.data.groups["default"].listeners.unread[OBSERVER] == 3 * SLICE


def test_a_stranger_has_nothing_to_read() -> None:
    harness = observed(6)
    harness.receive(7, Taken(5))

    assert isinstance(harness.refusal(7), UnexpectedMessageError)


def test_a_departed_member_listens_no_more() -> None:
    harness = observed(6)
    harness.engine.data.groups["default"].listeners.rounds[1] = 0
    harness.lose(1)
    harness.sent(1)

    for index in range(3):
        harness.push(0, bucket(0), floats(1, 1), index=index)

    assert results(harness, 1) == {}
    assert len(results(harness, OBSERVER)) == 3


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(2, 8),
    st.integers(0, 2**20),
)
@settings(max_examples=examples(50))
def test_a_listener_gets_equal_bytes_in_any_order_of_slices_and_never_more_than_it_reads(
    sizes: list[int], rounds: int, first: int, room: int, seed: int
) -> None:
    harness = observed(*sizes, first=first, backlog=room * SLICE)
    chance = random.Random(seed)
    group = harness.engine.data.groups["default"]
    heard: dict[tuple[int, int, int], tuple[Result, bytes | None]] = {}
    told: dict[tuple[int, int, int], tuple[Result, bytes | None]] = {}
    unread = 0
    for number in range(rounds):
        todo = {(rank, part): 0 for rank in (0, 1) for part in range(len(sizes))}
        while todo:
            rank, part = chance.choice(list(todo))
            index = todo[rank, part]
            count = min(2, sizes[part] - 2 * index)
            payload = floats(*[chance.gauss() for _ in range(count)]) if chance.random() < 0.8 else None
            harness.push(rank, bucket(number, part), payload, index=index)
            todo[rank, part] += 1
            if 2 * todo[rank, part] >= sizes[part]:
                del todo[rank, part]
            told |= results(harness, 0)
            new = results(harness, OBSERVER)
            heard |= new
            unread += sum(unasked_cost(payload) for _, payload in new.values())
            if unread and (chance.random() < 0.5 or unread > (room - 1) * SLICE):
                harness.receive(SEATS + OBSERVER, Taken(unread))
                unread = 0
            assert unread == group.listeners.unread[OBSERVER]
    assert heard == {where: outcome for where, outcome in told.items() if where[0] >= first}


@pytest.mark.parametrize("backlog", [64 * MIB, SLICE])
def test_every_shard_sends_its_slices_and_reports_a_listener_that_reads_too_little(backlog: int) -> None:
    harness = ShardedHarness({"default": Policy(1, 8, backlog=backlog)})
    with small_shares():
        harness.assemble(3, plan_of(16))
        for shard in range(2):
            observe(harness.engine.data if shard == 0 else harness.shard(shard).data)
        for index in range(4):
            for rank in (0, 1):
                harness.push_to(index // 2, rank, bucket(0), floats(*[rank] * 4), index=index)

    if backlog > SLICE:
        assert len(results(harness, OBSERVER)) == 4
        harness.receive_at(1, SEATS + OBSERVER, Taken(4 * SLICE))
        assert harness.shard(1).data.groups["default"].listeners.unread[OBSERVER] == 0
    else:
        assert SEATS + OBSERVER in harness.closed
        assert OBSERVER in harness.shard(1).data.groups["default"].members.departed
    assert len(results(harness, 0)) == 4


# ── what a worker does with them ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def tape() -> Tape:
    return Tape()


def late_session(tape: Tape, *slices: float) -> Session:
    """Make member 1 of an elastic group, in round 0 of a plan of as many slices in each bucket."""
    session = joined_session(tape, member_ids=(0, 1, 2))
    sizes = [(f"b{part}", int(size * SLICE_BYTES)) for part, size in enumerate(slices)]
    agree(session, tape, simple_plan(sizes, UINT8, Op.SUM))
    return session


@pytest.fixture
def _whole_slices() -> Iterator[None]:
    with small_slices(SLICE_BYTES, MIN_SLICE_COST):
        yield


def unasked(
    session: Session, number: int, index: int, fill: int, part: int = 0, nbytes: int = SLICE_BYTES, shard: int = 0
) -> None:
    """Return a result in which this worker does not count."""
    result, payload = Result(bucket(number, part), index, 2.0, True, without=(1,)), np.full(nbytes, fill, np.uint8).data
    if shard:
        session.receive_from(shard, result, (payload,))
    else:
        session.receive(result, (payload,))


@pytest.mark.usefixtures("_whole_slices")
class TestSession:
    def test_a_bucket_whose_results_are_there_is_not_sent(self, tape: Tape) -> None:
        session = late_session(tape, 2)
        for index in range(2):
            unasked(session, 0, index, 5 + index)
        tape.take()

        handle, data = push(session, 0)

        assert handle.done()
        assert (handle.weight, handle.present) == (2.0, True)
        assert data.tolist() == memory(1, 5).tolist() + memory(1, 6).tolist()
        assert tape.pushes() == []
        assert session.idle()

    def test_what_is_late_in_one_slice_sends_no_more_of_the_round_and_waits_for_its_results(self, tape: Tape) -> None:
        session = late_session(tape, 4, 1)
        handle, data = push(session, 0)
        assert tape.pushes() == [(0, 0), (0, 1)]

        unasked(session, 0, 1, 7)
        second, other = push(session, 1)

        assert tape.pushes() == []
        for index in (3, 0, 2):
            unasked(session, 0, index, 7)
        unasked(session, 0, 0, 8, part=1)
        assert handle.done()
        assert second.done()
        assert set(data) == {7}
        assert set(other) == {8}
        session.receive(RoundDone(0, 7), ())
        session.finish_round(1.0)
        push(session, 0)
        assert tape.pushes() == [(0, 0), (0, 1)], "credit of the round before is free again"

    def test_results_of_rounds_to_come_are_kept_for_them(self, tape: Tape) -> None:
        session = late_session(tape, 1)
        for number in range(3):
            unasked(session, number, 0, number + 1)
            session.receive(RoundDone(number, 7), ())

        for number in range(3):
            handle, data = push(session, 0)
            assert handle.done()
            assert set(data) == {number + 1}
            session.finish_round(1.0)

        handle, _ = push(session, 0)
        assert not handle.done()
        assert tape.pushes() == [(0, 0)]

    def test_what_was_read_is_told_by_the_mebibyte(self, tape: Tape) -> None:
        session = late_session(tape, 1, 1)
        unasked(session, 0, 0, 1, nbytes=SLICE_BYTES - 1)
        assert tape.take() == []
        unasked(session, 0, 0, 1, part=1, nbytes=1)

        assert tape.take() == [Taken(SLICE_BYTES - 1 + MIN_SLICE_COST)]

    def test_each_shard_is_told_of_its_own(self) -> None:
        tape = Shards()
        session = joined_session(tape, URLS, (1.0, 1.0, 1.0), "secret", member_ids=(0, 1, 2))
        agree(session, tape, simple_plan([("b0", 3 * SLICE_BYTES)], UINT8, Op.SUM))
        for shard in (2, 0, 1):
            unasked(session, 0, shard, shard, shard=shard)
        assert sorted(tape.shards[-3:]) == [0, 1, 2]
        tape.take()

        handle, data = push(session, 0)

        assert handle.done()
        assert tape.take() == []
        assert data[::SLICE_BYTES].tolist() == [0, 1, 2]

    def test_a_backlog_that_is_full_leaves_the_worker_out(self, tape: Tape) -> None:
        session = late_session(tape, 1)
        session.member.stragglers.backlog.limit = 2 * SLICE_BYTES
        for number in range(3):
            unasked(session, number, 0, 1)

        assert [message for message in tape.take() if isinstance(message, Leave)]
        with pytest.raises(LeftOutError, match="late for round 0, while the others are in round 2"):
            push(session, 0)


# ── where they are kept ───────────────────────────────────────────────────────────────────────────────

puts = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 5000))


@given(st.lists(st.one_of(puts, st.tuples(st.integers(0, 3), st.integers(0, 2)))), st.integers(1, 40_000))
def test_a_backlog_gives_what_it_was_given_once_and_holds_no_more_than_its_limit(
    steps: Sequence[tuple[int, ...]], limit: int
) -> None:
    backlog = Backlog(limit, (3, 3, 3))
    model: dict[tuple[int, int], dict[int, Buffer]] = {}

    def held() -> int:
        return sum(unasked_cost(payload) for there in model.values() for payload in there.values())

    for step in steps:
        number, part = step[:2]
        if len(step) == 2:
            taken = backlog.take(number, part)
            assert [(result.slice, payload) for result, payload in taken] == sorted(
                model.pop((number, part), {}).items()
            )
        else:
            index, payload = step[2], bytes(step[3])
            there = model.setdefault((number, part), {})
            fits = held() + unasked_cost(payload) <= limit
            assert backlog.put(Result(bucket(number, part), index, 1.0, True), payload) is (fits or index in there)
            if fits:
                there.setdefault(index, payload)
        assert backlog.nbytes == held() <= limit
        for n in range(4):
            assert backlog.has(n) is all(len(model.get((n, p), {})) == 3 for p in range(3))
    backlog.forget(2)
    assert [bool(backlog.take(n, p)) for n in (0, 1) for p in range(3)] == [False] * 6
