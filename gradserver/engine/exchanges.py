"""The data half's tables: exchanges that have begun, rounds, groups; and how to speak of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gradserver.engine.events import NonFinite, OpenGroup
from protocol.errors import (
    CollectiveMismatchError,
    DeadlineError,
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    LimitExceededError,
    NonFiniteError,
    OutOfStepError,
    UnexpectedMessageError,
)
from protocol.exchange import ExchangeKey, Kind, Layout, Op, Operation, Pool, Stream, check_reducible, pool_of
from protocol.limits import MAX_TRANSFERS, SLICE_BYTES
from protocol.plan import Plan
from protocol.wire import Buffer

WEIGHED = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER})
"""Contributions of weight 0 are left out, and absent ones are zeros."""


@dataclass(slots=True)
class Exchange:
    """One exchange that has begun."""

    key: ExchangeKey
    operation: Operation
    layout: Layout
    participants: tuple[int, ...]
    first: int
    opened: float
    touched: float
    weights: dict[int, float] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)
    """Slices that each participant has contributed."""
    slices: dict[int, dict[int, Buffer | None]] = field(default_factory=dict)
    """Slices that are not complete: payloads by rank."""
    reducing: set[int] = field(default_factory=set)
    answered: int = 0
    last: int = -1
    failure: GradServerError | None = None

    def kept(self) -> Iterator[tuple[int, int]]:
        """Every (slice, rank) whose contribution is here and not answered."""
        for index, given in self.slices.items():
            yield from ((index, rank) for rank in given)
        for index in self.reducing:
            yield from ((index, rank) for rank in self.participants)

    def missing(self) -> list[int]:
        """Ranks that have yet to contribute to the earliest slice that is not complete."""
        if not self.slices:
            return [rank for rank in self.participants if self.pushed.get(rank, 0) < self.layout.count]
        earliest = self.slices[min(self.slices)]
        return [rank for rank in self.participants if rank not in earliest]


@dataclass(slots=True)
class Round:
    """The open round's bookkeeping."""

    opened: float
    buckets: int = 0
    weights: dict[int, float] = field(default_factory=dict)
    last: int = -1


