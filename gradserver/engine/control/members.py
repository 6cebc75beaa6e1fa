"""What control does when somebody leaves, is lost or refused, be it a worker or a data shard; and when a group breaks.

One of these leads to another: a data shard that is lost costs joiners their connections, whoever is gone leaves a seat,
a vacant seat can break a group, or settle what plan it has. So they are in one module. What they come to for a group is
in the tables of `gradserver.engine.control.machine`, `rounds`, `learners` and `shard_replacement`.
"""

from __future__ import annotations

from typing import Final

from gradserver.engine.control import journal, learners, leases, recovery, shard_replacement, turns
from gradserver.engine.control.group import Group
from gradserver.engine.control.plans import agree, fail_all
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.rounds import behind, depart, end_rounds
from gradserver.engine.control.shards import DataShard
from gradserver.engine.effects import Effects
from gradserver.engine.events import Behind, CloseGroup, Depart, Halt, Halted
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


def connection_lost(
    registry: Registry,
    connection: int,
    reason: str,
    now: float,
    effects: Effects,
    *,
    politely: bool = False,
    ended: bool = False,
) -> None:
    """Whoever had ``connection`` is gone: ``politely`` if it said so, and for certain if its process ``ended``."""
    name = registry.places.pop(connection, None)
    if name is None:
        shard = registry.roster.shards.pop(connection, None)
        if shard is not None:
            _shard_gone(registry, connection, shard, reason, now, effects)
        return
    group = registry.groups[name]
    if not group.begun:
        group.applicants = [a for a in group.applicants if a.connection != connection]
        if len(group.applicants) < group.policy.minimum:
            group.opens = None
        effects.log(f"group {name!r}: an applicant left ({reason})")
        if not group.applicants:
            del registry.groups[name]
        return
    if any(applicant.connection == connection for applicant in group.queue):
        group.queue = [a for a in group.queue if a.connection != connection]
        return
    seat = group.seat_of(connection)
    remove(registry, group, seat, reason, now, effects, politely=politely, ended=ended)


def evict(
    registry: Registry,
    connection: int,
    error: GradServerError,
    now: float,
    effects: Effects,
    *,
    ended: bool = False,
) -> None:
    """``error`` is this connection's own fault, and costs it the connection."""
    _turn_away(connection, error, effects)
    blame = "it broke the protocol: " if isinstance(error, ProtocolError) else ""
    why = "it did not come in time" if isinstance(error, LeftOutError) else f"{blame}{error.message}"
    connection_lost(registry, connection, why, now, effects, ended=ended)


def evict_all(registry: Registry, refusals: learners.Refusals, now: float, effects: Effects) -> None:
    """The same of several."""
    for who, error in refusals:
        evict(registry, who, error, now, effects)


def _turn_away(connection: int, error: GradServerError, effects: Effects) -> None:
    effects.dismiss(connection, error)
    effects.log(f"connection {connection} refused: {error.message}", warning=True)


def fell_behind(registry: Registry, group: Group, report: Behind, now: float, effects: Effects) -> None:
    """Who listens has left too much unread."""
    seat = report.rank
    if seat in group.learners and (excused := learners.fell_behind(group, seat)) is not None:
        registry.order_all(group, excused, effects)
        return
    occupant = group.members.get(seat) or group.learners.get(seat)
    if occupant is not None:
        evict(registry, occupant.connection, behind(group, seat, report.round), now, effects)


# ── seats ─────────────────────────────────────────────────────────────────────────────────────────────


def remove(
    registry: Registry,
    group: Group,
    seat: int,
    reason: str,
    now: float,
    effects: Effects,
    *,
    politely: bool = False,
    ended: bool = False,
) -> None:
    """A member is gone, or somebody who joins."""
    if seat in group.learners:
        leases.departed(group, seat)
        end_rounds(group, effects)
        departures = learners.gone(group, seat, reason, politely, now, effects)
        turns.departed(group, seat, effects)
        if group.begun:
            departures += learners.seat_the_next(group, registry.roster.token, effects)
            registry.order_all(group, departures, effects)
            return
    group.members.pop(seat, None)
    group.proposals.pop(seat, None)
    group.away.pop(seat, None)
    group.busy.pop(seat, None)
    group.unaware.discard(seat)
    leases.departed(group, seat)
    end_rounds(group, effects)
    if not group.begun:
        _close(registry, group, seat, reason, politely, effects)
        return
    turns.departed(group, seat, effects)
    if group.policy.ends_at_once and group.lacks_workers:
        _break_without(registry, group, seat, reason, politely, effects)
        return
    departure, others = depart(group, seat, reason, politely, ended, registry.next_epoch, effects)
    journal.members(group, departure.error.message, effects)
    changes = [departure, *others, *learners.seat_the_next(group, registry.roster.token, effects)]
    registry.order_all(group, changes, effects)
    recovery.begin_if_due(registry, group, now, effects)
    agree(registry, group, effects)
    evict_all(registry, learners.outdated(group), now, effects)


