"""Tests of what a member says that it holds: any bytes give spans or a ProtocolError."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.errors import LimitExceededError, MalformedMessageError, ProtocolError
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.limits import MAX_COUNTER, MAX_FRAME_BYTES, MAX_WEIGHT, MAX_WORLD_SIZE, SLICE_BYTES
from gradserver.protocol.messages.recovery import MAX_COLUMNS, MAX_SPANS_BYTES, Span, State, pack_spans, unpack_spans

ranks = st.integers(-1, MAX_WORLD_SIZE - 1)
counters = st.integers(0, 99) | st.integers(0, MAX_COUNTER)
keys = st.builds(ExchangeKey, st.sampled_from([int(s) for s in Stream]), counters, counters, ranks, ranks)
pairs = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).filter(lambda pair: pair[0] != pair[1])
spans = st.builds(lambda state, key, pair: Span(state, key, min(pair), max(pair)), st.sampled_from(State), keys, pairs)
buckets = st.builds(ExchangeKey, st.just(int(Stream.BUCKET)), counters, counters, st.just(-1), st.just(-1))
columns = st.lists(st.floats(0, MAX_WEIGHT), max_size=6).map(tuple) | st.just((1.0,) * MAX_WORLD_SIZE)
counted = st.builds(lambda key, pair, of: Span(State.HELD, key, min(pair), max(pair), of), buckets, pairs, columns)
BUCKET = ExchangeKey(Stream.BUCKET, 3, 7)


collectives = st.builds(ExchangeKey, st.sampled_from([1, 2]), counters, counters, ranks, ranks)
sized = st.builds(
    Span, st.sampled_from(State), collectives, st.just(0), st.just(3), st.just(()), st.just(SLICE_BYTES), counters
)


@given(st.lists(spans | counted | sized, max_size=6))
def test_spans_come_back_as_they_were(sent: list[Span]) -> None:
    again = unpack_spans(pack_spans(sent))

    assert again == sent
    assert all(isinstance(span.state, State) and isinstance(span.key, ExchangeKey) for span in again)


@given(st.binary(max_size=200))
def test_any_bytes_give_spans_or_an_error(data: bytes) -> None:
    try:
        found = unpack_spans(data)
    except ProtocolError as error:
        assert 10 < len(str(error)) < 200  # noqa: PT017 - both outcomes are right
    else:
        assert unpack_spans(pack_spans(found)) == found


def test_weights_are_told_once_however_many_slices_have_them() -> None:
    some, others = (1.0, 0.0, 2.5), (1.0,)
    sent = [Span(State.HELD, BUCKET, 2 * at, 2 * at + 1, others if at == 5 else some) for at in range(100)]

    packed = pack_spans(sent)

    assert unpack_spans(packed) == sent
    assert len(packed) == 2 + (2 + 8 * 3) + (2 + 8) + 100 * SPAN.size


def test_of_more_different_weights_than_there_is_room_for_nothing_is_said() -> None:
    sent = [Span(State.HELD, BUCKET, at, at + 1, (1.0 + at,)) for at in range(MAX_COLUMNS + 2)]

    again = unpack_spans(pack_spans(sent))

    assert again[:MAX_COLUMNS] == sent[:MAX_COLUMNS]
    assert [span.weights for span in again[MAX_COLUMNS:]] == [(), ()]


SPAN = struct.Struct("<BHBQQhhIIIQ")
A_SPAN = SPAN.pack(1, 1, 0, 3, 7, -1, -1, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends where the number of columns of weights was expected"),
        (struct.pack("<H", MAX_COLUMNS + 1), "257 columns of weights in what a member holds, the limit is 256"),
        (struct.pack("<HB", 1, 0), "ends where the number of weights in a column was expected"),
        (struct.pack("<HH", 1, 1025), "1025 weights in a column in what a member holds, the limit is 1024"),
        (struct.pack("<HHd", 1, 2, 1.0), "8 bytes of what a member holds, where 2 weights begin"),
        (struct.pack("<HHd", 1, 1, -1e31), "of which one is not between -1e.30 and 1e.30"),
        (struct.pack("<HHd", 1, 1, float("nan")), "of which one is not between -1e.30 and 1e.30"),
        (struct.pack("<HHdd", 1, 2, 1.0, float("inf")), "of which one is not between -1e.30 and 1e.30"),
        (struct.pack("<H", 0) + A_SPAN, "slices in the state 1 of stream 0 with weights from column 1 of 0"),
        (struct.pack("<HHd", 1, 1, 1.0) + A_SPAN[:-1], "43 bytes of slices .*, expected a multiple of 44"),
        (struct.pack("<HHd", 1, 1, 1.0) + b"\0" + A_SPAN[1:], "slices in the state 0 of stream 0 with weights"),
        (struct.pack("<HHd", 1, 1, 1.0) + A_SPAN[:3] + b"\1" + A_SPAN[4:], "slices in the state 1 of stream 1 with"),
    ],
)
def test_a_table_of_weights_that_is_none_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack_spans(data)


@pytest.mark.parametrize(
    "values",
    [
        (6, 0, 1, 0, -1, -1, 0, 1),
        (1, 3, 1, 0, -1, -1, 0, 1),
        (1, 0, MAX_COUNTER + 1, 0, -1, -1, 0, 1),
        (1, 0, 1, MAX_COUNTER + 1, -1, -1, 0, 1),
        (1, 0, 1, 0, -2, -1, 0, 1),
        (1, 0, 1, 0, -1, MAX_WORLD_SIZE, 0, 1),
        (1, 0, 1, 0, -1, -1, 1, 1),
        (1, 0, 1, 0, -1, -1, 2, 1),
        (1, 1, 1, 0, -1, -1, 0, 1, SLICE_BYTES + 1),
        (1, 0, 1, 0, -1, -1, 0, 1, 4),
        (1, 0, 1, 0, -1, -1, 0, 1, 0, MAX_COUNTER + 1),
    ],
)
def test_what_cannot_be_is_named(values: tuple[int, ...]) -> None:
    packed = SPAN.pack(values[0], 0, *values[1:], *[0] * (10 - len(values)))
    with pytest.raises(MalformedMessageError, match="no member holds slices"):
        unpack_spans(struct.pack("<H", 0) + packed)


@pytest.mark.parametrize("room", [1_000_000, pytest.param(MAX_SPANS_BYTES, marks=pytest.mark.long)])
def test_as_much_as_fits_into_a_frame_can_be_said(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SPANS_BYTES <= MAX_FRAME_BYTES
    monkeypatch.setattr("gradserver.protocol.messages.recovery.MAX_SPANS_BYTES", room)
    span = Span(State.HELD, BUCKET, 0, 1, (1.0,) * MAX_WORLD_SIZE)
    most = (room - len(pack_spans([span]))) // SPAN.size + 1

    assert len(unpack_spans(pack_spans([span] * most))) == most
    with pytest.raises(LimitExceededError, match="the limit is"):
        unpack_spans(pack_spans([span] * (most + 1)))
