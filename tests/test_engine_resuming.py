"""Members of a durable group that come back, one step at a time. `test_engine_crash_laws` has all orders."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gradserver.engine.commands import Close, Log, Record
from gradserver.engine.control.group.shards import HIRE_SECONDS
from gradserver.engine.control.sessions import check
from gradserver.engine.data_records import Committed, Used as UsedRecord
from gradserver.engine.effects import Effects
from gradserver.engine.events import Branched, Disconnected, Garbled, NonFinite
from gradserver.engine.journal_state import MAX_ENDED, Dated
from gradserver.engine.lease_table import Use
from gradserver.engine.policy import Lateness, OnNonFinite, Policy
from gradserver.engine.proofs import Said
from gradserver.engine.records import Boundary, Epoch, Halt, Round, RoundRecord, encode
from gradserver.engine.reports import Behind
from gradserver.protocol.beacon import beacon_id
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import (
    ConnectionLostError,
    GradServerError,
    JoinRefusedError,
    LeftOutError,
    MalformedMessageError,
    MembershipChangedError,
    NonFiniteError,
    ProtocolError,
    WorkerLeftError,
)
from gradserver.protocol.exchange import STATE_TAG, ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import MAX_COUNTER, SLICE_BYTES
from gradserver.protocol.messages import (
    Agreed,
    Enlist,
    Enter,
    Failure,
    Leave,
    Membership,
    Propose,
    Push,
    Ready,
    Result,
    RoundDone,
    Scope,
    Serve,
    Split,
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
from gradserver.protocol.plan import Plan
from gradserver.protocol.ranges import pack
from tests.crash_harness import POLICY, Fused
from tests.engine_harness import SEATS, TIMEOUT, Harness, all_reduce, bucket, collective, floats, plan_of, small_slices

PLAN = plan_of(4, 4)
BACK = SEATS + 50
"""The connection on which rank 0 returns, rank 1 on the next one, and so on."""
ONE = floats(1, 2, 3, 4).tobytes()


class Group:
    """A durable group of two, or more, that has agreed on a plan."""

    def __init__(
        self,
        world: int = 2,
        plan: Plan | None = PLAN,
        policy: Policy = POLICY,
        nonfinite: OnNonFinite = OnNonFinite.HALT,
    ) -> None:
        self.harness = harness = Fused({"default": policy}, lazy=False, nonfinite=nonfinite)
        for rank in range(world):
            harness.join(SEATS + rank, f"w{rank}", rank=rank, world=world)
        self.welcomes = harness.only(range(world), Welcome)
        self.plan = plan
        if plan is not None:
            harness.agree(plan, world)

    def resume(self, rank: int, epoch: int = 1, token: str = "", plan: str | None = None) -> None:
        own = self.plan.hash if self.plan is not None else ""
        token = token or self.welcomes[rank].token
        self.harness.receive(BACK + rank, Resume("default", rank, token, epoch, own if plan is None else plan))

    def hold(self, rank: int, number: int, *spans: Span, connection: int = BACK) -> None:
        generation = self.harness.engine.control.groups["default"].recovery.generation
        self.harness.receive(connection + rank, Holding(generation, number, 1.0), pack_spans(spans))

    def prove(self, held: Held, payload: bytes | None = None, made: int = 0) -> Held:
        """Return what a member says with a result, with the proof that it was made."""
        proofs = self.harness.engine.data.groups["default"].proofs
        assert proofs is not None
        said = Said(held.key, held.weight, held.without, held.weights)
        hashes = proofs.hashes(payload, (len(payload or b""),))
        return replace(held, proof=proofs.prove(made, said, held.slice, hashes, held.squares))

    def told(self, rank: int, connection: int = BACK) -> list[object]:
        return [message for message, _ in self.harness.inbox.pop(connection + rank, [])]

    def refusal(self, rank: int) -> GradServerError:
        return self.harness.refusal(BACK + rank)

    def state(self) -> str:
        return str(self.harness.group()["state"])


def held(number: int, part: int, weights: tuple[float, ...] = ()) -> Span:
    return Span(State.HELD, bucket(number, part), 0, 1, weights)


def test_a_member_that_comes_back_is_known_by_its_token_alone() -> None:
    group = Group()
    assert all(welcome.durable and welcome.incarnation == 1 for welcome in group.welcomes)
    group.harness.restart()

    group.resume(0, token=group.welcomes[1].token)
    assert isinstance(group.refusal(0), JoinRefusedError)
    group.resume(1)
    assert group.told(1) == [Resumed(2, 2)]
    assert group.state() == "recovering"


def test_a_group_that_does_not_exist_or_is_not_durable_is_named() -> None:
    harness = Fused({"default": POLICY})
    harness.receive(SEATS, Resume("default", 0, "token", 1, ""))

    error = harness.refusal(SEATS)

    assert isinstance(error, JoinRefusedError)
    assert "no durable group 'default'" in error.message


def test_a_member_that_the_others_went_on_without_is_left_out_and_told_so() -> None:
    group = Group(3)
    group.harness.lose(2)
    group.harness.wait(POLICY.dead_after)

    group.resume(2)

    error = group.refusal(2)
    assert isinstance(error, LeftOutError)
    assert (error.worker, error.rank) == ("w2", 2)
    assert "w2' (was rank 2), came back to group 'default' when the others had gone on" in error.message


def test_a_member_away_for_a_moment_keeps_its_place_and_the_others_hear_when_it_is_back() -> None:
    group = Group()
    group.harness.lose(1)
    group.harness.wait(POLICY.dead_after / 4)
    assert group.harness.silent(0)

    group.resume(1)

    assert [message for message, _ in group.harness.sent(0)] == [Resumed(1, 2)]
    assert group.told(1) == [Resumed(1, 2)]
    group.hold(0, 0, connection=SEATS)
    group.hold(1, 0)
    assert group.told(0, SEATS) == group.told(1) == [Standing(2, 0)]
    assert group.state() == "active"


def busy_group() -> tuple[Group, str]:
    """Make a group of three with two back at another coordinator. The last one's process runs, and can say no more."""
    group = Group(3)
    beacon = beacon_id(group.welcomes[2].token)
    group.harness.running.add(beacon)
    group.harness.restart()
    group.resume(0)
    group.resume(1)
    return group, beacon


