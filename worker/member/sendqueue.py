"""Slices that wait to be sent to one data shard, and the credit that they draw on.

Each pool (`gradserver.protocol.exchange.Pool`) has a limit of bytes in flight. Collectives and transfers are sent in
the order in which they were called, which all members share. Buckets become ready in an order that members do not
share. So two of them could each fill their credit with what the other has not begun. Therefore the *frontier*, the
first slice in the plan's order that was not answered, may always be sent. The first unfinished slice of all is the
frontier of all members, so something can always move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import ExchangeKey, Pool, Stream
from gradserver.protocol.messages import Push, Welcome
from gradserver.worker.member.exchange import Exchange

_MESSAGES_IN_FLIGHT: Final = 4
"""Messages with several slices that are under way at once at least: one comes while another one is reduced."""


class SendQueue:
    """Exchanges with slices yet to be sent to one shard. Not safe to share: the session's lock guards it."""

    def __init__(self) -> None:
        self._unsent: dict[Pool, deque[Exchange]] = {pool: deque() for pool in Pool}
        self._in_flight = dict.fromkeys(Pool, 0)
        self.waiting = 0
        """Number of exchanges with slices that are not sent yet."""

    def add(self, exchange: Exchange) -> None:
        """Send ``exchange``, behind what its pool holds already."""
        self._unsent[exchange.pool].append(exchange)
        self.waiting += 1

    def next(
        self, credit: int, frontier: Callable[[ShardTraffic], Exchange | None], shard: ShardTraffic
    ) -> tuple[Push, Sequence[Buffer]] | None:
        """The next message that ``credit`` bytes for each pool allow; None if there is none.

        ``frontier`` is asked for the exchange of buckets that may be sent to ``shard`` without credit.
        """
        if not self.waiting:
            return None
        for pool, unsent in self._unsent.items():
            if not unsent:
                continue
            exchange = unsent[0]
            if exchange.is_filling:  # one behind it may have all that it sends
                exchange = next((other for other in unsent if not other.is_filling), exchange)
            if self._in_flight[pool] + exchange.next_cost() <= credit and (push := self._push(exchange)) is not None:
                return push
            # Neither credit nor slots that are taken may hold back what all wait for.
            first = frontier(shard) if pool is Pool.BUCKETS else None
            if first is not None and (push := self._push(first, alone=True)) is not None:
                return push
        return None

    def _push(self, exchange: Exchange, alone: bool = False) -> tuple[Push, Sequence[Buffer]] | None:
        before = exchange.sent
        push = exchange.push(alone)
        if push is not None:
            self._in_flight[exchange.pool] += exchange.cost(before, before + push[0].slices)  # not of settled ones
            if exchange.sent == exchange.stop:
                self._remove(exchange)
        return push

    def answered(self, exchange: Exchange, start: int, stop: int) -> None:
        """The slices from ``start`` up to ``stop`` have their result: their credit is free again."""
        if start < exchange.sent:  # else it came unasked
            self._in_flight[exchange.pool] -= exchange.cost(start, min(stop, exchange.sent))
        exchange.settle(start, stop)

    def write_off(self, exchange: Exchange) -> None:
        """Take back the credit of slices that will not be answered, and send no more of them."""
        for index in range(exchange.start, exchange.sent):
            if index not in exchange.answered:
                self._in_flight[exchange.pool] -= exchange.cost(index, index + 1)
        exchange.write_off()
        if exchange.sent < exchange.stop:
            self._remove(exchange)

    def hold_back(self, exchange: Exchange) -> None:
        """Send no more of ``exchange``: its results are on their way in any case."""
        exchange.held_back = True
        self._remove(exchange)

    def drop(self, exchange: Exchange) -> bool:
        """Send no more of ``exchange``, which has failed elsewhere. Return true if nothing is left to be answered."""
        exchange.dropped = True
        if exchange.sent < exchange.stop:
            self._remove(exchange)
            exchange.stop = exchange.sent
        return exchange.done

    def rewind(self, exchanges: Iterable[Exchange]) -> None:
        """Begin again, and send ``exchanges`` in the order in which they began."""
        self.clear()
        self._in_flight = dict.fromkeys(Pool, 0)
        for exchange in exchanges:
            if exchange.sent < exchange.stop and not exchange.held_back:
                self.add(exchange)

    def clear(self) -> None:
        """Send nothing more."""
        for unsent in self._unsent.values():
            unsent.clear()
        self.waiting = 0

    def _remove(self, exchange: Exchange) -> None:
        unsent = self._unsent[exchange.pool]
        if unsent and unsent[0] is exchange:
            unsent.popleft()
            self.waiting -= 1
        elif exchange in unsent:  # not after `clear`
            unsent.remove(exchange)
            self.waiting -= 1


class ShardTraffic:
    """Exchanges that are under way with one data shard. Number 0 is the coordinator itself."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held = False
        """True while nothing is pushed, until it is known again what counts."""
        self.message_bytes = 0
        """Bytes of the slices that travel in one message. 0: each slice has its own."""
        self.exchanges: dict[ExchangeKey, Exchange] = {}
        self.queue = SendQueue()

    def send_together(self, nbytes: int, welcome: Welcome) -> None:
        """Send slices that travel in messages of up to ``nbytes``, if rounds wait for all members.

        Where they do not, a member that has used up its credit must show, and waits for no more credit than a slice's.
        """
        if welcome.mode == "sync" and not welcome.late:
            self.message_bytes = min(nbytes, welcome.credit // _MESSAGES_IN_FLIGHT)

    def hold(self) -> None:
        """Push nothing, until `release`."""
        self.held = True

    def release(self) -> None:
        """Push what has no result, from the beginning."""
        self.queue.rewind(list(self.exchanges.values()))
        self.held = False

    def add(self, exchange: Exchange, is_over: bool = False) -> None:
        """``exchange`` has begun; if it ``is_over``, nothing of it is to be sent."""
        self.exchanges[exchange.key] = exchange
        self.queue.add(exchange)
        if is_over:
            self.queue.hold_back(exchange)

    def take_back(self, exchange: Exchange) -> None:
        """Open ``exchange`` again, in its place among the others: `release` sends it."""
        if exchange.siblings is not None:
            exchange.siblings.take_back(exchange)
        self.exchanges[exchange.key] = exchange
        self.exchanges = {key: self.exchanges[key] for key in sorted(self.exchanges, key=_order)}


def _order(key: ExchangeKey) -> tuple[int, ...]:
    """Return where an exchange is sent among others: collectives in the order in which all members call them."""
    return (key.stream, key.part, key.number) if key.stream == Stream.COLLECTIVE else (key.stream,)
