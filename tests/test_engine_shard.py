"""Tests of a data shard's engine by itself: its workers, what it obeys and reports, and its messages as bytes."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.engine.commands import Close, Send
from gradserver.engine.events import Disconnected, Garbled, Received, Stop, Tick
from gradserver.engine.figures import Figures, OfBucket, OfMember
from gradserver.engine.link import decode_order, decode_report, encode_order, encode_report
from gradserver.engine.order_fields import Departure, Member, Newcomer
from gradserver.engine.orders import (
    Break,
    CloseGroup,
    Configure,
    CutRound,
    Halt,
    OpenGroup,
    RemoteOrder,
    SetPlan,
    order as order_family,
)
from gradserver.engine.policy import Lateness, OnNonFinite, Policy
from gradserver.engine.records import RoundRecord
from gradserver.engine.reports import (
    Absent,
    Applied,
    Behind,
    Halted,
    Late,
    Planned,
    RemoteReport,
    RoundCompleted,
    report as report_family,
)
from gradserver.engine.shard import ATTENDING_SECONDS, MAX_ATTENDING, ShardEngine
from gradserver.protocol.errors import (
    CoordinatorStoppedError,
    DeadlineError,
    GradServerError,
    LimitExceededError,
    MalformedMessageError,
    NonFiniteError,
    ProtocolError,
    UnexpectedMessageError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.limits import MAX_COUNTER, MAX_NAME_BYTES, MAX_REPORT_BYTES, MAX_SHARDS, MAX_WORLD_SIZE
from gradserver.protocol.messages import (
    Agreed,
    Attend,
    Attended,
    Enlist,
    Enlisted,
    Failure,
    Leave,
    Message,
    Ordered,
    Propose,
    Push,
    Reported,
    Result,
    Scope,
    Welcome,
)
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.shards import share_of
from gradserver.protocol.slicing import ALIGNMENT
from tests.declarations import built
from tests.engine_harness import SEATS, TIMEOUT, all_reduce, bucket, collective, floats, plan_of
from tests.sharded_harness import LINK, LINKS, ShardedHarness, url_of

LARGE = 70_000
"""Elements of float32 that are shared among shards."""


def opened(rates: tuple[float, ...] = (1.0, 1.0), slow: bool = True) -> ShardedHarness:
    """Make two workers that were welcomed, before the coordinator's orders arrive at its shards."""
    harness = ShardedHarness(rates=rates, slow=slow)
    for rank in range(2):
        harness.join(SEATS + rank, f"w{rank}", rank=rank, world=2)
    return harness


def told(harness: ShardedHarness, connection: int) -> GradServerError:
    """Return the error that a connection was refused with."""
    ((message, _),) = harness.inbox.pop(connection)
    assert isinstance(message, Failure)
    assert connection in harness.closed
    return message.exception()


# ── attending ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_attends_before_the_coordinators_word_waits_for_it() -> None:
    harness = opened()
    harness.attend(1, 0)
    assert [type(m) for m, _ in harness.sent(0)] == [Welcome]

    harness.pass_on(1)

    assert [type(m) for m, _ in harness.sent(0)] == [Attended]
    harness.attend(1, 1)
    assert [type(m) for m, _ in harness.sent(1)] == [Welcome, Attended]


def test_a_worker_that_waits_too_long_is_refused() -> None:
    harness = opened()
    harness.attend(1, 0)
    harness.sent(0)
    harness.wait(ATTENDING_SECONDS - 1)
    assert harness.silent(0)
    assert harness.shard(1).next_deadline() == ATTENDING_SECONDS

    harness.wait(1)

    assert "has not told the data shard at tcp://10.0.0.2:7411 of membership 1" in str(told(harness, SEATS))
    assert harness.shard(1).next_deadline() is None


def test_a_wrong_token_is_found_out_also_if_it_came_early() -> None:
    harness = opened()
    harness.attend(1, 0, token="token 1")
    harness.sent(0)
    harness.flush()

    assert "this is not the token of member id 0 in group 'default'" in str(told(harness, SEATS))
    assert harness.shard(1).data.groups["default"].members.connections == [-1, -1]