def test_a_busy_member_is_waited_for_when_the_others_are_back() -> None:
    group, _ = busy_group()
    commands = group.harness.wait(POLICY.missing)
    assert [command.text for command in commands if isinstance(command, Log)] == [
        f"group 'default': 'w2' (rank 2) is not back, and its process runs: it is waited for, {TIMEOUT:g} s at most"
    ]
    for _ in range(20):
        assert not any(isinstance(command, Log) for command in group.harness.wait(0.25))
    assert group.state() == "recovering"

    group.resume(2)
    for rank in range(3):
        group.hold(rank, 0)

    assert [group.told(rank)[-1] for rank in range(3)] == [Standing(2, 0)] * 3
    assert len(group.harness.group()["members"]) == 3


def test_a_member_that_is_busy_for_longer_than_the_timeout_is_left_out() -> None:
    group, _ = busy_group()
    group.hold(0, 0)
    group.hold(1, 0)
    group.harness.wait(POLICY.missing)
    group.harness.wait(TIMEOUT - 0.01)
    assert len(group.harness.group()["members"]) == 3
    deadline = group.harness.engine.next_deadline()
    assert deadline is not None

    group.harness.wait(deadline - group.harness.now)

    assert [member["name"] for member in group.harness.group()["members"]] == ["w0", "w1"]


def test_a_busy_member_without_further_signs_is_left_out_at_once() -> None:
    group, beacon = busy_group()
    group.harness.wait(POLICY.missing)
    group.harness.running.remove(beacon)

    group.harness.wait(0.25)

    assert [member["name"] for member in group.harness.group()["members"]] == ["w0", "w1"]


def test_a_busy_member_is_waited_for_when_its_connection_broke() -> None:
    group = Group(3)
    group.harness.running.add(beacon_id(group.welcomes[2].token))
    group.harness.lose(2)
    group.harness.wait(POLICY.dead_after / 2)
    group.harness.wait(POLICY.dead_after)
    assert len(group.harness.group()["members"]) == 3
    group.harness.running.clear()

    group.harness.wait(0.25)

    assert len(group.harness.group()["members"]) == 2


def test_what_some_hold_and_others_lack_is_handed_on_before_any_goes_on() -> None:
    group = Group()
    group.harness.restart()
    group.resume(0)
    group.resume(1)
    group.hold(0, 3, held(3, 0), held(2, 1))
    assert group.told(0) == [Resumed(2, 2)]

    group.hold(1, 3)

    assert group.told(0) == [Fetch(2, bucket(3), 0)]
    assert group.told(1) == [Resumed(2, 2)]
    result = group.prove(Held(2, bucket(3), 0, 2.5, True, (7,)), ONE)
    group.harness.receive(BACK, result, ONE)
    assert group.harness.inbox.pop(BACK + 1) == [
        (Result(bucket(3), 0, 2.5, True, without=(7,), proof=result.proof), [ONE]),
        (Standing(2, 3), []),
    ]
    assert group.told(0) == [Standing(2, 3)]


@pytest.mark.parametrize(
    ("states", "error"),
    [
        ((State.OVER, State.FAILED), ConnectionLostError),
        ((State.FAILED, State.FAILED), ConnectionLostError),
        ((State.CHANGED, State.CHANGED), MembershipChangedError),
        ((State.CHANGED, State.LACKING), MembershipChangedError),
    ],
)
def test_a_member_that_lacks_what_has_failed_calls_it_again_if_the_others_do(
    states: tuple[State, State], error: type[GradServerError]
) -> None:
    group, key = Group(3), collective(0)
    group.harness.restart()
    for rank, state in enumerate((*states, State.LACKING)):
        group.resume(rank)
        group.hold(rank, 0, Span(state, key, 0, 1))

    (failure,) = (message for message in group.told(2) if isinstance(message, Failure))

    assert failure.key == key
    assert type(failure.exception()) is error
    assert sum(isinstance(message, Failure) for message in group.told(1)) == (states[1] is State.LACKING)


def test_what_is_handed_on_comes_in_order_so_that_each_holds_a_prefix() -> None:
    with small_slices(16):
        group = Group(3, plan_of(12))
        group.harness.restart()
        for rank in range(3):
            group.resume(rank)
        both = Span(State.HELD, bucket(3), 0, 3, (2.5, 0.0, 1.0))
        group.hold(0, 3, both)
        group.hold(1, 3, both)
        group.hold(2, 3)
        group.told(2)

        held = [Held(2, bucket(3), index, 3.5, True, (7,), both.weights) for index in (2, 1, 0)]
        last, middle, first = (group.prove(one, ONE) for one in held)
        group.harness.receive(BACK, last, ONE)
        group.harness.receive(BACK + 1, middle, ONE)
        assert group.told(2) == []
        group.harness.receive(BACK, first, ONE)

        told: dict[str, Any] = {"without": (7,), "weights": both.weights}
        results = [Result(bucket(3), one.slice, 3.5, True, **told, proof=one.proof) for one in (first, middle, last)]
        assert group.told(2) == [*results, Standing(2, 3), RoundDone(3, 1)]


def test_results_are_told_in_the_order_of_slices_in_whatever_order_they_are_made() -> None:
    with small_slices(16):
        group = Group(2, plan_of(12))
        for index in range(3):
            for rank in (0, 1):
                group.harness.push(rank, bucket(0), ONE, index=index, weight=1.0 + rank)
        first, second, third = group.harness.reduces

        group.harness.answer(third)
        group.harness.answer(second)
        assert group.harness.silent(0, 1)
        group.harness.answer(first)

        sent = [message for message, _ in group.harness.sent(0)]
        told = [message._replace(proof=b"") for message in sent if isinstance(message, Result)]
        assert told == [Result(bucket(0), index, 3.0, True, weights=(1.0, 2.0)) for index in range(3)]


def rounds(group: Group) -> list[RoundRecord]:
    """Return the rounds that are written."""
    return [record.record for record in group.harness.records if isinstance(record, Round)]


def test_a_contributor_that_died_with_the_coordinator_stands_in_the_record() -> None:
    group = Group(3, plan_of(4))
    group.harness.restart()
    for rank in (0, 1):
        group.resume(rank)
        group.hold(rank, 0, held(0, 0, (1.0, 0.5, 2.0)))

    group.harness.wait(POLICY.missing)

    (record,) = rounds(group)
    assert (record.weights, record.cut) == ((1.0, 0.5, 2.0), ((2, 0, 1),))


