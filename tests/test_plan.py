"""Plans: what makes one, the bytes of one, and where two differ."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from collections.abc import Callable

import pytest
from hypothesis import example, given, strategies as st

from gradserver.protocol.dtypes import BY_CODE, BY_NAME, FLOAT32, DType
from gradserver.protocol.errors import (
    InvalidArgumentError,
    LimitExceededError,
    MalformedMessageError,
    ProtocolError,
    UnsupportedOperationError,
)
from gradserver.protocol.exchange import Kind, Op, Operation
from gradserver.protocol.limits import (
    MAX_BUCKETS,
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    MAX_FRAME_BYTES,
    MAX_NUMEL,
    MAX_PLAN_BYTES,
    MAX_TEXT,
    MIB,
)
from gradserver.protocol.plan import Bucket, Component, Plan, decode_plan, simple_plan
from gradserver.protocol.plan_changes import first_difference
from tests.memory import Measured, memory_of

BFLOAT16 = BY_NAME["bfloat16"]
FLOATING = [dtype for dtype in BY_CODE.values() if dtype.kind == "f"]

shapes = st.lists(st.integers(0, 9) | st.integers(0, 1 << 20), max_size=3).map(tuple) | st.just((0, (1 << 64) - 1))
components = st.builds(Component, st.text(max_size=12), shapes).filter(lambda c: c.numel <= 1 << 44)
buckets = st.builds(
    Bucket,
    st.text(max_size=8),
    st.sampled_from(FLOATING),
    st.lists(components, max_size=4).map(tuple),
    st.sampled_from([op for op in Op if op not in (Op.NONE, Op.FRAMED)]),
)
plans = st.lists(buckets, min_size=1, max_size=4, unique_by=lambda b: b.key).map(lambda b: Plan(tuple(b)))


def transformer_block(hidden: int = 8, dtype: DType = FLOAT32, name: str = "block.0") -> Bucket:
    names = ("w_q", "w_k", "norm")
    shapes = ((hidden, hidden), (hidden, hidden), (hidden,))
    return Bucket(name, dtype, tuple(map(Component, names, shapes)))


# ── what a plan is ────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_knows_its_sizes_and_its_exchange() -> None:
    bucket = transformer_block(8)

    assert bucket.sizes == (64, 64, 8)
    assert bucket.numel == 136
    assert bucket.operation == Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 136)


def test_an_element_belongs_to_the_component_that_covers_it() -> None:
    bucket = transformer_block(8)
    names = [bucket.component_at(element).name for element in range(bucket.numel)]

    assert names == ["w_q"] * 64 + ["w_k"] * 64 + ["norm"] * 8
    with pytest.raises(InvalidArgumentError, match="has 136 elements, there is no element 136"):
        bucket.component_at(136)


def test_a_plan_finds_its_buckets_and_counts_its_bytes() -> None:
    plan = Plan((transformer_block(8), transformer_block(8, BFLOAT16, "head")))

    assert plan.index("head") == 1
    assert plan.nbytes == 136 * 4 + 136 * 2
    assert plan.size == "2 buckets, 816 bytes a round"
    with pytest.raises(InvalidArgumentError, match="no bucket 'tail'; it has"):
        plan.index("tail")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "1 to 163840 buckets, this one has 0"),
        (lambda: [Bucket("same", FLOAT32, ())] * 2, "two buckets called 'same'"),
        (lambda: [Bucket(str(i), FLOAT32, ()) for i in range(MAX_BUCKETS + 1)], "1 to 163840 buckets"),
        (lambda: [Bucket("b", FLOAT32, (Component("p", ()),) * (MAX_COMPONENTS + 1))], "at most 655360 parameters"),
        (lambda: [Bucket("b", FLOAT32, (), Op.NONE)], "bucket 'b' says no way"),
        (lambda: [Bucket("b", FLOAT32, (Component("p", (MAX_NUMEL + 1,)),))], "more than"),
        (lambda: [Bucket("b", BY_NAME["int32"], ())], "the mean of int32 is not an int32"),
    ],
)
def test_what_is_no_plan_is_refused(make: Callable[[], list[Bucket]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Plan(tuple(make()))


def test_the_last_two_of_the_most_buckets_may_be_the_ones_that_are_alike() -> None:
    keys = [str(number) for number in range(MAX_BUCKETS - 1)]

    with pytest.raises(InvalidArgumentError, match="two buckets called '163838'"):
        Plan(tuple(Bucket(key, FLOAT32, ()) for key in [*keys, keys[-1]]))


def test_a_plan_that_cannot_be_written_down_is_refused_where_it_was_made() -> None:
    long = "n" * (MAX_TEXT + 1)

    with pytest.raises(InvalidArgumentError, match="4097 bytes long, the limit is 4096"):
        _ = simple_plan([(long, 1)], FLOAT32).encoded
    with pytest.raises(InvalidArgumentError, match="65 dimensions, the limit is 64"):
        _ = Plan((Bucket("b", FLOAT32, (Component("p", (1,) * (MAX_DIMENSIONS + 1)),)),)).encoded


# ── its bytes ─────────────────────────────────────────────────────────────────────────────────────────


@given(plans)
def test_a_plan_comes_back_as_it_was(plan: Plan) -> None:
    again = decode_plan(memoryview(plan.encoded))

    assert again == plan
    assert again.encoded == plan.encoded
    assert plan.hash == hashlib.sha256(plan.encoded).hexdigest()


@given(plans, plans)
def test_hashes_are_equal_if_and_only_if_plans_are(one: Plan, other: Plan) -> None:
    assert (one.hash == other.hash) == (one == other)
    assert (first_difference(one, other) is None) == (one == other)
    assert first_difference(one, decode_plan(one.encoded)) is None


@given(plans)
def test_a_plan_cut_short_or_made_longer_is_malformed(plan: Plan) -> None:
    data = plan.encoded
    for length in {*range(min(len(data), 40)), len(data) // 2, len(data) - 1} - {len(data)}:
        with pytest.raises(MalformedMessageError):
            decode_plan(data[:length])
    with pytest.raises(MalformedMessageError, match="1 bytes behind the end"):
        decode_plan(data + b"\0")


def decodes_or_says_why(data: bytes) -> Plan | None:
    try:
        return decode_plan(data)
    except ProtocolError as error:
        assert str(error)  # noqa: PT017 - both outcomes are right
        return None


@given(plans, st.data())
def test_one_wrong_byte_gives_another_plan_or_an_error(plan: Plan, data: st.DataObject) -> None:
    wrong = bytearray(plan.encoded)
    at = data.draw(st.integers(0, len(wrong) - 1))
    wrong[at] ^= data.draw(st.integers(1, 255))

    other = decodes_or_says_why(bytes(wrong))

    assert other is None or (other != plan and other.encoded == bytes(wrong))


@given(st.binary(max_size=200))
@example(b"")
@example(struct.pack("<I", 1) + struct.pack("<H", 1) + b"\xff" + bytes(6))
@example(struct.pack("<I", 1) + struct.pack("<H", 0) + bytes([99, 1, 0, 0, 0, 0]))
def test_any_bytes_give_a_plan_or_an_error(data: bytes) -> None:
    decodes_or_says_why(data)


HEAD = struct.pack("<I", 1) + struct.pack("<H", 1) + b"b"


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (bytes(MAX_FRAME_BYTES + 1), LimitExceededError, "a plan of 4194305 bytes"),
        (struct.pack("<I", MAX_BUCKETS + 1), LimitExceededError, "163841 buckets"),
        (struct.pack("<I", MAX_BUCKETS), MalformedMessageError, "cut off"),
        (struct.pack("<IH", 1, MAX_TEXT + 1), LimitExceededError, "name of 4097 bytes"),
        (HEAD + struct.pack("<BBBBII", 0, 0, 1, 0, 0, MAX_COMPONENTS + 1), LimitExceededError, "655361 parameters"),
        (HEAD + struct.pack("<BBBBII", 0, 0, 1, 0, 0, MAX_COMPONENTS), MalformedMessageError, "cut off"),
        (HEAD + struct.pack("<BBBBIIHB", 0, 0, 1, 0, 0, 1, 0, 65), LimitExceededError, "65 dimensions"),
        (HEAD + struct.pack("<BBBBII", 99, 0, 1, 0, 0, 0), MalformedMessageError, "no valid plan"),
        (HEAD + struct.pack("<BBBBII", 1, 0, 1, 0, 0, 0), MalformedMessageError, "no bucket is that"),
        (HEAD + struct.pack("<BBBBII", 0, 99, 1, 0, 0, 0), MalformedMessageError, "no valid plan"),
        (HEAD + struct.pack("<BBBBII", 0, 0, 99, 0, 0, 0), MalformedMessageError, "no valid plan"),
        (HEAD + struct.pack("<BBBBII", 0, 0, 0, 0, 0, 0), MalformedMessageError, "says no way"),
        (HEAD + struct.pack("<BBBBII", 0, 7, 1, 0, 0, 0), MalformedMessageError, "mean of int32"),
        (HEAD + struct.pack("<BBBBII", 0, 0, 1, 99, 0, 0), MalformedMessageError, "no codec 99"),
        (HEAD + struct.pack("<BBBBII", 0, 0, 2, 1, 0, 0), MalformedMessageError, "only the mean of float32 can"),
        (HEAD + struct.pack("<BBBBIIHBQ", 0, 0, 1, 0, 0, 1, 0, 1, MAX_NUMEL + 1), MalformedMessageError, "more than"),
        (struct.pack("<I", 0), MalformedMessageError, "1 to 163840 buckets"),
    ],
)
def test_bad_bytes_are_told_apart(data: bytes, kind: type[ProtocolError], message: str) -> None:
    with pytest.raises(kind, match=message):
        decode_plan(data)


def test_a_large_plan_travels_packed() -> None:
    components = tuple(Component(f"model.layers.{number}.{'x' * 120}.weight", (3,)) for number in range(50_000))
    plan = Plan((Bucket("b", FLOAT32, components),))

    assert len(plan.encoded) < MAX_FRAME_BYTES // 4
    decoded = decode_plan(plan.encoded)
    assert decoded == plan
    assert decoded.hash == plan.hash
    assert decode_plan(plan.encoded, [decoded]) is decoded


@pytest.mark.parametrize(
    ("bucket", "size"),
    [
        (lambda: Bucket("b", FLOAT32, tuple(Component("n" * 100, (1,)) for _ in range(400_000))), "encodes to 44"),
        (
            lambda: Bucket("b", FLOAT32, tuple(Component(random.randbytes(64).hex(), (1,)) for _ in range(100_000))),
            "can be packed to ",
        ),
    ],
)
def test_a_plan_too_large_to_go_says_what_to_do(bucket: Callable[[], Bucket], size: str) -> None:
    plan = Plan((bucket(),))

    with pytest.raises(LimitExceededError, match=rf"{size}.* the limit is .*shorter names.*_ddp_params_and_buffers"):
        _ = plan.encoded


def test_a_bomb_takes_the_memory_of_a_plan_at_most(measured: Measured) -> None:
    bomb = b"\xff" * 4 + zlib.compress(bytes(MAX_PLAN_BYTES * 4), 9)

    assert measured(memory_of_a_lie, bomb) < 3 * MAX_PLAN_BYTES
    with pytest.raises(LimitExceededError, match="a packed plan of more than 41943040 bytes"):
        decode_plan(bomb)
    for bad in (bomb[:-9], b"\xff" * 4 + zlib.compress(b"\1") + b"behind", b"\xff" * 9):
        with pytest.raises(ProtocolError):
            decode_plan(bad)


def memory_of_a_lie(plan: bytes) -> int:
    def decode() -> None:
        assert decodes_or_says_why(plan) is None

    return memory_of(decode).peak


@pytest.mark.parametrize("count", [MAX_BUCKETS, MAX_COMPONENTS, 0xFFFFFFFF])
def test_a_declared_count_takes_no_memory(measured: Measured, count: int) -> None:
    assert measured(memory_of_a_lie, struct.pack("<I", count)) < MIB // 4
    assert measured(memory_of_a_lie, HEAD + struct.pack("<BBBBII", 0, 0, 1, 0, 0, count)) < MIB // 4


# ── where two differ ──────────────────────────────────────────────────────────────────────────────────

THEIRS = Plan((transformer_block(8), transformer_block(8, name="block.1")))


@pytest.mark.parametrize(
    ("mine", "says", "they_say"),
    [
        (
            Plan((transformer_block(8), transformer_block(16, name="block.1"))),
            "w_q (16×16, float32, mean) in bucket 'block.1'",
            "w_q (8×8, float32, mean) in bucket 'block.1'",
        ),
        (
            Plan((transformer_block(8, BFLOAT16), transformer_block(16, name="block.1"))),
            "w_q (8×8, bfloat16, mean) in bucket 'block.0'",
            "w_q (8×8, float32, mean) in bucket 'block.0'",
        ),
        (
            Plan((transformer_block(8),)),
            "nothing (its plan ends before)",
            "w_q (8×8, float32, mean) in bucket 'block.1'",
        ),
        (
            Plan((Bucket("block.0", FLOAT32, (*THEIRS.buckets[0].components, Component("bias", ()))),)),
            "bias (scalar, float32, mean) in bucket 'block.0'",
            "the end of bucket 'block.0' (float32, mean)",
        ),
        (
            Plan((Bucket("block.0", FLOAT32, THEIRS.buckets[0].components, Op.SUM), THEIRS.buckets[1])),
            "w_q (8×8, float32, sum) in bucket 'block.0'",
            "w_q (8×8, float32, mean) in bucket 'block.0'",
        ),
    ],
    ids=["shape", "dtype", "missing", "more", "op"],
)
def test_the_first_difference_is_shown_from_both_sides(mine: Plan, says: str, they_say: str) -> None:
    assert first_difference(mine, THEIRS) == (says, they_say)
    assert first_difference(THEIRS, mine) == (they_say, says)


@given(plans, st.data())
def test_a_changed_component_is_the_difference_that_is_shown(plan: Plan, data: st.DataObject) -> None:
    full = [index for index, bucket in enumerate(plan.buckets) if bucket.components]
    if not full:
        return
    at = data.draw(st.sampled_from(full))
    bucket = plan.buckets[at]
    which = data.draw(st.integers(0, len(bucket.components) - 1))
    old = bucket.components[which]
    new = Component(old.name + "'", old.shape)
    components = (*bucket.components[:which], new, *bucket.components[which + 1 :])
    changed = Bucket(bucket.key, bucket.dtype, components, bucket.op)

    difference = first_difference(plan, Plan((*plan.buckets[:at], changed, *plan.buckets[at + 1 :])))

    assert difference is not None
    for side, component in zip(difference, (old, new), strict=True):
        assert side.startswith(f"{component.name} (")
        assert side.endswith(f"in bucket {bucket.key!r}")


def test_plans_of_other_types_carry_their_operation() -> None:
    plan = simple_plan([("counts", 5)], BY_NAME["int64"], Op.SUM)

    assert plan.buckets[0].operation == Operation(Kind.ALL_REDUCE, Op.SUM, BY_NAME["int64"], 5)
    with pytest.raises(UnsupportedOperationError):
        simple_plan([("counts", 5)], BY_NAME["int64"])
