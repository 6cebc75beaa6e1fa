"""Tests of a worker's side of the protocol with several data shards: queues and credit for each, one handle for all."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import (
    AbandonedError,
    CollectiveMismatchError,
    ConnectionLostError,
    CoordinatorStoppedError,
    DeadlineError,
    GradServerError,
    MalformedMessageError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, operation_of
from gradserver.protocol.limits import MIB, SLICE_BYTES
from gradserver.protocol.messages import (
    Agreed,
    Attend,
    Attended,
    Failure,
    Inquire,
    Join,
    Leave,
    Message,
    Missing,
    Place,
    Push,
    Result,
    Scope,
    Welcome,
)
from gradserver.protocol.messages.recovery import Holding, Resumed, Span, Standing, State, unpack_spans
from gradserver.protocol.plan import simple_plan
from gradserver.worker.clock import Clock
from gradserver.worker.handle import Handle
from gradserver.worker.member.regions import Regions
from gradserver.worker.member.retained import Kept, Retained
from gradserver.worker.resumption import Resumption
from gradserver.worker.session import Session, ShardReceiver
from gradserver.worker.stalls import Asked
from tests.cluster import Task, wait_until
from tests.test_session import CREDIT, NAMES, Tape, bucket, collective, joined_session, memory, slice_of

URLS = ("tcp://10.0.0.2:7411", "tcp://10.0.0.3:7411")


class Shards(Tape):
    """A tape that records the shard of each message. All shards answer a goodbye."""

    def pushed(self, shard: int) -> list[tuple[int, int]]:
        """Return exchange and slice of each Push that went to ``shard``, so far."""
        return [
            slice_of(message)
            for (message, _), where in zip(self.sent, self.shards, strict=True)
            if isinstance(message, Push) and where == shard
        ]


@pytest.fixture
def tape() -> Shards:
    return Shards()


@pytest.fixture
def session(tape: Shards) -> Session:
    """Make rank 1 of three, with three shards that are equally fast."""
    session = joined_session(tape, URLS, (1.0, 1.0, 1.0), "secret", durable=True)
    tape.shards.clear()
    return session


def all_reduce(session: Session, data: Bytes) -> Handle:
    return session.collective(Operation(Kind.ALL_REDUCE, Op.SUM, UINT8, data.size), data, data)


def answer(session: Session, shard: int, key: ExchangeKey, index: int, payload: bytes | None = None) -> None:
    message = Result(key, index, 3.0, payload is not None)
    payloads = () if payload is None else (payload,)
    if shard:
        session.receive_from(shard, message, payloads)
    else:
        session.receive(message, payloads)


def fail(session: Session, shard: int, key: ExchangeKey, error: GradServerError) -> None:
    failure = Failure.of(error, Scope.EXCHANGE, key)
    if shard:
        ShardReceiver(session, shard).receive(failure, ())
    else:
        session.receive(failure, ())


def test_a_tensor_is_cut_among_the_shards_and_done_when_all_have_answered(session: Session, tape: Shards) -> None:
    data = memory(3)
    data[:] = np.arange(data.size) % 251
    before = data.tobytes()
    handle = all_reduce(session, data)

    assert [tape.pushed(shard) for shard in range(3)] == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert b"".join(bytes(payload) for _, (payload,) in sorted(tape.sent, key=lambda s: s[0].slice)) == before  # type: ignore[union-attr]
    assert all(message.operation is not None for message, _ in tape.sent if isinstance(message, Push))
    for shard in (2, 0, 1):
        assert not handle.done()
        answer(session, shard, collective(0), shard, bytes([shard]) * SLICE_BYTES)
    handle.wait()
    assert (data == np.repeat(np.arange(3, dtype=np.uint8), SLICE_BYTES)).all()
    assert session.idle()


def test_a_small_tensor_goes_to_the_coordinator_itself(session: Session, tape: Shards) -> None:
    all_reduce(session, memory(0.1))

    assert tape.shards == [0]


def test_a_slow_shard_does_not_hold_back_the_others(session: Session, tape: Shards) -> None:
    for _ in range(4):  # a slice for each shard in each
        all_reduce(session, memory(3))
    assert [len(tape.pushed(shard)) for shard in range(3)] == [2, 2, 2], "as the credit allows"

    for number in range(2):
        answer(session, 1, collective(number), 1, bytes(SLICE_BYTES))
        answer(session, 2, collective(number), 2, bytes(SLICE_BYTES))

    assert [len(tape.pushed(shard)) for shard in range(3)] == [2, 4, 4]


def test_results_of_slices_that_are_another_shards_are_nothing(session: Session) -> None:
    data = memory(3, fill=7)
    handle = all_reduce(session, data)
    for shard in range(3):
        answer(session, shard, collective(0), (shard + 1) % 3, bytes(SLICE_BYTES))

    assert not handle.done()
    assert (data == 7).all()


def test_the_frontier_is_each_shards_own(session: Session, tape: Shards) -> None:
    plan = simple_plan([(f"b{index}", 6 * MIB) for index in range(3)], UINT8, Op.SUM)
    tape.reply = Agreed(plan.hash, 0)
    session.agree(plan, None)
    tape.sent.clear()
    tape.shards.clear()
    data = [np.zeros(6 * MIB, np.uint8) for _ in plan.buckets]
    for part in (2, 1):  # bucket 2 takes all credit; the frontier, bucket 0, is not ready
        session.push_bucket(part, data[part], 1.0, True)
    assert [tape.pushed(shard) for shard in range(3)] == [[(2, 0), (2, 1)], [(2, 2), (2, 3)], [(2, 4), (2, 5)]]

    session.push_bucket(0, data[0], 1.0, True)

    assert [tape.pushed(shard)[2:] for shard in range(3)] == [[(0, 0)], [(0, 2)], [(0, 4)]]
    answer(session, 1, bucket(0, 0), 2, bytes(MIB))
    assert tape.pushed(1)[3:] == [(0, 3)]
    answer(session, 1, bucket(0, 0), 3, bytes(MIB))
    assert tape.pushed(1)[4:] == [(1, 2)], "bucket 0 is done at this shard"
    assert [len(tape.pushed(shard)) for shard in (0, 2)] == [3, 3]


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_failed_at_one_shard_is_sent_to_the_others_no_more(session: Session, tape: Shards) -> None:
    first, second = all_reduce(session, memory(12)), all_reduce(session, memory(3))
    assert [len(tape.pushed(shard)) for shard in range(3)] == [2, 2, 2]
    fail(session, 1, collective(0), WorkerLostError("w0 was lost"))

    with pytest.raises(WorkerLostError, match="w0 was lost"):
        first.wait()
    assert tape.pushed(1)[2:] == [(1, 1)], "the credit of this shard is free at once"
    assert [tape.pushed(shard)[2:] for shard in (0, 2)] == [[], []], "that of the others when they have answered"
    answer(session, 0, collective(0), 0, bytes(SLICE_BYTES))
    answer(session, 2, collective(0), 8, bytes(SLICE_BYTES))
    assert [tape.pushed(shard)[2:] for shard in (0, 2)] == [[(1, 0)], [(1, 2)]]
    for shard, start in ((0, 0), (2, 8)):
        answer(session, shard, collective(0), start + 1, bytes(SLICE_BYTES))
        answer(session, shard, collective(1), shard, bytes(SLICE_BYTES))
    answer(session, 1, collective(1), 1, bytes(SLICE_BYTES))
    second.wait()
    assert session.idle()


def test_nothing_is_written_to_memory_of_what_has_failed(session: Session) -> None:
    data = memory(3, fill=7)
    handle = all_reduce(session, data)
    fail(session, 0, collective(0), WorkerLostError("w0 was lost"))
    with pytest.raises(WorkerLostError):
        handle.wait()
    answer(session, 1, collective(0), 1, bytes(SLICE_BYTES))

    assert (data == 7).all()


def test_a_wait_ends_when_nothing_is_written_to_the_workers_memory_any_more(session: Session, tape: Shards) -> None:
    data = memory(3)
    tape.places[data.ctypes.data] = Place(0, 4096)
    handle = all_reduce(session, data)
    fail(session, 0, collective(0), WorkerLostError("w0 was lost"))
    session.receive_from(1, Result(collective(0), 1, 3.0, True, 1, True), ())
    assert not handle.done(), "the third shard may still write"

    fail(session, 2, collective(0), WorkerLostError("w2 was lost"))

    with pytest.raises(WorkerLostError, match="w0 was lost"):
        handle.wait()


def test_an_abandoned_exchange_is_reported_only_if_no_shard_knows_why(session: Session) -> None:
    handle = all_reduce(session, memory(3))
    fail(session, 1, collective(0), AbandonedError("'w0' (rank 0) went on"))
    assert not handle.done()
    fail(session, 0, collective(0), CollectiveMismatchError("they differ"))
    with pytest.raises(CollectiveMismatchError):
        handle.wait()

    handle = all_reduce(session, memory(3))
    for shard in range(3):
        assert not handle.done()
        fail(session, shard, collective(1), AbandonedError("'w0' (rank 0) went on"))
    with pytest.raises(CollectiveMismatchError, match="'w0' .rank 0. went on: the members have called different"):
        handle.wait()

    handle = all_reduce(session, memory(0.1))
    fail(session, 0, collective(2), AbandonedError("'w0' (rank 0) went on"))
    with pytest.raises(CollectiveMismatchError, match="went on: the members have called different collectives"):
        handle.wait()


def test_missing_workers_are_asked_for_where_the_answer_is_due(session: Session, tape: Shards) -> None:
    handle = all_reduce(session, memory(3))
    answer(session, 0, collective(0), 0, bytes(SLICE_BYTES))
    tape.sent.clear()
    tape.shards.clear()
    waiting = Task(handle.wait, 0.01)
    wait_until(lambda: tape.sent, "it asks")
    assert (tape.sent[0][0], tape.shards[0]) == (Inquire(collective(0)), 1)
    session.receive_from(1, Missing(collective(0), ("'w2' (rank 2)",)), ())

    assert waiting.error(DeadlineError).missing == ("'w2' (rank 2)",)


@pytest.mark.parametrize("attended", [0, 1, 2])
def test_of_a_standstill_only_those_shards_are_asked_that_are_connected(attended: int, tape: Shards) -> None:
    """Test a Welcome that comes while a member looks at its waits: connections to shards follow, one by one."""
    session = Session(tape, 10.0)
    joining = session.join(Join("group", "w1", 1, 3, 10.0))
    stalls = session.traffic.stalls
    assert stalls is not None
    sessions, looks = stalls.sessions, list[object]()

    def late() -> Sequence[Asked]:
        looks.append(None)
        if len(looks) == 2:  # the waits have been looked at
            session.receive(
                Welcome("group", 1, 7, CREDIT, NAMES, URLS, (1.0, 1.0, 1.0), "secret", member_ids=(0, 1, 2)), ()
            )
            for shard in range(1, attended + 1):
                session.attend(shard, 10.0)
        return sessions()

    stalls.sessions = late
    with stalls.waiting(joining):
        stalls._changed = 0.0  # it waits for long
        stalls.look()
    asked = [shard for (message, _), shard in zip(tape.sent, tape.shards, strict=True) if isinstance(message, Inquire)]
    assert len(looks) >= 2
    assert asked == list(range(1, attended + 1))


def test_a_lost_shard_takes_everything_with_it(session: Session) -> None:
    handle = all_reduce(session, memory(0.1))

    ShardReceiver(session, 2).lost(WorkerLostError("the data shard at tcp://10.0.0.3:7411 died"))

    with pytest.raises(WorkerLostError, match="10.0.0.3"):
        handle.wait()
    with pytest.raises(WorkerLostError, match="10.0.0.3"):
        session.check_open()


# ── books that are opened anew, and slots of shared memory ────────────────────────────────────────────


class Durable(Shards):
    """The channel of a member of a durable group. Each piece of memory that it gives is a segment of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[Bytes] = []
        self.resumption: Resumption

    def make_anew(self, error: GradServerError) -> None:
        raise AssertionError(f"no connection is made here: {error.message}")

    def region(self, nbytes: int) -> Bytes:
        self.segments.append(np.zeros(nbytes, np.uint8))
        self.places[self.segments[-1].ctypes.data] = Place(len(self.segments), 0)
        return self.segments[-1]

    def goes_on_with(self, _shards: tuple[str, ...], _answers: bool) -> bool:
        return True

    def stopped(self, error: CoordinatorStoppedError) -> None:
        raise AssertionError(error)

    def prepare_to_leave(self, _patience: float) -> None: ...

    def put_out_beacon(self) -> None: ...

    def segments_pushed(self) -> list[int | None]:
        """Return the segment of each Push since this was last called; None if it carries a payload."""
        found = [message.place for message in self.take() if isinstance(message, Push)]
        return [None if place is None else place.segment for place in found]


