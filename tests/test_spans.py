"""What a member says that it holds: whatever bytes come in, spans or a ProtocolError come out."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st

from protocol.errors import LimitExceededError, MalformedMessageError, ProtocolError
from protocol.exchange import ExchangeKey, Stream
from protocol.limits import MAX_COUNTER, MAX_FRAME_BYTES, MAX_WORLD_SIZE
from protocol.resuming import MAX_SPANS_BYTES, Span, State, pack_spans, unpack_spans

ranks = st.integers(-1, MAX_WORLD_SIZE - 1)
counters = st.integers(0, 99) | st.integers(0, MAX_COUNTER)
keys = st.builds(ExchangeKey, st.sampled_from([int(s) for s in Stream]), counters, counters, ranks, ranks)
pairs = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).filter(lambda pair: pair[0] != pair[1])
spans = st.builds(lambda state, key, pair: Span(state, key, min(pair), max(pair)), st.sampled_from(State), keys, pairs)


@given(st.lists(spans, max_size=6))
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
        assert pack_spans(found) == data


@pytest.mark.parametrize(
    "values",
    [
        (4, 0, 1, 0, -1, -1, 0, 1),
        (1, 3, 1, 0, -1, -1, 0, 1),
        (1, 0, MAX_COUNTER + 1, 0, -1, -1, 0, 1),
        (1, 0, 1, MAX_COUNTER + 1, -1, -1, 0, 1),
        (1, 0, 1, 0, -2, -1, 0, 1),
        (1, 0, 1, 0, -1, MAX_WORLD_SIZE, 0, 1),
        (1, 0, 1, 0, -1, -1, 1, 1),
        (1, 0, 1, 0, -1, -1, 2, 1),
    ],
)
def test_what_cannot_be_is_named(values: tuple[int, ...]) -> None:
    with pytest.raises(MalformedMessageError, match="no member holds slices"):
        unpack_spans(struct.pack("<BBQQhhII", *values))


def test_as_much_as_fits_into_a_frame_can_be_said() -> None:
    span = Span(State.HELD, ExchangeKey(Stream.BUCKET, 3, 7), 0, 1)
    most = MAX_SPANS_BYTES // len(pack_spans([span]))
    assert MAX_FRAME_BYTES - len(pack_spans([span])) < MAX_SPANS_BYTES <= MAX_FRAME_BYTES

    assert len(unpack_spans(pack_spans([span] * most))) == most
    with pytest.raises(LimitExceededError, match="the limit is"):
        unpack_spans(pack_spans([span] * (most + 1)))
    with pytest.raises(MalformedMessageError, match="no multiple of 30"):
        unpack_spans(pack_spans([span])[:-1])
