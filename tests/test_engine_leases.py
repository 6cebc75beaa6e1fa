"""Tests of control's answers about data: when a claim is answered, what is written first, and which are refused."""

from __future__ import annotations

import pytest

from gradserver.engine.commands import Command, Log, Record, Send
from gradserver.engine.data_records import Claim as HandedOut, Committed, Data
from gradserver.engine.policy import Policy, lateness_of
from gradserver.engine.records import Cut, Round
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import DisagreementError, GradServerError, MalformedMessageError, UnexpectedMessageError
from gradserver.protocol.exchange import Op
from gradserver.protocol.messages import Failure, Membership, Result, Scope
from gradserver.protocol.messages.leases import Claim, Claimed, Located, Register, Used
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.protocol.ranges import Ranges, count, pack, unpack
from tests.elastic_harness import Step
from tests.engine_harness import SEATS, Harness, bucket, floats, plan_of
from tests.sharded_crash_harness import Sharded
from tests.sharded_harness import ShardedHarness
from tests.test_shard_laws import small_shares
from tests.test_sharded_crash_laws import come_back, give_all, let_shards_report

REGISTER = Register("data", 10, 17, True, 0, 0)


@pytest.fixture(params=[2, Policy(1, 2)], ids=["fixed", "elastic"])
def harness(request: pytest.FixtureRequest) -> Harness:
    """Make two members that use the same ten samples."""
    found = Harness({"default": request.param})
    found.assemble(2, plan_of(3, 2))
    for rank in range(2):
        found.receive(SEATS + rank, REGISTER, b"")
        assert told(found, rank) == [(Located("data", 0), ())]
    return found


def told(harness: Harness, rank: int) -> list[tuple[object, Ranges]]:
    """Return what a member was told of data; all else is dropped."""
    return [
        (message, unpack(payloads[0]))
        for message, payloads in harness.sent(rank)
        if type(message) in (Located, Claimed)
    ]


def claim(harness: Harness, rank: int, number: int, wanted: int, epoch: int = 0, round_number: int = 0) -> Ranges:
    harness.receive(SEATS + rank, Claim("data", number, epoch, wanted, round_number))
    ((message, ranges),) = told(harness, rank)
    assert message in (Claimed("data", number, epoch, True), Claimed("data", number, epoch, False))
    return ranges


def is_finished(harness: Harness, rank: int, number: int, epoch: int = 0) -> bool:
    harness.receive(SEATS + rank, Claim("data", number, epoch, 0, 0))
    ((message, _),) = told(harness, rank)
    assert isinstance(message, Claimed)
    return message.finished


def use(harness: Harness, rank: int, round_number: int, ranges: Ranges) -> None:
    harness.receive(SEATS + rank, Used("data", 0, round_number), pack(ranges))


def begin(harness: Harness, rank: int, used: Ranges) -> None:
    """Have a member register, claim three samples, and say which it has used."""
    harness.receive(SEATS + rank, REGISTER, b"")
    harness.sent(rank)
    claim(harness, rank, 1, 3)
    use(harness, rank, 0, used)


def give(harness: Harness, rank: int, round_number: int, *parts: int) -> list[Command]:
    commands: list[Command] = []
    for part in parts or (0, 1):
        commands += harness.push(rank, bucket(round_number, part), floats(*[1.0] * (3 - part)))
    return commands


def records(commands: list[Command]) -> list[object]:
    return [command.record for command in commands if isinstance(command, Record)]


def test_what_is_handed_out_is_written_down_before_it_is_told(harness: Harness) -> None:
    commands = harness.receive(SEATS, Claim("data", 1, 0, 4, 0))
    assert commands[0] == Record(HandedOut("default", "data", 0, 1, 0, ((0, 4),)))
    assert isinstance(commands[1], Send)
    assert commands[1].message == Claimed("data", 1, 0, False)
    assert records(harness.receive(SEATS, Claim("data", 2, 0, 0, 0))) == [], "nothing was handed out"


def test_data_is_written_down_once() -> None:
    harness = Harness({"default": 2})
    harness.assemble(2)
    assert [type(record) for record in records(harness.receive(SEATS, REGISTER, b""))] == [Data]
    assert records(harness.receive(SEATS + 1, REGISTER, b"")) == []


