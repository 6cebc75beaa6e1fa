"""A member's rounds: it pushes, waits until a round is over for all, and goes by the membership of the next one.

The stages of a worker that joins are those of `gradserver.worker.member.learner`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.errors import (
    ClosedError,
    DeadlineError,
    GradServerError,
    MembershipChangedError,
    OutOfStepError,
)
from gradserver.protocol.messages import Enter, Membership, Opened, Transfer
from gradserver.protocol.messages.waiting import Cause
from gradserver.worker.donor import StateSender
from gradserver.worker.handle import Handle
from gradserver.worker.interrupts import uninterrupted
from gradserver.worker.member.learner import Stage
from gradserver.worker.member.progress import Progress
from gradserver.worker.member.requests import Turn
from gradserver.worker.traffic import Traffic

log = logging.getLogger("gradserver")


class Boundaries:
    """A member's rounds, one after the other.

    Args:
        traffic: what the member exchanges.
        donor: what it sends to learners.
    """

    def __init__(self, traffic: Traffic, donor: StateSender) -> None:
        self._traffic = traffic
        self._member = traffic.member
        self._donor = donor
        self._pushed = cast(dict[int, Handle], traffic.member.rounds.pushed)
        self._listeners: list[Callable[[Membership], None]] = []
        self._settling: list[Callable[[], None]] = []
        self._beginning = threading.Lock()
        """Held while a round begins."""
        self._begun = -1, 0
        """Number and attempt of the round that began last."""

    @property
    def round_to_open(self) -> int:
        """The first round of which nothing was pushed."""
        with self._traffic.mutex:
            return self._member.rounds.number + bool(self._pushed)

    # ── pushing ───────────────────────────────────────────────────────────────────────────────────────

    @uninterrupted
    def push_bucket(
        self, index: int, data: Bytes, weight: float, present: bool, progress: Progress | None = None
    ) -> Handle:
        """Contribute to bucket ``index`` of the present round; the result goes into ``data``."""
        traffic, member = self._traffic, self._member
        if member.donor.due:
            self._donor.give()
        plan = member.rounds.plan
        assert plan is not None
        if not self._pushed and not member.rounds.is_direct:
            self._begin_round(index, weight)
        operation = plan.buckets[index].operation
        with traffic.mutex:
            traffic.check_open()
            if (before := self._pushed.get(index)) is not None:
                before.raise_error()
            key = member.enter_round(index, weight)
            weight = member.leases.weight(weight)
            handle = traffic.handle_of(key, operation)
            came = member.push(key, operation, data, weight, present, handle, progress)
            effects = member.effects.take() if member.effects.pending else None
        if effects is not None:
            traffic.carry_out(effects)
        for result, payload, shard in came:
            traffic.settle(result, payload, shard)
        traffic.pump()
        if not member.is_read_by_the_caller(operation):
            traffic.channel.watch(member.idle)
        return handle

    def _begin_round(self, index: int, weight: float) -> None:
        """Begin a round, once: a device's buckets are pushed by a thread of their own, beside those of the CPU.

        The other thread waits here until all is said that comes before the first push.
        """
        traffic, member, rounds = self._traffic, self._member, self._member.rounds
        with self._beginning:
            if self._begun == (rounds.number, rounds.attempt) and index in rounds.open:
                return
            with traffic.mutex:
                traffic.check_open()
                member.begin_round(index, weight)
                effects = member.effects.take() if member.effects.pending else None
            self._begun = rounds.number, rounds.attempt
            if effects is not None:
                traffic.carry_out(effects)

    # ── rounds that do not wait for all members ───────────────────────────────────────────────────────

    def request_round(
        self, follows: bool, section: int | None = None, version: int | None = None, later: Sequence[int] = ()
    ) -> None:
        """Request a round for what was computed at a version, or follow the others without data."""
        traffic = self._traffic
        traffic.check_open()
        traffic.hand(self._member.requests.ask, follows, section, version, later)
        traffic.channel.watch(self._member.idle)  # results come while this thread is busy

    def next_turn(self, timeout: float | None) -> Turn:
        """Wait for the answer to the request, or for the results of the present round, and say what is next."""
        traffic, requests = self._traffic, self._member.requests
        while True:
            if self._member.donor.due:
                self._donor.give()
            handle = traffic.new_handle(self._no_turn, Cause.REQUEST, "the round that it has requested")
            with traffic.mutex:
                traffic.check_open()
                turn = requests.turn()
                if turn is None:
                    requests.wait(handle)
                effects = self._member.effects.take()
            traffic.carry_out(effects)
            if turn is not None:
                return turn
            handle.wait(timeout)

    def _no_turn(self, seconds: float) -> DeadlineError:
        number = self._member.rounds.number
        return DeadlineError(f"round {number} has not begun {seconds:g} s after this worker requested it", round=number)

    # ── rounds that members reduce among themselves ───────────────────────────────────────────────────

    def begin_direct(self, index: int, watch: Handle) -> GradServerError | None:
        """Begin a round with the commit ``index``; return why it is void already, if it is.

        The handle ``watch`` is done when the coordinator says that the round is void, or the membership ends.
        """
        traffic, member = self._traffic, self._member
        if member.donor.due:
            self._donor.give()
        self._begin_round(index, 1.0)
        with traffic.mutex:
            traffic.check_open()
            why = member.rounds.begin_direct(index, watch)
        traffic.channel.watch(member.idle)  # the word comes while this thread waits for a reduction
        return why

    def refuse(self, index: int) -> None:
        """Say that this worker could not reduce the present round with the others: its commit ``index`` is void."""
        self._traffic.hand(self._member.refuse, index)

    def begin_again(self) -> None:
        """Begin the present round again, in a section that the coordinator reduces: it was void."""
        self._traffic.hand(self._member.begin_again)

    # ── collectives of members among themselves ───────────────────────────────────────────────────────

    def watch(self, watch: Handle) -> None:
        """Have ``watch`` done when a member of this membership has departed, or the membership ends."""
        traffic, member = self._traffic, self._member
        with traffic.mutex:
            traffic.check_open()
            gone = member.rounds.announced.watch(member.identity.membership.member_ids, watch)
        for handle in gone:
            handle._complete(None)
        traffic.channel.watch(member.idle)  # the word comes while no thread waits at the channel

    def unwatch(self, watch: Handle) -> None:
        """Forget a handle that `watch` has got."""
        with self._traffic.mutex:
            self._member.rounds.announced.unwatch(watch)

    def on_settle(self, settle: Callable[[], None]) -> None:
        """Have ``settle`` called in `settle`: it waits for what was begun and has yet to be numbered."""
        self._settling.append(settle)

    def settle(self) -> None:
        """Wait for calls that have yet to be numbered. What follows is of another round, membership or order."""
        for settle in self._settling:
            settle()

    # ── the end of a round ────────────────────────────────────────────────────────────────────────────

    @uninterrupted
    def finish_round(self, timeout: float | None, parts: range | None = None) -> None:
        """Wait for every bucket of the round, or of ``parts``, and go on to the next one."""
        self.settle()
        traffic, member, pushed = self._traffic, self._member, self._pushed
        rounds = member.rounds
        plan = rounds.plan
        assert plan is not None
        parts = parts or rounds.open or plan.each[0].parts
        if len(pushed) < len(parts) or parts != rounds.open:  # what is pushed may be another module's
            self._check_all_pushed(parts)
        for handle in pushed.values():
            self._await(handle, timeout)
        if any(plan.buckets[part].numel for part in parts):
            self._await_boundary(timeout)
        elif plan.is_shared:  # no other member knows of it
            rounds.forget_pushes()
            return
        traffic.hand(member.finish_round)
        if member.identity.stage is Stage.OBSERVING:
            self._say_if_caught_up()

    def _check_all_pushed(self, parts: range) -> None:
        if missing := self._member.rounds.missing(parts):
            self._traffic.check_open()
            number = self._member.rounds.number
            raise OutOfStepError(f"round {number} cannot be finished: these buckets were not pushed: {missing[:8]}")

    def _await(self, handle: Handle, timeout: float | None) -> None:
        """Wait for a bucket: as long as the coordinator does, if the round waits for a learner."""
        while True:
            try:
                handle.wait(timeout)
                return
            except DeadlineError as error:
                rounds = self._member.rounds
                waits_on = error.missing and rounds.announced.awaits(rounds.number)
                if not handle._open or timeout is not None or not waits_on:
                    raise

    def _await_boundary(self, timeout: float | None) -> None:
        """Wait until the round is over for all members, and go by what that changes."""
        rounds, traffic = self._member.rounds, self._traffic
        with traffic.mutex:
            if rounds.announced.pass_over(rounds.number):
                return
        handle = traffic.new_handle(self._no_boundary)
        with traffic.mutex:
            is_told = self._member.identity.stage is not Stage.OBSERVING
            waits = rounds.announced.wait_for_round(rounds.number, handle, is_told) is not None
            if waits:
                traffic.check_open()
        if waits:
            handle.wait(timeout)
        with traffic.mutex:
            epoch = rounds.announced.epoch_after(rounds.number)
        self.adopt(epoch, rounds.number)

    def on_membership(self, listener: Callable[[Membership], None]) -> None:
        """Have ``listener`` called whenever another membership is in force."""
        self._listeners.append(listener)

    def adopt(self, epoch: int, ended: int) -> None:
        """Go by the membership ``epoch`` from now on, behind round ``ended``, if it is a new one."""
        with self._traffic.mutex:
            news = self._member.adopt(epoch, ended)
        if news is not None:
            for listener in self._listeners:
                listener(news)

    def heed(self, error: GradServerError) -> None:
        """Go by what the failure of a collective says of the membership from now on."""
        if not isinstance(error, MembershipChangedError):
            return
        self.settle()
        rounds, traffic = self._member.rounds, self._traffic
        handle = traffic.new_handle()
        with traffic.mutex:
            waits = rounds.announced.wait_for_epoch(error.epoch, handle) is not None
            if waits:
                traffic.check_open()
        if waits:
            handle.wait()
        self.adopt(error.epoch, rounds.number - 1)

    def _no_boundary(self, seconds: float) -> DeadlineError:
        number = self._member.rounds.number
        return DeadlineError(
            f"round {number} is not over after {seconds:g} s: the group waits for more workers", round=number
        )

    # ── rounds of several modules, for the training thread only ───────────────────────────────────────

    def steps(self, updated: int, dropped: int) -> None:
        """Say that this worker's job updates models; or none, at the top of its loop."""
        with suppress(ClosedError, ConnectionError):  # the next push will report it
            self._traffic.check_open()
            self._traffic.hand(self._member.turns.steps, updated, dropped)

    def follow(self) -> Opened:
        """Wait for what the others do next, and return it."""
        handle = self._traffic.new_handle(self._nothing_begun, Cause.FOLLOW, "the next exchange of the others")
        with self._traffic.mutex:
            question = self._member.turns.follow(handle)
        self._traffic.tell(question)
        news: Opened = handle.wait()
        self._member.turns.followed(news)
        return news

    def _nothing_begun(self, seconds: float) -> DeadlineError:
        number, more = self._member.rounds.number, "and this worker has no data for it"
        return DeadlineError(f"no member has begun round {number} for {seconds:g} s, {more}")

    # ── a learner ─────────────────────────────────────────────────────────────────────────────────────

    def next_instruction(self, seen: Transfer | None) -> tuple[Transfer, int | None]:
        """Wait for the transfer after the one ``seen``, or for the round from which on this learner contributes."""
        traffic, member = self._traffic, self._member
        while True:
            with traffic.mutex:
                traffic.check_open()
                instruction = member.entering.next_instruction(seen)
                if instruction is not None:
                    return instruction
                handle = traffic.new_handle(_no_entry)
                member.learner.wait(handle)
            handle.wait()

    def observe(self, transfer: Transfer, install: Callable[[], object]) -> bool:
        """Begin with the state of ``transfer``, while the others go on. Return false if that is too old."""
        traffic, member = self._traffic, self._member
        traffic.channel.watch(member.idle)  # results come while this thread is busy
        if not member.entering.is_outgrown(transfer):
            install()
        if member.entering.is_outgrown(transfer):
            traffic.tell(Enter(transfer.number, True))
            return False
        with traffic.mutex:
            member.entering.observe()
        self._say_if_caught_up()
        return True

    @property
    def has_next(self) -> bool:
        """True if this worker is behind by a round that is over."""
        with self._traffic.mutex:
            return self._member.entering.has_next

    def _say_if_caught_up(self) -> None:
        with self._traffic.mutex:
            ready = self._member.entering.caught_up()
        if ready is not None:
            self._traffic.tell(ready)


def _no_entry(seconds: float) -> DeadlineError:
    return DeadlineError(f"no round of the group that this worker joins has ended for {seconds:g} s")