def test_not_too_many_wait() -> None:
    harness = opened()
    for number in range(MAX_ATTENDING):
        harness.receive_at(1, 1000 + number, Attend("default", 9, 0, "token"))
    harness.receive_at(1, 999, Attend("default", 9, 0, "token"))

    assert isinstance(told(harness, 999), LimitExceededError)
    harness.feed_at(1, Disconnected(1000, "gone"))
    harness.receive_at(1, 998, Attend("default", 9, 0, "token"))
    assert 998 not in harness.inbox


def test_no_worker_attends_what_is_over() -> None:
    harness = ShardedHarness()
    harness.assemble(2)
    attend = Attend("default", 1, 0, harness.welcomes[0].token)
    harness.leave(0)
    harness.receive_at(1, 77, attend)
    assert "'w0' (rank 0) left" in str(told(harness, 77))
    harness.leave(1)
    harness.receive_at(1, 78, attend)

    assert "membership 1 of group 'default' is over" in str(told(harness, 78))


def test_a_worker_that_never_attends_is_found_by_the_deadline() -> None:
    harness = opened(slow=False)
    harness.attend(1, 0)
    operation = all_reduce(LARGE)
    first, second = (share_of(operation, 2, (1.0, 1.0)).load(shard) for shard in range(2))
    for rank in range(2):
        harness.push_to(0, rank, collective(0), bytes(first), operation=operation)
    harness.inbox.clear()
    harness.push_to(1, 0, collective(0), bytes(second), index=1, operation=operation)
    harness.wait(TIMEOUT)

    ((failure, _),) = harness.sent(0)
    assert isinstance(failure, Failure)
    assert "waited 10 s (--round-timeout) for 'w1' (rank 1); 'w0' (rank 0) had come" in failure.text


# ── lost members ──────────────────────────────────────────────────────────────────────────────────────


def test_a_broken_connection_to_a_shard_costs_the_membership() -> None:
    harness = ShardedHarness()
    harness.assemble(2)
    harness.feed_at(1, Disconnected(SEATS + 1, "it died"))

    error = told(harness, SEATS + 1)
    assert str(error) == f"its connection to the data shard at {url_of(1)} broke: it died"
    assert (
        f"'w1' (rank 1) was lost and is needed to go on: its connection to the data shard at {url_of(1)}"
        in (harness.group()["broken"])
    )
    assert 1 in harness.shard(1).data.groups["default"].members.departed


@pytest.mark.parametrize("how", ["garbage", "a push too far"])
def test_breaking_the_protocol_at_a_shard_costs_the_membership(how: str) -> None:
    harness = ShardedHarness()
    harness.assemble(2)
    if how == "garbage":
        harness.feed_at(1, Garbled(SEATS, MalformedMessageError("not a message")))
    else:
        harness.push_to(1, 0, bucket(0), floats(1))

    assert harness.closed.count(SEATS) == 2, "both connections of w0"
    why = "it broke the protocol: not a message" if how == "garbage" else "bucket 0 is in no plan that 'w0' (rank 0)"
    assert f"'w0' (rank 0) was lost and is needed to go on: {why}" in harness.group()["broken"]


def test_a_worker_that_left_in_peace_is_not_reported() -> None:
    harness = ShardedHarness()
    harness.assemble(2)
    harness.receive_at(1, SEATS, Leave("done"))
    harness.feed_at(1, Disconnected(SEATS, "gone"))

    assert harness.group()["state"] == "active"
    assert [type(m) for m, _ in harness.sent(0)] == [Leave]


def test_a_report_of_a_membership_that_is_over_is_nothing() -> None:
    harness = opened(slow=True)
    harness.flush()
    harness.attend(1, 0)
    harness.feed_at(1, Disconnected(SEATS, "gone"))  # its report is on its way
    for rank in range(2):
        harness.feed(Disconnected(SEATS + rank, "gone"))
    harness.inbox.clear()
    for rank in range(2):
        harness.join(SEATS + 10 + rank, f"v{rank}", rank=rank, world=2)
    harness.flush()

    assert harness.group()["state"] == "active"
    assert harness.shard(1).data.groups["default"].order.epoch == 2


