"""Organs of a member, each alone: where it is known, which members it asks, and which states it sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import DisagreementError, RoundVoidError, WorkerLostError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream, layout_of
from gradserver.protocol.messages import (
    Attend,
    Attended,
    Failure,
    Inquire,
    Leave,
    Missing,
    RoundDone,
    Scope,
    Serve,
    Transfer,
)
from gradserver.protocol.messages.leases import Claim, Claimed, Used
from gradserver.protocol.ranges import Ranges, pack
from gradserver.worker.member.carryover import CarryOver, Contribution
from gradserver.worker.member.donor import Donor
from gradserver.worker.member.effects import Complete, Tell
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.rounds import Rounds
from tests.test_member import ME, Alone, Waiting, bucket

SHARDS: dict[str, Any] = {"shards": ("tcp://b", "tcp://c"), "rates": (1.0, 1.0, 1.0), "token": "secret"}


class Samples:
    """Data of which the same samples are used in each round."""

    name, epoch = "data", 0

    def use(self, _round_number: int) -> Ranges:
        return ((0, 4),)

    def repeats(self, _round_number: int) -> int:
        return -1

    def drop(self) -> None: ...

    def carry(self) -> None: ...

    def give_back(self) -> None: ...


def test_a_shard_lets_a_member_in_once_and_hears_of_a_recovery_by_its_number() -> None:
    member = Alone(**SHARDS).member
    first, second = Waiting(), Waiting()

    assert member.attachment.attend(1, 0, first) == Attend("group", 7, ME, "secret")
    assert member.attachment.attend(2, 9, second) == Attend("group", 9, ME, "secret")
    member.told_by(1, Attended())
    member.told_by(1, Attended())

    assert member.effects.take() == [Complete(first)]
    assert member.attachment.stop_attending() == [second]
    member.plans.withdraw()
    assert member.give_up() == [], "nothing waits for it any more"


def test_goodbye_is_said_to_shards_that_were_reached() -> None:
    member = Alone(**SHARDS).member
    for shard in (1, 2):
        member.attachment.attend(shard, 0, Waiting())
    shards = member.exchanges.shards
    shards[2].hold()

    assert member.attachment.reached(shards) == [1]
    leaving = Waiting()
    member.attachment.leave(1, leaving)
    member.told_by(2, Leave("", False))
    assert member.effects.take() == []
    member.told_by(1, Leave("", False))
    assert member.effects.take() == [Complete(leaving)]


def test_an_inquiry_goes_to_the_shard_of_the_exchange_and_has_one_answer() -> None:
    alone = Alone(slices=1)
    member, waiter = alone.member, Waiting()
    assert member.inquiries.ask(bucket(0), waiter) is None, "that is not under way"
    alone.push()

    assert member.inquiries.ask(bucket(0), waiter) == (Inquire(bucket(0)), 0)
    member.told_by(0, Missing(bucket(0), ("w2",)))
    member.told_by(0, Missing(bucket(0), ("w2",)))

    assert member.effects.take() == [Complete(waiter, None, ("w2",))]
    error = member.inquiries.overdue(bucket(0), alone.plan.buckets[0].operation, 5.0, ["w2"])
    assert error.message == "bucket 'b0' of round 0 is not done after 5 s; still missing: w2"
    assert (error.missing, error.bucket, error.round) == (("w2",), "b0", 0)


def test_an_overdue_exchange_names_ranks_and_not_member_ids() -> None:
    alone = Alone()
    identity, overdue = alone.member.identity, alone.member.inquiries.overdue
    identity.welcome = replace(identity.membership, rank=0, member_ids=(ME, 3, 7), names=("b", "c", "d"))
    gather = Operation(Kind.GATHER, Op.NONE, FLOAT32, 1, 7)
    transfer = Operation(Kind.TRANSFER, Op.NONE, FLOAT32, 1)

    assert "gather of float32[1] to rank 2 is" in overdue(ExchangeKey(Stream.COLLECTIVE, 0, 0), gather, 5.0, []).message
    said = overdue(ExchangeKey(Stream.TRANSFER, 0, 4, 7, 3), transfer, 5.0, []).message
    assert "from rank 2 to rank 1 (tag 4) is" in said


def test_a_state_is_that_of_one_boundary_and_a_recovery_voids_it() -> None:
    rounds = Rounds(Identity())
    rounds.go_on_from(3)
    donor = Donor(rounds)
    early, here, later = Transfer(1, ME, 5, False), Transfer(2, ME, 6, False), Transfer(3, ME, 7, False)
    for number, transfer in ((1, early), (2, here), (3, later)):
        donor.asked(RoundDone(number, 7, (transfer, Transfer(9, ME + 1, 8, False))), ME)

    wanted, refused = donor.take()
    assert wanted == [here]
    assert [(one.transfer, one.reason) for one in refused] == [
        (1, "its state is that after round 2, and that after round 1 is wanted")
    ]
    assert [transfer for _, transfer in donor.due] == [later]
    donor.check(here)
    donor.forget()
    assert donor.due == []
    with pytest.raises(WorkerLostError, match="has to join again"):
        donor.check(here)
    assert donor.serve() == Serve()
    assert donor.serve() is None, "it is said once"


def test_what_is_used_is_said_when_a_round_begins_and_again_on_a_new_connection() -> None:
    member = Alone().member
    member.plans.withdraw()
    member.leases.add(Samples())
    member.begin_round(0)
    used = Used("data", 0, 0), (pack(((0, 4),)),)
    assert member.effects.take() == [Tell(used[0], payloads=used[1])]
    asked = member.leases.ask(Claim("data", 1, 0, 4, 0), None, Waiting())
    assert member.again() == [used, (asked.message, ())]

    member.told(Claimed("data", 1, 0, True), (b"",))
    assert member.effects.take() == [Complete(asked.waiter, None, (Claimed("data", 1, 0, True), ()))]
    asked = member.leases.ask(Claim("data", 2, 0, 4, 0), None, Waiting())
    member.told(Failure(Scope.DATA, "DisagreementError", "no", {"data": "data"}), ())
    (ended,) = member.effects.take()
    assert isinstance(ended, Complete)
    assert ended.waiter is asked.waiter
    assert isinstance(ended.error, DisagreementError)
    member.finish_round()
    assert member.again() == [], "that round is over"


def test_words_about_commits_are_kept_for_their_rounds() -> None:
    """Test words about this round and the next, in any order, before the plan is known."""
    rounds, waiting = Alone().member.rounds, Waiting()
    this, following = (ExchangeKey(Stream.BUCKET, number, 1) for number in (0, 1))
    assert rounds.commit_failed(following, RoundVoidError("next")) is None
    assert rounds.commit_failed(this, RoundVoidError("this")) is None
    for number, text in enumerate(("this", "next")):
        why = rounds.begin_direct(1, waiting)
        assert why is not None
        assert why.message == text
        assert rounds.refused is None
        rounds.begin_again()
        assert rounds.refused == ExchangeKey(Stream.BUCKET, number, 1)
        rounds.finish()
    assert rounds.begin_direct(1, waiting) is None


@pytest.mark.parametrize(("number", "epoch", "is_void"), [(0, 8, True), (2, 8, True), (3, 8, False), (0, 7, False)])
def test_a_word_about_memberships_is_for_their_members_from_its_round_on(
    number: int, epoch: int, is_void: bool
) -> None:
    """Test a member of epoch 7 in round 2."""
    rounds, waiting = Alone().member.rounds, Waiting()
    rounds.go_on_from(2)
    assert rounds.begin_direct(1, waiting) is None
    told = rounds.commit_failed(ExchangeKey(Stream.BUCKET, number, 1), RoundVoidError("gone", epoch=epoch))
    assert told is (waiting if is_void else None)
    assert rounds.commit_failed(ExchangeKey(Stream.BUCKET, 0, 1), WorkerLostError("lost")) is waiting


# ── what a late worker keeps ──────────────────────────────────────────────────────────────────────────


def carried(carry: CarryOver, number: int, own: float, damps: bool = False) -> float:
    """Return what is given to round ``number`` with weight 1, if ``own`` is this worker's gradient."""
    data = np.array([own], np.float32)
    layout = layout_of(Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 1), 1)
    carry.add_to(0, data.view(np.uint8), 1.0, layout, FLOAT32, number=number, damps=damps)
    return float(data[0])


