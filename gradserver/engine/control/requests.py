"""Rounds that do not wait for all members: a member requests a round for each contribution, and is granted one.

One round is open at a time. Requests that come meanwhile gather, and the next round takes them together, as a database
commits transactions in groups. So updates are one ordered log, and all members apply every update, in order. A mode
says when a round begins, and which contributions it takes:

    the next round waits                                   modes
    ─────────────────────────────────────────────────────  ──────────────────────────────────────────────────────────
    for the end of the round before                        all
    for as many requests as the quorum says, and a grace   all; of the members that have data
    for a member with a contribution that would be too old bounded: after one more round it could not be taken any more
    for a member that leaves too much unread               all: no member is left out because others are quicker
    for a learner that gets its state                      all, if the others wait for it anyway

A round of which members hold results has begun before, perhaps without a record of that. It begins again at once, with
the members that push to it.

The members that are granted a round are its cohort. All others are cut off from it before it begins: they get its
results unasked, as stragglers do. A member that the others wait for has the round timeout to make a request.
`gradserver.engine.control.machine` has the rules and timers, `gradserver.worker.member.requests` the member's half.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradserver.engine.control import journal, members, rounds
from gradserver.engine.control.group import Group, State
from gradserver.engine.control.group.learners import Stage
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.ends import MAX_CUTS
from gradserver.engine.policy import ModeName
from gradserver.protocol.errors import DeadlineError, UnexpectedMessageError
from gradserver.protocol.messages import Failure, Granted, RequestRound, Scope


def hear(group: Group, member_id: int, message: RequestRound, effects: Effects) -> None:
    """Take a request. One that was answered before is answered again: the answer was lost."""
    if not group.policy.mode.grants:
        raise UnexpectedMessageError(f"{group.call(member_id)} requests a round, and rounds wait for all members")
    if group.plans.plan is None or message.version > message.first:
        raise UnexpectedMessageError(f"{group.call(member_id)} requests a round that cannot be")
    group.check_round(max(message.first - 1, message.version - 1), "RequestRound")
    requests = group.requests
    if message.version <= requests.begun and member_id in requests.cohort:
        if not message.pushes:
            effects.send(group.connection_of(member_id), Granted(requests.begun, applied=_applied(group)))
        return
    requests.ask(member_id, message)


# ── when a round begins ───────────────────────────────────────────────────────────────────────────────


def is_due(group: Group) -> bool:
    """Tell whether the next round could begin, but for what it waits for."""
    requests, open_round = group.requests, group.rounds
    if not requests.waiting or requests.begun >= open_round.number or group.present_state() is not State.ACTIVE:
        return False
    return open_round.held is None and not open_round.unsettled and not group.sessions.away and not _gets_state(group)


def _gets_state(group: Group) -> bool:
    """Tell whether the others wait for a learner that gets the state."""
    learners = group.learners.by_id.values()
    return any(one.stage is Stage.RECEIVING and not one.listens for one in learners)


def _with_data(group: Group) -> list[int]:
    """Return the members, and learners that contribute, that make requests: they have data."""
    following = group.requests.following
    return [member_id for member_id in group.contributors if member_id not in following]


def blockers(group: Group) -> list[int]:
    """Return members that the next round waits for, as it must not begin without them."""
    ready = group.requests.ready(group.rounds.number)
    others = [member_id for member_id in group.contributors if member_id not in ready]
    return [one for one in others if _has_no_room(group, one) or _would_be_too_late(group, one)]


def _would_be_too_late(group: Group, member_id: int) -> bool:
    """Tell whether a contribution that a member computes now could not be taken any more, after one more round."""
    mode = group.policy.mode
    if mode.name is not ModeName.BOUNDED or member_id in group.requests.following:
        return False
    return not mode.takes(group.rounds.number + 1 - _version_of(group, member_id))


def _has_no_room(group: Group, member_id: int) -> bool:
    """Tell whether a member might leave too much unread, if one more round were done without it."""
    behind = group.rounds.number + 1 - _version_of(group, member_id)
    return behind > MAX_CUTS or rounds.overruns(group, behind)


def _version_of(group: Group, member_id: int) -> int:
    """Return the version at which a member computes, or a lower one."""
    learner = group.learners.by_id.get(member_id)
    entered = learner.round if learner is not None else group.members.first_rounds.get(member_id, 0)
    return max(group.requests.versions.get(member_id, 0), group.plans.planned, entered)


def _applied(group: Group) -> int:
    """Return a number of rounds that all members have applied."""
    return min((group.requests.applied.get(member_id, 0) for member_id in group.contributors), default=0)


def has_quorum(group: Group) -> bool:
    """Tell whether as many members have made a request as a round needs."""
    lateness, can = group.policy.lateness, _with_data(group)
    assert lateness is not None
    if not can:
        return True
    ready = group.requests.ready(group.rounds.number)
    return len(ready) >= min(lateness.needed(len(group.contributors)), len(can))


def is_news(group: Group) -> bool:
    """Tell whether the next round waits for requests, or has as many as it needs, and that is not noted, or no more."""
    requests, due = group.requests, is_due(group)
    return due != (requests.since is not None) or (due and has_quorum(group)) != requests.has_quorum


def note(registry: Registry, group: Group) -> None:
    """Note since when the next round waits for requests. If it has as many as it needs, the others have their grace."""
    requests, lateness, due = group.requests, group.policy.lateness, is_due(group)
    assert lateness is not None
    if due != (requests.since is not None):
        requests.wait(registry.now if due else None)
    if not (due and has_quorum(group)):
        requests.lose_quorum()
    elif not requests.has_quorum:
        requests.reach_quorum(registry.now + lateness.grace if lateness.grace else None)


def can_begin(group: Group) -> bool:
    """Tell whether the next round can begin."""
    if is_due(group) and _has_begun(group):
        return True
    if not is_due(group) or not has_quorum(group):
        return False
    all_are_ready = len(group.requests.ready(group.rounds.number)) >= len(_with_data(group))
    return (all_are_ready or group.requests.grace_ends is None) and not blockers(group)


def begin(group: Group, effects: Effects) -> None:
    """Refuse requests that are too old. Begin the next round with the others, or with all members if none has data."""
    requests, number, mode = group.requests, group.rounds.number, group.policy.mode
    if _has_begun(group):
        _begin_with(group, sorted(requests.pushing(number)), effects)
        return
    ready = requests.ready(number)
    for member_id in sorted(one for one, message in ready.items() if not mode.takes(number - message.version)):
        _tell_of_refusal(
            group, member_id, number - ready[member_id].version, requests.refuse(number, member_id), effects
        )
        effects.send(group.connection_of(member_id), Granted(number, True, _applied(group)))
    cohort = sorted(ready.keys() & requests.waiting.keys())
    if not cohort and (ready or _with_data(group)):
        return
    _begin_with(group, cohort or sorted(requests.waiting), effects)


def _has_begun(group: Group) -> bool:
    """Tell whether an earlier coordinator has begun the next round, and could not write that, as when its disk is full.

    The results that members hold of it have the contributions of that time, and so must the others. Members of then
    that are here push, and have said so.
    """
    return group.requests.unrecorded == group.rounds.number


def _begin_with(group: Group, cohort: Sequence[int], effects: Effects) -> None:
    """Begin the next round with the contributions of ``cohort``, and cut off all others."""
    requests, number = group.requests, group.rounds.number
    others = sorted(set(group.contributors).difference(cohort))
    requests.begin(number, cohort)
    group.rounds.close_without(number, others)
    journal.begun(group, number, requests.cohort, others, effects)
    if others:
        rounds.cut(group, number, others, effects)
    applied = _applied(group)
    for member_id in cohort:
        effects.send(group.connection_of(member_id), Granted(number, applied=applied))


def _tell_of_refusal(group: Group, member_id: int, staleness: int, times: int, effects: Effects) -> None:
    """Log that a contribution is refused: the first of a member, and then ever more rarely."""
    if times & (times - 1) == 0:
        effects.log(
            f"group {group.name!r}: a contribution of {group.call(member_id)} to round {group.rounds.number} is "
            f"refused, as it is {staleness} updates late, and {group.policy.mode.staleness} are allowed (--staleness). "
            f"That was its {times}. refusal",
            warning=True,
        )


# ── members that make no request ──────────────────────────────────────────────────────────────────────


def deadline(group: Group) -> float | None:
    """Return when requests have waited long enough for other members."""
    since = group.requests.since
    return since + group.round_timeout if since is not None and is_due(group) else None


def overdue(registry: Registry, group: Group, effects: Effects) -> None:
    """Go on without members that make no request; break a group that needs them."""
    group.requests.wait(registry.now)
    missing = _awaited(group)
    what = f"round {group.rounds.number} waited {group.round_timeout:g} s (--round-timeout) for its request"
    if group.policy.needs_all or not missing:
        members.conflict(group, _nothing_came(group, missing), effects)
        return
    for member_id in missing:
        connection = group.connection_of(member_id)
        effects.evict(connection, group.left_out(member_id, what), why=what)


def _awaited(group: Group) -> list[int]:
    """Return the members that have to make a request, so that the next round begins."""
    ready = group.requests.ready(group.rounds.number)
    return blockers(group) or [member_id for member_id in _with_data(group) if member_id not in ready]


def awaited(group: Group) -> set[int]:
    """Return connections of members that others wait for, to make a request or to push what they were granted."""
    if not group.policy.mode.grants or not group.requests.waiting:
        return set()
    if group.requests.begun == group.rounds.number:
        return {group.connection_of(member_id) for member_id in group.requests.cohort}
    return {group.connection_of(member_id) for member_id in _awaited(group)} if is_due(group) else set()


def _nothing_came(group: Group, missing: Sequence[int]) -> DeadlineError:
    return DeadlineError(
        f"round {group.rounds.number} of group {group.name!r} waited {group.round_timeout:g} s (--round-timeout) for "
        f"{group.calls(missing)} to request it",
        missing=tuple(group.call(member_id) for member_id in missing),
        round=group.rounds.number,
    )


def must_fail(group: Group) -> bool:
    """Tell whether members wait for a round that never begins."""
    return group.broken is not None and bool(group.requests.waiting)


def fail(group: Group, effects: Effects) -> None:
    """Tell members with a request that the group goes no further."""
    assert group.broken is not None
    for member_id in sorted(group.requests.waiting):
        connection = group.connection_of(member_id)
        if connection >= 0:
            effects.send(connection, Failure.of(group.broken, Scope.REQUEST))
        group.requests.withdraw(member_id)
