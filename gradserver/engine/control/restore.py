"""What control does when it begins where another coordinator was lost: the groups that records speak of go on.

They are durable ones, and all their members are away (`gradserver.engine.control.sessions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gradserver.engine.control import journal
from gradserver.engine.control.group import Group
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.welcome import token_of
from gradserver.engine.data_records import Claim, Data
from gradserver.engine.effects import Effects
from gradserver.engine.events import Admit, Depart, Expect, RemoteOrder, Reseat, Seat, SetPlan
from gradserver.engine.lease_table import Positions
from gradserver.engine.policy import OnNonFinite, Policy
from gradserver.engine.records import (
    Boundary,
    Closed,
    Durable,
    Entered,
    Epoch,
    Group as Founded,
    Halt,
    Handling,
    Kind,
    Plan,
    Round,
    RoundRecord,
    Spent,
    Start,
)
from gradserver.engine.seats import Seats
from gradserver.protocol.errors import ERRORS, GradServerError, WorkerLostError
from gradserver.protocol.messages import Membership
from gradserver.protocol.shards import Table


def restore(registry: Registry, records: Sequence[Kind], kept: Collection[str], now: float, effects: Effects) -> None:
    """Groups are as they were. Of those in ``kept`` what lossy codecs owe is there."""
    for record in records:
        if isinstance(record, Spent):
            registry.quotas.restore(record)
    registry.restored(max((record.epoch for record in records if isinstance(record, Epoch)), default=0))
    for group in _groups(registry, records, now, effects):
        registry.groups[group.name] = group
        group.account = registry.quotas.account(group.name)
        group.owed_nothing = group.name not in kept and group.is_lossy
        for order in reopen(registry, group):
            effects.order(order)


def _groups(registry: Registry, records: Iterable[Kind], now: float, effects: Effects) -> Iterable[Group]:
    """The durable groups that records speak of, and that have not ended."""
    past: dict[str, _Past] = {}
    for record in records:
        match record:
            case Start():
                past = {name: found for name, found in past.items() if found.secret}
            case Founded(name):
                past[name] = _Past(record)
            case Closed(name):
                past.pop(name, None)
            case _ if (name := getattr(record, "group", "")) in past:
                past[name].take(record)
    for name, found in past.items():
        policy = registry.told(name)
        if not found.secret or not found.epochs:
            continue
        if not isinstance(policy, Policy):
            what = "it is served with another number of workers now, and ends"
            effects.log(f"group {name!r} was durable: {what}", warning=True)
            continue
        group = found.group(policy, now)
        group.round_timeout = registry.round_timeout or group.timeout
        if found.entered is not None:
            _promote(registry, group, found.entered, now, effects)
        names = ", ".join(group.seats.present_names())
        what = f"waiting for {names} to come back, for {policy.reconnect:g} s"
        effects.log(f"group {name!r}: {what}; it was in round {group.rounds}, epoch {group.epoch}")
        yield group


def _promote(registry: Registry, group: Group, entered: Entered, now: float, effects: Effects) -> None:
    """Who contributed to the open round counts as a member: what it gave may be in results that others hold."""
    new = {seat: Seat(-1, name) for seat, name in entered.members if seat not in group.members}
    group.first_rounds = {
        seat: entered.round for seat, name in entered.members if seat in new or group.members[seat].name == name
    }
    if not new:
        return
    for seat, occupant in new.items():
        group.seats.admit(seat, occupant.name)
    group.world = len(group.seats.names)
    what = group.seat_in(new, entered.round, registry.next_epoch())
    group.founded = group.epoch
    group.away = dict.fromkeys(group.members, max(group.away.values(), default=now))
    journal.members(group, what, effects)
    group.news.append(group.membership(what, False))


def reopen(registry: Registry, group: Group, shard: int = 0) -> Iterable[RemoteOrder]:
    """What a data half has to know of a group that was restored, or that it is new to."""
    new = group.early
    seats = tuple(Seat(-1, "" if seat in new else name) for seat, name in enumerate(group.seats.names))
    tokens = tuple(token_of(group, seat) for seat in range(len(seats))) if shard else ()
    yield registry.opening(group, seats, tokens, shard)
    for seat, name in enumerate(group.seats.names):
        if name and seat not in group.members:
            yield Depart(group.name, seat, WorkerLostError(f"{name!r} had departed before"), group.epoch)
    if group.plan is not None:
        yield SetPlan(group.name, group.plan, group.planned)
    for seat in new:
        yield Admit(group.name, seat, Seat(-1, group.seats.names[seat]), token_of(group, seat) if shard else "")
    if new:  # collectives that the others have called before do not wait for them
        yield Expect(group.name, new, group.rounds, False)
        yield Reseat(group.name, group.epoch, group.seats.present)


class _Past:
    """What records say of one group."""

    def __init__(self, founded: Founded) -> None:
        self.founded = founded
        self.secret = ""
        self.rates: tuple[float, ...] = ()
        self.nonfinite = OnNonFinite.HALT
        self.epochs: list[Epoch] = []
        self.plan: Plan | None = None
        self.told = -1, 0
        """The last round that is over, and the epoch that is in force behind it."""
        self.done: RoundRecord | None = None
        """What was written of it."""
        self.halt: Halt | None = None
        self.entered: Entered | None = None
        """Who contributed to the open round as his first one."""
        self.positions = Positions()

    def take(self, record: Kind) -> None:
        """What was written next."""
        match record:
            case Durable(_, secret, rates):
                self.secret, self.rates = secret, rates
            case Handling(_, nonfinite):
                self.nonfinite = nonfinite
            case Epoch():
                self.epochs.append(record)
                self.positions.keep_only(seat for seat, _ in record.members)
            case Entered():
                self.entered = record
            case Data() | Claim():
                self.positions.restore(record)
            case Plan():
                self.plan = record
            case Round(_, epoch, done, used_up):
                self.told, self.done = (done.round, epoch), done.without_digests()
                for committed in used_up:
                    self.positions.restore(committed)
            case Boundary(_, number, epoch):
                self.told = number, epoch
            case Halt():
                self.halt = record

    def group(self, policy: Policy, now: float) -> Group:
        """The group as it was, with everybody away."""
        latest = self.epochs[-1]
        names = {seat: name for epoch in self.epochs for seat, name in epoch.members}
        world = max(names) + 1
        group = Group(self.founded.group, world, policy, self.nonfinite)
        group.seats = Seats(names.get(seat, "") for seat in range(world))  # some were nobody's yet
        group.table, group.founders = Table(len(latest.members), self.rates), world
        further = max(len(self.rates) - 1, 0)
        group.shards, group.urls, group.lacking = (-1,) * further, ("",) * further, set(range(further))
        group.recovering = bool(further)
        group.restored = group.uncertain = True
        group.members = {seat: Seat(-1, name) for seat, name in latest.members}
        for seat in names:
            if seat not in group.members:
                group.seats.depart(seat)
        group.away = dict.fromkeys(group.members, now + policy.reconnect)
        group.epoch = group.founded = latest.epoch
        group.timeout, group.secret, group.told = self.founded.timeout, self.secret, self.told
        group.positions = self.positions
        group.rounds = self.told[0] + 1
        if self.plan is not None:
            group.plan, group.planned = self.plan.plan, self.plan.round
            group.rounds = max(group.rounds, group.planned)
            group.table.set_plan(group.plan)
            group.busy_shards = group.table.busy(group.plan)
        if self.entered is not None and self.entered.round < group.rounds:
            self.entered = None  # that round is over
        for epoch in self.epochs:
            seats, present = zip(*sorted(epoch.members), strict=True)
            group.news.append(Membership(epoch.epoch, seats, present, epoch.reason, True, *self._early(epoch)))
        if self.done is not None:
            group.ledger.append(self.done)
        if self.halt is not None:
            group.broken = ERRORS.get(self.halt.error, GradServerError)(self.halt.reason)
        return group

    def _early(self, epoch: Epoch) -> tuple[tuple[int, ...], int]:
        """Who was a member in ``epoch`` before the round was over that he came with, and which one that was."""
        if self.entered is None:
            return (), 0
        early = sorted({*epoch.members}.intersection(self.entered.members))
        return tuple(seat for seat, _ in early), self.entered.round
