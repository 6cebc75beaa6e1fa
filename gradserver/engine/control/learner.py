"""A worker that joins a running elastic group, as control sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gradserver.protocol.limits import MIB, STATE_ASK_SECONDS, STATE_INSTALLED_A_SECOND, STATE_STALL_SECONDS
from gradserver.protocol.messages import Join, Transfer
from gradserver.protocol.plan import Plan


class Stage(Enum):
    """How far one has come; the table is in `gradserver.engine.control.learners`."""

    ADMITTED = "admitted"
    WELCOME = "welcome"
    WAITING = "waiting"
    RECEIVING = "receiving"
    READY = "ready"
    ENTERED = "entered"


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
    """When as many bytes had come as were due, the last time."""
    _then: int = 0
    """How many that were."""

    def comes(self, nbytes: int, now: float) -> None:
        """The learner has asked for the state, or so much more of it has come."""
        self.asked = True
        if nbytes and not self.received:
            self._since = now
        self.received += nbytes
        if self.received - self._then >= self.rate * (now - self._since):
            self._since, self._then = now, self.received

    @property
    def deadline(self) -> float:
        """Until when the others wait, if nothing more comes."""
        if not self.asked:
            until = self.began + STATE_ASK_SECONDS
        elif not self.received:
            until = self.began + self.seconds / 8
        else:
            until = self._since + STATE_STALL_SECONDS + (self.received - self._then) / self.rate
            until += self.received / STATE_INSTALLED_A_SECOND
        return until if self.endless else min(until, self.began + self.seconds)

    def why(self, now: float, donor: str) -> str:
        """Why the others wait no longer."""
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
    """One that is not a member yet.

    Attributes:
        token: what it shows data shards.
        since: as of when it waits for something that has a deadline.
        plan: what it has proposed, while the group has none to compare it with.
        agreed: the hash of the group's plan, of which its own ones are sections.
        sections: the numbers of these, in the order in which it has proposed them.
        number: of the transfer in which it gets the state; 0 if there is none.
        donor: the seat of whoever sends it; -1 when nobody has to any more.
        round: the first one that it contributes to, if that is settled.
        serves: whether it can send its state when it is a member.
        listens: whether it is sent results unasked meanwhile; otherwise the others wait for it.
        waits: whether the others have to: it asks for that, or more of them had come than it could read.
        entered: whether it was told that it contributes.
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

    @property
    def deadline(self) -> float | None:
        """When its patience ends; None while nobody but itself has to do something."""
        if self.delivery is not None:
            return None if self.delivery.began == math.inf else self.delivery.deadline
        waits = self.stage in (Stage.WAITING, Stage.READY) or self.plan is not None
        return self.since + self.join.timeout if waits else None

    @property
    def is_coming(self) -> bool:
        """True if it contributes to the next round, or the others wait for that."""
        return self.stage is Stage.ENTERED or (self.stage is Stage.RECEIVING and not self.listens)

    def transfer(self, seat: int) -> Transfer:
        """In which it gets the state."""
        return Transfer(self.number, self.donor, seat, not self.listens)

    def describe(self, rank: int) -> dict[str, object]:
        """As plain JSON values."""
        return {"name": self.join.name, "rank": rank, "stage": self.stage.value}
