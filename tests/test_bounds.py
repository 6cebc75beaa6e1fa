"""Tests of false numbers from a member: they do no harm to the others.

One member of a durable group says whatever it likes, at any time, with numbers of any size. The harness puts all that
the engine sends and writes into bytes and reads it again (`tests.receivers`). No peer may be sent what it would refuse,
and no record be written that the next coordinator cannot read. The others go on with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

from gradserver.engine import Engine, records
from gradserver.engine.commands import Reduce
from gradserver.engine.declared import Kind
from gradserver.engine.events import Garbled
from gradserver.engine.records import Closed, Epoch, Gap, Group as Founded, Round, RoundRecord
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import Entry, scan
from gradserver.ledger.state import StateDir
from gradserver.protocol import wire
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import BY_CODE, numpy_dtype
from gradserver.protocol.errors import (
    CoordinatorError,
    LeftOutError,
    OutOfStepError,
    ProtocolError,
    UnexpectedMessageError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind as OperationKind, Op, Operation
from gradserver.protocol.finite import is_finite
from gradserver.protocol.limits import (
    MAX_CLAIMED,
    MAX_COUNTER,
    MAX_DATA,
    MAX_NUMEL,
    MAX_SEED,
    MAX_TIMEOUT,
    MAX_UNWRITTEN_EPOCHS,
    MAX_WEIGHT,
    MAX_WORLD_SIZE,
)
from gradserver.protocol.messages import (
    Enlist,
    Enter,
    Entered,
    Failure,
    Follow,
    Inquire,
    Join,
    Membership,
    Message,
    Opens,
    Propose,
    Push,
    Ready,
    Result,
    RoundDone,
    Serve,
    StateFailed,
    Taken,
    Welcome,
)
from gradserver.protocol.messages.leases import Claim, Register, Used
from gradserver.protocol.messages.recovery import (
    Fetch,
    Held,
    Holding,
    Resume,
    Resumed,
    Span,
    Standing,
    State,
    pack_spans,
)
from gradserver.protocol.ranges import pack
from gradserver.runtime import Runtime
from tests.crash_harness import Crashing, Durable
from tests.elastic_harness import Step
from tests.engine_harness import SEATS, Outcome, bucket, floats, small_slices
from tests.examples import examples
from tests.test_engine_resuming import BACK, Group
from tests.test_engine_shard import opened

LIAR = 0


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(16):
        yield


# ── whatever a member says ────────────────────────────────────────────────────────────────────────────

numbers = st.sampled_from([0, 1, 2, 3, 7, 1000, 10**9, MAX_CLAIMED - 1, MAX_CLAIMED])
counters = numbers | st.sampled_from([MAX_COUNTER - 1, MAX_COUNTER])
member_ids = st.sampled_from([0, 1, 2, 3, MAX_WORLD_SIZE - 1])
ranks = member_ids | st.just(-1)
weights = st.sampled_from([0.0, 1.0, 1e-30, MAX_WEIGHT])
columns = st.sampled_from([(), (1.0,), (1.0, 1.0, 1.0), (MAX_WEIGHT,) * 3, (1.0,) * MAX_WORLD_SIZE])
keys = st.builds(ExchangeKey, st.integers(0, 2), counters, counters | st.integers(0, 2), ranks, ranks)
ends = st.just(4) | st.integers(4, 2**32 - 1)
sizes = st.sampled_from([0, 16, 2**20])
said_spans = st.builds(Span, st.sampled_from(State), keys, st.integers(0, 3), ends, st.just(()), sizes, made=numbers)
spans = st.lists(said_spans, max_size=3)
texts = st.sampled_from(["", "w1", "data", "x" * 128])
ranges = st.sampled_from([(), ((0, 1),), ((0, 10),), ((3, 2**48),)]).map(pack)
Said = Callable[["Lied"], tuple[Message, list[bytes]]]


def saying(kind: type[Any], *fields: st.SearchStrategy[Any], payload: st.SearchStrategy[bytes] | None = None) -> Any:
    """Return a message of this kind, with ``fields``, and with ``payload`` if that is not None."""
    payloads = st.just([]) if payload is None else payload.map(lambda data: [data])
    return st.tuples(st.builds(kind, *fields), payloads).map(lambda said: lambda _: said)


def holding(number: int, weight: float, held: list[Span]) -> Said:
    """Return what it holds, in the present generation."""
    return lambda cluster: (Holding(cluster.generation, number, weight), [pack_spans(held)])


def fetched(key: ExchangeKey, index: int, weight: float, present: bool, counted: tuple[float, ...]) -> Said:
    payload = [b"\0" * 16] if present else []
    return lambda cluster: (Held(cluster.generation, key, index, weight, present, (), counted), payload)


def proposing(number: int) -> Said:
    return lambda cluster: (Propose(cluster.plan.hash, number), [cluster.plan.encoded])


AS_USUAL = [st.none(), st.just(1), st.none(), st.sampled_from([0, 1, MAX_COUNTER]), st.none()]
"""The fields of a Push that are not lied about."""
lies = st.one_of(
    st.builds(holding, numbers, weights, spans),
    st.builds(fetched, keys, counters, weights, st.booleans(), columns),
    st.builds(proposing, numbers),
    saying(
        Register,
        texts,
        st.sampled_from([0, 1, 100, MAX_NUMEL]),
        st.just(MAX_SEED),
        st.booleans(),
        numbers,
        numbers,
        payload=ranges,
    ),
    saying(Claim, texts, counters, numbers, st.sampled_from([0, 1, MAX_NUMEL]), numbers),
    saying(Used, texts, numbers, numbers, payload=ranges),
    saying(Enter, counters, st.booleans()),
    saying(Ready, counters),
    saying(StateFailed, counters, texts),
    saying(Serve),
    saying(Opens, numbers, counters),
    saying(Follow, numbers),
    saying(Entered, counters),
    saying(Taken, counters),
    saying(Inquire, keys),
    saying(Enlist, texts, st.none() | weights.filter(lambda rate: rate < 1e6)),
    saying(Join, texts, texts, ranks, member_ids, st.sampled_from([0.0, 1.0, MAX_TIMEOUT])),
    saying(Push, keys, counters, weights, st.just(False), *AS_USUAL),
    saying(Push, keys, counters, weights, st.just(True), *AS_USUAL, payload=st.binary(max_size=16)),
)
resumes = st.tuples(numbers, texts, st.booleans())


class Lied(Crashing):
    """A cluster in which one member says what it likes, and returns as often as it likes."""

    def __init__(self, seed: int, fuses: list[int]) -> None:
        super().__init__(3, [4, 6], [Step()] * 4, seed, fuses)
        self.is_deaf = False
        """Deliver nothing to the liar any more: it could be told anything."""

    @property
    def generation(self) -> int:
        group = self.harness.engine.control.groups.get("default")
        return 0 if group is None else group.recovery.generation

    @property
    def honest(self) -> list[Durable]:
        return [member for member_id, member in self.members.items() if member_id != LIAR]

    def lie(self, said: Said) -> None:
        """Let the liar say something."""
        liar = self.members.get(LIAR)
        if liar is not None and liar.connection >= 0:
            message, payloads = said(self)
            try:
                message, _ = wire.decode([wire.encode(message), *payloads])
            except ProtocolError as error:
                self.harness.feed(Garbled(liar.connection, error))
            else:
                self.harness.receive(liar.connection, message, *payloads)
            self.harness.inbox[liar.connection].clear()
            liar.holding, liar.standing, self.is_deaf = False, False, True

    def come_back(self, epoch: int, plan: str, serves: bool) -> None:
        liar = self.members.get(LIAR)
        if liar is not None:
            self.connections += 1
            liar.connection, liar.holding, liar.standing, self.is_deaf = self.connections, False, False, True
            self.harness.receive(liar.connection, Resume("default", LIAR, liar.token, epoch, plan, serves))

    def step(self) -> bool:
        liar = self.members.get(LIAR)
        if liar is not None and self.is_deaf:
            self.harness.inbox.pop(liar.connection, None)
            if liar.connection < 0:
                del self.members[LIAR]
        return super().step()

    def cut_off(self, member: Durable) -> None:
        if member.member_id != LIAR or not self.is_deaf:
            super().cut_off(member)

    def check(self, reduce: Reduce) -> None:
        """Check less: contributions may be lies."""


@given(
    st.integers(0, 2**16),
    st.dictionaries(st.integers(0, 80), lies | resumes, min_size=1, max_size=6),
    st.lists(st.integers(5, 60), max_size=2),
)
@settings(max_examples=examples(100), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_nothing_a_member_says_makes_unreadable_messages_or_records(
    seed: int, said: dict[int, Any], fuses: list[int]
) -> None:
    cluster = Lied(seed, fuses)
    for step, what in said.items():
        if isinstance(what, tuple):
            cluster.at[step] = partial(cluster.come_back, *what)
        else:
            cluster.at[step] = partial(cluster.lie, what)
    cluster.run()

    honest = cluster.honest
    assert len(honest) == 2, [str(gone.failure) for gone in cluster.gone.values()]
    assert all(member.finished for member in honest)
    found: list[dict[tuple[ExchangeKey, int], Outcome]] = [
        {(task.key, index): outcome for task in member.history for index, outcome in task.answers.items()}
        for member in honest
    ]
    assert found[0] == found[1]
    written = cluster.rounds()
    assert sorted(set(written)) == list(range(4))


# ── one by one ────────────────────────────────────────────────────────────────────────────────────────


def train(group: Group, rounds: int, world: int = 3) -> None:
    """Train for so many rounds. No results are read."""
    for number in range(rounds):
        for rank in range(world):
            for part in range(2):
                group.harness.push(rank, bucket(number, part), floats(1, 2, 3, 4))
        while group.harness.reduces:
            group.harness.answer(group.harness.reduces.pop())
    group.harness.inbox.clear()


def test_a_member_in_a_round_that_cannot_have_begun_is_evicted_and_the_others_go_on() -> None:
    group = Group(3)
    train(group, 5)
    group.resume(0)

    group.hold(0, 10**9)
    for rank in (1, 2):
        group.hold(rank, 5, connection=SEATS)

    failure = group.told(0)[-1]
    assert isinstance(failure, Failure)
    assert "round 1000000000, and 5 is the latest" in failure.text
    for rank in (1, 2):
        assert isinstance(group.told(rank, SEATS)[-1], Standing)
    assert group.harness.group()["world_size"] == 2


def test_after_a_restart_the_round_is_that_in_which_most_are() -> None:
    """Test a ledger that is behind, as the disk took nothing: no member is refused, and one does not outvote two."""
    group = Group(3)
    group.harness.restart()
    for rank in range(3):
        group.resume(rank)

    group.hold(0, 10**6)
    group.hold(1, 5000)
    group.hold(2, 5000)

    failure = group.told(0)[-1]
    assert isinstance(failure, Failure)
    assert isinstance(failure.exception(), LeftOutError)
    assert "in round 1000000, not in 5000" in failure.text
    assert group.harness.group()["world_size"] == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_an_epoch_that_cannot_have_begun_is_refused_and_costs_the_others_nothing(restarted: bool) -> None:
    group = Group(2)
    if restarted:
        group.harness.restart()

    group.resume(0, epoch=2 + MAX_UNWRITTEN_EPOCHS)

    assert isinstance(group.refusal(0), UnexpectedMessageError)
    assert group.harness.silent(0, 1)
    group.resume(0, epoch=1 + MAX_UNWRITTEN_EPOCHS * restarted)
    assert isinstance(group.told(0)[0], Resumed)


def test_a_plan_for_a_round_that_cannot_have_begun_is_refused() -> None:
    harness = opened()
    harness.inbox.clear()
    group = harness.engine.control.groups["default"]

    harness.receive(SEATS, Propose("ab" * 32, MAX_CLAIMED), b"")

    error = harness.refusal(SEATS)
    assert isinstance(error, UnexpectedMessageError)
    assert group.rounds.number == 0


def test_data_used_in_a_round_that_has_not_begun_is_refused() -> None:
    group = Group(2)
    group.harness.receive(SEATS, Register("data", 100, 0, False, 0, 0), pack(()))
    group.harness.receive(SEATS, Claim("data", 1, 0, 10, 0))

    group.harness.receive(SEATS, Used("data", 0, 1), pack(((0, 10),)))

    assert SEATS in group.harness.closed
    (use,) = group.harness.engine.control.groups["default"].leases.positions.uses.values()
    assert use.left == ((0, 100),), "what it held is not the others'"


def test_one_member_asks_of_so_many_kinds_of_data_at_once_and_no_more() -> None:
    group = Group(2)
    for number in range(MAX_DATA + 1):
        assert SEATS not in group.harness.closed
        group.harness.receive(SEATS, Register(f"data {number}", 100, 0, False, 0, 1), pack(()))

    assert SEATS in group.harness.closed


def test_no_member_runs_ahead_of_an_open_round() -> None:
    """Test that the others are not left out for what they cannot have begun, as that waits too long for them."""
    group = Group(3)
    for part in range(2):
        group.harness.push(0, bucket(0, part), floats(1, 2, 3, 4))

    group.harness.push(0, bucket(1), floats(1, 2, 3, 4))

    error = group.harness.refusal(SEATS)
    assert isinstance(error, OutOfStepError)
    assert "the round before it is not over" in error.message


# ── what cannot be read is not said, and not written ──────────────────────────────────────────────────


@pytest.mark.parametrize(
    "message",
    [
        RoundDone(3, MAX_COUNTER + 1),
        Resumed(1, MAX_COUNTER + 1),
        Welcome("g", 0, 1, 1, ("w",) * 1025),
        Entered(-1),
        Standing(1, 2**63),
    ],
)
def test_a_message_that_its_receiver_would_refuse_is_not_encoded(
    message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "UNCHECKED", set())
    with pytest.raises(ProtocolError):
        wire.encode(message)


class Line:
    """A channel that puts what is sent into bytes."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        assert not payloads
        wire.encode(message)
        self.sent.append(message)

    def attach(self, receiver: object) -> None:
        """Attach a receiver. The test delivers what it says."""

    def close(self) -> None:
        self.closed = True


