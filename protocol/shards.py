"""The shares of data shards: how every exchange is divided among the shards of a group.

All participants compute them by themselves, from what they know alike: the shards' rates, the world size, the
operation, and for buckets the plan. Each shard has one run of consecutive slices of an exchange, or none.

- A large exchange is cut so that each shard gets as much of it as its rate allows. Elementwise operations are cut at
  elements, so that even a single slice is shared; the others between slices.
- A small one goes whole to one shard. A collective or a transfer goes to the first one, where it is two hops. A bucket
  goes to one with little load. Larger buckets are cut so that the whole round comes out even.

Results do not depend on it: contributions are combined element by element, or in units that are not cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.exchange import IN_PLACE, ExchangeKey, Layout, Operation, Stream, cut, layout_of
from gradserver.protocol.limits import KIB
from gradserver.protocol.plan import VACANT, Plan, Section
from gradserver.protocol.slicing import ALIGNMENT

SPLIT_BYTES: Final = 256 * KIB
"""Bytes below which an exchange goes to one shard: the messages would cost more than the bytes."""
SPLIT_BUCKET_BYTES: Final = (256 * KIB, 128 * KIB, 64 * KIB)
"""The same for buckets. The next one is tried while shards would have unequal work."""
EVEN: Final = 1.02
"""The work of the busiest shard over the mean, each by its rate, up to which work counts as equal."""


class Share(NamedTuple):
    """The cut of one exchange, and the shards of its slices.

    Attributes:
        layout: the slices.
        bounds: the first slice of each shard, and the number of slices.
    """

    layout: Layout
    bounds: tuple[int, ...]

    def interval(self, shard: int) -> tuple[int, int]:
        """Return the first slice of ``shard``, and the one behind its last."""
        return self.bounds[shard], self.bounds[shard + 1]

    def shard_of(self, index: int) -> int:
        """Return the shard that slice ``index`` belongs to."""
        return bisect_right(self.bounds, index) - 1

    def load(self, shard: int) -> int:
        """Return the bytes of one contribution that go to ``shard``."""
        return self.layout.run_bytes(*self.interval(shard))


class Table:
    """The shares of a group's exchanges.

    Args:
        world_size: number of participants.
        rates: of all shards, compared with one another; none at all stand for one shard.
        unit: elements of a bucket that no cut may divide, if the group's mean is decided about so many together.
        grain: size of slices; 0 for slices as large as they may be (`gradserver.protocol.slicing`).

    Attributes:
        busy_shards: number of shards that have a part of each section of the plan, by the section's number.
    """

    def __init__(self, world_size: int, rates: tuple[float, ...] = (), unit: int = 1, grain: int = 0) -> None:
        self.world_size = world_size
        self.rates = rates if len(rates) > 1 else ()
        self.grain = grain
        self.shards = max(len(rates), 1)
        self.busy_shards: Mapping[int, int] = {}
        self._unit = unit
        self._buckets: Sequence[Share] = ()

    def set_plan(self, plan: Plan) -> None:
        """Take this plan for buckets from now on. A section's shares do not depend on other sections."""
        self._buckets = self._shares(plan) if self.rates else ()
        shards = range(self.shards)
        self.busy_shards = {
            one.number: sum(self._buckets_of(plan, one, shard) > 0 for shard in shards) for one in plan.each
        }

    def _shares(self, plan: Plan) -> Sequence[Share]:
        if not plan.sections:
            return share_plan(plan, self.world_size, self.rates, self._unit, self.grain)
        nothing = whole(layout_of(VACANT.operation, self.world_size), 0, self.shards)
        buckets = [nothing] * len(plan.buckets)
        for section in plan.sections:
            buckets[section.first : section.first + section.size] = share_plan(
                plan.alone(section), self.world_size, self.rates, self._unit, self.grain
            )
        return buckets

    def share(self, key: ExchangeKey, operation: Operation) -> Share:
        """Return the share of the exchange ``key``. A bucket must be in the plan."""
        if key.stream == Stream.BUCKET:
            if self._buckets:
                return self._buckets[key.part]
            return share_of(operation, self.world_size, self.rates, self.grain, self._unit)
        return share_of(operation, self.world_size, self.rates, self.grain)

    def buckets_of(self, plan: Plan, shard: int) -> dict[int, int]:
        """Return how many buckets of each section ``shard`` has a part of, by its number; ``plan`` was set."""
        return {section.number: self._buckets_of(plan, section, shard) for section in plan.each}

    def _buckets_of(self, plan: Plan, section: Section, shard: int) -> int:
        if not self.rates:
            return sum(plan.buckets[part].numel > 0 for part in section.parts)
        shares = (self._buckets[part] for part in section.parts)
        return sum(share.bounds[shard] < share.bounds[shard + 1] for share in shares)


def comparable(stated: Sequence[float | None]) -> tuple[float, ...]:
    """Return comparable rates of those that were stated: a shard without one is as fast as the mean of the others."""
    known = [rate for rate in stated if rate is not None and rate > 0]
    mean = sum(known) / len(known) if known else 1.0
    rates = tuple(mean if rate is None else rate for rate in stated)
    return rates if any(rates) else (1.0,) * len(rates)