def _close(registry: Registry, group: Group, seat: int, reason: str, politely: bool, effects: Effects) -> None:
    """The last one is gone, and the group with it."""
    departed = group.seats.departed(seat, politely, f"({reason})").message
    effects.log(f"group {group.name!r}: {departed}")
    del registry.groups[group.name]
    journal.closed(group, f"{departed}, the last worker", effects)
    effects.log(f"group {group.name!r}: that was the last worker, after {group.rounds} rounds")
    registry.order(group, CloseGroup(group.name), effects)
    for connection, error in learners.bereft(group):
        del registry.places[connection]
        _turn_away(connection, error, effects)


def _break_without(registry: Registry, group: Group, seat: int, reason: str, politely: bool, effects: Effects) -> None:
    """Too few are left, and the group waits for no other worker: all that are left are told which one was lost."""
    departed = group.seats.departed(seat, politely, f"({reason})").message
    effects.log(f"group {group.name!r}: {departed}")
    journal.members(group, departed, effects)
    when = f"after round {group.rounds - 1} " if group.rounds else ""
    remedy = _OUT_OF_DATA if politely and group.plan is not None else ""
    error = group.seats.departed(seat, politely, f"{when}and is needed to go on: {reason}{remedy}")
    _break(group, error, effects)
    registry.order(group, Depart(group.name, seat, error, breaks=True), effects)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────


def _break(group: Group, error: GradServerError, effects: Effects) -> None:
    """The group goes no further; the first reason stands."""
    if group.broken is None:
        group.broken = error
        if not isinstance(error, WorkerLeftError):
            journal.halted(group, error, effects)
            effects.log(f"group {group.name!r} is broken: {error.message}", warning=True)
    fail_all(group, error, effects)
    turns.broken(group, effects)


def halt(registry: Registry, group: Group, error: GradServerError, effects: Effects) -> None:
    """A data shard is missing: the group is broken, and its members are told.

    They wait for what that shard does not say, and would not hear for long that it is frozen.
    """
    _break(group, error, effects)
    registry.order(group, Halt(group.name, error, False), effects)
    failure = Failure.of(error, Scope.CONNECTION)
    for seat in group.members.values():
        effects.send(seat.connection, failure)


def halted(registry: Registry, group: Group, report: Halted, source: int, effects: Effects) -> None:
    """A data half cannot go on, and has told its members why: the others do not either."""
    _break(group, report.error, effects)
    registry.order(group, Halt(group.name, report.error, report.buckets_only), effects, but=source)


def conflict(registry: Registry, group: Group, error: GradServerError, effects: Effects) -> None:
    """Members contradict each other: nothing is exchanged any more, and all are told of that in what they exchange."""
    _break(group, error, effects)
    registry.order(group, Halt(group.name, error, False), effects)


def abandon(registry: Registry, group: Group, reason: str, effects: Effects) -> None:
    """End a group all of whose members are away."""
    effects.log(f"group {group.name!r} ends after {group.rounds} rounds: all its workers are away, and {reason}")
    for connection, error in learners.bereft(group):
        del registry.places[connection]
        _turn_away(connection, error, effects)
    del registry.groups[group.name]
    journal.closed(group, f"all its workers were away, and {reason}", effects)
    registry.order(group, CloseGroup(group.name), effects)


def disband(registry: Registry, group: Group, effects: Effects) -> None:
    """Nobody has come to take the place of those who departed: tell those who wait, and forget the group."""
    least, waited = group.policy.minimum, group.policy.patience(group.timeout)
    error = DeadlineError(
        f"group {group.name!r} waited {waited:g} s for workers after round {group.rounds - 1}: it has "
        f"{len(group.members)}, {group.calls(group.members)}, and at least {least} are needed to go on",
        missing=(f"{least - len(group.members)} more, of any rank",),
        round=group.rounds,
    )
    for connection in group.connections:
        effects.dismiss(connection, error)
        del registry.places[connection]
    effects.log(error.message, warning=True)
    journal.closed(group, "too few workers were left", effects)
    del registry.groups[group.name]
    registry.order(group, CloseGroup(group.name), effects)


# ── data shards ───────────────────────────────────────────────────────────────────────────────────────


def _shard_gone(
    registry: Registry, connection: int, shard: DataShard, reason: str, now: float, effects: Effects
) -> None:
    """Groups that use this shard go no further, unless they are durable; later ones do without it."""
    effects.log(f"data shard {shard.number} at {shard.url} was lost ({reason})", warning=True)
    error = ConnectionLostError(f"the data shard at {shard.url} was lost, and its slices with it: {reason}")
    for group in list(registry.groups.values()):
        if connection not in group.shards:
            continue
        if not group.secret or group.broken is not None:
            halt(registry, group, error, effects)
            continue
        recovery.promote_contributors(registry, group, effects)
        evict_all(registry, learners.disturbed(group, all_of_them=True), now, effects)
        shard_replacement.lost(group, connection, now, effects)
    shard_replacement.fill_places(registry, now, effects)
