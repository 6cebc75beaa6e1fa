"""Learners of a group: workers that join it while it trains."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gradserver.engine.control.group.applicants import Applicant
from gradserver.engine.control.group.delivery import Delivery
from gradserver.engine.order_fields import Newcomer, Seat
from gradserver.protocol.limits import STATE_REST_SECONDS
from gradserver.protocol.messages import Join, Transfer
from gradserver.protocol.plan import Plan

_REST: Final = 9.0
"""After waiting for a learner in vain the others train for so many times as long before they wait for one again."""


class Stage(Enum):
    """Stage of a learner; the table is in `gradserver.engine.control.learners`."""

    ADMITTED = "admitted"
    WELCOME = "welcome"
    WAITING = "waiting"
    RECEIVING = "receiving"
    READY = "ready"
    ENTERED = "entered"


@dataclass(slots=True)
class Learner:
    """A worker that joins a running group and is no member yet.

    Attributes:
        token: what it shows data shards.
        since: time as of which it waits for something that has a deadline.
        plan: the plan that it has proposed, while the group has none to compare it with.
        agreed: hash of the group's plan, of which its own ones are sections.
        sections: numbers of these, in the order in which it has proposed them.
        number: number of the transfer in which it gets the state; 0 if there is none.
        donor: seat of the member that sends the state; -1 when none has to any more.
        round: the first round that it contributes to, if that is settled.
        serves: True if it can send its state when it is a member.
        listens: True if it is sent results unasked meanwhile; otherwise the others wait for it.
        waits: True if the others have to: it asks for that, or more results had come than it could read.
        entered: True if it was told that it contributes.
        delivery: the state's way to it, while the others wait for that.
    """

    connection: int
    join: Join
    token: str
    since: float
    stage: Stage = Stage.ADMITTED
    plan: Plan | None = None
    agreed: str = ""
    sections: tuple[int, ...] = ()
    number: int = 0
    donor: int = -1
    round: int = -1
    serves: bool = False
    listens: bool = False
    waits: bool = False
    entered: bool = False
    delivery: Delivery | None = None

    # ── stages ────────────────────────────────────────────────────────────────────────────────────────

    def welcome(self) -> bool:
        """Go on as all shards know of it. False if it was welcome before."""
        if self.stage is not Stage.ADMITTED:
            return False
        self.stage = Stage.WELCOME
        return True

    def propose(self, plan: Plan, beside: bool, now: float) -> None:
        """Take its plan, in place of what it has proposed before or ``beside`` that."""
        self.plan, self.since = plan, now
        self.sections = self.sections if beside else ()

    def take_plan(self) -> Plan:
        """Take the proposed plan out, to compare it."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        return plan

    def agree(self, digest: str, section: int) -> None:
        """Note that its plan is a section of the group's plan with this hash."""
        self.agreed = digest
        self.sections += (section,)

    def wait(self, waits: bool, now: float) -> None:
        """Wait for a donor. If it ``waits``, the others are to wait for it as well."""
        self.since = now
        self.waits |= waits
        if self.stage is Stage.WELCOME:
            self.stage = Stage.WAITING

    def serve(self) -> None:
        """Note that it can send its state when it is a member."""
        self.serves = True

    def hear_boundary(self, at: float) -> None:
        """Begin its patience anew, as a round was over at this time."""
        self.since = at

    def receive(self, donor: int, number: int, first: int, delivery: Delivery | None) -> None:
        """Get the state from ``donor``, in a transfer. With a ``delivery`` the others wait for it, else it listens."""
        self.stage, self.donor, self.number = Stage.RECEIVING, donor, number
        self.round, self.listens, self.delivery = first, delivery is None, delivery

    def fall_behind(self) -> None:
        """Have the others wait the next time, as it could not read what it was sent."""
        self.waits = True

    def lose_donor(self) -> None:
        """Go on with as much of the state as has come."""
        self.donor = -1

    def excuse(self) -> None:
        """Wait for the next donor, and have nobody wait for it."""
        self.stage, self.donor, self.round, self.delivery = Stage.WAITING, -1, -1, None

    def be_ready(self) -> None:
        """Note that it has the state."""
        self.donor, self.delivery = -1, None
        self.stage = Stage.READY if self.listens else Stage.ENTERED

    def contribute(self, first: int) -> None:
        """Contribute from round ``first`` on."""
        self.stage, self.round = Stage.ENTERED, first

    def enter(self) -> None:
        """Note that it was told that it contributes."""
        self.entered = True

    def await_nobody(self) -> None:
        """Have the others not wait for it, so that it is not to blame."""
        self.delivery = None

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    @property
    def deadline(self) -> float | None:
        """Time at which its patience ends; None while only it has to do something."""
        if self.delivery is not None:
            return None if self.delivery.began == math.inf else self.delivery.deadline
        waits = self.stage in (Stage.WAITING, Stage.READY) or self.plan is not None
        return self.since + self.join.timeout if waits else None

    @property
    def is_coming(self) -> bool:
        """True if it contributes to the next round, or the others wait for that."""
        return self.stage is Stage.ENTERED or (self.stage is Stage.RECEIVING and not self.listens)

    @property
    def hears_boundaries(self) -> bool:
        """True if it is told of each boundary."""
        return self.stage not in (Stage.ADMITTED, Stage.WELCOME)

    def configured(self, seat: int) -> Newcomer:
        """Return it as data shards are told of it."""
        occupant = Seat(self.connection, self.join.name)
        if self.stage is Stage.ENTERED or (self.stage is Stage.RECEIVING and not self.listens):
            return Newcomer(seat, occupant, self.token, first=self.round, transfer=self.number)
        if self.stage in (Stage.RECEIVING, Stage.READY):
            return Newcomer(seat, occupant, self.token, listens=self.round, transfer=self.number)
        return Newcomer(seat, occupant, self.token)

    def transfer(self, seat: int) -> Transfer:
        """Return the transfer in which it gets the state."""
        return Transfer(self.number, self.donor, seat, not self.listens)

    def describe(self, rank: int) -> dict[str, object]:
        """Return it as plain JSON values."""
        return {"name": self.join.name, "rank": rank, "stage": self.stage.value}


