"""Messages at their largest: in as large a group as there can be, with names as long as it takes, all can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.control.group import Group
from gradserver.engine.control.joining import check_applicant
from gradserver.engine.data_records import Committed
from gradserver.engine.policy import Policy
from gradserver.engine.records import Epoch, Round, RoundRecord, decode as read_record, encode as write_record
from gradserver.protocol import wire
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import ERRORS, GradServerError, InvalidArgumentError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation
from gradserver.protocol.limits import (
    MAX_CLAIMED,
    MAX_COUNTER,
    MAX_DATA,
    MAX_DEVICES,
    MAX_LABEL,
    MAX_LIST,
    MAX_NAME_BYTES,
    MAX_NUMEL,
    MAX_PACE,
    MAX_PLANE_REASON,
    MAX_PROOF_BYTES,
    MAX_RATE,
    MAX_SEED,
    MAX_SHARDS,
    MAX_SLICES,
    MAX_STALENESS,
    MAX_TEXT,
    MAX_TIMEOUT,
    MAX_TOKEN,
    MAX_TROUBLE,
    MAX_URL,
    MAX_WEIGHT,
    MAX_WORLD_SIZE,
    PROBE_BYTES,
)
from gradserver.protocol.message_family import message as message_family
from gradserver.protocol.messages import (
    Agreed,
    Attend,
    Attended,
    BePresent,
    Enlist,
    Enlisted,
    Enter,
    Entered,
    Failure,
    Follow,
    Granted,
    Inquire,
    Join,
    Leave,
    Membership,
    MemoryAt,
    Missing,
    Notice,
    Opened,
    Opens,
    Ordered,
    Paced,
    Ping,
    Place,
    Present,
    Probe,
    Probed,
    Propose,
    Push,
    Ready,
    Reported,
    RequestRound,
    Result,
    RoundDone,
    Scope,
    Serve,
    ShareMemory,
    Split,
    StateFailed,
    Status,
    StatusRequest,
    Steps,
    Taken,
    Transfer,
    Welcome,
)
from gradserver.protocol.messages.leases import Claim, Claimed, Located, Register, Used
from gradserver.protocol.messages.recovery import Fetch, Held, Holding, Resume, Resumed, Standing
from gradserver.protocol.messages.waiting import MAX_WAIT, MAX_WAITS, Blocked, Recheck
from gradserver.protocol.offers import Device, Offer, pack_offers
from gradserver.protocol.planes import IN_PROCESS
from gradserver.protocol.slicing import MAX_GRAIN
from tests.engine_harness import SEATS, Harness, bucket, floats, plan_of

LONG = "w" * MAX_NAME_BYTES
WIDE = "\N{GRINNING FACE}"
"""Four bytes, and one character."""
TEXT = WIDE * MAX_TEXT
KEY = ExchangeKey(2, MAX_COUNTER, MAX_COUNTER, MAX_WORLD_SIZE - 1, MAX_WORLD_SIZE - 1)
URLS = ("u" * MAX_URL,) * (MAX_SHARDS - 1)
TOKEN = "t" * MAX_TOKEN
ALL = tuple(range(MAX_WORLD_SIZE))
WEIGHTS = (MAX_WEIGHT,) * MAX_WORLD_SIZE
SQUARES = (1.5,) * (2 * MAX_SLICES)
PLACE = Place(MAX_COUNTER, MAX_COUNTER)
LABEL = "l" * MAX_LABEL
DEVICES = (Device(LABEL, LABEL, MAX_COUNTER),) * MAX_DEVICES
FACTS = LABEL, LABEL, LABEL, (LABEL,) * 8, LABEL, LABEL, DEVICES, "t" * MAX_TROUBLE, "u" * MAX_URL
OFFER = Offer(IN_PROCESS, IN_PROCESS, *FACTS)._replace(rate=MAX_RATE, trip=MAX_TIMEOUT)
REASON = WIDE * (MAX_PLANE_REASON // len(WIDE.encode()))
OPERATION = Operation(Kind.ALL_REDUCE, Op.PRODUCT, FLOAT32, MAX_NUMEL, MAX_WORLD_SIZE - 1)


def longest_name(world: int, filler: str = "w") -> str:
    """Return the longest name that a member of an elastic group of up to so many workers can have."""
    for length in range(MAX_NAME_BYTES, 0, -1):
        join = Join("g", (filler * length)[:length], -1, 0, 5.0)
        group = Group(join.group, Policy(1, world))
        try:
            check_applicant(group, join, 0.0)
        except InvalidArgumentError:
            continue
        return join.name
    raise AssertionError


def largest(world: int, name: str) -> list[tuple[Any, int]]:
    """Return each message at its worst in a group of so many workers with such names; and its payload's bytes."""
    member_ids, names = ALL[:world], (name,) * world
    transfers = tuple(Transfer(MAX_COUNTER, MAX_WORLD_SIZE - 1, member_id) for member_id in ALL)
    shards = (URLS, (MAX_RATE,) * MAX_SHARDS, TOKEN)
    last = MAX_WORLD_SIZE - 1
    told = sum(map(len, pack_offers((OFFER,) * world)))
    return [
        (Failure(Scope.DATA, max(ERRORS, key=len), TEXT, {"data": TEXT, "missing": (TEXT,) * 32}, KEY), -1),
        (Join(TEXT, TEXT, last, MAX_WORLD_SIZE, MAX_TIMEOUT, OFFER), -1),
        (
            Welcome(
                *(
                    LONG,
                    last,
                    MAX_COUNTER,
                    MAX_COUNTER,
                    names,
                    *shards,
                    member_ids,
                    True,
                    MAX_COUNTER,
                    MAX_COUNTER,
                    True,
                ),
                late="keep",
                timeout=MAX_TIMEOUT,
                nonfinite="leave-out",
                needs_all=True,
                plane=IN_PROCESS,
                plane_reason=REASON,
                demanded=True,
                mode="bounded",
                staleness=MAX_STALENESS,
                damping="inverse",
                places=MAX_WORLD_SIZE,
                grain=MAX_GRAIN,
            ),
            told,
        ),
        (
            Membership(
                *(MAX_COUNTER, member_ids, names, WIDE * 1000, True, member_ids, MAX_COUNTER, IN_PROCESS, REASON)
            ),
            told,
        ),
        (RoundDone(MAX_COUNTER, MAX_COUNTER, transfers), -1),
        (Push(KEY, MAX_COUNTER, MAX_WEIGHT, True, OPERATION, MAX_SLICES, PLACE, MAX_COUNTER, PLACE), -1),
        (
            Result(
                KEY, MAX_COUNTER, 2e33, True, MAX_SLICES, True, True, ALL, WEIGHTS, ALL, SQUARES, bytes(MAX_PROOF_BYTES)
            ),
            -1,
        ),
        (Held(MAX_COUNTER, KEY, MAX_COUNTER, 2e33, True, ALL, WEIGHTS, SQUARES[:2], bytes(MAX_PROOF_BYTES)), 1),
        (Propose(TEXT, MAX_CLAIMED, TEXT, (MAX_COUNTER,) * MAX_LIST, MAX_COUNTER), 1),
        (Agreed(TEXT, MAX_COUNTER, MAX_COUNTER), 1),
        (Opens(MAX_CLAIMED, MAX_COUNTER), -1),
        (Follow(MAX_CLAIMED), -1),
        (Opened(MAX_COUNTER, MAX_COUNTER, index=MAX_COUNTER), -1),
        (Steps(MAX_CLAIMED, MAX_COUNTER, MAX_COUNTER, MAX_COUNTER), -1),
        (Inquire(KEY), -1),
        (Missing(KEY, (f"{LONG!r} (rank {last})",) * 32), -1),
        (Leave(TEXT, True), -1),
        (Probe(), PROBE_BYTES),
        (Probed(), -1),
        (Ping(), -1),
        (StatusRequest(), -1),
        (Status(), 1),
        (ShareMemory(), -1),
        (MemoryAt(TEXT, TEXT), -1),
        (Enlist(TEXT, MAX_RATE), -1),
        (Enlisted(MAX_COUNTER, True), -1),
        (Ordered(), 1),
        (Reported(), 1),
        (Attend(TEXT, MAX_COUNTER, last, TEXT), -1),
        (Attended(), -1),
        (Resume(TEXT, last, TEXT, MAX_CLAIMED, TOKEN, True), -1),
        (Resumed(MAX_COUNTER, MAX_COUNTER, URLS), -1),
        (Holding(MAX_COUNTER, MAX_CLAIMED, MAX_WEIGHT), 1),
        (Fetch(MAX_COUNTER, KEY, MAX_COUNTER), -1),
        (Standing(MAX_COUNTER, MAX_COUNTER), -1),
        (Taken(MAX_COUNTER), -1),
        (Register(LONG, MAX_NUMEL, MAX_SEED, True, MAX_CLAIMED, MAX_CLAIMED), 16),
        (Located(LONG, MAX_SEED), 16),
        (Claim(LONG, MAX_COUNTER, MAX_CLAIMED, MAX_NUMEL, MAX_CLAIMED), -1),
        (Claimed(LONG, MAX_COUNTER, MAX_SEED, True), 16),
        (Used(LONG, MAX_CLAIMED, MAX_CLAIMED), 16),
        (Serve(), -1),
        (Notice("ü" * MAX_TEXT), -1),
        (Paced(MAX_PACE, "samples", 1.0, MAX_COUNTER), -1),
        (Split(TEXT, MAX_CLAIMED, member_ids, MAX_TIMEOUT, True, True, MAX_COUNTER), -1),
        (Enter(MAX_COUNTER, True), -1),
        (Ready(MAX_COUNTER), -1),
        (Entered(MAX_COUNTER), -1),
        (RequestRound(MAX_CLAIMED, MAX_CLAIMED, True, True), -1),
        (Granted(MAX_COUNTER, True, MAX_COUNTER), -1),
        (StateFailed(MAX_COUNTER, TEXT), -1),
        (
            Blocked(
                MAX_COUNTER,
                MAX_COUNTER,
                (5,) * MAX_WAITS,
                (TEXT[:MAX_WAIT],) * MAX_WAITS,
                (TEXT[:MAX_WAIT],) * MAX_WAITS,
            ),
            -1,
        ),
        (Recheck(MAX_COUNTER), -1),
        (BePresent(TOKEN, MAX_TIMEOUT), -1),
        (Present(TOKEN), -1),
    ]