def test_what_a_round_used_up_is_in_its_record(harness: Harness) -> None:
    claim(harness, 0, 1, 4)
    claim(harness, 1, 1, 8)
    use(harness, 0, 0, ((0, 3),))
    use(harness, 1, 0, ((4, 10),))
    give(harness, 0, 0)
    (written,) = records(give(harness, 1, 0))
    assert isinstance(written, Round)
    assert written.used_up == (Committed("data", 0, 0, False, ((0, 3),)), Committed("data", 0, 1, False, ((4, 10),)))
    assert harness.group()["data"] == {"data": {"epoch": 0, "length": 10, "left": 0, "held": 1}}
    assert not is_finished(harness, 1, 2)
    use(harness, 0, 1, ((3, 4),))
    give(harness, 0, 1), give(harness, 1, 1)
    assert is_finished(harness, 1, 3)
    assert claim(harness, 0, 2, 3, epoch=1) == ((0, 3),)
    assert is_finished(harness, 1, 4), "the epoch that it asks of is over"


def test_what_the_dead_held_is_claimed_by_the_others_and_what_it_used_counts_as_far_as_it_gave() -> None:
    harness = Harness({"default": Policy(1, 3)})
    harness.assemble(3, plan_of(3, 2))
    for rank in range(3):
        begin(harness, rank, ((3 * rank, 3 * rank + 2),))
    give(harness, 1, 0, 0)
    harness.lose(1)
    harness.lose(2)
    assert claim(harness, 0, 2, 9) == ((5, 6), (8, 10)), "but not what may have been used"
    (written,) = records(give(harness, 0, 0))
    assert isinstance(written, Round)
    assert written.used_up == (Committed("data", 0, 0, False, ((0, 2),)), Committed("data", 0, 1, True, ((3, 5),)))
    assert claim(harness, 0, 3, 9) == ((6, 8),), "a member that gave nothing used nothing"


def test_a_departed_member_of_which_only_the_word_before_the_means_counted_used_nothing() -> None:
    """Test local SGD's plan: a maximum, and then the means in which samples are."""
    harness = Harness({"default": Policy(1, 2)})
    word = simple_plan([("word", 3)], FLOAT32, Op.MAX)
    harness.assemble(2, Plan((*word.buckets, *plan_of(2).buckets)))
    for rank in range(2):
        begin(harness, rank, ((3 * rank, 3 * rank + 3),))
    give(harness, 1, 0, 0)
    harness.lose(1)
    (written,) = records(give(harness, 0, 0))
    assert isinstance(written, Round)
    assert written.used_up == (Committed("data", 0, 0, False, ((0, 3),)),)
    assert claim(harness, 0, 2, 9, round_number=1) == ((3, 10),)


def test_what_is_returned_is_written_down_before_it_is_told_and_others_get_it(harness: Harness) -> None:
    claim(harness, 0, 1, 4)
    commands = harness.receive(SEATS, Claim("data", 2, 0, 2, 0), pack(((1, 3),)))
    (written,) = records(commands)
    assert isinstance(written, Data)
    assert written.left == ((1, 3), (6, 10))
    assert isinstance(commands[1], Send)
    assert told(harness, 0) == [(Claimed("data", 2, 0, False), ((4, 6),))]
    (again,) = records(harness.receive(SEATS, Claim("data", 2, 0, 2, 0), pack(((1, 3),))))
    assert again == HandedOut("default", "data", 0, 2, 0, ((4, 6),)), "the same answer, and nothing is returned"
    assert told(harness, 0) == [(Claimed("data", 2, 0, False), ((4, 6),))]
    assert claim(harness, 1, 1, 3) == ((1, 3), (6, 7))


def late_of_three(late: str) -> Harness:
    """Make three members that use the same ten samples. A round is closed without one of them that is late."""
    harness = Harness({"default": Policy(3, 3, lateness=lateness_of(quorum=2, grace=0.1, late=late))})
    harness.assemble(3, plan_of(3, 2))
    for rank in range(3):
        harness.receive(SEATS + rank, REGISTER, b"")
        harness.sent(rank)
    return harness


@pytest.mark.parametrize("late", ["keep", "drop"])
def test_a_late_member_has_its_samples_until_it_uses_or_returns_them(late: str) -> None:
    harness = late_of_three(late)
    for rank in range(3):
        claim(harness, rank, 1, 3)
    for rank in range(3):
        use(harness, rank, 0, ((3 * rank, 3 * rank + 3),))
    give(harness, 0, 0), give(harness, 1, 0)
    (cut, over) = records(harness.wait(1.0))
    assert isinstance(cut, Cut)
    assert isinstance(over, Round)
    assert [one.member_id for one in over.used_up] == [0, 1]
    assert harness.group()["data"]["data"] == {"epoch": 0, "length": 10, "left": 1, "held": 3}
    if late == "keep":
        use(harness, 2, 1, ((6, 9),))
        written = [record for rank in range(3) for record in records(give(harness, rank, 1))]
        assert [one.ranges for record in written if isinstance(record, Round) for one in record.used_up] == [((6, 9),)]
    else:
        harness.receive(SEATS + 2, Claim("data", 2, 0, 0, 1), pack(((6, 9),)))
        assert told(harness, 2) == [(Claimed("data", 2, 0, False), ())]
        assert claim(harness, 0, 2, 9, round_number=1) == ((6, 10),)


