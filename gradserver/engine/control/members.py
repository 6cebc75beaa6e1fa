"""Departures in control: workers that leave, are lost or evicted, and groups that break or end.

A member that is lost, step by step:

1. The transport finds that it is silent or that its connection broke (`gradserver.transport.liveness`), or a data half
   finds that it breaks the protocol. In a durable group it may come back first (`sessions`).
2. The table of `machine` has a row for `Lost` in each state. Its function comes here, to `remove`.
3. With fewer than MIN members and no time to wait for others the group breaks. Else it goes on in a new epoch, which is
   written, and told to all data halves in one `Configure`.
4. Each data half cuts the member off (`gradserver.engine.data.membership`), and says that it has applied that.
5. When all have, members are told (`rounds.tell_applied`). They go by it from the end of the round on.
"""

from __future__ import annotations

from typing import Final

from gradserver.engine.control import journal, learners, leases, recovery, rounds, turns
from gradserver.engine.control.group import Group
from gradserver.engine.control.group.group import MAX_REASON
from gradserver.engine.control.group.slow import Gone
from gradserver.engine.control.plans import fail_all
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import Departure
from gradserver.engine.orders import Break, Halt
from gradserver.protocol.errors import DeadlineError, GradServerError
from gradserver.protocol.exchange import AMONG_MEMBERS as AMONG
from gradserver.protocol.limits import PROBE_SECONDS
from gradserver.protocol.messages import Failure, Scope
from gradserver.protocol.planes import AMONG_MEMBERS

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
    registry.totals.lost += not politely and group.origin is None
    group.slow.note_gone(Gone(group.members.identities.names[member_id], reason, now, is_learner))
    group.members.lose(member_id, politely)
    group.watch.forget(member_id)
    group.blocked.forget(member_id)
    group.plans.depart(member_id)
    group.sessions.attach(member_id)
    leases.departed(group, member_id)
    group.requests.depart(member_id)
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
    recovery.begin_if_due(registry, group, now, effects)  # first: behind Resumed no data half answers what was open
    _depart(registry, group, member_id, reason, politely, ended, effects)


def _depart(
    registry: Registry, group: Group, member_id: int, reason: str, politely: bool, ended: bool, effects: Effects
) -> None:
    """Go on without a member, in a new epoch. ``ended``: its process has."""
    when = f"in round {group.rounds.number} ({reason[:MAX_REASON]})"
    error = group.members.identities.departed(member_id, politely, when)
    group.members.depart(member_id, registry.next_epoch())
    news = group.news(f"{error.message}; {_rest(group)}", not politely, effects)
    journal.members(group, error.message, effects)
    group.configure(effects, news, departed=(Departure(member_id, error, ended),))
    learners.lost_donor(group, member_id, effects)


def _rest(group: Group) -> str:
    """Say how many members continue, or are left if these are too few."""
    count = len(group.members.by_id)
    if group.lacks_workers:
        return "1 worker is left" if count == 1 else f"{count} workers are left"
    return "1 worker goes on" if count == 1 else f"{count} workers go on"


def _close(registry: Registry, group: Group, member_id: int, reason: str, politely: bool, effects: Effects) -> None:
    """End a group when its last member is gone."""
    departed = group.members.identities.departed(member_id, politely, f"({reason})").message
    effects.log(f"group {group.name!r}: {departed}")
    effects.log(f"group {group.name!r}: that was the last worker, after {group.rounds.number} rounds")
    registry.end(group, learners.bereft(group), f"{departed}, the last worker", effects)


def _break_without(group: Group, member_id: int, reason: str, politely: bool, effects: Effects) -> None:
    """Break a group that has too few members and waits for no other worker; tell the others which one was lost."""
    departed = group.members.identities.departed(member_id, politely, f"({reason})").message
    effects.log(f"group {group.name!r}: {departed}")
    when = f"after round {group.rounds.number - 1} " if group.rounds.number else ""
    remedy = _OUT_OF_DATA if politely and group.plans.plan is not None else ""
    error = group.members.identities.departed(member_id, politely, f"{when}and is needed to go on: {reason}{remedy}")
    _break(group, error, effects)
    journal.members(group, departed, effects)  # behind what halts it: without that, a later coordinator lacks the error
    group.order(Break(group.name, member_id, error), effects)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────


def _break(group: Group, error: GradServerError, effects: Effects, frozen: bool = False) -> None:
    """Let the group go no further; the first error counts. Members hear of it in what they exchange next.

    If the group is ``frozen`` by the loss of a shard, or is in a recovery, they exchange nothing: they are told.
    """
    is_new, first = group.be_broken(error), group.broken or error
    if is_new and journal.is_halt(first):
        journal.halted(group, first, effects)
        effects.log(f"group {group.name!r} is broken: {first.message}", warning=True)
    fail_all(group, first, effects)
    turns.broken(group, effects)
    if frozen or (is_new and group.recovery.is_open):
        _tell(group, Failure.of(first, Scope.CONNECTION), effects)
    elif group.planes.choice.plane in AMONG_MEMBERS:  # some may wait for the lost one, and for nothing from here
        _tell(group, Failure.of(first, Scope.EXCHANGE, AMONG), effects)


def _tell(group: Group, failure: Failure, effects: Effects) -> None:
    """Send ``failure`` to all members that have a connection."""
    for member in group.members.by_id.values():
        if member.connection >= 0:
            effects.send(member.connection, failure)


def halt(
    group: Group, error: GradServerError, effects: Effects, *, buckets_only: bool = False, frozen: bool = False
) -> None:
    """Break a group, and have all shards tell members the first error in what they exchange, or in ``buckets_only``.

    If a lost shard has ``frozen`` the group, members are told at once: they wait for what that shard does not say.
    """
    _break(group, error, effects, frozen)
    group.order(Halt(group.name, group.broken or error, buckets_only), effects)


def abandon(registry: Registry, group: Group, reason: str, effects: Effects) -> None:
    """End a group, as all its members are away."""
    effects.log(f"group {group.name!r} ends after {group.rounds.number} rounds: all its workers are away, and {reason}")
    registry.end(group, learners.bereft(group), f"all its workers were away, and {reason}", effects)


def expire(registry: Registry, group: Group, effects: Effects) -> None:
    """End a group that only measures: it may not last."""
    error = DeadlineError(f"group {group.name!r} is for `gradserver doctor`, and ends after {PROBE_SECONDS:g} s")
    if group.begun:
        registry.end(group, error, "it has lasted for as long as it may", effects)
        return
    for applicant in group.applicants.waiting:
        effects.evict(applicant.connection, error)


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