@dataclass(slots=True)
class Group:
    """What data knows of one group."""

    order: OpenGroup
    exchanges: dict[ExchangeKey, Exchange] = field(default_factory=dict)
    due: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The next number of each sequence, by (rank, stream, part, source, target)."""
    plan: Plan | None = None
    first_round: int = 0
    full_buckets: int = 0
    rounds: dict[int, Round] = field(default_factory=dict)
    outstanding: Counter[tuple[int, Pool]] = field(default_factory=Counter)
    """Bytes in flight, by rank and pool."""
    departed: dict[int, GradServerError] = field(default_factory=dict)
    transfers: Counter[int] = field(default_factory=Counter)
    """Sequences of transfers that each rank takes part in."""
    failed: deque[ExchangeKey] = field(default_factory=deque)
    """Exchanges that failed, the latest ones; some of them not everybody has heard of yet."""
    halted: GradServerError | None = None
    buckets_halted: GradServerError | None = None
    next_check: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    slices: int = 0

    @property
    def world(self) -> int:
        """Number of workers when the group was complete."""
        return len(self.order.seats)

    def call(self, rank: int) -> str:
        """How to speak of a member."""
        return f"{self.order.seats[rank].name!r} (rank {rank})"

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
            return f"transfer {key.number} from rank {key.source} to rank {key.target} (tag {key.part})"
        return f"collective {key.number}" + (f", {operation}," if operation else "")

    def bucket_name(self, key: ExchangeKey) -> str:
        """The bucket's name in the plan; empty for what is no bucket."""
        if key.stream == Stream.BUCKET and self.plan is not None:
            return self.plan.buckets[key.part].key
        return ""

    def charge(self, exchange: Exchange, rank: int, index: int) -> None:
        """Let ``rank`` have one more slice in flight. It may overdraw its credit by one, for its frontier."""
        account = rank, pool_of(exchange.key, rank)
        outstanding = self.outstanding[account] + exchange.layout.cost(index)
        if outstanding > self.order.credit + SLICE_BYTES:
            raise LimitExceededError(
                f"{self.call(rank)} has {outstanding} bytes in flight, its credit is {self.order.credit}"
            )
        self.outstanding[account] = outstanding

    def refund(self, exchange: Exchange, rank: int, index: int) -> None:
        """A slice of ``rank`` is answered, or will not be."""
        self.outstanding[rank, pool_of(exchange.key, rank)] -= exchange.layout.cost(index)

    def take_number(self, rank: int, key: ExchangeKey) -> None:
        """Numbers of a sequence come without gaps; that is how members' exchanges are matched."""
        sequence = _sequence(rank, key)
        due = self.due.get(sequence)
        if due is None:
            due = self._first_due(rank, key)
        if key.number != due:
            what = "round" if key.stream == Stream.BUCKET else "number"
            raise OutOfStepError(f"{self.describe(key)} from {self.call(rank)}: {what} {due} is due, {key.number} came")
        self.due[sequence] = due + 1

    def _first_due(self, rank: int, key: ExchangeKey) -> int:
        if key.stream == Stream.TRANSFER:
            self.transfers[rank] += 1
            if self.transfers[rank] > MAX_TRANSFERS:
                raise LimitExceededError(
                    f"{self.call(rank)} has used {MAX_TRANSFERS} different pairs of peer and tag: use old ones again"
                )
        return self.first_round if key.stream == Stream.BUCKET else 0

    def is_past(self, rank: int, key: ExchangeKey) -> bool:
        """Whether ``rank`` has begun ``key`` before."""
        return key.number < self.due.get(_sequence(rank, key), 0)

    def mismatch(self, exchange: Exchange, rank: int, operation: Operation) -> CollectiveMismatchError:
        """``rank`` called something else than those before it."""
        return CollectiveMismatchError(
            f"{self.describe(exchange.key)} is not the same everywhere: {self.call(exchange.first)} called "
            f"{exchange.operation}, {self.call(rank)} called {operation}"
        )

    def non_finite(self, exchange: Exchange, element: int, found: NonFinite) -> NonFiniteError:
        """Somebody contributed NaN or Inf."""
        key = exchange.key
        where, parameter = f"element {element}", ""
        if key.stream == Stream.BUCKET and self.plan is not None:
            parameter = self.plan.buckets[key.part].component_at(element).name
            where = f"parameter {parameter!r}"
        if found.rank < 0:
            who, name = "the mean overflowed, though every contribution was finite:", ""
        else:
            who, name = f"{self.call(found.rank)} contributed", self.order.seats[found.rank].name
        return NonFiniteError(
            f"{who} {found.value} in {where} of {self.describe(key, exchange.operation)}; the group is halted "
            f"and nothing of this slice was handed out. Look at that worker's data, loss and learning rate",
            worker=name,
            rank=found.rank,
            bucket=self.bucket_name(key),
            parameter=parameter,
            round=key.number,
        )

    def overdue(self, exchange: Exchange) -> DeadlineError:
        """Somebody did not come."""
        timeout = self.order.timeout
        missing = exchange.missing()
        have = [rank for rank in exchange.participants if rank not in missing]
        whom = self.calls(missing) if missing else "the coordinator to reduce it"
        return DeadlineError(
            f"{self.describe(exchange.key, exchange.operation)} waited {timeout:g} s for {whom}"
            + (f"; {self.calls(have)} had come" if have else ""),
            missing=tuple(self.call(rank) for rank in missing),
            bucket=self.bucket_name(exchange.key),
            round=exchange.key.number if exchange.key.stream == Stream.BUCKET else -1,
        )

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
            assert exchange.failure is None or not (exchange.slices or exchange.reducing), exchange
            for given in exchange.slices.values():
                assert 0 < len(given) < len(exchange.participants), "a complete slice was kept"
            for index, rank in exchange.kept():
                assert index < exchange.pushed[rank], "a slice was kept that was not counted"
                expected[rank, pool_of(exchange.key, rank)] += exchange.layout.cost(index)
        for (rank, pool), outstanding in self.outstanding.items():
            if rank not in self.departed:
                assert outstanding == expected[rank, pool], (rank, pool, outstanding)
                assert outstanding <= self.order.credit + SLICE_BYTES, "credit exceeded"
        assert (
            self.exchanges == {}
            or self.next_check is not None
            or all(exchange.failure for exchange in self.exchanges.values())
        ), "an exchange without a deadline"


def _sequence(rank: int, key: ExchangeKey) -> tuple[int, ...]:
    return (rank, key.stream, 0 if key.stream == Stream.COLLECTIVE else key.part, key.source, key.target)


def check_operation(key: ExchangeKey, operation: Operation, world: int) -> None:
    """Refuse what no correct client says."""
    transfer = key.stream == Stream.TRANSFER
    part = key.part if key.stream == Stream.BUCKET else 0
    if not transfer and key != (key.stream, key.number, part, -1, -1):
        raise UnexpectedMessageError(f"no exchange has the key {tuple(key)}")
    if transfer != (operation.kind is Kind.TRANSFER):
        raise UnexpectedMessageError(f"{operation} cannot be exchanged under the key {tuple(key)}")
    if transfer and not (0 <= key.source < world and 0 <= key.target < world and key.source != key.target):
        raise InvalidRankError(f"a transfer from {key.source} to {key.target} in a group of {world}")
    if operation.kind is Kind.BROADCAST and not 0 <= operation.root < world:
        raise InvalidRankError(f"root {operation.root} is not in a group of {world}")
    if operation.kind in WEIGHED:
        if operation.op is Op.NONE:
            raise InvalidArgumentError("a reduction that does not say how to reduce")
        check_reducible(operation.op, operation.dtype)