def kept(value: float, weight: float = 1.0) -> Contribution:
    return Contribution(weight, np.array([value], np.float32).view(np.uint8))


def test_the_age_of_what_is_kept_is_that_of_its_oldest_part() -> None:
    carry = CarryOver()
    carry.put(0, 0, kept(1.0), 4)
    assert carry.since == 4
    carried(carry, 5, 1.0)
    assert carry.since is None, "it is on its way"
    carry.put(0, 0, kept(2.0), 5)
    assert carry.since == 4, "it came too late again"
    carried(carry, 6, 1.0)
    carry.put(0, 0, kept(1.0), 8)
    assert carry.since == 8, "round 6 was in time"
    carry.forget()
    assert carry.since is None


def test_what_is_kept_is_damped_by_its_age() -> None:
    carry = CarryOver()
    carry.put(0, 0, kept(8.0), 3)
    assert carried(carry, 4, 0.0, damps=True) == (0.0 + 8.0 / 2) / 2
    carry.put(0, 0, kept(4.0), 4)  # what was given to round 4 is kept as it was given
    assert carried(carry, 6, 0.0, damps=True) == (0.0 + 4.0 * 2 / 4) / 2
    carry.put(0, 0, kept(8.0), 7)
    assert carried(carry, 8, 0.0) == 4.0