# ── plans and rounds ──────────────────────────────────────────────────────────────────────────────────


def test_a_plan_is_agreed_on_when_every_shard_has_confirmed_it() -> None:
    harness = ShardedHarness(rates=(1.0, 1.0, 1.0))
    harness.assemble(2)
    harness.slow = True
    plan = plan_of(LARGE, 3)
    for rank in range(2):
        harness.propose(rank, plan)
    assert sorted(harness.busy_links()) == [1, 2]
    for link in (1, 2, -1):
        harness.pass_on(link)
        assert harness.silent(0, 1)
    harness.pass_on(-2)

    assert harness.only(range(2), Agreed) == [Agreed(plan.hash, 0)] * 2


def test_a_plan_that_a_shard_does_not_confirm_has_a_deadline() -> None:
    harness = ShardedHarness(slow=True)
    harness.slow = False
    harness.assemble(2)
    harness.slow = True
    for rank in range(2):
        harness.propose(rank, plan_of(3))
    harness.wait(TIMEOUT)

    for rank in range(2):
        ((failure, _),) = harness.sent(rank)
        assert isinstance(failure, Failure)
        assert "waited 10 s for its data shards to confirm it" in failure.text
    harness.flush()
    assert harness.silent(0, 1)


def test_a_new_plan_begins_where_the_members_are_also_if_reports_are_late() -> None:
    harness = ShardedHarness(rates=(0.0, 1.0))  # all rounds are the other shard's
    plan = plan_of(3)
    harness.assemble(2, plan)
    harness.slow = True
    for number in range(3):
        for rank in range(2):
            harness.push_to(1, rank, bucket(number), floats(1, 2, 3))
    assert len(harness.links[-1]) == 3
    harness.inbox.clear()
    for rank in range(2):
        harness.receive(SEATS + rank, Propose(plan.hash, 3), plan.encoded)
    harness.flush()

    assert harness.only(range(2), Agreed) == [Agreed(plan.hash, 3)] * 2
    ledger = harness.engine.control.groups["default"].rounds.ledger
    assert [record.round for record in ledger] == [0, 1, 2]


def test_a_round_is_over_when_the_last_shard_says_so() -> None:
    harness = ShardedHarness(rates=(1.0, 1.0))
    harness.assemble(2, plan_of(LARGE))
    first = round(LARGE / 2 / ALIGNMENT) * ALIGNMENT
    harness.now = 5.0
    for rank in range(2):
        harness.push_to(0, rank, bucket(0), np.ones(first, np.float32))
    assert harness.group()["round"] == 0
    harness.now = 6.0
    harness.push_to(1, 1, bucket(0), np.ones(LARGE - first, np.float32), index=1)
    harness.now = 8.0
    harness.push_to(1, 0, bucket(0), np.ones(LARGE - first, np.float32), index=1)

    assert harness.group()["round"] == 1
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert record == RoundRecord(0, (1.0, 1.0), 5.0, 8.0, 0, ((5.0, 8.0), (5.0, 6.0)))
    assert sum(isinstance(message, Result) for message, _ in harness.sent(0)) == 2


@pytest.mark.parametrize("error", [NonFiniteError, DeadlineError])
def test_members_hear_why_a_shard_cannot_go_on_when_the_coordinator_has_halted_the_group(
    error: type[GradServerError],
) -> None:
    harness = ShardedHarness(rates=(0.0, 1.0))
    harness.assemble(2, plan_of(3))
    harness.slow = True
    for rank in range(1 if error is DeadlineError else 2):
        harness.push_to(1, rank, bucket(0), floats(1, np.nan, 3))
    harness.wait(TIMEOUT)
    assert harness.silent(0, 1), "the coordinator has yet to hear"
    assert harness.shard(1).next_deadline() == 2 * TIMEOUT

    harness.flush()
    if error is DeadlineError:
        harness.push_to(1, 1, bucket(0), floats(1, 2, 3))

    assert harness.group()["state"] == "broken"
    for rank in range(2):
        assert isinstance(harness.failure(rank, key=bucket(0)), error)
    assert harness.next_deadline() is None


