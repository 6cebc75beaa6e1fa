"""Exchanges: each row of the data half's table, by events alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from gradserver.engine.commands import Reduce, Send
from gradserver.engine.events import NonFinite, Reduced
from gradserver.protocol.dtypes import BY_NAME, FLOAT32, UINT8
from gradserver.protocol.errors import (
    CollectiveMismatchError,
    DeadlineError,
    InvalidArgumentError,
    InvalidRankError,
    LimitExceededError,
    NonFiniteError,
    OutOfStepError,
    SizeMismatchError,
    UnexpectedMessageError,
    UnsupportedOperationError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import CREDIT_BYTES, MAX_TRANSFERS, MIB, MIN_CREDIT_BYTES, SLICE_BYTES
from gradserver.protocol.messages import Failure, Inquire, Missing, Result, Scope
from gradserver.protocol.plan import Bucket, Component, Plan
from tests.engine_harness import (
    SEATS,
    TIMEOUT,
    Array,
    Harness,
    all_reduce,
    bucket,
    collective,
    floats,
    plan_of,
    small_slices,
    transfer,
)
from tests.memory import Measured, memory_of

BARRIER = Operation(Kind.BARRIER, Op.NONE, UINT8, 0)


def operation(kind: Kind, numel: int, root: int = -1) -> Operation:
    return Operation(kind, Op.NONE, FLOAT32, numel, root)


def group_of(world: int, *sizes: int, lazy: bool = False, credit: int = CREDIT_BYTES) -> Harness:
    """Make a complete group that agreed on buckets of these sizes."""
    harness = Harness(lazy=lazy, credit=credit)
    harness.assemble(world, plan_of(*sizes) if sizes else None)
    return harness


@pytest.fixture
def four_byte_slices() -> Iterator[None]:
    """Make every element of float32 a slice of its own."""
    with small_slices(4):
        yield


# ── buckets ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_mean_of_a_bucket_goes_to_all_when_the_last_has_come() -> None:
    harness = group_of(3, 2)

    harness.push(2, bucket(0), floats(6, 0))
    harness.push(0, bucket(0), floats(1, 2))
    assert harness.silent(0, 1, 2)
    harness.push(1, bucket(0), floats(2, 4))

    for rank in range(3):
        assert list(harness.array(rank)) == [3, 2]
    assert harness.open_exchanges() == 0


def test_weights_count_and_weight_zero_does_not() -> None:
    harness = group_of(3, 1)

    harness.push(0, bucket(0), floats(1), weight=1.0)
    harness.push(1, bucket(0), floats(5), weight=3.0)
    harness.push(2, bucket(0), floats(math.nan), weight=0.0)

    ((result, (payload,)),) = harness.results(2).values()
    assert result == Result(bucket(0), 0, 4.0, True, over=True)
    assert list(np.frombuffer(payload, np.float32)) == [4]


def test_an_absent_contribution_is_zeros_and_counts() -> None:
    harness = group_of(2, 2)

    harness.push(0, bucket(0), None)
    harness.push(1, bucket(0), floats(2, 4))

    assert list(harness.array(0)) == [1, 2]


@pytest.mark.parametrize(("weight", "total"), [(1.0, 2.0), (0.0, 0.0)])
def test_without_contributions_the_result_is_empty_and_needs_no_reduction(weight: float, total: float) -> None:
    harness = group_of(2, 2, lazy=True)
    for rank in range(2):
        harness.push(rank, bucket(0), None, weight=weight)

    assert harness.reduces == []
    for rank in range(2):
        assert harness.results(rank) == {(bucket(0), 0): (Result(bucket(0), 0, total, False, over=True), ())}


def test_contributions_are_reduced_in_rank_order_whatever_order_they_came_in() -> None:
    harness = group_of(4, 1, lazy=True)
    for rank in (3, 1, 0, 2):
        harness.push(rank, bucket(0), floats(rank), weight=rank + 0.5)

    (reduce,) = harness.reduces
    assert [(c.member_id, c.weight) for c in reduce.contributions] == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]
    assert [np.frombuffer(c.payload or b"", np.float32)[0] for c in reduce.contributions] == [0, 1, 2, 3]
    assert reduce.operation == all_reduce(1)


@pytest.mark.usefixtures("four_byte_slices")
def test_slices_are_answered_one_by_one_and_the_weight_of_the_first_holds() -> None:
    harness = group_of(2, 3)
    for index in range(3):
        harness.push(0, bucket(0), floats(index), index=index, weight=[1.0, 7.0, 7.0][index])
    assert harness.open_exchanges() == 1

    for index in range(3):
        harness.push(1, bucket(0), floats(10), index=index, weight=3.0)
        ((result, _),) = harness.results(0).values()
        assert (result.slice, result.weight) == (index, 4.0)
        assert harness.array(1)[0] == (index + 30) / 4
    assert harness.open_exchanges() == 0


def test_several_buckets_and_collectives_may_be_open_in_any_order() -> None:
    harness = group_of(2, 1, 1, 1)
    harness.push(0, bucket(0, 2), floats(1))
    harness.push(0, collective(0), floats(2), operation=all_reduce(1))
    harness.push(0, bucket(0, 0), floats(3))
    harness.push(1, bucket(0, 0), floats(5))
    harness.push(1, bucket(0, 1), floats(0))
    harness.push(1, collective(0), floats(4), operation=all_reduce(1))

    assert [key for key, _ in harness.results(0)] == [bucket(0, 0), collective(0)]
    assert harness.open_exchanges() == 2


def test_all_get_the_first_contribution_that_counts() -> None:
    harness = Harness(lazy=True)
    harness.assemble(3, Plan((Bucket("stats", BY_NAME["int64"], (Component("n", (1,)),), Op.FIRST),)))
    for rank in (2, 1, 0):
        harness.push(rank, bucket(0), bytes([rank]) * 8, weight=float(rank))

    (reduce,) = harness.reduces
    assert [(c.member_id, c.payload) for c in reduce.contributions] == [(1, b"\1" * 8)]


def test_the_first_is_the_first_that_gives_data_and_without_any_none_gets_any() -> None:
    harness = Harness()
    harness.assemble(3, Plan((Bucket("stats", BY_NAME["int64"], (Component("n", (1,)),), Op.FIRST),)))
    for rank, data in enumerate((None, bytes([1]) * 8, bytes([2]) * 8)):
        harness.push(rank, bucket(0), data, weight=1.0)
    for rank in range(3):
        ((result, payloads),) = harness.results(rank).values()
        assert (result.present, result.weight, [bytes(payload) for payload in payloads]) == (True, 3.0, [b"\1" * 8])
    for rank in range(3):
        harness.push(rank, bucket(1), None, weight=1.0)
    for rank in range(3):
        ((result, payloads),) = harness.results(rank).values()
        assert (result.present, result.weight, payloads) == (False, 3.0, ())


def test_a_round_is_complete_when_all_of_its_buckets_are_and_empty_ones_do_not_count() -> None:
    harness = group_of(2, 1, 0, 1)
    for part in (2, 0):
        assert harness.group()["round"] == 0
        for rank in range(2):
            harness.push(rank, bucket(0, part), floats(1), weight=2.0)

    harness.inbox.clear()
    assert harness.group()["round"] == 1
    assert harness.group()["last_round"]["weights"] == (2.0, 2.0)
    assert harness.group()["last_round"]["last"] == 1
    harness.push(0, bucket(0, 1), None)
    assert "empty tensors are not exchanged" in str(harness.refusal(SEATS))


def test_the_ledger_forgets_old_rounds() -> None:
    harness = group_of(1, 1)
    for number in range(300):
        harness.push(0, bucket(number), floats(1))

    ledger = harness.engine.control.groups["default"].rounds.ledger
    assert (len(ledger), ledger[0].round, ledger[-1].round) == (256, 44, 299)


# ── other operations ──────────────────────────────────────────────────────────────────────────────────


def test_a_broadcast_passes_the_roots_bytes_to_all_others() -> None:
    harness = group_of(3)
    broadcast = operation(Kind.BROADCAST, 2, root=1)
    payload = floats(1, math.nan).tobytes()
    harness.push(2, collective(0), None, operation=broadcast)
    harness.push(1, collective(0), payload, operation=broadcast)
    harness.push(0, collective(0), None, operation=broadcast)

    for rank in (0, 2):
        ((result, (buffer,)),) = harness.results(rank).values()
        assert result.present
        assert buffer is payload, "not a copy"
    assert harness.results(1) == {(collective(0), 0): (Result(collective(0), 0, 3.0, False), ())}


def test_the_giver_of_bytes_that_pass_through_is_answered_last() -> None:
    harness = group_of(3)
    broadcast = operation(Kind.BROADCAST, 1, root=0)
    harness.push(0, collective(0), floats(1), operation=broadcast)
    harness.push(1, collective(0), None, operation=broadcast)
    commands = harness.push(2, collective(0), None, operation=broadcast)

    assert [c.connection - SEATS for c in commands if isinstance(c, Send)] == [1, 2, 0]


def test_an_all_gather_asks_for_all_contributions_in_rank_order_whatever_their_weights() -> None:
    harness = group_of(3, lazy=True)
    gather = operation(Kind.ALL_GATHER, 1)
    for rank in (1, 2, 0):
        harness.push(rank, collective(0), floats(rank), operation=gather, weight=float(rank))

    (reduce,) = harness.reduces
    assert [c.member_id for c in reduce.contributions] == [0, 1, 2]
    harness.answer(reduce, b"".join(c.payload or b"" for c in reduce.contributions))
    for rank in range(3):
        assert list(harness.array(rank)) == [0, 1, 2]


@pytest.mark.usefixtures("four_byte_slices")
def test_a_reduce_scatter_gives_each_slice_to_the_rank_that_it_belongs_to() -> None:
    harness = group_of(2)
    scatter = Operation(Kind.REDUCE_SCATTER, Op.SUM, FLOAT32, 4)
    for index in range(4):
        for rank in range(2):
            harness.push(rank, collective(0), floats(10 * rank + index), index=index, operation=scatter)

    for rank in range(2):
        got = {index: payloads for (_, index), (result, payloads) in harness.results(rank).items() if result.present}
        assert {i: np.frombuffer(p[0], np.float32)[0] for i, p in got.items()} == {
            2 * rank: 10 + 4 * rank,
            2 * rank + 1: 12 + 4 * rank,
        }


def test_a_barrier_lets_all_go_when_all_are_there() -> None:
    harness = group_of(3)
    for rank in (1, 0):
        harness.push(rank, collective(0), operation=BARRIER)
        assert harness.silent(0, 1, 2)
    harness.push(2, collective(0), operation=BARRIER)

    for rank in range(3):
        assert harness.results(rank) == {(collective(0), 0): (Result(collective(0), 0, 3.0, False), ())}


def test_a_transfer_goes_from_one_to_the_other_and_concerns_no_third() -> None:
    harness = group_of(4)
    send = operation(Kind.TRANSFER, 2)
    harness.push(1, transfer(0, 3, 1), None, operation=send)
    harness.push(3, transfer(0, 3, 1), floats(7, 8), operation=send)

    assert list(harness.array(1)) == [7, 8]
    assert harness.results(3) == {(transfer(0, 3, 1), 0): (Result(transfer(0, 3, 1), 0, 2.0, False), ())}
    assert harness.silent(0, 2)


def test_transfers_are_matched_by_source_target_and_tag() -> None:
    harness = group_of(2)
    send = operation(Kind.TRANSFER, 1)
    for key in (transfer(0, 0, 1, tag=5), transfer(0, 0, 1), transfer(1, 0, 1)):
        harness.push(0, key, floats(key.part + key.number), operation=send)
    harness.push(0, transfer(0, 1, 0), None, operation=send)
    for key in (transfer(0, 0, 1), transfer(0, 0, 1, tag=5), transfer(1, 0, 1)):
        harness.push(1, key, None, operation=send)
        assert harness.array(1)[0] == key.part + key.number
    assert harness.open_exchanges() == 1


def test_members_that_are_left_can_still_send_to_each_other() -> None:
    harness = group_of(3)
    harness.leave(2)
    send = operation(Kind.TRANSFER, 1)
    harness.push(0, transfer(0, 0, 1), floats(1), operation=send)
    harness.push(1, transfer(0, 0, 1), None, operation=send)
    harness.push(0, transfer(0, 0, 2), floats(1), operation=send)

    assert harness.array(1)[0] == 1
    harness.inbox[SEATS].pop(0)
    assert isinstance(harness.failure(0, key=transfer(0, 0, 2)), WorkerLeftError)


# ── mismatches ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (all_reduce(3), all_reduce(4)),
        (all_reduce(3), all_reduce(3, Op.SUM)),
        (all_reduce(3), BARRIER),
        (operation(Kind.BROADCAST, 3, 0), operation(Kind.BROADCAST, 3, 1)),
        (all_reduce(3), Operation(Kind.ALL_REDUCE, Op.MEAN, BY_NAME["float64"], 3)),
    ],
    ids=str,
)
def test_different_collectives_fail_with_both_sides_and_the_group_goes_on(one: Operation, other: Operation) -> None:
    harness = group_of(3)
    harness.push(1, collective(0), floats(1, 2, 3) if one.kind is Kind.ALL_REDUCE else None, operation=one)
    harness.push(2, collective(0), bytes(8), operation=other)

    says = (
        f"collective 0 of round 0 is not the same everywhere: 'w1' (rank 1) called {one}, 'w2' (rank 2) called {other}"
    )
    for rank in (1, 2):
        error = harness.failure(rank, key=collective(0))
        assert isinstance(error, CollectiveMismatchError)
        assert str(error) == says
    harness.push(0, collective(0), bytes(8), operation=other)
    assert str(harness.failure(0, key=collective(0))) == says, "a member that comes later hears of it too"
    assert harness.open_exchanges() == 0

    for rank in range(3):
        harness.push(rank, collective(1), floats(rank), operation=all_reduce(1))
    assert harness.array(0)[0] == 1
    assert harness.group()["state"] == "active"


@pytest.mark.usefixtures("four_byte_slices")
def test_the_tail_of_a_failed_collective_is_dropped() -> None:
    harness = group_of(2)
    harness.push(0, collective(0), floats(1), operation=all_reduce(3))
    harness.push(1, collective(0), None, operation=BARRIER)
    for rank in range(2):
        assert isinstance(harness.failure(rank, key=collective(0)), CollectiveMismatchError)

    harness.push(0, collective(0), floats(1), index=1)
    harness.push(0, collective(0), floats(1), index=2)

    assert harness.silent(0, 1)
    assert harness.group()["outstanding"] == [0, 0]
    assert harness.group()["state"] == "active"


@pytest.mark.usefixtures("four_byte_slices")
def test_the_tail_is_also_dropped_while_others_have_yet_to_hear_of_the_failure() -> None:
    harness = group_of(3)
    harness.push(0, collective(0), floats(1), operation=all_reduce(3))
    harness.push(1, collective(0), None, operation=BARRIER)
    harness.push(0, collective(0), floats(1), index=1)

    assert harness.open_exchanges() == 1
    assert harness.group()["outstanding"] == [0, 0, 0]


# ── violations: each costs its sender the connection ──────────────────────────────────────────────────

Violation = tuple[ExchangeKey, Array | None, int, Operation | None]
X = floats(1)

VIOLATIONS: dict[str, tuple[Violation, type[Exception], str]] = {
    "a round that is not due": ((bucket(1), X, 0, None), OutOfStepError, "round 0 is due, 1 came"),
    "a collective too early": ((collective(1), X, 0, all_reduce(1)), OutOfStepError, "number 0 is due, 1 came"),
    "a bucket of no plan": ((bucket(0, 9), X, 0, None), OutOfStepError, "bucket 9 is in no plan"),
    "a later slice first": ((bucket(0), X, 1, None), UnexpectedMessageError, "did not begin with its first slice"),
    "no operation": ((collective(0), X, 0, None), UnexpectedMessageError, "must say which one"),
    "too long": ((bucket(0), floats(1, 2), 0, None), SizeMismatchError, "has 8 bytes, 4 were agreed"),
    "too short": ((collective(0), X, 0, all_reduce(2)), SizeMismatchError, "has 4 bytes, 8 were agreed"),
    "nothing to gather": (
        (collective(0), None, 0, operation(Kind.ALL_GATHER, 1)),
        SizeMismatchError,
        "has 0 bytes, 4 were agreed",
    ),
    "nothing to broadcast": (
        (collective(0), None, 0, operation(Kind.BROADCAST, 1, 1)),
        SizeMismatchError,
        "has 0 bytes, 4 were agreed",
    ),
    "a broadcast of somebody else's": (
        (collective(0), X, 0, operation(Kind.BROADCAST, 1, 0)),
        SizeMismatchError,
        "has 4 bytes, 0 were agreed",
    ),
    "a barrier with bytes": ((collective(0), X, 0, BARRIER), SizeMismatchError, "has 4 bytes, 0 were agreed"),
    "an empty tensor": ((collective(0), None, 0, all_reduce(0)), UnexpectedMessageError, "empty tensors"),
    "no way to reduce": ((collective(0), X, 0, all_reduce(1, Op.NONE)), InvalidArgumentError, "how to reduce"),
    "the mean of integers": (
        (collective(0), X, 0, Operation(Kind.ALL_REDUCE, Op.MEAN, UINT8, 4)),
        UnsupportedOperationError,
        "the mean of uint8",
    ),
    "an uneven reduce_scatter": (
        (collective(0), X, 0, Operation(Kind.REDUCE_SCATTER, Op.SUM, FLOAT32, 4)),
        InvalidArgumentError,
        "divisible",
    ),
    "a root that is not there": (
        (collective(0), X, 0, operation(Kind.BROADCAST, 1, 3)),
        InvalidRankError,
        "root 3 is not in a group of 3",
    ),
    "a transfer among others": ((transfer(0, 0, 2), X, 0, operation(Kind.TRANSFER, 1)), InvalidRankError, "rank 1"),
    "a transfer to oneself": ((transfer(0, 1, 1), X, 0, operation(Kind.TRANSFER, 1)), InvalidRankError, "from 1 to 1"),
    "a transfer to nobody": ((transfer(0, 1, 5), X, 0, operation(Kind.TRANSFER, 1)), InvalidRankError, "group of 3"),
    "a transfer as a collective": (
        (collective(0), X, 0, operation(Kind.TRANSFER, 1)),
        UnexpectedMessageError,
        "cannot be exchanged under the key",
    ),
    "a collective as a transfer": ((transfer(0, 1, 0), X, 0, all_reduce(1)), UnexpectedMessageError, "under the key"),
    "a bucket with a source": (
        (ExchangeKey(Stream.BUCKET, 0, 0, 2, -1), X, 0, None),
        UnexpectedMessageError,
        "no exchange has the key",
    ),
    "a collective with a target": (
        (ExchangeKey(Stream.COLLECTIVE, 0, 0, -1, 2), X, 0, all_reduce(1)),
        UnexpectedMessageError,
        "no exchange has the key",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_costs_its_senders_connection_and_the_others_hear_the_name(name: str) -> None:
    (key, payload, index, what), kind, says = VIOLATIONS[name]
    harness = group_of(3, 1)
    harness.push(1, key, payload, index=index, operation=what)

    error = harness.refusal(SEATS + 1)
    assert type(error) is kind
    assert says in str(error)
    assert harness.silent(0, 2)
    for rank in (0, 2):
        harness.push(rank, bucket(0), floats(1))
        told = harness.failure(rank, key=bucket(0))
        assert isinstance(told, WorkerLostError)
        assert (told.worker, told.rank) == ("w1", 1)


def test_a_push_of_the_next_round_to_a_broken_group_is_answered_with_the_loss() -> None:
    harness = group_of(3, 1, 1)
    for rank in range(3):
        harness.push(rank, bucket(0, 0), floats(1))
    harness.lose(1)
    harness.push(2, bucket(0, 1), floats(1))
    harness.sent(2)

    harness.push(2, bucket(1), floats(1))

    assert isinstance(harness.failure(2, key=bucket(1)), WorkerLostError)


def test_a_second_contribution_to_the_same_slice_is_refused_and_the_first_does_not_count_twice() -> None:
    harness = group_of(2, 1)
    harness.push(0, bucket(0), floats(1))
    harness.push(0, bucket(0), floats(1))

    assert "round 1 is due, 0 came" in str(harness.refusal(SEATS))
    harness.push(1, bucket(0), floats(4))
    assert harness.array(1)[0] == 2.5, "what was complete before counts once"


@pytest.mark.usefixtures("four_byte_slices")
def test_slices_out_of_order_are_refused() -> None:
    for wrong in (0, 2, 3, 99):
        harness = group_of(2, 3)
        harness.push(0, bucket(0), floats(1))
        harness.push(0, bucket(0), floats(1), index=wrong)

        error = harness.refusal(SEATS)
        assert isinstance(error, OutOfStepError)
        assert ("slice" in str(error)) == (wrong > 0)


@pytest.mark.usefixtures("four_byte_slices")
def test_a_slice_behind_the_last_is_refused() -> None:
    harness = group_of(2, 2)
    for index in range(3):
        harness.push(0, bucket(0), floats(1), index=index)

    assert "slice 2 came, 2 of 2 is due" in str(harness.refusal(SEATS))


@pytest.mark.usefixtures("four_byte_slices")
def test_a_transfer_of_others_cannot_be_joined_in_the_middle() -> None:
    harness = group_of(3)
    harness.push(0, transfer(0, 0, 1), floats(1), operation=operation(Kind.TRANSFER, 2))
    harness.push(2, transfer(0, 0, 1), floats(1), index=1)

    assert isinstance(harness.refusal(SEATS + 2), OutOfStepError)
    assert harness.silent(0, 1)


@pytest.mark.parametrize("payload", [b"", None])
def test_a_member_with_nothing_to_give_cannot_slip_in_bytes(payload: bytes | None) -> None:
    harness = group_of(3)
    broadcast = operation(Kind.BROADCAST, 1, root=1)
    harness.push(0, collective(0), payload, operation=broadcast)
    harness.push(1, collective(0), floats(7), operation=broadcast)
    harness.push(2, collective(0), None, operation=broadcast)

    if payload is None:
        assert harness.array(2)[0] == 7
    else:
        assert isinstance(harness.refusal(SEATS), SizeMismatchError)
        assert isinstance(harness.failure(2, key=collective(0)), WorkerLostError)


def test_more_than_the_credit_and_one_slice_is_refused() -> None:
    harness = group_of(2, *[SLICE_BYTES // 4] * 4, credit=MIN_CREDIT_BYTES)
    slice_of_zeros = bytes(SLICE_BYTES)
    for part in range(3):
        harness.push(0, bucket(0, part), slice_of_zeros)
    assert harness.closed == []
    harness.push(0, bucket(0, 3), slice_of_zeros)

    error = harness.refusal(SEATS)
    assert isinstance(error, LimitExceededError)
    assert f"has {4 * SLICE_BYTES} bytes in flight, its credit is {MIN_CREDIT_BYTES}" in str(error)


def test_credit_comes_back_with_the_result() -> None:
    harness = group_of(2, SLICE_BYTES // 4, credit=MIN_CREDIT_BYTES)
    slice_of_zeros = bytes(SLICE_BYTES)
    for number in range(5):
        for rank in range(2):
            harness.push(rank, bucket(number), slice_of_zeros)
    assert harness.closed == []
    assert harness.group()["outstanding"] == [0, 0]


def test_buckets_collectives_sends_and_receives_draw_on_credits_of_their_own() -> None:
    size = SLICE_BYTES // 4
    harness = group_of(2, *[size] * 3, credit=MIN_CREDIT_BYTES)
    zeros = bytes(SLICE_BYTES)
    for number in range(3):
        harness.push(0, bucket(0, number), zeros)
        harness.push(0, collective(number), zeros, operation=all_reduce(size))
        harness.push(0, transfer(number, 0, 1), zeros, operation=operation(Kind.TRANSFER, size))
        harness.push(0, transfer(number, 1, 0), None, operation=operation(Kind.TRANSFER, size))

    assert harness.closed == []
    assert harness.group()["outstanding"] == [12 * SLICE_BYTES, 0]


def test_an_absent_payload_costs_credit_as_its_result_does() -> None:
    harness = group_of(2, *[SLICE_BYTES // 4] * 4, credit=MIN_CREDIT_BYTES)
    for part in range(4):
        harness.push(0, bucket(0, part), None)

    assert isinstance(harness.refusal(SEATS), LimitExceededError)


# ── a member goes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lost", [False, True])
def test_what_needs_a_member_that_goes_fails_and_what_it_completed_counts(lost: bool) -> None:
    harness = group_of(3, 1, 1)
    harness.push(2, bucket(0, 0), floats(9))
    harness.push(0, bucket(0, 0), floats(0))
    harness.push(0, bucket(0, 1), floats(0))
    harness.lose(2) if lost else harness.leave(2)

    error = harness.failure(0, key=bucket(0, 1))
    assert isinstance(error, WorkerLostError if lost else WorkerLeftError)
    assert (error.worker, error.rank) == ("w2", 2)
    assert harness.silent(1), "a member that has not contributed is told when it does"

    harness.push(1, bucket(0, 1), floats(0))
    assert str(harness.failure(1, key=bucket(0, 1))) == str(error)
    harness.push(1, bucket(0, 0), floats(0))
    assert harness.array(0)[0] == harness.array(1)[0] == 3
    assert harness.silent(2)
    assert harness.open_exchanges() == 0


@pytest.mark.usefixtures("four_byte_slices")
def test_a_contribution_of_some_slices_is_not_a_contribution() -> None:
    harness = group_of(2, 2)
    harness.push(0, bucket(0), floats(1))
    harness.push(1, bucket(0), floats(1))
    harness.sent(1)
    harness.lose(0)

    assert isinstance(harness.failure(1, key=bucket(0)), WorkerLostError)


def test_a_result_under_reduction_at_a_departure_still_reaches_the_others() -> None:
    harness = group_of(3, 1, lazy=True)
    for rank in range(3):
        harness.push(rank, bucket(0), floats(rank))
    harness.lose(0)
    harness.answer(harness.reduces[0])

    assert harness.array(1)[0] == harness.array(2)[0] == 1
    assert harness.silent(0)
    assert harness.group()["round"] == 1


def test_later_exchanges_fail_at_once_with_the_first_reason_and_leave_nothing_behind() -> None:
    harness = group_of(3, 1)
    harness.leave(2)
    for number in range(20):
        harness.push(0, collective(number), floats(1), operation=all_reduce(1))
        assert isinstance(harness.failure(0, key=collective(number)), WorkerLeftError)
    harness.push(1, bucket(0), floats(1))
    assert isinstance(harness.failure(1, key=bucket(0)), WorkerLeftError)

    assert harness.open_exchanges() == 0
    assert harness.engine.data.groups["default"].rounds == {}
    assert harness.engine.next_deadline() is None


@pytest.mark.usefixtures("four_byte_slices")
def test_the_tail_of_what_failed_at_once_is_dropped() -> None:
    harness = group_of(2, 3)
    harness.leave(1)
    harness.push(0, bucket(0), floats(1))
    harness.push(0, bucket(0), floats(1), index=1)

    assert isinstance(harness.failure(0, key=bucket(0)), WorkerLeftError)
    assert harness.closed == []


# ── non-finite ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_halts_the_group_and_names_worker_bucket_and_parameter(bad: float) -> None:
    harness = Harness()
    parameters = (Component("w_q", (2, 2)), Component("norm", (2,)))
    harness.assemble(3, Plan((Bucket("block.0", FLOAT32, parameters), Bucket("head", FLOAT32, parameters))))
    for rank in range(3):
        harness.push(rank, bucket(0, 1), np.zeros(6, np.float32))
    harness.inbox.clear()
    harness.push(0, collective(0), floats(1), operation=all_reduce(1))
    for rank in range(3):
        values = np.zeros(6, np.float32)
        values[4] = bad if rank == 1 else 0
        harness.push(rank, bucket(0, 0), values)

    for rank in range(3):
        messages = [message for message, _ in harness.sent(rank)]
        failures = [message for message in messages if isinstance(message, Failure)]
        assert failures == messages, "nothing is handed out"
        assert [message.key for message in failures] == [collective(0), bucket(0, 0)][rank > 0 :]
        error = failures[-1].exception()
        assert isinstance(error, NonFiniteError)
        assert error.fields == {"worker": "w1", "rank": 1, "bucket": "block.0", "parameter": "norm", "round": 0}
        assert f"'w1' (rank 1) contributed {bad} in parameter 'norm' of bucket 'block.0' of round 0" in str(error)


def test_after_a_non_finite_gradient_nothing_is_handed_out_any_more() -> None:
    harness = group_of(2, 1, 1, lazy=True)
    for part in range(2):
        for rank in range(2):
            harness.push(rank, bucket(0, part), floats(1))
    one, other = harness.reduces
    harness.answer(one, NonFinite(0, 0, "NaN"))
    harness.answer(other)
    for rank in range(2):
        harness.push(rank, collective(0), floats(1), operation=all_reduce(1))
        harness.push(rank, collective(1), None, operation=BARRIER)
        harness.push(rank, bucket(1, 0), floats(1))

    for rank in range(2):
        messages = [message for message, _ in harness.sent(rank)]
        assert len(messages) == 5
        assert all(isinstance(m, Failure) and m.error == "NonFiniteError" for m in messages)
    assert harness.group()["state"] == "broken"
    assert harness.group()["round"] == 0
    assert harness.open_exchanges() == 0


def test_an_overflow_that_is_nobodys_says_so() -> None:
    harness = group_of(2, 1, lazy=True)
    for rank in range(2):
        harness.push(rank, bucket(0), floats(3e38))
    harness.answer(harness.reduces[0], NonFinite(-1, 0, "Inf"))

    error = harness.failure(0, key=bucket(0))
    assert isinstance(error, NonFiniteError)
    assert (error.worker, error.rank) == ("", -1)
    assert "the mean overflowed, though every contribution was finite: Inf in parameter 'b0'" in str(error)


@pytest.mark.usefixtures("four_byte_slices")
def test_the_element_is_counted_over_the_whole_bucket_not_the_slice() -> None:
    harness = Harness()
    harness.assemble(1, Plan((Bucket("b", FLOAT32, (Component("first", (2,)), Component("second", (1,)))),)))
    for index, value in enumerate((0, 0, math.nan)):
        harness.push(0, bucket(0), floats(value), index=index)

    harness.inbox[SEATS] = harness.inbox[SEATS][2:]
    error = harness.failure(0, key=bucket(0))
    assert isinstance(error, NonFiniteError)
    assert error.parameter == "second"


# ── late and stray reductions ─────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("four_byte_slices")
def test_reductions_may_come_back_in_any_order() -> None:
    harness = group_of(2, 3, lazy=True)
    for index in range(3):
        for rank in range(2):
            harness.push(rank, bucket(0), floats(index), index=index)
    for reduce in reversed(harness.reduces):
        assert harness.group()["round"] == 0
        harness.answer(reduce)

    got = harness.results(0)
    assert [index for _, index in got] == [2, 1, 0]
    assert all(np.frombuffer(p[0], np.float32)[0] == index for (_, index), (_, p) in got.items())
    assert harness.group()["round"] == 1


def test_a_reduction_of_what_has_failed_meanwhile_is_dropped() -> None:
    harness = group_of(2, 1, 1, lazy=True)
    for part in range(2):
        for rank in range(2):
            harness.push(rank, bucket(0, part), floats(1))
    harness.wait(TIMEOUT)
    for rank in range(2):
        assert [type(message) for message, _ in harness.sent(rank)] == [Failure, Failure]

    for reduce in harness.reduces:
        assert harness.answer(reduce) == []
    assert harness.group()["round"] == 0


def test_a_reduction_that_comes_back_twice_counts_once() -> None:
    harness = group_of(2, 2, 1, lazy=True)
    with small_slices(4):
        for index in range(2):
            for rank in range(2):
                harness.push(rank, bucket(0), floats(1), index=index)
        harness.answer(harness.reduces[0])
        assert harness.answer(harness.reduces[0]) == []
        assert harness.open_exchanges() == 1
        harness.answer(harness.reduces[1])
        assert harness.answer(harness.reduces[1]) == []

    assert sorted(index for _, index in harness.results(0)) == [0, 1]
    assert harness.group()["round"] == 0


def test_a_reduction_for_a_group_that_formed_again_or_is_gone_is_dropped() -> None:
    harness = group_of(2, 1, lazy=True)
    for rank in range(2):
        harness.push(rank, bucket(0), floats(1))
    (old,) = harness.reduces
    harness.lose(0)
    harness.lose(1)
    assert harness.answer(old) == []

    harness.assemble(2, plan_of(1))
    for rank in range(2):
        harness.push(rank, bucket(0), floats(5))
    assert harness.answer(old) == []
    harness.answer(harness.reduces[1])

    assert harness.array(0)[0] == 5


def test_an_unasked_reduction_is_dropped() -> None:
    harness = group_of(2, 1)
    harness.push(0, bucket(0), floats(1))

    for stray in (
        Reduced("nobody", 1, bucket(0), 0, b"1234"),
        Reduced("default", 1, bucket(7), 0, b"1234"),
        Reduced("default", 1, bucket(0), 0, b"1234"),
        Reduced("default", 1, bucket(0), 0, NonFinite(0, 0, "NaN")),
    ):
        assert harness.feed(stray) == []
    harness.push(1, bucket(0), floats(3))
    assert harness.array(0)[0] == 2


# ── deadlines ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_that_waits_too_long_names_missing_members_bucket_and_round() -> None:
    harness = group_of(4, 1, 1)
    harness.push(2, bucket(0, 1), floats(1))
    harness.now += 1
    harness.push(0, bucket(0, 1), floats(1))
    assert harness.engine.next_deadline() == TIMEOUT, "checked when the first could be due"
    harness.wait(TIMEOUT - 1)
    assert harness.silent(0, 2), "the last contribution came a second later"
    assert harness.engine.next_deadline() == TIMEOUT + 1
    harness.wait(1)

    for rank in (0, 2):
        error = harness.failure(rank, key=bucket(0, 1))
        assert isinstance(error, DeadlineError)
        assert error.fields == {"missing": ("'w1' (rank 1)", "'w3' (rank 3)"), "bucket": "b1", "round": 0}
        assert "bucket 'b1' of round 0 waited 10 s (--round-timeout) for 'w1' (rank 1), 'w3' (rank 3)" in str(error)
        assert "'w0' (rank 0), 'w2' (rank 2) had come" in str(error)
    assert harness.engine.next_deadline() is None
    assert harness.group()["state"] == "broken"
    harness.push(1, bucket(0, 1), floats(1))
    assert isinstance(harness.failure(1, key=bucket(0, 1)), DeadlineError)
    harness.push(1, bucket(0, 0), floats(1))
    assert isinstance(harness.failure(1, key=bucket(0, 0)), DeadlineError)


def test_a_collective_that_waits_too_long_fails_alone() -> None:
    harness = group_of(3, 1)
    harness.push(0, collective(0), floats(1), operation=all_reduce(1))
    harness.wait(TIMEOUT)

    error = harness.failure(0, key=collective(0))
    assert isinstance(error, DeadlineError)
    assert (error.missing, error.bucket, error.round) == (("'w1' (rank 1)", "'w2' (rank 2)"), "", -1)
    assert "collective 0 of round 0, all_reduce(mean) of float32[1], waited 10 s (--round-timeout) for" in str(error)
    for rank in (1, 2):
        harness.push(rank, collective(0), floats(1), operation=all_reduce(1))
        assert isinstance(harness.failure(rank, key=collective(0)), DeadlineError)
    assert harness.group()["state"] == "active"
    for rank in range(3):
        harness.push(rank, bucket(0), floats(1))
    assert harness.array(0)[0] == 1


def test_a_transfer_that_is_not_taken_fails_alone() -> None:
    harness = group_of(3)
    harness.push(0, transfer(0, 0, 2, tag=4), floats(1), operation=operation(Kind.TRANSFER, 1))
    harness.wait(TIMEOUT)

    error = harness.failure(0, key=transfer(0, 0, 2, tag=4))
    assert isinstance(error, DeadlineError)
    assert error.missing == ("'w2' (rank 2)",)
    assert "transfer 0 from rank 0 to rank 2 (tag 4)" in str(error)


@pytest.mark.usefixtures("four_byte_slices")
def test_every_slice_gives_an_exchange_more_time() -> None:
    harness = group_of(2, 3)
    for index in range(3):
        harness.push(0, bucket(0), floats(1), index=index)
        harness.wait(TIMEOUT - 1)
    assert harness.silent(0)

    harness.push(1, bucket(0), floats(1))
    harness.sent(0)
    harness.wait(TIMEOUT)
    error = harness.failure(0, key=bucket(0))
    assert isinstance(error, DeadlineError)
    assert error.missing == ("'w1' (rank 1)",), "a member that stopped in the middle is missing"


def test_the_error_says_so_when_it_is_not_a_worker_that_is_late() -> None:
    harness = group_of(2, 1, lazy=True)
    for rank in range(2):
        harness.push(rank, bucket(0), floats(1))
    harness.wait(TIMEOUT)

    error = harness.failure(0, key=bucket(0))
    assert isinstance(error, DeadlineError)
    assert error.missing == ()
    had_come = "; 'w0' (rank 0), 'w1' (rank 1) had come"
    assert f"waited 10 s (--round-timeout) for the coordinator to reduce it{had_come}" in str(error)


@pytest.mark.usefixtures("four_byte_slices")
def test_when_all_stopped_in_the_middle_all_are_missing() -> None:
    harness = group_of(2, 2)
    for rank in range(2):
        harness.push(rank, bucket(0), floats(1))
        harness.sent(0)
    harness.sent(1)
    harness.wait(TIMEOUT)

    error = harness.failure(0, key=bucket(0))
    assert isinstance(error, DeadlineError)
    assert error.missing == ("'w0' (rank 0)", "'w1' (rank 1)")
    assert str(error).endswith("waited 10 s (--round-timeout) for 'w0' (rank 0), 'w1' (rank 1)")


def test_a_tick_that_comes_early_or_twice_does_nothing() -> None:
    harness = group_of(2, 1)
    harness.push(0, bucket(0), floats(1))
    assert harness.wait(TIMEOUT / 2) == []
    harness.wait(TIMEOUT / 2)
    harness.failure(0, key=bucket(0))

    assert harness.wait(0) == []
    assert harness.wait(TIMEOUT) == []


def test_the_deadline_of_an_exchange_that_ended_leads_to_nothing() -> None:
    harness = group_of(2, 1)
    for rank in range(2):
        harness.push(rank, bucket(0), floats(1))
    harness.inbox.clear()

    harness.wait(TIMEOUT)

    assert not harness.inbox
    assert harness.engine.next_deadline() is None


# ── asking for missing members ────────────────────────────────────────────────────────────────────────


def test_missing_members_are_named_on_request() -> None:
    harness = group_of(4, 1)
    for rank in (3, 1):
        harness.push(rank, bucket(0), floats(1))
    harness.receive(SEATS + 1, Inquire(bucket(0)))

    assert harness.only([1], Missing) == [Missing(bucket(0), ("'w0' (rank 0)", "'w2' (rank 2)"))]


def test_no_member_is_missing_from_what_is_not_open() -> None:
    harness = group_of(2, 1)
    harness.receive(SEATS, Inquire(bucket(5)))

    assert harness.only([0], Missing) == [Missing(bucket(5), ())]


def test_of_many_that_are_missing_some_are_named() -> None:
    harness = group_of(40, 1)
    harness.push(0, bucket(0), floats(1))
    harness.receive(SEATS, Inquire(bucket(0)))

    assert len(harness.only([0], Missing)[0].workers) == 32
    harness.wait(TIMEOUT)
    error = harness.failure(0, key=bucket(0))
    assert isinstance(error, DeadlineError)
    assert len(error.missing) == 32
    assert "'w16' (rank 16) and 23 more" in str(error)


# ── plans change ──────────────────────────────────────────────────────────────────────────────────────


def test_buckets_before_a_plan_are_refused() -> None:
    harness = group_of(2)
    harness.push(0, bucket(0), floats(1))

    assert "bucket 0 is in no plan that 'w0' (rank 0) agreed on" in str(harness.refusal(SEATS))


def test_a_bucket_that_there_is_no_plan_for_is_called_a_bucket() -> None:
    harness = group_of(2)
    harness.push(0, bucket(3, 5), floats(1))

    assert "bucket 5 of round 3 from 'w0' (rank 0): round 0 is due" in str(harness.refusal(SEATS))


def test_a_round_that_was_given_up_is_done_again_by_the_new_plan() -> None:
    harness = group_of(2, 1, 1)
    for rank in range(2):
        harness.push(rank, bucket(0, 0), floats(1))
    harness.inbox.clear()
    harness.agree(plan_of(1, 1), 2)

    for part in range(2):
        for rank in range(2):
            assert harness.group()["round"] == 0
            harness.push(rank, bucket(0, part), floats(2))
    assert harness.group()["round"] == 1


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1,), (1, 1), (1, 2)])
def test_a_new_plan_while_buckets_are_open_halts_the_group_and_mixes_nothing_up(sizes: tuple[int, ...]) -> None:
    harness = group_of(2, 1, 1)
    harness.push(0, bucket(0, 1), floats(1))
    for rank in range(2):
        harness.propose(rank, plan_of(*sizes))

    failures = [message for message, _ in harness.sent(0) if isinstance(message, Failure)]
    assert [(failure.scope, failure.key) for failure in failures] == [
        (Scope.PROPOSAL, None),
        (Scope.EXCHANGE, bucket(0, 1)),
    ]
    for failure in failures:
        error = failure.exception()
        assert isinstance(error, OutOfStepError)
        assert "bucket 'b1' of round 0 was open when a new plan was agreed on" in str(error)
    assert harness.group()["state"] == "broken"
    harness.sent(1)
    harness.push(0, bucket(0, 0), floats(1))
    assert isinstance(harness.failure(0, key=bucket(0, 0)), OutOfStepError)
    harness.wait(TIMEOUT)
    json.dumps(harness.engine.snapshot(harness.now))


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────


def memory_of_exchanges_that_one_member_opens_alone(what: Operation) -> int:
    harness = Harness(credit=MIN_CREDIT_BYTES, checked=False)
    harness.assemble(2)
    payload = None if what.kind is Kind.BARRIER else floats(1)
    numbers = iter(range(10_000))

    def exchange() -> None:
        while not harness.closed:
            harness.push(0, collective(next(numbers)), payload, operation=what)

    used = memory_of(exchange).left
    assert isinstance(harness.refusal(SEATS), LimitExceededError)
    return used


@pytest.mark.parametrize("what", [BARRIER, all_reduce(1)], ids=str)
def test_exchanges_that_one_member_opens_alone_are_bounded_by_its_credit(measured: Measured, what: Operation) -> None:
    assert measured(memory_of_exchanges_that_one_member_opens_alone, what) < MIN_CREDIT_BYTES + SLICE_BYTES


def test_failures_that_others_have_yet_to_hear_of_are_bounded() -> None:
    harness = Harness(checked=False)
    harness.assemble(3)
    for number in range(3000):
        harness.push(0, collective(number), operation=BARRIER)
        harness.push(1, collective(number), floats(1), operation=all_reduce(1))
    assert harness.open_exchanges() <= 1024

    harness.inbox.clear()
    harness.push(2, collective(0), operation=BARRIER)
    harness.wait(TIMEOUT)
    assert isinstance(harness.failure(2, key=collective(0)), DeadlineError), "what was forgotten ends all the same"


def test_tags_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 100
    assert most < MAX_TRANSFERS
    monkeypatch.setattr("gradserver.engine.data.matching.MAX_TRANSFERS", most)
    harness = Harness(checked=False)
    harness.assemble(2)
    send = operation(Kind.TRANSFER, 1)
    for tag in range(most):
        harness.push(0, transfer(0, 0, 1, tag), floats(1), operation=send)
        harness.push(1, transfer(0, 0, 1, tag), None, operation=send)
    assert harness.closed == []
    harness.inbox.clear()
    harness.push(0, transfer(1, 0, 1, 0), floats(1), operation=send)
    assert harness.closed == [], "a tag that was used can be used again"
    harness.push(0, transfer(0, 0, 1, most), floats(1), operation=send)

    assert f"has used {most} different pairs of peer and tag" in str(harness.refusal(SEATS))


def memory_of_a_plan_of_gigabytes() -> int:
    harness = Harness()

    def exchange() -> None:
        harness.assemble(2, plan_of(1 << 40))
        for rank in range(2):
            harness.push(rank, bucket(0), bytes(SLICE_BYTES))
        harness.inbox.clear()

    return memory_of(exchange).left


def test_a_plan_of_gigabytes_takes_no_memory_of_its_own(measured: Measured) -> None:
    assert measured(memory_of_a_plan_of_gigabytes) < MIB


def test_commands_of_a_reduction_hold_what_it_needs() -> None:
    harness = group_of(1, 2, lazy=True)
    harness.push(0, bucket(0), floats(1, 2), weight=0.5)

    (reduce,) = harness.reduces
    assert (reduce.group, reduce.epoch, reduce.key, reduce.slice) == ("default", 1, bucket(0), 0)
    assert isinstance(reduce, Reduce)
    assert [c.weight for c in reduce.contributions] == [0.5]