worlds = st.sampled_from([1, 2, 46, 256, 400, 500, MAX_WORLD_SIZE]) | st.integers(1, MAX_WORLD_SIZE)


@given(worlds, st.sampled_from(["w", "\u00fc", WIDE]))
@settings(max_examples=15)
def test_each_message_at_its_largest_can_be_read(world: int, filler: str) -> None:
    name = longest_name(world, filler)
    sent = largest(world, name)
    assert {type(message) for message, _ in sent} == set(message_family.kinds.values()), "a message that is not tried"

    for message, payload in sent:
        read, _ = wire.decode([wire.encode(message), *([bytes(payload)] if payload >= 0 else [])])

        if isinstance(message, Failure):
            assert isinstance(read, Failure)
            assert read.text == message.text
        else:
            assert read == message


def test_names_may_be_as_long_as_their_limit_in_groups_of_hundreds() -> None:
    assert longest_name(440) == LONG
    assert len(longest_name(MAX_WORLD_SIZE)) >= 48


def test_a_later_worker_has_a_name_that_leaves_room_for_as_many_as_may_come() -> None:
    driven = Harness({"default": Policy(1, MAX_WORLD_SIZE)})
    driven.join(SEATS, "first", world=1)
    driven.join(SEATS + 1, LONG)

    error = driven.refusal(SEATS + 1)

    assert isinstance(error, InvalidArgumentError)
    assert f"in a group of {MAX_WORLD_SIZE}" in error.message


