"""The transfers in which a member is to send its state to learners: `gradserver.worker.donor` sends it."""

from __future__ import annotations

from typing import Final

from gradserver.protocol.errors import WorkerLostError
from gradserver.protocol.messages import RoundDone, Serve, StateFailed, Transfer
from gradserver.worker.member.rounds import Rounds

_MAX_REASON: Final = 500


class Donor:
    """The states that one member has to send. Not safe to share: the session's lock guards it.

    Attributes:
        serves: true if it has said that it can send its state.
        due: requests that it has not begun: the round after which, and the transfer.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.serves = False
        self.due: list[tuple[int, Transfer]] = []
        self._rounds = rounds
        self._under_way: set[int] = set()
        """Numbers of transfers with parts that are being sent."""

    def serve(self) -> Serve | None:
        """Give what says that this member can send its state; it is said once."""
        if self.serves:
            return None
        self.serves = True
        return Serve()

    def asked(self, done: RoundDone, me: int) -> None:
        """Take the coordinator's requests for a state at a boundary."""
        self.due += [(done.round, transfer) for transfer in done.transfers if transfer.donor == me]

    def take(self) -> tuple[list[Transfer], list[StateFailed]]:
        """Take the requests for the state at the present boundary; and refuse those for an earlier one's."""
        here = self._rounds.number - 1
        asked = [one for one in self.due if one[0] <= here]
        self.due = [one for one in self.due if one[0] > here]
        found = [transfer for number, transfer in asked if number == here]
        self._under_way.update(transfer.number for transfer in found)
        text = "its state is that after round {}, and that after round {} is wanted"
        return found, [_failed(transfer, text.format(here, number)) for number, transfer in asked if number != here]

    def cannot(self, transfer: Transfer, reason: str) -> StateFailed:
        """Give what says that a state is not sent, and why."""
        self._under_way.discard(transfer.number)
        return _failed(transfer, reason)

    def sent(self, transfer: Transfer) -> None:
        """Note that all of a state was sent."""
        self._under_way.discard(transfer.number)

    def forget(self) -> None:
        """Drop all transfers: their receivers begin anew."""
        self.due.clear()
        self._under_way.clear()

    def check(self, transfer: Transfer) -> None:
        """Raise WorkerLostError if that state has no receiver any more."""
        if transfer.number not in self._under_way:
            raise nobody_takes_it()


def _failed(transfer: Transfer, reason: str) -> StateFailed:
    return StateFailed(transfer.number, reason[:_MAX_REASON])


def nobody_takes_it() -> WorkerLostError:
    """Return the error that ends the sending of a state in a recovery."""
    return WorkerLostError("the learner that this worker sent its state to has to join again")