def test_a_contributor_in_an_unknown_seat_stands_in_the_record() -> None:
    group = Group(2, plan_of(4))
    group.harness.restart()
    for rank in (0, 1):
        group.resume(rank)
        group.hold(rank, 0, held(0, 0, (1.0, 0.0, 0.0, 2.0)))

    (record,) = rounds(group)
    assert (record.weights, record.cut) == ((1.0, 0.0, 0.0, 2.0), ((3, 0, 1),))
    assert len(record.arrivals) == 4


def counted_and_gone() -> Group:
    """Make a group of three with two in round 1 of a new coordinator: it does not know which counted in round 0."""
    group = Group(3, plan_of(4))
    for rank in range(3):
        group.harness.push(rank, bucket(0), ONE)
    group.harness.feed(Disconnected(SEATS + 2, "it died", ended=True))
    group.harness.answer(group.harness.reduces.pop())
    assert [record.weights for record in rounds(group)] == [(1.0, 1.0, 1.0)]
    group.harness.restart()
    for rank in (0, 1):
        group.resume(rank, 2)
    for rank in (0, 1):
        group.hold(rank, 1, held(0, 0, (1.0, 1.0, 1.0)))
    assert [Standing(3, 1) in group.told(rank) for rank in (0, 1)] == [True, True]
    return group


def test_collectives_are_cut_among_present_members_also_when_the_departed_are_forgotten() -> None:
    """Test that no record names w0, which had the lowest member, once a round is over: three members, two members."""
    group = Group(3, plan_of(4))
    group.harness.feed(Disconnected(SEATS, "it died", ended=True))
    for rank in (1, 2):
        group.harness.push(rank, bucket(0), ONE)
    group.harness.answer(group.harness.reduces.pop())
    group.harness.restart()
    for rank in (1, 2):
        group.resume(rank, 2)
    for rank in (1, 2):
        group.hold(rank, 1, held(0, 0, (0.0, 1.0, 1.0)))
    assert [Standing(3, 1) in group.told(rank) for rank in (1, 2)] == [True, True]

    scatter = Operation(Kind.REDUCE_SCATTER, Op.MEAN, FLOAT32, 4)
    for index, chunk in enumerate((ONE[:8], ONE[8:])):
        for rank in (1, 2):
            push = Push(collective(0, 1), index, 1.0, True, None if index else scatter, epoch=2)
            group.harness.receive(BACK + rank, push, chunk)
        group.harness.answer(group.harness.reduces.pop())

    got = {rank: [payloads[0] for _, payloads in group.harness.inbox.pop(BACK + rank) if payloads] for rank in (1, 2)}
    assert got == {1: [ONE[:8]], 2: [ONE[8:]]}


@pytest.mark.parametrize("first", [1, 2])
def test_a_call_of_a_membership_that_has_ended_fails_for_all_in_any_order(first: int) -> None:
    """Test with one that has heard of the latest departure and one that has not, also if both say the same."""
    group = Group(4, plan_of(4))
    group.harness.feed(Disconnected(SEATS, "it died", ended=True))
    group.harness.feed(Disconnected(SEATS + 3, "it died", ended=True))
    group.harness.told(1, Membership)
    group.harness.told(2, Membership)
    gather, epochs = Operation(Kind.GATHER, Op.NONE, FLOAT32, 4, 1), {1: 3, 2: 2}
    for rank in (first, 3 - first):
        group.harness.push(rank, collective(0), ONE, operation=gather, epoch=epochs[rank])

    errors = [group.harness.failure(rank, key=collective(0)) for rank in (1, 2)]

    assert [(type(error), getattr(error, "epoch", 0)) for error in errors] == [(MembershipChangedError, 3)] * 2


def test_a_forgotten_contributor_is_no_surprise_when_a_connection_breaks_later() -> None:
    group = counted_and_gone()

    group.harness.feed(Disconnected(BACK, "connection reset"))
    group.resume(0, 2)
    for rank in (0, 1):
        group.hold(rank, 1, held(0, 0, (1.0, 1.0, 1.0)))

    assert [type(told[-1]) for told in (group.told(0), group.told(1))] == [Standing, Standing]


def test_in_rounds_that_the_coordinator_has_begun_itself_it_knows_all_seats() -> None:
    group = counted_and_gone()
    for rank in (0, 1):
        group.harness.receive(BACK + rank, Push(bucket(1), 0, 1.0, True), ONE)
    group.harness.answer(group.harness.reduces.pop())
    group.harness.feed(Disconnected(BACK, "connection reset"))
    group.told(0)
    group.resume(0, 2)
    group.told(0)

    group.hold(0, 2, held(2, 0, (1.0, 1.0, 1.0, 1.0)))  # a record names three, of which one is gone

    assert "weights of 4 member ids" in group.refusal(0).message


@pytest.mark.parametrize("policy", [OnNonFinite.LEAVE_OUT, OnNonFinite.SKIP])
def test_what_was_not_finite_in_a_seat_that_the_coordinator_does_not_know_is_told(policy: OnNonFinite) -> None:
    group = Group(2, plan_of(4), nonfinite=policy)
    group.harness.restart()
    for rank in (0, 1):
        group.resume(rank)
        group.hold(rank, 0, held(0, 0, (1.0, 0.0, 0.0, -2.0)))

    (record,) = rounds(group)
    assert record.nonfinite == ((3, 0, 1, -1),)
    assert group.harness.group()["nonfinite"]["workers"] == {"(departed)": 1}


def test_settled_slices_and_those_that_are_made_anew_add_up() -> None:
    """Test slices 0 and 1 of three settled with w2, which is dead; w1 dies before it gives anything anew."""
    with small_slices(16):
        group = Group(3, plan_of(12, 4))
        group.harness.restart()
        weights = (1.0, 0.5, 2.0)
        for rank in (0, 1):
            group.resume(rank)
            group.hold(rank, 0, Span(State.HELD, bucket(0), 0, 2, weights), held(0, 1, weights))
        group.harness.wait(POLICY.missing)
        assert Standing(2, 0) in group.told(0)

        group.harness.receive(BACK, Push(bucket(0), 2, 1.0, True), ONE)
        group.harness.feed(Disconnected(BACK + 1, "it died", ended=True))
        group.harness.answer(group.harness.reduces.pop())

        (record,) = rounds(group)
        assert record.weights == weights
        assert record.cut == ((1, 0, 2), (1, 1, 1), (2, 0, 2), (2, 1, 1))


