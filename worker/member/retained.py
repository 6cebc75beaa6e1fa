"""Results that a member of a durable group keeps, so that a coordinator that comes back can hand them on.

Of a bucket's slice it is the last result, until the same slice of a later round is answered. That is one copy of the
gradients. Over TCP it is what was received. In shared memory it stays where the coordinator wrote it. Of collectives
and transfers it is what was answered last, as much as a member can still lack. `gradserver.protocol.messages.recovery`
says why that is enough.

In a group with a quorum, or with backups, a round is closed without late members, which may lack its results. A result
that lacks no member's contribution shows that all members have those of the rounds before. Until one comes, the results
before it are kept as well, of the latest rounds. Where rounds do not wait for all members, such results are rare. There
the coordinator says which rounds all members have applied (`Granted`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import BUCKET, ExchangeKey, unasked_cost
from gradserver.protocol.limits import MAX_COUNTER, SLICE_BYTES
from gradserver.protocol.messages import Result
from gradserver.protocol.messages.data import made_in
from gradserver.protocol.messages.recovery import MAX_OVER, Span, State

_MOST_OLDER: Final = 1 << 15
"""Slices of rounds before the latest that are kept at most: one Holding has room for these."""


class Kept(NamedTuple):
    """The result of a slice, as it came. Nothing else changes the payload's memory."""

    result: Result
    payload: Buffer | None
    shard: int = 0
    """The shard that the slice is from."""


class _Past(NamedTuple):
    """A slice of a collective or a transfer that was answered."""

    cost: int
    kept: Kept