@pytest.fixture
def durable() -> tuple[Session, Durable]:
    """Make a member of a durable group with three shards, through slots of shared memory."""
    tape = Durable()
    session = joined_session(tape, URLS, (1.0, 1.0, 1.0), "secret", durable=True)
    tape.resumption = Resumption(session.traffic, tape.goes_on_with, Clock(), Regions(tape.region, tape.place_of))
    session.endure(tape)
    return session, tape


def say(session: Session, shard: int, message: Resumed | Standing | Result) -> None:
    if shard:
        session.receive_from(shard, message, ())
    else:
        session.receive(message, ())


def test_slots_of_before_are_used_no_more_whichever_shard_stands_first(durable: tuple[Session, Durable]) -> None:
    session, tape = durable
    all_reduce(session, memory(3))
    assert tape.segments_pushed() == [1, 1, None], "two shards have a slot each, and there are no more"

    for shard in range(3):
        say(session, shard, Resumed(2, 8, URLS))
    for shard in range(3):
        say(session, shard, Standing(8, 0))
    assert tape.segments_pushed() == [2, 2, None]
    for shard in range(3):
        answer(session, shard, collective(0), shard, bytes(SLICE_BYTES))
    for _ in range(3):
        all_reduce(session, memory(3))

    assert 1 not in tape.segments_pushed(), "the coordinator that is there now has never seen that segment"


