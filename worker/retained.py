"""What a member of a durable group keeps of results, so that a coordinator that comes back can hand them on.

Of a bucket's slice it is the last result, until the same slice of a later round is answered: one copy of the gradients,
which over TCP is what was received, and in shared memory where the coordinator wrote it. Of collectives and transfers
it is what was answered last, as much as anybody can still lack (`protocol.resuming` says why that is enough).
"""

from __future__ import annotations

from collections import Counter, deque
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
    kept: Kept


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
        self._cost: Counter[int] = Counter()
        """What is kept of either stream would take of its credit."""
        self._over: dict[ExchangeKey, tuple[State, set[int]]] = {}
        """Collectives and transfers of which something is not kept, or all: the latest."""

    def keep_slice(self, index: int, kept: Kept) -> None:
        """Slice ``index`` of a bucket was answered: what is kept of it so far nobody can lack any more."""
        self._buckets.setdefault(kept.result.key.part, {})[index] = kept

    def keep_past(self, kept: Kept, cost: int) -> None:
        """A slice of a collective or a transfer was answered, which took ``cost`` bytes of credit."""
        stream = kept.result.key.stream
        past = self._past[stream]
        past.append(_Past(cost, kept))
        self._cost[stream] += cost
        while self._cost[stream] - past[0].cost > self._room:
            gone = past.popleft()
            self._cost[stream] -= gone.cost
            self.over(gone.kept.result.key, (gone.kept.result.slice,))

    def over(self, key: ExchangeKey, slices: Iterable[int]) -> None:
        """These slices of a collective or a transfer are done with, and not kept."""
        found = set(slices)
        if not found:
            return
        self._over.setdefault(key, (State.OVER, set()))[1].update(found)
        while len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]

    def failed(self, key: ExchangeKey) -> None:
        """A collective or a transfer has failed."""
        if key.stream == Stream.BUCKET:
            return
        past = self._past[key.stream]
        self._past[key.stream] = deque(one for one in past if one.kept.result.key != key)
        self._cost[key.stream] = sum(one.cost for one in self._past[key.stream])
        self._over.pop(key, None)
        self.over(key, (0,))
        self._over[key] = State.FAILED, {0}

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
        past = (one.kept for one in self._past[key.stream])
        return next((kept for kept in past if kept.result.key == key and kept.result.slice == index), None)

    def spans(self) -> Iterator[Span]:
        """All that is kept, and what is over."""
        for slices in self._buckets.values():
            yield from runs((State.HELD, slices[index].result.key, index) for index in sorted(slices))
        for past in self._past.values():
            yield from runs(sorted((State.HELD, one.kept.result.key, one.kept.result.slice) for one in past))
        for key, (state, over) in self._over.items():
            yield from runs((state, key, index) for index in sorted(over))


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
