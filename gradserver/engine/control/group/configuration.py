"""Versions of a group's membership, and which data shards go by them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradserver.protocol.messages import Membership


@dataclass(slots=True)
class Change:
    """A version of the membership that the shards in ``waiting`` do not go by yet.

    When they do, members hear ``news``, or the learner with ``member_id`` gets its Welcome.
    """

    version: int
    waiting: set[int]
    news: Membership | None = None
    member_id: int = -1


@dataclass(slots=True)
class Configuration:
    """Versions of one group's membership.

    Attributes:
        version: number of the latest one.
        changes: versions that members have yet to hear of, in their order.
    """

    version: int = 0
    changes: deque[Change] = field(default_factory=deque)

    def change(self, shards: Iterable[int], news: Membership | None, member_id: int) -> None:
        """Begin a version. When all ``shards`` go by it, members hear ``news``, or a learner gets its Welcome."""
        self.version += 1
        self.changes.append(Change(self.version, set(shards), news, member_id))

    def apply(self, shard: int, version: int) -> None:
        """Note that a shard goes by ``version``, and by all before it."""
        for change in self.changes:
            if change.version <= version:
                change.waiting.discard(shard)

    def wait_no_more(self) -> None:
        """Let members hear of all changes now, as a recovery begins. They push when shards have come to that."""
        for change in self.changes:
            change.waiting.clear()

    @property
    def can_tell(self) -> bool:
        """True if all shards go by the next change."""
        return bool(self.changes) and not self.changes[0].waiting

    def is_pending(self, news: Membership) -> bool:
        """Tell whether members have yet to hear ``news``."""
        return any(change.news is news for change in self.changes)

    def next_change(self) -> Change:
        """Take the change that all shards go by out of the list."""
        return self.changes.popleft()
