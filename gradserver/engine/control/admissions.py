"""Applicants of a group that trains: each waits for a seat, and with it is a learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradserver.engine.control.donations import check_attempts, check_can_serve
from gradserver.engine.control.group import Applicant, Group
from gradserver.engine.control.group.learners import Learner
from gradserver.engine.effects import Effects
from gradserver.engine.seats import namesake, seat_for
from gradserver.protocol.errors import JoinTimeoutError


def arrive(group: Group, applicant: Applicant, entropy: Callable[[], str], effects: Effects) -> None:
    """Give a seat to a worker that joins a group that has begun, or let it wait for one.

    Raises:
        UsageError: no member can send the state.
        JoinRefusedError: the others have waited for it in vain too often.
    """
    check_can_serve(group, applicant.join.name)
    check_attempts(group, applicant.join.name, applicant.since)
    group.learners.wait(applicant)
    admit_queued(group, entropy, effects)
    if applicant in group.learners.queue:
        effects.log(f"group {group.name!r}: {applicant.join.name!r} waits: {_why_waits(group, applicant)}")


def can_admit(group: Group) -> bool:
    """Tell whether there is a seat for one of the applicants that wait for one."""
    return any(_name_for(group, applicant.join.name) for applicant in group.learners.queue)


def _name_for(group: Group, wanted: str) -> str:
    """Return the name with which a worker called ``wanted`` may have a seat now; an empty one if there is none."""
    taken, names = {*group.members.by_seat, *group.learners.by_seat}, group.members.seats.names
    if wanted not in {names[seat] for seat in taken}:
        return wanted if len(taken) < group.policy.maximum else ""
    own = namesake(wanted, names, taken)  # it was called so when the group began, and is back
    return names[own] if own >= 0 else ""


def admit_queued(group: Group, entropy: Callable[[], str], effects: Effects) -> None:
    """Give free seats to the applicants that have waited longest."""
    for applicant in list(group.learners.queue):
        name, taken = _name_for(group, applicant.join.name), {*group.members.by_seat, *group.learners.by_seat}
        if not name:
            continue
        applicant.join = replace(applicant.join, name=name)
        vacant, places = group.learners.vacant, group.policy.maximum
        seat = seat_for(applicant.join, group.members.seats.names, taken, vacant, places)
        group.members.admit(seat, applicant.join.name)
        token = (group.token(seat) if group.is_durable else entropy()) if group.shards else ""
        learner = Learner(applicant.connection, applicant.join, token, applicant.since)
        group.learners.admit(seat, learner)
        group.configure(effects, seat=seat)
        effects.log(f"group {group.name!r}: {group.call(seat)} joins in round {group.rounds.number}")


def _why_waits(group: Group, applicant: Applicant) -> str:
    taken = [*group.members.by_seat, *group.learners.by_seat]
    same = [seat for seat in taken if group.members.seats.names[seat] == applicant.join.name]
    if same:
        return f"{group.call(same[0])} is a member already: give each worker its own name (GRADSERVER_NAME, or name=)"
    return f"group {group.name!r} has {len(taken)} workers, {group.calls(taken)}, and {group.policy} is the most"


def queue_deadline(group: Group) -> float | None:
    """Return when the patience of the first applicant ends that waits for a seat."""
    return min((applicant.deadline for applicant in group.learners.queue), default=None)


def queue_overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell applicants that have run out of patience that there was no seat."""
    for applicant in group.learners.queue:
        if applicant.deadline <= now:
            what = f"{applicant.join.name!r} waited {applicant.join.timeout:g} s for a seat: "
            effects.evict(applicant.connection, JoinTimeoutError(what + _why_waits(group, applicant)))
