"""The session's part that exchanges: it carries out, at the channel and for callers, what the member wants done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, Protocol

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Channel
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import (
    ClosedError,
    DeadlineError,
    GradServerError,
    MalformedMessageError,
    OutOfStepError,
)
from gradserver.protocol.exchange import (
    BUCKET,
    COLLECTIVE,
    STATE_TAG,
    TRANSFER,
    ExchangeKey,
    Kind,
    Op,
    Operation,
    operation_of,
)
from gradserver.protocol.messages import Message, Result, Transfer
from gradserver.protocol.messages.waiting import Cause
from gradserver.protocol.ranges import Ranges
from gradserver.worker.handle import VERDICT_SECONDS, Handle
from gradserver.worker.interrupts import uninterrupted
from gradserver.worker.member.effects import Complete, Effect, Lose, Tell
from gradserver.worker.member.ends import Destination, Source
from gradserver.worker.member.exchange import Exchange
from gradserver.worker.member.leases import Question
from gradserver.worker.member.machine import Member
from gradserver.worker.member.progress import Progress
from gradserver.worker.stalls import Answer, Stalls

P = ParamSpec("P")

log = logging.getLogger("gradserver")


class Owner(Protocol):
    """The session, as far as its traffic needs it."""

    def lost(self, error: GradServerError) -> None:
        """Fail everything that is open, and everything later, with ``error``."""

    def heed(self, error: GradServerError) -> None:
        """Go by what the failure of a collective says of the membership: its caller is about to raise ``error``."""


class Asking:
    """A wait for something that the coordinator is asked."""

    __slots__ = ("cause", "describe", "key", "overdue", "stalls", "traffic")

    def __init__(
        self, traffic: Traffic, cause: Cause | None, overdue: Callable[[float], DeadlineError], what: str
    ) -> None:
        self.traffic, self.overdue = traffic, overdue
        self.stalls = None if cause is None else traffic.stalls
        self.cause = cause or Cause.EXCHANGE
        self.key: ExchangeKey | None = None
        self.describe = lambda: what


class Exchanging:
    """A wait for the results of an exchange."""

    __slots__ = ("key", "operation", "traffic")

    def __init__(self, traffic: Traffic, key: ExchangeKey, operation: Operation) -> None:
        self.traffic, self.key, self.operation = traffic, key, operation

    @property
    def cause(self) -> Cause:
        """The kind of it."""
        return Cause.BUCKET if self.key.stream == BUCKET else Cause.EXCHANGE

    @property
    def stalls(self) -> Stalls | None:
        """Waits of the worker that it is of."""
        return self.traffic.stalls

    def describe(self) -> str:
        """Name it in a text."""
        what = self.traffic.member.inquiries.describe(self.key, self.operation)
        place = f" (collective {self.key.number} of round {self.key.part})" if self.key.stream == COLLECTIVE else ""
        return what + place

    def overdue(self, seconds: float) -> DeadlineError:
        """Make the error of a wait that ran out. It names the members that the coordinator misses."""
        return self.traffic.overdue(self.key, self.operation, seconds)


class Traffic:
    """A member's exchanges over one channel.

    Attributes:
        member: the member, which `mutex` guards.
        channel: the channel, which may be another one later.
        timeout: seconds for which calls wait.
        mutex: held while the member takes an event. No message is sent and no caller goes on meanwhile.
        pumping: held while pushes are sent.
        closed: what ended this membership, if anything has.
        stalls: waits of this worker's threads; None if they are not told.
        activity: pushes that were sent, and results that came.
    """

    def __init__(self, member: Member, channel: Channel, timeout: float, owner: Owner) -> None:
        self.member = member
        self.channel = channel
        self.timeout = timeout
        self.mutex = threading.Lock()
        self.pumping = threading.Lock()
        self.closed: GradServerError | None = None
        self.stalls: Stalls | None = None
        self.activity = 0
        self._owner = owner
        self._pump_again = False

    def check_open(self) -> None:
        """Raise what ended this membership, if anything has."""
        if self.closed is not None:
            raise self.closed.again()

    def close(self, error: GradServerError) -> bool:
        """End the membership with ``error``, and return true if it had not ended. With the mutex held."""
        was_open, self.closed = self.closed is None, self.closed or error
        return was_open

    def disown(self, error: GradServerError) -> None:
        """Take new locks, in a forked child: threads that the child does not have may hold the old ones."""
        self.closed = error
        self.mutex, self.pumping = threading.Lock(), threading.Lock()

    def hand(self, event: Callable[P, object], *arguments: P.args, **more: P.kwargs) -> None:
        """Hand an event to a part of the member, and carry out what follows."""
        with self.mutex:
            event(*arguments, **more)
            effects = self.member.effects.take()
        self.carry_out(effects)

    # ── what callers want ─────────────────────────────────────────────────────────────────────────────

    def new_handle(
        self, overdue: Callable[[float], DeadlineError] | None = None, cause: Cause | None = None, what: str = ""
    ) -> Handle:
        """Make the handle of something that the coordinator is asked. With a ``cause`` waits are told (`Stalls`)."""
        return Handle(self.timeout, self.channel, None, overdue and Asking(self, cause, overdue, what))

    def handle_of(self, key: ExchangeKey, operation: Operation, value: Any = None) -> Handle:
        """Make the handle of an exchange."""
        return Handle(self.timeout, self.channel, value, Exchanging(self, key, operation))

    def tell(self, message: Message) -> None:
        """Say something to the coordinator."""
        self.check_open()
        self.channel.send(message)

    def ask(self, question: Question, ranges: Ranges | None = None) -> Handle:
        """Ask about leases. The handle's value is the answer and its ranges, or raises why there is none."""
        handle = self.new_handle(partial(_unanswered, question.name))
        with self.mutex:
            self.check_open()
            asked = self.member.leases.ask(question, ranges, handle)
        self.channel.send(question, asked.payloads)
        return handle

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
        member = self.member
        with self.mutex:
            self.check_open()
            key = member.exchanges.next_collective()
            handle = self.handle_of(key, operation, value)
            member.exchanges.begin(key, operation, source, destination, weight, handle)
            handle.on_error(self._owner.heed)
            effects = member.effects.take() if member.effects.pending else None
        if background and self.stalls is not None:
            self.stalls.note_caller()
        self._go_on(effects, background)
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
        by_id: bool = False,
        number: int | None = None,
    ) -> Handle:
        """Send or receive: ``ends`` is (source rank, target rank, tag), or has ids of members.

        With a ``number`` it raises OutOfStepError if the next transfer has another one.
        """
        member = self.member
        with self.mutex:
            self.check_open()
            if number is not None and member.exchanges.upcoming_transfer(*ends).number != number:
                raise OutOfStepError(f"transfer {number} of {ends} has begun")
            key = member.exchanges.next_transfer(ends, by_id)
            handle = self.handle_of(key, operation, value)
            member.exchanges.begin(key, operation, source, destination, 1.0, handle)
            effects = member.effects.take()
        if background and self.stalls is not None and not by_id:
            self.stalls.note_caller()
        self._go_on(effects, background)
        return handle

    @uninterrupted
    def state_part(self, transfer: Transfer, index: int, memory: Bytes) -> Handle:
        """Send, or receive into ``memory``, part ``index`` of a state."""
        member = self.member
        key = ExchangeKey(TRANSFER, index, STATE_TAG + transfer.number, transfer.donor, transfer.learner)
        operation = operation_of(Kind.TRANSFER, Op.NONE, UINT8, memory.size)
        with self.mutex:
            self.check_open()
            given, taken = (memory, None) if member.gives_state(transfer) else (None, memory)
            handle = self.handle_of(key, operation)
            member.exchanges.begin(key, operation, given, taken, 1.0, handle)
            effects = member.effects.take()
        self._go_on(effects, True)
        return handle

    def advance(self, progress: Progress, nbytes: int) -> None:
        """Send more of a bucket: its first ``nbytes`` bytes are there."""
        with self.mutex:
            progress.advance(nbytes)
        self.pump()

    def _go_on(self, effects: list[Effect] | None, background: bool) -> None:
        if effects:
            self.carry_out(effects)
        self.pump()
        if background:
            self.channel.watch(self.member.idle)

    # ── what the member wants ─────────────────────────────────────────────────────────────────────────

    def carry_out(self, effects: list[Effect]) -> None:
        """Do what the member wants done. Without the mutex."""
        for effect in effects:
            if type(effect) is Complete:
                if effect.value is not None:
                    effect.waiter._value = effect.value
                effect.waiter._complete(effect.error)
            elif type(effect) is Tell:
                with suppress(ClosedError, ConnectionError):
                    self.channel.send(effect.message, effect.payloads, effect.shard)
            elif type(effect) is Lose:
                self._owner.lost(effect.error)
            else:
                level = logging.WARNING if effect.warns else logging.INFO  # type: ignore[union-attr]
                log.log(level, effect.text, *effect.arguments)  # type: ignore[union-attr]

    def pump(self) -> None:
        """Send what may be sent. One thread at a time does it; others leave a note and go on.

        Over memory a send can come back here in the same thread, with a result that frees credit. The note lets the
        outer call see to it.
        """
        self._pump_again = True
        exchanges = self.member.exchanges
        while self._pump_again and self.pumping.acquire(blocking=False):
            try:
                self._pump_again = False
                shards = exchanges.shards
                while shards[0].queue.waiting or len(shards) > 1:
                    with self.mutex:
                        push = exchanges.next_push()
                    if push is None:
                        break
                    self.activity += 1
                    self.channel.send(*push)
            except (ClosedError, ConnectionError) as error:
                self._owner.lost(error if isinstance(error, GradServerError) else ClosedError(str(error)))
            finally:
                self.pumping.release()

    # ── what the channel brings ───────────────────────────────────────────────────────────────────────

    def take_result(self, result: Result, payloads: Sequence[Buffer], shard: int = 0) -> None:
        """Take a result from ``shard``: for what was pushed, or unasked."""
        payload, member = payloads[0] if payloads else None, self.member
        with self.mutex:
            self.activity += 1
            exchange = member.heard(result, payload, shard)
            effects = member.effects.take() if member.effects.pending else None
        if effects is not None:
            self.carry_out(effects)
        if exchange is not None:
            self._write(exchange, result, payload, shard)

    def settle(self, result: Result, payload: Buffer | None, shard: int) -> None:
        """Give a result that was here already to what has begun now."""
        with self.mutex:
            there = self.member.exchanges.shards[shard]
            exchange = there.exchanges.get(result.key)
            if exchange is not None:
                exchange = self.member.exchanges.settling(exchange, result)
        if exchange is not None:
            self._write(exchange, result, payload, shard)

    def _write(self, exchange: Exchange, result: Result, payload: Buffer | None, shard: int) -> None:
        """Write a result where it belongs, which takes long and so is done without the mutex."""
        start, stop = result.slice, result.slice + result.slices
        member, layout = self.member, exchange.layout
        if payload is not None and len(payload) != layout.run_bytes(start, stop) * layout.replies // layout.parts:
            due = layout.reply_bytes(start, stop)
            if exchange.operation.op is not Op.FRAMED or len(payload) > due:
                raise MalformedMessageError(
                    f"slice {start} of {exchange.operation} came with {len(payload)} bytes, {due} are due"
                )
        if result.without and member.exchanges.lacks_us(result) and member.stragglers.keeps(exchange):
            given = [(index, exchange.given(index)) for index in range(start, stop)]
            with self.mutex:
                member.stragglers.keep_own(exchange, given)
        exchange.write(result, payload)
        with self.mutex:
            more = member.exchanges.settled(exchange, result, payload, shard)
            effects = member.effects.take() if member.effects.pending else None
        if effects is not None:
            self.carry_out(effects)
        if more:
            self.pump()

    # ── what is missing ───────────────────────────────────────────────────────────────────────────────

    @property
    def shard_count(self) -> int:
        """Number of data shards, the coordinator counted."""
        return len(self.member.exchanges.shards)

    @property
    def attended(self) -> Sequence[int]:
        """Numbers of the data shards, beside the coordinator, that this member has made itself known to."""
        with self.mutex:
            return self.member.attachment.visited

    def ask_missing(self, key: ExchangeKey, answer: Answer, shard: int | None = None) -> bool:
        """Ask ``shard``, or the first one with the exchange, which members it misses. Return false if there is none."""
        with self.mutex:
            inquiries = self.member.inquiries
            asked = inquiries.ask(key, answer) if shard is None else (inquiries.ask_at(shard, key, answer), shard)
        if asked is not None:
            self.channel.send(asked[0], (), asked[1])
        return asked is not None

    def ask_begun(self, giver: int, taker: int, tag: int) -> tuple[ExchangeKey, list[Handle]]:
        """Ask each shard whether a member has begun its next transfer: the value of a handle is not empty if it has."""
        with self.mutex:
            self.check_open()
            key = self.member.exchanges.upcoming_transfer(giver, taker, tag)
            handles = [Handle(VERDICT_SECONDS, self.channel) for _ in range(self.shard_count)]
            asked = [self.member.inquiries.ask_at(shard, key, handle) for shard, handle in enumerate(handles)]
        for shard, message in enumerate(asked):
            self.channel.send(message, (), shard)
        return key, handles

    def overdue(self, key: ExchangeKey, operation: Operation, seconds: float) -> DeadlineError:
        """Make the error of an exchange that is not done, with the members that the coordinator misses."""
        return self.member.inquiries.overdue(key, operation, seconds, self._ask_who(key))

    def _ask_who(self, key: ExchangeKey) -> Sequence[str]:
        """Ask the coordinator for the names of workers that are missing from an exchange."""
        handle = Handle(VERDICT_SECONDS, self.channel)
        with self.mutex:
            asked = None if self.closed is not None else self.member.inquiries.ask(key, handle)
        if asked is None:
            return ()
        try:
            self.channel.send(asked[0], (), asked[1])
            return tuple(handle.wait(VERDICT_SECONDS))
        except (GradServerError, ConnectionError):
            return ()


def _unanswered(name: str, seconds: float) -> DeadlineError:
    return DeadlineError(f"the coordinator has not said within {seconds:g} s what there is of data {name!r}")