def test_contributors_are_known_of_what_was_handed_on_before_its_holder_died() -> None:
    with small_slices(16):
        group = Group(3, plan_of(8))
        group.harness.restart()
        for rank in range(3):
            group.resume(rank)
        weights = (1.0, 0.5, 2.0)
        group.hold(0, 0, Span(State.HELD, bucket(0), 0, 2, weights))
        group.hold(1, 0)
        group.hold(2, 0)
        group.harness.receive(BACK, group.prove(Held(2, bucket(0), 0, 3.5, True, (), weights), ONE), ONE)
        group.harness.feed(Disconnected(BACK, "it died", ended=True))
        assert Standing(2, 0) in group.told(1)

        for rank in (1, 2):
            group.harness.receive(BACK + rank, Push(bucket(0), 1, weights[rank], True), ONE)
        group.harness.answer(group.harness.reduces.pop())

        (record,) = rounds(group)
        assert (record.weights, record.cut) == (weights, ((0, 0, 1),))


def test_a_round_that_was_made_again_without_a_member_is_written_again() -> None:
    group = Group(3, plan_of(4))
    for rank in range(3):
        group.harness.push(rank, bucket(0), ONE)
    group.harness.answer(group.harness.reduces[0])
    assert [record.weights for record in rounds(group)] == [(1.0, 1.0, 1.0)]
    for _ in range(2):
        group.harness.restart()
        for rank in (0, 1):
            group.resume(rank)
            group.hold(rank, 0, held(0, 0, (1.0, 1.0)))
        group.harness.wait(POLICY.missing)

    assert [record.weights for record in rounds(group)] == [(1.0, 1.0, 1.0), (1.0, 1.0, 0.0)]


def test_a_member_that_has_not_heard_the_end_of_a_round_hears_it_then() -> None:
    group = Group()
    group.harness.restart()
    group.resume(0)
    group.resume(1)
    group.hold(0, 3, held(2, 0), held(2, 1))
    group.hold(1, 2, held(2, 0))
    group.told(0)
    group.told(1)
    shown = group.prove(Held(2, bucket(2, 1), 0, 2.0, False))
    group.harness.receive(BACK, shown)

    assert group.told(1) == [Result(bucket(2, 1), 0, 2.0, False, proof=shown.proof), RoundDone(2, 1), Standing(2, 3)]


def test_a_member_hears_of_the_epoch_that_others_heard_of_if_the_group_goes_back_to_an_earlier_round() -> None:
    group = Group(4, plan_of(4), Policy(1, 8, lateness=Lateness(backup=3, grace=0.0)))
    for number in range(3):
        if number == 2:
            group.harness.lose(3)
            group.harness.wait(POLICY.dead_after)
        group.harness.push(0, bucket(number), ONE)
        group.harness.wait(0.0)
        group.harness.answer(group.harness.reduces[-1])
    assert [(one.record.round, one.epoch) for one in group.harness.records if isinstance(one, Round)][-1] == (2, 2)
    group.harness.restart()
    for rank in (1, 2):
        group.resume(rank)
    group.harness.wait(POLICY.missing)  # with the first one all results of round 2 are lost
    for rank, number in ((1, 2), (2, 1)):
        group.told(rank)
        group.hold(rank, number, held(0, 0), held(1, 0))

    assert RoundDone(1, 1) in group.told(2)


@pytest.mark.parametrize("is_lost", [False, True], ids=["connections break", "the coordinator is lost"])
def test_a_member_hears_of_the_membership_of_an_earlier_round_that_the_group_goes_back_to(is_lost: bool) -> None:
    group = Group(5, plan_of(4), Policy(1, 8, lateness=Lateness(backup=4, grace=0.0)))
    for number in range(3):
        if number:
            group.harness.lose(5 - number)
            group.harness.wait(POLICY.dead_after)
        group.harness.push(0, bucket(number), ONE)
        group.harness.wait(0.0)
        group.harness.answer(group.harness.reduces[-1])
    ends = [(one.record.round, one.epoch) for one in group.harness.records if isinstance(one, Round)]
    assert ends == [(0, 1), (1, 2), (2, 3)]
    if is_lost:
        group.harness.restart()
    else:
        for rank in range(3):
            group.harness.feed(Disconnected(SEATS + rank, "reset", False))
    group.resume(1, epoch=2)
    group.resume(2)
    group.harness.wait(POLICY.missing)
    for rank, number in ((1, 2), (2, 1)):
        group.hold(rank, number, held(0, 0), held(1, 0))

    told = group.told(2)
    assert RoundDone(1, 2) in told
    assert [one.member_ids for one in told if isinstance(one, Membership)] == [(0, 1, 2, 3), (0, 1, 2), (1, 2)]


def test_a_round_that_was_written_down_and_not_told_is_over_with_the_membership_of_now() -> None:
    group = Group(3, plan_of(4))
    for rank in range(3):
        group.harness.push(rank, bucket(0), ONE)
    group.harness.answer(group.harness.reduces[0])
    group.harness.restart()
    for rank in (0, 1):
        group.resume(rank)
        group.hold(rank, 0, held(0, 0, (1.0, 1.0, 1.0)))
    group.harness.wait(POLICY.missing)
    assert RoundDone(0, 4) in group.told(0)
    assert group.harness.records[-1] == Boundary("default", 0, 4)

    group.harness.restart()
    for rank in (0, 1):
        group.resume(rank)
    group.hold(0, 1, held(0, 0))
    group.hold(1, 0, held(0, 0))

    assert [type(message) for message in group.told(0)] == [Resumed, Membership, Standing]
    _, news, done, _ = group.told(1)
    assert isinstance(news, Membership)
    assert (news.epoch, news.member_ids) == (4, (0, 1))
    assert done == RoundDone(0, 4)


def test_a_member_that_lacks_what_none_keeps_any_more_is_left_out() -> None:
    group = Group(3)
    group.harness.restart()
    for rank in range(3):
        group.resume(rank)
    group.hold(0, 3, held(2, 0), held(3, 1))
    group.hold(1, 3, held(2, 0), held(3, 1))
    group.hold(2, 2)

    failure = next(message for message in group.told(2) if isinstance(message, Failure))
    assert isinstance(failure.exception(), LeftOutError)
    assert "no member has round 2 for it any more" in failure.text
    group.harness.wait(0)
    assert [type(message) for message in group.told(0)] == [Resumed, Membership, Standing]


