"""What a member of an elastic group knows of who else is there, and when it goes by it."""

from __future__ import annotations

from protocol.messages import Membership, RoundDone
from worker.handle import Handle


class Announced:
    """Memberships that the coordinator has told of and this worker does not go by yet; and the last round it ended.

    Not safe to share: the session's lock guards it.
    """

    def __init__(self) -> None:
        self._memberships: dict[int, Membership] = {}
        self._done = RoundDone(-1, 0)
        self._waiting: Handle | None = None

    def add(self, membership: Membership) -> None:
        """The coordinator has told of it."""
        self._memberships[membership.epoch] = membership

    def take(self, epoch: int) -> Membership | None:
        """The one that is in force from now on; None if it is already. Earlier ones will never be."""
        found = self._memberships.get(epoch)
        self._memberships = {later: news for later, news in self._memberships.items() if later > epoch}
        return found

    def round_done(self, done: RoundDone) -> Handle | None:
        """A round is over; who waits for that."""
        self._done = done
        waiting, self._waiting = self._waiting, None
        return waiting

    def wait_for(self, number: int, handle: Handle) -> Handle | None:
        """``handle``, which is done when round ``number`` is over; None if it is."""
        if self._done.round >= number:
            return None
        self._waiting = handle
        return handle

    @property
    def epoch(self) -> int:
        """The one in force after the round that was over last."""
        return self._done.epoch

    def give_up(self) -> list[Handle]:
        """Who waits for what will not come."""
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else [waiting]