class Retained:
    """Results that one member keeps. Not safe to share: the session's lock guards it.

    Args:
        credit: bytes that each member may have in flight.
    """

    def __init__(self, credit: int) -> None:
        self._buckets: dict[int, dict[int, Kept]] = {}
        """Results by bucket and slice. The key names the round."""
        self._older: dict[int, dict[tuple[int, int], Kept]] = {}
        """Results that a late member may lack, by round, then by bucket and slice."""
        self._older_bytes = self._older_slices = 0
        self._older_room = 0
        self._room = credit + SLICE_BYTES
        self._past: dict[tuple[int, int], deque[_Past]] = {}
        """Results by stream and shard: each pair has a credit of its own."""
        self._cost: Counter[tuple[int, int]] = Counter()
        """Credit that the kept results of each would take."""
        self._over: dict[tuple[ExchangeKey, int], set[int]] = {}
        """Slices of collectives and transfers that are not kept, by shard: the latest."""
        self._failed: dict[ExchangeKey, State] = {}
        """Collectives and transfers that failed, and in which way: the latest. They do so at all shards."""
        self._passed: dict[tuple[ExchangeKey, int], Kept] = {}
        """Slices of which only others get bytes, and that this member was told of since it said what it holds."""

    def keep_slice(self, index: int, kept: Kept, done: int) -> None:
        """Keep the result of slice ``index`` of a bucket. This member has applied the rounds before ``done``.

        No member can lack the result that was kept of the slice so far, unless some are late.
        """
        key, slices = kept.result.key, self._buckets.setdefault(kept.result.key.part, {})
        before = slices.get(index)
        if before is not None and before.result.key.number > key.number:
            self._keep_older(index, kept)  # which this member has not reached, or it is passed on
            return
        slices[index] = kept
        if not kept.result.without:
            self.forget_older(min(key.number, done))
        elif before is not None and before.result.key.number < key.number:
            self._keep_older(index, before)
            while self._older_bytes > self._older_room or self._older_slices > _MOST_OLDER:
                if (oldest := min(self._older)) >= done:
                    return  # this member has not reached it
                self.forget_older(oldest + 1)

    def _keep_older(self, index: int, kept: Kept) -> None:
        key = kept.result.key
        there = self._older.setdefault(key.number, {})
        if (key.part, index) not in there:
            there[key.part, index] = kept
            self._older_bytes += unasked_cost(kept.payload)
            self._older_slices += 1

    def _take_older(self, number: int, part: int, index: int) -> Kept:
        there = self._older[number]
        kept = there.pop((part, index))
        self._older_bytes -= unasked_cost(kept.payload)
        self._older_slices -= 1
        if not there:
            del self._older[number]
        return kept

    def forget_older(self, before: int) -> None:
        """Forget rounds ``before`` this one, but for what is the latest of a slice."""
        for number in [number for number in self._older if number < before]:
            there = self._older.pop(number)
            self._older_bytes -= sum(unasked_cost(kept.payload) for kept in there.values())
            self._older_slices -= len(there)

    def forget_behind(self, number: int, shard: int) -> None:
        """Forget results of ``shard`` of rounds behind ``number``: the members that had the round are gone."""
        for later in [later for later in self._older if later > number]:
            for which in [which for which, kept in self._older[later].items() if kept.shard == shard]:
                self._take_older(later, *which)
        for part, slices in self._buckets.items():
            for index in [index for index, kept in slices.items() if _is_behind(kept, number, shard)]:
                rounds = [before for before, there in self._older.items() if (part, index) in there]
                if rounds:
                    slices[index] = self._take_older(max(rounds), part, index)
                else:
                    del slices[index]

    def keep_past(self, kept: Kept, cost: int) -> None:
        """A slice of a collective or a transfer was answered, which took ``cost`` bytes of credit."""
        pool = kept.result.key.stream, kept.shard
        past = self._past.setdefault(pool, deque())
        past.append(_Past(cost, kept))
        self._cost[pool] += cost
        while self._cost[pool] - past[0].cost > self._room:
            gone = past.popleft()
            self._cost[pool] -= gone.cost
            self.over(gone.kept.result.key, (gone.kept.result.slice,), gone.kept.shard)

    def over(self, key: ExchangeKey, slices: Iterable[int], shard: int) -> None:
        """Note that ``slices`` of a collective or a transfer, which are ``shard``'s, are done with and not kept."""
        found = set(slices)
        if found and key not in self._failed:
            self._over.setdefault((key, shard), set()).update(found)
            _keep_latest(self._over)

    def open_again(self, key: ExchangeKey, shard: int) -> set[int]:
        """Take no slice of a collective as over, which has begun again, and give those that are kept."""
        self._over.pop((key, shard), None)
        past = self._past.get((key.stream, shard), ())
        return {one.kept.result.slice for one in past if one.kept.result.key == key}

    def pass_on(self, kept: Kept) -> None:
        """Keep that a slice is answered. A member that lacks it gets no bytes of it either, and can be told so."""
        self._passed[kept.result.key, kept.result.slice] = kept

    def said(self) -> None:
        """Forget what was passed on: what is held is about to be said, or all members have the same."""
        self._passed.clear()

    def failed(self, key: ExchangeKey, again: bool, recovers: bool = False) -> None:
        """Note a failure, and whether it is called ``again``. A shard that ``recovers`` may still ask for results."""
        if key.stream == BUCKET:
            return
        for pool, past in self._past.items():
            if pool[0] == key.stream:
                for one in [one for one in past if recovers and one.kept.result.key == key]:
                    self.pass_on(one.kept)
                self._past[pool] = deque(one for one in past if one.kept.result.key != key)
                self._cost[pool] = sum(one.cost for one in self._past[pool])
        self._over = {which: slices for which, slices in self._over.items() if which[0] != key}
        self._failed[key] = State.CHANGED if again else State.FAILED
        _keep_latest(self._failed)

    def forget_buckets(self, older_room: int = 0) -> None:
        """Forget buckets, for another plan. Results that late members may lack may take ``older_room`` bytes."""
        self._buckets.clear()
        self.forget_older(MAX_COUNTER)
        self._older_room = older_room

    def of_bucket(self, key: ExchangeKey) -> dict[int, Kept]:
        """Give the results of this very round of a bucket, by slice."""
        found = {index: kept for index, kept in self._buckets.get(key.part, {}).items() if kept.result.key == key}
        if (older := self._older.get(key.number)) is not None:
            found.update((index, kept) for (part, index), kept in older.items() if part == key.part)
        return dict(sorted(found.items())) if older is not None else found

    def part_of(self, number: int) -> int | None:
        """Give a bucket of which a result of round ``number`` is kept; None if there is none."""
        if (older := self._older.get(number)) is not None:
            return next(iter(older))[0]
        here = (
            part for part, slices in self._buckets.items() for one in slices.values() if one.result.key.number == number
        )
        return next(here, None)

    def find(self, key: ExchangeKey, index: int) -> Kept | None:
        """The result of a slice, if it is kept."""
        if key.stream == BUCKET:
            kept = self._buckets.get(key.part, {}).get(index)
            if kept is not None and kept.result.key == key:
                return kept
            return self._older.get(key.number, {}).get((key.part, index))
        past = (one.kept for pool, past in self._past.items() if pool[0] == key.stream for one in past)
        found = next((kept for kept in past if kept.result.key == key and kept.result.slice == index), None)
        return found or self._passed.get((key, index))

    def spans(self, shard: int) -> Iterator[Span]:
        """Yield all that is kept of ``shard``'s slices, and what is over there."""
        for slices in self._buckets.values():
            theirs = sorted(index for index, kept in slices.items() if kept.shard == shard)
            yield from runs(_held(slices[index].result, index) for index in theirs)
        for number in sorted(self._older, reverse=True):
            there = sorted(which for which, kept in self._older[number].items() if kept.shard == shard)
            yield from runs(_held(self._older[number][which].result, which[1]) for which in there)
        for key in self._elsewhere(shard):
            yield Span(State.ELSEWHERE, key, 0, 1)
        for (_, whose), past in self._past.items():
            if whose == shard:
                yield from runs(sorted(_held(one.kept.result, one.kept.result.slice, one.kept.payload) for one in past))
        for (key, whose), over in self._over.items():
            if whose == shard:
                yield from runs(Span(State.OVER, key, index, index + 1) for index in sorted(over))
        for key, state in self._failed.items():
            yield Span(state, key, 0, 1)

    def _elsewhere(self, shard: int) -> Iterable[ExchangeKey]:
        """Give one bucket of each round of which results of other shards are kept, and none of ``shard``'s."""
        found: defaultdict[int, dict[int, ExchangeKey]] = defaultdict(dict)
        kept = [one for slices in self._buckets.values() for one in slices.values()]
        kept += [one for there in self._older.values() for one in there.values()]
        for result, _, whose in kept:
            found[result.key.number][whose] = result.key
        return [next(iter(keys.values())) for keys in found.values() if shard not in keys]


def _keep_latest(found: dict[Any, Any]) -> None:
    while len(found) > MAX_OVER:
        del found[next(iter(found))]


def _is_behind(kept: Kept, number: int, shard: int) -> bool:
    return kept.result.key.number > number and kept.shard == shard


def _held(result: Result, index: int, payload: Buffer | None = None) -> Span:
    nbytes = 0 if payload is None else len(payload)
    return Span(State.HELD, result.key, index, index + 1, result.weights, nbytes, made_in(result.proof))


def runs(slices: Iterable[Span]) -> Iterator[Span]:
    """Slices of exchanges, in order, in spans as long as possible."""
    span: Span | None = None
    for one in slices:
        if span is not None and span == one._replace(first=span.first, stop=span.stop) and span.stop == one.first:
            span = span._replace(stop=one.stop)
            continue
        if span is not None:
            yield span
        span = one
    if span is not None:
        yield span