def test_reductions_of_before_are_waited_for_as_they_may_write_to_memory() -> None:
    group = Group()
    for rank in (0, 1):
        group.harness.push(rank, bucket(0), ONE)
    (reduce,) = group.harness.reduces
    group.harness.lose(1)
    group.resume(1)
    group.hold(0, 0, connection=SEATS)
    group.hold(1, 0)
    assert group.told(1) == [Resumed(1, 2)]

    group.harness.answer(reduce)

    assert group.told(1) == [Standing(2, 0)]


def test_what_was_asked_of_data_and_not_answered_can_be_asked_again_and_what_was_used_is_said_again() -> None:
    group = Group()
    for connection in (SEATS, SEATS + 1):
        group.harness.receive(connection, Register("train", 100, 17, True, 0, 0), pack(()))
    group.harness.receive(SEATS, Claim("train", 1, 0, 10, 0))
    group.harness.receive(SEATS + 1, Claim("train", 1, 0, 10, 1))
    group.harness.lose(1)
    group.resume(1)
    group.harness.receive(BACK + 1, Claim("train", 1, 0, 10, 1))
    assert BACK + 1 not in group.harness.closed

    group.harness.restart()
    group.resume(0)
    group.harness.receive(BACK, Used("train", 0, 0), pack(((0, 10),)))

    assert BACK not in group.harness.closed
    assert group.harness.engine.control.groups["default"].leases.positions.uses["train"].used == {(0, 0): ((0, 10),)}


def users(policy: Policy = POLICY) -> Group:
    """Make a group of three in which each member has claimed three samples, and has used two in round 0."""
    group = Group(3, plan_of(4), policy)
    for rank in range(3):
        group.harness.receive(SEATS + rank, Register("train", 10, 17, True, 0, 0), pack(()))
        group.harness.receive(SEATS + rank, Claim("train", 1, 0, 3, 0))
        group.harness.receive(SEATS + rank, Used("train", 0, 0), pack(((3 * rank, 3 * rank + 2),)))
        group.harness.push(rank, bucket(0), ONE)
    return group


def come_back(group: Group, ranks: tuple[int, ...], weights: tuple[float, ...]) -> list[Committed]:
    """Have members come back that hold the result of round 0. Return what that has used up, by the last record."""
    for rank in ranks:
        group.resume(rank)
        group.harness.receive(BACK + rank, Used("train", 0, 0), pack(((3 * rank, 3 * rank + 2),)))
    for rank in ranks:
        group.hold(rank, 0, held(0, 0, weights))
    group.harness.wait(POLICY.missing)
    for rank in ranks:
        group.harness.receive(BACK + rank, Used("train", 0, 0), pack(((3 * rank, 3 * rank + 2),)))
    return [one for record in group.harness.records[-3:] if isinstance(record, Round) for one in record.used_up]


def uses(group: Group) -> Use:
    """Return what the coordinator knows of the data."""
    return group.harness.engine.control.groups["default"].leases.positions.uses["train"]


LATE = [
    Policy(1, 8, lateness=Lateness(percent=100.0, keeps=False)),
    Policy(1, 8, lateness=Lateness(percent=100.0, keeps=True)),
]
BOTH = pytest.mark.parametrize("policy", [POLICY, *LATE], ids=["all", "drop", "keep"])


@BOTH
@pytest.mark.parametrize("counted", [True, False])
def test_what_a_member_used_that_died_with_the_coordinator_is_used_up_if_it_counted(
    policy: Policy, counted: bool
) -> None:
    """Test that results of a round are told, and it is not written down."""
    group = users(policy)
    group.harness.restart()
    found = come_back(group, (0, 1), (1.0, 1.0, float(counted)))
    assert [(one.member_id, one.ranges) for one in found] == [
        (0, ((0, 2),)),
        (1, ((3, 5),)),
        *([(2, ((6, 8),))] if counted else []),
    ]
    assert uses(group).left == (((8, 10),) if counted else ((6, 10),)), "it does not hold the rest any more"
    assert uses(group).held == {0: ((2, 3),), 1: ((5, 6),)}
    books = group.harness.books.groups["default"].positions.uses["train"]
    assert (books.left, books.held, books.done) == (uses(group).left, uses(group).held, uses(group).done)


def test_what_a_member_used_is_known_if_coordinators_are_lost_again_and_others_are_left_out_meanwhile() -> None:
    group = users()
    group.harness.restart()
    group.resume(0)
    group.harness.wait(POLICY.missing)
    group.harness.wait(POLICY.missing)
    assert uses(group).used == {(0, 0): ((0, 2),), (0, ~1): ((3, 5),), (0, ~2): ((6, 8),)}
    group.harness.restart()
    assert uses(group).used == {(0, 0): ((0, 2),), (0, ~1): ((3, 5),), (0, ~2): ((6, 8),)}
    assert uses(group).left == ((5, 6), (8, 10))
    found = come_back(group, (0,), (1.0, 0.0, 1.0))
    assert [one.member_id for one in found] == [0, 2]
    assert uses(group).left == ((3, 6), (8, 10))


def test_what_a_round_used_up_stays_so_if_members_have_not_heard_that_it_is_over_and_one_is_gone() -> None:
    """Test that a round is written down, the coordinator is lost, and with it a member that counted."""
    group = users()
    group.harness.answer(group.harness.reduces[0])
    assert uses(group).done == ((0, 2), (3, 5), (6, 8))
    for _ in range(2):
        group.harness.restart()
        come_back(group, (0, 1), (1.0, 1.0, 1.0))
        assert uses(group).done == ((0, 2), (3, 5), (6, 8))
        assert uses(group).left == ((8, 10),)
        assert uses(group).held == {0: ((2, 3),), 1: ((5, 6),)}


def test_what_was_used_in_a_later_round_by_a_member_that_is_gone_is_left_if_the_group_goes_back() -> None:
    """Test that one member alone was in round 1."""
    group = users()
    group.harness.answer(group.harness.reduces[0])
    group.harness.receive(SEATS + 2, Used("train", 0, 1), pack(((8, 9),)))
    group.harness.restart()
    assert uses(group).used == {(1, 2): ((8, 9),)}
    come_back(group, (0, 1), (1.0, 1.0, 1.0))
    assert uses(group).used == {}
    assert uses(group).left == ((8, 10),)


