"""Sub-groups until they are complete: members of a group that average among themselves, too.

A sub-group is a group like any other. It has rounds, plans, epochs, credit and a ledger of its own. Each of its members
has a connection for it, a *branch*, which the member's first connection carries. So the death of a process ends all of
them. Only its beginning is special: members of one parent ask for it (`Split`), and no other worker can come to it. It
is durable if its parent is. Its members then resume in it, each for itself, on a branch of the connection on which they
have resumed in the parent. It uses the data shards of the parent, also those that take a lost one's place.

    state    event                                        next     what happens
    ───────  ───────────────────────────────────────────  ───────  ─────────────────────────────────────────────────────
    (none)   the first Split of these members             FORMING  others are waited for
    FORMING  Split of another one of them                 FORMING  it is an applicant, too
    FORMING  … and it is the last one                     ACTIVE   Welcome to all
    FORMING  a Split that could never be complete         FORMING  CollectiveMismatchError to all in the circle
    FORMING  a named member departs; the parent goes on   FORMING  the others do not wait for it
    FORMING  a named member departs; the parent is over   (none)   the error that names it, to all applicants
    FORMING  an applicant's patience ends                 (none)   DeadlineError that names the missing ones, to all
    FORMING  the last applicant leaves                    (none)
    FORMING  an applicant's connection breaks             FORMING  it asks again on the next one, if the group lasts
    ACTIVE   Split again, of a member without its Welcome ACTIVE   Welcome; it says Resume on another branch
    ACTIVE   anything                                              as in any group

Members that ask for the same members, in any order, mean the same sub-group. A member asks for one at a time and waits.
So if it waits for another member, and that one waits in another sub-group for the first, neither comes to an end.
"""

from __future__ import annotations

from dataclasses import replace

from gradserver.engine.control.group import Group, Origin
from gradserver.engine.control.group.planes import Planes
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.policy import SYNC, OnNonFinite, Policy
from gradserver.protocol.errors import (
    CollectiveMismatchError,
    DeadlineError,
    LimitExceededError,
    PeerError,
    UnexpectedMessageError,
    WorkerLostError,
)
from gradserver.protocol.limits import MAX_NAME_BYTES, MAX_SUBGROUPS
from gradserver.protocol.messages import Join, Split
from gradserver.protocol.offers import UNTOLD
from gradserver.protocol.planes import AUTO

_NUMBER_BYTES = 12
"""Bytes behind the parent's name in that of a sub-group, at most."""


def group_for(registry: Registry, base: int, message: Split, effects: Effects) -> tuple[Group, Join]:
    """Return the sub-group that the owner of ``base`` asks for, and its application. Make the group if there is none.

    Raises:
        UnexpectedMessageError: the sender is no member of the parent, or does not name itself.
        CollectiveMismatchError: another member waits in another sub-group for the sender.
        PeerError: a member that is named has departed, and the parent needs all its members.
        LimitExceededError: there are too many.
        QuotaExceededError: the parent has used up its journal quota.
    """
    parent = registry.groups.get(message.group)
    caller = -1 if parent is None else parent.member_id_of(base)
    if parent is None or caller not in parent.members.by_id:
        raise UnexpectedMessageError(f"a Split of group {message.group!r} from a worker that is not a member of it")
    ids, known = message.member_ids, parent.members.identities.names
    if caller not in ids or list(ids) != sorted(set(ids)) or ids[-1] >= len(known):
        raise UnexpectedMessageError(
            f"a Split of the members {ids}: expected ids in order, with the sender's, {caller}"
        )
    group = next((one for one in registry.forming.values() if _is_of(one, parent, message)), None)
    group = group or _make(registry, parent, message)
    _check_order(registry, parent, group, caller, effects)
    offer = UNTOLD if message.leaders else parent.planes.offer_of(caller)  # leaders go by the coordinator
    join = Join(group.name, known[caller], ids.index(caller), 0, message.timeout, offer)
    if any(applicant.join.rank == join.rank for applicant in group.applicants.waiting):
        raise UnexpectedMessageError("a Split of a member that waits in the same sub-group already")
    return group, join


