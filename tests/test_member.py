"""A member alone: events in, effects out, with no lock, thread, channel or clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import CollectiveMismatchError, GradServerError, LeftOutError, OutOfStepError
from gradserver.protocol.exchange import ExchangeKey, Op, Stream
from gradserver.protocol.limits import SLICE_BYTES
from gradserver.protocol.messages import (
    Agreed,
    Failure,
    Granted,
    Leave,
    Membership,
    Place,
    Push,
    Result,
    RoundDone,
    Scope,
    Taken,
    Welcome,
)
from gradserver.protocol.messages.recovery import Holding, Resumed, Span, State, unpack_spans
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.worker.member.effects import Complete, Log, Lose, Tell
from gradserver.worker.member.inventory import Inventory
from gradserver.worker.member.machine import Member
from gradserver.worker.member.recovery import Recovery
from gradserver.worker.member.regions import Regions
from gradserver.worker.member.retained import Kept, Retained
from gradserver.worker.member.slots import Slots
from gradserver.worker.member.waiter import NotFinite
from gradserver.worker.workspace import WORKSPACE

NAMES = ("w0", "w1", "w2")
ME = 1
CREDIT = 2 * SLICE_BYTES


class NoMemory:
    """Memory that is not shared."""

    def empty(self, _nbytes: int, /) -> Bytes | None:
        return None

    def place_of(self, _data: Bytes, _shard: int = 0, /) -> Place | None:
        return None


@dataclass(eq=False)
class Waiting:
    """A caller that waits. A member says when it is to go on, and never lets it go on itself."""

    weight: float = 0.0
    present: bool = False
    left_alone: tuple[tuple[int, int], ...] = ()
    not_finite: NotFinite | None = None
    squares: dict[int, tuple[float, ...]] = field(default_factory=dict)
    _open: bool = True
    _value: object = None

    def _complete(self, _error: GradServerError | None = None) -> None:
        raise AssertionError("a member completes nothing itself")


class Alone:
    """A member, rank 1 of three, with a plan of one bucket of so many slices."""

    def __init__(self, slices: int = 3, **welcome: object) -> None:
        self.member = Member(NoMemory(), WORKSPACE)
        welcome.setdefault("member_ids", tuple(range(len(NAMES))))
        self.member.welcomed(Welcome("group", ME, 7, CREDIT, NAMES, **welcome))  # type: ignore[arg-type]
        self.plan: Plan = simple_plan([("b0", slices * SLICE_BYTES)], UINT8, Op.SUM)
        proposed = Waiting()
        self.member.plans.propose(self.plan, False, proposed)
        self.member.agreed(Agreed(self.plan.hash, 0), ())
        assert self.member.effects.take() == [Complete(proposed, None, self.plan.each[0])]
        self.data = np.zeros(slices * SLICE_BYTES, np.uint8)

    def push(self) -> Waiting:
        member, waiter = self.member, Waiting()
        if not member.rounds.pushed:
            member.rounds.begin(0)
        key = member.enter_round(0)
        assert member.push(key, self.plan.buckets[0].operation, self.data, 1.0, True, waiter) == []
        return waiter

    def sends(self) -> list[int]:
        """Slices that may be sent now."""
        found = []
        while (push := self.member.exchanges.next_push()) is not None:
            assert type(push[0]) is Push
            found.append(push[0].slice)
        return found

    def answer(self, index: int, fill: int, round_number: int = 0, **more: object) -> None:
        """Take a result, as a session does."""
        result = Result(bucket(round_number), index, 3.0, True, **more)  # type: ignore[arg-type]
        payload = bytes([fill]) * SLICE_BYTES
        exchange = self.member.heard(result, payload, 0)
        if exchange is not None:
            exchange.write(result, payload)
            self.member.exchanges.settled(exchange, result, payload, 0)


def bucket(round_number: int) -> ExchangeKey:
    return ExchangeKey(Stream.BUCKET, round_number, 0)


def test_a_round_is_pushed_answered_and_finished() -> None:
    alone = Alone(slices=2)
    waiter = alone.push()

    assert alone.sends() == [0, 1]
    alone.answer(0, 5)
    assert alone.member.effects.take() == []
    alone.answer(1, 6)

    assert alone.member.effects.take() == [Complete(waiter)]
    assert (waiter.weight, waiter.present) == (3.0, True)
    assert alone.data[::SLICE_BYTES].tolist() == [5, 6]
    assert not alone.member.exchanges.is_busy
    alone.member.finish_round()
    assert alone.member.rounds.number == 1
    alone.push()
    assert alone.sends() == [0, 1]


def test_credit_bounds_what_may_be_sent() -> None:
    alone = Alone(slices=4)
    alone.push()

    assert alone.sends() == [0, 1]
    alone.answer(1, 0)
    assert alone.sends() == [2]
    alone.answer(0, 0)
    assert alone.sends() == [3]


def test_a_bucket_is_pushed_once_in_a_round() -> None:
    alone = Alone()
    alone.push()

    with pytest.raises(OutOfStepError, match="'b0' was already pushed in round 0"):
        alone.push()


def test_a_failure_ends_what_waits_for_it_and_frees_its_credit() -> None:
    alone = Alone(slices=2)
    waiter, error = alone.push(), CollectiveMismatchError("it does not fit")
    alone.sends()

    alone.member.exchanges.fail(bucket(0), error, 0)

    assert alone.member.effects.take() == [Complete(waiter, error)]
    alone.member.finish_round()
    alone.push()
    assert alone.sends() == [0, 1]


def test_a_late_member_sends_nothing_more_of_the_round() -> None:
    alone = Alone(slices=4, member_ids=(0, 1, 2), late="drop")
    alone.push()
    assert alone.sends() == [0, 1]

    alone.answer(0, 1, without=(ME,))

    assert alone.sends() == []
    for index in range(1, 4):
        alone.answer(index, 1, without=(ME,))
    assert not alone.member.exchanges.is_busy
    assert alone.data[::SLICE_BYTES].tolist() == [1] * 4


def test_a_member_that_stays_late_says_so_less_and_less_often() -> None:
    stragglers = Alone(slices=1, member_ids=(0, 1, 2), late="drop").member.stragglers
    said = []
    for count in range(1, 40):
        stragglers.note_late(0)
        said += [count for warning in stragglers.finish()[1:] if warning is not None]

    assert said == [8, 16, 32]


def test_a_member_without_room_for_results_that_come_unasked_leaves() -> None:
    alone = Alone(slices=1, member_ids=(0, 1, 2), late="drop")
    alone.member.stragglers.backlog.limit = 2 * SLICE_BYTES

    for number in range(3):
        alone.answer(0, 0, number)

    told = [effect.message for effect in alone.member.effects.pending if isinstance(effect, Tell)]
    assert [type(message) for message in told] == [Taken, Taken, Taken, Leave]
    lost = alone.member.effects.take()[-1]
    assert isinstance(lost, Lose)
    assert isinstance(lost.error, LeftOutError)


def test_the_lowest_rank_logs_a_plane_that_changes() -> None:
    alone = Alone(slices=1, member_ids=(0, 1, 2))
    alone.member.effects.take()
    news = Membership(8, (1, 2), ("w1", "w2"), "w0 left", False, plane="direct", plane_reason="all have one")
    alone.member.membership_told(news)

    logged = [effect.text % effect.arguments for effect in alone.member.effects.take() if isinstance(effect, Log)]
    assert logged[0] == "group 'group': w0 left"
    assert logged[1:] == ["group 'group': from membership epoch 8 on the plane is direct, because all have one"]


def test_a_membership_is_in_force_behind_the_round_that_names_it() -> None:
    alone = Alone(slices=1, member_ids=(0, 1, 2))
    alone.member.membership_told(Membership(8, (1, 2), ("w1", "w2"), "w0 left", False))
    alone.push()
    alone.sends()
    alone.answer(0, 0)
    waits = Waiting()
    assert alone.member.rounds.announced.wait_for_round(0, waits) is waits
    alone.member.effects.take()

    alone.member.round_done(RoundDone(0, 8))

    assert alone.member.effects.take() == [Complete(waits)]
    assert alone.member.identity.membership.rank == 1
    assert alone.member.adopt(alone.member.rounds.announced.epoch_after(0), 0) is not None
    assert (alone.member.identity.membership.rank, alone.member.identity.member_id) == (0, ME)


class Durable(Alone):
    """A member of a durable group."""

    def __init__(self, slices: int, **welcome: object) -> None:
        super().__init__(slices, durable=True, token="secret", member_ids=(0, 1, 2), **welcome)
        inventory = Inventory(
            self.member.identity, self.member.rounds, Regions(lambda _nbytes: None, lambda _data: None)
        )
        self.recovery = Recovery(self.member, inventory)
        memory = NoMemory()
        self.member.exchanges.endure(memory, Slots(memory), inventory)

    def holds(self) -> tuple[Holding, list[Span]]:
        ((_, holding, spans),) = self.recovery.holdings()
        return holding, unpack_spans(spans)


def test_in_a_recovery_it_says_what_it_holds_and_pushes_again_what_has_no_result() -> None:
    durable = Durable(slices=2)
    durable.push()
    assert durable.sends() == [0, 1]
    durable.answer(1, 9, weights=(1.0, 1.0, 1.0))
    primary = durable.member.exchanges.shards[0]

    durable.recovery.suspend()
    assert durable.sends() == []
    resuming, standing = Waiting(), Waiting()
    durable.recovery.resume(resuming)
    durable.recovery.hold(primary)
    assert not durable.recovery.resumed(Resumed(1, 1), 0), "it says first what has no answer"
    assert durable.member.effects.take() == [Complete(resuming, None, Resumed(1, 1))]
    durable.recovery.restate(standing)
    holding, spans = durable.holds()

    assert holding == Holding(1, 0, 1.0)
    assert [(span.state, span.first, span.stop) for span in spans] == [(State.HELD, 1, 2)]
    assert durable.recovery.holdings() == [], "that is said once"
    assert durable.recovery.stands(primary, 0)
    assert durable.member.effects.take() == [Complete(standing, None, 1)]
    assert durable.sends() == [0]
    durable.answer(0, 8, weights=(1.0, 1.0, 1.0))
    assert [type(effect) for effect in durable.member.effects.take()] == [Complete]
    assert durable.data[::SLICE_BYTES].tolist() == [8, 9]


def test_nothing_is_pushed_on_a_new_connection_also_if_the_last_one_broke_in_a_recovery() -> None:
    durable = Durable(slices=1)
    durable.push()
    durable.recovery.suspend()
    durable.recovery.resume(Waiting())
    durable.recovery.stands(durable.member.exchanges.shards[0], 0)

    durable.recovery.resume(Waiting())
    assert durable.sends() == []


@pytest.mark.parametrize(("number", "is_said"), [(0, True), (1, True), (2, False)])
def test_a_refusal_is_said_again_to_a_shard_that_stands_in_this_round_or_the_one_before(
    number: int, is_said: bool
) -> None:
    """Test a member in round 1. A shard that stands in round 2 has all of this one's results."""
    durable = Durable(slices=1)
    durable.member.rounds.go_on_from(1)
    durable.recovery.suspend()
    durable.member.refuse(0)
    said = [Tell(Push(bucket(1), 0, 0.0, False), 0)]
    assert durable.member.effects.take() == said, "the channel drops it, as the shard is held"

    durable.recovery.stands(durable.member.exchanges.shards[0], number)
    assert durable.member.effects.take() == said * is_said


