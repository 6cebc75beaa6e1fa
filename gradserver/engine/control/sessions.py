"""Sessions in control: members of a durable group that lose their connection, and come back.

A member with a broken connection may come back on a new one. The coordinator may have been started anew meanwhile, and
knows its groups from records (`gradserver.engine.control.restore`). The member shows the token of its Welcome.

    member    event                                     next      what happens
    ────────  ────────────────────────────────────────  ────────  ────────────────────────────────────────────────────
    ATTACHED  its connection broke                      AWAY      it is still needed: none goes on without it …
    AWAY      … for half of `dead_after`                gone      … and then it departs
    AWAY      … as no member is left                    AWAY      all have `reconnect` seconds
    AWAY      … and a member comes back                 AWAY      the others have `missing` seconds from then on
    AWAY      … and its process runs, but is busy       AWAY      it is waited for, for as long as the round timeout
    AWAY      Resume                                    ATTACHED  Resumed
    AWAY      Join again, of a founder without Welcome  AWAY      Welcome; it says Resume on another connection
    ATTACHED  Resume, on another connection             ATTACHED  the same; the old connection is closed
    ATTACHED  Leave, or a violation                     gone      it departs
    gone      Resume                                    gone      refused with LeftOutError, or OutlierError

`gradserver.engine.control.recovery` has what becomes of its group. In an elastic group that is not durable no member
can come back. A member with a broken connection says Resume all the same, and so hears whether the others go on.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from gradserver.engine.control import evicted, journal, learners, members, recovery, subgroups, turns
from gradserver.engine.control.group import Group
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.orders import Attach, Detach
from gradserver.protocol.beacon import beacon_id
from gradserver.protocol.errors import GradServerError, JoinRefusedError, LeftOutError, UnexpectedMessageError
from gradserver.protocol.messages import Join
from gradserver.protocol.messages.recovery import Resume, Resumed
from gradserver.protocol.offers import pack_offers

_LOOK_SECONDS = 0.25
"""Time between two looks at whether the process of a member that should be back still runs."""

# ── being away ────────────────────────────────────────────────────────────────────────────────────────


def may_return(registry: Registry, group: Group, member_id: int) -> bool:
    """Tell whether the member with ``member_id`` can come back when its connection has broken."""
    if not (group.members.by_id and group.is_durable) or group.broken is not None:
        return False
    return group.is_inside(member_id) and subgroups.may_return(registry, group, member_id)


def detach(registry: Registry, group: Group, member_id: int, reason: str, now: float, effects: Effects) -> None:
    """Keep the place of a member that has lost its connection."""
    del registry.places[group.members.by_id[member_id].connection]
    policy = group.policy
    group.members.connect(member_id, -1)
    group.blocked.forget(member_id)
    all_break = group.shards and group.recovery.is_open  # a shard was lost: all members make new connections
    group.sessions.detach(member_id, now + (policy.missing if all_break else policy.dead_after / 2))
    effects.log(f"group {group.name!r}: {group.call(member_id)} is away ({reason})")
    if group.is_deserted:
        group.sessions.detach_all(group.members.by_id, now + policy.reconnect)
        effects.log(f"group {group.name!r}: all members are away; it waits {policy.reconnect:g} s", warning=True)
    group.order(Detach(group.name, member_id), effects)


def deadline(group: Group) -> float | None:
    """Return when the first member that is away should be back."""
    return min(group.sessions.away.values(), default=None) if group.sessions.away else None


def overdue(registry: Registry, group: Group, effects: Effects) -> None:
    """Go on without members that should be back by now, and are not."""
    for member_id in _not_back(registry, group, registry.now, effects):
        reason = "its connection broke, and it did not come back"
        members.remove(registry, group, member_id, reason, registry.now, effects)


def _not_back(registry: Registry, group: Group, now: float, effects: Effects) -> list[int]:
    """Return the ids of members that should be back by now. One with a running process has the round timeout.

    A worker inside of one long call that keeps Python's lock cannot connect again, but libzmq's thread can, and says
    so by its beacon.
    """
    late: list[int] = []
    for member_id in group.sessions.overdue(now):
        since = group.sessions.busy.get(member_id, now)
        if since + group.round_timeout <= now or not _runs(registry, group, member_id):
            late.append(member_id)
            continue
        until = min(now + _LOOK_SECONDS, since + group.round_timeout)
        if group.sessions.wait_for_busy(member_id, since, until):
            member, most = group.call(member_id), f"{group.round_timeout:g} s at most"
            what = f"{member} is not back, and its process runs: it is waited for, {most}"
            effects.log(f"group {group.name!r}: {what}", warning=True)
    return late


def _runs(registry: Registry, group: Group, member_id: int) -> bool:
    return registry.runs(beacon_id(subgroups.token_of_process(registry, group, member_id)))


# ── coming back ───────────────────────────────────────────────────────────────────────────────────────


def of_founder(group: Group | None, message: Join) -> tuple[Group, int] | None:
    """Return the group and the member id of a founder that never got its Welcome; None for any other worker.

    Its connection broke as the group became complete, and the others have not gone on without it.
    """
    founder = -1 if group is None or group.broken is not None else group.sessions.founder(message.key)
    return None if group is None or not group.is_inside(founder) else (group, founder)


def check(group: Group | None, message: Resume, ended: Mapping[str, GradServerError]) -> Group:
    """Return the group that a member comes back to; ``ended`` says how groups have ended that were there before.

    Raises:
        GradServerError: what had halted the group, which has ended.
        JoinRefusedError: there is no such durable group, or the member is another one.
        LeftOutError: the others have gone on without it.
        OutlierError: it was evicted, as its gradients were far off.
        UnexpectedMessageError: it names an epoch that cannot have begun.
    """
    name = (
        group.members.identities.names[message.member_id]
        if group is not None and message.member_id < len(group.members.identities.names)
        else ""
    )
    if group is None or not group.is_durable:
        if group is not None and name and group.broken is None:
            evicted.check_return(group, message.member_id)
            raise group.left_out(message.member_id, "its connection broke, and without --state-dir no place is kept")
        if message.group in ended:
            raise ended[message.group].again()
        raise JoinRefusedError(
            f"there is no durable group {message.group[:128]!r} to resume in: call connect again to join a new one"
        )
    if name and not hmac.compare_digest(group.token(message.member_id).encode(), message.token.encode()):
        raise JoinRefusedError(
            f"this is not the token of member id {message.member_id} in group {group.name!r}: another worker has it, "
            f"or it is not the group that was joined"
        )
    if group.broken is not None:
        raise group.broken.again()
    if message.epoch > group.members.epoch and not group.recovery.is_restored:
        raise UnexpectedMessageError(
            f"a Resume of membership epoch {message.epoch} to group {group.name!r}, which is in {group.members.epoch}"
        )
    if not group.is_inside(message.member_id):
        evicted.check_return(group, message.member_id)
        rank = group.members.identities.rank(message.member_id) if name else -1
        it = f"{name!r} (was rank {rank})" if name else f"with member id {message.member_id}"
        raise LeftOutError(
            f"this worker, {it}, came back to group {group.name!r} when the others had gone on without it, in round "
            f"{group.rounds.number}. It has to join again",
            worker=name,
            rank=rank,
        )
    return group


def catch_up(registry: Registry, group: Group, effects: Effects) -> None:
    """Begin an epoch behind one that members know of and that was never written down, as when the disk was full."""
    group.members.begin_epoch(registry.next_epoch())
    count = len(group.members.by_id)
    what = f"{count} workers go on, as the coordinator that was lost had not written down which were there"
    news = group.news(what, True, effects)
    journal.members(group, what, effects)
    group.configure(effects, news)


def resume(registry: Registry, group: Group, message: Resume, connection: int, now: float, effects: Effects) -> None:
    """Attach a member that is back, on another connection, and begin a recovery if one has to.

    In a group with shards elsewhere one always has to: so it is of the same members and connections at all of them.
    """
    member_id, generation = message.member_id, registry.next_epoch()
    before = group.members.by_id[member_id].connection
    registry.places.pop(before, None)
    registry.places[connection] = group.name
    group.shards.miss(now)
    if not group.recovery.is_open:  # no result comes any more of what they wait for
        learners.disturb(group, effects)
    if before >= 0:
        effects.close(before)
        group.order(Detach(group.name, member_id), effects)
    group.members.connect(member_id, connection)
    group.sessions.attach(member_id)
    group.plans.withdraw(member_id)
    turns.departed(group, member_id, effects)
    effects.order(Attach(group.name, member_id, connection))
    if (
        group.shards.lacking
    ):  # the recovery begins when others take their places: members that are gone are known by then
        group.sessions.hurry(now + group.policy.missing)
    elif group.shards or not group.recovery.is_open:
        recovery.begin(registry, group, generation, now, effects)
    else:
        group.sessions.hurry(now + group.policy.missing)  # all of them may have been away since the recovery began
        effects.send(connection, Resumed(registry.incarnation, group.recovery.generation, group.shards.urls))
    for news in group.members.news:  # it never heard of those before it had entered, and is to hear of pending ones
        if member_id in news.member_ids and news.epoch > message.epoch and not group.configuration.is_pending(news):
            effects.send(connection, news, pack_offers(news.offers))
    if message.serves:
        group.learners.add_donor(member_id)
    group.plans.note_known(member_id, message.plan)
    count = len(group.members.by_id)
    here = count - len(group.sessions.away)
    effects.log(f"group {group.name!r}: {group.call(member_id)} is back, {here} of {count} workers are here")
