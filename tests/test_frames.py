"""Parts of different lengths travel as frames; bytes that are none cost their sender only."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gradserver.engine.commands import Contribution, Reduce
from gradserver.engine.events import Undecodable
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import InvalidArgumentError, MalformedMessageError, UnsupportedOperationError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream, layout_of, operation_of
from gradserver.protocol.frames import HEAD_BYTES, framed, framed_length, frames, parts, slices_of
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.reducer import reduce

pieces = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@given(pieces, st.integers(HEAD_BYTES + 1, 20))
def test_parts_come_back_whole_from_their_slices(whole: list[bytes], step: int) -> None:
    longest = max(map(len, whole))
    count = -(-framed_length(longest, step) // step)
    sliced = slices_of(whole, step, count)

    assert all(len(piece) <= step * len(whole) for piece in sliced)
    assert [b"".join(found) for found in zip(*(parts(piece, len(whole)) for piece in sliced), strict=True)] == whole


@given(pieces, st.binary(max_size=8))
def test_what_is_behind_the_frames_is_not_looked_at(whole: list[bytes], rest: bytes) -> None:
    assert parts(framed(whole) + rest, len(whole)) == whole
    assert b"".join(frames(framed(whole) + rest, len(whole))) == framed(whole)


@given(st.binary(max_size=40), st.integers(1, 6))
def test_any_bytes_are_frames_or_malformed(data: bytes, count: int) -> None:
    try:
        found = frames(data, count)
    except MalformedMessageError:
        return
    assert data.startswith(b"".join(found))


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL])
@pytest.mark.parametrize("bad", [b"", b"\1\0", b"\xff\xff\xff\xff1234", b"\5\0\0\0abcd"])
def test_a_contribution_that_is_no_frames_names_its_giver(kind: Kind, bad: bytes) -> None:
    operation = Operation(kind, Op.FRAMED, UINT8, 40, 0)
    layout = layout_of(operation, 2)
    good = framed([b"ab", b"c"])
    contributions = [Contribution(rank, 1.0, payload) for rank, payload in enumerate([good, bad])]
    if kind is Kind.SCATTER:
        del contributions[0]
    where = "group", 1, ExchangeKey(Stream.COLLECTIVE, 0), 0
    command = Reduce(*where, operation, 0, layout.nbytes(0), 40, None, contributions, (), True, world=2)

    outcome = reduce(command)

    assert isinstance(outcome, Undecodable)
    assert outcome.member_id == 1
    assert isinstance(outcome.error, MalformedMessageError)


def test_frames_are_bytes_and_no_way_to_reduce() -> None:
    with pytest.raises(UnsupportedOperationError, match="travel as bytes, not as float32"):
        operation_of(Kind.ALL_TO_ALL, Op.FRAMED, FLOAT32, 4)
    with pytest.raises(InvalidArgumentError, match="says no way to combine contributions"):
        Plan((Bucket("b0", UINT8, (Component("b0", (4,)),), Op.FRAMED),))