def test_a_member_with_an_unreadable_answer_is_told_and_the_daemon_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, lines = Runtime(Engine({"a": 1, "b": 1})), (Line(), Line())
    first, second = (coordinator.connect(line) for line in lines)
    with monkeypatch.context() as patch:
        patch.setattr("gradserver.engine.control.group.group.Group.token", lambda *_: "x" * 5000)
        patch.setattr(
            "gradserver.engine.control.forming.welcome_to", lambda *_: Welcome("a", 0, MAX_COUNTER + 1, 1, ("w",))
        )
        coordinator.receive(first, Join("a", "w", -1, 1, 5.0))
    coordinator.receive(second, Join("b", "w", -1, 1, 5.0))

    (failure,) = lines[0].sent
    assert isinstance(failure, Failure)
    assert isinstance(failure.exception(), CoordinatorError)
    assert "cannot send a Welcome" in failure.text
    assert lines[0].closed
    assert isinstance(lines[1].sent[0], Welcome)
    assert "bug of gradserver" in caplog.text


UNREADABLE: list[Kind] = [
    Closed("g", 1, MAX_COUNTER + 1, "why"),
    Epoch("g", MAX_COUNTER + 1, 0, ((0, "a"),), "why"),
    Founded("g" * 129, 2, 60.0),
    Round("g", 1, RoundRecord(MAX_COUNTER + 1, (1.0,), 0.0, 1.0, 0)),
    Round("g", 1, RoundRecord(1, (1.0,), 0.0, 1.0, -1)),
    Round("g", 1, RoundRecord(1, (1.0,), 0.0, 1e9, 0)),
]