def test_a_result_in_a_slot_of_before_is_read_though_another_shard_stands(durable: tuple[Session, Durable]) -> None:
    session, tape = durable
    data = memory(3)
    handle = all_reduce(session, data)
    (there,) = [message.place for message, _ in tape.sent if isinstance(message, Push) and message.slice == 1]
    assert there is not None
    say(session, 0, Resumed(1, 8, URLS))
    say(session, 0, Standing(8, 0))

    tape.segments[0][there.offset : there.offset + SLICE_BYTES] = 77
    say(session, 1, Result(collective(0), 1, 3.0, True, 1, True))  # it was on its way before that shard's Resumed
    for shard in (1, 2):
        say(session, shard, Resumed(1, 8, URLS))
        say(session, shard, Standing(8, 0))
    for shard in (0, 2):
        answer(session, shard, collective(0), shard, bytes(SLICE_BYTES))

    handle.wait()
    assert (data == np.repeat(np.array([0, 77, 0], np.uint8), SLICE_BYTES)).all()


def test_a_connection_that_breaks_while_the_inventory_is_said_interrupts_that(
    durable: tuple[Session, Durable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test what the thread does that says it: the channel hears first that the connection is gone."""
    session, tape = durable
    broken = ConnectionLostError("the connection is gone")

    def send(message: Message, _payloads: Sequence[Buffer] = (), _shard: int = 0) -> None:
        if isinstance(message, Holding):
            tape.resumption.interrupt(broken)

    monkeypatch.setattr(tape, "send", send)
    thread = threading.Thread(target=say, args=(session, 0, Resumed(2, 8, URLS)), daemon=True)
    thread.start()
    thread.join(2.0)

    assert not thread.is_alive(), "it waits for itself"


def test_a_member_that_lacks_frames_does_not_know_their_size(durable: tuple[Session, Durable]) -> None:
    """Test that it says none: a member that holds them says the true one, and sizes that differ are refused."""
    session, tape = durable
    operation = operation_of(Kind.ALL_GATHER, Op.FRAMED, UINT8, 100)
    session.collective(operation, np.zeros(20, np.uint8), lambda _start, _stop, _payload: None)

    for shard in range(3):
        say(session, shard, Resumed(2, 8, URLS))

    said = [payloads[0] for message, payloads in tape.sent if isinstance(message, Holding)]
    assert [span.nbytes for payload in said for span in unpack_spans(payload)] == [0]


def test_a_member_tells_a_shard_of_rounds_of_which_it_holds_results_of_others_only() -> None:
    retained = Retained(CREDIT)
    for number, part, shard in ((3, 0, 0), (3, 1, 1), (4, 2, 0)):
        result = Result(bucket(number, part), 0, 3.0, True, without=(1,))
        retained.keep_slice(0, Kept(result, b"1234", shard), number)

    here = [Span(State.HELD, bucket(3, 1), 0, 1), Span(State.ELSEWHERE, bucket(4, 2), 0, 1)]
    assert list(retained.spans(1)) == here
    assert {span.state for span in retained.spans(0)} == {State.HELD}


def test_a_result_can_be_fetched_when_its_collective_has_failed_at_another_shard_meanwhile() -> None:
    """Test that a shard in a recovery gets what it was told of: other shards may be through with theirs before."""
    retained = Retained(CREDIT)
    retained.keep_past(Kept(Result(collective(0), 4, 3.0, True), b"12", 1), 2)

    retained.failed(collective(0), True, recovers=True)

    assert retained.find(collective(0), 4) is not None
    assert [span.state for span in retained.spans(1)] == [State.CHANGED]
    retained.said()
    assert retained.find(collective(0), 4) is None


def test_a_result_of_a_late_member_that_overtakes_the_agreement_stays(tape: Shards) -> None:
    """Test a round that others end without it, before the coordinator's word that all have agreed has come."""
    session = joined_session(tape, URLS, (1.0, 1.0, 1.0), late="drop")
    plan = simple_plan([("b0", 4)], FLOAT32)
    session._propose(plan)

    session.receive_from(1, Result(bucket(0), 0, 2.0, True, without=(1,)), (bytes(16),))
    session.receive(Agreed(plan.hash, 0), ())

    assert session.member.stragglers.backlog.has(0)


# ── collectives that begin again whole ────────────────────────────────────────────────────────────────

WHOLE = {  # three slices or four, for as many ranks and shards
    Kind.ALL_TO_ALL: operation_of(Kind.ALL_TO_ALL, Op.NONE, UINT8, 3 * MIB),
    Kind.SCATTER: operation_of(Kind.SCATTER, Op.NONE, UINT8, 3 * MIB, root=0),
    Kind.GATHER: operation_of(Kind.GATHER, Op.NONE, UINT8, MIB, root=0),
    Kind.REDUCE_SCATTER: operation_of(Kind.REDUCE_SCATTER, Op.SUM, UINT8, 3 * MIB),
}


def begin(session: Session, operation: Operation) -> Handle:
    gives = None if operation.kind is Kind.SCATTER else np.zeros(operation.numel, np.uint8)
    return session.collective(operation, gives, lambda _start, _stop, _payload: None)


def answer_part(session: Session, operation: Operation, shard: int, stop: int = 27) -> None:
    """Answer the slices before ``stop`` of a shard's part; the result of this member's chunk has bytes."""
    layout, bounds = session.member.exchanges.table.share(collective(0), operation)
    for index in range(bounds[shard], min(stop, bounds[shard + 1])):
        is_others = operation.kind is Kind.REDUCE_SCATTER and layout.owner(index) != 1
        payload = None if is_others or operation.kind is Kind.GATHER else bytes(layout.reply_bytes(index, index + 1))
        answer(session, shard, collective(0), index, payload)


def inventory(session: Session, tape: Durable, generation: int) -> dict[int, list[tuple[int, State, int, int]]]:
    """Let a recovery begin, and return what this member says by shard: of which collective which slices are how."""
    tape.sent.clear()
    tape.shards.clear()
    for shard in range(3):
        assert not tape.sent, "it says what it holds when it has heard all shards"
        say(session, shard, Resumed(1, generation, URLS))
    return {
        shard: [(span.key.number, span.state, span.first, span.stop) for span in unpack_spans(payloads[0])]
        for shard, (message, payloads) in zip(tape.shards, tape.sent, strict=True)
        if isinstance(message, Holding)
    }


def stand(session: Session, tape: Durable, generation: int) -> list[list[tuple[int, int]]]:
    """Let the recovery end, and return what is pushed to each shard."""
    tape.sent.clear()
    tape.shards.clear()
    for shard in range(3):
        say(session, shard, Standing(generation, 0))
    return [tape.pushed(shard) for shard in range(3)]


@pytest.mark.parametrize("kind", WHOLE)
def test_what_others_get_is_open_at_all_shards_until_all_have_answered(
    kind: Kind, durable: tuple[Session, Durable]
) -> None:
    """Test collectives with bytes of its own for each member, of which one shard has answered its part."""
    session, tape = durable
    operation = WHOLE[kind]
    tape.shards.clear()
    handle = begin(session, operation)
    first = [tape.pushed(shard) for shard in range(3)]
    answer_part(session, operation, 0)

    said = inventory(session, tape, 8)

    assert {state for shard in range(3) for _, state, _, _ in said[shard]} == {State.LACKING}
    assert stand(session, tape, 8) == first, "it is given again whole"
    for shard in range(3):
        assert not handle.done()
        answer_part(session, operation, shard)
    handle.wait()
    assert session.idle()
    own = State.HELD if kind is Kind.REDUCE_SCATTER else State.OVER
    said = inventory(session, tape, 9)
    assert [{state for _, state, _, _ in said[shard]} for shard in range(3)] == [{State.OVER}, {own}, {State.OVER}]
    assert stand(session, tape, 9) == [[], [], []]


def test_a_part_whose_results_are_kept_stays_done(durable: tuple[Session, Durable]) -> None:
    """Test a shard that has this member's chunk alone: others that lack it get it from here."""
    session, tape = durable
    operation = WHOLE[Kind.REDUCE_SCATTER]
    handle = begin(session, operation)
    answer_part(session, operation, 1)

    assert inventory(session, tape, 8)[1] == [(0, State.HELD, 1, 2)]
    assert stand(session, tape, 8)[1] == []
    for shard in (0, 2):
        answer_part(session, operation, shard)
    handle.wait()


def test_what_is_kept_no_more_is_open_again_while_the_collective_is(durable: tuple[Session, Durable]) -> None:
    """Test a chunk that is larger than what is kept: no result of it is over before the rest is."""
    session, tape = durable
    operation = operation_of(Kind.REDUCE_SCATTER, Op.SUM, UINT8, 3 * 9 * MIB)
    handle = begin(session, operation)
    answer_part(session, operation, 1)

    assert inventory(session, tape, 8)[1] == [(0, State.HELD, 14, 18), (0, State.LACKING, 9, 14)]
    assert stand(session, tape, 8)[1] == [(0, 9), (0, 10)]
    for shard in range(3):
        answer_part(session, operation, shard, stop=14 if shard == 1 else 27)
    handle.wait()


def test_slices_that_are_settled_take_no_credit(durable: tuple[Session, Durable]) -> None:
    """Test more of them than credit allows, between two that are pushed."""
    session, tape = durable
    begin(session, operation_of(Kind.REDUCE_SCATTER, Op.SUM, UINT8, 3 * 9 * MIB))
    inventory(session, tape, 8)
    for index in range(10, 17):
        answer(session, 1, collective(0), index, bytes(SLICE_BYTES))

    assert stand(session, tape, 8)[1] == [(0, 9), (0, 17)]


def test_what_is_given_again_goes_in_front_of_later_collectives(durable: tuple[Session, Durable]) -> None:
    session, tape = durable
    operation = WHOLE[Kind.ALL_TO_ALL]
    handle, later = begin(session, operation), all_reduce(session, memory(3))
    answer_part(session, operation, 0)

    inventory(session, tape, 8)

    assert stand(session, tape, 8)[0] == [(0, 0), (1, 0)]
    for shard in range(3):
        answer_part(session, operation, shard)
        answer(session, shard, collective(1), shard, bytes(SLICE_BYTES))
    handle.wait()
    later.wait()


# ── coming and going ──────────────────────────────────────────────────────────────────────────────────


def test_attending_shows_the_token(session: Session, tape: Shards) -> None:
    handle = session.attend(2, 5.0)
    assert tape.take() == [Attend("group", 7, 1, "secret")]
    assert tape.shards == [2]
    session.receive_from(1, Attended(), ())
    assert not handle.done()
    session.receive_from(2, Attended(), ())
    handle.wait()


def test_the_coordinator_hears_the_goodbye_when_all_shards_have(session: Session, tape: Shards) -> None:
    for shard in (1, 2):
        session.attend(shard, 5.0)
    tape.sent.clear()
    tape.shards.clear()
    tape.hears = False
    closing = Task(session.close, "done")
    for shard in (1, 2):
        wait_until(lambda: len(tape.sent) == 2, "it says goodbye to the shards")
        assert sorted(tape.shards) == [1, 2]
        session.receive_from(shard, Leave("done"), ())
    wait_until(lambda: len(tape.sent) == 3, "and then to the coordinator")
    assert tape.shards[-1] == 0
    session.receive(Leave("done"), ())
    closing.result()


def test_shards_that_were_never_visited_hear_no_goodbye(session: Session, tape: Shards) -> None:
    session.close("it could not join")

    assert tape.shards == [0]


@pytest.mark.parametrize("rates", [(1.0, 1.0), (), (0.0, 0.0, 0.0)])
def test_a_welcome_whose_shards_and_rates_do_not_fit_is_refused(tape: Shards, rates: tuple[float, ...]) -> None:
    session = Session(tape, timeout=10.0)
    session.join(Join("group", "w1", 1, 3, 10.0))
    with pytest.raises(MalformedMessageError, match="a Welcome with 3 data shards"):
        session.receive(Welcome("group", 1, 7, CREDIT, NAMES, URLS, rates, "secret", tuple(range(len(NAMES)))), ())
