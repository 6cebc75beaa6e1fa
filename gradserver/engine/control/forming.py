"""Groups that form, and their applicants: the first rows of control's table."""

from __future__ import annotations

from dataclasses import replace

from gradserver.engine.control import journal, members
from gradserver.engine.control.group import Applicant, Group
from gradserver.engine.control.joining import check_applicant, join_timeout, new_group
from gradserver.engine.control.names import check_name
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.subgroups import is_lasting, overdue as overdue_split
from gradserver.engine.control.welcome import welcome_to
from gradserver.engine.effects import Effects
from gradserver.engine.identities import in_order, numbered
from gradserver.engine.order_fields import Member
from gradserver.engine.policy import Policy
from gradserver.protocol.errors import GradServerError, JoinRefusedError
from gradserver.protocol.limits import MAX_NAME_BYTES
from gradserver.protocol.messages import Join
from gradserver.protocol.offers import pack_offers

_NOBODY = Member(-1, "")


def group_for(registry: Registry, message: Join, effects: Effects) -> Group:
    """Check a Join, and return the group that the worker wants to join; make it if there is none.

    Raises:
        JoinRefusedError: no group may be founded under this name, or too many were.
        InvalidWorldSizeError: its size is unknown, or another one than the coordinator was told.
    """
    check_name("the group's name", message.group, MAX_NAME_BYTES)
    group = registry.groups.get(message.group)
    if group is None:
        group = _make(registry, message, effects)
    elif group.origin is not None:
        raise JoinRefusedError(
            f"{group.name!r} is a sub-group of {group.origin.parent!r}: members of that make it, with Worker.subgroup"
        )
    elif is_started_anew(group, message.name):
        group = _replace(registry, group, message, effects)
    check_applicant(group, message, registry.now)
    group.account.check_join(message.name)
    return group


def arrive(group: Group, applicant: Applicant, effects: Effects) -> None:
    """Have an applicant wait for the others; when there are enough, the gathering begins."""
    policy = _policy(group)
    group.applicants.join(applicant, policy)
    count = len(group.applicants.waiting)
    of = " here; the group begins with" if policy.is_elastic else " of"
    effects.log(f"group {group.name!r}: {applicant.join.name!r} joined ({count}{of} {policy})")


def _make(registry: Registry, message: Join, effects: Effects) -> Group:
    """Make the group that a worker is the first to ask for."""
    registry.access.check_group(message.group)
    for news in registry.quotas.forget(registry.groups):
        effects.journal_behind(news)
    registry.quotas.check_founding(message.group, registry.groups)
    return new_group(registry, message)


def _replace(registry: Registry, group: Group, message: Join, effects: Effects) -> Group:
    """Make a group in place of one that has no processes any more. Workers that wait for a place go with it."""
    queue = group.learners.take_queue()
    members.abandon(registry, group, f"{message.name!r} was started anew", effects)
    try:
        group = _make(registry, message, effects)
    except GradServerError as error:
        for applicant in queue:
            _refuse(registry, applicant, error, effects)
        raise
    for applicant in queue:
        try:
            check_applicant(group, applicant.join, registry.now)
        except GradServerError as error:
            _refuse(registry, applicant, error, effects)
        else:
            registry.groups[group.name] = group  # also if the worker that asks now is refused
            arrive(group, applicant, effects)
    return group


def _refuse(registry: Registry, applicant: Applicant, error: GradServerError, effects: Effects) -> None:
    del registry.places[applicant.connection]
    effects.refuse(applicant.connection, error)


def leave(registry: Registry, group: Group, connection: int, reason: str, effects: Effects) -> None:
    """Forget an applicant, and with the last one the group."""
    names = [repr(applicant.join.name) for applicant in group.applicants.waiting if applicant.connection == connection]
    group.applicants.forget(connection, _policy(group))
    effects.log(f"group {group.name!r}: {''.join(names)} left before the group was complete ({reason})")
    if not group.applicants.waiting:
        registry.forget(group)


def is_started_anew(group: Group, name: str) -> bool:
    """Tell whether a worker called ``name`` shows that the processes of a group are gone.

    All of them are away, and one that is needed joins instead of coming back: its process is another one. An elastic
    group needs any of them, as each has the state. So all of them have to join.
    """
    if not group.is_deserted:
        return False
    away = {group.members.identities.names[member_id] for member_id in group.sessions.away}
    return name in away and (group.policy.needs_all or away <= {name, *group.learners.queued_names})