@pytest.mark.parametrize("is_heard", [True, False], ids=["heard", "a recovery begins"])
def test_members_hear_that_a_bucket_was_open_when_they_agreed_on_a_plan_if_the_coordinator_does(is_heard: bool) -> None:
    harness = ShardedHarness({"default": Policy(1, 4)}, rates=(0.0, 1.0), incarnation=1)
    harness.assemble(2, plan_of(3))
    harness.push_to(1, 0, bucket(0), floats(1, 2, 3))
    harness.slow = True
    for rank in range(2):
        harness.propose(rank, plan_of(4))
    harness.pass_on(1)  # the shard is to go by a new plan, and has a bucket of the one before
    assert harness.silent(0, 1), "the coordinator has yet to hear"
    if not is_heard:
        harness.receive(LINKS - 1, Resume("default", 1, harness.welcomes[1].token, 1, ""))
        harness.sent(0)
    harness.flush()

    if is_heard:
        for rank, scopes in enumerate([{Scope.PROPOSAL, Scope.EXCHANGE}, {Scope.PROPOSAL}]):
            told = [message for message, _ in harness.sent(rank)]
            assert {failure.scope for failure in told if isinstance(failure, Failure)} == scopes
            assert all(isinstance(failure, Failure) and failure.error == "OutOfStepError" for failure in told)
    else:
        assert not any(isinstance(message, Failure) for message, _ in harness.sent(0))
    assert harness.group()["state"] == ("broken" if is_heard else "recovering")
    assert (harness.shard(1).data.groups["default"].buckets_halted is not None) == is_heard


# ── what comes from the coordinator, and what does not ────────────────────────────────────────────────


def test_a_shard_that_is_told_nonsense_hangs_up() -> None:
    said: list[tuple[Message, tuple[bytes, ...]]] = [
        (Ordered(), (b"garbage",)),
        (Ordered(), (encode_order(CloseGroup("no such")),)),
        (Welcome("default", 0, 1, 1, ("w0",)), ()),
    ]
    for message, payloads in said:
        shard = ShardEngine("tcp://10.0.0.1:7411", url_of(1), LINK)
        commands = shard.handle(Received(LINK, message, payloads), 0.0)
        assert Close(LINK) in commands


def test_workers_are_told_that_a_shard_stops() -> None:
    harness = ShardedHarness()
    harness.assemble(2)
    harness.receive_at(1, 77, Attend("later", 9, 0, "token"))
    harness.feed_at(1, Stop("it received SIGTERM"))

    for connection in (SEATS, SEATS + 1, 77):
        ((message, _),) = harness.inbox.pop(connection)
        assert isinstance(message, Failure)
        assert isinstance(message.exception(), CoordinatorStoppedError)
        assert "the data shard at tcp://10.0.0.2:7411 was stopped (it received SIGTERM)" in message.text


def test_groups_that_formed_before_a_shard_came_do_without_it() -> None:
    harness = ShardedHarness(rates=(1.0,))
    harness.assemble(2)
    harness.receive(7, Enlist("tcp://10.0.0.7:1"))
    assert [type(m) for m, _ in harness.inbox.pop(7)] == [Enlisted]
    assert harness.welcomes[0].shards == ()
    harness.feed(Disconnected(7, "gone"))

    assert harness.group()["state"] == "active"


def test_a_data_shard_that_wants_to_join_a_group_is_no_shard_any_more() -> None:
    harness = ShardedHarness()
    harness.join(LINKS + 1, "w0", world=1)

    assert any("a data shard's, which joins no group" in log.text for log in harness.logs)
    assert harness.engine.control.roster.shards == {}
    assert harness.engine.control.groups == {}


