"""Sub-groups that a session has, and what it is itself a sub-group of. `gradserver.worker.splitting` makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import GradServerError, UnsupportedOperationError


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


class Subgroups(Generic[M]):
    """Sub-groups of one session. They end with it.

    A sub-group of a sub-group is one of the root, too: the coordinator knows the root's members.

    Args:
        session: the session that they are of.

    Attributes:
        root: the session that was not made as a sub-group.
        making: held while a sub-group of the root is made. A member waits in one at a time, so that circles are found.
    """

    def __init__(self, session: M) -> None:
        self.root = session
        self.making = threading.Lock()
        self._member_ids: tuple[int, ...] | None = None
        """Ids in the root of those that this session's group was made of; None for the root itself."""
        self._sessions: list[M] = []
        self._lock = threading.Lock()
        self._grow: Callable[[], Channel] | None = None
        self._keep: Callable[[Channel, M], object] | None = None

    def grow_by(self, grow: Callable[[], Channel], keep: Callable[[Channel, M], object] | None = None) -> None:
        """Make channels of sub-groups with ``grow`` from now on; ``keep`` has one of a durable sub-group last."""
        self._grow, self._keep = grow, keep

    def keep(self, channel: Channel, session: M) -> None:
        """Have the sub-group of ``session`` outlive the connection that carries its ``channel``."""
        if self._keep is not None:
            self._keep(channel, session)

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
        return any(session.is_busy for session in self._all())

    def close(self, reason: str, failed: bool) -> None:
        """Leave all of them. The answer to what their parent says next shows that this was heard."""
        for session in self._all():
            session.close(reason, failed, waits=False)

    def lose_passing(self, error: GradServerError) -> None:
        """Fail those that do not outlive the connection, which has broken."""
        for session in self._all():
            if not session.is_lasting:
                session.end(error)

    def lose(self, error: GradServerError) -> None:
        """Fail all of them: their parent, or the connection, has ended."""
        for session in self._all():
            session.end(error)

    def _all(self) -> list[M]:
        with self._lock:
            return list(self._sessions)
