"""What a worker exchanges: what it has begun, what it may send, and what became of it."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Channel
from gradserver.protocol.codecs import Feedback
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import (
    AbandonedError,
    ClosedError,
    DeadlineError,
    GradServerError,
    MalformedMessageError,
    MembershipChangedError,
    OutOfStepError,
    UsageError,
    WorkerLostError,
)
from gradserver.protocol.exchange import (
    STATE_TAG,
    WORLD_BOUND,
    ExchangeKey,
    Kind,
    Op,
    Operation,
    Stream,
    is_state,
    operation_of,
    pool_of,
)
from gradserver.protocol.limits import MAX_COUNTER, SLICE_BYTES
from gradserver.protocol.messages import Inquire, Message, Push, Result, Transfer, Welcome
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table
from gradserver.worker.coder import Coder
from gradserver.worker.donor import Donor, nobody_takes_it
from gradserver.worker.handle import VERDICT_SECONDS, Handle
from gradserver.worker.interrupts import uninterrupted
from gradserver.worker.late import Latecomer
from gradserver.worker.member.announced import Announced
from gradserver.worker.member.exchanges import NO_SLICES, Destination, Exchange, Siblings, Source
from gradserver.worker.member.learner import Learner, Stage
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.member.slots import Slots
from gradserver.worker.member.waiter import NotFinite, Waiter
from gradserver.worker.standing import Books
from gradserver.worker.turns import Turns

_NOT_SENT = "the member that was to send its state does not"


class Traffic(Latecomer):
    """A member's exchanges, with each of the group's data shards.

    Attributes:
        welcome: what the coordinator said when the group was complete; in an elastic one, who is there now.
        plan: what a round exchanges, once members have agreed.
        round: the one that is open or next.
        stage: whether this worker is a member yet.
        turns: what it says and asks of whose rounds are.
        skipped: whether the last round that is over is not to be applied, as somebody's gradients were not finite.
        left_out: whether something that this worker gave to it was not finite.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        self.timeout = timeout
        self.welcome: Welcome | None = None
        self.plan: Plan | None = None
        self.round = 0
        self.stage = Stage.MEMBER
        self._channel = channel
        self._state = threading.Lock()
        self._pumping = threading.Lock()
        self._pump_again = False
        self._shards = [ShardTraffic(0)]
        """What is under way, by data shard."""
        self._turn = 0
        """The shard that is sent to next, if there is something for it."""
        self._table = Table(1)
        self._slots = Slots(channel)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._inquiries: dict[ExchangeKey, Handle] = {}
        self._pushed: dict[int, Handle] = {}
        self._open = range(0)
        """The buckets that are exchanged in the present round, from its first push on."""
        self._feedback: dict[int, Feedback] = {}
        """What lossy codecs have kept back, by bucket."""
        self._announced = Announced()
        self._expect_nothing()
        self._closed: GradServerError | None = None
        self.books: Books | None = None
        """What this member keeps of results; None unless the group is durable."""
        self._weight = 0.0
        """Of this worker in the present round."""
        self.turns = Turns(self)
        self._sifts = False
        """Whether gradients that are not finite are left out, or their rounds skipped."""
        self.skipped = self.left_out = False
        self.donor = Donor(self)
        self.learner = Learner()

    @property
    def membership(self) -> Welcome:
        """Who is in the group, and which of them this worker is."""
        if self.welcome is None:
            raise UsageError("this worker has not joined a group yet")
        return self.welcome

    def seat_of(self, rank: int) -> int:
        """The seat of ``rank``, by which exchanges go. It is the rank where membership is fixed."""
        seats = self.membership.seats
        return seats[rank] if seats else rank

    def check_open(self) -> None:
        """Raise what ended this membership, if anything has."""
        if self._closed is not None:
            raise self._closed.again()

    @abstractmethod
    def lost(self, error: GradServerError) -> None:
        """The channel broke."""

    @abstractmethod
    def begin_round(self, part: int) -> None:
        """Before the first push of a round, to bucket ``part``."""

    @abstractmethod
    def new_handle(self, overdue: Callable[[float], DeadlineError]) -> Handle:
        """Of something that the coordinator is asked."""

    def tell(self, message: Message) -> None:
        """Say something to the coordinator."""
        self.check_open()
        self._channel.send(message)

    @abstractmethod
    def _heed(self, error: GradServerError) -> None:
        """A collective of an elastic group has failed, and whoever waits for it is about to raise ``error``."""

    # ── exchanging ────────────────────────────────────────────────────────────────────────────────────

    @uninterrupted
    def push_bucket(self, index: int, data: Bytes, weight: float, present: bool) -> Handle:
        """Contribute to bucket ``index`` of the present round; the result goes into ``data``."""
        if self.donor.due:
            self.donor.give()
        if not self._pushed:
            self.begin_round(index)
        with self._state:
            self.check_open()
            if self.stage is Stage.JOINING:
                raise self._not_yet("exchange gradients")
            if self.stage is Stage.OBSERVING:
                if self.learner.round is not None and self.round >= self.learner.round:
                    self.stage = Stage.ENTERED
                else:
                    self._late = self.round  # so nothing of it is sent
            assert self.plan is not None
            if index not in self._open:
                raise OutOfStepError(
                    f"bucket {self.plan.buckets[index].key!r} is another module's than those that were pushed in round "
                    f"{self.round}: finish the round before pushing it"
                )
            if (before := self._pushed.get(index)) is not None:
                before.raise_error()
                raise OutOfStepError(
                    f"bucket {self.plan.buckets[index].key!r} was already pushed in round {self.round}: "
                    f"finish the round before pushing it again"
                )
            key = ExchangeKey(Stream.BUCKET, self.round, index)
            operation = self.plan.buckets[index].operation
            if (failure := self._failures.get(self.round)) is not None:
                handle = self._pushed[index] = Handle(self.timeout)
                handle._complete(failure)
                return handle
            heavier = NO_SLICES
            if weight > 0 and self._kept.has(index):
                if not present:
                    data[:], present = 0, True
                layout, _ = self._table.share(key, operation)
                heavier = self._kept.add_to(index, data, weight, layout, operation.dtype, self._sifts)
            feedback = self._feedback_of(index, operation) if present and weight > 0 else None
            source = data if present and weight > 0 else None
            handle = self._begin(key, operation, source, data, weight, feedback=feedback, heavier=heavier)
            self._pushed[index], self._weight = handle, weight
            came = self._came(key)
        for (result, payload), shard in zip(came, self._shards_of(came, key, operation), strict=True):
            self._settle(result, payload, shard)
        self._pump()
        if not self._is_read_by_the_caller(operation):
            self._channel.watch(self.idle)
        return handle

    def _is_read_by_the_caller(self, operation: Operation) -> bool:
        """Whether the caller has pushed the last bucket of a round, and a small one: it waits for the results next.

        It reads them itself then, a switch of threads sooner. If it does something else before, the socket keeps them.
        In a durable group they are read at once, as who has them says so after a restart of the coordinator.
        """
        if len(self._pushed) < len(self._open) or self.books is not None:
            return False
        is_small = operation.numel * operation.dtype.itemsize <= SLICE_BYTES
        return is_small and self.stage is Stage.MEMBER and not any(shard.queue.waiting for shard in self._shards)

    def _feedback_of(self, index: int, operation: Operation) -> Feedback | None:
        if not operation.is_lossy:
            return None
        feedback = self._feedback.get(index)
        if feedback is None:
            feedback = self._feedback[index] = Feedback(operation.numel)
        return feedback

    @uninterrupted
    def collective(
        self,
        operation: Operation,
        source: Source | None,
        destination: Destination | None,
        weight: float = 1.0,
        value: Any = None,
        background: bool = False,
    ) -> Handle:
        """Take part in the group's next collective; ``background`` if the caller does not wait for it at once."""
        with self._state:
            self.check_open()
            if self.stage is not Stage.MEMBER:
                raise self._not_yet("call collectives")
            part = self.round if self.membership.seats else 0
            key = ExchangeKey(Stream.COLLECTIVE, self._next_number(Stream.COLLECTIVE), part)
            handle = self._begin(key, operation, source, destination, weight, value)
            if self.membership.seats:
                handle.on_error(self._heed)
        self._pump()
        if background:
            self._channel.watch(self.idle)
        return handle

    @uninterrupted
    def transfer(
        self,
        operation: Operation,
        ends: tuple[int, int, int],
        source: Bytes | None,
        destination: Destination | None,
        value: Any = None,
        background: bool = False,
    ) -> Handle:
        """Send or receive: ``ends`` is (source rank, target rank, tag)."""
        with self._state:
            self.check_open()
            if self.stage is not Stage.MEMBER:
                raise self._not_yet("send and receive")
            giver, taker, tag = self.seat_of(ends[0]), self.seat_of(ends[1]), ends[2]
            number = self._next_number(Stream.TRANSFER, giver, taker, tag)
            key = ExchangeKey(Stream.TRANSFER, number, tag, giver, taker)
            handle = self._begin(key, operation, source, destination, 1.0, value)
        self._pump()
        if background:
            self._channel.watch(self.idle)
        return handle

    @uninterrupted
    def state_part(self, transfer: Transfer, index: int, memory: Bytes) -> Handle:
        """Send, or receive into ``memory``, part ``index`` of a state."""
        with self._state:
            self.check_open()
            key = ExchangeKey(Stream.TRANSFER, index, STATE_TAG + transfer.number, transfer.donor, transfer.joiner)
            operation = operation_of(Kind.TRANSFER, Op.NONE, UINT8, memory.size)
            gives = self.seat_of(self.membership.rank) == transfer.donor
            if gives:
                self.donor.check(transfer)
            elif self.learner.transfer is not None and self.learner.transfer.number > transfer.number:
                raise WorkerLostError(_NOT_SENT)
            handle = self._begin(key, operation, memory if gives else None, None if gives else memory, 1.0)
        self._pump()
        self._channel.watch(self.idle)
        return handle

    def forget_states(self) -> None:
        """Whoever was to have a state begins anew: the others may go on without it, or have another coordinator."""
        with self._state:
            self.donor.forget()
        self._fail_states(nobody_takes_it(), MAX_COUNTER)

    def _fail_states(self, error: GradServerError, before: int) -> None:
        """Of transfers with a lower number than ``before`` nothing comes any more."""
        with self._state:
            here = [(key, shard.number) for shard in self._shards for key in shard.exchanges if is_state(key)]
        for key, number in here:
            if key.part < STATE_TAG + before:
                self._take_exchange_failure(key, error, number)

    def _take_from_another(self, transfer: Transfer) -> None:
        """This joiner is to take the state of ``transfer``: who was to send one before cannot, and nobody says more."""
        self._fail_states(WorkerLostError(_NOT_SENT), transfer.number)

    def _not_yet(self, what: str) -> UsageError:
        if self.stage is Stage.JOINING:
            return UsageError(
                f"this worker {self.stage.value}, and cannot {what} before it has the state of the others: wrap model "
                f"and optimizer in gradserver.Job, or call Worker.enter"
            )
        return UsageError(f"this worker {self.stage.value}: it can {what} when that round is over")

    def _next_number(self, *sequence: int) -> int:
        number = self._numbers.get(sequence, 0)
        self._numbers[sequence] = number + 1
        return number

    def _begin(
        self,
        key: ExchangeKey,
        operation: Operation,
        source: Source | None,
        destination: Destination | None,
        weight: float,
        value: Any = None,
        feedback: Feedback | None = None,
        heavier: Mapping[int, float] = NO_SLICES,
    ) -> Handle:
        welcome = self.membership
        layout, bounds = self._table.share(key, operation)
        handle = Handle(self.timeout, self._channel, value, lambda seconds: self._overdue(key, operation, seconds))
        if layout.count == 0:
            handle.weight, handle.present = weight, source is not None
            handle._complete()
            return handle
        pool = pool_of(key, self.seat_of(welcome.rank))
        coder = None
        if operation.is_lossy:
            assert isinstance(destination, np.ndarray)
            assert source is None or isinstance(source, np.ndarray)
            coder = Coder(key, layout, source, destination, feedback, self._sifts)
        what = key, pool, operation, layout, source, destination, weight, handle, self._channel, self._slots, coder
        named = operation.kind in WORLD_BOUND or key.stream == Stream.TRANSFER
        epoch = welcome.epoch if welcome.seats and named else 0
        regions = self.books.regions if self.books is not None else None
        if len(bounds) == 2:
            exchange = Exchange(*what, epoch=epoch, regions=regions, heavier=heavier)
            if self.books is not None and self.books.begun(exchange, self._came(key)):
                handle._complete()
            else:
                self._shards[0].add(exchange, self._is_over(key))
            return handle
        parts = [(shard, run) for shard, run in enumerate(pairwise(bounds)) if run[0] < run[1]]
        siblings = Siblings(len(parts))
        came = self._came(key) if self.books is not None else []
        for shard, run in parts:
            exchange = Exchange(*what, shard, run, siblings, epoch, regions, heavier)
            if self.books is None or not self.books.begun(exchange, came):
                self._shards[shard].add(exchange, self._is_over(key))
            elif self._part_over(exchange, siblings, None)[0]:
                handle._complete()
        return handle

    def shard_of(self, result: Result) -> int:
        """Whose the result of a bucket's slice is."""
        assert self.plan is not None
        return self._table.share(result.key, self.plan.buckets[result.key.part].operation).shard_of(result.slice)

    def part_is_void(self, part: Exchange) -> tuple[Waiter | None, GradServerError | None]:
        """Nobody will answer a part that was given up; who hears of it now, and of which error. With the lock held."""
        assert part.siblings is not None
        del self._shards[part.shard].exchanges[part.key]
        done, error = self._part_over(part, part.siblings, None)
        return (part.handle if done else None), error

    # ── sending, as credit allows ─────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Send what may be sent. One thread at a time does it; others leave a note and go on.

        Over memory a send can come back here in the same thread, with a result that frees credit: the
        note lets the outer call see to it.
        """
        self._pump_again = True
        while self._pump_again and self._pumping.acquire(blocking=False):
            try:
                self._pump_again = False
                shards = self._shards
                while (shards[0].queue.waiting or len(shards) > 1) and (push := self._next_push()) is not None:
                    self._channel.send(*push)
            except (ClosedError, ConnectionError) as error:
                self.lost(error if isinstance(error, GradServerError) else ClosedError(str(error)))
            finally:
                self._pumping.release()

    def _next_push(self) -> tuple[Push, Sequence[Buffer], int] | None:
        with self._state:
            turn = self._turn
            for shard in (*self._shards[turn:], *self._shards[:turn]) if turn else self._shards:
                if not shard.queue.waiting or shard.held:
                    continue
                push = shard.queue.next(self.membership.credit, partial(self._frontier, shard))
                if push is not None:
                    self._turn = (shard.number + 1) % len(self._shards)
                    return *push, shard.number
            return None

    def _frontier(self, shard: ShardTraffic) -> Exchange | None:
        """The exchange whose next slice is the first in the plan's order that was not answered, if it is ready.

        That is, of the slices that ``shard`` has to do with: the reasons hold for each shard by itself.
        """
        assert self.plan is not None
        for index in self._open:
            bucket, handle = self.plan.buckets[index], self._pushed.get(index)
            if bucket.numel == 0 or (handle is not None and not handle._open):
                continue
            key = ExchangeKey(Stream.BUCKET, self.round, index)
            exchange = shard.exchanges.get(key)
            if exchange is None and (handle is not None or not self._concerns(shard.number, key, bucket.operation)):
                continue
            if exchange is None or exchange.held_back or exchange.sent == exchange.stop:
                return None
            return exchange if exchange.sent == exchange.first_unanswered() else None
        return None

    def _concerns(self, shard: int, key: ExchangeKey, operation: Operation) -> bool:
        start, stop = self._table.share(key, operation).interval(shard)
        return start < stop

    @property
    def is_busy(self) -> bool:
        """Whether anything that this worker has begun is not done."""
        return any(shard.exchanges for shard in self._shards)

    def idle(self) -> bool:
        """Whether no results are due, and none come unasked: who may be late reads them whatever else it does."""
        if self.stage is Stage.OBSERVING or (self.stage is Stage.JOINING and self.learner.transfer is not None):
            return False
        return not self.membership.late and not any(shard.exchanges for shard in self._shards)

    # ── what became of it ─────────────────────────────────────────────────────────────────────────────

    def _take_result(self, result: Result, payloads: Sequence[Buffer], shard: int = 0) -> None:
        """A result has come from ``shard``: for what was pushed, or unasked."""
        payload, there = payloads[0] if payloads else None, self._shards[shard]
        waiting: list[Waiter] = []
        with self._state:
            if result.over:
                waiting = self._announced.ended(result.key.number)
            exchange = there.exchanges.get(result.key)
            if exchange is None and self.books is not None and there.held:
                self.books.early(result, payload, shard)
                return
            asked = (
                exchange is not None and result.slice + result.slices <= exchange.sent and not self._lacks_us(result)
            )
            has_room = exchange is not None or self._keep(result, payload)
        if not asked and not there.held:
            self._read_unasked(payload, shard)
        if exchange is not None:
            self._settle(result, payload, shard)
        elif not has_room:
            self._overrun(result.key.number)
        for handle in waiting:
            handle._complete()

    def _settle(self, result: Result, payload: Buffer | None, shard: int) -> None:
        """A result for what has begun."""
        start, stop = result.slice, result.slice + result.slices
        there = self._shards[shard]
        with self._state:
            exchange = there.exchanges.get(result.key)
            if exchange is None or not exchange.takes(start, stop, there.held or bool(self.membership.seats)):
                return
            if self._lacks_us(result):
                self._late = result.key.number
                self._send_no_more()
        layout, handle = exchange.layout, exchange.handle
        if payload is not None and len(payload) != layout.run_bytes(start, stop) * layout.replies // layout.parts:
            due = layout.reply_bytes(start, stop)
            if exchange.operation.op is not Op.FRAMED or len(payload) > due:
                raise MalformedMessageError(
                    f"slice {start} of {exchange.operation} came with {len(payload)} bytes, {due} are due"
                )
        if self._lacks_us(result):
            self._keep_own(exchange, start, stop)
        exchange.write(result, payload)
        with self._state:
            if there.exchanges.get(result.key) is not exchange:
                return  # it failed meanwhile, in another thread
            if self.books is not None:
                self.books.answered(exchange, result, payload)
            there.queue.answered(exchange, start, stop)
            handle.present |= result.present
            handle.weight = max(handle.weight, result.weight)  # slices differ where somebody died in between
            if result.nonfinite:
                self.note_not_finite(handle, result)
            done, error = exchange.done, None
            if done:
                there.exchanges.pop(result.key, None)
                if exchange.siblings is not None:
                    done, error = self._part_over(exchange, exchange.siblings, None)
            more = there.queue.waiting > 0
        if done:
            handle._complete(error)
        if more:
            self._pump()

    def note_not_finite(self, handle: Waiter, result: Result) -> None:
        """Some gave what is not finite to the slices of ``result``. With the lock held."""
        own = self.seat_of(self.membership.rank) in result.nonfinite
        before = handle.not_finite
        handle.not_finite = NotFinite(own or (before is not None and before.own), self.membership.nonfinite == "skip")

    def _take_exchange_failure(self, key: ExchangeKey, error: GradServerError, shard: int) -> None:
        there, reason = self._shards[shard], error
        with self._state:
            exchange, done = there.exchanges.pop(key, None), True
            held_back = self._fail_held_back(key, error)
            if exchange is not None:
                there.queue.write_off(exchange)
                if exchange.siblings is not None:
                    done, verdict = self._part_over(exchange, exchange.siblings, error)
                    reason = verdict or error
                elif isinstance(error, AbandonedError):
                    reason = error.when_nothing_failed()
                if self.books is not None and not is_state(key):
                    self.books.retained.failed(key, isinstance(reason, MembershipChangedError))
        for handle in held_back:
            handle._complete(error)
        if exchange is None:
            return
        if done:
            exchange.handle._complete(reason)
        self._pump()

    def _part_over(
        self, part: Exchange, siblings: Siblings, error: GradServerError | None
    ) -> tuple[bool, GradServerError | None]:
        """One shard's part of an exchange has ended. Whether all of it has, and with which error.

        What has failed at one shard is sent to the others no more. Credit there is free when they have answered, or
        have found out that somebody else has given it up too. Whoever waits is told at once, unless something may
        still be written to his memory.
        """
        siblings.left -= 1
        if isinstance(error, AbandonedError):
            siblings.verdict = error.when_nothing_failed()
        elif error is not None and siblings.error is None:
            siblings.error = error
            for shard in self._shards:
                other = shard.exchanges.get(part.key)
                if other is not None and shard.queue.drop(other):
                    del shard.exchanges[part.key]
                    siblings.left -= 1
        waits = any(
            other.place is not None for shard in self._shards if (other := shard.exchanges.get(part.key)) is not None
        )
        failed = siblings.error is not None and not waits
        return siblings.left == 0 or failed, siblings.error or siblings.verdict

    def _give_up(self) -> list[Waiter]:
        """Forget all that is under way, and give what waits for it. With the lock held."""
        handles: list[Waiter] = [exchange.handle for shard in self._shards for exchange in shard.exchanges.values()]
        handles += [*self._inquiries.values(), *self._announced.give_up()]
        for shard in self._shards:
            shard.exchanges.clear()
            shard.queue.clear()
        self._inquiries.clear()
        return handles

    def _overdue(self, key: ExchangeKey, operation: Operation, seconds: float) -> DeadlineError:
        """What to raise when a wait of ``seconds`` for an exchange has run out."""
        bucket, what = "", str(operation)
        if key.stream == Stream.BUCKET and self.plan is not None:
            bucket = self.plan.buckets[key.part].key
            what = f"bucket {bucket!r} of round {key.number}"
        elif key.stream == Stream.TRANSFER:
            what += f" from rank {key.source} to rank {key.target} (tag {key.part})"
        missing = tuple(self._ask_who(key))
        return DeadlineError(
            f"{what} is not done after {seconds:g} s" + (f"; still missing: {', '.join(missing)}" if missing else ""),
            missing=missing,
            bucket=bucket,
            round=key.number if bucket else -1,
        )

    def _ask_who(self, key: ExchangeKey) -> Sequence[str]:
        """Names of those who are missing from an exchange, as the coordinator sees it."""
        handle = Handle(VERDICT_SECONDS, self._channel)
        with self._state:
            concerned = next((shard.number for shard in self._shards if key in shard.exchanges), None)
            if self._closed is not None or concerned is None:
                return ()
            self._inquiries[key] = handle
        try:
            self._channel.send(Inquire(key), (), concerned)
            return tuple(handle.wait(VERDICT_SECONDS))
        except (GradServerError, ConnectionError):
            return ()
