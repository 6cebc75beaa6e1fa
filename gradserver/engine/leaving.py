"""What control does when somebody leaves, is lost or refused, be it a worker or a data shard; and when a group breaks.

One of these leads to another: a data shard that is lost costs joiners their connections, whoever is gone leaves a seat,
a vacant seat can break a group, or settle what plan it has. So they are in one module. What they come to for a group is
in the tables of `gradserver.engine.control`, `elastic`, `joining` and `rehoming`.
"""

from __future__ import annotations

from typing import Final

from gradserver.engine import books, chronicle, claims, joining, rehoming, turns
from gradserver.engine.elastic import behind, depart
from gradserver.engine.events import Behind, CloseGroup, Command, Depart, Halt, Halted, Log, Order, Send, dismiss
from gradserver.engine.membership import Group
from gradserver.engine.proposals import fail_all, settle
from gradserver.engine.registry import HERE, Registry
from gradserver.engine.roster import DataShard
from gradserver.protocol.errors import (
    ConnectionLostError,
    DeadlineError,
    GradServerError,
    LeftOutError,
    ProtocolError,
    WorkerLeftError,
)
from gradserver.protocol.messages import Failure, Scope

_OUT_OF_DATA: Final = (
    ". If it had no batches left: give all workers equally many, with ShardSampler(uneven='pad'), wrap the loop in "
    "model.join(optimizer), or hand samples out with DataRanges"
)
"""What to do about a worker that has left a training before the others came to its end."""

# ── connections ───────────────────────────────────────────────────────────────────────────────────────


def gone(
    registry: Registry,
    connection: int,
    reason: str,
    now: float,
    commands: list[Command],
    *,
    politely: bool = False,
    ended: bool = False,
) -> list[Order]:
    """Whoever had ``connection`` is gone: ``politely`` if it said so, and for certain if its process ``ended``."""
    name = registry.places.pop(connection, None)
    if name is None:
        shard = registry.roster.shards.pop(connection, None)
        return [] if shard is None else _shard_gone(registry, connection, shard, reason, now, commands)
    group = registry.groups[name]
    if not group.begun:
        group.applicants = [a for a in group.applicants if a.connection != connection]
        if group.policy is not None and len(group.applicants) < group.policy.minimum:
            group.opens = None
        commands.append(Log(f"group {name!r}: an applicant left ({reason})"))
        if not group.applicants:
            del registry.groups[name]
        return []
    if any(applicant.connection == connection for applicant in group.queue):
        group.queue = [a for a in group.queue if a.connection != connection]
        return []
    seat = group.seat_of(connection)
    return vacate(registry, group, seat, reason, now, commands, politely=politely, ended=ended)


def refuse(
    registry: Registry,
    connection: int,
    error: GradServerError,
    now: float,
    commands: list[Command],
    *,
    ended: bool = False,
) -> list[Order]:
    """``error`` is this connection's own fault, and costs it the connection."""
    _turn_away(connection, error, commands)
    blame = "it broke the protocol: " if isinstance(error, ProtocolError) else ""
    why = "it did not come in time" if isinstance(error, LeftOutError) else f"{blame}{error.message}"
    return gone(registry, connection, why, now, commands, ended=ended)


def refuse_all(registry: Registry, refusals: joining.Refusals, now: float, commands: list[Command]) -> list[Order]:
    """The same of several."""
    return [order for who, error in refusals for order in refuse(registry, who, error, now, commands)]


def _turn_away(connection: int, error: GradServerError, commands: list[Command]) -> None:
    commands += dismiss(connection, error)
    commands.append(Log(f"connection {connection} refused: {error.message}", warning=True))


def fell_behind(registry: Registry, group: Group, report: Behind, now: float, commands: list[Command]) -> list[Order]:
    """Who listens has left too much unread."""
    seat = report.rank
    if seat in group.joiners and (excused := joining.fell_behind(group, seat)) is not None:
        return registry.order_all(group, excused, commands)
    occupant = group.members.get(seat) or group.joiners.get(seat)
    if occupant is None:
        return []
    return refuse(registry, occupant.connection, behind(group, seat, report.round), now, commands)


# ── seats ─────────────────────────────────────────────────────────────────────────────────────────────


def vacate(
    registry: Registry,
    group: Group,
    seat: int,
    reason: str,
    now: float,
    commands: list[Command],
    *,
    politely: bool = False,
    ended: bool = False,
) -> list[Order]:
    """A member is gone, or somebody who joins."""
    if seat in group.joiners:
        claims.departed(group, seat, commands)
        departures = joining.gone(group, seat, reason, politely, now, commands)
        turns.departed(group, seat, commands)
        if group.begun:
            departures += joining.seat_the_next(group, registry.roster.token, commands)
            return registry.order_all(group, departures, commands)
    group.members.pop(seat, None)
    group.proposals.pop(seat, None)
    group.away.pop(seat, None)
    group.busy.pop(seat, None)
    group.unaware.discard(seat)
    claims.departed(group, seat, commands)
    if not group.begun:
        return _close(registry, group, seat, reason, politely, commands)
    turns.departed(group, seat, commands)
    if group.policy is None:
        return _break_without(registry, group, seat, reason, politely, commands)
    departure, others = depart(group, seat, reason, politely, ended, registry.next_epoch, commands)
    chronicle.members(group, departure.error.message, commands)
    changes = [departure, *others, *joining.seat_the_next(group, registry.roster.token, commands)]
    orders = registry.order_all(group, changes, commands)
    orders += books.open_for_shards(registry, group, now, commands)
    orders += settle(registry, group, commands)
    return orders + refuse_all(registry, joining.outdated(group), now, commands)


