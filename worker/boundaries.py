"""What a member does between two rounds: it waits until one is over for all, and goes by who is in the next.

The stages of who joins are those of `gradserver.worker.member.learner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import DeadlineError, GradServerError, MembershipChangedError, OutOfStepError
from gradserver.protocol.exchange import Stream
from gradserver.protocol.messages import Enter, Membership, Message, Ready, Transfer
from gradserver.protocol.plan import Plan
from gradserver.worker.claims import Claims
from gradserver.worker.handle import Handle
from gradserver.worker.interrupts import uninterrupted
from gradserver.worker.member.learner import Stage
from gradserver.worker.traffic import Traffic

log = logging.getLogger("gradserver")

_NOTHING: Final = range(0)


class Boundaries(Traffic):
    """A member's rounds, one after the other.

    Attributes:
        claims: what it asks and tells of data.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        super().__init__(channel, timeout)
        self._listeners: list[Callable[[Membership], None]] = []
        self._left_out_rounds = 0
        self.claims = Claims(self)

    # ── data ──────────────────────────────────────────────────────────────────────────────────────────

    def new_handle(self, overdue: Callable[[float], DeadlineError]) -> Handle:
        """Of something that the coordinator is asked."""
        return Handle(self.timeout, self._channel, None, overdue)

    def send(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Say something to the coordinator."""
        self._channel.send(message, payloads)

    @property
    def round_to_open(self) -> int:
        """The first round of which nothing was pushed."""
        with self._state:
            return self.round + bool(self._pushed)

    def begin_round(self, part: int) -> None:
        """Before the first push of a round, to bucket ``part``."""
        plan = self.plan
        assert plan is not None
        self._open = plan.section_of(part).parts
        if plan.is_shared and self.stage is not Stage.OBSERVING:
            self.turns.begins(plan, part)
        self.claims.begin_round(self.round, len(self._shards) > 1)

    # ── rounds and memberships ────────────────────────────────────────────────────────────────────────

    @uninterrupted
    def finish_round(self, timeout: float | None, parts: range | None = None) -> None:
        """Wait for every bucket of the round, or of ``parts``, and go on to the next one."""
        plan, pushed, is_elastic = self.plan, self._pushed, bool(self.membership.seats)
        assert plan is not None
        parts = parts or self._open or plan.each[0].parts
        if len(pushed) < len(parts) or parts != self._open:  # what is pushed may be another module's
            self._check_all_pushed(plan, parts)
        for handle in pushed.values():
            self._await(handle, timeout)
        if is_elastic or plan.is_shared:
            if any(plan.buckets[part].numel for part in parts):
                if is_elastic:
                    self._await_boundary(timeout)
            elif plan.is_shared:  # nobody else has heard of it
                pushed.clear()
                return
        if self._sifts:
            self._note_not_finite()
        with self._state:
            pushed.clear()
            self._open = _NOTHING
            is_kept = self._note_lateness()
            self.round += 1
            self._backlog.forget(self.round)
            if is_elastic:
                self._numbers.pop((Stream.COLLECTIVE,), None)
        if is_kept:
            self.claims.carry()
        self._say_if_caught_up()

    def _check_all_pushed(self, plan: Plan, parts: range) -> None:
        missing = [plan.buckets[part].key for part in parts if plan.buckets[part].numel and part not in self._pushed]
        if missing:
            self.check_open()
            raise OutOfStepError(f"round {self.round} cannot be finished: these buckets were not pushed: {missing[:8]}")

    def _note_not_finite(self) -> None:
        """Say what became of a round in which somebody's gradients were not finite."""
        found = [handle.not_finite for handle in self._pushed.values() if handle.not_finite is not None]
        self.skipped, self.left_out = any(one.skips for one in found), any(one.own for one in found)
        if not self.left_out:
            return
        self._left_out_rounds += 1
        if self._left_out_rounds & (self._left_out_rounds - 1) == 0:  # the first, and then ever more rarely
            became = "so no worker applies it" if self.skipped else "and is left out of the mean where it is not"
            log.warning(
                "group %r: what this worker, rank %d, gave to round %d is not finite, %s (the %d. time). Look at its "
                "data, loss and learning rate",
                *(self.membership.group, self.membership.rank, self.round, became, self._left_out_rounds),
            )

    def _await(self, handle: Handle, timeout: float | None) -> None:
        """Wait for a bucket: as long as the coordinator does, if somebody joins whom the round waits for."""
        while True:
            try:
                handle.wait(timeout)
                return
            except DeadlineError as error:
                waits_on = error.missing and self._announced.awaits(self.round)
                if not handle._open or timeout is not None or not waits_on:
                    raise

    def _await_boundary(self, timeout: float | None) -> None:
        """Wait until the round is over for all members of an elastic group, and go by what that changes."""
        with self._state:
            if self._announced.pass_over(self.round):
                return
        handle = Handle(self.timeout, self._channel, None, self._no_boundary)
        with self._state:
            waiting = self._announced.wait_for_round(self.round, handle, self.stage is not Stage.OBSERVING)
            if waiting is not None:
                self.check_open()
        if waiting is not None:
            handle.wait(timeout)
        with self._state:
            epoch = self._announced.epoch_after(self.round)
        self.adopt(epoch, self.round)

    def on_membership(self, listener: Callable[[Membership], None]) -> None:
        """Have ``listener`` called whenever another membership is in force."""
        self._listeners.append(listener)

    def adopt(self, epoch: int, ended: int) -> None:
        """From now on, behind round ``ended``, the membership ``epoch`` is in force, if it is a new one."""
        with self._state:
            news, welcome = self._announced.take(epoch, ended), self.membership
            if news is None:
                return
            rank = news.seats.index(welcome.seats[welcome.rank])
            new = set(news.seats).difference(() if self.stage is Stage.ENTERED else welcome.seats)
            self.welcome = replace(welcome, rank=rank, epoch=epoch, names=news.names, seats=news.seats)
            self.stage = Stage.MEMBER
            self._table.world_size = len(news.seats)
            self._numbers = {
                sequence: number
                for sequence, number in self._numbers.items()
                if sequence[0] != Stream.TRANSFER or not new.intersection(sequence[1:3])
            }
        for listener in self._listeners:
            listener(news)

    def _heed(self, error: GradServerError) -> None:
        """What the failure of a collective says of the membership is in force from now on."""
        if not isinstance(error, MembershipChangedError):
            return
        with self._state:
            handle = Handle(self.timeout, self._channel)
            waiting = self._announced.wait_for_epoch(error.epoch, handle)
            if waiting is not None:
                self.check_open()
        if waiting is not None:
            handle.wait()
        self.adopt(error.epoch, self.round - 1)

    @property
    def is_inside(self) -> bool:
        """Whether this worker contributes, or was told that it is to."""
        return self.learner.round is not None or self.stage in (Stage.ENTERED, Stage.MEMBER)

    def next_instruction(self, seen: int) -> tuple[Transfer, int | None]:
        """For who joins: the next transfer after number ``seen``; or the round from which on it contributes."""
        while True:
            with self._state:
                self.check_open()
                transfer, number = self.learner.transfer, self.learner.round
                if number is not None and transfer is not None:
                    self.stage, self.round = Stage.ENTERED, number
                    return transfer, number
                if transfer is not None and transfer.number > seen:
                    return transfer, None
                handle = Handle(self.timeout, self._channel, None, _no_entry)
                self.learner.wait(handle)
            handle.wait()

    def observe(self, transfer: Transfer, install: Callable[[], object]) -> bool:
        """For who joins: begin with the state of ``transfer``, while the others go on. False if that is too old."""
        self._channel.watch(self.idle)  # results come while this thread is busy
        if not self._outgrown(transfer):
            install()
        if self._outgrown(transfer):
            self.tell(Enter(transfer.number, True))
            return False
        with self._state:
            self.stage, self.round = Stage.OBSERVING, self.learner.begins
            self._backlog.forget(self.round)
        self._say_if_caught_up()
        return True

    def _outgrown(self, transfer: Transfer) -> bool:
        return self.learner.behind or self.learner.transfer is not transfer

    @property
    def has_next(self) -> bool:
        """Whether this worker has yet to catch up with a round that is over."""
        with self._state:
            return self.stage is Stage.OBSERVING and self._backlog.has(self.round)

    def _say_if_caught_up(self) -> None:
        entry = self.learner
        if self.stage is Stage.OBSERVING and not entry.ready and not self.has_next and entry.transfer is not None:
            entry.ready = True
            self.tell(Ready(entry.transfer.number))

    def _no_boundary(self, seconds: float) -> DeadlineError:
        return DeadlineError(
            f"round {self.round} is not over after {seconds:g} s: the group waits for more workers", round=self.round
        )


def _no_entry(seconds: float) -> DeadlineError:
    return DeadlineError(f"no round of the group that this worker joins was over for {seconds:g} s")
