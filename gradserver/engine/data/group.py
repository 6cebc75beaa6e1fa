"""What data knows of a group: its exchanges, who takes part in them, and what each may have in flight."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from gradserver.engine.data.collecting import Recovery
from gradserver.engine.data.exchange import Exchange, Run
from gradserver.engine.data.pace import Pace
from gradserver.engine.data.rounds import Hashing, Round
from gradserver.engine.events import OpenGroup
from gradserver.engine.seats import Seats
from gradserver.protocol.digest import places
from gradserver.protocol.errors import GradServerError, LimitExceededError, OutOfStepError
from gradserver.protocol.exchange import WORLD_BOUND, ExchangeKey, Layout, Operation, Pool, Stream, pool_of
from gradserver.protocol.limits import MAX_TRANSFERS, SLICE_BYTES
from gradserver.protocol.messages import Push
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table, share_of

_NUMBERS: Final = 1 << 62
"""Of collectives in one round."""


@dataclass(slots=True)
class Coming:
    """Of the state in one transfer, how many bytes have come that were not reported, and when that was done last."""

    key: tuple[int, int]
    """The number of the transfer, and the donor's seat."""
    nbytes: int = 0
    reported: float = -math.inf
    begun: bool = False
    """Whether any have been reported."""


@dataclass(slots=True)
class Group:
    """What data knows of one group."""

    order: OpenGroup
    table: Table
    connections: list[int]
    """By rank; -1 for whoever has yet to come to this shard."""
    seats: Seats
    epoch: int
    """That of the latest membership."""
    tokens: list[str] = field(default_factory=list)
    """What members show here, by rank."""
    exchanges: dict[ExchangeKey, Exchange] = field(default_factory=dict)
    due: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The next number of each sequence, by (rank, stream, part, source, target)."""
    plan: Plan | None = None
    planned: int = 0
    """The first round of this plan."""
    first_round: int = 0
    """The first that somebody can begin of whom nothing has been heard."""
    full_buckets: Mapping[int, int] = field(default_factory=dict)
    """How many buckets of each section this shard has to do with, by the section's number."""
    places: tuple[int, ...] = ()
    """Where each bucket begins in what is hashed of a round."""
    hashing: Hashing | None = None
    rounds: dict[int, Round] = field(default_factory=dict)
    outstanding: Counter[tuple[int, Pool]] = field(default_factory=Counter)
    """Bytes in flight, by rank and pool."""
    departed: dict[int, GradServerError] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    """The last round that was closed without it, by seat."""
    pace: Pace = field(default_factory=Pace)
    quiet_until: float = -math.inf
    """When people may be told again of somebody who is late."""
    listening: dict[int, int] = field(default_factory=dict)
    """Seats that are sent results of buckets unasked, and from which round on."""
    unread: Counter[int] = field(default_factory=Counter)
    """Bytes of these that each seat has not read."""
    change: str = ""
    """What has changed in the membership last."""
    entered: dict[int, int] = field(default_factory=dict)
    """Of those who joined later, the first round that each contributes to; -1 for who does not yet."""
    since: dict[int, int] = field(default_factory=dict)
    """Of those, the epoch as of which each is a member; -1 for who is not yet."""
    before: tuple[int, int] = (-1, 0)
    """The latest round in which somebody joined, and the epoch of the membership without him."""
    states: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of those who are to join: the number of the transfer in which each gets the state, and the epoch of that time."""
    heard: dict[int, float] = field(default_factory=dict)
    """When more of its state came to whoever is to join."""
    coming: dict[int, Coming] = field(default_factory=dict)
    """What of the states of those has yet to be reported."""
    transfers: Counter[int] = field(default_factory=Counter)
    """Sequences of transfers that each rank takes part in."""
    failed: deque[ExchangeKey] = field(default_factory=deque)
    """Exchanges that failed, the latest ones; some of them not everybody has heard of yet."""
    state: dict[tuple[int, int], Any] = field(default_factory=dict)
    """What reductions keep from one round of the plan to the next."""
    settled: dict[ExchangeKey, frozenset[int]] = field(default_factory=dict)
    """Of exchanges that were open when the books were opened: slices that everybody has the result of."""
    failed_before: dict[ExchangeKey, GradServerError] = field(default_factory=dict)
    """Collectives and transfers that had failed at a member when the books were opened: what to tell others of them."""
    recovery: Recovery | None = None
    """While it is being found out who holds which results."""
    recovered: bool = False
    """Whether it ever was. Then a sequence begins with any number."""
    _is_steady: bool = field(init=False)
    halted: GradServerError | None = None
    buckets_halted: GradServerError | None = None
    next_check: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    slices: int = 0

    def __post_init__(self) -> None:
        self._is_steady = self.order.steady

    @property
    def is_steady(self) -> bool:
        """True if a round ends with its last results, until an order changes the membership."""
        return self._is_steady

    def settle(self) -> None:
        """From now on a round ends with its last results."""
        self._is_steady = True

    def disturb(self) -> None:
        """Leave the end of a round to control, as the membership is about to change."""
        self._is_steady = False

    @property
    def world(self) -> int:
        """Number of workers when the group was complete; in an elastic one, of seats that were ever taken."""
        return len(self.connections)

    def call(self, rank: int) -> str:
        """How to speak of a member."""
        return self.seats.call(rank)

    def calls(self, ranks: Iterable[int]) -> str:
        """How to speak of several."""
        names = [self.call(rank) for rank in ranks]
        return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")

    def describe(self, key: ExchangeKey, operation: Operation | None = None) -> str:
        """How to speak of an exchange."""
        if key.stream == Stream.BUCKET and self.plan is not None and key.part < len(self.plan.buckets):
            return f"bucket {self.plan.buckets[key.part].key!r} of round {key.number}"
        if key.stream == Stream.BUCKET:
            return f"bucket {key.part} of round {key.number}"
        if key.stream == Stream.TRANSFER:
            source, target = self.seats.rank(key.source), self.seats.rank(key.target)
            return f"transfer {key.number} from rank {source} to rank {target} (tag {key.part})"
        return f"collective {key.number} of round {key.part}" + (f", {operation}," if operation else "")

    def bucket_name(self, key: ExchangeKey) -> str:
        """The bucket's name in the plan; empty for what is no bucket."""
        if key.stream == Stream.BUCKET and self.plan is not None:
            return self.plan.buckets[key.part].key
        return ""

    def charge(self, exchange: Exchange, rank: int, run: Run) -> None:
        """Let ``rank`` have more in flight. It may overdraw its credit by one slice, for its frontier."""
        account = rank, pool_of(exchange.key, rank)
        outstanding = self.outstanding[account] + exchange.cost(run)
        if outstanding > self.order.credit + SLICE_BYTES:
            raise LimitExceededError(
                f"{self.call(rank)} has {outstanding} bytes in flight, its credit is {self.order.credit}"
            )
        self.outstanding[account] = outstanding

    def refund(self, exchange: Exchange, rank: int, run: Run) -> None:
        """Slices of ``rank`` are answered, or will not be."""
        self.outstanding[rank, pool_of(exchange.key, rank)] -= exchange.cost(run)

    def begins(self, push: Push) -> bool:
        """Whether this is the first that its sender says of an exchange at this shard."""
        first = 0
        if self.table.rates:
            if push.key.stream != Stream.BUCKET or self.plan is None or self.plan.is_vacant(push.key.part):
                return push.operation is not None or push.key.stream == Stream.BUCKET
            _, first, _ = self.share(push.key, self.plan.buckets[push.key.part].operation)
        settled = self.settled.get(push.key)
        return push.slice == (first if settled is None else next(i for i in count(first) if i not in settled))

    def share(self, key: ExchangeKey, operation: Operation) -> tuple[Layout, int, int]:
        """How an exchange is cut, and the slices that this shard has to do with."""
        if self.entered and operation.kind in WORLD_BOUND:
            layout, bounds = share_of(operation, len(self.participants(key)), self.table.rates)
        else:
            layout, bounds = self.table.share(key, operation)
        shard = self.order.shard
        return layout, bounds[shard], bounds[shard + 1]

    def hash(self, plan: Plan) -> None:
        """Hash rounds of ``plan``."""
        self.places = places(plan)
        keys = [ExchangeKey(Stream.BUCKET, 0, part) for part in range(len(plan.buckets))]
        shares = [self.share(key, bucket.operation) for key, bucket in zip(keys, plan.buckets, strict=True)]
        load = sum(layout.run_bytes(start, stop) for layout, start, stop in shares)
        calls, sections = sum(self.full_buckets.values()), len(plan.each)
        self.hashing = Hashing.of(load * (self.world + 1) / sections, calls * (self.world + 1) / sections)

    def is_hashed(self, number: int) -> bool:
        """Whether round ``number`` is; of several sections all are hashed alike if they take turns."""
        sections = 1 if self.plan is None else len(self.plan.each)
        return self.hashing is not None and self.hashing.is_due(number // sections)

    def keep(self, plan: Plan) -> None:
        """Forget what was kept for sections of the plan in force that ``plan`` has not any more."""
        here = () if self.plan is None else self.plan.each
        same = (one for one in here if plan.sections and plan.section(one.number) is not None)
        kept = {part for one in same for part in one.parts}
        self.state = {place: value for place, value in self.state.items() if place[0] in kept}

    def settled_of(self, key: ExchangeKey) -> dict[int, int]:
        """In how many settled slices of a bucket each counted."""
        current = self.rounds.get(key.number) if key.stream == Stream.BUCKET else None
        counted = current.counted.items() if current is not None else ()
        return {seat: slices for (seat, part), slices in counted if part == key.part}

    def participants(self, key: ExchangeKey) -> tuple[int, ...]:
        """Who has to contribute to an exchange that begins now, in rank order.

        Who joins contributes to buckets first, and is a member when that round is over.
        """
        if key.stream == Stream.TRANSFER:
            return (key.source, key.target) if key.source < key.target else (key.target, key.source)
        present, entered = self.seats.present, self.entered
        if not entered:
            return present
        if key.stream == Stream.BUCKET:
            expected = {seat for seat, first in entered.items() if 0 <= first <= key.number}
            return tuple(sorted(expected.union(seat for seat in present if seat not in entered)))
        return tuple(seat for seat in present if entered.get(seat, -1) < key.part)

    def take_number(self, rank: int, key: ExchangeKey) -> list[Exchange]:
        """Numbers of a sequence come without gaps; that is how members' exchanges are matched.

        Of several shards not every one has to do with every collective or transfer, so that at each of them there
        are gaps. But who has begun a later one contributes nothing more to an earlier one, because it failed
        elsewhere: these are given back.
        """
        sequence = _sequence(rank, key)
        before = self.due.get(sequence)
        due = self._first_due(rank, key) if before is None else before
        if key.stream == Stream.BUCKET and rank in self.closed:
            due = max(due, self.closed[rank] + 1)
        place = _place(key)
        begins_round = key.stream == Stream.COLLECTIVE and key.number == 0
        of_another = key.stream == Stream.BUCKET and self.plan is not None and self.plan.is_shared
        skips = begins_round or of_another or (self.table.rates and key.stream != Stream.BUCKET)
        if place != due and not (skips and place > due):
            what = "round" if key.stream == Stream.BUCKET else "number"
            number = due % _NUMBERS if key.stream == Stream.COLLECTIVE else due
            raise OutOfStepError(
                f"{self.describe(key)} from {self.call(rank)}: {what} {number} is due, {key.number} came"
            )
        self.due[sequence] = place + 1
        if not self.table.rates or key.stream == Stream.BUCKET:
            return []
        return self._abandoned(rank, key, due if before is not None or not self.recovered else 0)

    def pass_over(self, rank: int, key: ExchangeKey) -> None:
        """``rank`` has done with ``key``, which was settled before anybody began it here."""
        self.due[_sequence(rank, key)] = _place(key) + 1

    def _abandoned(self, rank: int, key: ExchangeKey, due: int) -> list[Exchange]:
        """Open exchanges that ``rank`` has not contributed to in full, and never will, as it has begun ``key``."""
        last, place = due - 1, _place(key)
        if key.stream == Stream.TRANSFER and place - last <= len(self.exchanges):
            keys = [key._replace(number=number) for number in range(last, place)]
        else:
            sequence = _sequence(0, key)
            keys = [k for k in self.exchanges if last <= _place(k) < place and _sequence(0, k) == sequence]
        found = [self.exchanges.get(earlier) for earlier in keys]
        return [
            exchange
            for exchange in found
            if exchange is not None and exchange.failure is None and exchange.pushed.get(rank, -1) < exchange.stop
        ]

    def _first_due(self, rank: int, key: ExchangeKey) -> int:
        if key.stream == Stream.TRANSFER:
            self.transfers[rank] += 1
            if self.transfers[rank] > MAX_TRANSFERS:
                raise LimitExceededError(
                    f"{self.call(rank)} has used {MAX_TRANSFERS} different pairs of peer and tag: use old ones again"
                )
        if key.stream == Stream.BUCKET:
            return max(self.first_round, self.entered.get(rank, 0))
        return _place(key) if self.recovered else 0

    def is_past(self, rank: int, key: ExchangeKey) -> bool:
        """Whether ``rank`` has begun ``key`` before."""
        return _place(key) < self.due.get(_sequence(rank, key), 0)

    def has_heard(self, exchange: Exchange, rank: int) -> bool:
        """Whether ``rank`` was told that ``exchange`` has failed, or has gone on without it."""
        return rank in exchange.pushed or rank in self.departed or self.is_past(rank, exchange.key)

    def snapshot(self, now: float) -> dict[str, object]:
        """Traffic, as plain JSON values. Ages in seconds, sizes in bytes."""
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "slices": self.slices,
            "outstanding": [sum(self.outstanding[rank, pool] for pool in Pool) for rank in range(self.world)],
            "open": [
                {
                    "what": self.describe(exchange.key, exchange.operation),
                    "age": round(now - exchange.opened, 3),
                    "missing": [self.call(rank) for rank in exchange.missing()[:16]],
                }
                for exchange in list(self.exchanges.values())[:8]
                if exchange.failure is None
            ],
        }

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        expected: Counter[tuple[int, Pool]] = Counter()
        for exchange in self.exchanges.values():
            if exchange.failure is not None:
                continue
            exchange.validate()
            for rank, run in exchange.unanswered():
                expected[rank, pool_of(exchange.key, rank)] += exchange.cost(run)
        for (rank, pool), outstanding in self.outstanding.items():
            if rank not in self.departed:
                assert outstanding == expected[rank, pool], (rank, pool, outstanding)
                assert outstanding <= self.order.credit + SLICE_BYTES, "credit exceeded"
        assert all(0 <= unread <= self.order.backlog for unread in self.unread.values()), "an overrun backlog"
        assert not self.listening.keys() & self.departed.keys(), "who has departed listens"
        assert (
            self.exchanges == {}
            or self.next_check is not None
            or all(exchange.failure for exchange in self.exchanges.values())
        ), "an exchange without a deadline"


def _place(key: ExchangeKey) -> int:
    """Where in its sequence an exchange is. Collectives count from 0 in each round."""
    return key.part * _NUMBERS + key.number if key.stream == Stream.COLLECTIVE else key.number


def _sequence(rank: int, key: ExchangeKey) -> tuple[int, ...]:
    return (rank, key.stream, 0 if key.stream == Stream.COLLECTIVE else key.part, key.source, key.target)
