"""A member's part in opening the books of a durable group anew: it says what it holds, and hears what stands.

`protocol.resuming` has the conversation. In it this member is, for each data half:

    state     event                       next      what happens
    ────────  ──────────────────────────  ────────  ───────────────────────────────────────────────────────────────
    FLOWING   the connection breaks       HELD      nothing is pushed
    any       Resumed                     HELD      Holding: each slice that it keeps the result of
    HELD      Fetch                       HELD      Held: such a result
    HELD      Result                      HELD      as any other; also if nothing was pushed, or not even begun
    HELD      Standing of that Resumed    FLOWING   what is begun and unanswered is pushed from the beginning
    HELD      Standing of an earlier one  HELD      nothing
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from protocol.buffer import Buffer
from protocol.channel import Channel
from protocol.errors import GradServerError, MalformedMessageError
from protocol.exchange import Kind, Stream, gets, is_state
from protocol.messages import Result
from protocol.resuming import Fetch, Held, Holding, Resume, Resumed, Span, Standing, State, pack_spans
from worker.clock import Clock
from worker.handle import Handle
from worker.outbox import Exchange, ShardTraffic
from worker.regions import Regions
from worker.retained import Kept, Retained, runs

if TYPE_CHECKING:
    from worker.session import Session


class Books:
    """What a member holds, and what of its exchanges counts.

    Args:
        session: whose exchanges.
        clock: stands still while it is not known what counts.
        regions: where in shared memory results are written.
    """

    def __init__(self, session: Session, clock: Clock, regions: Regions) -> None:
        self.regions = regions
        self.retained = Retained(session.membership.credit)
        self._session = session
        self._clock = clock
        self._lock = threading.Lock()
        self._version = -1
        self._expected: Handle | None = None
        """Of whoever waits for the Resumed that answers his Resume."""
        self._silent = False
        """That was heard, and before Holding something else has to be said."""
        self._standing: Handle | None = None
        """Of whoever waits for the last Standing."""
        self._again = 0
        """Slices that are pushed another time."""

    # ── what the lifeline calls ───────────────────────────────────────────────────────────────────────

    def suspend(self) -> None:
        """Push nothing, until it is known what counts."""
        for shard in self._session._shards:
            shard.held = True

    def is_held(self, shard: int) -> bool:
        """Whether nothing is pushed to that shard."""
        return self._session._shards[shard].held

    def resume(self, channel: Channel) -> Handle:
        """Say on a new connection who this is; the handle is done, with the Resumed, when that is known there."""
        session, welcome = self._session, self._session.membership
        with self._lock:
            self._expected = handle = Handle(session.timeout, channel)
            self._silent = True
        with session._state:
            plan = session.plan.hash if session.plan is not None else ""
            epoch = session._announced.latest
        seat = welcome.seats[welcome.rank]
        channel.send(Resume(welcome.group, seat, welcome.token, epoch, plan, session.donor.serves))
        return handle

    def restate(self, channel: Channel) -> Handle:
        """Say what this member holds; the handle is done when all data halves have said what stands.

        Its value is the number of slices that are pushed again.
        """
        with self._lock:
            self._silent, self._again = False, 0
            self._standing = handle = Handle(self._session.timeout, channel)
            self._session.propose_again(channel)
            self._hold(channel)
        return handle

    def interrupt(self, error: GradServerError) -> None:
        """The connection on which this member resumes has come to its end."""
        with self._lock:
            waiting = [handle for handle in (self._expected, self._standing) if handle is not None]
            self._expected = self._standing = None
        for handle in waiting:
            handle._complete(error)

    def forget(self) -> None:
        """Keep nothing any more: the membership has ended. With the session's lock held."""
        self.retained = Retained(0)
        self.regions.forget()

    # ── what the coordinator says ─────────────────────────────────────────────────────────────────────

    def heed(self, message: Resumed | Fetch | Standing, shard: ShardTraffic) -> None:
        """Take what is said of the books."""
        match message:
            case Resumed():
                self._resumed(message)
            case Fetch():
                self._fetch(message, shard.number)
            case Standing():
                self._stands(message, shard)

    def _resumed(self, message: Resumed) -> None:
        """Everything that was pushed and is unanswered is void."""
        self.suspend()
        self._clock.stop()
        self._session.forget_states()
        with self._lock:
            self._version = message.version
            expected, self._expected = self._expected, None
            if expected is not None:
                expected._value = message
                expected._complete()
            elif not self._silent:
                self._hold(self._session._channel)

    def _fetch(self, message: Fetch, shard: int) -> None:
        """Somebody lacks a result that this member keeps."""
        with self._session._state:
            kept = self.retained.find(message.key, message.slice)
        if kept is None:
            raise MalformedMessageError(f"a Fetch of slice {message.slice} of {tuple(message.key)}, which is not held")
        result, payload = kept
        held = Held(message.version, message.key, message.slice, result.weight, result.present, result.without)
        self._session._channel.send(held, (payload,) if payload is not None else (), shard)

    def _stands(self, message: Standing, shard: ShardTraffic) -> None:
        """What has no result is to be pushed (again)."""
        if message.version != self._version:
            return
        session = self._session
        with session._pumping, session._state:  # nobody is about to push what he took before
            session._slots.forget()
            self.regions.forget()
            exchanges = [exchange for exchange in shard.exchanges.values() if not exchange.dropped]
            for exchange in exchanges:
                self._again += exchange.rewind()
            shard.outbox.rewind(exchanges)
            shard.held = False
            done = not any(other.held for other in session._shards)
        if done:
            self._clock.go()
            with self._lock:
                handle, self._standing = self._standing, None
            if handle is not None:
                handle._value = self._again
                handle._complete()
        session._pump()
        session._channel.watch(session.idle)

    # ── what becomes of exchanges ─────────────────────────────────────────────────────────────────────

    def answered(self, exchange: Exchange, result: Result, payload: Buffer | None) -> None:
        """Keep a result. With the session's lock held."""
        slices = range(result.slice, result.slice + result.slices)
        if result.key.stream == Stream.BUCKET:
            for index in slices:
                self.retained.keep_slice(index, Kept(result, exchange.kept_payload(index, result, payload)))
            return
        if is_state(result.key):
            return  # which is void when the books are opened
        for index in slices:
            own = result._replace(slice=index, slices=1, placed=False)
            cost = exchange.layout.cost(index)
            if self._gets(exchange, index):
                self.retained.keep_past(Kept(own, exchange.kept_payload(index, result, payload)), cost)
            elif (given := exchange.copy_of(index)) is not None:
                self.retained.keep_past(Kept(own._replace(present=True), given), cost)
        if len(exchange.answered) + result.slices == exchange.stop - exchange.start:
            self.retained.over(result.key, self._of_others(exchange))

    def _gets(self, exchange: Exchange, index: int) -> bool:
        """Whether this member's result of a slice is what others' is."""
        operation, key = exchange.operation, exchange.key
        me = self._session.membership.rank
        if operation.kind in (Kind.BROADCAST, Kind.TRANSFER):
            me = self._session.seat_of(me)
        return operation.kind is Kind.BARRIER or gets(operation, me, key, exchange.layout.owner(index))

    def _of_others(self, exchange: Exchange) -> list[int]:
        """Slices of which only others get bytes."""
        if exchange.operation.kind is not Kind.REDUCE_SCATTER:
            return []
        return [index for index in range(exchange.start, exchange.stop) if not self._gets(exchange, index)]

    def early(self, result: Result, payload: Buffer | None) -> None:
        """Keep the result of a bucket that is not begun, until it is. With the session's lock held."""
        if result.key.stream == Stream.BUCKET and result.slices == 1 and not result.placed:
            self.retained.keep_slice(result.slice, Kept(result, payload))

    def begun(self, exchange: Exchange, came: Iterable[tuple[Result, Buffer | None]]) -> bool:
        """Give a bucket what came before it had begun; whether that was all. With the session's lock held."""
        if exchange.key.stream != Stream.BUCKET:
            return False
        for result, payload in came:
            self.early(result, payload)
        for index, (result, payload) in self.retained.of_bucket(exchange.key).items():
            exchange.write(result, payload)
            exchange.settle(index, index + 1)
            exchange.handle.present |= result.present
            exchange.handle.weight = max(exchange.handle.weight, result.weight)
        if exchange.answered:
            exchange.rewind()
        return exchange.done

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, channel: Channel) -> None:
        session = self._session
        for shard in session._shards:
            with session._state:
                number = max(session.round, session._announced.rounds)
                weight = session._weight if session._pushed and number == session.round else 0.0
                for result, payload in session._backlog.of_round(number):
                    self.early(result, payload)
                spans = pack_spans([*self.retained.spans(), *self._lacking(shard)])
            channel.send(Holding(self._version, number, weight), (spans,), shard.number)

    def _lacking(self, shard: ShardTraffic) -> Iterator[Span]:
        """Collectives and transfers that were begun and have no result."""
        for key, exchange in shard.exchanges.items():
            if key.stream == Stream.BUCKET or exchange.dropped:
                continue
            exchange.give_again(self._of_others(exchange))
            open_ones = (index for index in range(exchange.start, exchange.stop) if index not in exchange.answered)
            yield from runs((State.LACKING, key, index) for index in open_ones)
