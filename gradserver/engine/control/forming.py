"""What control does about somebody who wants to join, and about groups that form: the first rows of control's table."""

from __future__ import annotations

from dataclasses import replace

from gradserver.engine.control import journal, members
from gradserver.engine.control.group import Applicant, Group, check_applicant, check_name, join_timeout, new_group
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.welcome import welcome_to
from gradserver.engine.effects import Effects
from gradserver.engine.link import encode_order
from gradserver.engine.order_fields import Seat
from gradserver.engine.seats import Seats, in_order, numbered
from gradserver.protocol.limits import MAX_NAME_BYTES
from gradserver.protocol.messages import Join, Ordered
from gradserver.protocol.shards import Table

_NOBODY = Seat(-1, "")


def may_begin(group: Group, now: float) -> bool:
    """Tell whether a forming group has all that it waits for."""
    policy, count = group.policy, len(group.applicants)
    if count < policy.minimum:
        return False
    wishes = [applicant.join.world_size for applicant in group.applicants]
    if count == policy.maximum or (all(wishes) and count >= max(wishes)):
        return True
    return group.opens is not None and group.opens <= now


def found(registry: Registry, message: Join, effects: Effects) -> Group:
    """Return the group that a worker wants to join; make it if there is none.

    Raises:
        JoinRefusedError: no group may be founded under this name, or too many were.
        InvalidWorldSizeError: its size is unknown, or another one than the coordinator was told.
    """
    check_name("the group's name", message.group, MAX_NAME_BYTES)
    group = registry.groups.get(message.group)
    if group is not None and is_started_anew(group, message.name):
        members.abandon(registry, group, f"{message.name!r} was started anew", effects)
        group = None
    if group is None:
        registry.access.check_group(message.group)
        for news in registry.quotas.forget(registry.groups):
            effects.journal_behind(news)
        registry.quotas.check_founding(message.group, registry.groups)
        group = new_group(message, registry.told(message.group), len(registry.groups), registry.nonfinite)
    check_applicant(group, message, registry.now)
    group.account = registry.quotas.account(message.group)
    group.account.check_join(message.name)
    return group


def arrive(group: Group, applicant: Applicant, effects: Effects) -> None:
    """Have an applicant wait for the others; when there are enough, the gathering begins."""
    group.applicants.append(applicant)
    effects.log(f"group {group.name!r}: {applicant.join.name!r} joined ({len(group.applicants)} of {group.policy})")
    if len(group.applicants) < group.policy.minimum:
        return
    if group.opens is None:
        group.opens = applicant.since + group.policy.gather
    group.opens = min(group.opens, *(applicant.deadline for applicant in group.applicants))


def leave(registry: Registry, group: Group, connection: int, reason: str, effects: Effects) -> None:
    """Forget an applicant, and with the last one the group."""
    group.applicants = [applicant for applicant in group.applicants if applicant.connection != connection]
    if len(group.applicants) < group.policy.minimum:
        group.opens = None
    effects.log(f"group {group.name!r}: an applicant left ({reason})")
    if not group.applicants:
        del registry.groups[group.name]
        group.ended = True


def is_started_anew(group: Group, name: str) -> bool:
    """Tell whether a worker called ``name`` shows that the processes of a group that needs them all are gone.

    All of them are away, and one joins instead of coming back: its process is another one.
    """
    if not (group.is_deserted and group.policy.needs_all):
        return False
    return any(group.seats.names[seat] == name for seat in group.away)


def deadline(group: Group) -> float | None:
    """Return when the patience of the first applicant ends."""
    return min((applicant.deadline for applicant in group.applicants), default=None) if group.applicants else None


def overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell applicants whose patience has ended which workers are missing."""
    for applicant in group.applicants:
        if applicant.deadline <= now:
            effects.evict(applicant.connection, join_timeout(group, applicant))


def activate(registry: Registry, group: Group, effects: Effects) -> None:
    """All are here: seat them, open the group at all data halves, and welcome everybody."""
    seats = _seat_all(registry, group, effects)
    order = registry.opening(group, seats, group.tokens)
    journal.founded(group, effects)
    for shard, connection in enumerate(group.shards, 1):
        effects.send(connection, Ordered(), (encode_order(replace(order, shard=shard)),))
    for place, seat in group.members.items():
        token = group.tokens[place] if group.tokens else ""
        welcome = welcome_to(group, place, token, registry.credit, registry.incarnation)
        effects.send(seat.connection, welcome)
    count, shards = len(group.members), f", {len(order.rates)} data shards" if order.rates else ""
    effects.log(f"group {group.name!r}: complete with {count} workers, epoch {group.epoch}{shards}")
    effects.order(order)


def _seat_all(registry: Registry, group: Group, effects: Effects) -> tuple[Seat, ...]:
    """Applicants are members now. Those who asked for no rank get one, in the order in which they came.

    Of several with one name all but the first get a number behind it: by its name a worker finds its seat again.
    """
    places = in_order([applicant.join for applicant in group.applicants], group.world)
    chosen = {place: group.applicants[index] for place, index in places.items()}
    group.epoch = group.founded = registry.next_epoch()
    group.world = group.founders = max(chosen) + 1
    group.opens = None
    names = numbered([one.join.name for one in chosen.values()])
    for name, (place, one) in zip(names, chosen.items(), strict=True):
        if name != one.join.name:
            what = f"there is a {one.join.name!r} already, so rank {place} is called {name!r}"
            hint = "give each worker a name of its own (GRADSERVER_NAME, or name=)"
            effects.log(f"group {group.name!r}: {what}: {hint}", warning=True)
    group.members = {
        place: Seat(one.connection, name) for name, (place, one) in zip(names, chosen.items(), strict=True)
    }
    seats = tuple(group.members.get(place, _NOBODY) for place in range(group.world))
    group.seats, group.table = Seats(seat.name for seat in seats), Table(len(chosen))
    group.timeout = max(applicant.join.timeout for applicant in group.applicants)
    group.round_timeout = registry.round_timeout or group.timeout
    group.applicants.clear()
    if registry.incarnation:
        group.secret = registry.roster.token()
    registry.roster.staff(group)
    return seats
