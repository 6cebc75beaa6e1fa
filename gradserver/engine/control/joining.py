"""Checks of workers that want to join a group, and what an applicant is told that has run out of patience.

`forming.group_for` has the order of all checks, `access` the groups that may be opened, `admissions` running groups.
"""

from __future__ import annotations

from typing import Final

from gradserver.engine.control.donations import lacks_donors
from gradserver.engine.control.group import Applicant, Group
from gradserver.engine.control.group.planes import Planes
from gradserver.engine.control.journal import is_halt
from gradserver.engine.control.names import check_name
from gradserver.engine.control.planes import Candidate
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.watching import check_policy
from gradserver.engine.policy import Hashes, Policy
from gradserver.protocol.errors import (
    InvalidRankError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
    LimitExceededError,
)
from gradserver.protocol.limits import (
    MAX_GROUPS,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    MAX_PLANE_REASON,
    MAX_SHARDS,
    MAX_TOKEN,
    MAX_URL,
    PROBE_GROUP,
    PROBE_SECONDS,
)
from gradserver.protocol.messages import Join
from gradserver.protocol.planes import AUTO

_BESIDE_NAMES: Final = 2 * MAX_NAME_BYTES + MAX_TOKEN + MAX_SHARDS * (MAX_URL + 12) + MAX_PLANE_REASON + 16
"""Bytes of a Welcome that are not names, at most."""
_REMEDY: Final = (
    "Start them in time, with the same URL and group, or let all workers wait longer: connect(timeout=…), in seconds"
)
"""Advice about workers that have not come in time."""


def new_group(registry: Registry, join: Join) -> Group:
    """Return the group that ``join`` is the first to ask for.

    Raises:
        InvalidWorldSizeError: its size is unknown, or another one than the coordinator was told, or too small for the
            group's mean.
        InvalidArgumentError: it is to evict members that are far off, and needs all.
        LimitExceededError: there are too many groups.
    """
    told = registry.told(join.group)
    if told.minimum and not _suits(join, told):
        raise InvalidWorldSizeError(
            f"{join.name!r} wants a world size of {join.world_size}, but the coordinator was started with {told} "
            f"for group {join.group!r}"
        )
    if not told.minimum and not join.world_size:
        raise InvalidWorldSizeError(
            f"the world size of group {join.group!r} is unknown: pass world_size= to connect, set WORLD_SIZE, or start "
            f"the coordinator with `gradserver serve --workers N`"
        )
    policy = told.sized(join.world_size)
    policy.check_mean(join.group)
    check_policy(policy, join.group)
    if sum(group.origin is None for group in registry.groups.values()) >= MAX_GROUPS:
        raise LimitExceededError(f"this coordinator already serves {MAX_GROUPS} groups")
    account = registry.quotas.account(join.group)
    plane, expires = policy.plane or registry.plane, None
    if join.group == PROBE_GROUP:
        plane, expires = AUTO, registry.now + PROBE_SECONDS
    return Group(
        join.group,
        policy,
        account,
        policy.nonfinite or registry.nonfinite,
        expires=expires,
        planes=Planes(plane, registry.hashes is Hashes.ALL),
    )


def _suits(join: Join, policy: Policy) -> bool:
    """Tell whether a group with this policy can have the world size that ``join`` asks for, if it asks for one."""
    return not join.world_size or policy.minimum <= join.world_size <= policy.maximum


def waits_for_end(group: Group, name: str) -> bool:
    """Tell whether ``name``, which has left the group, is to wait for the next one: this one ends when the rest leaves.

    An elastic group is open to it as soon as it can get the state of a member.
    """
    if not group.begun or not group.members.has_left(name):
        return False
    if group.broken is not None:
        return not is_halt(group.broken)
    return group.policy.needs_all or group.plans.plan is None or lacks_donors(group)


def check_applicant(group: Group, join: Join, now: float) -> None:
    """Raise the error that keeps this applicant out, if there is one. One that waits for the next group is let in."""
    if waits_for_end(group, join.name):
        return
    policy = group.policy
    most = policy.maximum
    each = 8  # msgpack's own bytes, and those of a member id, twice
    fair_share = (MAX_HEADER_BYTES - _BESIDE_NAMES) // most - each  # of a Welcome, and of a Membership
    check_name(f"in a group of {most}, the worker's name", join.name, min(MAX_NAME_BYTES, fair_share))
    if not _suits(join, policy):
        raise InvalidWorldSizeError(
            f"{join.name!r} wants a world size of {join.world_size}, but group {group.name!r} has {policy}"
        )
    if group.begun and (policy.needs_all or group.broken is not None):
        why = f"it broke ({group.broken.message})" if group.broken else f"it is in round {group.rounds.number}"
        if group.is_deserted:
            why += " and waits for its workers to come back"
        state = "elastic, has begun," if policy.is_elastic else "complete"
        raise JoinRefusedError(
            f"group {group.name!r} is {state} and {why}; {join.name!r} cannot be added. "
            f"A new group can form under this name when these have left: {group.calls(group.members.by_id)}"
        )
    if join.rank >= most:
        raise InvalidRankError(
            f"{join.name!r} wants rank {join.rank}, but the ranks of group {group.name!r} are 0 to {most - 1}"
        )
    for applicant in group.applicants.waiting:
        if join.rank >= 0 and applicant.join.rank == join.rank:
            raise JoinRefusedError(
                f"rank {join.rank} of group {group.name!r} is taken by {applicant.join.name!r}, "
                f"which has waited for {now - applicant.since:.1f} s: give each worker another rank (RANK, or rank= of "
                f"connect), or none, so that the coordinator assigns them"
            )
    new = Candidate(join.name, join.offer)
    beside = group.case(())._replace(workers=group.candidates_beside(join.name))
    group.planes.check(group.name, beside, new)


def join_timeout(group: Group, applicant: Applicant) -> JoinTimeoutError:
    """Return what an applicant is told that has run out of patience: which workers came, and which are missing."""
    here = ", ".join(
        f"{a.join.name!r}" + (f" (rank {a.join.rank})" if a.join.rank >= 0 else "") for a in group.applicants.waiting
    )
    if group.policy.is_elastic:
        return _too_few_joined(group, applicant, here)
    ranks = {a.join.rank for a in group.applicants.waiting if a.join.rank >= 0}
    unassigned = sum(a.join.rank < 0 for a in group.applicants.waiting)
    absent = [f"rank {rank}" for rank in range(group.members.world) if rank not in ranks]
    missing = group.members.world - len(group.applicants.waiting)
    if unassigned:
        which = f"{missing} of {', '.join(absent)}" if ranks else f"{missing} more, of any rank"
    else:
        which = ", ".join(absent)
    return JoinTimeoutError(
        f"group {group.name!r} has {len(group.applicants.waiting)} of {group.members.world} workers after "
        f"{applicant.join.timeout:g} s: {here} came; missing: {which}. {_REMEDY}",
        missing=tuple(absent) if not unassigned else (which,),
    )


def _too_few_joined(group: Group, applicant: Applicant, here: str) -> JoinTimeoutError:
    least = group.policy.minimum
    missing = f"{least - len(group.applicants.waiting)} more, of any rank"
    return JoinTimeoutError(
        f"group {group.name!r} has {len(group.applicants.waiting)} of {group.policy} workers after "
        f"{applicant.join.timeout:g} s: {here} came; missing: {missing}. {_REMEDY}",
        missing=(missing,),
    )
