"""Reports of data shards about one round, and the record of the round that follows from all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gradserver.engine.control.group import Group
from gradserver.engine.figures import added
from gradserver.engine.lateness import was_there
from gradserver.engine.records import Compared, RoundRecord
from gradserver.engine.reports import RoundCompleted
from gradserver.protocol.digest import MODULUS
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.exchange import ExchangeKey, Stream


def count_round(group: Group, source: int, report: RoundCompleted) -> RoundCompleted | None:
    """Note that shard ``source`` is done with a round. Return the whole round's report when all busy shards are."""
    if not group.shards:
        return report
    record = report.record
    group.check_round(record.round, "report")
    section = None if group.plans.plan is None else group.plans.plan.section(record.section)
    buckets = 0 if section is None else section.size
    world = max(
        group.members.world, len(record.weights) if group.is_durable else 0
    )  # some may be known to members only
    if len(record.weights) >= group.members.founders:
        record = _widened(record, world)  # a worker has joined since
    fits = (
        section is not None
        and len(record.weights) == len(record.arrivals) == world
        and len(record.results) in (0, buckets)
    )
    spoken_of = {record.last, *(member_id for member_id, _, _ in record.cut), *(one[0] for one in record.nonfinite)}
    spoken_of.update(member_id for one in record.compared for member_id in (one.member_id, one.other))
    if not fits or not all(0 <= member_id < world for member_id in spoken_of):
        raise MalformedMessageError(f"a report of a round in which others took part than are in group {group.name!r}")
    reported = group.shards.report(source, replace(report, record=record))
    if reported is None:
        return None
    world = max(len(one.record.weights) for one in reported.values())
    records = {shard: _widened(one.record, world) for shard, one in reported.items()}
    merged = _merged(group, _whole(list(records.values()), world), records)
    told, figures = all(one.told for one in reported.values()), added(one.figures for one in reported.values())
    return replace(report, record=merged, told=told, figures=figures)


def _widened(record: RoundRecord, world: int) -> RoundRecord:
    """``record``, with places for as many ids as there are now."""
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
    """Return which members counted at any shard, and where: shards cut a member at different slices."""
    given = list(zip(*(record.weights for record in reported.values()), strict=True))
    weights = tuple(map(max, given))
    cut: Counter[tuple[int, int]] = Counter()
    for record in reported.values():
        cut.update({(member_id, part): slices for member_id, part, slices in record.cut})
    only_here = {member_id for member_id, weights in enumerate(given) if any(weights) and not all(weights)}
    for member_id in {member_id for member_id, _ in cut} | only_here:
        for source, record in reported.items():
            if record.weights[member_id] and not any(member_id == other for other, _, _ in record.cut):
                shard = group.shards.connections.index(source) + 1 if source in group.shards.connections else 0
                cut.update({(member_id, part): slices for part, slices in _slices_of(group, shard, done.section)})
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
    ids = range(world)
    return replace(
        max(parts, key=lambda part: part.completed),
        opened=min(part.opened for part in parts),
        arrivals=_arrivals(parts, ids),
        inputs=tuple(sum(part.inputs[i] for part in parts) % MODULUS for i in ids) if hashed else (),
        results=tuple(sum(found) % MODULUS for found in zip(*(p.results for p in parts), strict=True))
        if hashed
        else (),
        nonfinite=_not_finite(parts),
        compared=_compared(parts),
    )


def _arrivals(parts: Sequence[RoundRecord], ids: Iterable[int]) -> tuple[tuple[float, float | None], ...]:
    """Return when each member began and was done. A shard that knows of no member when it was done does not tell."""
    firsts = {one: min(part.arrivals[one][0] for part in parts) for one in ids}
    telling = [part for part in parts if any(last is not None for _, last in _present(part))]
    lasts = {one: [part.arrivals[one][1] for part in telling] for one in ids}
    known = {one: [last for last in found if last is not None] for one, found in lasts.items()}
    return tuple((firsts[one], max(known[one]) if 0 < len(telling) == len(known[one]) else None) for one in ids)


def _present(part: RoundRecord) -> Iterator[tuple[float, float | None]]:
    return (part.arrivals[one] for one in range(len(part.arrivals)) if was_there(part, one))


def _compared(parts: Sequence[RoundRecord]) -> tuple[Compared, ...]:
    """Return the differences of contributions, over all shards."""
    found: dict[tuple[int, int, int], tuple[float, float]] = {}
    for one in (one for record in parts for one in record.compared):
        difference, size = found.get(one[:3], (0.0, 0.0))
        found[one[:3]] = difference + one.difference, size + one.size
    return tuple(Compared(*which, *sums) for which, sums in sorted(found.items()))


def _not_finite(parts: Sequence[RoundRecord]) -> tuple[tuple[int, int, int, int], ...]:
    """Return what was not finite at any shard: how many slices, and which was the first element."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for member_id, part, slices, first in (one for record in parts for one in record.nonfinite):
        before, earlier = found.get((member_id, part), (0, first))
        found[member_id, part] = before + slices, min([one for one in (earlier, first) if one >= 0], default=-1)
    return tuple((*which, *what) for which, what in sorted(found.items()))
