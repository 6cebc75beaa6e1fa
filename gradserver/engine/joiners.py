"""A worker that joins a running elastic group, as control sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.messages import Join, Transfer
from protocol.plan import Plan


class Stage(Enum):
    """How far one has come; the table is in `gradserver.engine.joining`."""

    ADMITTED = "admitted"
    WELCOME = "welcome"
    WAITING = "waiting"
    RECEIVING = "receiving"
    READY = "ready"
    ENTERED = "entered"


@dataclass(slots=True)
class Joiner:
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

    @property
    def deadline(self) -> float | None:
        """When its patience ends; None while nobody but itself has to do something."""
        waits = self.stage in (Stage.WAITING, Stage.READY) or self.plan is not None
        return self.since + self.join.timeout if waits else None

    def transfer(self, seat: int) -> Transfer:
        """In which it gets the state."""
        return Transfer(self.number, self.donor, seat, not self.listens)

    def describe(self, rank: int) -> dict[str, object]:
        """As plain JSON values."""
        return {"name": self.join.name, "rank": rank, "stage": self.stage.value}