def deadline(group: Group) -> float | None:
    """Return when the patience of the first applicant ends."""
    if not group.applicants.waiting:
        return None
    return min(applicant.deadline for applicant in group.applicants.waiting)


def overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell applicants that have run out of patience which workers are missing. In a sub-group all hear it at once."""
    late = [applicant for applicant in group.applicants.waiting if applicant.deadline <= now]
    if group.origin is not None and late:
        error = overdue_split(group, late[0].join.timeout)
        for applicant in group.applicants.waiting:
            effects.evict(applicant.connection, error)
        return
    for applicant in late:
        effects.evict(applicant.connection, join_timeout(group, applicant))


def _policy(group: Group) -> Policy:
    """Return the policy about applicants of a group."""
    return group.policy if group.origin is None else group.origin.rule


def is_complete(group: Group, now: float) -> bool:
    """Tell whether a forming group has all that it waits for."""
    if group.origin is not None:
        return 0 < group.origin.expected <= len(group.applicants.waiting)
    return group.applicants.are_enough(group.policy, now)


def activate(registry: Registry, group: Group, effects: Effects) -> None:
    """Make members of all applicants, open the group at all data halves, and welcome every member."""
    founders = _choose_members(registry, group, effects)
    registry.has_begun(group)
    group.begin_planes(group.members.by_id)
    is_told = group.choose_plane()
    registry.suit_links(group)
    order = registry.opening(group, founders, group.shards.tokens)
    journal.founded(group, effects)
    payloads = pack_offers(group.planes.offers_of(group.members.by_id))
    for place in range(len(group.shards.connections)):
        group.shards.order_one(place, replace(order, shard=place + 1), effects)
    for place, member in group.members.by_id.items():
        token = group.shards.tokens[place] if group.shards.tokens else ""
        welcome = welcome_to(group, place, token, registry.incarnation)
        effects.send(member.connection, welcome, payloads)
    count, shards = len(group.members.by_id), f", {len(order.rates)} data shards" if order.rates else ""
    workers = "1 worker" if count == 1 else f"{count} workers"
    effects.log(f"group {group.name!r}: complete with {workers}, membership epoch {group.members.epoch}{shards}")
    if is_told:
        group.log_plane(effects)
    effects.order(order)


def _choose_members(registry: Registry, group: Group, effects: Effects) -> tuple[Member, ...]:
    """Make members of the applicants. Those that asked for no rank get one, in the order in which they came.

    Of several with one name all but the first get a number behind it: by its name a worker finds its id again.
    """
    applicants = group.applicants.waiting
    places = in_order([applicant.join for applicant in applicants], group.members.world)
    chosen = {place: applicants[index] for place, index in places.items()}
    names = numbered([one.join.name for one in chosen.values()])
    for name, (place, one) in zip(names, chosen.items(), strict=True):
        if name != one.join.name:
            what = f"another worker is called {one.join.name!r} already, so rank {place} is called {name!r}"
            hint = "give each worker a name of its own (GRADSERVER_NAME, or name=)"
            effects.log(f"group {group.name!r}: {what}: {hint}", warning=True)
    chosen_members = {
        place: Member(one.connection, name) for name, (place, one) in zip(names, chosen.items(), strict=True)
    }
    group.members.found(chosen_members, registry.next_epoch())
    for place, one in chosen.items():
        group.planes.take(place, one.join.offer)
    if group.origin is None:
        waits = group.policy.round_timeout or registry.round_timeout
        group.set_timeouts(max(applicant.join.timeout for applicant in applicants), waits)
    else:
        group.origin.begin(group.members.epoch)
        group.set_timeouts(group.origin.timeout, group.origin.round_timeout)
    group.applicants.leave_all()
    parent = registry.parent_of(group)
    if registry.incarnation and (group.origin is None or is_lasting(parent, group.origin)):
        keys = [chosen[place].join.key if place in chosen else "" for place in range(group.members.world)]
        group.sessions.open(registry.roster.token(), keys)
    registry.roster.staff(group, None if parent is None else parent.shards.connections)
    return tuple(chosen_members.get(place, _NOBODY) for place in range(group.members.world))
