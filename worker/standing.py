"""A member's part in opening the books of a durable group anew: it says what it holds, and hears what stands.

`gradserver.protocol.resuming` has the conversation. In it this member is, for each data half:

    state     event                       next      what happens
    ────────  ──────────────────────────  ────────  ───────────────────────────────────────────────────────────────
    FLOWING   the connection breaks       HELD      nothing is pushed
    any       Resumed                     HELD      Holding: each slice that it keeps the result of
    any       … at one of several halves  HELD      the same, when both it and the primary have said so
    HELD      Fetch                       HELD      Held: such a result
    HELD      Result                      HELD      as any other; also if nothing was pushed, or not even begun
    HELD      Standing of that Resumed    FLOWING   what is begun and unanswered is pushed from the beginning
    HELD      Standing of an earlier one  HELD      nothing
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import GradServerError, MalformedMessageError
from gradserver.protocol.exchange import PERSONAL, PORTIONED, ROOTED, ExchangeKey, Kind, Stream, gets, is_state
from gradserver.protocol.messages import Result
from gradserver.protocol.resuming import Fetch, Held, Holding, Resume, Resumed, Span, Standing, State, pack_spans
from gradserver.worker.clock import Clock
from gradserver.worker.handle import Handle
from gradserver.worker.member.exchanges import Exchange
from gradserver.worker.member.regions import Regions
from gradserver.worker.member.retained import Kept, Retained, runs
from gradserver.worker.member.sendqueue import ShardTraffic

if TYPE_CHECKING:
    from gradserver.worker.session import Session


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
        """That of which the primary has told."""
        self._heard: dict[int, int] = {}
        """The same of each shard."""
        self._said: dict[int, int] = {}
        """Of which this member has said what it holds, to each."""
        self._stands_at = -1, 0, 0.0, -1
        """What it says to all of them alike: version, round, and its weight there."""
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
            self._heard.clear()
            self._said.clear()
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
        self._await_pushes()
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
            waiting += self._session.stop_attending()
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
                self._resumed(message, shard)
            case Fetch():
                self._fetch(message, shard.number)
            case Standing():
                self._stands(message, shard)

    @property
    def version(self) -> int:
        """The latest of which the primary has told."""
        return self._version

    def _resumed(self, message: Resumed, shard: ShardTraffic) -> None:
        """Everything that was pushed and is unanswered is void."""
        elsewhere = shard.number > 0
        if not elsewhere and not self._session.goes_on_with(message.shards, self._expected is not None):
            return  # all connections are made anew
        if elsewhere:
            shard.held = True
        else:
            self.suspend()
        self._clock.stop()
        self._await_pushes()
        self._session.forget_states()
        with self._lock:
            self._heard[shard.number] = message.version
            expected = None
            if not elsewhere:
                self._version = message.version
                expected, self._expected = self._expected, None
            if expected is not None:
                expected._value = message
                expected._complete()
            elif not self._silent:
                self._hold(self._session._channel)

    def _await_pushes(self) -> None:
        """Wait until another thread has sent the push that it is about to send.

        A push that comes to a data half before Holding is void. Behind Holding it would count, and come once more.
        """
        with self._session._pumping:
            pass

    def _fetch(self, message: Fetch, shard: int) -> None:
        """Somebody lacks a result that this member keeps."""
        with self._session._state:
            kept = self.retained.find(message.key, message.slice)
        if kept is None:
            raise MalformedMessageError(f"a Fetch of slice {message.slice} of {tuple(message.key)}, which is not held")
        result, payload, _ = kept
        what = message.version, message.key, message.slice
        held = Held(*what, result.weight, result.present, result.without, result.weights)
        self._session._channel.send(held, (payload,) if payload is not None else (), shard)

    def _stands(self, message: Standing, shard: ShardTraffic) -> None:
        """What has no result is to be pushed (again)."""
        if message.version != self._version:
            return
        session = self._session
        with session._pumping, session._state:  # nobody is about to push what he took before
            if all(other.held for other in session._shards):  # the first of them to say so
                session._slots.forget()
                self.regions.forget()
            given_up = [exchange for exchange in shard.exchanges.values() if exchange.dropped]
            ended = [session.part_is_void(exchange) for exchange in given_up]
            exchanges = list(shard.exchanges.values())
            for exchange in exchanges:
                self._again += exchange.rewind()
            shard.queue.rewind(exchanges)
            shard.held = False
            done = not any(other.held for other in session._shards)
            if done:
                self.retained.said()
        for handle, error in ended:
            if handle is not None:
                handle._complete(error)
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
        slices, shard = range(result.slice, result.slice + result.slices), exchange.shard
        if result.key.stream == Stream.BUCKET:
            for index in slices:
                self.retained.keep_slice(
                    index, Kept(result, exchange.kept_payload(index, result, payload), exchange.shard)
                )
            return
        if is_state(result.key):
            return  # which is void when the books are opened
        for index in slices:
            own = result._replace(slice=index, slices=1, placed=False)
            cost = exchange.layout.cost(index)
            if self._gets(exchange, index):
                self.retained.keep_past(Kept(own, exchange.kept_payload(index, result, payload), shard), cost)
            elif (given := exchange.copy_of(index)) is not None:
                self.retained.keep_past(Kept(own._replace(present=True), given, shard), cost)
            elif exchange.operation.kind not in PORTIONED and self._session._shards[shard].held:
                self.retained.pass_on(Kept(own._replace(present=False), None, shard))
        if len(exchange.answered) + result.slices == exchange.stop - exchange.start:
            self.retained.over(result.key, self._of_others(exchange), shard)

    def _gets(self, exchange: Exchange, index: int) -> bool:
        """Whether this member's result of a slice is what others' is."""
        operation, key = exchange.operation, exchange.key
        me = self._session.membership.rank
        if operation.kind in PORTIONED:
            return False
        if operation.kind in ROOTED or operation.kind is Kind.TRANSFER:
            me = self._session.seat_of(me)
        return operation.kind is Kind.BARRIER or gets(operation, me, key, exchange.layout.owner(index))

    def _of_others(self, exchange: Exchange) -> list[int]:
        """Slices of which only others get bytes."""
        if exchange.operation.kind not in PERSONAL:
            return []
        return [index for index in range(exchange.start, exchange.stop) if not self._gets(exchange, index)]

    def early(self, result: Result, payload: Buffer | None, shard: int) -> None:
        """Keep the result of a bucket that is not begun, until it is. With the session's lock held."""
        if result.key.stream == Stream.BUCKET and result.slices == 1 and not result.placed:
            self.retained.keep_slice(result.slice, Kept(result, payload, shard))

    def begun(self, exchange: Exchange, came: Iterable[tuple[Result, Buffer | None]]) -> bool:
        """Give a bucket, or a shard's part of it, what came before it had begun; whether that was all.

        With the session's lock held.
        """
        if exchange.key.stream != Stream.BUCKET:
            return False
        for result, payload in came:
            if exchange.start <= result.slice < exchange.stop:
                self.early(result, payload, exchange.shard)
        for index, (result, payload, _) in self.retained.of_bucket(exchange.key).items():
            if not exchange.start <= index < exchange.stop:
                continue
            exchange.write(result, payload)
            exchange.settle(index, index + 1)
            exchange.handle.present |= result.present
            exchange.handle.weight = max(exchange.handle.weight, result.weight)
            if result.nonfinite:
                self._session.note_not_finite(exchange.handle, result)
        if exchange.answered:
            exchange.rewind()
        return exchange.done

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, channel: Channel) -> None:
        """Say it to each shard from which nothing is on its way any more that was sent before."""
        session = self._session
        for shard in session._shards:
            heard, said = (table.get(shard.number, -1) for table in (self._heard, self._said))
            if heard != self._version or said == self._version:
                continue
            with session._state:
                if self._version not in self._said.values():
                    self.retained.said()
                    number = self._round()
                    taking_part = session._pushed and number == session.round
                    weight = session._weight if taking_part else 0.0
                    self._stands_at = self._version, number, weight, self._section_of(number - 1)
                number = self._stands_at[1]
                for result, payload in session._backlog.of_round(number):
                    self.early(result, payload, session.shard_of(result))
                spans = pack_spans([*self.retained.spans(shard.number), *self._lacking(shard)])
            self._said[shard.number] = self._version
            channel.send(Holding(*self._stands_at), (spans,), shard.number)

    def _round(self) -> int:
        """The first round of which this member lacks something: a result, or to hear that it is over.

        That can overtake results of data shards elsewhere. With the session's lock held.
        """
        session = self._session
        over = session._announced.rounds
        if over <= session.round or session.plan is None or len(session._shards) == 1:
            return max(session.round, over)
        plan = session.plan
        for part in plan.parts_of(self._section_of(over - 1)) or plan.each[0].parts:
            key = ExchangeKey(Stream.BUCKET, over - 1, part)
            if len(self.retained.of_bucket(key)) < session._table.share(key, plan.buckets[part].operation).layout.count:
                return over - 1
        return over

    def _section_of(self, number: int) -> int:
        """Whose round ``number`` was, of which this member holds something; -1 if it holds nothing of it."""
        plan = self._session.plan
        for section in plan.each if plan is not None and number >= 0 else ():
            if any(self.retained.of_bucket(ExchangeKey(Stream.BUCKET, number, part)) for part in section.parts):
                return section.number
        return -1

    def _lacking(self, shard: ShardTraffic) -> Iterator[Span]:
        """Collectives and transfers that were begun and have no result."""
        for key, exchange in shard.exchanges.items():
            if key.stream == Stream.BUCKET or exchange.dropped:
                continue
            exchange.give_again(self._of_others(exchange))
            open_ones = (index for index in range(exchange.start, exchange.stop) if index not in exchange.answered)
            layout = exchange.layout
            yield from runs(
                Span(State.LACKING, key, index, index + 1, (), layout.nbytes(index) * layout.replies)
                for index in open_ones
            )
