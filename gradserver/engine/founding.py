"""What control does about somebody who wants to join, and about groups that form: the first rows of control's table."""

from __future__ import annotations

from dataclasses import replace

from gradserver.engine import chronicle, joining
from gradserver.engine.elastic import may_begin
from gradserver.engine.events import Command, Log, Order, Record, Seat, Send, dismiss
from gradserver.engine.leaving import gone
from gradserver.engine.membership import Applicant, Group, check_applicant, check_name, join_timeout, new_group
from gradserver.engine.orders import encode_order
from gradserver.engine.registry import Registry
from gradserver.engine.seats import Seats, in_order, numbered
from gradserver.engine.welcome import welcome_to
from gradserver.protocol.limits import MAX_NAME_BYTES
from gradserver.protocol.messages import Join, Ordered
from gradserver.protocol.shards import Table

_NOBODY = Seat(-1, "")


def join(registry: Registry, connection: int, message: Join, now: float, commands: list[Command]) -> list[Order]:
    """Somebody wants to be in a group, which may begin with that. Raises why he cannot."""
    registry.check_free(connection)
    check_name("the group's name", message.group, MAX_NAME_BYTES)
    group = registry.groups.get(message.group)
    if group is None:
        registry.access.check_group(message.group)
        told = registry.told(message.group)
        commands += [Record(news) for news in registry.quotas.forget(registry.groups)]
        registry.quotas.check_founding(message.group, registry.groups)
        group = new_group(message, told, len(registry.groups), registry.nonfinite)
    check_applicant(group, message, now)
    group.account = registry.quotas.account(message.group)
    group.account.check_join(message.name)
    registry.groups[message.group] = group
    applicant = Applicant(connection, message, now)
    if group.begun:
        orders = joining.arrive(group, applicant, registry.roster.token, commands)
        registry.places[connection] = group.name
        return registry.order_all(group, orders, commands)
    group.applicants.append(applicant)
    registry.places[connection] = group.name
    commands.append(Log(f"group {group.name!r}: {message.name!r} joined ({len(group.applicants)} of {group.size})"))
    return _activate(registry, group, commands) if may_begin(group, now) else []


def overdue(registry: Registry, group: Group, now: float, commands: list[Command]) -> list[Order]:
    """A group that forms may begin when the gathering is over; applicants whose patience has ended are told."""
    if group.opens is not None and may_begin(group, now):
        return _activate(registry, group, commands)
    orders: list[Order] = []
    for applicant in [applicant for applicant in group.applicants if applicant.deadline <= now]:
        commands += dismiss(applicant.connection, join_timeout(group, applicant))
        orders += gone(registry, applicant.connection, "waited too long", now, commands)
    return orders


def _activate(registry: Registry, group: Group, commands: list[Command]) -> list[Order]:
    """All are here: seat them, open the group at all data halves, and welcome everybody."""
    seats = _seat_all(registry, group, commands)
    order = registry.opening(group, seats, group.tokens)
    chronicle.founded(group, commands)
    for shard, connection in enumerate(group.shards, 1):
        commands.append(Send(connection, Ordered(), (encode_order(replace(order, shard=shard)),)))
    for place, seat in group.members.items():
        token = group.tokens[place] if group.tokens else ""
        welcome = welcome_to(group, place, token, registry.credit, registry.incarnation)
        commands.append(Send(seat.connection, welcome))
    count, shards = len(group.members), f", {len(order.rates)} data shards" if order.rates else ""
    commands.append(Log(f"group {group.name!r}: complete with {count} workers, epoch {group.epoch}{shards}"))
    return [order]


def _seat_all(registry: Registry, group: Group, commands: list[Command]) -> tuple[Seat, ...]:
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
            commands.append(Log(f"group {group.name!r}: {what}: {hint}", warning=True))
    group.members = {
        place: Seat(one.connection, name) for name, (place, one) in zip(names, chosen.items(), strict=True)
    }
    seats = tuple(group.members.get(place, _NOBODY) for place in range(group.world))
    group.seats, group.table = Seats(seat.name for seat in seats), Table(len(chosen))
    group.timeout = max(applicant.join.timeout for applicant in group.applicants)
    group.round_timeout = registry.round_timeout or group.timeout
    group.applicants.clear()
    waits_for_all = group.policy is not None and group.policy.lateness is None
    if waits_for_all and registry.incarnation:
        group.secret = registry.roster.token()
    registry.roster.staff(group)
    return seats
