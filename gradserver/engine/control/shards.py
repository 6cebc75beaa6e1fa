"""The data shards that a coordinator has beside its own data half, and what they have reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from gradserver.engine.control.access import OPEN, Access
from gradserver.engine.control.group import Group
from gradserver.engine.control.names import check_name
from gradserver.engine.control.welcome import token_of
from gradserver.engine.effects import Effects
from gradserver.engine.records import RoundRecord
from gradserver.engine.reports import RoundCompleted
from gradserver.protocol.digest import MODULUS
from gradserver.protocol.errors import (
    JoinRefusedError,
    LimitExceededError,
    MalformedMessageError,
    UnexpectedMessageError,
)
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.limits import MAX_SHARDS, MAX_URL
from gradserver.protocol.messages import Enlist, Enlisted
from gradserver.protocol.shards import Table, comparable
from gradserver.protocol.url import parse_url


@dataclass(frozen=True, slots=True)
class DataShard:
    """One that has enlisted. ``rate`` in Gbit/s, None if nobody said. ``own``: the coordinator has started it."""

    number: int
    url: str
    rate: float | None
    own: bool = True


class Roster:
    """Who has enlisted, by connection.

    Args:
        entropy: gives text that nobody can guess; without it no shards are taken.
        rate: of the coordinator's own link, in Gbit/s; None if nobody said.
        access: whose shards are taken.
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
            raise MalformedMessageError(f"{offer.url} is no data shard's URL: it has no port")
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

    def staff(self, group: Group) -> None:
        """``group`` is to use all shards there are."""
        if self.shards and self._entropy is not None:
            stated = [self._rate, *(shard.rate for shard in self.shards.values())]
            urls = [shard.url for shard in self.shards.values()]
            table = Table(len(group.members.by_seat), comparable(stated))
            group.shards.set_up(table, tuple(self.shards), urls)
            durable, entropy = group.is_durable, self._entropy
            seats = range(group.members.world)
            group.shards.set_tokens([token_of(group, seat) if durable else entropy() for seat in seats])

    @property
    def enlisted(self) -> int:
        """How many of those that the coordinator has started have, so far."""
        return self._own

    @property
    def own(self) -> int:
        """How many of those that the coordinator has started are there."""
        return sum(shard.own for shard in self.shards.values())

    def token(self) -> str:
        """Text that nobody can guess, to show shards or to be a group's secret; empty if there is none."""
        return "" if self._entropy is None else self._entropy()

    def snapshot(self) -> list[dict[str, object]]:
        """The shards, the coordinator's own first, as plain JSON values."""
        own = DataShard(0, "", self._rate)
        return [asdict(shard) for shard in (own, *self.shards.values())]


def count_round(group: Group, source: int, report: RoundCompleted) -> RoundCompleted | None:
    """Note that shard ``source`` is done with a round; give the report of all of it, if all busy shards are done."""
    record = report.record
    group.check_round(record.round, "report")
    section = None if group.plans.plan is None else group.plans.plan.section(record.section)
    buckets = 0 if section is None else section.size
    world = max(
        group.members.world, len(record.weights) if group.sessions.secret else 0
    )  # some may be known to members only
    if len(record.weights) >= group.members.founders:
        record = _widened(record, world)  # somebody has got a seat since
    fits = (
        section is not None
        and len(record.weights) == len(record.arrivals) == world
        and len(record.results) in (0, buckets)
    )
    spoken_of = {record.last, *(seat for seat, _, _ in record.cut), *(one[0] for one in record.nonfinite)}
    if not fits or not all(0 <= seat < world for seat in spoken_of):
        raise MalformedMessageError(f"a report of a round in which others took part than are in group {group.name!r}")
    reported = group.shards.report(source, replace(report, record=record))
    if reported is None:
        return None
    world = max(len(one.record.weights) for one in reported.values())
    records = {shard: _widened(one.record, world) for shard, one in reported.items()}
    merged = _merged(group, _whole(list(records.values()), world), records)
    return replace(report, record=merged, told=all(one.told for one in reported.values()))


def _widened(record: RoundRecord, world: int) -> RoundRecord:
    """``record``, with places for as many seats as there are now."""
    more = world - len(record.weights)
    if more <= 0 or len(record.arrivals) != len(record.weights):
        return record
    return replace(
        record,
        weights=record.weights + (0.0,) * more,
        arrivals=record.arrivals + ((record.opened, record.opened),) * more,
        inputs=record.inputs + (0,) * more if record.inputs else (),
    )


def _merged(group: Group, done: RoundRecord, reported: dict[int, RoundRecord]) -> RoundRecord:
    """Of a round of an elastic group: who counted at any shard, and where. Shards cut somebody at different slices."""
    given = list(zip(*(record.weights for record in reported.values()), strict=True))
    weights = tuple(map(max, given))
    cut: Counter[tuple[int, int]] = Counter()
    for record in reported.values():
        cut.update({(seat, part): slices for seat, part, slices in record.cut})
    only_here = {seat for seat, weights in enumerate(given) if any(weights) and not all(weights)}
    for seat in {seat for seat, _ in cut} | only_here:
        for source, record in reported.items():
            if record.weights[seat] and not any(seat == other for other, _, _ in record.cut):
                shard = group.shards.connections.index(source) + 1 if source in group.shards.connections else 0
                cut.update({(seat, part): slices for part, slices in _slices_of(group, shard, done.section)})
    return replace(done, weights=weights, cut=tuple((*which, slices) for which, slices in sorted(cut.items())))


def _slices_of(group: Group, shard: int, number: int) -> Iterator[tuple[int, int]]:
    """Each bucket of a section that ``shard`` has to do with, and how many slices of it."""
    section = group.plans.plan.section(number) if group.plans.plan is not None else None
    for part in section.parts if section is not None else ():
        assert group.plans.plan is not None
        operation = group.plans.plan.buckets[part].operation
        start, stop = group.shards.table.share(ExchangeKey(Stream.BUCKET, 0, part), operation).interval(shard)
        if start < stop:
            yield part, stop - start


def _whole(parts: Sequence[RoundRecord], world: int) -> RoundRecord:
    """The record of a round of which each shard has recorded its part."""
    hashed = all(part.inputs for part in parts)
    ranks = range(world)
    return replace(
        max(parts, key=lambda part: part.completed),
        opened=min(part.opened for part in parts),
        arrivals=tuple((min(p.arrivals[r][0] for p in parts), max(p.arrivals[r][1] for p in parts)) for r in ranks),
        inputs=tuple(sum(part.inputs[rank] for part in parts) % MODULUS for rank in ranks) if hashed else (),
        results=tuple(sum(found) % MODULUS for found in zip(*(p.results for p in parts), strict=True))
        if hashed
        else (),
        nonfinite=_not_finite(parts),
    )


def _not_finite(parts: Sequence[RoundRecord]) -> tuple[tuple[int, int, int, int], ...]:
    """What was not finite at any shard: how many slices, and which was the first element."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for seat, part, slices, first in (one for record in parts for one in record.nonfinite):
        before, earlier = found.get((seat, part), (0, first))
        found[seat, part] = before + slices, min([one for one in (earlier, first) if one >= 0], default=-1)
    return tuple((*which, *what) for which, what in sorted(found.items()))
