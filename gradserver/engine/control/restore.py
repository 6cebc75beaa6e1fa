"""What control does when it begins where another coordinator was lost: the groups that records speak of go on.

They are durable ones, and all their members are away (`gradserver.engine.control.sessions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from gradserver.engine.control import journal
from gradserver.engine.control.group import Group
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.welcome import token_of
from gradserver.engine.declared import Kind
from gradserver.engine.effects import Effects
from gradserver.engine.journal_state import Dated, GroupState, JournalState
from gradserver.engine.order_fields import Seat
from gradserver.engine.orders import Admit, Depart, Expect, RemoteOrder, Reseat, SetPlan
from gradserver.engine.policy import OnNonFinite, Policy
from gradserver.engine.records import (
    Cut,
    Durable,
    Entered,
    Epoch,
    Group as Founded,
    Halt,
    Handling,
    Plan,
    Round,
    Spent,
    Stragglers,
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
        group.state = group.present_state()
        group.owed_nothing = group.name not in kept and group.is_lossy
        for order in reopen(registry, group):
            effects.order(order)


def _groups(registry: Registry, records: Iterable[Kind], now: float, effects: Effects) -> Iterable[Group]:
    """Give the durable groups that records speak of, and that have not ended, as they were."""
    state = JournalState()
    for record in records:
        state.apply(Dated(now, record))
    for name, found in state.groups.items():
        if not found.is_durable or not found.epochs:
            continue
        policy = _policy(found, registry.told(name))
        if policy is None:
            what = f"--workers is {registry.told(name)} now, which is not what it began with"
            effects.log(f"group {name!r} ends: {what}", warning=True)
            continue
        group = _group(name, found, policy, now)
        group.round_timeout = registry.round_timeout or group.timeout
        if (entered := _entered(group, found)) is not None:
            _promote(registry, group, entered, now, effects)
        names = ", ".join(group.seats.present_names())
        what = f"waiting for {names} to come back, for {policy.reconnect:g} s"
        effects.log(f"group {name!r}: {what}; it was in round {group.rounds}, epoch {group.epoch}")
        yield group


def _policy(found: GroupState, told: Policy | None) -> Policy | None:
    """Give the policy that the group goes on with; None if it cannot go on with what the coordinator was ``told``.

    Nothing is told of a group if its workers give its size. Then it is that of its first membership.
    """
    founded = found.latest(Founded)
    policy = told or (Policy.of(founded.world) if founded is not None else None)
    if policy is not None and policy.lateness is not None:
        began = found.latest(Stragglers)
        lateness = None if began is None else replace(policy.lateness, keeps=began.keeps)
        policy = replace(policy, lateness=lateness)  # its members know no other way
    if policy is None or not policy.needs_all:
        return policy
    *_, latest = (dated.record for dated in found.epochs.values())
    return policy if isinstance(latest, Epoch) and len(latest.members) == policy.minimum else None


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
    if shard and group.epoch != group.founded:  # it opens the group with the generation for an epoch
        yield Reseat(group.name, group.epoch, group.seats.present)
    if group.plan is not None:
        yield SetPlan(group.name, group.plan, group.planned)
    for seat in new:
        yield Admit(group.name, seat, Seat(-1, group.seats.names[seat]), token_of(group, seat) if shard else "")
    if new:  # collectives that the others have called before do not wait for them
        yield Expect(group.name, new, group.rounds, False)
        yield Reseat(group.name, group.epoch, group.seats.present)


def _group(name: str, found: GroupState, policy: Policy, now: float) -> Group:
    """Make the group as it was, with everybody away."""
    epochs = [dated.record for dated in found.epochs.values() if isinstance(dated.record, Epoch)]
    founded, durable, latest = found.latest(Founded), found.latest(Durable), epochs[-1]
    assert founded is not None
    assert durable is not None
    handling = found.latest(Handling)
    names = {seat: name for epoch in epochs for seat, name in epoch.members}
    world = max(names) + 1
    group = Group(name, world, policy, OnNonFinite.HALT if handling is None else handling.nonfinite)
    group.seats = Seats(names.get(seat, "") for seat in range(world))  # some were nobody's yet
    group.table, group.founders = Table(len(latest.members), durable.rates), world
    further = max(len(durable.rates) - 1, 0)
    group.shards, group.urls, group.lacking = (-1,) * further, ("",) * further, set(range(further))
    group.recovering = bool(further)
    group.restored = group.uncertain = True
    group.members = {seat: Seat(-1, name) for seat, name in latest.members}
    for seat in names:
        if seat not in group.members:
            group.seats.depart(seat)
    group.away = dict.fromkeys(group.members, now + policy.reconnect)
    group.epoch = group.founded = latest.epoch
    group.timeout, group.secret, group.told = founded.timeout, durable.secret, found.told
    group.positions = found.positions
    group.rounds = group.told[0] + 1
    if (plan := found.latest(Plan)) is not None:
        group.plan, group.planned = plan.plan, plan.round
        group.rounds = max(group.rounds, group.planned)
        group.table.set_plan(group.plan)
        group.busy_shards = group.table.busy(group.plan)
    _close_again(group, found)
    _tell_again(group, found, epochs)
    return group


def _close_again(group: Group, found: GroupState) -> None:
    """Note which rounds were closed for late members: that holds, and is told again when the group has recovered."""
    for cut in (dated.record for dated in found.cuts):
        if isinstance(cut, Cut):
            group.late.setdefault(cut.round, set()).update(cut.seats)
            for seat in cut.seats:
                group.positions.not_counted(seat, cut.round, group.late_are == "keep")


def _tell_again(group: Group, found: GroupState, epochs: Iterable[Epoch]) -> None:
    """Note what members may not have heard of: memberships, the last round, and why the group is broken."""
    entered = _entered(group, found)
    for epoch in epochs:
        seats, present = zip(*sorted(epoch.members), strict=True)
        group.news.append(Membership(epoch.epoch, seats, present, epoch.reason, True, *_early(epoch, entered)))
    if (done := found.latest(Round)) is not None:
        group.ledger.append(done.record.without_digests())
    if (halt := found.latest(Halt)) is not None:
        group.broken = ERRORS.get(halt.error, GradServerError)(halt.reason)


def _entered(group: Group, found: GroupState) -> Entered | None:
    """Give the record of those that contribute to the open round as their first one."""
    entered = found.latest(Entered)
    return None if entered is None or entered.round < group.rounds else entered  # else that round is over


def _early(epoch: Epoch, entered: Entered | None) -> tuple[tuple[int, ...], int]:
    """Give the members of ``epoch`` that were so before their first round was over, and which round that was."""
    if entered is None:
        return (), 0
    early = sorted({*epoch.members}.intersection(entered.members))
    return tuple(seat for seat, _ in early), entered.round