def pod(number: int) -> str:
    """Return a name as Kubernetes gives them: 76 characters."""
    return f"training-of-a-rather-large-model-{number:03}-7d9f8b6c5d-x2x9z.team-models.pod.local".ljust(76, "0")[:76]


def enter(driven: Harness, connections: Sequence[int]) -> None:
    """Let these join the running group, and wait for its state."""
    plan = plan_of(4)
    for connection in connections:
        driven.join(SEATS + connection, pod(connection))
        driven.receive(SEATS + connection, Propose(plan.hash), plan.encoded)
        driven.receive(SEATS + connection, Enter())


def test_as_many_as_there_can_be_come_back_at_once_and_all_are_told() -> None:
    world = 46
    driven = Harness({"default": Policy(world, 64)})
    for rank in range(world):
        driven.join(SEATS + rank, pod(rank), rank=rank, world=world)
    driven.inbox.clear()
    driven.agree(plan_of(4), world)
    driven.receive(SEATS, Serve())
    for rank in range(1, world):
        driven.lose(rank)
    driven.push(0, bucket(0), floats(1, 2, 3, 4))
    back = range(100, 100 + world - 1)
    enter(driven, back)
    for number in range(1, world):
        driven.receive(SEATS + back[number - 1], Ready(number))

    for connection in (0, *back):
        driven.push(connection, bucket(1), floats(1, 2, 3, 4))

    (news,) = [message for message, _ in driven.sent(0) if isinstance(message, Membership) and not message.lost]
    assert len(news.names) == world
    assert "and 29 more joined in round 1" in news.reason
    assert not driven.closed


def test_what_all_members_used_of_all_data_can_be_written_in_one_record() -> None:
    used = tuple(
        Committed(f"data {data}", 0, member_id, False, ((member_id, member_id + 1),))
        for data in range(MAX_DATA)
        for member_id in range(MAX_WORLD_SIZE)
    )
    record = Round("g", 1, RoundRecord(3, (1.0,) * MAX_WORLD_SIZE, 0.0, 1.0, 0), used)

    assert read_record(*write_record(record)) == record


def test_the_members_of_the_largest_group_can_be_written_down() -> None:
    epoch = Epoch(LONG, MAX_COUNTER, MAX_COUNTER, tuple((member_id, LONG) for member_id in ALL), TEXT)

    assert read_record(*write_record(epoch)) == epoch


@pytest.mark.parametrize("fields", [{"round": 1 << 70}, {"missing": (TEXT,) * 100}, {"worker": TEXT}])
def test_an_error_is_told_whatever_is_in_it(fields: dict[str, Any]) -> None:
    error = GradServerError("what happened")
    error.fields.update(fields)

    told, _ = wire.decode([wire.encode(Failure.of(error, Scope.CONNECTION))])

    assert isinstance(told, Failure)
    assert told.text == "what happened"
