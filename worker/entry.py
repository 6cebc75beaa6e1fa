"""How a worker comes into a group that trains already.

    stage     event                                       next      what happens
    ────────  ──────────────────────────────────────────  ────────  ───────────────────────────────────────────────
    JOINING   `enter`                                     JOINING   Enter: it waits for the end of a round
    JOINING   RoundDone that names it                     JOINING   it takes the state, and installs it
    JOINING   … and does not get it                       JOINING   Enter, again
    JOINING   … while the next round waits for it         JOINING   … and says Ready
    JOINING   Entered                                     ENTERED   `enter` returns: it trains
    JOINING   it has the state, and the others go on      OBSERVING `enter` returns: it trains, and nothing of it counts
    OBSERVING no result of the round that is next is here OBSERVING Ready
    OBSERVING the round that Entered names begins         ENTERED
    ENTERED   `finish_round`, with a new epoch            MEMBER    collectives, too

While it is JOINING it can agree on a plan, which is compared with the group's at once, and nothing else. What it does
when it has ENTERED counts as that of a member; collectives it takes part in from the end of its first round on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from protocol.errors import DeadlineError, PeerError, UsageError
from protocol.messages import Enter, Ready, RoundDone, Transfer
from worker.handle import Handle
from worker.joiner import Arrival, receive
from worker.stages import Stage
from worker.tree import Tree

if TYPE_CHECKING:
    from worker.session import Session

log = logging.getLogger("gradserver")


class Entry:
    """What the coordinator has told somebody who joins. Not safe to share: the session's lock guards it."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
        """The latest one in which it is to get the state."""
        self.round: int | None = None
        """The first round that it contributes to, when it may."""
        self.begins = 0
        """The round that follows its state."""
        self.behind = False
        """More results have come than there is room for."""
        self.ready = False
        """Whether it has said that it has caught up."""
        self.arrival: Arrival | None = None
        """How it got its state."""
        self._waiting: Handle | None = None

    def heard(self, done: RoundDone, seat: int) -> list[Handle]:
        """A round is over; gives who waits for that."""
        for transfer in done.transfers:
            if transfer.joiner == seat:
                self.transfer, self.begins, self.behind = transfer, done.round + 1, False
        return self.give_up()

    def entered(self, number: int) -> list[Handle]:
        """It may contribute; gives who waits for that."""
        self.round = number
        return self.give_up()

    def wait(self, handle: Handle) -> Handle:
        """``handle``, which is done when there is any news."""
        self._waiting = handle
        return handle

    def give_up(self) -> list[Handle]:
        """Who waits."""
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else [waiting]


def enter(session: Session, install: Callable[[Tree], object], waits: bool) -> int:
    """Get the state from a member, and come in; the first round that this worker contributes to."""
    if session.stage is not Stage.JOINING:
        raise UsageError(f"this worker {session.stage.value}: only who joins a group that trains already can enter it")
    if session.plan is None:
        raise UsageError("before it enters a group a worker agrees on the plan: wrap the model, or call agree(plan)")
    session.tell(Enter(0, waits))
    seen = 0
    while True:
        transfer, number = session.next_instruction(seen)
        if number is not None:
            return number
        seen, began = transfer.number, time.monotonic()
        try:
            tree, nbytes = receive(session, transfer)
        except (PeerError, DeadlineError) as error:
            log.info("the state of seat %d did not come (%s): another one is asked for it", transfer.donor, error)
            session.tell(Enter(transfer.number))
            continue
        arrival = Arrival(_name_of(session, transfer.donor), nbytes, time.monotonic() - began)
        log.info("the state of %r came: %.1f MB in %.2f s", arrival.donor, nbytes / 1e6, arrival.seconds)
        session.entry.arrival = arrival
        if not transfer.waits and session.observe(transfer, partial(install, tree)):
            return session.round
        if transfer.waits:
            install(tree)
            session.tell(Ready(transfer.number))


def _name_of(session: Session, seat: int) -> str:
    here = session.membership
    return here.names[here.seats.index(seat)] if seat in here.seats else f"seat {seat}"
