"""Members of a group, by member id, and what they are told of the membership.

`gradserver.engine.control.members` decides what happens to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.identities import Identities, namesake
from gradserver.engine.journal_state import MAX_EPOCHS
from gradserver.engine.order_fields import Member
from gradserver.protocol.messages import Membership, Paced

_MAX_TOLD: Final = 4000
"""Bytes of what has changed in a membership, in which others' names may be."""
_MOST_CALLED: Final = 16
"""Workers that are spoken of by name at once."""


@dataclass(slots=True)
class Members:
    """Members of one group.

    Attributes:
        world: how many are, or may come to be, in the group.
        by_id: members that are there, in the order of their ids. One without a connection has -1.
        member_ids: names by member id, and the ids of members that are there by rank.
        epoch: number of the membership.
        epoch_before: that of the membership without members that are new in it, in which they had no part yet.
        founded: number by which data halves know the group: the first epoch, or the last generation.
        founders: number of ids when the group began.
        first_rounds: first round of each member that joined the running group.
        left: names of members that have left in peace, and are not back.
        paces: what members have said of their speed.
        news: memberships that a member may have to hear of, up to the latest.
    """

    world: int
    by_id: dict[int, Member] = field(default_factory=dict)
    identities: Identities = field(default_factory=lambda: Identities(()))
    epoch: int = 0
    epoch_before: int = 0
    founded: int = 0
    founders: int = 0
    first_rounds: dict[int, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    paces: dict[int, Paced] = field(default_factory=dict)
    news: deque[Membership] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))

    # ── coming and going ──────────────────────────────────────────────────────────────────────────────

    def found(self, chosen: Mapping[int, Member], epoch: int) -> None:
        """Make members of the founders."""
        self.by_id = dict(chosen)
        self.world = self.founders = max(chosen) + 1
        self.identities = Identities(
            chosen[member_id].name if member_id in chosen else "" for member_id in range(self.world)
        )
        self.founded = epoch
        self.begin_epoch(epoch)

    def restore(self, names: Mapping[int, str], present: Mapping[int, str], epoch: int) -> None:
        """Go on with the members of an earlier coordinator, all without a connection. Others had ``names``, too."""
        self.world = self.founders = max(names) + 1
        self.identities = Identities(names.get(member_id, "") for member_id in range(self.world))  # some are free
        self.by_id = {member_id: Member(-1, name) for member_id, name in present.items()}
        for member_id in names:
            if member_id not in self.by_id:
                self.identities.depart(member_id)
        self.founded = epoch
        self.begin_epoch(epoch)

    def admit(self, member_id: int, name: str) -> None:
        """Give a place to a learner. It is no member yet."""
        self.identities.admit(member_id, name)
        self.left.discard(name)
        self.world = len(self.identities.names)

    def promote(self, entered: Mapping[int, Member], number: int, epoch: int) -> str:
        """Make members of learners that have ``number`` as their first round. Return a text that says so."""
        self.by_id = dict(sorted({**self.by_id, **entered}.items()))
        self.first_rounds |= dict.fromkeys(entered, number)
        self.identities.set_present(tuple(self.by_id))
        self.epoch_before, self.epoch = self.epoch, epoch
        return f"{self.calls(entered)} joined in round {number}; {len(self.by_id)} workers go on"

    def entered_in(self, number: int, member_ids: Iterable[int]) -> None:
        """Note that round ``number`` is the first one of these members alone."""
        self.first_rounds = dict.fromkeys(member_ids, number)

    def lose(self, member_id: int, politely: bool) -> None:
        """Take note that a member is gone, or has left in peace. Ranks stay what they are until `depart`."""
        member = self.by_id.pop(member_id, None)
        if politely and member is not None:
            self.left.add(member.name)
        self.paces.pop(member_id, None)

    def depart(self, member_id: int, epoch: int) -> None:
        """Close the gap in the ranks that a member leaves, in a new epoch."""
        self.identities.depart(member_id)
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch without new members."""
        self.epoch = self.epoch_before = epoch

    def void_before(self, generation: int) -> None:
        """Have reports of shards from before a recovery count for nothing."""
        self.founded = generation

    def connect(self, member_id: int, connection: int) -> None:
        """Note the connection of a member, -1 for none."""
        self.by_id[member_id] = Member(connection, self.by_id[member_id].name)

    # ── news ──────────────────────────────────────────────────────────────────────────────────────────

    def recall(self, news: Membership) -> None:
        """Note a membership that a member may not have heard of."""
        self.news.append(news)

    def forget_news(self, epoch: int) -> None:
        """Forget memberships before ``epoch``, which no member has to hear of any more."""
        while self.news and self.news[0].epoch < epoch:
            self.news.popleft()

    def membership(self, reason: str, lost: bool, early: tuple[int, ...]) -> Membership:
        """Return the news of the present membership. The first round of ``early`` members is not over."""
        first = max((self.first_rounds[member_id] for member_id in early), default=0)
        told = reason.encode(errors="replace")[:_MAX_TOLD].decode(errors="ignore")
        return Membership(
            self.epoch, self.identities.present, self.identities.present_names(), told, lost, early, first
        )

    def note_pace(self, member_id: int, paced: Paced) -> None:
        """Note what a member says of its speed. A learner is no member yet."""
        if member_id in self.by_id:
            self.paces[member_id] = paced

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def early(self, number: int) -> tuple[int, ...]:
        """Return members that have ``number`` or a later one as their first round, since a recovery in it."""
        return tuple(sorted(member_id for member_id in self.by_id if self.first_rounds.get(member_id, -1) >= number))

    def has_left(self, name: str) -> bool:
        """Tell whether a member has left in peace that was called ``name``, perhaps with a number behind it."""
        return name in self.left or namesake(name, sorted(self.left), ()) >= 0

    def describe_pace(self, member_id: int) -> dict[str, object]:
        """Return what a member has said of its speed, as plain JSON values; nothing if it has said nothing."""
        paced = self.paces.get(member_id)
        return {} if paced is None else {"pace": {name: getattr(paced, name) for name in Paced.__dataclass_fields__}}

    def calls(self, member_ids: Iterable[int]) -> str:
        """Name several members in a text."""
        called = [self.identities.call(member_id) for member_id in member_ids]
        more = f" and {len(called) - _MOST_CALLED} more" if len(called) > _MOST_CALLED else ""
        return ", ".join(called[:_MOST_CALLED]) + more