def test_what_members_use_is_written_once_and_only_where_the_group_survives_its_coordinator() -> None:
    group = users()
    written = [record for record in group.harness.records if isinstance(record, UsedRecord)]
    assert written == [
        UsedRecord("default", "train", rank, 0, 0, ((3 * rank, 3 * rank + 2),), False) for rank in range(3)
    ]
    assert all(len(encode(record)[1]) < 64 for record in written)
    group.harness.receive(SEATS, Used("train", 0, 0), pack(((0, 2),)))
    group.harness.receive(SEATS, Used("train", 0, 0), pack(((0, 1),)))
    last = [record for record in group.harness.records if isinstance(record, UsedRecord)][3:]
    assert [record.ranges for record in last] == [((0, 1),)]
    group.harness.restart()
    assert uses(group).held[0] == ((1, 3),)

    other = Harness({"default": 1})
    other.assemble(1, PLAN)
    other.receive(SEATS, Register("train", 10, 17, True, 0, 0), b"")
    other.receive(SEATS, Claim("train", 1, 0, 4, 0))
    commands = other.receive(SEATS, Used("train", 0, 0), pack(((0, 2),)))
    assert not any(isinstance(command, Record) for command in commands)


def test_a_plan_that_was_agreed_on_and_not_told_is_told() -> None:
    group = Group()
    group.harness.restart()
    group.resume(0, plan="")
    group.resume(1)

    group.harness.receive(BACK, Propose(PLAN.hash), PLAN.encoded)

    assert group.told(0) == [Resumed(2, 2), Agreed(PLAN.hash, 0)]


def test_memberships_that_a_member_may_not_have_heard_of_are_said_again() -> None:
    group = Group(3)
    group.harness.leave(2)
    group.harness.restart()

    group.resume(0)
    group.resume(1, epoch=2)

    news = group.told(0)[1]
    assert isinstance(news, Membership)
    assert (news.epoch, news.member_ids, news.names) == (2, (0, 1), ("w0", "w1"))
    assert group.told(1) == [Resumed(2, 3)]


def test_a_departure_that_was_never_written_down_is_found_out_and_epochs_do_not_go_back() -> None:
    """Test a full disk when the last member died. The others ended the round, and then their coordinator died."""
    group = Group(3, plan_of(4))
    written = deepcopy(group.harness.books)
    group.harness.lose(2, ended=True)
    for rank in (0, 1):
        group.harness.push(rank, bucket(0), ONE)
    group.harness.answer(group.harness.reduces[0])
    assert all(group.harness.sent(rank)[-1] == (RoundDone(0, 2), []) for rank in (0, 1))
    group.harness.books = written
    group.harness.restart()
    assert group.harness.group()["epoch"] == 1

    for rank in (0, 1):
        group.resume(rank, epoch=2)
        group.hold(rank, 1, held(0, 0))
    assert group.state() == "recovering", "a member may be alive that was never told that it is out"
    group.harness.wait(POLICY.missing)

    for rank in (0, 1):
        told = group.told(rank)
        news = [message for message in told if isinstance(message, Membership)]
        assert [one.member_ids for one in news] == [(0, 1, 2), (0, 1)]
        assert 2 < news[0].epoch < news[1].epoch
        assert isinstance(told[-1], Standing)
    members = group.harness.group()["members"]
    assert [member["name"] for member in members] == ["w0", "w1"]
    for rank in (0, 1):
        group.harness.receive(BACK + rank, Push(bucket(1), 0, 1.0, True, all_reduce(4)), ONE)
    group.harness.answer(group.harness.reduces[-1])
    assert RoundDone(1, news[1].epoch) in group.told(0)
    assert [record.epoch for record in group.harness.records if isinstance(record, Epoch)][-2:] == [
        one.epoch for one in news
    ]


def test_a_learner_of_an_unwritten_time_has_to_join_again_and_the_others_go_on() -> None:
    group = Group()
    group.harness.restart()
    group.harness.receive(BACK + 2, Resume("default", 2, "its token", 2, PLAN.hash))
    for rank in (0, 1):
        group.resume(rank, epoch=2)
        group.hold(rank, 0)

    error = group.refusal(2)
    assert isinstance(error, LeftOutError)
    assert "this worker, with member id 2, came back to group 'default' when the others had gone on" in error.message
    for rank in (0, 1):
        assert isinstance(group.told(rank)[-1], Standing)
    assert group.state() == "active"
    assert group.harness.group()["epoch"] > 2


def test_a_group_to_which_no_member_comes_back_ends() -> None:
    group = Group()
    group.harness.restart()
    assert group.state() == "suspended"

    group.harness.wait(POLICY.reconnect)

    assert group.harness.engine.snapshot(0.0)["groups"] == {}
    group.resume(0)
    assert isinstance(group.refusal(0), JoinRefusedError)
    group.harness.restart()
    assert group.harness.engine.control.groups == {}, "that was written down, too"


def test_a_member_that_returns_twice_in_one_recovery_waits_no_longer_for_the_dead() -> None:
    group = Group(2)
    group.harness.lose(0)
    group.harness.lose(1)
    for _ in range(2):
        group.resume(0)
        group.hold(0, 0)
        group.harness.feed(Disconnected(BACK, "connection reset"))
    group.resume(0)
    group.hold(0, 0)
    assert not any(isinstance(message, Standing) for message in group.told(0))

    group.harness.wait(POLICY.missing)

    assert isinstance(group.told(0)[-1], Standing)
    assert group.state() == "active"


def test_in_a_pause_the_wait_for_workers_stops_while_no_member_is_there() -> None:
    """Test that the last one has as long to return as any, and then the group's timeout for others to come."""
    policy = Policy(2, 3)
    assert policy.reconnect > TIMEOUT
    group = Group(policy=policy)
    group.harness.leave(1)
    group.harness.push(0, bucket(0, 0), ONE)
    group.harness.push(0, bucket(0, 1), ONE)
    while group.harness.reduces:
        group.harness.answer(group.harness.reduces.pop())
    assert group.state() == "paused"
    group.harness.lose(0)
    group.harness.wait(TIMEOUT + 1)
    group.resume(0)
    group.hold(0, 0, held(0, 0), held(0, 1))
    assert group.told(0)
    assert group.state() == "paused"
    group.harness.wait(TIMEOUT - 1)
    assert group.state() == "paused"
    group.harness.wait(1)
    assert "waited 10 s for workers after round 0" in group.refusal(0).message


