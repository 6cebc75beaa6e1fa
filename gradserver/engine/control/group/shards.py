"""The data shards that a group uses beside the coordinator's own, and the rounds that they have reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.effects import Effects
from gradserver.engine.link import encode_order
from gradserver.engine.orders import RemoteOrder
from gradserver.engine.reports import RoundCompleted
from gradserver.protocol.messages import Ordered
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table

HERE: Final = 0
"""Source of reports of the coordinator's own data half, in the place of a connection: these have larger numbers."""
VACANT: Final = -1
"""Place of a data shard that is lost, in the place of its connection."""
HIRE_SECONDS: Final = 1.0
"""Time for which a lost shard's place is kept for the process that had it, or one that offers itself."""
_MAX_PARTIAL: Final = 256
"""Rounds that some shards have reported and others not yet; the reports of one shard may be that late."""


@dataclass(slots=True)
class DataShards:
    """Data shards of one group.

    Attributes:
        table: says which shard has which slices.
        credit: bytes that a member may have in flight at each shard, in each pool.
        connections: those of the shards beside the coordinator's own; `VACANT` for a lost one.
        urls: theirs.
        tokens: what members show there, by member id.
        lacking: places of shards that are lost and need a replacement, counted from 0.
        lacking_since: time since which a member is there that needs them.
        hire_at: time at which a process is to be started for them.
        partial: rounds that some shards are done with, by number and connection.
    """

    table: Table
    credit: int = 0
    connections: tuple[int, ...] = ()
    urls: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    lacking: set[int] = field(default_factory=set)
    lacking_since: float | None = None
    hire_at: float | None = None
    partial: dict[int, dict[int, RoundCompleted]] = field(default_factory=dict)

    @property
    def all(self) -> tuple[int, ...]:
        """All shards, the coordinator's own first."""
        return (HERE, *self.connections)

    def __bool__(self) -> bool:
        return bool(self.connections)

    def order(self, order: RemoteOrder, effects: Effects) -> None:
        """Have all data shards obey ``order``, those elsewhere and the one `HERE`."""
        for connection in self.all:
            if connection != VACANT:
                self._tell(connection, order, effects)

    def order_one(self, place: int, order: RemoteOrder, effects: Effects) -> None:
        """Have the shard in ``place``, counted from 0, obey ``order``."""
        self._tell(self.connections[place], order, effects)

    def _tell(self, connection: int, order: RemoteOrder, effects: Effects) -> None:
        if connection == HERE:
            effects.order(order)
        else:
            effects.send(connection, Ordered(), (encode_order(order),))

    def set_up(self, table: Table, connections: Sequence[int] = (), urls: Sequence[str] = ()) -> None:
        """Have the group use these shards."""
        self.table, self.connections, self.urls = table, tuple(connections), tuple(urls)

    def suit(self, grain: int, credit: int) -> None:
        """Set the size of slices, and what a member may have in flight."""
        self.table.grain, self.credit = grain, credit

    def set_tokens(self, tokens: Sequence[str]) -> None:
        """Note what members show to shards."""
        self.tokens = tuple(tokens)

    def set_plan(self, plan: Plan) -> None:
        """Share the buckets of ``plan`` out."""
        self.table.set_plan(plan)
        self.void()

    # ── lost shards ───────────────────────────────────────────────────────────────────────────────────

    def restore(self, table: Table, count: int, credit: int) -> None:
        """Go on where an earlier coordinator was lost: ``count`` shards are to enlist anew."""
        self.set_up(table, (VACANT,) * count, ("",) * count)
        self.credit = credit
        self.lacking = set(range(count))

    def vacate(self, connection: int) -> int:
        """Give no more orders to the shard with this connection. Return its place."""
        place = self.connections.index(connection)
        self.connections = (*self.connections[:place], VACANT, *self.connections[place + 1 :])
        return place

    def lose(self, place: int) -> None:
        """Wait for another process in a lost shard's place. Rounds that shards have reported are void without it."""
        self.lacking.add(place)
        self.void()

    def miss(self, now: float) -> None:
        """Note that a member is there which needs the lacking shards."""
        if self.lacking and self.lacking_since is None:
            self.lacking_since, self.hire_at = now, now + HIRE_SECONDS

    def fill(self, place: int, connection: int, url: str) -> None:
        """Have a shard take a vacant place."""
        self.lacking.discard(place)
        self.connections = (*self.connections[:place], connection, *self.connections[place + 1 :])
        self.urls = (*self.urls[:place], url, *self.urls[place + 1 :])
        if not self.lacking:
            self.lacking_since = self.hire_at = None

    def hire(self, now: float, effects: Effects) -> None:
        """Have a process started in the place of a lost shard."""
        self.hire_at = now + HIRE_SECONDS
        effects.hire()

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────────

    def report(self, source: int, report: RoundCompleted) -> dict[int, RoundCompleted] | None:
        """Note that a shard is done with a round. Return the reports of all busy shards when all are."""
        number = report.record.round
        reported = self.partial.setdefault(number, {})
        reported[source] = report
        if len(reported) < self.table.busy_shards[report.record.section]:
            while len(self.partial) > _MAX_PARTIAL:
                del self.partial[min(self.partial)]
            return None
        return self.partial.pop(number)

    def void(self) -> None:
        """Forget what shards have reported."""
        self.partial.clear()