@lru_cache(maxsize=4096)
def share_of(operation: Operation, world_size: int, rates: tuple[float, ...], grain: int = 0, unit: int = 1) -> Share:
    """Return the share of a collective or a transfer among shards of these ``rates``."""
    layout = layout_of(operation, world_size, grain, unit)
    if not rates:
        return Share(layout, (0, layout.count))
    if layout.numel * layout.itemsize * layout.replies < SPLIT_BYTES or layout.count == 0:
        return whole(layout, 0, len(rates))
    if operation.kind in IN_PLACE:
        bounds = _round(_cumulated(rates), operation.numel, max(unit, _alignment(operation)))
        return _cut_elements(operation, bounds, grain, unit)
    return Share(layout, _round(_cumulated(rates), layout.count, 1))


def whole(layout: Layout, shard: int, shards: int) -> Share:
    """Return the share that gives all of it to one shard."""
    return Share(layout, (0,) * (shard + 1) + (layout.count,) * (shards - shard))


def share_plan(plan: Plan, world_size: int, rates: tuple[float, ...], unit: int = 1, grain: int = 0) -> list[Share]:
    """Return the share of each bucket of ``plan`` among shards of these ``rates``."""
    shares: list[Share] = []
    for split in SPLIT_BUCKET_BYTES:
        shares = _share_plan(plan, world_size, rates, split, unit, grain)
        if evenness(shares, rates) <= EVEN:
            break
    return shares


def evenness(shares: Sequence[Share], rates: tuple[float, ...]) -> float:
    """Return the work of the busiest shard over that of the mean shard, each by its rate. 1 is best."""
    loads = [sum(share.load(shard) for share in shares) for shard in range(len(rates))]
    total = sum(loads)
    times = [load / rate for load, rate in zip(loads, rates, strict=True) if rate > 0]
    return max(times) * sum(rates) / total if total else 1.0


def _share_plan(
    plan: Plan, world_size: int, rates: tuple[float, ...], split: int, unit: int, grain: int
) -> list[Share]:
    """Return shares with buckets below ``split`` bytes whole at the least loaded shard, and the others cut to fit."""
    shares: dict[int, Share] = {}
    loads = [0] * len(rates)
    fast = [shard for shard, rate in enumerate(rates) if rate > 0]
    layouts = [layout_of(bucket.operation, world_size, grain, unit) for bucket in plan.buckets]
    sizes = {part: layout.run_bytes(0, layout.count) for part, layout in enumerate(layouts)}
    for part in sorted((part for part in sizes if sizes[part] < split), key=lambda part: (-sizes[part], part)):
        least = min(fast, key=lambda shard: (loads[shard] + sizes[part]) / rates[shard])
        loads[least] += sizes[part]
        shares[part] = whole(layouts[part], least, len(rates))
    fractions = _cumulated(_lacking(loads, rates, sum(sizes.values())))
    owed = [0.0] * len(fractions)
    """Bytes that each bound lies too low, over all buckets so far, so that rounding does not add up."""
    for part, bucket in enumerate(plan.buckets):
        if part in shares:
            continue
        numel, each = bucket.numel, sizes[part] / bucket.numel
        exact = [fraction * numel + late / each for fraction, late in zip(fractions, owed, strict=True)]
        bounds = _round([place / numel for place in exact], numel, max(_alignment(bucket.operation), unit))
        owed = [(place - bound) * each for place, bound in zip(exact, bounds, strict=True)]
        shares[part] = _cut_elements(bucket.operation, bounds, grain, unit)
    return [shares[part] for part in sizes]


def _lacking(loads: Sequence[int], rates: Sequence[float], total: int) -> list[float]:
    """Return what each shard can still take of ``total`` bytes, until all have as much as their rates allow."""
    open_to_more = [shard for shard, rate in enumerate(rates) if rate > 0]
    while True:  # a shard with too much already is left out, and then others get less
        left = total - sum(loads[shard] for shard in range(len(rates)) if shard not in open_to_more)
        by_rate = sum(rates[shard] for shard in open_to_more)
        lacking = {shard: left * (rates[shard] / by_rate) - loads[shard] for shard in open_to_more}
        full = [shard for shard in open_to_more if lacking[shard] < 0]
        if not full:
            break
        open_to_more = [shard for shard in open_to_more if shard not in full]
    wanted = [lacking.get(shard, 0.0) for shard in range(len(rates))]
    return wanted if sum(wanted) > 0 else list(rates)


def _alignment(operation: Operation) -> int:
    """Return the elements of a block that must stay whole: sparse codecs choose among them."""
    return BLOCK if operation.codec.parameter else ALIGNMENT


def _cut_elements(operation: Operation, bounds: tuple[int, ...], grain: int, unit: int) -> Share:
    layout = cut(operation, bounds, 1, grain, unit)
    return Share(layout, layout.firsts)


def _cumulated(parts: Sequence[float]) -> list[float]:
    """Return the fractions at which a whole is cut into ``parts``, from 0 to 1."""
    total = sum(parts)
    return [0.0, *(min(part / total, 1.0) for part in accumulate(parts[:-1])), 1.0]


def _round(fractions: Sequence[float], count: int, unit: int) -> tuple[int, ...]:
    """Return where to cut ``count`` things at ``fractions``: at multiples of ``unit``, in order."""
    places = [min(max(int(fraction * count / unit + 0.5) * unit, 0), count) for fraction in fractions]
    return tuple(accumulate([0, *places[1:-1], count], max))
