"""What a worker has begun, and what of it may be sent: exchanges, and the credit they draw on.

Each pool (`protocol.exchange.Pool`) may have so many bytes in flight. Collectives and transfers are sent
in the order in which they were called, which all members share. Buckets become ready in an order that
members do not share, so two of them could each fill their credit with what the other has not begun.
Therefore the *frontier*, the first slice in the plan's order that was not answered, may always be sent:
the first unfinished slice of all is everybody's frontier, so something can always move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from protocol.exchange import ExchangeKey, Layout, Operation, Pool, Stream
from protocol.messages import Push
from protocol.wire import Buffer
from worker.handle import Handle
from worker.tensors import Bytes


class Destination(Protocol):
    """Puts the results of slices where they belong. Called for every slice, also those that others get."""

    def __call__(self, start: int, stop: int, payload: Buffer | None) -> None:
        """Take bytes ``start`` to ``stop`` of the exchange; None stands for zeros."""


def into(data: Bytes) -> Destination:
    """Results go where the contribution came from."""

    def write(start: int, stop: int, payload: Buffer | None) -> None:
        if payload is None:
            data[start:stop] = 0
        else:
            data[start:stop] = np.frombuffer(payload, np.uint8)

    return write


class Exchange:
    """One exchange that this worker takes part in and that is not done."""

    __slots__ = ("answered", "destination", "handle", "key", "layout", "operation", "pool", "sent", "source", "weight")

    def __init__(
        self,
        key: ExchangeKey,
        pool: Pool,
        operation: Operation,
        layout: Layout,
        source: Bytes | None,
        destination: Destination | None,
        weight: float,
        handle: Handle,
    ) -> None:
        self.key = key
        self.pool = pool
        self.operation = operation
        self.layout = layout
        self.source = source
        self.destination = destination
        self.weight = weight
        self.handle = handle
        self.sent = 0
        self.answered: set[int] = set()

    def push(self) -> tuple[Push, Sequence[Buffer]]:
        """The next slice's message."""
        index = self.sent
        self.sent += 1
        operation = self.operation if index == 0 and self.key.stream != Stream.BUCKET else None
        if self.source is None:
            return Push(self.key, index, self.weight, False, operation), ()
        start, stop = self.layout.span(index)
        item = self.layout.itemsize
        payload = self.source[start * item : stop * item].data
        return Push(self.key, index, self.weight, True, operation), (payload,)

    def first_unanswered(self) -> int:
        """The first slice without a result."""
        index = 0
        while index in self.answered:
            index += 1
        return index


class Outbox:
    """Exchanges with slices yet to be sent. Not safe to share: the session's lock guards it."""

    def __init__(self) -> None:
        self._unsent: dict[Pool, deque[Exchange]] = {pool: deque() for pool in Pool}
        self._in_flight = dict.fromkeys(Pool, 0)
        self.waiting = 0
        """How many exchanges have slices yet to be sent."""

    def add(self, exchange: Exchange) -> None:
        """``exchange`` is to be sent, behind what its pool holds already."""
        self._unsent[exchange.pool].append(exchange)
        self.waiting += 1

    def next(self, credit: int, frontier: Callable[[], Exchange | None]) -> tuple[Push, Sequence[Buffer]] | None:
        """The next message that ``credit`` bytes for each pool allow; None if there is none.

        ``frontier`` is asked for the exchange of buckets that may be sent without credit.
        """
        if not self.waiting:
            return None
        for pool, unsent in self._unsent.items():
            if not unsent:
                continue
            exchange = unsent[0]
            cost = exchange.layout.cost(exchange.sent)
            if self._in_flight[pool] + cost > credit:
                first = frontier() if pool is Pool.BUCKETS else None
                if first is None:
                    continue
                exchange, cost = first, first.layout.cost(first.sent)
            self._in_flight[pool] += cost
            push = exchange.push()
            if exchange.sent == exchange.layout.count:
                self._remove(exchange)
            return push
        return None

    def answered(self, exchange: Exchange, index: int) -> None:
        """Slice ``index`` has its result: its credit is free again."""
        exchange.answered.add(index)
        self._in_flight[exchange.pool] -= exchange.layout.cost(index)

    def write_off(self, exchange: Exchange) -> None:
        """Take back the credit of slices that will not be answered, and send no more of them."""
        for index in range(exchange.sent):
            if index not in exchange.answered:
                self._in_flight[exchange.pool] -= exchange.layout.cost(index)
        if exchange.sent < exchange.layout.count:
            self._remove(exchange)

    def clear(self) -> None:
        """Send nothing more."""
        for unsent in self._unsent.values():
            unsent.clear()
        self.waiting = 0

    def _remove(self, exchange: Exchange) -> None:
        unsent = self._unsent[exchange.pool]
        if exchange in unsent:  # not after `clear`
            unsent.remove(exchange)
            self.waiting -= 1
