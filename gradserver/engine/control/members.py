"""Departures in control: workers that leave, are lost or evicted, and groups that break or end.

What that comes to for a group is in the table of `gradserver.engine.control.machine`.
"""

from __future__ import annotations

from typing import Final

from gradserver.engine.control import journal, learners, leases, recovery, rounds, turns
from gradserver.engine.control.group import Group
from gradserver.engine.control.plans import fail_all
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.orders import Break, Halt
from gradserver.protocol.errors import DeadlineError, GradServerError, WorkerLeftError
from gradserver.protocol.messages import Failure, Scope

_OUT_OF_DATA: Final = (
    ". If it had no batches left: give all workers equally many, with ShardSampler(uneven='pad'), wrap the loop in "
    "model.join(optimizer), or hand samples out with DataRanges"
)
"""Advice about a worker that has left a training before the others came to its end."""

# ── members and learners ──────────────────────────────────────────────────────────────────────────────


def remove(
    registry: Registry,
    group: Group,
    member_id: int,
    reason: str,
    now: float,
    effects: Effects,
    *,
    politely: bool = False,
    ended: bool = False,
) -> None:
    """Go on without a member or a learner: it left ``politely``, or was lost, and for certain if its process ``ended``.

    Rounds that waited only for what it had used end before the membership changes.
    """
    is_learner = member_id in group.learners.by_id
    group.members.lose(member_id)
    group.plans.depart(member_id)
    group.sessions.attach(member_id)
    leases.departed(group, member_id)
    rounds.settle_all(group, effects)
    if is_learner:
        learners.gone(group, member_id, reason, politely, now, effects)
    if not group.begun:
        _close(registry, group, member_id, reason, politely, effects)
        return
    turns.departed(group, member_id, effects)
    if is_learner:
        return
    if group.policy.ends_at_once and group.lacks_workers:
        _break_without(group, member_id, reason, politely, effects)
        return
    rounds.depart(group, member_id, reason, politely, ended, registry.next_epoch, effects)
    recovery.begin_if_due(registry, group, now, effects)


def _close(registry: Registry, group: Group, member_id: int, reason: str, politely: bool, effects: Effects) -> None:
    """End a group whose last member is gone."""
    departed = group.members.identities.departed(member_id, politely, f"({reason})").message
    effects.log(f"group {group.name!r}: {departed}")
    effects.log(f"group {group.name!r}: that was the last worker, after {group.rounds.number} rounds")
    registry.end(group, learners.bereft(group), f"{departed}, the last worker", effects)


def _break_without(group: Group, member_id: int, reason: str, politely: bool, effects: Effects) -> None:
    """Break a group that has too few members and waits for no other worker; tell the others which one was lost."""
    departed = group.members.identities.departed(member_id, politely, f"({reason})").message
    effects.log(f"group {group.name!r}: {departed}")
    journal.members(group, departed, effects)
    when = f"after round {group.rounds.number - 1} " if group.rounds.number else ""
    remedy = _OUT_OF_DATA if politely and group.plans.plan is not None else ""
    error = group.members.identities.departed(member_id, politely, f"{when}and is needed to go on: {reason}{remedy}")
    _break(group, error, effects)
    group.order(Break(group.name, member_id, error), effects)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────


def _break(group: Group, error: GradServerError, effects: Effects) -> None:
    """Let the group go no further; the first reason stands."""
    if group.be_broken(error) and not isinstance(error, WorkerLeftError):
        journal.halted(group, error, effects)
        effects.log(f"group {group.name!r} is broken: {error.message}", warning=True)
    fail_all(group, error, effects)
    turns.broken(group, effects)


def halt(group: Group, error: GradServerError, effects: Effects) -> None:
    """Break a group that lacks a data shard, and tell its members.

    They wait for what that shard does not say, and would not hear for long that it is frozen.
    """
    _break(group, error, effects)
    group.order(Halt(group.name, error, False), effects)
    failure = Failure.of(error, Scope.CONNECTION)
    for member in group.members.by_id.values():
        effects.send(member.connection, failure)


def halted(group: Group, error: GradServerError, buckets_only: bool, source: int, effects: Effects) -> None:
    """Break a group whose data shard ``source`` cannot go on, and has told its members why."""
    _break(group, error, effects)
    group.order(Halt(group.name, error, buckets_only), effects, but=source)


def conflict(group: Group, error: GradServerError, effects: Effects) -> None:
    """Break a group whose members contradict each other. They are told of it in what they exchange."""
    _break(group, error, effects)
    group.order(Halt(group.name, error, False), effects)


def abandon(registry: Registry, group: Group, reason: str, effects: Effects) -> None:
    """End a group all of whose members are away."""
    effects.log(f"group {group.name!r} ends after {group.rounds.number} rounds: all its workers are away, and {reason}")
    registry.end(group, learners.bereft(group), f"all its workers were away, and {reason}", effects)


def disband(registry: Registry, group: Group, effects: Effects) -> None:
    """End a group that has waited for another worker for too long."""
    least, waited = group.policy.minimum, group.policy.patience(group.timeout)
    error = DeadlineError(
        f"group {group.name!r} waited {waited:g} s for workers after round {group.rounds.number - 1}: it has "
        f"{len(group.members.by_id)}, {group.calls(group.members.by_id)}, and at least {least} are needed to go on",
        missing=(f"{least - len(group.members.by_id)} more, of any rank",),
        round=group.rounds.number,
    )
    effects.log(error.message, warning=True)
    registry.end(group, error, "too few workers were left", effects)
