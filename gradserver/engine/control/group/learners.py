"""Learners of a group: workers that join it while it trains.

`gradserver.engine.control.learners` decides what happens to them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gradserver.engine.control.group.applicants import Applicant
from gradserver.engine.order_fields import Member, Newcomer
from gradserver.protocol.limits import (
    MIB,
    STATE_ASK_SECONDS,
    STATE_INSTALLED_A_SECOND,
    STATE_REST_SECONDS,
    STATE_STALL_SECONDS,
)
from gradserver.protocol.messages import Join
from gradserver.protocol.plan import Plan

_REST: Final = 9.0
"""After waiting for a learner in vain the others train for so many times as long before they wait for one again."""


class Stage(Enum):
    """Stage of a learner; `gradserver.engine.control.group.stages` has the table."""

    ADMITTED = "admitted"
    WELCOME = "welcome"
    WAITING = "waiting"
    RECEIVING = "receiving"
    READY = "ready"
    ENTERED = "entered"
    MEMBER = "member"
    GONE = "gone"


@dataclass(slots=True)
class Delivery:
    """The state's way to a learner that others wait for. What buys time are bytes that have come, and nothing else.

    Attributes:
        began: when members were told of it.
        seconds: how long it may take.
        rate: bytes that must come in a second.
        asked: whether the learner has asked for it.
        received: bytes that have come.
        endless: whether it may take longer, since there are too few to train without the learner.
    """

    seconds: float
    rate: float
    endless: bool
    began: float = math.inf
    asked: bool = False
    received: int = 0
    _since: float = 0.0
    """Last time at which as many bytes had come as were due."""
    _then: int = 0
    """Bytes that had come then."""

    def begin(self, now: float) -> None:
        """Note that members were told of it."""
        self.began = now

    def comes(self, nbytes: int, now: float) -> None:
        """Note that the learner has asked for the state, or that so many more bytes of it have come."""
        self.asked = True
        if nbytes and not self.received:
            self._since = now
        self.received += nbytes
        if self.received - self._then >= self.rate * (now - self._since):
            self._since, self._then = now, self.received

    @property
    def deadline(self) -> float:
        """Time until which the others wait, if nothing more comes."""
        if not self.asked:
            until = self.began + STATE_ASK_SECONDS
        elif not self.received:
            until = self.began + self.seconds / 8
        else:
            until = self._since + STATE_STALL_SECONDS + (self.received - self._then) / self.rate
            until += self.received / STATE_INSTALLED_A_SECOND
        return until if self.endless else min(until, self.began + self.seconds)

    def why(self, now: float, donor: str) -> str:
        """Say why the others wait no longer."""
        if not self.asked:
            return f"it did not ask for the state that {donor} was to send it"
        much = f"{self.received:,} bytes of the state of {donor} had come"
        if now >= self.began + self.seconds and not self.endless:
            return f"{much}, and the others wait {self.seconds:g} s at most (--state-timeout)"
        if not self.received:
            return f"{much}, and the others wait {self.seconds / 8:g} s for the first (an eighth of --state-timeout)"
        return f"{much}, too few for the {self.rate / MIB:g} MiB a second that must come (--state-rate)"


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
        donor: id of the member that sends the state; -1 when none has to any more.
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

    def go_on_as(self, stage: Stage) -> None:
        """Go to a stage: `gradserver.engine.control.group.stages.happens` alone says so."""
        self.stage = stage

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

    def serve(self) -> None:
        """Note that it can send its state when it is a member."""
        self.serves = True

    def hear_boundary(self, at: float) -> None:
        """Begin its patience anew, as a round was over at this time."""
        self.since = at

    def receive(self, donor: int, number: int, first: int, delivery: Delivery | None) -> None:
        """Get the state from ``donor``, in a transfer. With a ``delivery`` the others wait for it, else it listens."""
        self.donor, self.number, self.round = donor, number, first
        self.listens, self.delivery = delivery is None, delivery

    def fall_behind(self) -> None:
        """Have the others wait the next time, as it could not read what it was sent."""
        self.waits = True
        self.excuse()

    def end_transfer(self) -> None:
        """Go on with what has come of the state, and have no member wait for more."""
        self.donor, self.delivery = -1, None

    def excuse(self) -> None:
        """Wait for the next donor, and have no member wait for it."""
        self.end_transfer()
        self.round = -1

    def contribute(self, first: int) -> None:
        """Contribute from round ``first`` on."""
        self.round = first

    def enter(self) -> None:
        """Note that it was told that it contributes."""
        self.entered = True

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

    def configured(self, member_id: int) -> Newcomer:
        """Return it as data shards are told of it."""
        occupant = Member(self.connection, self.join.name)
        if self.is_coming:
            return Newcomer(member_id, occupant, self.token, first=self.round, transfer=self.number)
        if self.stage in (Stage.RECEIVING, Stage.READY):
            return Newcomer(member_id, occupant, self.token, listens=self.round, transfer=self.number)
        return Newcomer(member_id, occupant, self.token)

    def validate(self, number: int) -> None:
        """Raise AssertionError if its stage is not that of its other fields, or not one of open round ``number``."""
        due = (number,) if self.entered else range(-1, number + 1)
        assert self.round in due, f"round {number} is open, and {self} contributes from round {self.round} on"
        receives = self.stage is Stage.RECEIVING
        assert (receives or self.stage in (Stage.READY, Stage.ENTERED)) == (self.round >= 0), (
            f"{self} contributes from round {self.round} on"
        )
        assert receives or (self.donor < 0 and self.delivery is None), f"{self} has a donor"
        assert not receives or self.listens == (self.delivery is None), f"{self} both listens and is expected"
        assert self.stage is Stage.ENTERED or not self.entered, f"{self} was told that it has entered"

    def describe(self, rank: int) -> dict[str, object]:
        """Return it as plain JSON values."""
        return {"name": self.join.name, "rank": rank, "stage": self.stage.value}


@dataclass(slots=True)
class Learners:
    """Learners of one group, and what serves them.

    Attributes:
        by_id: all of them.
        queue: applicants that wait for a free place.
        donors: members that can send their state, and how often each has.
        vacant: epoch since which an id is free.
        transfers: number of states that were asked for so far.
        in_vain: names of learners that the others waited for in vain: how often, and when the last time was.
        waits_again: time from which on the others may wait for a learner once more.
    """

    by_id: dict[int, Learner] = field(default_factory=dict)
    queue: list[Applicant] = field(default_factory=list)
    donors: Counter[int] = field(default_factory=Counter)
    vacant: dict[int, int] = field(default_factory=dict)
    transfers: int = 0
    in_vain: dict[str, tuple[int, float]] = field(default_factory=dict)
    waits_again: float = -math.inf

    def __bool__(self) -> bool:
        return bool(self.by_id)

    @property
    def hearing(self) -> list[Learner]:
        """Learners that hear of each boundary, with which their patience begins anew."""
        return [learner for learner in self.by_id.values() if learner.stage not in (Stage.ADMITTED, Stage.WELCOME)]

    def wait(self, applicant: Applicant) -> None:
        """Have an applicant wait for a place."""
        self.queue.append(applicant)

    def leave_queue(self, connection: int) -> None:
        """Forget an applicant that waits for a place."""
        self.queue = [applicant for applicant in self.queue if applicant.connection != connection]

    @property
    def queued_names(self) -> set[str]:
        """Names of the applicants that wait for a place."""
        return {applicant.join.name for applicant in self.queue}

    def take_queue(self) -> list[Applicant]:
        """Take out the applicants that wait for a place."""
        queue, self.queue = self.queue, []
        return queue

    def admit(self, member_id: int, learner: Learner) -> None:
        """Give a place to the worker that has waited for it."""
        self.leave_queue(learner.connection)
        self.vacant.pop(member_id, None)
        self.by_id[member_id] = learner

    def next_transfer(self) -> int:
        """Return the number of a new transfer."""
        self.transfers += 1
        return self.transfers

    def add_donor(self, member_id: int) -> None:
        """Note that a member can send its state."""
        self.donors[member_id] += 0

    def remove_donor(self, member_id: int) -> None:
        """Note that a member cannot send its state."""
        self.donors.pop(member_id, None)

    def count_donation(self, donor: int) -> None:
        """Note that a donor's turn is over: others come first the next time."""
        if donor in self.donors:
            self.donors[donor] += 1

    def succeed(self, learner: Learner, donor: int) -> None:
        """Note that a learner has got the state of ``donor``."""
        self.count_donation(donor)
        self.in_vain.pop(learner.join.name, None)

    def promote(self, member_id: int) -> None:
        """Note that a learner is a member."""
        learner = self.by_id.pop(member_id)
        if learner.serves:
            self.donors[member_id] = max(self.donors.values(), default=0)

    def lose(self, member_id: int, epoch: int) -> Learner:
        """Forget a learner. Its id is free since ``epoch``."""
        self.vacant[member_id] = epoch
        return self.by_id.pop(member_id)

    def lose_donor(self, member_id: int, epoch: int) -> list[Learner]:
        """Note that a member is gone. Return learners that were to get its state."""
        self.donors.pop(member_id, None)
        self.vacant[member_id] = epoch
        return [learner for learner in self.by_id.values() if learner.donor == member_id]

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