@pytest.mark.parametrize("record", UNREADABLE, ids=lambda record: type(record).__name__)
def test_an_unreadable_record_is_not_encoded(record: Kind) -> None:
    with pytest.raises(ProtocolError):
        records.encode(record)


def test_an_unreadable_record_leaves_a_gap_and_the_directory_can_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = StateDir(tmp_path, "0.1.0")
    first.append(Founded("g", 1, 60.0))
    first.append(UNREADABLE[0])
    first.append(Epoch("g", 1, 0, ((0, "a"),), "complete"))
    first.close()

    StateDir(tmp_path, "0.1.0").close()

    ((_, path),) = files_of(tmp_path)
    found = [item.read().record for item in scan(path.read_bytes()) if isinstance(item, Entry)]
    (gap,) = [record for record in found if isinstance(record, Gap)]
    assert "Closed that cannot be read" in gap.reason
    assert any(isinstance(record, Epoch) for record in found)
    assert "bug of gradserver" in caplog.text


# ── results that a member says once more ──────────────────────────────────────────────────────────────

LOST = ExchangeKey(1, 0, 3)
"""A collective of the present round."""


def fetching(*spans: Span, lacking: Span | None = None) -> Group:
    """Make a group of three in a recovery: two hold what the third one lacks, and the first is asked for it."""
    group = Group(3)
    group.harness.restart()
    for rank in range(3):
        group.resume(rank)
    for rank in range(2):
        group.hold(rank, 3, *spans)
    group.hold(2, 3, *([] if lacking is None else [lacking]))
    return group


