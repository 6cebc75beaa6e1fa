"""Tests of a departure's cost in an elastic group: the contribution to what was not pushed yet, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradserver.engine.events import Reduced, Undecodable
from gradserver.engine.policy import Lateness, Policy
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import (
    DeadlineError,
    LeftOutError,
    MalformedMessageError,
    MembershipChangedError,
    NonFiniteError,
    OutOfStepError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation
from gradserver.protocol.limits import MIN_SLICE_COST, TOLD_BYTES
from gradserver.protocol.messages import HERE, Failure, Membership, Push, Result, RoundDone, Scope, Serve, Welcome
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

BARRIER = Operation(Kind.BARRIER, Op.NONE, UINT8, 0)
GATHER = Operation(Kind.ALL_GATHER, Op.NONE, FLOAT32, 1)
SCATTER = Operation(Kind.REDUCE_SCATTER, Op.SUM, FLOAT32, 3)


@pytest.fixture(autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(8):  # two elements
        yield


def elastic(world: int, *sizes: int, lazy: bool = False) -> Harness:
    harness = Harness({"default": Policy(1, 8)}, lazy=lazy)
    harness.assemble(world, plan_of(*sizes) if sizes else None)
    return harness


def values(harness: Harness, rank: int, key: ExchangeKey) -> list[float]:
    """Return what came for ``rank`` of one exchange, in the order of slices, without memberships and round ends."""
    got: dict[int, list[float]] = {}
    for message, payloads in harness.sent(rank):
        if isinstance(message, Result):
            assert message.key == key
            got[message.slice] = list(memoryview(payloads[0]).cast("B").cast("f"))
        else:
            assert isinstance(message, Membership | RoundDone), message
    assert list(got) == list(range(len(got))), got
    return [value for index in sorted(got) for value in got[index]]


def shared(harness: Harness, rank: int, key: ExchangeKey, memory: Array, slices: int = 1) -> None:
    """Contribute memory that the coordinator sees, and that the result is written to."""
    harness.receive(SEATS + rank, Push(key, 0, 1.0, True, None, slices, HERE), memory.data.cast("B"))


# ── buckets ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_death_costs_the_slices_that_were_not_pushed_and_no_others() -> None:
    harness = elastic(3, 6)
    for index in range(2):
        harness.push(1, bucket(0), floats(10, 10), index=index)
    for rank in (0, 2):
        for index in range(3):
            harness.push(rank, bucket(0), floats(rank, rank), index=index)
    assert values(harness, 0, bucket(0)) == [4, 4, 4, 4]
    values(harness, 2, bucket(0))

    harness.lose(1)

    ((news, _), (last, payloads), (done, _)) = harness.sent(0)
    assert news == Membership(
        2, (0, 2), ("w0", "w2"), "'w1' (rank 1) was lost in round 0 (connection reset); 2 workers go on", True
    )
    assert last == Result(bucket(0), 2, 2.0, True, without=(1,))
    assert memoryview(payloads[0]).cast("f").tolist() == [1, 1]
    assert done == RoundDone(0, 2)
    assert [type(message) for message, _ in harness.sent(2)] == [Membership, Result, RoundDone]
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert record.weights == (1.0, 1.0, 1.0)
    assert record.cut == ((1, 0, 2),)


def test_slices_that_only_the_dead_had_pushed_count_when_the_others_come() -> None:
    harness = elastic(3, 4)
    harness.push(1, bucket(0), floats(31, 31))
    harness.lose(1)

    for rank in (2, 0):
        for index in range(2):
            harness.push(rank, bucket(0), floats(rank, rank), index=index)

    assert values(harness, 0, bucket(0)) == values(harness, 2, bucket(0)) == [11, 11, 1, 1]


def test_two_at_once_cost_what_each_had_not_pushed() -> None:
    harness = elastic(4, 4)
    harness.push(1, bucket(0), floats(100, 100))
    for rank in (0, 3):
        for index in range(2):
            harness.push(rank, bucket(0), floats(rank, rank), index=index)
    assert harness.silent(0, 3)

    harness.lose(2)
    harness.lose(1)

    assert values(harness, 0, bucket(0)) == values(harness, 3, bucket(0))
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert record.weights == (1.0, 1.0, 0.0, 1.0)
    assert record.cut == ((1, 0, 1),)


def test_a_member_that_dies_between_two_buckets_counts_in_the_first() -> None:
    harness = elastic(2, 2, 2)
    for rank in (0, 1):
        harness.push(rank, bucket(0), floats(rank, rank))
    harness.push(0, bucket(0, 1), floats(5, 5))
    harness.sent(0)

    harness.lose(1)

    assert values(harness, 0, bucket(0, 1)) == [5, 5]
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert (record.weights, record.cut) == ((1.0, 1.0), ((1, 0, 1),))


def test_later_rounds_do_without_and_are_not_marked() -> None:
    harness = elastic(3, 2)
    harness.lose(2)
    for number in range(2):
        for rank in (0, 1):
            harness.push(rank, bucket(number), floats(rank, rank))
        assert values(harness, 0, bucket(number)) == values(harness, 1, bucket(number)) == [0.5, 0.5]

    assert [(r.weights, r.cut) for r in harness.engine.control.groups["default"].rounds.ledger] == [
        ((1.0, 1.0, 0.0), ())
    ] * 2


def test_a_reduction_that_holds_the_bytes_of_the_dead_counts_them() -> None:
    harness = elastic(2, 2, lazy=True)
    for rank in (0, 1):
        harness.push(rank, bucket(0), floats(rank, rank))

    harness.lose(1)
    (reduce,) = harness.reduces
    harness.answer(reduce)

    assert values(harness, 0, bucket(0)) == [0.5, 0.5]
    assert harness.silent(1)


def test_weights_are_those_that_counted_slice_by_slice() -> None:
    harness = elastic(2, 4)
    harness.push(1, bucket(0), floats(8, 8), weight=3.0)
    for index in range(2):
        harness.push(0, bucket(0), floats(4, 4), index=index, weight=1.0)
    harness.lose(1)

    results = [message for message, _ in harness.sent(0) if isinstance(message, Result)]
    assert [result.weight for result in results] == [4.0, 1.0]


# ── shared memory ─────────────────────────────────────────────────────────────────────────────────────


def test_memory_of_a_departed_member_does_not_count_until_it_is_reduced() -> None:
    harness = elastic(3, 4)
    mine, theirs, others = floats(2, 2, 2, 2), floats(90, 90, 90, 90), floats(4, 4, 4, 4)
    shared(harness, 1, bucket(0), theirs, 2)
    shared(harness, 0, bucket(0), mine, 2)
    harness.lose(1)
    theirs[:] = 1000  # it may be alive, and the memory is its own again
    shared(harness, 2, bucket(0), others, 2)

    assert mine.tolist() == others.tolist() == [3, 3, 3, 3]
    assert theirs.tolist() == [1000] * 4
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert (record.weights, record.cut) == ((1.0, 0.0, 1.0), ())


def test_of_memory_that_was_reduced_in_part_that_part_counts() -> None:
    harness = elastic(2, 4)
    theirs = floats(6, 6, 6, 6)
    shared(harness, 1, bucket(0), theirs, 2)
    harness.push(0, bucket(0), floats(2, 2))
    harness.lose(1)
    theirs[:] = 1000
    harness.push(0, bucket(0), floats(2, 2), index=1)

    assert values(harness, 0, bucket(0)) == [4, 4, 2, 2]
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert (record.weights, record.cut) == ((1.0, 1.0), ((1, 0, 1),))


def test_memory_of_a_process_that_has_ended_counts() -> None:
    harness = elastic(3, 6)
    mine, theirs, others = floats(2, 2, 2, 2, 2, 2), floats(9, 9, 9, 9, 9, 9), floats(4, 4, 4, 4, 4, 4)
    shared(harness, 1, bucket(0), theirs, 2)
    harness.push(0, bucket(0), mine[:2])
    harness.lose(1, ended=True)
    harness.push(0, bucket(0), mine[2:4], index=1)
    harness.push(0, bucket(0), mine[4:], index=2)
    shared(harness, 2, bucket(0), others, 3)

    assert others.tolist() == values(harness, 0, bucket(0)) == [5, 5, 5, 5, 3, 3]
    assert theirs.tolist() == [9] * 6, "no member is there to read a result"
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert (record.weights, record.cut) == ((1.0, 1.0, 1.0), ((1, 0, 2),))


def test_what_a_process_that_has_ended_gave_to_one_other_arrives() -> None:
    harness = elastic(2)
    theirs = floats(1, 2, 3, 4)
    operation = Operation(Kind.TRANSFER, Op.NONE, FLOAT32, 4)
    push = Push(transfer(0, 1, 0), 0, 1.0, True, operation, 2, HERE)
    harness.receive(SEATS + 1, push, theirs.data.cast("B"))
    harness.lose(1, ended=True)
    harness.push(0, transfer(0, 1, 0), None, operation=operation)
    harness.push(0, transfer(0, 1, 0), None, index=1)

    assert values(harness, 0, transfer(0, 1, 0)) == [1, 2, 3, 4]


def test_a_member_that_leaves_politely_takes_its_memory_along_too() -> None:
    harness = elastic(2, 2)
    shared(harness, 1, bucket(0), floats(6, 6))
    harness.leave(1)
    harness.push(0, bucket(0), floats(2, 2))

    assert values(harness, 0, bucket(0)) == [2, 2]


# ── collectives and transfers ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("operation", [all_reduce(2), BARRIER, Operation(Kind.BROADCAST, Op.NONE, FLOAT32, 2, 0)])
def test_collectives_that_can_go_on_do(operation: Operation) -> None:
    harness = elastic(3)
    payload = None if operation.kind is Kind.BARRIER else floats(1, 1)
    harness.push(0, collective(0), payload, operation=operation)
    harness.push(2, collective(0), payload if operation.kind is Kind.ALL_REDUCE else None, operation=operation)
    assert harness.silent(0, 2)

    harness.lose(1)

    for rank in (0, 2):
        kinds = [type(message) for message, _ in harness.sent(rank)]
        assert kinds == [Membership, Result]


def changed(harness: Harness, rank: int, key: ExchangeKey) -> MembershipChangedError:
    harness.told(rank, Membership)
    error = harness.failure(rank, Scope.EXCHANGE, key)
    assert isinstance(error, MembershipChangedError)
    return error


@pytest.mark.parametrize("operation", [GATHER, SCATTER])
def test_what_depends_on_the_world_size_fails_once_at_all_members(operation: Operation) -> None:
    harness = elastic(3)
    payload = floats(*range(operation.numel))
    harness.receive(SEATS, Push(collective(0), 0, 1.0, True, operation, epoch=1), payload[:1].tobytes())
    harness.lose(1)
    error = changed(harness, 0, collective(0))
    assert error.epoch == 2
    assert "collective 0 of round 0, " in str(error)
    assert "'w1' (rank 1) was lost in round 0 (connection reset)" in str(error)

    harness.receive(SEATS + 2, Push(collective(0), 0, 1.0, True, operation, epoch=1), payload[:1].tobytes())

    assert changed(harness, 2, collective(0)).fields == error.fields
    assert harness.open_exchanges() == 0


def test_a_later_caller_hears_of_the_same_membership_despite_departures() -> None:
    harness = elastic(4)
    harness.lose(1)
    harness.told(0, Membership)
    harness.receive(SEATS, Push(collective(0), 0, 1.0, True, GATHER, epoch=1), floats(0).tobytes())
    assert changed(harness, 0, collective(0)).epoch == 2

    harness.lose(2)
    harness.receive(SEATS + 3, Push(collective(0), 0, 1.0, True, GATHER, epoch=1), floats(3).tobytes())

    assert changed(harness, 3, collective(0)).epoch == 2


def test_and_goes_with_the_new_membership() -> None:
    harness = elastic(3)
    harness.lose(1)
    for rank in (2, 0):
        harness.told(rank, Membership)
        harness.receive(SEATS + rank, Push(collective(0), 0, 1.0, True, GATHER, epoch=2), floats(rank).tobytes())

    assert values(harness, 0, collective(0)) == values(harness, 2, collective(0)) == [0, 2]


def test_each_chunk_of_a_reduce_scatter_goes_to_the_present_owner_of_that_rank() -> None:
    harness = elastic(3)
    harness.lose(0)
    scatter = Operation(Kind.REDUCE_SCATTER, Op.SUM, FLOAT32, 2)
    for rank in (2, 1):
        harness.told(rank, Membership)
        harness.receive(SEATS + rank, Push(collective(0), 0, 1.0, True, scatter, epoch=2), floats(1).tobytes())
        harness.receive(SEATS + rank, Push(collective(0), 1, 1.0, True), floats(2).tobytes())

    present = {rank: [m.slice for m, _ in harness.sent(rank) if isinstance(m, Result) and m.present] for rank in (1, 2)}
    assert present == {1: [0], 2: [1]}


def test_errors_name_a_root_by_its_rank_and_not_by_its_member_id() -> None:
    harness = elastic(3)
    harness.lose(0)
    for member_id in (1, 2):
        harness.told(member_id, Membership)
    one, other = (Operation(Kind.BROADCAST, Op.NONE, FLOAT32, 1, member_id) for member_id in (1, 2))
    harness.push(1, collective(0), floats(1), operation=one)
    harness.push(2, collective(0), floats(1), operation=other)

    assert str(harness.failure(1, key=collective(0))) == (
        "collective 0 of round 0 is not the same everywhere: 'w1' (rank 0) called broadcast of float32[1] from rank 0, "
        "'w2' (rank 1) called broadcast of float32[1] from rank 1"
    )


def test_chunks_under_reduction_at_a_departure_reach_the_members_they_were_for() -> None:
    harness = elastic(3, lazy=True)
    for rank in range(3):
        for index in range(3):
            operation, epoch = (SCATTER, 1) if not index else (None, 0)
            push = Push(collective(0), index, 1.0, True, operation, epoch=epoch)
            harness.receive(SEATS + rank, push, floats(index).tobytes())
    harness.lose(0)
    for reduce in harness.reduces:
        harness.answer(reduce)

    got = {rank: [m.slice for m, _ in harness.sent(rank) if isinstance(m, Result) and m.present] for rank in (1, 2)}
    assert got == {1: [1], 2: [2]}


def test_one_that_was_begun_by_a_membership_that_has_ended_fails_before_it_is_cut() -> None:
    harness = elastic(3)
    harness.lose(1)
    harness.told(0, Membership)
    payload = floats(0).tobytes()  # three do not fit among two
    harness.receive(SEATS, Push(collective(0), 0, 1.0, True, SCATTER, epoch=1), payload)

    assert changed(harness, 0, collective(0)).epoch == 2
    harness.receive(SEATS, Push(collective(0), 1, 1.0, True), payload)
    assert harness.silent(0), "its tail is dropped"


def test_a_broadcast_from_the_dead_fails_at_all_and_one_that_it_had_given_does_not() -> None:
    harness = elastic(3)
    from_1 = Operation(Kind.BROADCAST, Op.NONE, FLOAT32, 2, 1)
    harness.push(1, collective(0), floats(7, 7), operation=from_1)
    harness.push(0, collective(0), operation=from_1)
    harness.push(0, collective(1), operation=from_1)
    harness.lose(1)
    assert changed(harness, 0, collective(1)).epoch == 2

    for number in range(2):
        harness.push(2, collective(number), operation=from_1)

    assert harness.array(0).tolist() == [7, 7]
    messages = harness.sent(2)
    assert [type(message) for message, _ in messages] == [Membership, Result, Failure]


def test_a_transfer_with_the_dead_fails_with_its_name() -> None:
    harness = elastic(3)
    send = Operation(Kind.TRANSFER, Op.NONE, FLOAT32, 2)
    harness.push(0, transfer(0, 0, 1), floats(1, 1), operation=send)
    harness.push(1, transfer(0, 1, 2), floats(5, 5), operation=send)
    harness.lose(1)
    harness.told(0, Membership)
    harness.told(2, Membership)

    error = harness.failure(0, Scope.EXCHANGE, transfer(0, 0, 1))
    assert isinstance(error, WorkerLostError)
    assert error.worker == "w1"
    harness.push(2, transfer(0, 1, 2), operation=send)
    assert harness.array(2).tolist() == [5, 5], "what it had sent arrives"
    harness.push(2, transfer(1, 1, 2), operation=send)
    assert isinstance(harness.failure(2, Scope.EXCHANGE, transfer(1, 1, 2)), WorkerLostError)


# ── time, plans, and what halts ───────────────────────────────────────────────────────────────────────


def test_a_member_too_late_for_a_bucket_is_left_out_and_the_others_go_on() -> None:
    harness = elastic(3, 2)
    for rank in (0, 2):
        harness.push(rank, bucket(0), floats(rank, rank))
    harness.wait(TIMEOUT)

    error = harness.refusal(SEATS + 1)
    assert isinstance(error, LeftOutError)
    assert str(error) == (
        "this worker, 'w1' (rank 1), was left out of group 'default': bucket 'b0' of round 0 waited 10 s "
        "(--round-timeout) for it. It has to join again"
    )
    (news,) = harness.told(0, Membership)
    assert news.reason == "'w1' (rank 1) was lost in round 0 (it did not come in time); 2 workers go on"
    assert values(harness, 0, bucket(0)) == [1, 1]


def test_the_others_hear_why_a_slow_member_is_left_out() -> None:
    harness = Harness({"default": Policy(2, 4, backlog=4, lateness=Lateness(backup=1, grace=0.0))})
    harness.assemble(3, plan_of(2))
    for rank in (0, 2):
        harness.push(rank, bucket(0), floats(rank, rank))

    assert isinstance(harness.refusal(SEATS + 1), LeftOutError)
    (news,) = harness.told(0, Membership)
    assert "it left more than 3.8147e-06 MiB of results unread (--backlog)" in news.reason


def test_a_group_that_needs_all_waits_for_a_slow_member_that_would_leave_too_much_unread() -> None:
    backlog = TOLD_BYTES + 3 * (8 + MIN_SLICE_COST)  # three rounds
    harness = Harness({"default": Policy(3, 3, backlog=backlog, lateness=Lateness(backup=1, grace=0.0))})
    harness.assemble(3, plan_of(2))
    for number in range(4):
        harness.wait(10.0)  # after which the coordinator tells of late members again
        for rank in (0, 2):
            harness.push(rank, bucket(number), floats(rank, rank))
        assert values(harness, 0, bucket(number)) == ([1, 1] if number < 3 else [])

    assert "round 3 of group 'default' waits for 'w1' (rank 1) after 0 s" in harness.logs[-1].text
    assert "(--workers 3)" in harness.logs[-1].text
    for number in range(4):
        harness.push(1, bucket(number), floats(4, 4))
    assert values(harness, 0, bucket(3)) == [2, 2]
    for rank in (0, 2):
        harness.push(rank, bucket(4), floats(rank, rank))
    assert values(harness, 0, bucket(4)) == [1, 1], "it may be late again"


def test_a_collective_that_waits_too_long_fails_alone() -> None:
    harness = elastic(2)
    harness.push(0, collective(0), floats(1, 1), operation=all_reduce(2))
    harness.wait(TIMEOUT)

    assert isinstance(harness.failure(0, Scope.EXCHANGE, collective(0)), DeadlineError)
    assert len(harness.group()["members"]) == 2


def test_no_member_is_left_out_for_what_only_the_dead_had_begun() -> None:
    harness = elastic(3, 2)
    harness.push(1, bucket(0), floats(30, 30))
    harness.lose(1)
    for _ in range(3):
        harness.wait(TIMEOUT)

    assert len(harness.group()["members"]) == 2
    for rank in (0, 2):
        harness.push(rank, bucket(0), floats(0, 0))
    assert values(harness, 0, bucket(0)) == [10, 10]


def test_what_only_the_dead_had_begun_does_not_stop_a_new_plan() -> None:
    harness = elastic(3, 2)
    harness.push(1, bucket(0), floats(30, 30))
    harness.lose(1)
    for rank in (0, 2):
        harness.told(rank, Membership)
    for rank in (0, 2):
        harness.propose(rank, plan_of(4))
    for rank in (0, 2):
        harness.sent(rank)
        for index in range(2):
            harness.push(rank, bucket(0), floats(1, 1), index=index)

    assert values(harness, 0, bucket(0)) == [1, 1, 1, 1]


def test_a_gradient_that_is_not_finite_halts_an_elastic_group_too() -> None:
    harness = elastic(2, 2)
    harness.push(0, bucket(0), floats(1, 1))
    harness.push(1, bucket(0), floats(float("nan"), 1))

    for rank in (0, 1):
        assert isinstance(harness.failure(rank, Scope.EXCHANGE, bucket(0)), NonFiniteError)
    harness.lose(1)
    assert harness.group()["state"] == "broken"


def test_bytes_that_say_nothing_cost_their_sender_its_place_and_the_others_nothing() -> None:
    harness = elastic(3, 4, lazy=True)
    for rank in (1, 0, 2):
        for index in range(2):
            harness.push(rank, bucket(0), floats(rank, rank), index=index)
    first, second = harness.reduces
    harness.reduces.clear()
    harness.answer(second)
    nothing = Undecodable(1, MalformedMessageError("no values"))
    harness.feed(Reduced(first.group, first.epoch, first.key, first.slice, nothing))

    (again,) = harness.reduces
    assert [given.member_id for given in again.contributions] == [0, 2]
    harness.answer(again)

    assert isinstance([m for m, _ in harness.sent(1)][-1], Failure)
    assert SEATS + 1 in harness.closed
    got = {m.slice: memoryview(p[0]).cast("f").tolist() for m, p in harness.sent(0) if isinstance(m, Result)}
    assert got == {1: [1, 1], 0: [1, 1]}
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert (record.weights, record.cut) == ((1.0, 1.0, 1.0), ((1, 0, 1),))
    assert harness.group()["state"] == "active"


def test_after_a_departure_messages_use_present_ranks() -> None:
    harness = elastic(3, 2)
    harness.lose(0)
    harness.told(1, Membership)
    harness.push(1, bucket(0), floats(1, 1))

    assert harness.group()["open"][0]["missing"] == ["'w2' (rank 1)"]


def test_the_dead_may_say_nothing_more() -> None:
    harness = elastic(2, 2)
    harness.lose(1)
    harness.push(1, bucket(0), floats(1, 1))

    assert SEATS + 1 in harness.closed
    assert not isinstance(harness.refusal(SEATS + 1), OutOfStepError)


# ── ids that are used again ───────────────────────────────────────────────────────────────────────────


def test_a_failed_exchange_that_a_predecessor_had_a_part_in_does_not_concern_its_successor() -> None:
    commit = Plan((Bucket("round", FLOAT32, (Component("x", (2,)),), kind=Kind.COMMIT),))
    harness = elastic(3)
    harness.agree_beside([plan_of(2), commit], 3)
    harness.receive(SEATS, Serve())
    for rank in (2, 1):  # the first refusal makes the commit void, and the second one comes after that
        harness.push(rank, bucket(0, 1), weight=0.0, epoch=0)
    harness.lose(1, ended=True)
    assert harness.open_exchanges() == 1, "one member has yet to hear of the failure"
    harness.join(SEATS + 5, "w1")
    assert harness.only([5], Welcome)[0].rank == 1
    harness.lose(5, ended=True)

    assert {failure.error for failure in harness.told(0, Failure)} == {"RoundVoidError"}
    for rank in (0, 2):
        harness.push(rank, bucket(0, 0), floats(rank, rank))
    assert values(harness, 0, bucket(0, 0)) == [1.0, 1.0]


def test_a_predecessor_does_not_count_in_buckets_that_were_done_before_its_successor_is_gone_too() -> None:
    harness = elastic(2, 2, 2, 2)
    harness.receive(SEATS, Serve())
    for rank in (0, 1):
        harness.push(rank, bucket(0), floats(rank, rank))
    harness.lose(1)
    harness.push(0, bucket(0, 1), floats(5, 5))
    harness.join(SEATS + 5, "w1")
    assert harness.only([5], Welcome)[0].rank == 1
    harness.lose(5)

    harness.push(0, bucket(0, 2), floats(5, 5))

    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert (record.weights, record.cut) == ((1.0, 1.0), ((1, 0, 1),))


@pytest.mark.parametrize("slices", [1, 2])
def test_what_is_sent_to_a_predecessor_is_no_violation_when_its_successor_is_gone_too(slices: int) -> None:
    harness = elastic(2, 2)
    harness.receive(SEATS, Serve())
    operation = Operation(Kind.TRANSFER, Op.NONE, FLOAT32, 2 * slices)
    for rank, payload in ((0, floats(1, 2)), (1, None)):
        for index in range(slices):
            harness.push(rank, transfer(0, 0, 1), payload, index=index, operation=None if index else operation)
    harness.lose(1)
    harness.join(SEATS + 5, "w1")
    harness.lose(5)
    harness.inbox.clear()

    for index in range(slices):
        harness.push(0, transfer(1, 0, 1), floats(3, 4), index=index, operation=None if index else operation, epoch=1)

    assert [failure.error for failure in harness.told(0, Failure)] == [WorkerLostError.__name__]
    assert SEATS not in harness.closed