def test_a_late_member_hears_that_it_is_behind_the_round_that_used_the_last_samples() -> None:
    """Test the question whether an epoch is finished. Of an epoch before, it is for all."""
    harness = late_of_three("keep")
    for rank in (0, 1):
        claim(harness, rank, 1, 5)
        use(harness, rank, 0, ((5 * rank, 5 * rank + 5),))
        give(harness, rank, 0)
    harness.wait(1.0)
    answers = [(rank, number) for rank, number in ((0, 1), (1, 1), (2, 0))]
    for rank, number in answers:
        harness.receive(SEATS + rank, Claim("data", 2, 0, 0, number))
    assert [told(harness, rank) for rank, _ in answers] == [
        [(Claimed("data", 2, 0, True), ())],
        [(Claimed("data", 2, 0, True), ())],
        [(Claimed("data", 2, 0, True, behind=True), ())],
    ]
    harness.receive(SEATS, Claim("data", 3, 1, 1, 1))
    assert told(harness, 0) == [(Claimed("data", 3, 1, False), ((0, 1),))]
    harness.receive(SEATS + 2, Claim("data", 3, 0, 0, 0))
    assert told(harness, 2) == [(Claimed("data", 3, 0, True), ())]


def test_a_round_waits_for_a_late_member_with_the_last_samples() -> None:
    harness = late_of_three("drop")
    claim(harness, 2, 1, 10)
    use(harness, 2, 0, ((0, 4),))
    give(harness, 0, 0), give(harness, 1, 0)
    commands = harness.wait(1.0)
    assert records(commands) == []
    (text,) = [command.text for command in commands if isinstance(command, Log)]
    assert "round 0 of group 'default' waits for 'w2' (rank 2)" in text
    assert text.endswith("No other worker has samples of epoch 0 of data 'data'")
    (written,) = records(give(harness, 2, 0))
    assert isinstance(written, Round)
    assert written.used_up == (Committed("data", 0, 2, False, ((0, 4),)),)


def test_rounds_without_an_update_are_told_with_what_they_wait_for() -> None:
    harness = Harness({"default": 2})
    harness.assemble(2, plan_of(3))
    for rank in range(2):
        harness.receive(SEATS + rank, REGISTER, b"")
        harness.sent(rank)
    claim(harness, 1, 1, 4)
    texts = list[str]()
    for number in range(60):
        commands = harness.wait(0.1)
        for rank in range(2):
            commands += harness.push(rank, bucket(number), weight=0.0)
        texts += [command.text for command in commands if isinstance(command, Log)]
    assert len(texts) == 2, "after 2 s and 4 s"
    assert texts[0].startswith(
        "group 'default' has made 21 rounds in 2.0 s without an update, as no worker has given a"
    )
    assert texts[0].endswith("of data 'data', epoch 0, 6 samples are left, and there are 4 at 'w1' (rank 1)")
    assert harness.group()["without_update"] == {"rounds": 60, "seconds": pytest.approx(5.9)}
    give(harness, 0, 60, 0), give(harness, 1, 60, 0)
    assert harness.group()["without_update"] is None


def test_a_claim_waits_for_the_rounds_before_it(harness: Harness) -> None:
    """Test with data shards elsewhere: a member may have the results of a round that control has not heard of."""
    harness.receive(SEATS, Claim("data", 1, 0, 4, 1))
    harness.receive(SEATS, Claim("data", 1, 0, 4, 1))  # as after its connection broke: that is no second question
    harness.receive(SEATS, Register("other", 3, 0, False, 0, 1), b"")
    assert told(harness, 0) == []
    give(harness, 0, 0), give(harness, 1, 0)
    assert told(harness, 0) == [(Claimed("data", 1, 0, False), ((0, 4),)), (Located("other", 0), ())]
    assert claim(harness, 0, 2, 4, round_number=1) == ((4, 8),)


def test_a_second_claim_before_the_answer_is_refused(harness: Harness) -> None:
    harness.receive(SEATS, Claim("data", 1, 0, 4, 1))
    harness.receive(SEATS, Claim("data", 2, 0, 4, 1))
    assert isinstance(harness.refusal(SEATS), UnexpectedMessageError)


