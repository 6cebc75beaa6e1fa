"""Sub-groups that a session has, and what it is itself a sub-group of. `gradserver.worker.splitting` makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import ConnectionLostError, GradServerError, UnsupportedOperationError


class Membership(Protocol):
    """A session, as far as it is a sub-group of another one."""

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more."""

    @property
    def is_lasting(self) -> bool:
        """True if it outlives connections."""

    @property
    def is_busy(self) -> bool:
        """True if an exchange is under way."""

    def close(self, reason: str, failed: bool = False, waits: bool = True) -> None:
        """Leave the group."""

    def end(self, error: GradServerError) -> None:
        """Fail all with ``error``, and close the channel."""


M = TypeVar("M", bound=Membership)
M_contra = TypeVar("M_contra", bound=Membership, contravariant=True)


class Carrier(Protocol[M_contra]):
    """The channel of a durable group's member, which has sub-groups outlive connections."""

    def keep(self, branch: Channel, session: M_contra, anew: bool) -> Callable[[], object]:
        """Have the sub-group of ``session`` go on, on a ``branch`` of the present connection and of later ones.

        What is returned attends the data shards, or has that done soon.
        """

    def check_carried(self, branch: Channel) -> None:
        """Raise ConnectionLostError if the connection that carries ``branch`` is the present one no more."""


class Subgroups(Generic[M]):
    """Sub-groups of one session. They end with it.

    A sub-group of a sub-group is one of the root, too: the coordinator knows the root's members.

    Args:
        session: the session that they are of.

    Attributes:
        root: the session that was not made as a sub-group.
        making: held while a sub-group of the root is made. A member waits in one at a time, so that circles are found.
        latest: latest epoch of a Welcome to a sub-group of the root; 0 for none.
    """

    def __init__(self, session: M) -> None:
        self.root = session
        self.making = threading.Lock()
        self.latest = 0
        self._member_ids: tuple[int, ...] | None = None
        """Ids in the root of those that this session's group was made of; None for the root itself."""
        self._sessions: list[M] = []
        self._lock = threading.Lock()
        self._grow: Callable[[], Channel] | None = None
        self._carrier: Carrier[M] | None = None

    def grow_by(self, grow: Callable[[], Channel], carrier: Carrier[M] | None = None) -> None:
        """Make channels of sub-groups with ``grow`` from now on; ``carrier`` has those of durable ones last."""
        self._grow, self._carrier = grow, carrier

    def keep(self, channel: Channel, session: M, anew: bool) -> None:
        """Have a durable sub-group outlive the connection that carries its ``channel``, and attend its data shards.

        Args:
            channel: its channel.
            session: its session.
            anew: true if an earlier connection broke during the call that makes it.

        Raises:
            ConnectionLostError: the sub-group was lost with the connection a moment ago.
        """
        assert self._carrier is not None, "a durable sub-group of a session that does not outlive connections"
        with self._lock:
            if session not in self._sessions:
                raise ConnectionLostError("the connection broke")
            attend = self._carrier.keep(channel, session, anew)
        attend()

    def note_welcome(self, epoch: int) -> None:
        """Note that this member is in a sub-group that began with ``epoch``."""
        self.latest = epoch

    def check_carried(self, channel: Channel) -> None:
        """Raise ConnectionLostError if the connection that carries ``channel`` broke a moment ago."""
        if self._carrier is not None:
            self._carrier.check_carried(channel)

    def grow(self) -> Channel:
        """Return a channel for one more sub-group."""
        if self._grow is None:
            raise UnsupportedOperationError("this worker's channel carries no sub-groups")
        return self._grow()

    def be_of(self, root: M, member_ids: tuple[int, ...]) -> None:
        """Note that this session's group was made of these members of the root's."""
        self.root, self._member_ids = root, member_ids

    def in_root(self, member_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that members of this session's group have in the root."""
        return tuple(member_ids if self._member_ids is None else (self._member_ids[one] for one in member_ids))

    def adopt(self, session: M) -> None:
        """Have one more sub-group end with this session."""
        with self._lock:
            self._sessions = [one for one in self._sessions if not one.closed]
            self._sessions.append(session)

    @property
    def is_busy(self) -> bool:
        """True if an exchange is under way in one of them."""
        return any(session.is_busy for session in self.sessions)

    def close(self, reason: str, failed: bool) -> None:
        """Leave all of them. The answer to what their parent says next shows that this was heard."""
        for session in self.sessions:
            session.close(reason, failed, waits=False)

    def lose_passing(self, error: GradServerError) -> None:
        """Fail those that do not outlive the connection, which has broken."""
        with self._lock:
            lost = [session for session in self._sessions if not session.is_lasting]
            self._sessions = [session for session in self._sessions if session not in lost]
        for session in lost:
            session.end(error)

    def lose(self, error: GradServerError) -> None:
        """Fail all of them: their parent, or the connection, has ended."""
        for session in self.sessions:
            session.end(error)

    @property
    def sessions(self) -> list[M]:
        """The sub-groups' sessions; those of sub-groups of sub-groups are among the root's."""
        with self._lock:
            return list(self._sessions)