@pytest.mark.parametrize("buckets_only", [False, True], ids=["all", "buckets"])
def test_members_of_a_halted_group_that_loses_a_shard_hear_the_error_that_halted_it(buckets_only: bool) -> None:
    harness = ShardedHarness(rates=(1.0, 1.0, 1.0))
    harness.assemble(2, plan_of(3))
    first = NonFiniteError("w1 contributed NaN")
    harness.receive(LINKS + 1, Reported(), encode_report(1, Halted("default", first, buckets_only)))

    harness.lose_shard(1)

    for rank in range(2):
        ((failure, _),) = harness.sent(rank)
        assert isinstance(failure, Failure)
        assert (failure.scope, str(failure.exception())) == (Scope.CONNECTION, str(first))
        harness.push_to(0, rank, collective(0), bytes(4), operation=all_reduce(1))
        assert str(harness.failure(rank, key=collective(0))) == str(first), "what the other shards say"
    assert harness.group()["broken"] == str(first)


@pytest.mark.parametrize(
    "record",
    [
        RoundRecord(0, (1.0,), 0.0, 0.0, 0, ((0.0, 0.0),)),
        RoundRecord(0, (1.0, 1.0), 0.0, 0.0, 0),
        RoundRecord(0, (1.0, 1.0), 0.0, 0.0, 0, ((0.0, 0.0),) * 2, cut=((2, 0, 1),)),
        RoundRecord(0, (1.0, 1.0), 0.0, 0.0, 0, ((0.0, 0.0),) * 2, (1, 2), (3,)),
    ],
    ids=["weights", "arrivals", "cut", "buckets"],
)
def test_a_report_cannot_speak_of_members_or_buckets_that_there_are_not(record: RoundRecord) -> None:
    harness = ShardedHarness()
    harness.assemble(2)
    harness.receive(LINKS + 1, Reported(), encode_report(1, RoundCompleted("default", record)))

    assert "tcp://10.0.0.2:7411 was lost" in harness.group()["broken"]


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────

ERROR = NonFiniteError("w1 contributed NaN", worker="w1", rank=1, bucket="b", parameter="p", round=3)
ORDERS: list[RemoteOrder] = [
    OpenGroup("g", 3, (Member(-1, "w0"), Member(-1, "ü")), 1 << 24, 60.0, (0.0, 2.5), 1, ("a" * 32, "b" * 32)),
    OpenGroup("g", 3, (Member(-1, "w0"),), 1 << 24, 60.0, (0.0, 2.5), 1, ("a" * 32,), True, True, 1 << 22),
    OpenGroup("g", 3, (Member(-1, "w0"),), 1, 60.0, (0.0, 2.5), 1, ("a" * 32,), nonfinite=OnNonFinite.PROPAGATE),
    OpenGroup("g", 3, (Member(-1, "w0"),), 1, 60.0, (0.0, 2.5), 1, ("a" * 32,), True, lateness=Lateness(backup=2)),
    OpenGroup("g", 3, (Member(-1, "w0"),), 1, 60.0, (0.0, 2.5), 1, ("a" * 32,), True, lateness=Lateness(0, 75.0)),
    CutRound("g", 7, (1, 3)),
    CutRound("g", 7, (1, 3), 2),
    SetPlan("g", plan_of(3, 0, 100), 7),
    Break("g", 1, WorkerLostError("it died", worker="w1", rank=1)),
    Configure("g", 1, 12, (0, 2), departed=(Departure(1, WorkerLeftError("it left", worker="w1", rank=1)),)),
    Configure("g", 7, 12, (0,), (), (Departure(1, WorkerLostError("it ended", worker="w1", rank=1), True),)),
    Configure("g", 2, 12, (0, 2), (Newcomer(1, Member(-1, "ü"), "a" * 32), Newcomer(3, Member(-1, "w3"), first=4))),
    Configure("g", 3, 13, (0, 1, 2), (Newcomer(3, Member(-1, "w3"), listens=0, transfer=2),)),
    Configure("g", 4, 14, (0, 1, 2), steady=True),
    CloseGroup("g"),
    Halt("g", ERROR, True),
]
REPORTS: list[RemoteReport] = [
    RoundCompleted("g", RoundRecord(3, (1.0, 0.5), 7.0, 10.0, 1, ((7.0, 8.5), (7.25, 9.0)), (1, 2**64 - 1), (0, 5, 6))),
    RoundCompleted("g", RoundRecord(3, (1.0, 0.5), 7.0, 10.0, 1, cut=((0, 2, 5), (1, 0, 1)))),
    RoundCompleted(
        "g",
        RoundRecord(3, (1.0, 0.5), 7.0, 10.0, 1),
        figures=Figures((OfMember(1, 2.5, -1.0, 9e70),), (OfBucket(0, 1e-30, 2.0),)),
    ),
    Applied("g", 12),
    Behind("g", 1, 4),
    Late("g", 4, (1, 1023), "after 2 s", True),
    Halted("g", ERROR, False),
    Planned("g", "ab" * 32),
    Absent("g", 1, ERROR),
    Absent("g", 1, ERROR, True),
]