def test_members_that_are_back_do_not_wait_long_for_the_others() -> None:
    group = Group(3)
    group.harness.restart()
    group.resume(0)
    group.resume(1)
    group.hold(0, 0)
    group.hold(1, 0)

    group.harness.wait(POLICY.missing)

    resumed, news, standing = group.told(0)
    assert (resumed, standing) == (Resumed(2, 2), Standing(2, 0))
    assert isinstance(news, Membership)
    assert news.reason.startswith("'w2' (rank 2) was lost in round 0 (its connection broke, and it did not come back)")


def test_a_member_that_comes_back_and_then_says_nothing_is_left_out() -> None:
    group = Group()
    group.harness.restart()
    group.resume(0)
    group.resume(1)
    group.hold(1, 0)

    group.harness.wait(10.0)

    failure = next(message for message in group.told(0) if isinstance(message, Failure))
    assert "it did not say within 10 s what it holds" in failure.text
    assert Standing(2, 0) in group.told(1)


def test_members_hear_at_once_that_their_group_breaks_in_a_recovery() -> None:
    group = Group(3, policy=Policy(3, 3))
    group.harness.restart()
    for rank in range(3):
        group.resume(rank)
    group.hold(0, 0)
    group.told(0)

    group.harness.receive(BACK + 2, Leave("done"))

    assert group.state() == "broken"
    for rank in range(2):
        assert [type(error) for error in errors(group.told(rank))] == [WorkerLeftError], "it waits for Standing"


def errors(messages: list[object]) -> list[GradServerError]:
    return [one.exception() for one in messages if isinstance(one, Failure) and one.scope is Scope.CONNECTION]


def test_a_group_that_was_halted_stays_so() -> None:
    group = Group()
    group.harness.books.apply(Dated(0.0, Halt("default", 1, 0, "NonFiniteError", "NaN")))
    group.harness.restart()

    group.resume(0)

    assert isinstance(group.refusal(0), NonFiniteError)


@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize("is_halted", [True, False], ids=["halted", "over"])
def test_a_member_that_comes_back_hears_how_its_group_has_ended_from_each_coordinator(
    restarts: int, is_halted: bool
) -> None:
    group = Group()
    if is_halted:
        group.harness.lazy = True
        for rank in range(2):
            group.harness.push(rank, bucket(0, 0), ONE)
        group.harness.answer(group.harness.reduces.pop(), NonFinite(1, 0, "NaN"))
    group.harness.lose(1)
    group.harness.wait(POLICY.dead_after / 2)
    group.harness.leave(0)
    assert not group.harness.engine.control.groups
    for _ in range(restarts):
        group.harness.restart()

    group.resume(1)

    error = group.refusal(1)
    if is_halted:
        assert isinstance(error, NonFiniteError)
        assert "'w1' (rank 1) contributed NaN" in error.message
    else:
        assert isinstance(error, JoinRefusedError)
        left = "'w0' (rank 0) left (done), the last worker"
        assert f"no durable group 'default' to resume in, as {left}: call connect again" in error.message


def test_it_is_known_of_the_latest_groups_how_they_have_ended() -> None:
    harness = Fused({"default": Policy(1, 2)})
    for number in range(MAX_ENDED + 9):
        harness.join(SEATS, "w0", group=f"g{number}", world=1)
        harness.leave(0)
    kept = [f"g{number}" for number in range(9, MAX_ENDED + 9)]
    assert list(harness.engine.control._registry.ended) == kept
    for _ in range(2):
        harness.restart()
        assert list(harness.engine.control._registry.ended) == kept

    harness.join(SEATS, "w0", group=kept[0], world=1)

    assert list(harness.engine.control._registry.ended) == kept[1:], "a group of that name is there again"
    harness.restart()
    assert list(harness.engine.control._registry.ended) == kept[1:]


@pytest.mark.parametrize(
    "spans",
    [
        [Span(State.HELD, bucket(3, 2), 0, 1)],
        [Span(State.HELD, bucket(3, 0), 0, 2)],
        [Span(State.HELD, bucket(3)._replace(source=0, target=1), 0, 1)],
        [Span(State.LACKING, bucket(3, 0), 0, 1)],
        [Span(State.ELSEWHERE, bucket(3, 0), 0, 2)],
        [Span(State.ELSEWHERE, bucket(3, 2), 0, 1)],
        [Span(State.ELSEWHERE, bucket(3)._replace(stream=1), 0, 1)],
        [Span(State.LACKING, bucket(3)._replace(stream=1), 0, 2**32 - 1)],
        [Span(State.HELD, bucket(3)._replace(stream=2, source=0, target=2), 0, 1)],
    ],
)
def test_an_impossible_inventory_costs_its_sender_the_connection(spans: list[Span]) -> None:
    group = Group(3)
    group.harness.restart()
    for rank in range(3):
        group.resume(rank)
    group.told(1)

    group.hold(1, 3, *spans)

    assert isinstance(group.refusal(1), ProtocolError)
    assert group.harness.group()["members"] == [
        {"rank": 0, "name": "w0", "seat": 0},
        {"rank": 1, "name": "w2", "seat": 2},
    ]


def test_what_was_not_asked_for_is_refused_or_passed_over() -> None:
    group = Group()
    group.harness.receive(SEATS, Holding(MAX_COUNTER, 0, 1.0), b"")
    assert isinstance(group.harness.refusal(SEATS), ProtocolError)
    group.harness.receive(SEATS + 1, Held(1, bucket(0), 0, 1.0, False))
    assert SEATS + 1 not in group.harness.closed
    group.harness.receive(SEATS + 9, Holding(1, 0, 1.0), b"")
    assert isinstance(group.harness.refusal(SEATS + 9), ProtocolError)


def test_a_data_shard_that_is_given_up_for_what_it_sent_is_waited_for_from_then_on() -> None:
    shard, harness = 1, Fused({"default": POLICY})
    harness.receive(shard, Enlist("tcp://10.0.0.2:7411", 1.0))
    for rank in range(2):
        harness.join(SEATS + rank, f"w{rank}", rank=rank, world=2)
    harness.now += 10 * TIMEOUT  # in which control heard of nothing

    harness.feed(Garbled(shard, MalformedMessageError("no message")))

    assert harness.wait(0.0) == []
    assert harness.engine.next_deadline() == harness.now + HIRE_SECONDS
    assert harness.group()["broken"] is None


