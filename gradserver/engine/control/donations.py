"""Donations: which member sends its state to which learner, whether the others wait for that, and for how often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle

from gradserver.engine.control.group import Group
from gradserver.engine.control.group.learners import Learner, Stage
from gradserver.protocol.errors import JoinRefusedError, UsageError
from gradserver.protocol.limits import MAX_STATE_ATTEMPTS, STATE_REST_SECONDS


def due(group: Group, now: float) -> dict[int, int]:
    """Return which donor sends its state to which learner from the next round on, by the learner's id.

    A learner listens meanwhile, or it is expected: the next round waits for it. It is expected if it could not read as
    fast as results came. So it is if there is to be no backlog, or if there are too few others.
    """
    waiting = [member_id for member_id, learner in group.learners.by_id.items() if learner.stage is Stage.WAITING]
    if not waiting:
        return {}
    free = sorted(group.learners.donors, key=lambda member_id: (group.learners.donors[member_id], member_id))
    if group.lacks_workers:  # no round is open meanwhile, so that one donor may serve several
        donors: Iterator[int] = cycle(free)
    else:
        busy = {learner.donor for learner in group.learners.by_id.values()}
        donors = iter([member_id for member_id in free if member_id not in busy])
    may = [
        member_id
        for member_id in waiting
        if group.lacks_workers or listens(group, member_id) or now >= group.learners.waits_again
    ]
    return dict(zip(may, donors, strict=False))


def listens(group: Group, member_id: int) -> bool:
    """Tell whether a learner gets the state while the others go on."""
    return not (group.lacks_workers or group.learners.by_id[member_id].waits or not group.policy.backlog)


def check_attempts(group: Group, name: str, now: float) -> None:
    """Raise JoinRefusedError if the others have waited for ``name`` in vain too often."""
    attempts, last = group.learners.in_vain.get(name, (0, -math.inf))
    rest = last + STATE_REST_SECONDS - now
    if attempts >= MAX_STATE_ATTEMPTS and rest > 0:
        raise JoinRefusedError(
            f"the members of group {group.name!r} waited {attempts} times for {name!r} to get the state, in vain: it "
            f"may join again in {rest:.0f} s"
        )


def check_can_serve(group: Group, name: str) -> None:
    """Raise UsageError if no member could send its state to ``name``, or what broke the group."""
    if group.broken is not None:
        raise group.broken.again()
    if lacks_donors(group):
        raise no_donor(group, name)


def lacks_donors(group: Group) -> bool:
    """Tell whether the group trains and none of its members can send its state."""
    may_come = group.learners.donors or group.sessions.away or group.recovery.is_open
    return bool(group.rounds.number) and not may_come


def no_donor(group: Group, name: str) -> UsageError:
    """Return what ``name`` is told when no member can send the state."""
    return UsageError(
        f"{name!r} joins group {group.name!r} in round {group.rounds.number}, and needs the model's and the "
        f"optimizer's state, which no member can send: wrap model and optimizer in gradserver.Job, at every worker "
        f"(a job of several models needs data=, too), or give Worker.serve_state what to send"
    )


def hopeless(group: Group) -> list[Learner]:
    """Return learners that wait for the state, if no member can send its own, now or soon."""
    if not lacks_donors(group):
        return []
    stuck = [learner for learner in group.learners.by_id.values() if learner.stage is Stage.WAITING]
    coming = (learner for learner in group.learners.hearing if learner.stage is not Stage.WAITING)
    return [] if any(learner.serves for learner in coming) else stuck