def same(one: Any, other: Any) -> bool:
    """Return whether values are equal. Errors are equal if they say the same."""
    if isinstance(one, GradServerError):
        return (type(one), str(one), one.fields) == (type(other), str(other), other.fields)
    if hasattr(one, "__slots__") and type(one) is type(other):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__slots__)
    if isinstance(one, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_orders_arrive_as_they_were(order: RemoteOrder) -> None:
    assert same(decode_order(encode_order(order)), order)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_reports_arrive_as_they_were(report: RemoteReport) -> None:
    epoch, arrived = decode_report(encode_report(5, report), 10.0)
    assert epoch == 5
    assert same(arrived, report)


KNOWN = st.sampled_from([((0.0, 2.5), 1, 2), ((1.0, 0.0, 3.0), 2, 1)])
"""Rates of shards, the place of one, and the number of members."""


def opening(known: tuple[tuple[float, ...], int, int]) -> st.SearchStrategy[OpenGroup]:
    """Return orders to open a group with rates, shard, members and tokens that fit together."""
    rates, shard, members = known
    founders = st.lists(st.builds(Member, st.just(-1), st.text(max_size=9)), min_size=members, max_size=members).map(
        tuple
    )
    tokens = st.just(("t" * 32,) * members)
    return built(OpenGroup, rates=st.just(rates), shard=st.just(shard), founders=founders, tokens=tokens)


MADE_ORDERS = st.one_of(
    [KNOWN.flatmap(opening) if kind is OpenGroup else built(kind) for kind in order_family.kinds.values()]
)
MADE_REPORTS = st.one_of([built(kind) for kind in report_family.kinds.values()])


@given(MADE_ORDERS)
def test_every_order_arrives_as_it_was(order: RemoteOrder) -> None:
    assert same(decode_order(encode_order(order)), order)


@given(MADE_REPORTS, st.integers(0, MAX_COUNTER))
def test_every_report_arrives_as_it_was(report: RemoteReport, epoch: int) -> None:
    arrived = decode_report(encode_report(epoch, report), 10.0)
    assert arrived[0] == epoch
    assert same(arrived[1], report)


def understood(data: bytes) -> None:
    """Decode, as both sides do: it returns something, or raises a ProtocolError."""
    for decode in (decode_order, lambda data: decode_report(data, 0.0)):
        try:
            decode(data)
        except ProtocolError as error:
            assert 10 < len(str(error)) < 400  # noqa: PT017 - both outcomes are right


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_understood(data: bytes) -> None:
    understood(data)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**63 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
SAMPLES = [msgpack.unpackb(encode_order(order)) for order in ORDERS]
SAMPLES += [msgpack.unpackb(encode_report(1, report)) for report in REPORTS]


@given(st.sampled_from(SAMPLES), st.data())
def test_any_change_of_a_field_is_refused_or_understood(sample: list[Any], data: st.DataObject) -> None:
    changed = list(sample)
    changed[data.draw(st.integers(0, len(sample) - 1))] = data.draw(values)
    understood(msgpack.packb(changed))
    understood(encode_order(ORDERS[0])[: data.draw(st.integers(0, 90))])


@pytest.mark.parametrize(
    "fields",
    [
        ["open", "g", 1, [], 1, 1.0, [1.0, 1.0], 1, [], False],
        ["open", "g", 1, ["w0"], 1, 1.0, [1.0, 1.0], 1, [], False],
        ["open", "g", 1, ["w0"], 1, 1.0, [1.0, 1.0], 2, ["t"], False],
        ["open", "g", 1, ["w0"], 1, 1.0, [1.0, 1.0], 0, ["t"], False],
        ["open", "g", 1, ["w0"], 1, 1.0, [0.0, 0.0], 1, ["t"], False],
        ["open", "g", 1, ["w0"], 1, 1.0, [1.0] * (MAX_SHARDS + 1), 1, ["t"], False],
        ["open", "g" * (MAX_NAME_BYTES + 1), 1, ["w0"], 1, 1.0, [1.0, 1.0], 1, ["t"], False],
        ["plan", "g", b"garbage", 0],
        ["plan", "g", "text", 0],
        ["break", "g", MAX_WORLD_SIZE, ["E", "t", {}]],
        ["break", "g", 0, ["E", "t", []]],
        ["configure", "g", -1, 1, [0], [], [], False],
        ["configure", "g", 1, 1, [0], [[1, "w1", "", -2, -1, 0]], [], False],
        ["configure", "g", 1, 1, [0], [[1, "w1", "", -1, -1]], [], False],
        ["configure", "g", 1, 1, [0], [], [[1, ["E", "t", {}], 1]], False],
        ["open", "g", 1, ["w0"], 1, 1.0, [1.0, 1.0], 1, ["t"], 1],
        ["halt", "g", ["E", "t", {}], 1],
        ["close"],
        [],
        ["launch", "g"],
    ],
)
def test_orders_that_cannot_be_are_refused(fields: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_order(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([], "expected the name of one order, got list of length 0"),
        ([7, "g"], "expected the name of one order, got list of length 2"),
        (["launch", "g"], "there is no order 'launch'"),
        (["close"], "CloseGroup has 1 fields, got 0"),
        (["plan", "g", "text", 0], "SetPlan.plan: expected a plan, got str of length 4"),
        (
            ["break", "g", 2000, ["E", "t", {}]],
            "Break.member_id: expected an integer from 0 to 1023, got 2000",
        ),
        (["halt", "g", ["E", "t"], True], "Halt.error: expected an error, got list of length 2"),
        (
            ["configure", "g", 1, 1, [0, "2"], [], [], False],
            "Configure.members: expected an integer from 0 to 1023, got str of length 1",
        ),
        (
            ["configure", "g", 1, 1, [0], [[1, "w1"]], [], False],
            "Configure.newcomers: expected the 6 fields of a Newcomer, got list of length 2",
        ),
    ],
)
def test_a_refusal_names_the_order_and_the_field(fields: list[Any], text: str) -> None:
    with pytest.raises(MalformedMessageError) as refused:
        decode_order(msgpack.packb(fields))
    assert refused.value.message == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (["launched", 1, "g"], "there is no report 'launched'"),
        (["applied"], "Applied without an epoch"),
        (["behind", 1, "g", 4, -1], f"Behind.round: expected an integer from 0 to {MAX_COUNTER}, got -1"),
        (["round", 1, "g", None, True, False, [[], []]], "RoundCompleted.record: expected a round, got None"),
        (["late", 1, "g", 4, [1], "why", 1], "Late.tell: expected true or false, got 1"),
    ],
)
def test_a_refusal_names_the_report_and_the_field(fields: list[Any], text: str) -> None:
    with pytest.raises(MalformedMessageError) as refused:
        decode_report(msgpack.packb(fields), 0.0)
    assert refused.value.message == text


def test_reports_have_a_limit() -> None:
    with pytest.raises(MalformedMessageError, match="the limit is 2097152"):
        decode_report(bytes(MAX_REPORT_BYTES + 1), 0.0)


def test_the_tick_of_an_idle_shard_is_nothing() -> None:
    shard = ShardEngine("tcp://10.0.0.1:7411", url_of(1), LINK)
    assert shard.handle(Tick(), 0.0) == []
    assert shard.next_deadline() is None
    (send, close, _) = shard.handle(Received(5, Push(bucket(0), 0), (b"1234",)), 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, Failure)
    assert isinstance(send.message.exception(), UnexpectedMessageError)
    assert close == Close(5)
