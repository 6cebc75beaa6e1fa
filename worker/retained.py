"""What a member of a durable group keeps of results, so that a coordinator that comes back can hand them on.

Of a bucket's slice it is the last result, until the same slice of a later round is answered: one copy of the gradients,
which over TCP is what was received, and in shared memory where the coordinator wrote it. Of collectives and transfers
it is what was answered last, as much as anybody can still lack (`protocol.resuming` says why that is enough).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from protocol.buffer import Buffer
from protocol.exchange import ExchangeKey, Stream
from protocol.limits import SLICE_BYTES
from protocol.messages import Result
from protocol.resuming import MAX_OVER, Span, State


class Kept(NamedTuple):
    """The result of a slice, as it came; the payload's memory is nobody else's to change."""

    result: Result
    payload: Buffer | None


class _Past(NamedTuple):
    """A slice of a collective or a transfer that was answered."""

    cost: int
    key: ExchangeKey
    slice: int
    kept: Kept | None
    """None where nothing came that would be of use to others."""


class Retained:
    """What one member keeps. Not safe to share: the session's lock guards it.

    Args:
        credit: bytes that each member may have in flight.
    """

    def __init__(self, credit: int) -> None:
        self._buckets: dict[int, dict[int, Kept]] = {}
        """By bucket and slice; which round it is of, its key says."""
        self._room = credit + SLICE_BYTES
        self._past: dict[int, deque[_Past]] = {Stream.COLLECTIVE: deque(), Stream.TRANSFER: deque()}
        self._cost = {Stream.COLLECTIVE: 0, Stream.TRANSFER: 0}
        self._failed: deque[ExchangeKey] = deque(maxlen=MAX_OVER)

    def keep_slice(self, index: int, kept: Kept) -> None:
        """Slice ``index`` of a bucket was answered: what is kept of it so far nobody can lack any more."""
        self._buckets.setdefault(kept.result.key.part, {})[index] = kept

    def keep_past(self, key: ExchangeKey, index: int, cost: int, kept: Kept | None) -> None:
        """Slice ``index`` of a collective or a transfer was answered, which took ``cost`` bytes of credit."""
        past, stream = self._past[Stream(key.stream)], Stream(key.stream)
        past.append(_Past(cost, key, index, kept))
        self._cost[stream] += cost
        while self._cost[stream] - past[0].cost > self._room:
            self._cost[stream] -= past.popleft().cost

    def failed(self, key: ExchangeKey) -> None:
        """A collective or a transfer has failed."""
        if key.stream != Stream.BUCKET:
            self._failed.append(key)

    def forget_buckets(self) -> None:
        """Another plan was agreed on."""
        self._buckets.clear()

    def of_bucket(self, key: ExchangeKey) -> dict[int, Kept]:
        """What is there of this very round of a bucket, by slice."""
        return {index: kept for index, kept in self._buckets.get(key.part, {}).items() if kept.result.key == key}

    def find(self, key: ExchangeKey, index: int) -> Kept | None:
        """The result of a slice, if it is kept."""
        if key.stream == Stream.BUCKET:
            kept = self._buckets.get(key.part, {}).get(index)
            return kept if kept is not None and kept.result.key == key else None
        return next((past.kept for past in self._past[Stream(key.stream)] if past[1:3] == (key, index)), None)

    def spans(self) -> Iterator[Span]:
        """All that is kept, and what is over."""
        for slices in self._buckets.values():
            yield from runs((State.HELD, slices[index].result.key, index) for index in sorted(slices))
        for past in self._past.values():
            yield from runs(
                sorted((State.OVER if one.kept is None else State.HELD, one.key, one.slice) for one in past)
            )
        yield from (Span(State.FAILED, key, 0, 1) for key in self._failed)


def runs(slices: Iterable[tuple[State, ExchangeKey, int]]) -> Iterator[Span]:
    """Slices of exchanges, in order, as spans."""
    span: Span | None = None
    for state, key, index in slices:
        if span is not None and span[:2] == (state, key) and span.stop == index:
            span = span._replace(stop=index + 1)
            continue
        if span is not None:
            yield span
        span = Span(state, key, index, index + 1)
    if span is not None:
        yield span
