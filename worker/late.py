"""What a member does about results that it has not asked for, and about gradients that come too late.

    result                                      what happens
    ──────────────────────────────────────────  ─────────────────────────────────────────────────────────────────
    of a bucket that it has yet to come to      kept in the backlog; when the bucket is pushed, it is there
    … and there is no room                      LeftOutError: it has to join again
    in which what it gave does not count        nothing more of this round is sent, whose other results come unasked
    … and late contributions are to be kept     what it gave to these slices is added to what it gives next
    … and it is not finite                      it is forgotten, unless that halts the group

When the round fails, that is told for one of its buckets at least, and then holds for all.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import ClosedError, GradServerError
from gradserver.protocol.exchange import ExchangeKey, Op, Operation, Stream
from gradserver.protocol.limits import MAX_TEXT
from gradserver.protocol.messages import Leave, Result, Taken, Welcome
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table
from gradserver.worker.handle import Handle
from gradserver.worker.member.backlog import Backlog, Unasked, room_for
from gradserver.worker.member.carryover import CarryOver, is_finite
from gradserver.worker.member.exchanges import Exchange
from gradserver.worker.member.learner import Learner, Stage
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.member.stragglers import Read, lacks, overrun
from gradserver.worker.member.waiter import Waiter

log = logging.getLogger("gradserver")

_CHRONIC_ROUNDS: Final = 8
"""In a row, after which a worker that is late is told what that means."""


class Latecomer(ABC):
    """A part of `gradserver.worker.traffic.Traffic`, which has these attributes."""

    round: int
    stage: Stage
    plan: Plan | None
    learner: Learner
    _channel: Channel
    _state: threading.Lock
    _shards: list[ShardTraffic]
    _pushed: dict[int, Handle]
    _table: Table

    def _expect_nothing(self) -> None:
        self._backlog = Backlog()
        self._read = Read()
        self._kept = CarryOver()
        self._failures: dict[int, GradServerError] = {}
        """What made a round fail that this worker is in, or has yet to come to."""
        self._late_rounds = 0
        """For how many rounds in a row it was late."""
        self._late = -1
        """The last round in which something of this worker did not count."""

    @property
    @abstractmethod
    def membership(self) -> Welcome:
        """Who is in the group."""

    @abstractmethod
    def seat_of(self, rank: int) -> int:
        """The seat of ``rank``."""

    @abstractmethod
    def lost(self, error: GradServerError) -> None:
        """Nothing goes any more."""

    def _lacks_us(self, result: Result) -> bool:
        return bool(result.without) and lacks(result, self.seat_of(self.membership.rank))

    def _keep_own(self, exchange: Exchange, start: int, stop: int) -> None:
        """What this worker gives to some slices does not count, and their result is about to be written over it."""
        if self.stage is Stage.OBSERVING:  # it was not to count
            return
        if self.membership.late != "keep" or exchange.operation.op is not Op.MEAN or not exchange.weight > 0:
            return
        given = [(index, exchange.given(index)) for index in range(start, stop)]
        with self._state:
            for index, contribution in given:
                if self.membership.nonfinite != "halt" and not is_finite(contribution, exchange.operation.dtype):
                    continue  # what is not finite would spoil the next round, too
                self._kept.put(exchange.key.part, index, contribution)

    def _note_lateness(self) -> bool:
        """A round is over; gives whether this worker was late, and what it gave is kept. With the lock held."""
        self._failures.pop(self.round, None)
        was_late = self._late == self.round and self.stage is not Stage.OBSERVING
        self._late_rounds = self._late_rounds + 1 if was_late else 0
        if self._late_rounds and self._late_rounds % _CHRONIC_ROUNDS == 0:
            what = "is added to what it gives next" if self.membership.late == "keep" else "is forgotten"
            log.warning(
                "group %r: this worker, rank %d, was late for %d rounds in a row. What it gave too late %s; if it "
                "stays this slow, give it smaller batches, or the others more time (--grace)",
                *(self.membership.group, self.membership.rank, self._late_rounds, what),
            )
        return was_late and self.membership.late == "keep"

    def _keep(self, result: Result, payload: Buffer | None) -> bool:
        """Keep a result for what has not begun; False if there is no room. What has ended is nobody's any more."""
        key = result.key
        to_come = key.number > self.round or (key.number == self.round and key.part not in self._pushed)
        if key.stream != Stream.BUCKET or not self.membership.seats or not to_come:
            return True
        return self._backlog.put(result, payload)

    def _expect(self, plan: Plan, kept: Collection[int] = ()) -> None:
        """From now on what comes unasked is for ``plan``. Buckets ``kept`` are as before. With the lock held."""
        keys = (ExchangeKey(Stream.BUCKET, 0, part) for part in range(len(plan.buckets)))
        shares = (self._table.share(key, bucket.operation) for key, bucket in zip(keys, plan.buckets, strict=True))
        slices = [layout.count for layout, _ in shares]
        self._backlog = Backlog(room_for(plan.nbytes), slices, [section.parts for section in plan.each])
        self._kept.forget(kept)
        self._failures.clear()

    def _send_no_more(self) -> None:
        """Of the round for which this worker is late: it would not count. With the lock held."""
        for shard in self._shards:
            for exchange in shard.exchanges.values():
                if exchange.key.stream == Stream.BUCKET and exchange.key.number == self._late:
                    shard.queue.hold_back(exchange)

    def _read_unasked(self, payload: Buffer | None, shard: int) -> None:
        with self._state:
            told = self._read.more(shard, payload)
        if told:
            with suppress(ClosedError, ConnectionError):
                self._channel.send(Taken(told), (), shard)

    def _overrun(self, number: int) -> None:
        """There is no room for a result of round ``number``."""
        if self.stage is Stage.JOINING:
            with self._state:
                self.learner.behind = True
                if self.plan is not None:
                    self._expect(self.plan)  # what has come is of no use, and takes room
            return
        error = overrun(self._backlog, self.round, number, self.membership.rank)
        with suppress(ClosedError, ConnectionError):
            self._channel.send(Leave(error.message[:MAX_TEXT], True))
        self.lost(error)

    def _fail_held_back(self, key: ExchangeKey, error: GradServerError) -> list[Waiter]:
        """Of a round for which this worker is late, and which has failed, it may hear no more. With the lock held."""
        if key.stream != Stream.BUCKET or not self.membership.late or key.number < self.round:
            return []
        self._failures.setdefault(key.number, error)
        handles: list[Waiter] = []
        for shard in self._shards:
            lost = [e for e in shard.exchanges.values() if e.held_back and e.key.number == key.number]
            for exchange in lost:
                del shard.exchanges[exchange.key]
                shard.queue.write_off(exchange)
                handles.append(exchange.handle)
        return handles

    def _is_over(self, key: ExchangeKey) -> bool:
        """Whether nothing that is sent for ``key`` would count any more."""
        return key.stream == Stream.BUCKET and key.number == self._late

    def _came(self, key: ExchangeKey) -> list[Unasked]:
        """What has come of a bucket before it has begun."""
        return self._backlog.take(key.number, key.part) if key.stream == Stream.BUCKET else []

    def _shards_of(self, came: Sequence[Unasked], key: ExchangeKey, operation: Operation) -> list[int]:
        """Which data shard each of these results of a bucket is from."""
        if not came:
            return []
        _, bounds = self._table.share(key, operation)
        return [bisect_right(bounds, result.slice) - 1 for result, _ in came]