def test_a_member_that_was_told_that_a_round_is_void_says_so_once_when_it_begins_the_round_again() -> None:
    """Test a word that comes a round before: what said it may be lost before any other member hears."""
    member = Alone(slices=1).member
    void = Failure(Scope.EXCHANGE, "RoundVoidError", "refused", {}, bucket(1))
    member.told(void, ())
    member.rounds.go_on_from(1)
    assert member.rounds.begin_direct(0, Waiting()) is not None
    assert member.effects.take() == []

    member.begin_again()
    assert member.effects.take() == [Tell(Push(bucket(1), 0, 0.0, False), 0)]
    member.begin_again()
    assert member.effects.take() == [], "over the coordinator, nothing is refused"
    member.finish_round()
    member.rounds.begin_direct(0, Waiting())
    member.refuse(0)
    member.effects.take()
    member.begin_again()
    assert member.effects.take() == [], "it was said"


class LateAlone(Durable):
    """The same, in a group that closes rounds without late members."""

    def __init__(self, slices: int) -> None:
        super().__init__(slices, late="keep")

    def recover(self, generation: int) -> tuple[Holding, list[Span]]:
        """Begin a recovery."""
        self.recovery.resume(Waiting())
        self.recovery.hold(self.member.exchanges.shards[0])
        self.recovery.resumed(Resumed(1, generation), 0)
        return self.holds()

    def held(self, spans: list[Span]) -> list[tuple[int, int]]:
        """Return rounds and slices."""
        return sorted((span.key.number, index) for span in spans for index in range(span.first, span.stop))