def test_a_donor_may_send_the_rest_of_a_state_when_two_learners_have_gone() -> None:
    """Test a worker that is lost, joins anew, and is lost again while the state for the first one is on its way."""
    group = Group(1)
    harness, late = group.harness, SEATS + 5
    harness.receive(SEATS, Serve())
    harness.join(late, "late")
    harness.receive(late, Propose(PLAN.hash), PLAN.encoded)
    harness.receive(late, Enter(0, False))
    for part in (0, 1):
        harness.push(0, bucket(0, part), ONE)
    while harness.reduces:
        harness.answer(harness.reduces.pop(0))
    (done,) = harness.told(0, RoundDone)
    key = ExchangeKey(Stream.TRANSFER, 0, STATE_TAG + done.transfers[0].number, 0, done.transfers[0].learner)
    operation = Operation(Kind.TRANSFER, Op.NONE, UINT8, 3 * SLICE_BYTES)
    harness.push(0, key, bytes(SLICE_BYTES), operation=operation)

    harness.feed(Disconnected(late, "it died"))
    harness.join(late + 1, "late")
    harness.feed(Disconnected(late + 1, "it died, too"))
    for index in (1, 2):
        harness.push(0, key, bytes(SLICE_BYTES), index=index)

    assert group.state() == "active"
    assert SEATS not in harness.closed


def test_what_is_called_again_is_called_in_the_epoch_of_its_round_also_if_a_learner_became_a_member() -> None:
    """Test a recovery in the first round of a learner: it is a member from then on, and has no part in the call."""
    group = Group(2)
    harness, late = group.harness, SEATS + 5
    harness.receive(SEATS, Serve())
    harness.join(late, "late")
    harness.receive(late, Propose(PLAN.hash), PLAN.encoded)
    harness.receive(late, Enter(0, False))
    for number in (0, 1):
        for rank, part in product(range(2), range(2)):
            harness.push(rank, bucket(number, part), ONE)
        while harness.reduces:
            harness.answer(harness.reduces.pop(0))
        if number == 0:
            harness.receive(late, Ready(1))
    harness.feed(Disconnected(SEATS, "reset"))
    group.resume(0)
    key, epoch = collective(0, 2), harness.group()["epoch"]
    assert epoch > 1, "the learner is a member"
    harness.inbox.clear()
    group.hold(0, 2, Span(State.CHANGED, key, 0, 1))
    group.hold(1, 2, Span(State.LACKING, key, 0, 1), connection=SEATS)
    group.hold(5, 2, connection=SEATS)

    (failure, _) = group.told(1, connection=SEATS)
    assert isinstance(failure, Failure)
    error = failure.exception()
    assert isinstance(error, MembershipChangedError)
    assert error.epoch == 1
    gather = Operation(Kind.ALL_GATHER, Op.NONE, FLOAT32, 4)
    harness.receive(BACK, Push(collective(1, 2), 0, 1.0, True, gather, epoch=epoch), ONE)
    (failure,) = group.told(0)[-1:]
    assert isinstance(failure, Failure)
    assert failure.fields == {"epoch": 1}
    harness.receive(SEATS + 1, Push(collective(1, 2), 0, 1.0, True, gather, epoch=error.epoch), ONE)
    for connection in (BACK, SEATS + 1):
        harness.receive(connection, Push(collective(2, 2), 0, 1.0, True, gather, epoch=error.epoch), ONE)
    assert [reduce.key for reduce in harness.reduces] == [collective(2, 2)]


def test_nothing_is_unread_for_a_member_that_is_away() -> None:
    group = Group(3, policy=Policy(1, 3, backlog=8, lateness=Lateness(backup=1, grace=0.0)))
    harness = group.harness
    harness.feed(Disconnected(SEATS + 2, "reset", False))

    for number, part, rank in product(range(3), range(2), range(2)):
        harness.push(rank, bucket(number, part), floats(1, 2, 3, 4))
        while harness.reduces:
            commands = harness.answer(harness.reduces.pop(0))
            assert not [command for command in commands if isinstance(command, Close)], "it is evicted"

    assert len(harness.told(0, RoundDone)) == 3
    assert harness.engine.data.groups["default"].listeners.rounds == {0: 0, 1: 0, 2: 0}


def test_a_member_that_is_away_can_have_read_too_little_at_a_data_shard() -> None:
    group = Group(3)
    harness = group.harness
    harness.feed(Disconnected(SEATS + 2, "reset", False))

    harness.engine.control.heed(Behind("default", 2, 0), harness.now, effects := Effects())

    assert not [command for command in effects.commands if isinstance(command, Close)], "of a connection that broke"
    with pytest.raises(LeftOutError):
        check(harness.engine.control.groups["default"], Resume("default", 2, group.welcomes[2].token, 1, ""), {})


def test_a_member_that_asks_for_a_sub_group_again_gets_its_welcome_or_hears_that_it_was_left_out() -> None:
    group, branch = Group(policy=Policy(1, 2)), BACK + 10
    harness, asked = group.harness, Split("default", 1, (0, 1), TIMEOUT)

    def ask(base: int, message: Split) -> list[object]:
        nonlocal branch
        branch += 1
        harness.feed(Branched(branch, base, message))
        return [said for said, _ in harness.inbox[branch]]

    assert ask(SEATS, asked) == []
    (welcome,) = ask(SEATS + 1, asked)
    assert isinstance(welcome, Welcome)
    for connection in (branch - 1, SEATS):
        harness.feed(Disconnected(connection, "reset"))
    group.resume(0)

    (again,) = ask(BACK, replace(asked, again=True))
    assert isinstance(again, Welcome)
    assert (again.group, again.rank, again.epoch) == (welcome.group, 0, welcome.epoch)
    assert harness.closed[-1] == branch, "it resumes on another branch"
    assert ask(BACK, replace(asked, again=True, after=welcome.epoch)) == [], "another one, which waits for the other"
    harness.feed(Disconnected(branch, "closed"))

    harness.wait(POLICY.dead_after)  # without Resume
    (failure,) = ask(BACK, replace(asked, again=True))
    assert isinstance(failure, Failure)
    assert isinstance(failure.exception(), LeftOutError)
    assert ask(BACK, asked) == [], "another one"