def _close(
    registry: Registry, group: Group, seat: int, reason: str, politely: bool, commands: list[Command]
) -> list[Order]:
    """The last one is gone, and the group with it."""
    departed = group.seats.departed(seat, politely, f"({reason})").message
    commands.append(Log(f"group {group.name!r}: {departed}"))
    del registry.groups[group.name]
    chronicle.closed(group, f"{departed}, the last worker", commands)
    commands.append(Log(f"group {group.name!r}: that was the last worker, after {group.rounds} rounds"))
    orders = registry.order(group, CloseGroup(group.name), commands)
    for connection, error in joining.bereft(group):
        del registry.places[connection]
        _turn_away(connection, error, commands)
    return orders


def _break_without(
    registry: Registry, group: Group, seat: int, reason: str, politely: bool, commands: list[Command]
) -> list[Order]:
    """A fixed group cannot do without any of its members."""
    departed = group.seats.departed(seat, politely, f"({reason})").message
    commands.append(Log(f"group {group.name!r}: {departed}"))
    chronicle.members(group, departed, commands)
    when = f"after round {group.rounds - 1} " if group.rounds else ""
    remedy = _OUT_OF_DATA if politely and group.plan is not None else ""
    error = group.seats.departed(seat, politely, f"{when}and is needed to go on: {reason}{remedy}")
    _break(group, error, commands)
    return registry.order(group, Depart(group.name, seat, error), commands)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────


def _break(group: Group, error: GradServerError, commands: list[Command]) -> None:
    """The group goes no further; the first reason stands."""
    if group.broken is None:
        group.broken = error
        if not isinstance(error, WorkerLeftError):
            chronicle.halted(group, error, commands)
            commands.append(Log(f"group {group.name!r} is broken: {error.message}", warning=True))
    fail_all(group, error, commands)
    turns.broken(group, commands)


def halt(registry: Registry, group: Group, error: GradServerError, commands: list[Command]) -> list[Order]:
    """A data shard is missing: the group is broken, and its members are told.

    They wait for what that shard does not say, and would not hear for long that it is frozen.
    """
    _break(group, error, commands)
    orders = registry.order(group, Halt(group.name, error, False), commands)
    failure = Failure.of(error, Scope.CONNECTION)
    commands += [Send(seat.connection, failure) for seat in group.members.values()]
    return orders


def halted(registry: Registry, group: Group, report: Halted, source: int, commands: list[Command]) -> list[Order]:
    """A data half cannot go on, and has told its members why: the others do not either."""
    _break(group, report.error, commands)
    orders = registry.order(group, Halt(group.name, report.error, report.buckets_only), commands, source)
    return [] if source == HERE else orders


def conflict(registry: Registry, group: Group, error: GradServerError, commands: list[Command]) -> list[Order]:
    """Members contradict each other: nothing is exchanged any more, and all are told of that in what they exchange."""
    _break(group, error, commands)
    return registry.order(group, Halt(group.name, error, False), commands)


def give_up(registry: Registry, group: Group, commands: list[Command]) -> list[Order]:
    """Nobody has come to take the place of those who departed: tell those who wait, and forget the group."""
    least = group.policy.minimum if group.policy else 0
    error = DeadlineError(
        f"group {group.name!r} waited {group.timeout:g} s for workers after round {group.rounds - 1}: it has "
        f"{len(group.members)}, {group.calls(group.members)}, and at least {least} are needed to go on",
        missing=(f"{least - len(group.members)} more, of any rank",),
        round=group.rounds,
    )
    for connection in group.connections:
        commands += dismiss(connection, error)
        del registry.places[connection]
    commands.append(Log(error.message, warning=True))
    chronicle.closed(group, "too few workers were left", commands)
    del registry.groups[group.name]
    return registry.order(group, CloseGroup(group.name), commands)


# ── data shards ───────────────────────────────────────────────────────────────────────────────────────


def _shard_gone(
    registry: Registry, connection: int, shard: DataShard, reason: str, now: float, commands: list[Command]
) -> list[Order]:
    """Groups that use this shard go no further, unless they are durable; later ones do without it."""
    commands.append(Log(f"data shard {shard.number} at {shard.url} was lost ({reason})", warning=True))
    error = ConnectionLostError(f"the data shard at {shard.url} was lost, and its slices with it: {reason}")
    orders: list[Order] = []
    for group in list(registry.groups.values()):
        if connection not in group.shards:
            continue
        if not group.secret or group.broken is not None:
            orders += halt(registry, group, error, commands)
            continue
        orders += books.let_in(registry, group, commands)
        orders += refuse_all(registry, joining.disturbed(group, all_of_them=True), now, commands)
        rehoming.lost(group, connection, now, commands)
    return orders + rehoming.rehome(registry, now, commands)