def say_held(group: Group, rank: int, key: ExchangeKey, payload: bytes) -> None:
    generation = group.harness.engine.control.groups["default"].recovery.generation
    held = group.prove(Held(generation, key, 0, 2.0, True), payload)
    group.harness.receive(BACK + rank, held, payload)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_member_with_a_non_finite_result_is_evicted_and_the_next_one_is_asked(value: float) -> None:
    group = fetching(Span(State.HELD, bucket(3), 0, 1))
    assert group.told(0)[-1] == Fetch(2, bucket(3), 0)
    group.told(2)

    say_held(group, 0, bucket(3), floats(1, value, 3, 4).tobytes())

    failure = group.told(0)[-1]
    assert isinstance(failure, Failure)
    assert "'w0' (rank 0) holds it: slice 0 has a number that is not finite" in failure.text
    say_held(group, 1, bucket(3), floats(1, 2, 3, 4).tobytes())
    kinds = [type(message) for message in group.told(2)]
    assert kinds == [Membership, Result, Standing]
    assert BACK + 2 not in group.harness.closed


@pytest.mark.parametrize("size", [0, 4, 17])
def test_a_member_with_a_result_of_another_length_is_evicted_and_the_next_one_is_asked(size: int) -> None:
    group = fetching(Span(State.HELD, LOST, 0, 1, (), 16), lacking=Span(State.LACKING, LOST, 0, 1, (), 16))
    assert group.told(0)[-1] == Fetch(2, LOST, 0)
    group.told(2)

    say_held(group, 0, LOST, bytes(size))

    failure = group.told(0)[-1]
    assert isinstance(failure, Failure)
    assert f"slice 0 has {size} bytes, and it had said 16" in failure.text
    say_held(group, 1, LOST, bytes(16))
    assert [type(message) for message in group.told(2)] == [Membership, Result, Standing]


def test_no_member_is_given_a_result_of_another_length_than_it_lacks() -> None:
    group = fetching(Span(State.HELD, LOST, 0, 1, (), 12), lacking=Span(State.LACKING, LOST, 0, 1, (), 16))

    failure, standing = group.told(2)[-2:]

    assert isinstance(failure, Failure)
    assert failure.key == LOST
    assert isinstance(standing, Standing)
    assert not group.harness.closed


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("fp32", "float32"), ("fp32", "bfloat16"), ("fp32", "complex64"), ("int8", "float32"), ("bf16", "float32")],
)
def test_what_is_finite_is_told_from_what_is_not_in_each_codec_and_type(codec: str, dtype: str) -> None:
    known = next(one for one in BY_CODE.values() if one.name == dtype)
    operation = Operation(OperationKind.ALL_REDUCE, Op.MEAN, known, 8, -1, codec_of(codec))
    for value in (1.0, float("nan")):
        values = np.ones(8, np.float32)
        values[3] = value
        if operation.is_lossy:
            room = np.zeros(operation.codec.nbytes(8), np.uint8)
            data = bytes(operation.codec.encode(values, room))
        else:
            data = values.astype(numpy_dtype(known)).tobytes()

        assert is_finite(data, operation, 8) is (value == value)
