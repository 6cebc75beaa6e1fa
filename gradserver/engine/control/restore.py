"""Restart where another coordinator was lost: the groups that records speak of go on.

They are durable ones, and all their members are away (`gradserver.engine.control.sessions`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from gradserver.engine.control import journal
from gradserver.engine.control.group import Group, Origin
from gradserver.engine.control.group.planes import Planes
from gradserver.engine.control.planes import Choice
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.subgroups import policy_of
from gradserver.engine.declared import Kind
from gradserver.engine.effects import Effects
from gradserver.engine.journal_state import Dated, GroupState, JournalState, error_of, keep_latest, over
from gradserver.engine.order_fields import Departure, Member
from gradserver.engine.orders import RemoteOrder, SetPlan
from gradserver.engine.policy import SYNC, Hashes, Lateness, Mode, OnNonFinite, OnOutlier, Policy, in_mode, mode_of
from gradserver.engine.records import (
    Begun,
    Boundary,
    Commits,
    Cut,
    Durable,
    Entered,
    Epoch,
    Group as Founded,
    Halt,
    Handling,
    Moded,
    Plan,
    Round,
    Spent,
    Stragglers,
    Subgroup,
)
from gradserver.protocol.errors import WorkerLostError
from gradserver.protocol.limits import PROBE_GROUP, PROBE_SECONDS
from gradserver.protocol.means import PLAIN
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
        group.note_state()
        if group.name not in kept and group.plans.is_lossy:
            group.recovery.lose_residuals()
        reopen(registry, group, effects.order)


def _groups(registry: Registry, records: Iterable[Kind], now: float, effects: Effects) -> Iterable[Group]:
    """Give the durable groups that records speak of, and that have not ended, as they were."""
    state = JournalState()
    for record in records:
        state.apply(Dated(now, record))
    registry.ended.update((name, ended.error) for name, ended in state.ended.items())
    for name, found in state.groups.items():
        if not found.is_durable or not found.epochs:
            continue
        made, parent = found.latest(Subgroup), None
        if made is not None and (parent := registry.groups.get(made.parent)) is None:
            effects.log(f"group {name!r} ends: {made.parent!r}, which it is a sub-group of, has ended", warning=True)
            _ends(registry, name, found, f"{made.parent!r} has ended")
            continue
        policy = _policy(found, registry.told(name)) if parent is None else _policy_in(parent, found)
        here = _latest(found)
        if policy is None or (policy.needs_all and policy.minimum != len(here.members)):
            what = _why_not(found, here, registry.told(name), policy)
            effects.log(f"group {name!r} ends: {what}", warning=True)
            _ends(registry, name, found, what)
            continue
        group = _group(registry, name, found, policy, now, parent)
        if (entered := _entered(group, found)) is not None:
            _promote(registry, group, entered, now, effects)
        if not group.begun:  # the coordinator was lost before it had written that the group ends
            _ends(registry, name, found, "its last worker had gone")
            effects.log(f"group {name!r} ends: its last worker had gone")
            continue
        names = ", ".join(map(repr, group.members.identities.present_names()))
        what = f"waiting for {names} to come back, for {policy.reconnect:g} s"
        where = f"round {group.rounds.number}, membership epoch {group.members.epoch}"
        effects.log(f"group {name!r}: {what}; it was in {where}")
        yield group


def _ends(registry: Registry, name: str, found: GroupState, reason: str) -> None:
    """Note what members of a group are told that come back: what had halted it, or else why it does not go on."""
    halt = found.latest(Halt)
    keep_latest(registry.ended, name, over(name, reason) if halt is None else error_of(halt))


def _latest(found: GroupState) -> Epoch:
    """Return the membership in force."""
    *_, latest = (dated.record for dated in found.epochs.values())
    assert isinstance(latest, Epoch)
    return latest


def _why_not(found: GroupState, here: Epoch, told: Policy, policy: Policy | None) -> str:
    """Say why a group does not go on: it lacks members that it needs, or the coordinator is ``told`` another size."""
    founded = found.latest(Founded)
    if policy is not None and founded is not None and founded.world == policy.minimum:
        return f"{here.reason}, and all {policy.minimum} workers are needed"
    return f"--workers is {told} now, and must be what it was: the group had {len(here.members)} workers"


def _policy(found: GroupState, told: Policy | None) -> Policy | None:
    """Give the policy that the group goes on with; None if it cannot go on with what the coordinator was ``told``.

    Nothing is told of a group if its workers give its size. Then it is that of its first membership.
    """
    founded = found.latest(Founded)
    policy = (told or Policy()).sized(founded.world) if founded is not None else None
    if policy is not None:
        mode, handling = _mode(found.latest(Moded)), found.latest(Handling)
        mean = PLAIN if handling is None else handling.mean
        outliers = OnOutlier.REPORT if handling is None else handling.outliers
        lateness = _lateness(found.latest(Stragglers), mode, policy)
        policy = replace(policy, lateness=lateness, mode=mode, mean=mean, outliers=outliers)
    return policy


def _policy_in(parent: Group, found: GroupState) -> Policy | None:
    """Give the policy that a sub-group of ``parent`` goes on with."""
    made = found.latest(Subgroup)
    assert made is not None
    return _policy(found, policy_of(parent, len(made.member_ids)))


def _mode(began: Moded | None) -> Mode:
    """Give the mode that the group goes on with: as it ``began``, whatever this coordinator was told."""
    if began is None:
        return SYNC
    return mode_of(began.mode, None if began.staleness < 0 else began.staleness, began.damping)


def _lateness(began: Stragglers | None, mode: Mode, policy: Policy) -> Lateness | None:
    """Give the rule about late members that the group goes on with: as it ``began``. Told of none, it waits for all.

    Where members request rounds, it is the one that this coordinator was told, or else that of the mode.
    """
    if mode.grants:
        return policy.lateness if policy.mode.grants else in_mode(mode)[1]
    if began is None or not policy.backlog or policy.mode.grants:
        return None
    return replace(policy.lateness or Lateness(percent=100.0), keeps=began.keeps)


def _promote(registry: Registry, group: Group, entered: Entered, now: float, effects: Effects) -> None:
    """Make members of learners that contributed to the open round: results that others hold may have that."""
    new = {member_id: Member(-1, name) for member_id, name in entered.members if member_id not in group.members.by_id}
    early = [
        member_id
        for member_id, name in entered.members
        if member_id in new or group.members.by_id[member_id].name == name
    ]
    group.members.entered_in(entered.round, early)
    if not new:
        return
    for member_id, occupant in new.items():
        group.members.admit(member_id, occupant.name)
    epoch = registry.next_epoch()
    group.members.begin_epoch(epoch)  # others hear of this one at once: what was called before has failed
    what = group.members.promote(new, entered.round, epoch)
    group.members.void_before(epoch)
    group.sessions.detach_all(
        group.members.by_id, max(group.sessions.away.values(), default=now + group.policy.reconnect)
    )
    group.choose_plane()
    journal.members(group, what, effects)
    group.members.recall(group.membership(what, False))


def reopen(registry: Registry, group: Group, order: Callable[[RemoteOrder], None], shard: int = 0) -> None:
    """Order what a data half has to know of a group that was restored, or that it is new to."""
    names, early = group.members.identities.names, group.early
    founders = tuple(Member(-1, "" if member_id in early else name) for member_id, name in enumerate(names))
    tokens = tuple(group.token(member_id) for member_id in range(len(founders))) if shard else ()
    order(registry.opening(group, founders, tokens, shard))
    departed = tuple(
        Departure(member_id, WorkerLostError(f"{name!r} had departed before"))
        for member_id, name in enumerate(names)
        if name and member_id not in group.members.by_id
    )
    others = tuple(member_id for member_id in group.members.by_id if member_id not in early)
    if early and others:  # what these call before the others' first round is of the membership without them
        order(replace(group.configured(departed), epoch=group.members.epoch_before, members=others))
        departed = ()
    order(group.configured(departed))
    if group.plans.plan is not None:
        order(SetPlan(group.name, group.plans.plan, group.plans.planned))


def _group(registry: Registry, name: str, found: GroupState, policy: Policy, now: float, parent: Group | None) -> Group:
    """Make the group as it was, with all members away. It may be a sub-group of ``parent``."""
    epochs = [dated.record for dated in found.epochs.values() if isinstance(dated.record, Epoch)]
    founded, durable, latest = found.latest(Founded), found.latest(Durable), epochs[-1]
    assert founded is not None
    assert durable is not None
    handling = found.latest(Handling)
    names = {**found.names, **{member_id: name for epoch in epochs for member_id, name in epoch.members}}
    nonfinite = OnNonFinite.HALT if handling is None else handling.nonfinite
    account, expires = registry.quotas.account(name), now + PROBE_SECONDS if name == PROBE_GROUP else None
    group = Group(
        name,
        policy,
        account,
        nonfinite,
        expires=expires,
        planes=Planes(policy.plane or registry.plane, registry.hashes is Hashes.ALL),
    )
    if parent is not None and (made := found.latest(Subgroup)) is not None:
        called = tuple(names.get(place, "") for place in range(len(made.member_ids)))
        timeouts = parent.timeout, parent.round_timeout
        origin = Origin(parent.name, made.member_ids, called, *timeouts, began=_began(found, epochs))
        group = Group(
            name,
            policy,
            parent.account,
            nonfinite,
            planes=Planes(parent.planes.demanded, parent.planes.digests),
            origin=origin,
        )
    group.members.restore(names, dict(latest.members), latest.epoch)
    _restore_planes(group, found, latest.epoch)
    table = Table(len(latest.members), durable.rates, policy.mean.unit, durable.grain)
    group.shards.restore(table, max(len(durable.rates) - 1, 0), durable.credit or registry.credit)
    group.recovery.restore(lacks_shards=bool(group.shards))
    group.sessions.open(durable.secret, durable.keys)
    group.sessions.detach_all(group.members.by_id, now + policy.reconnect)
    waits = policy.round_timeout or registry.round_timeout
    group.set_timeouts(founded.timeout, waits if parent is None else parent.round_timeout)
    _restore_rounds(group, found)
    group.leases.restore(found.positions, group.rounds.number)
    group.watch.restore(found.outliers, found.evicted, now)
    _tell_again(group, found, epochs)
    _close_again(group, found)
    return group


def _began(found: GroupState, epochs: Sequence[Epoch]) -> int:
    """Return the first epoch of a sub-group; 0 if rounds show that all members have had it."""
    return epochs[0].epoch if found.latest(Round) is None and found.latest(Boundary) is None else 0


def _restore_planes(group: Group, found: GroupState, epoch: int) -> None:
    """Go on with what members offer, the plane of an ``epoch``, and whether modules have commits."""
    group.planes.restore(found.offers, _choice(found, epoch), found.latest(Commits) is not None)


def _restore_rounds(group: Group, found: GroupState) -> None:
    """Go on with the plan and the rounds that are written down."""
    plan, done = found.latest(Plan), found.latest(Round)
    if plan is not None:
        group.plans.restore(plan.plan, plan.round)
        group.shards.set_plan(plan.plan)
    group.rounds.restore(found.ends, group.plans.planned, None if done is None else done.record)


def _tell_again(group: Group, found: GroupState, epochs: Iterable[Epoch]) -> None:
    """Note what members may not have heard of: memberships, and why the group is broken."""
    entered = _entered(group, found)
    for epoch in epochs:
        present = dict(sorted(epoch.members))  # none, if the last one has left the group to a learner
        early = _early(epoch, entered if epoch.epoch >= found.ends.told[1] else None)  # not of earlier rounds
        news = Membership(epoch.epoch, (*present,), (*present.values(),), epoch.reason, True, *early)
        choice = _choice(found, epoch.epoch)
        offers = group.planes.offers_of(present)
        group.members.recall(replace(news, plane=choice.plane, plane_reason=choice.reason, offers=offers))
    if (halt := found.latest(Halt)) is not None:
        group.be_broken(error_of(halt))


def _choice(found: GroupState, epoch: int) -> Choice:
    """Give the plane of an epoch. An earlier version wrote none."""
    chosen = found.chosen(epoch)
    return Choice() if chosen is None else Choice(chosen.plane, chosen.reason, chosen.demanded)


def _close_again(group: Group, found: GroupState) -> None:
    """Note which rounds were closed for late members: that holds, and is told again when the group has recovered."""
    begun: dict[int, dict[int, int]] = {}
    sections: dict[int, int] = {}
    for cut in (dated.record for dated in found.cuts):
        if isinstance(cut, Begun):
            group.rounds.close_without(cut.round, cut.others)
            begun[cut.round], sections[cut.round] = dict(cut.cohort), cut.section
        elif isinstance(cut, Cut):
            group.rounds.close_without(cut.round, cut.member_ids)
    group.requests.restore(begun, sections)


def _entered(group: Group, found: GroupState) -> Entered | None:
    """Give the record of those that contribute to the open round as their first one."""
    entered = found.latest(Entered)
    return None if entered is None or entered.round < group.rounds.number else entered  # else that round is over


def _early(epoch: Epoch, entered: Entered | None) -> tuple[tuple[int, ...], int]:
    """Give the members of ``epoch`` that were so before their first round was over, and which round that was."""
    if entered is None:
        return (), 0
    early = sorted({*epoch.members}.intersection(entered.members))
    return tuple(member_id for member_id, _ in early), entered.round
