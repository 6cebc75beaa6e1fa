"""Tests of the wire: any bytes give a message or a ProtocolError, at a bounded cost."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    LimitExceededError,
    MalformedMessageError,
    ProtocolError,
    VersionMismatchError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import (
    KIB,
    MAX_COUNTER,
    MAX_DECODING_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_LIST,
    MAX_NUMEL,
    MAX_TEXT,
    MAX_WORLD_SIZE,
    MIB,
    PROTOCOL_VERSION,
    RUN_BYTES,
    SLICE_BYTES,
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
    Message,
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
from gradserver.protocol.messages.recovery import MAX_SPANS_BYTES, Fetch, Held, Holding, Resume, Resumed, Standing
from gradserver.protocol.messages.waiting import Blocked, Recheck
from gradserver.protocol.offers import Device, Offer
from gradserver.protocol.wire import decode, encode
from tests.declarations import ALL_MESSAGES
from tests.memory import Measured, memory_of

PREFIX = b"GS" + bytes([PROTOCOL_VERSION])
KEY = ExchangeKey(Stream.BUCKET, 3, 7)
NO_OFFER = ["auto", "tcp", "", "", "", [], "", "", [], "", "", 0.0, 0.0]
DEVICE = Device("NVIDIA H100", "GPU-0123", 80 * 1024**3)
OFFER = Offer("direct", "shm", "node-1", "ab", "2.11.0", ("gloo", "nccl"), "2.27.3", "580.65", (DEVICE,), "", "n:1")
OPERATION = Operation(Kind.BROADCAST, Op.NONE, FLOAT32, 5, 1)

# ── every message there can be, the edges of the limits included ──────────────────────────────────────

messages: st.SearchStrategy[tuple[Message, list[bytes]]] = st.one_of(list(ALL_MESSAGES.values()))

SAMPLES: list[tuple[Message, list[bytes]]] = [
    (Failure(Scope.EXCHANGE, "WorkerLostError", "gone", {"rank": 3, "worker": "w3", "more": ("a", "b")}, KEY), []),
    (Join("default", "w0", -1, 4, 60.0), []),
    (Join("default", "w0", -1, 4, 60.0, OFFER), []),
    (
        Welcome("default", 1, 5, 1 << 24, ("w0", "w1"), plane="direct", plane_reason="'w0' demands it", demanded=True),
        [],
    ),
    (Membership(6, (0, 2), ("w0", "w2"), "'w1' left", False, plane="shm", plane_reason="'w2' has no torch"), [b"told"]),
    (Welcome("default", 1, 5, 1 << 24, ("w0", "w1")), []),
    (Welcome("default", 1, 5, 1 << 24, ("w0", "w1"), member_ids=(0, 2)), []),
    (Membership(6, (0, 2), ("w0", "w2"), "'w1' (rank 1) was lost in round 3 (it died); 2 workers go on", True), []),
    (Membership(6, (0, 2), ("w0", "w2"), "'w2' (rank 1) joined in round 3; 2 workers go on", False, (2,), 3), []),
    (RoundDone(211, 6, (Transfer(3, 0, 2),)), []),
    (Split("default", 5, (0, 2), 60.0), []),
    (Split("default", 5, (0, 2), 60.0, leaders=True), []),
    (Split("default", 5, (0, 2), 60.0, again=True, after=7), []),
    (Serve(), []),
    (Notice("its gradients are far off"), []),
    (Paced(31.5, "samples", 0.25, 3), []),
    (Enter(3), []),
    (Ready(3), []),
    (Entered(212), []),
    (RequestRound(212, 213, True), []),
    (RequestRound(212, 213, pushes=True), []),
    (Granted(213), []),
    (Granted(213, True, 210), []),
    (StateFailed(3, "no room"), []),
    (Propose("ab" * 32), [b"plan"]),
    (Agreed("ab" * 32, 12), []),
    (Propose("ab" * 32, 3, "cd" * 32, (0, 2)), [b"plan"]),
    (Agreed("ab" * 32, 12, 3), [b"plan"]),
    (Opens(7, 2), []),
    (Steps(7, 1, 3, 4), []),
    (Follow(7, 1), []),
    (Opened(7, 2, True, 3, 4, False, 5), []),
    (Push(KEY, 3, 2.5, True, None), [b"1234"]),
    (Push(ExchangeKey(Stream.COLLECTIVE, 3), 0, 0.0, False, OPERATION), []),
    (Result(KEY, 3, 5.0, True), [b"1234"]),
    (Result(KEY, 3, 5.0, True, squares=(2.5, -1e-17)), [b"1234"]),
    (Result(KEY, 3, 5.0, True, over=True, weights=(1.0, 4.0), squares=(math.inf, 0.0)), [b"1234"]),
    (Result(KEY, 0, 5.0, True, 2, True, squares=(2.5, 0.0, 1.5, 0.0)), []),
    (Inquire(KEY), []),
    (Missing(KEY, ("'w1' (rank 1)",)), []),
    (Blocked(7, 1, (0, 2), ("barrier", "the plan"), ("'w1' (rank 1)", "")), []),
    (Recheck(2), []),
    (Leave("done", True), []),
    (Probe(), [b"zeros"]),
    (Probed(), []),
    (Ping(), []),
    (StatusRequest(), []),
    (Status(), [b"{}"]),
    (ShareMemory(), []),
    (MemoryAt("gradserver-12", "ab" * 16), []),
    (Push(KEY, 0, 1.0, True, None, 100, Place(3, 4096)), []),
    (Push(KEY, 0, 1.0, True, None, 1, Place(3, 4096), 7), []),
    (Push(KEY, 0, 1.0, True, epoch=7), [b"x"]),
    (Result(KEY, 0, 4.0, True, 100, True), []),
    (Result(KEY, 0, 4.0, True, without=(1, 1023)), [b"x"]),
    (Result(KEY, 0, 0.0, False, weights=(1.0, -2.5), nonfinite=(1,)), []),
    (Result(KEY, 0, 1.0, True, nonfinite=(0, 1023)), [b"x"]),
    (Result(KEY, 0, 4.0, True, weights=(1.0, 0.0, 3.0)), [b"x"]),
    (Result(KEY, 0, 4.0, True, 2, True, False, (1,), (1.0, 0.0, 3.0)), []),
    (Result(KEY, 0, 4.0, True, over=True), [b"x"]),
    (Result(KEY, 0, 4.0, True, 2, True, over=True), []),
    (Result(KEY, 0, 0.0, False, over=True, without=(1,)), []),
    (Result(KEY, 0, 4.0, True, over=True, weights=(1.0, 3.0)), [b"x"]),
    (Result(KEY, 0, 1.0, True, over=True, nonfinite=(0,)), [b"x"]),
    (Taken(1 << 40), []),
    (BePresent("ab" * 32, 1.65), []),
    (Present("ab" * 32), []),
    (Welcome("default", 1, 5, 1 << 24, ("w0", "w1"), ("tcp://10.0.0.2:7411",), (0.0, 25.0), "ab" * 16), []),
    (Attend("default", 5, 1, "ab" * 16), []),
    (Attended(), []),
    (Enlist("tcp://10.0.0.2:7411", 25.0), []),
    (Enlist("tcp://10.0.0.2:7411"), []),
    (Enlisted(2), []),
    (Ordered(), [b"order"]),
    (Reported(), [b"report"]),
    (
        Welcome(
            "default", 1, 5, 1 << 24, ("w0", "w1"), member_ids=(0, 1), token="ab" * 16, durable=True, incarnation=3
        ),
        [],
    ),
    (Push(KEY, 0, 1.0, True, None, 1, Place(3, 4096), 0, Place(4, 4096)), []),
    (Resume("default", 2, "ab" * 16, 6, "cd" * 32), []),
    (Resumed(3, 7), []),
    (Holding(7, 211, 1.5), [b"spans"]),
    (Fetch(7, KEY, 3), []),
    (Held(7, KEY, 3, 5.0, True, (2,), (1.5, 3.5)), [b"1234"]),
    (Held(7, KEY, 3, 0.0, False), []),
    (Standing(7, 211), []),
    (Register("data", 50_000, 2**64 - 1, True, 3, 12), [b""]),
    (Located("data", 3), [bytes(8) + bytes([5, *bytes(7)])]),
    (Claim("data", 4, 3, 32, 12), []),
    (Claimed("data", 4, 3, False), [b""]),
    (Used("data", 3, 12), [bytes(8) + bytes([5, *bytes(7)])]),
]


def decodes_or_says_why(frames: Sequence[Buffer]) -> Message | None:
    """Decode, as every receiver does: a message comes out, or a ProtocolError that says something."""
    try:
        message, payloads = decode(frames)
    except ProtocolError as error:
        assert 10 < len(str(error)) < 400  # noqa: PT017 - both outcomes are right
        return None
    assert all(one is other for one, other in zip(payloads, frames[1:], strict=True))
    return message


def header(*values: object, version: int = PROTOCOL_VERSION) -> bytes:
    return b"GS" + bytes([version]) + bytes(msgpack.packb(values))


def result_of(weights: object) -> bytes:
    """Return a result in a durable group."""
    return header(6, [0, 0, 0, -1, -1], 0, 1.0, True, 1, False, False, [], weights)


# ── there and back ────────────────────────────────────────────────────────────────────────────────────


@given(messages)
def test_every_message_comes_back_as_it_was(sent: tuple[Message, list[bytes]]) -> None:
    message, payloads = sent

    again, buffers = decode([encode(message), *payloads])

    assert again == message
    assert type(again) is type(message)
    assert list(buffers) == payloads


def test_the_samples_are_one_of_each() -> None:
    assert {type(message) for message, _ in SAMPLES} == set(message_family.kinds.values())
    for message, payloads in SAMPLES:
        assert decode([encode(message), *payloads])[0] == message


def test_types_survive_the_wire() -> None:
    message, _ = decode([encode(Push(ExchangeKey(1, 2, 0, 3, 4), 0, 1.0, False, OPERATION))])

    assert isinstance(message, Push)
    assert isinstance(message.key, ExchangeKey)
    assert isinstance(message.operation, Operation)
    assert isinstance(message.operation.kind, Kind)
    assert isinstance(message.operation.op, Op)
    assert message.operation.dtype is FLOAT32


@pytest.mark.parametrize("frame_type", [bytes, bytearray, memoryview])
def test_payloads_are_the_very_buffers_that_came_in(frame_type: type[Buffer]) -> None:
    frames = [frame_type(encode(Push(KEY, 0))), frame_type(b"1234")]

    _, (payload,) = decode(frames)

    assert payload is frames[1]


def test_bit_patterns_of_nan_and_infinity_pass_unharmed() -> None:
    patterns = np.array([0x7FC00001, 0x7F800001, 0xFFC0DEAD, 0x7F800000, 0xFF800000, 0x80000000], np.uint32)

    _, (payload,) = decode([encode(Push(KEY, 0)), patterns.view(np.uint8).data])

    assert np.array_equal(np.frombuffer(payload, np.uint32), patterns)


# ── any bytes ─────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.binary(max_size=60), max_size=4))
@example([])
@example([b""])
@example([b"GS"])
@example([PREFIX])
@example([PREFIX + b"\x90"])
@example([PREFIX + b"\x91\xc0"])
@example([PREFIX + b"\x91\xff"])
@example([PREFIX + b"\x91\xcd\xff\xff"])
def test_any_bytes_give_a_message_or_an_error(frames: list[bytes]) -> None:
    decodes_or_says_why(frames)


@given(st.binary(max_size=300), st.lists(st.binary(max_size=3), max_size=2))
def test_any_bytes_behind_the_right_prefix_give_a_message_or_an_error(body: bytes, payloads: list[bytes]) -> None:
    decodes_or_says_why([PREFIX + body, *payloads])


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([0, 1, -1, 1.0, math.nan, math.inf, "w0", MAX_COUNTER + 1]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.integers(-1, 30), st.lists(json_like, max_size=6), st.lists(st.binary(max_size=3), max_size=2))
def test_any_values_for_fields_give_a_message_or_an_error(
    code: int, values: list[object], payloads: list[bytes]
) -> None:
    decodes_or_says_why([header(code, *values), *payloads])


@given(st.sampled_from(SAMPLES), st.data())
def test_any_value_for_one_field_gives_a_message_or_an_error(
    sample: tuple[Message, list[bytes]], data: st.DataObject
) -> None:
    message, payloads = sample
    values = msgpack.unpackb(encode(message)[3:])
    at = data.draw(st.integers(0, len(values) - 1))
    values[at] = data.draw(json_like)

    decodes_or_says_why([header(*values), *payloads])


@pytest.mark.parametrize(("message", "payloads"), SAMPLES, ids=lambda value: type(value).__name__)
def test_every_truncation_is_an_error(message: Message, payloads: list[bytes]) -> None:
    whole = encode(message)

    for length in range(len(whole)):
        with pytest.raises(MalformedMessageError):
            decode([whole[:length], *payloads])
    with pytest.raises(MalformedMessageError):
        decode([whole + b"\0", *payloads])


@pytest.mark.parametrize(("message", "payloads"), SAMPLES, ids=lambda value: type(value).__name__)
def test_every_wrong_byte_gives_another_message_or_an_error(message: Message, payloads: list[bytes]) -> None:
    whole = encode(message)

    for at in range(len(whole)):
        for change in (0x01, 0x10, 0x80, 0xFF, 0x5A):
            wrong = bytearray(whole)
            wrong[at] ^= change
            other = decodes_or_says_why([wrong, *payloads])
            assert repr(other) != repr(message), (at, change)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "without frames"),
        ([b"GET / HTTP/1.1\r\n"], "not a gradserver message: it begins with b'GET / HT'"),
        ([header(99)], "unknown message type 99"),
        ([header(-1)], "unknown message type -1"),
        ([header(11, 1)], "StatusRequest has 0 fields, got 1"),
        ([header(11), b""], "StatusRequest with 1 payloads; 0 to 0 go with it"),
        ([header(5, [0, 0, 0], 0, 1.0, True, None, 1, [0, 0]), b""], "announces a payload without one, or has one"),
        ([header(5, [0, 0, 0], 0, 1.0, True, None, 1, [0]), b""], "expected a place in shared memory"),
        ([header(5, [0, 0, 0], 0, 1.0, True, None, 0, [0, 0])], "expected an integer from 1"),
        ([header(6, [0, 0, 0], 0, 1.0), b""], "Result has 12 fields, got 3"),
        (
            [header(6, [0, 0, 0], 0, 1.0, True, 1, False, False, [], [], [], [-1.0, 0.0]), b""],
            "in pairs of which",
        ),
        ([header(6, [0, 0, 0], 0, 1.0, True, 1, False, False, [], [], [], [1.0]), b""], "in pairs of which"),
        ([header(6, [0, 0, 0], 0, 1.0, True, 1, False, False, [], [], [], 7), b""], "floating numbers, got 7"),
        ([result_of([1.0, math.nan]), b""], "expected a number from -1e.30 to 1e.30, got nan"),
        ([result_of([math.nan, 1.0]), b""], "expected a number from -1e.30 to 1e.30, got nan"),
        ([result_of([1.0, -1e31]), b""], "expected a number from -1e.30 to 1e.30, got -1e.31"),
        ([result_of([math.inf]), b""], "expected a number from -1e.30 to 1e.30, got inf"),
        ([result_of([1.0, 1]), b""], "expected a number from -1e.30 to 1e.30, got 1"),
        ([result_of([1.0, True]), b""], "expected a number from -1e.30 to 1e.30, got True"),
        ([result_of([1.0] * 1025), b""], "not msgpack|expected a list of at most 1024 items, got list of length 1025"),
        ([result_of(1.0), b""], "expected a list of at most 1024 items, got 1.0"),
        (
            [header(6, [0, 0, 0, -1, -1], 0, 1.0, True, True, False, False, [], [1.0]), b""],
            "expected an integer from 1 to",
        ),
        ([header(6, [0, 0, 0, -1, -1], 0, 1.0, True, 1, 0, False, [], [1.0]), b""], "expected true or false, got 0"),
        ([header(6, [0, 0, 0], 0, 1.0, True), b"", b""], "Result with 2 payloads; 0 to 1 go with it"),
        ([header(3, "hash", 0, "", [], 0)], "Propose with 0 payloads; 1 to 1"),
        ([header(5, [0, 0, 0], 0, 1.0, True, None)], "announces a payload without one"),
        ([header(5, [0, 0, 0], 0, 1.0, False, None), b"1234"], "announces a payload without one"),
        ([header(6, [0, 0, 0], 0, 1.0, True)], "announces a payload without one"),
        ([header(5, [0, 0, 0], 0, 1.0, False, None, 1, None, 0, [0, 9])], "a place for its result, and none for what"),
        ([header(27, 1, [0, 0, 0], 0, 1.0, True, [], [], [], b"")], "a Held that announces a payload without one"),
        (
            [header(27, 1, [0, 0, 0], 0, 1.0, False, [], [], [], b""), b"1"],
            "a Held that announces a payload without one",
        ),
        ([header(23, "g", 1024, "t", 0, "", False)], "expected an integer from 0 to 1023, got 1024"),
        ([header(25, 1, 2, 1.0)], "Holding with 0 payloads; 1 to 1 go with it"),
        ([header(6, [0, 0, 0], 0, 1.0, False), b"1234"], "announces a payload without one"),
        ([header(5, [0, 0, 0], 0, math.nan, False, None)], "expected a number from 0.0 to 1e.30, got nan"),
        ([header(5, [0, 0, 0], 0, -1.0, False, None)], "expected a number"),
        ([header(5, [0, 0, 0], 0, 1, False, None)], "expected a number"),
        ([header(5, [0, 0, 0], 0, 1.0, 0, None)], "expected true or false, got 0"),
        ([header(5, [0, 0, 0], True, 1.0, False, None)], "expected an integer from 0 to .*, got True"),
        ([header(5, [3, 0, 0], 0, 1.0, False, None)], "expected an integer from 0 to 2, got 3"),
        ([header(5, [0, 0], 0, 1.0, False, None)], "expected an exchange's key, got list of length 2"),
        ([header(5, [0, 0, 0], 0, 1.0, False, [10, 0, 0, 0, 0])], "no operation"),
        ([header(5, [0, 0, 0], 0, 1.0, False, [0, 0, 99, 0, 0])], "no operation"),
        ([header(5, [0, 0, 0], 0, 1.0, False, [0, [], {}, 0, 0])], "no operation"),
        ([header(5, [0, 0, 0], 0, 1.0, False, [0, 0, 0, MAX_NUMEL + 1, 0])], "expected an integer|no operation"),
        ([header(9, "x" * (MAX_TEXT + 1), False)], "expected text of at most 4096 characters, got str of length 4097"),
        ([header(9, b"", False)], "expected text of at most 4096 characters, got bytes of length 0"),
        ([header(0, 5, "E", "t", {}, None)], "expected an integer from 0 to 4, got 5"),
        ([header(0, 0, "E", "t", [], None)], "expected an error's fields"),
        ([header(0, 0, "E", "t", {"rank": 1.5}, None)], "expected text"),
        ([header(1, "g", "n", 1024, 0, 1.0, NO_OFFER, "")], "expected an integer from -1 to 1023, got 1024"),
        (
            [header(1, "g", "n", 0, 0, 1.0, ["nccl", *NO_OFFER[1:]], "")],
            "expected one of auto, tcp, .*, got str of length 4",
        ),
        (
            [header(1, "g", "n", 0, 0, 1.0, ["auto", "tcp", "\x1b[2J", *NO_OFFER[3:]], "")],
            "expected printable ASCII of at",
        ),
        (
            [header(1, "g", "n", 0, 0, 1.0, NO_OFFER[1:], "")],
            "expected the 13 fields of a Offer, got list of length 12",
        ),
        (
            [header(1, "g", "n", 0, 0, 1.0, [*NO_OFFER[:8], [["H100", "", 1]] * 17, *NO_OFFER[9:]], "")],
            "a list of at most 16 items",
        ),
    ],
)
def test_errors_say_what_is_wrong(frames: list[bytes], message: str) -> None:
    with pytest.raises(MalformedMessageError, match=message):
        decode(frames)


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("code", [5, 6, 7])
def test_every_part_of_a_key_has_its_range(code: int, at: int) -> None:
    rest = {5: (0, 1.0, False, None), 6: (0, 1.0, False), 7: ()}[code]
    highest = [max(Stream), MAX_COUNTER, MAX_COUNTER, MAX_WORLD_SIZE - 1, MAX_WORLD_SIZE - 1]
    lowest = [0, 0, 0, -1, -1]

    decode([header(code, highest, *rest)])
    decode([header(code, lowest, *rest)])
    for key, step in ((highest, 1), (lowest, -1)):
        beyond = [value + step * (place == at) for place, value in enumerate(key)]
        with pytest.raises(MalformedMessageError, match="expected an integer from"):
            decode([header(code, beyond, *rest)])


# ── other versions ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 255])
def test_another_version_is_named(version: int) -> None:
    expected = f"version {version}, this side version {PROTOCOL_VERSION}"

    for frames in (
        [header(1, "default", "w0", 0, 2, 60.0, version=version)],
        [header(200, "new", version=version)],
        [b"GS" + bytes([version]) + b"not msgpack at all \xc1"],
        [b"GS" + bytes([version])],
    ):
        with pytest.raises(VersionMismatchError, match=expected):
            decode(frames)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 255])
def test_a_failure_of_another_version_is_understood(version: int) -> None:
    sent = encode(Failure(Scope.CONNECTION, "WorkerLostError", "gone", {"rank": 1}))

    message, _ = decode([sent[:2] + bytes([version]) + sent[3:]])

    assert isinstance(message, Failure)
    assert isinstance(message.exception(), WorkerLostError)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────────


def of(kind: Message, *sizes: int) -> list[bytes]:
    return [encode(kind), *(bytes(size) for size in sizes)]


@pytest.mark.parametrize(
    ("frames", "fits"),
    [
        (of(Push(KEY, 0), RUN_BYTES), True),
        (of(Push(KEY, 0), RUN_BYTES + 1), False),
        (of(Push(KEY, 0, slices=4), RUN_BYTES), True),
        (of(Result(KEY, 0, 1.0, True), RUN_BYTES), True),
        (of(Result(KEY, 0, 1.0, True), RUN_BYTES + 1), False),
        (of(Propose("hash"), MAX_FRAME_BYTES), True),
        (of(Propose("hash"), MAX_FRAME_BYTES + 1), False),
        (of(Status(), MAX_FRAME_BYTES + 1), False),
        (of(Holding(1, 2, 1.0), MAX_SPANS_BYTES), True),
        (of(Holding(1, 2, 1.0), MAX_SPANS_BYTES + 1), False),
        (of(Held(1, KEY, 0, 1.0, True), SLICE_BYTES), True),
        (of(Held(1, KEY, 0, 1.0, True), SLICE_BYTES + 1), False),
        ([PREFIX + bytes(MAX_HEADER_BYTES)], False),
    ],
)
def test_what_is_over_a_limit_is_refused_and_what_is_just_below_it_is_not(frames: list[bytes], fits: bool) -> None:
    if fits:
        decode(frames)
    else:
        with pytest.raises(LimitExceededError, match="the limit is"):
            decode(frames)


def test_a_header_that_would_be_refused_is_not_sent() -> None:
    with pytest.raises(LimitExceededError, match="a Welcome header of .* bytes, the limit is 65536"):
        encode(Welcome("default", 0, 1, 1, ("x" * 100,) * MAX_WORLD_SIZE))


def test_a_failure_that_is_too_long_goes_without_its_facts() -> None:
    rocket = "\U0001f680" * MAX_TEXT  # 16 KiB

    message, _ = decode([encode(Failure(Scope.CONNECTION, "E", rocket, dict.fromkeys("abcd", rocket), KEY))])

    assert message == Failure(Scope.CONNECTION, "E", rocket, {}, KEY)


def array(items: Sequence[bytes]) -> bytes:
    return b"\xdc" + struct.pack(">H", len(items)) + b"".join(items)


DEEP = b"\xdc\x04\x00"  # an array that says it has 1024 items, and so takes 8 KiB before the first is read
BOMBS = {
    "arrays in arrays": b"\x91" * 65_000,
    "arrays that announce more than there is": DEEP * 21_000,
    "as many of them as can be nested": DEEP * 1023,
    "empty arrays": array([array([b"\x90"] * 1000)] * 65),
    "empty maps": array([array([b"\x80"] * 1000)] * 65),
    "short text": array([array([b"\xa2ab"] * 1000)] * 21),
    "integers": array([array([b"\xcd\x7f\x7f"] * 1000)] * 21),
    "extensions": array([array([b"\xc7\x00\x05"] * 1000)] * 21),
    "arrays of one, nested": array([b"\x91" * 900 + b"\x90"] * 72),
    "maps of one, nested": array([b"\x81\xa0" * 900 + b"\x80"] * 36),
    "nested arrays that lie, full of maps": DEEP * 100 + array([b"\x81\xa0" * 900 + b"\x80"] * 36),
    "maps full of maps": array([b"\xde\x00\x40" + b"".join(b"\xa1" + bytes([i]) + b"\x80" for i in range(64))] * 330),
    "text of 4 GiB": b"\x91\xdb\xff\xff\xff\xff" + b"x" * 60_000,
    "an array of 4 million": b"\xdd\x00\x40\x00\x00" + b"\x00" * 60_000,
    "arrays of 4 million, nested": b"\xdd\x00\x40\x00\x00" * 1000,
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff" + b"\x00" * 60_000,
    "a map of 4 billion": b"\x91\xdf\xff\xff\xff\xff" + b"\xa0\x00" * 30_000,
    "bytes of 4 GiB": b"\x91\xc6\xff\xff\xff\xff" + b"x" * 60_000,
    "an extension of 4 GiB": b"\x91\xc9\xff\xff\xff\xff\x05" + b"x" * 60_000,
    "a timestamp": b"\x91\xd7\xff" + bytes(8),
    "a large welcome": encode(Welcome("g", 0, 0, 0, ("ab",) * MAX_LIST))[3:],
    "a large missing": encode(Missing(KEY, ("x" * 59,) * MAX_LIST))[3:],
}


def memory_of_decoding(frames: list[bytes]) -> int:
    return memory_of(lambda: decodes_or_says_why(frames)).peak


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_header_takes_more_memory_than_the_limits_say(measured: Measured, bomb: str) -> None:
    frame = PREFIX + BOMBS[bomb]
    assert len(frame) <= MAX_HEADER_BYTES

    assert measured(memory_of_decoding, [frame]) <= MAX_DECODING_BYTES


def test_the_limit_of_memory_follows_from_the_other_limits() -> None:
    nesting, pointer, largest_object_per_byte = 1024, 8, 128

    assert nesting * MAX_LIST * pointer + MAX_HEADER_BYTES * largest_object_per_byte <= MAX_DECODING_BYTES
    assert MAX_DECODING_BYTES <= 16 * MIB


def test_a_frame_over_the_limit_is_not_even_looked_at(measured: Measured) -> None:
    frames = [PREFIX + BOMBS["empty maps"] + bytes(2 * MAX_HEADER_BYTES)]

    assert measured(memory_of_decoding, frames) < 16 * KIB
    assert measured(memory_of_decoding, [encode(Push(KEY, 0)), bytes(8 * MIB)]) < 8 * MIB + 64 * KIB


@pytest.mark.parametrize(("message", "payloads"), SAMPLES, ids=lambda value: type(value).__name__)
def test_an_ordinary_message_takes_next_to_nothing(measured: Measured, message: Message, payloads: list[bytes]) -> None:
    assert measured(memory_of_decoding, [encode(message), *payloads]) < 8 * KIB
