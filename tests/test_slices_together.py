"""Slices that follow one another and travel in one message, both ways: engine, member, and real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from typing import Final

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import OutOfStepError, SizeMismatchError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation
from gradserver.protocol.limits import CREDIT_BYTES, MIB, RUN_BYTES, SLICE_BYTES
from gradserver.protocol.messages import Message, Push, Result
from gradserver.worker.session import Session
from gradserver.worker.transport.tcp import TcpChannel
from tests import test_session
from tests.cluster import coordinator, joined, together
from tests.engine_harness import SEATS, Harness, bucket, collective, plan_of, small_slices
from tests.test_engine_elastic import active
from tests.test_session import Tape, agree, all_reduce, joined_session, memory, plan_of as plan_of_slices, push

SLICES: Final = 7
CREDIT: Final = 16 * SLICE_BYTES


@pytest.fixture
def four_byte_slices() -> Iterator[None]:
    """Make every element of float32 a slice of its own."""
    with small_slices(4):
        yield


def group_of(world: int, numel: int) -> Harness:
    harness = Harness()
    harness.assemble(world, plan_of(numel))
    return harness


def results(harness: Harness, rank: int) -> list[tuple[Result, Sequence[Buffer]]]:
    """Return the results for ``rank`` since this was last called, whatever else it was told."""
    return [(message, payloads) for message, payloads in harness.sent(rank) if isinstance(message, Result)]


def push_run(harness: Harness, rank: int, key: ExchangeKey, start: int, values: Sequence[float]) -> None:
    message = Push(key, start, 1.0, True, None, len(values))
    harness.receive(SEATS + rank, message, np.array(values, np.float32).tobytes())


# ── the engine ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("four_byte_slices")
def test_what_all_have_pushed_together_is_answered_together() -> None:
    harness = group_of(2, 3)
    for rank in range(2):
        push_run(harness, rank, bucket(0), 0, [1, 2, 3] if rank else [3, 4, 5])

    for rank in range(2):
        ((result, payloads),) = harness.results(rank).values()
        assert (result.slice, result.slices, result.placed) == (0, 3, False)
        assert np.frombuffer(payloads[0], np.float32).tolist() == [2, 3, 4]
    assert harness.group()["outstanding"] == [0, 0]


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Draw places at which a member divides its slices among messages."""
    inner = draw(st.sets(st.integers(1, SLICES - 1)))
    return [0, *sorted(inner), SLICES]


@given(by_member=st.lists(cuts(), min_size=2, max_size=4), order=st.randoms(use_true_random=False))
def test_results_do_not_depend_on_how_slices_are_put_together(by_member: list[list[int]], order: Random) -> None:
    with small_slices(4):
        world = len(by_member)
        values = np.random.default_rng(0).normal(size=(world, SLICES)).astype(np.float32)
        told = [_exchanged(world, values, by_member, order), _exchanged(world, values, [[*range(SLICES + 1)]] * world)]
    assert told[0] == told[1]
    assert all(one == told[0][0] for one in told[0])


def _exchanged(
    world: int,
    values: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    by_member: list[list[int]],
    order: Random | None = None,
) -> list[bytes]:
    """Return the bytes that each member has at the end."""
    harness = group_of(world, SLICES)
    waiting = [list(pairwise(cut)) for cut in by_member]
    while any(waiting):
        turns = [rank for rank in range(world) if waiting[rank]]
        rank = order.choice(turns) if order is not None else turns[0]
        start, stop = waiting[rank].pop(0)
        push_run(harness, rank, bucket(0), start, values[rank, start:stop].tolist())
    found = []
    for rank in range(world):
        whole = bytearray(4 * SLICES)
        answered = list[int]()
        for result, payloads in harness.results(rank).values():
            whole[4 * result.slice : 4 * (result.slice + result.slices)] = payloads[0]
            answered += range(result.slice, result.slice + result.slices)
        assert sorted(answered) == list(range(SLICES))
        found.append(bytes(whole))
    assert harness.group()["outstanding"] == [0] * world
    return found


@pytest.mark.usefixtures("four_byte_slices")
def test_what_a_dead_member_has_pushed_together_counts_and_the_rest_does_not() -> None:
    harness = active(1, 2, 4)
    push_run(harness, 0, bucket(0), 0, [3, 3])
    push_run(harness, 1, bucket(0), 0, [1])
    harness.sent(1)
    harness.lose(0, ended=True)
    push_run(harness, 1, bucket(0), 1, [1, 1, 1])

    told = {r.slice: (r.slices, r.weight, np.frombuffer(p[0], np.float32).tolist()) for r, p in results(harness, 1)}
    assert told == {1: (1, 2.0, [2.0]), 2: (2, 1.0, [1.0, 1.0])}


@pytest.mark.usefixtures("four_byte_slices")
def test_a_run_must_have_the_bytes_of_its_slices() -> None:
    harness = group_of(2, 4)
    harness.receive(SEATS, Push(bucket(0), 0, 1.0, True, None, 3), bytes(8))
    error = harness.refusal(SEATS)
    assert isinstance(error, SizeMismatchError)
    assert "8 bytes, 12 were agreed" in str(error)


