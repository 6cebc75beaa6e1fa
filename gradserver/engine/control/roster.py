"""The data shards that have enlisted with a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

from gradserver.engine.control.access import OPEN, Access
from gradserver.engine.control.group import Group
from gradserver.engine.control.names import check_name
from gradserver.engine.effects import Effects
from gradserver.protocol.errors import (
    JoinRefusedError,
    LimitExceededError,
    MalformedMessageError,
    UnexpectedMessageError,
)
from gradserver.protocol.limits import MAX_SHARDS, MAX_URL
from gradserver.protocol.messages import Enlist, Enlisted
from gradserver.protocol.shards import Table, comparable
from gradserver.protocol.url import parse_url


@dataclass(frozen=True, slots=True)
class DataShard:
    """Data shard that has enlisted. ``rate``: Gbit/s, None if unknown. ``own``: the coordinator has started it."""

    number: int
    url: str
    rate: float | None
    own: bool = True


class Roster:
    """Data shards that have enlisted, by connection.

    Args:
        entropy: gives text that cannot be guessed; without it no shards are taken.
        rate: of the coordinator's own link, in Gbit/s; None if unknown.
        access: which shards are taken.
    """

    def __init__(self, entropy: Callable[[], str] | None, rate: float | None, access: Access = OPEN) -> None:
        self.shards: dict[int, DataShard] = {}
        self._entropy, self._access = entropy, access
        self._own = 0
        self._rate = rate
        self._numbers = 0

    def enlist(self, connection: int, offer: Enlist, returns: bool, effects: Effects) -> None:
        """Take a shard, for groups that become complete from now on. ``returns``: if we are lost, others may come."""
        if self._entropy is None:
            raise UnexpectedMessageError("this coordinator takes no data shards")
        if connection in self.shards:
            raise UnexpectedMessageError("this connection has enlisted already")
        check_name("a data shard's URL", offer.url, MAX_URL)
        if parse_url(offer.url)[1] == 0:
            raise MalformedMessageError(f"{offer.url} is not a data shard's URL: it has no port")
        self._access.check_shard(offer.url, offer.token)
        if any(shard.url == offer.url for shard in self.shards.values()):
            raise JoinRefusedError(f"there is a data shard at {offer.url} already")
        if len(self.shards) >= MAX_SHARDS - 1:
            raise LimitExceededError(f"this coordinator has {MAX_SHARDS} data shards already, its own included")
        self._numbers += 1
        own = self._access.is_own_shard(offer.token)
        self._own += own
        shard = self.shards[connection] = DataShard(self._numbers, offer.url, offer.rate, own)
        effects.send(connection, Enlisted(shard.number, returns))
        rate = "" if shard.rate is None else f", {shard.rate:g} Gbit/s"
        effects.log(f"data shard {shard.number} is at {shard.url}{rate}")

    def staff(self, group: Group, among: Collection[int] | None = None) -> None:
        """``group`` is to use all shards there are, or those ``among`` which its members have connections to."""
        chosen = {one: shard for one, shard in self.shards.items() if among is None or one in among}
        if chosen and self._entropy is not None:
            stated = [self._rate, *(shard.rate for shard in chosen.values())]
            urls = [shard.url for shard in chosen.values()]
            table = Table(len(group.members.by_id), comparable(stated), group.policy.mean.unit)
            group.shards.set_up(table, tuple(chosen), urls)
            durable, entropy = group.is_durable, self._entropy
            member_ids = range(group.members.world)
            group.shards.set_tokens([group.token(member_id) if durable else entropy() for member_id in member_ids])

    def rates_of(self, group: Group) -> list[float | None]:
        """Return the rates of the shards of ``group`` in Gbit/s, this process's first; None for one that is unknown."""
        connections = group.shards.connections
        return [self._rate, *(self.shards[one].rate if one in self.shards else None for one in connections)]

    @property
    def enlisted(self) -> int:
        """Number of data shards that the coordinator has started and that have enlisted, so far."""
        return self._own

    @property
    def own(self) -> int:
        """Number of data shards that the coordinator has started and that are there."""
        return sum(shard.own for shard in self.shards.values())

    def token(self) -> str:
        """Return text that cannot be guessed, to show shards or to be a group's secret; empty if there is none."""
        return "" if self._entropy is None else self._entropy()

    def snapshot(self) -> list[dict[str, object]]:
        """The shards, the coordinator's own first, as plain JSON values."""
        own = DataShard(0, "", self._rate)
        return [asdict(shard) for shard in (own, *self.shards.values())]