def begun_before(registry: Registry, base: int, message: Split) -> tuple[Group, int] | None:
    """Return the sub-group that has begun since the sender first asked for it, and the sender's id there.

    Its connection broke before it had the Welcome. It asks for one sub-group at a time. So a sub-group of these members
    is the one if its first epoch is later than that of each Welcome which the sender has got. None if there is none.
    """
    parent = registry.groups.get(message.group)
    if parent is None or not message.again:
        return None
    caller = parent.member_id_of(base)
    for group in registry.groups.values():
        origin = group.origin
        if origin is not None and group.is_durable and origin.began > message.after and _is_of(group, parent, message):
            return (group, origin.member_ids.index(caller)) if caller in origin.member_ids else None
    return None


def _is_of(group: Group, parent: Group, message: Split) -> bool:
    """Tell whether ``group`` is the sub-group of ``parent`` that the message asks for."""
    origin = group.origin
    return origin is not None and origin.parent == parent.name and origin.asked == (message.member_ids, message.leaders)


def _make(registry: Registry, parent: Group, message: Split) -> Group:
    """Make a sub-group. Members of the parent that departed since the sender's epoch are not waited for."""
    if sum(group.origin is not None for group in registry.groups.values()) >= MAX_SUBGROUPS:
        raise LimitExceededError(f"this coordinator already serves {MAX_SUBGROUPS} sub-groups: close some")
    parent.account.check("a sub-group")
    ids, names, size = message.member_ids, parent.members.identities.names, len(message.member_ids)
    policy = policy_of(parent, size)
    called, timeouts = tuple(names[one] for one in ids), (parent.timeout, parent.round_timeout)
    origin = Origin(parent.name, ids, called, *timeouts, leaders=message.leaders)
    planes = Planes(AUTO if message.leaders else parent.planes.demanded, parent.planes.digests)
    nonfinite = OnNonFinite.PROPAGATE if message.leaders else parent.nonfinite
    name = _free_name(registry, parent)
    group = Group(name, policy, parent.account, nonfinite, planes=planes, origin=origin)
    later = [set(news.member_ids) for news in parent.members.news if news.epoch > message.epoch]
    for place, member_id in enumerate(ids):
        if member_id not in parent.members.by_id or any(member_id not in there for there in later):
            if parent.policy.needs_all:
                raise _gone(parent, group, place)
            origin.do_without(place)
    return group


def policy_of(parent: Group, size: int) -> Policy:
    """Return the policy of a sub-group of so many members: it waits for all of them, and goes on as its parent does."""
    least = size if parent.policy.needs_all else 1
    return replace(parent.policy, minimum=least, maximum=size, lateness=None, rejoin=0.0, mode=SYNC)


def is_lasting(parent: Group | None, origin: Origin) -> bool:
    """Tell whether a sub-group of ``parent`` outlives the coordinator. One of leaders is made anew in each epoch."""
    return parent is not None and parent.is_durable and not origin.leaders


def may_return(registry: Registry, group: Group, member_id: int) -> bool:
    """Tell whether a member that lost its connection is still in the parent; true in a group that has none."""
    if group.origin is None:
        return True
    parent = registry.parent_of(group)
    return parent is not None and parent.is_inside(group.origin.member_ids[member_id])


def token_of_process(registry: Registry, group: Group, member_id: int) -> str:
    """Return the token by which the process of a member shows that it runs: in a sub-group, that of the parent."""
    parent = registry.parent_of(group)
    if group.origin is None or parent is None:
        return group.token(member_id)
    return parent.token(group.origin.member_ids[member_id])


def _free_name(registry: Registry, parent: Group) -> str:
    base = parent.name.encode(errors="replace")[: MAX_NAME_BYTES - _NUMBER_BYTES].decode(errors="ignore")
    while (name := f"{base}/{registry.next_subgroup()}") in registry.groups:
        pass
    return name


def awaited(registry: Registry, parent: Group) -> set[int]:
    """Return connections of members of ``parent`` that others wait for in a sub-group."""
    missing = {
        member_id
        for group in registry.forming.values()
        if group.origin is not None and group.origin.parent == parent.name
        for place, member_id in enumerate(group.origin.member_ids)
        if all(applicant.join.rank != place for applicant in group.applicants.waiting)
    }
    return {parent.members.by_id[one].connection for one in missing if one in parent.members.by_id}


# ── circles ───────────────────────────────────────────────────────────────────────────────────────────