@dataclass(slots=True)
class Learners:
    """Learners of one group, and what serves them.

    Attributes:
        by_seat: all of them.
        queue: applicants that wait for a free seat.
        donors: members that can send their state, and how often each has.
        vacant: epoch since which a seat is vacant.
        transfers: number of states that were asked for so far.
        in_vain: names of learners that the others waited for in vain: how often, and when the last time was.
        waits_again: time from which on the others may wait for a learner once more.
    """

    by_seat: dict[int, Learner] = field(default_factory=dict)
    queue: list[Applicant] = field(default_factory=list)
    donors: Counter[int] = field(default_factory=Counter)
    vacant: dict[int, int] = field(default_factory=dict)
    transfers: int = 0
    in_vain: dict[str, tuple[int, float]] = field(default_factory=dict)
    waits_again: float = -math.inf

    def __bool__(self) -> bool:
        return bool(self.by_seat)

    @property
    def hearing(self) -> list[Learner]:
        """Learners that hear of each boundary, with which their patience begins anew."""
        return [learner for learner in self.by_seat.values() if learner.hears_boundaries]

    def wait(self, applicant: Applicant) -> None:
        """Have an applicant wait for a seat."""
        self.queue.append(applicant)

    def leave_queue(self, connection: int) -> None:
        """Forget an applicant that waits for a seat."""
        self.queue = [applicant for applicant in self.queue if applicant.connection != connection]

    def admit(self, seat: int, learner: Learner) -> None:
        """Give a seat to the worker that has waited for it."""
        self.leave_queue(learner.connection)
        self.vacant.pop(seat, None)
        self.by_seat[seat] = learner

    def next_transfer(self) -> int:
        """Return the number of a new transfer."""
        self.transfers += 1
        return self.transfers

    def add_donor(self, seat: int) -> None:
        """Note that a member can send its state."""
        self.donors[seat] += 0

    def remove_donor(self, seat: int) -> None:
        """Note that a member cannot send its state."""
        self.donors.pop(seat, None)

    def count_donation(self, donor: int) -> None:
        """Note that a donor's turn is over: others come first the next time."""
        if donor in self.donors:
            self.donors[donor] += 1

    def succeed(self, learner: Learner) -> None:
        """Note that a learner has got the state."""
        self.count_donation(learner.donor)
        learner.be_ready()
        self.in_vain.pop(learner.join.name, None)

    def promote(self, seat: int) -> None:
        """Note that a learner is a member."""
        learner = self.by_seat.pop(seat)
        if learner.serves:
            self.donors[seat] = max(self.donors.values(), default=0)

    def lose(self, seat: int, epoch: int) -> Learner:
        """Forget a learner, whose seat is vacant since ``epoch``."""
        self.vacant[seat] = epoch
        return self.by_seat.pop(seat)

    def lose_donor(self, seat: int, epoch: int, told: int) -> None:
        """Note that a member is gone. Learners that listen since round ``told`` may have all of its state by now."""
        self.donors.pop(seat, None)
        self.vacant[seat] = epoch
        for learner in self.by_seat.values():
            if learner.donor == seat and learner.listens and learner.round <= told:
                learner.lose_donor()

    def wait_in_vain(self, learner: Learner, now: float) -> None:
        """Have the others wait for no learner for a while, if they have waited for this one."""
        delivery = learner.delivery
        if delivery is None or delivery.began == math.inf:
            return
        recent = {name: found for name, found in self.in_vain.items() if found[1] + STATE_REST_SECONDS > now}
        attempts, _ = recent.get(learner.join.name, (0, 0.0))
        self.in_vain = {**recent, learner.join.name: (attempts + 1, now)}
        self.waits_again = now + _REST * (now - delivery.began)
        self.count_donation(learner.donor)  # it may have been its fault
