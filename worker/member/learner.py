"""The course by which a worker comes into a group that trains already.

A worker that is JOINING says Enter, and waits for a RoundDone that names it. Then it gets the state; if that does not
come, it says Enter again. If the next round waits for it, it installs the state and says Ready: with Entered it has
ENTERED. Otherwise it is OBSERVING: it trains, and nothing of it counts. It says Ready when no result of the next round
is here, and has ENTERED when the round begins that Entered names. Behind that round it is a MEMBER, in a new epoch.

While it is JOINING it can agree on a plan, which is compared with the group's at once, and nothing else. What it does
when it has ENTERED counts as that of a member. It takes part in collectives from the end of its first round on.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from gradserver.protocol.messages import Enter, Ready, RoundDone, Transfer
from gradserver.worker.member.waiter import Waiter


class Stage(Enum):
    """The part that this worker has in its group."""

    JOINING = "joins a group that trains already"
    OBSERVING = "catches up with a group that trains already"
    ENTERED = "has just joined, and is in its first round"
    MEMBER = "is a member"


FOLLOWS: Final = {
    Stage.JOINING: (Stage.OBSERVING, Stage.ENTERED),
    Stage.OBSERVING: (Stage.ENTERED,),
    Stage.ENTERED: (Stage.MEMBER,),
    Stage.MEMBER: (Stage.MEMBER,),
}
"""Stages that may follow each one; a worker begins as JOINING, or as a MEMBER of a group that forms."""


class Arrival(NamedTuple):
    """The arrival of the state at a worker that joined.

    Attributes:
        donor: the name of the member that sent it.
        nbytes: how large it was.
        seconds: how long that took.
    """

    donor: str
    nbytes: int
    seconds: float


class Learner:
    """Messages of the coordinator to a worker that joins. Not safe to share: the session's lock guards it."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
        """The latest one in which it is to get the state."""
        self.round: int | None = None
        """The first round that it contributes to, when it may."""
        self.begins = 0
        """The round that follows its state."""
        self.behind = False
        """True if more results have come than there is room for."""
        self.ready = False
        """True if it has said that it has caught up."""
        self.asked: Enter | None = None
        """The first request for the state."""
        self.arrival: Arrival | None = None
        """The arrival of its state."""
        self._waiting: Waiter | None = None

    def heard(self, done: RoundDone, member_id: int) -> list[Waiter]:
        """Note that a round is over; give the handles that wait for that."""
        for transfer in done.transfers:
            if transfer.learner == member_id:
                self.transfer, self.begins, self.behind = transfer, done.round + 1, False
        return self.give_up()

    def entered(self, number: int) -> list[Waiter]:
        """Note that it may contribute; give the handles that wait for that."""
        self.round = number
        return self.give_up()

    def wait(self, handle: Waiter) -> None:
        """Have ``handle`` done when there is any news."""
        self._waiting = handle

    def ask(self, waits: bool) -> Enter:
        """Give the first request for the state. With ``waits`` the others are to wait for this worker."""
        self.asked = Enter(0, waits)
        return self.asked

    def begin_anew(self) -> None:
        """Forget what it was told of: it joins anew."""
        self.transfer, self.round, self.begins, self.behind, self.ready = None, None, 0, False, False

    def fall_behind(self) -> None:
        """Note that more results have come than there is room for."""
        self.behind = True

    def say_ready(self) -> Ready:
        """Give what says that this worker has caught up; it is said once."""
        assert self.transfer is not None
        self.ready = True
        return Ready(self.transfer.number)

    def arrived(self, arrival: Arrival) -> None:
        """Note how this worker got its state."""
        self.arrival = arrival

    def give_up(self) -> list[Waiter]:
        """Give the handles that wait."""
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else [waiting]