def _check_order(registry: Registry, parent: Group, group: Group, caller: int, effects: Effects) -> None:
    """Raise CollectiveMismatchError if the caller would wait in ``group`` for a member that waits for the caller.

    All that wait in the circle hear of it.
    """
    waits = {
        one.origin.member_ids[applicant.join.rank]: one
        for one in registry.forming.values()
        if one.origin is not None and one.origin.parent == parent.name
        for applicant in one.applicants.waiting
    }
    if caller in waits:
        raise UnexpectedMessageError("a Split of a member that waits in another sub-group")
    assert group.origin is not None
    wanted = [one for one in group.origin.member_ids if one != caller and waits.get(one) is not group]
    circle = _path_to(caller, wanted, waits, [])
    if circle is None:
        return
    other, there = circle[0], waits[circle[0]]
    assert there.origin is not None
    error = CollectiveMismatchError(
        f"{parent.call(caller)} calls subgroup with {group.origin.called()}, while {parent.call(other)} waits in "
        f"subgroup with {there.origin.called()}: neither can be complete. All members must name the same ranks, and "
        f"members that have several sub-groups in common must make them in the same order"
    )
    stuck = {id(one): one for one in (group, *(waits[member_id] for member_id in circle))}
    for one in stuck.values():
        for applicant in one.applicants.waiting:
            effects.evict(applicant.connection, error)
    raise error


def _path_to(caller: int, wanted: list[int], waits: dict[int, Group], seen: list[int]) -> list[int] | None:
    """Return members, each of which waits for the next, from one of ``wanted`` to one that waits for the caller."""
    for member_id in wanted:
        group = waits.get(member_id)
        if group is None or group.origin is None or member_id in seen:
            continue
        seen.append(member_id)
        missing = [one for one in group.origin.member_ids if waits.get(one) is not group]
        if caller in missing:
            return [member_id]
        if (path := _path_to(caller, missing, waits, seen)) is not None:
            return [member_id, *path]
    return None


# ── members of the parent that depart ─────────────────────────────────────────────────────────────────


def gone(registry: Registry, group: Group) -> list[int]:
    """Return places of members that a forming sub-group waits for, and that are in its parent no more."""
    origin = group.origin
    if origin is None:
        return []
    parent = registry.groups.get(origin.parent)
    there = {} if parent is None else parent.members.by_id
    return [
        place
        for place, member_id in enumerate(origin.member_ids)
        if member_id not in there and place not in origin.absent
    ]


def go_on_without(registry: Registry, group: Group, effects: Effects) -> None:
    """Wait for the others alone, or end a sub-group that needs all its members."""
    origin, places = group.origin, gone(registry, group)
    assert origin is not None
    error = _gone(registry.groups.get(origin.parent), group, places[0])
    needs_all = group.policy.needs_all and len(origin.member_ids) > 1
    for place in places:
        origin.do_without(place)
    for applicant in group.applicants.waiting:
        if needs_all or applicant.join.rank in places:
            effects.evict(applicant.connection, error)


def _gone(parent: Group | None, group: Group, place: int) -> PeerError:
    """Return the error of a sub-group that needs a member which has departed from the parent."""
    assert group.origin is not None
    name, said = group.origin.names[place], None if parent is None else parent.broken
    what = f"the sub-group of {group.origin.called()} cannot begin"
    if isinstance(said, PeerError) and said.fields.get("worker") == name:
        return type(said)(f"{what}: {said.message}", **said.fields)
    rank = place if parent is None else parent.members.identities.rank(group.origin.member_ids[place])
    return WorkerLostError(f"{what}: {name!r} is in group {group.origin.parent!r} no more", worker=name, rank=rank)


def overdue(group: Group, seconds: float) -> DeadlineError:
    """Return the error of a sub-group of which an applicant has waited for ``seconds``."""
    origin = group.origin
    assert origin is not None
    here = {applicant.join.rank for applicant in group.applicants.waiting}
    missing = [place for place in range(len(origin.member_ids)) if place not in here and place not in origin.absent]
    return DeadlineError(
        f"the sub-group of {origin.called()} is not complete after {seconds:g} s: "
        f"{origin.called(missing)} did not call subgroup with the same ranks",
        missing=tuple(origin.names[place] for place in missing),
    )
