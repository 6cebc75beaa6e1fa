"""Connections by which a member is known: the coordinator and data shards let it in, and hear when it leaves."""

from __future__ import annotations

from collections.abc import Iterable

from gradserver.protocol.messages import Attend
from gradserver.worker.member.effects import Effects
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.member.waiter import Waiter


class Attachment:
    """A member's coming and leaving, at the coordinator (shard 0) and at each data shard.

    Not safe to share: the session's lock guards it.
    """

    def __init__(self, effects: Effects, identity: Identity) -> None:
        self._effects = effects
        self._identity = identity
        self._attending: dict[int, Waiter] = {}
        self._visited: list[int] = []
        """Data shards that know of this member, or will."""
        self._leaving: dict[int, Waiter] = {}

    def join(self, waiter: Waiter) -> None:
        """Note that this worker asks to be let in."""
        self._attending[0] = waiter

    def attend(self, shard: int, generation: int, waiter: Waiter) -> Attend:
        """Give what tells a data shard which member this is: in recovery ``generation``, or in none if that is 0."""
        self._attending[shard] = waiter
        if shard not in self._visited:
            self._visited.append(shard)
        welcome = self._identity.membership
        epoch = generation or welcome.founded or welcome.epoch
        return Attend(welcome.group, epoch, self._identity.member_id, welcome.token)

    def attended(self, shard: int) -> None:
        """Note that a data shard, or the coordinator, has let this member in."""
        if (attending := self._attending.pop(shard, None)) is not None:
            self._effects.complete(attending)

    @property
    def visited(self) -> list[int]:
        """Data shards that know of this member, or will."""
        return self._visited[:]

    def attends(self, shard: int) -> bool:
        """Return true if this worker waits until ``shard`` lets it in."""
        return shard > 0 and shard in self._attending

    def stop_attending(self) -> list[Waiter]:
        """Attend no more: those connections have ended. Give the handles that wait for that."""
        waiting, self._attending = list(self._attending.values()), {}
        return waiting

    def reached(self, shards: Iterable[ShardTraffic]) -> list[int]:
        """List those of ``shards`` that are to hear that this member leaves.

        In a recovery a shard may have no connection to this worker yet, and nothing has been said to it.
        """
        held = {shard.number for shard in shards if shard.held}
        return [number for number in self._visited if number not in held]

    def leave(self, shard: int, waiter: Waiter) -> None:
        """Note that this member leaves ``shard``, and that ``waiter`` waits until that has heard it."""
        self._leaving[shard] = waiter

    def heard_goodbye(self, shard: int) -> None:
        """Note that ``shard`` has heard that this member leaves."""
        if shard in self._leaving:
            self._effects.complete(self._leaving[shard])

    def give_up(self) -> list[Waiter]:
        """Give the handles that wait for something that will not come."""
        return [*self._attending.values(), *self._leaving.values()]
