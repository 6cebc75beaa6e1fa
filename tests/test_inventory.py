"""Tests of what a data shard takes from inventories: which section a round was of, and which members lack results."""

from __future__ import annotations

import pytest

from gradserver.engine.data.half import Data
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import Member
from gradserver.engine.orders import OpenGroup, Recover, SetPlan
from gradserver.engine.policy import Lateness
from gradserver.engine.reports import Absent, CaughtUp
from gradserver.protocol.limits import CREDIT_BYTES
from gradserver.protocol.messages.recovery import Holding, Span, State, pack_spans
from tests.engine_harness import TIMEOUT, bucket, modules_of, together

PLAN = together(modules_of((40, 70_000), (1, 1)))
"""Two sections, each of one bucket: a small one, which goes to the first shard, and a large one, which goes to both."""
SMALL, LARGE = 0, 1


class Shard:
    """The data half of shard 1, which asks two members what they hold: round 1 has begun, as far as control knows."""

    def __init__(self, lateness: Lateness | None) -> None:
        self.data, self.effects = Data(), Effects()
        founders = Member(10, "w0"), Member(11, "w1")
        more = {"rates": (1.0, 1.0), "shard": 1, "tokens": ("a", "b"), "lateness": lateness, "durable": True}
        self.obey(OpenGroup("g", 1, founders, CREDIT_BYTES, TIMEOUT, **more))  # type: ignore[arg-type]
        self.obey(SetPlan("g", PLAN, 0))
        self.obey(Recover("g", 2, 1, 1, 0))
        self.effects.take_reports()

    def obey(self, order: OpenGroup | SetPlan | Recover) -> None:
        """Carry out an order of control."""
        self.data.obey(order, 0.0, self.effects)

    def hold(self, member_id: int, number: int, *spans: Span) -> None:
        """Take what a member holds, which is in round ``number``."""
        self.data.hold(10 + member_id, Holding(2, number, 1.0), [pack_spans(spans)], 0.0, self.effects)


@pytest.fixture(params=[None, Lateness(quorum=1)], ids=["all", "quorum"])
def shard(request: pytest.FixtureRequest) -> Shard:
    return Shard(request.param)


def test_a_shard_without_a_part_of_a_round_leaves_out_no_member_that_holds_that_elsewhere(shard: Shard) -> None:
    shard.hold(0, 0, Span(State.ELSEWHERE, bucket(0, SMALL), 0, 1))
    shard.hold(1, 1)  # a learner, which has got the state behind round 0

    assert shard.effects.take_reports() == [CaughtUp("g", 1, (0,))]


def test_a_member_in_a_round_of_which_no_member_holds_anything_is_left_out(shard: Shard) -> None:
    shard.hold(0, 0)
    shard.hold(1, 1)

    (report,) = shard.effects.take_reports()
    assert isinstance(report, Absent)
    assert report.member_id == 0
    assert "no member has round 0 for it any more" in report.error.message


def test_a_member_that_lacks_a_part_of_a_round_that_another_holds_elsewhere_is_left_out(shard: Shard) -> None:
    shard.hold(0, 0)
    shard.hold(1, 1, Span(State.ELSEWHERE, bucket(0, LARGE), 0, 1))

    (report,) = shard.effects.take_reports()
    assert isinstance(report, Absent)