def test_lossy_slices_do_not_travel_together() -> None:
    harness = Harness()
    harness.assemble(2)
    numel = 2 * SLICE_BYTES // 4
    operation = Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, numel, codec=codec_of("bf16"))
    harness.receive(SEATS, Push(collective(0), 0, 1.0, True, operation, 2), bytes(2 * numel))
    error = harness.refusal(SEATS)
    assert isinstance(error, OutOfStepError)
    assert "goes slice by slice, 2 came together" in str(error)


# ── the member ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def near_session(credit: int = CREDIT, late: str = "") -> Iterator[tuple[Session, Tape]]:
    """Make a session that sends slices together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_session, "CREDIT", credit)
        tape = Tape()
        session = joined_session(tape, late=late)
        session.member.exchanges.shards[0].send_together(RUN_BYTES, session.membership)
        yield session, tape


def runs(tape: Tape) -> list[tuple[int, int, int]]:
    """Return part or number, slice and slices of each Push that was sent since this was last called."""
    messages = tape.take()
    return [(*test_session.slice_of(one), one.slices) for one in messages if isinstance(one, Push)]


def answer_run(session: Session, key: ExchangeKey, index: int, slices: int, fill: int) -> None:
    payload = bytes([fill]) * (slices * SLICE_BYTES)
    session.receive(Result(key, index, 3.0, True, slices), (payload,))


def test_slices_travel_together_up_to_the_credit() -> None:
    with near_session() as (session, tape):
        data = memory(18)
        handle = all_reduce(session, data)
        assert runs(tape) == [(0, 0, 4), (0, 4, 4), (0, 8, 4), (0, 12, 4)]

        answer_run(session, test_session.collective(0), 0, 3, fill=2)
        assert runs(tape) == [(0, 16, 2)]  # the last ones; before them, messages end at the same places at all members
        answer_run(session, test_session.collective(0), 3, 13, fill=3)
        answer_run(session, test_session.collective(0), 16, 2, fill=4)
        assert handle.done()
        assert (data == np.repeat(np.array([2] * 3 + [3] * 13 + [4] * 2, np.uint8), SLICE_BYTES)).all()


def test_a_message_waits_until_there_is_credit_for_all_of_it() -> None:
    with near_session() as (session, tape):
        all_reduce(session, memory(20))
        assert len(runs(tape)) == 4
        answer_run(session, test_session.collective(0), 0, 3, fill=2)
        assert runs(tape) == []
        answer_run(session, test_session.collective(0), 3, 1, fill=2)
        assert runs(tape) == [(0, 16, 4)]


def test_a_small_credit_makes_small_messages() -> None:
    with near_session(credit=2 * SLICE_BYTES) as (session, tape):
        all_reduce(session, memory(3))
        assert runs(tape) == [(0, 0, 1), (0, 1, 1)]


def test_where_a_round_may_be_closed_each_slice_has_its_message() -> None:
    with near_session(late="drop") as (session, tape):
        all_reduce(session, memory(3))
        assert runs(tape) == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]


def test_the_first_unanswered_slice_goes_alone_beyond_the_credit() -> None:
    with near_session() as (session, tape):
        agree(session, tape, plan_of_slices(8, 16))
        push(session, 1)
        assert runs(tape) == [(1, index, 4) for index in (0, 4, 8, 12)]
        push(session, 0)
        assert runs(tape) == [(0, 0, 1)], "credit may be overdrawn by one slice"
        session.receive(Result(test_session.bucket(0, 0), 0, 3.0, True), (bytes(SLICE_BYTES),))
        assert runs(tape) == [(0, 1, 1)]

        answer_run(session, test_session.bucket(0, 1), 0, 4, fill=2)
        assert runs(tape) == [(0, 2, 2)], "messages end at the same places again"


# ── real sockets ──────────────────────────────────────────────────────────────────────────────────────


def test_workers_of_this_host_send_slices_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[int]()
    send = TcpChannel.send

    def counted(
        self: TcpChannel, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0, branch: int = 0
    ) -> None:
        if isinstance(message, Push):
            sent.append(sum(map(len, payloads)))
        send(self, message, payloads, shard, branch)

    monkeypatch.setattr(TcpChannel, "send", counted)
    numel = 10 * MIB // 4 + 7
    tensors = [np.arange(numel, dtype=np.float32) % 251 + rank for rank in range(3)]
    with coordinator() as server, joined(server.url, 3, channel="tcp") as workers:
        together(workers, lambda worker: worker.all_reduce(tensors[worker.rank]))
    expected = np.arange(numel, dtype=np.float32) % 251 + 1
    assert all((one == expected).all() for one in tensors)
    largest = min(RUN_BYTES, CREDIT_BYTES // 4)
    assert sorted(sent) == sorted(3 * [largest, largest, 2 * MIB + 28])
