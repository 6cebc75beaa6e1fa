"""Applicants of a group that trains: each waits for a place, and with it is a learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradserver.engine.control import evicted
from gradserver.engine.control.donations import check_attempts, check_can_serve
from gradserver.engine.control.group import Applicant, Group
from gradserver.engine.control.group.learners import Learner
from gradserver.engine.control.joining import waits_for_end
from gradserver.engine.effects import Effects
from gradserver.engine.identities import member_id_for, namesake
from gradserver.protocol.errors import JoinTimeoutError


def arrive(group: Group, applicant: Applicant, entropy: Callable[[], str], effects: Effects) -> None:
    """Give a place to a worker that joins a group that has begun, or let it wait for one, or for the next group.

    Raises:
        UsageError: no member can send the state.
        JoinRefusedError: the others have waited for it in vain too often, or it was evicted not long ago.
    """
    if waits_for_end(group, applicant.join.name):
        group.learners.wait(applicant)
        effects.log(f"group {group.name!r}: {applicant.join.name!r} waits: {_why_waits(group, applicant)}")
        return
    for name in {applicant.join.name, _name_for(group, applicant.join.name)}:
        evicted.check_join(group, name, applicant.since)
    check_can_serve(group, applicant.join.name)
    check_attempts(group, applicant.join.name, applicant.since)
    group.learners.wait(applicant)
    admit_queued(group, entropy, effects)
    if applicant in group.learners.queue:
        effects.log(f"group {group.name!r}: {applicant.join.name!r} waits: {_why_waits(group, applicant)}")


def can_admit(group: Group) -> bool:
    """Tell whether there is a place for one of the applicants that wait for one."""
    return any(_name_for(group, applicant.join.name) for applicant in group.learners.queue)


def _name_for(group: Group, wanted: str) -> str:
    """Return the name with which a worker called ``wanted`` may have a member id now; an empty one if there is none."""
    if waits_for_end(group, wanted):
        return ""
    taken, names = {*group.members.by_id, *group.learners.by_id}, group.members.identities.names
    if wanted not in {names[member_id] for member_id in taken}:
        return wanted if len(taken) < group.policy.maximum else ""
    own = namesake(wanted, names, taken)  # it was called so when the group began, and is back
    return names[own] if own >= 0 else ""


def admit_queued(group: Group, entropy: Callable[[], str], effects: Effects) -> None:
    """Give free places to the applicants that have waited longest."""
    for applicant in list(group.learners.queue):
        name, taken = _name_for(group, applicant.join.name), {*group.members.by_id, *group.learners.by_id}
        if not name:
            continue
        applicant.join = replace(applicant.join, name=name)
        vacant, places = group.learners.vacant, group.policy.maximum
        member_id = member_id_for(applicant.join, group.members.identities.names, taken, vacant, places)
        group.members.admit(member_id, applicant.join.name)
        group.watch.admit(applicant.join.name)
        token = (group.token(member_id) if group.is_durable else entropy()) if group.shards else ""
        learner = Learner(applicant.connection, applicant.join, token, applicant.since)
        group.learners.admit(member_id, learner)
        group.planes.take(member_id, applicant.join.offer)
        group.configure(effects, member_id=member_id)
        effects.log(f"group {group.name!r}: {group.call(member_id)} joins in round {group.rounds.number}")


def _why_waits(group: Group, applicant: Applicant) -> str:
    taken = [*group.members.by_id, *group.learners.by_id]
    if waits_for_end(group, applicant.join.name):
        return f"it has left group {group.name!r}, and the next one begins when these have left, too: " + group.calls(
            group.members.by_id
        )
    if group.is_deserted:
        return f"the workers of group {group.name!r} may come back, {group.calls(group.members.by_id)}"
    same = [member_id for member_id in taken if group.members.identities.names[member_id] == applicant.join.name]
    if same:
        return f"{group.call(same[0])} is a member already: give each worker its own name (GRADSERVER_NAME, or name=)"
    return (
        f"group {group.name!r} has {len(taken)} workers, {group.calls(taken)}, and {group.policy.maximum} are the most"
    )


def queue_deadline(group: Group) -> float | None:
    """Return when the patience of the first applicant ends that waits for a place."""
    return min((applicant.deadline for applicant in group.learners.queue), default=None)


def queue_overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell applicants that have run out of patience that there was no place."""
    for applicant in group.learners.queue:
        if applicant.deadline <= now:
            what = f"{applicant.join.name!r} waited {applicant.join.timeout:g} s for a place: "
            effects.evict(applicant.connection, JoinTimeoutError(what + _why_waits(group, applicant)))