def test_other_data_is_reported_to_the_claimant_and_costs_nothing_else(harness: Harness) -> None:
    harness.receive(SEATS + 1, Register("data", 11, 17, True, 0, 0), b"")
    ((failure, _),) = harness.sent(1)
    assert isinstance(failure, Failure)
    assert failure.scope is Scope.DATA
    assert failure.fields["data"] == "data"
    error = failure.exception()
    assert isinstance(error, DisagreementError)
    assert str(error).startswith(
        "'w1' (rank 1) uses data 'data' as 11 samples, shuffled with seed 17, and 'w0' (rank 0)"
    )
    assert claim(harness, 1, 1, 4) == ((0, 4),)


@pytest.mark.parametrize(
    ("message", "payload", "error"),
    [
        (Claim("strange", 1, 0, 4, 0), None, MalformedMessageError),
        (Used("strange", 0, 0), b"", MalformedMessageError),
        (Used("data", 0, 0), pack(((0, 1),)), MalformedMessageError),
        (Used("data", 0, 0), b"\x00" * 15, MalformedMessageError),
        (Register("data", 10, 17, True, 0, 0), pack(((9, 11),)), MalformedMessageError),
        (Register("da\nta", 10, 17, True, 0, 0), b"", GradServerError),
    ],
)
def test_what_no_correct_worker_says_costs_its_connection(
    harness: Harness, message: Claim | Used | Register, payload: bytes | None, error: type[GradServerError]
) -> None:
    harness.receive(SEATS, message, *([] if payload is None else [payload]))
    assert isinstance(harness.refusal(SEATS), error)


def test_positions_are_claimed_in_groups_with_rounds_only() -> None:
    harness = Harness({"default": 1})
    harness.assemble(1)
    harness.receive(SEATS, REGISTER, b"")
    harness.sent(0)
    harness.receive(SEATS, Claim("data", 1, 0, 4, 0))
    assert "in a group without a plan" in str(harness.refusal(SEATS))


@pytest.mark.parametrize("dies", [False, True])
def test_a_claim_waits_until_all_that_counted_have_said_what_they_used(dies: bool) -> None:
    """Test a coordinator of rate 0: a shard's report overtakes what members say."""
    harness = ShardedHarness({"default": Policy(1, 2)}, rates=(0.0, 1.0))
    harness.assemble(2, plan_of(3))
    for rank in range(2):
        harness.receive(SEATS + rank, REGISTER, b"")
        harness.sent(rank)
        claim(harness, rank, 1, 4)
    use(harness, 0, 0, ((0, 4),))
    for rank in range(2):
        harness.push_to(1, rank, bucket(0), floats(1.0, 1.0, 1.0))
    for rank in range(2):
        harness.told(rank, Result)
    harness.receive(SEATS, Claim("data", 2, 0, 0, 1))
    assert harness.silent(0, 1), "the round is over, and not all of its samples are known"
    if dies:
        harness.lose(1)
        harness.told(0, Membership)
    else:
        use(harness, 1, 0, ((4, 6),))
    assert {type(message) for message, _ in harness.inbox[SEATS]} == {Claimed}
    assert count(harness.engine.control.groups["default"].leases.positions.use("data").done) == (4 if dies else 6)


def test_samples_of_a_round_that_is_made_again_are_used_once() -> None:
    """Test that a data shard is lost with all results of a round that is written down."""
    with small_shares():
        cluster = Sharded(1, [4, 4], [Step(), Step(section=1), Step()], 0, (0.0, 1.0), sections=(1, 1))
        (member,) = cluster.members.values()
        used = Used("data", 0, 0), pack(((0, 3),))
        cluster.say_to(member, 0, REGISTER, b"")
        cluster.say_to(member, 0, Claim("data", 1, 0, 4, 0))
        assert [type(message) for message, _ in list(cluster.harness.waiting[member.lines[0]])[-2:]] == [
            Located,
            Claimed,
        ]
        for _ in range(2):
            cluster.harness.waiting[member.lines[0]].pop()
        positions = cluster.harness.engine.control.groups["default"].leases.positions
        cluster.say_to(member, 0, *used)
        give_all(cluster, member)
        let_shards_report(cluster)
        assert positions.use("data").done == ((0, 3),)

        come_back(cluster, member, (0, 1))
        cluster.settle()
        cluster.say_to(member, 0, *used)
        assert positions.use("data").used == {(0, 0): ((0, 3),)}
        cluster.run()
        assert positions.use("data").done == ((0, 3),)
        assert positions.use("data").held == {0: ((3, 4),)}