def test_a_late_member_says_what_it_holds_of_rounds_to_come_and_forgets_those_that_are_made_again() -> None:
    late = LateAlone(slices=2)
    for number in (0, 1, 2):
        late.answer(0, number + 1, number, without=(ME,))
        if number < 2:
            late.answer(1, number + 1, number, without=(ME,))
            late.member.round_done(RoundDone(number, 7))

    holding, spans = late.recover(1)
    assert holding.round == 2, "the first of which it lacks something"
    assert late.held(spans) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]

    assert late.recovery.stands(late.member.exchanges.shards[0], 1)  # those that had round 1 are gone
    holding, spans = late.recover(2)
    assert holding.round == 1, "round 1 is over when that is told again"
    assert late.held(spans) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_results_are_kept_for_late_members_until_one_lacks_nobody() -> None:
    retained = Retained(CREDIT)
    retained.forget_buckets(3 * SLICE_BYTES)

    def keep(number: int, *without: int) -> list[int]:
        result = Result(bucket(number), 0, 3.0, True, without=without)
        retained.keep_slice(0, Kept(result, bytes(SLICE_BYTES)), number)
        return [n for n in range(10) if retained.find(bucket(n), 0) is not None]

    assert keep(0) == [0]
    assert keep(1) == [1], "nobody can lack what was before"
    assert keep(2, 0) == [1, 2]
    assert keep(3, 0) == [1, 2, 3]
    assert keep(4, 0) == [1, 2, 3, 4]
    assert keep(5, 0) == [2, 3, 4, 5], "three are all that there is room for, beside the latest"
    retained.forget_behind(4, shard=1)
    assert [n for n in range(10) if retained.find(bucket(n), 0) is not None] == [2, 3, 4, 5]
    retained.forget_behind(3, shard=0)
    assert [n for n in range(10) if retained.find(bucket(n), 0) is not None] == [2, 3]


def test_results_that_all_members_have_applied_are_not_kept_where_no_round_has_all() -> None:
    durable = Durable(slices=1, mode="async")
    inventory = durable.member.exchanges.inventory
    assert inventory is not None
    inventory.retained.forget_buckets(9 * SLICE_BYTES)
    for number in range(4):
        result = Result(bucket(number), 0, 3.0, True, without=(0,))
        inventory.retained.keep_slice(0, Kept(result, bytes(SLICE_BYTES)), number)

    durable.member.told(Granted(4, applied=2), ())

    assert [n for n in range(10) if inventory.retained.find(bucket(n), 0) is not None] == [2, 3]
