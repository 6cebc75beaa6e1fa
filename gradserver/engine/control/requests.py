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

Several modules share the log. A request names a section of the plan, and a round is of one section. The members that
wait for a round of one section stand in a *line*:

    lines                                                  what happens
    ─────────────────────────────────────────────────────  ──────────────────────────────────────────────────────────
    one can begin                                          the next round is of its section
    several can                                            it is that of the line in which a member waits for longest
    a member stands in another line                        nothing waits for it: it has chosen another section
    a member has requested a round since a line began      that line does not wait for it either, to have its quorum
    … and holds a contribution that would be too old       bounded: the line waits until it has that one's turn
    a member in another line leaves too much unread        a line waits for it, but not the one that waits for longest
    no member has data                                     one more round, of the first section, ends all blocks

So a line waits for at most one request of each other member. Staleness is counted in rounds of the same section, so
members in one line do not age in another one. A backward through several modules leads to several requests of one
version, in the order of sections. Since that is the same at all members, no two lines wait for each other.

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
    plan = group.plans.plan
    if plan is None or message.version > message.first or (not message.follows and not plan.section(message.section)):
        raise UnexpectedMessageError(f"{group.call(member_id)} requests a round that cannot be")
    group.check_round(max(message.first - 1, message.version - 1), "RequestRound")
    requests = group.requests
    if message.first <= requests.begun and member_id in requests.cohort:
        if not message.pushes:
            effects.send(group.connection_of(member_id), _grant_of(group, requests.cohort[member_id]))
        return
    requests.ask(member_id, message)


# ── when a round begins ───────────────────────────────────────────────────────────────────────────────


def is_due(group: Group) -> bool:
    """Tell whether the next round could begin, but for what it waits for."""
    if not group.requests.waiting or _is_open(group) or group.present_state() is not State.ACTIVE:
        return False
    return not group.sessions.away and not _gets_state(group)


def _is_open(group: Group) -> bool:
    """Tell whether a round has begun and is not over, so that the next one cannot begin."""
    open_round = group.rounds
    return group.requests.begun >= open_round.number or open_round.held is not None or bool(open_round.unsettled)


def _gets_state(group: Group) -> bool:
    """Tell whether the others wait for a learner that gets the state."""
    learners = group.learners.by_id.values()
    return any(one.stage is Stage.RECEIVING and not one.listens for one in learners)


def _with_data(group: Group) -> list[int]:
    """Return the members, and learners that contribute, that make requests: they have data."""
    following = group.requests.following
    return [member_id for member_id in group.contributors if member_id not in following]


def _could_come(group: Group, section: int) -> list[int]:
    """Return members with data that may contribute to the next round, if it is of ``section``.

    They are those in its line, and those that have requested nothing since that began.
    """
    requests, number = group.requests, group.rounds.number
    ready, line = requests.ready(number), requests.ready_in(number, section)
    began = min(requests.asked.get(member_id, 0) for member_id in line)
    absent = (one for one in _with_data(group) if one not in ready)
    waited_for = (one for one in absent if one in requests.waiting or requests.asked.get(one, -1) < began)
    return [*line, *waited_for]


def blockers(group: Group, section: int, has_room: bool = False) -> list[int]:
    """Return members that a round of ``section`` waits for, as it must not begin without them.

    With ``has_room`` it does not wait for members in another line that have room for little more.
    """
    ready, found = group.requests.ready(group.rounds.number), []
    for member_id in group.contributors:
        request = ready.get(member_id)
        if request is None:
            waits = _has_no_room(group, member_id) or _would_be_too_late(group, member_id, section)
        else:
            waits = request.section != section and (
                (not has_room and _has_no_room(group, member_id)) or _holds_up(group, member_id, section)
            )
        if waits:
            found.append(member_id)
    return found


def _holds_up(group: Group, member_id: int, section: int) -> bool:
    """Tell whether a member in another line holds a contribution to ``section`` that would be too old."""
    return section in group.requests.waiting[member_id].later and _would_be_too_late(group, member_id, section)


def _would_be_too_late(group: Group, member_id: int, section: int) -> bool:
    """Tell whether a contribution that a member computes now could not be taken any more, after one more round."""
    mode, requests = group.policy.mode, group.requests
    if mode.name is not ModeName.BOUNDED or member_id in requests.following:
        return False
    return not mode.takes(1 + requests.staleness_in(group.rounds.number, section, _version_of(group, member_id)))


def _has_no_room(group: Group, member_id: int) -> bool:
    """Tell whether a member might leave too much unread, if one more round of each section were done without it."""
    plan, requests = group.plans.plan, group.requests
    assert plan is not None
    reached = max(requests.reached.get(member_id, 0), _entered(group, member_id))
    behind = group.rounds.number - reached
    if behind >= MAX_CUTS or not plan.is_shared:
        return behind >= MAX_CUTS or rounds.overruns(group, behind + 1)
    size = plan.section_bytes
    unread = (requests.sections.get(number, -1) for number in range(reached, group.rounds.number))
    nbytes = sum(size.get(section, plan.nbytes) for section in unread)
    return rounds.overruns(group, behind + len(plan.each), nbytes + plan.nbytes)


def _version_of(group: Group, member_id: int) -> int:
    """Return the version at which a member computes, or a lower one."""
    return max(group.requests.versions.get(member_id, 0), _entered(group, member_id))


def _entered(group: Group, member_id: int) -> int:
    """Return the first round that a member has come to."""
    learner = group.learners.by_id.get(member_id)
    entered = learner.round if learner is not None else group.members.first_rounds.get(member_id, 0)
    return max(group.plans.planned, entered)


def _applied(group: Group) -> int:
    """Return a number of rounds that all members have applied."""
    return min((group.requests.applied.get(member_id, 0) for member_id in group.contributors), default=0)


def has_quorum(group: Group, section: int) -> bool:
    """Tell whether as many members have requested a round of ``section`` as it needs."""
    lateness, line = group.policy.lateness, group.requests.ready_in(group.rounds.number, section)
    assert lateness is not None
    return len(line) >= min(lateness.needed(len(group.contributors)), len(_could_come(group, section)))


def _with_quorum(group: Group) -> set[int]:
    """Return the sections of which a round has as many requests as it needs."""
    return {section for section in group.requests.lines(group.rounds.number) if has_quorum(group, section)}


def _missing(group: Group) -> set[int]:
    """Return members that a line waits for, and that have requested nothing."""
    requests, number = group.requests, group.rounds.number
    ready, lines, found = requests.ready(number), requests.lines(number), set[int]()
    for section in lines:
        if not has_quorum(group, section):
            found.update(_could_come(group, section))
        found.update(blockers(group, section))
    if not lines:
        found.update(_with_data(group) or blockers(group, _last_section(group)))
    return found.difference(ready)


def is_news(group: Group) -> bool:
    """Tell whether requests wait for other members than noted, or other sections have as many as they need.

    While a round is open, nothing is news: what is noted holds for the next one.
    """
    requests = group.requests
    if is_due(group):
        return _missing(group) != requests.awaited.keys() or _with_quorum(group) != requests.graces.keys()
    return not _is_open(group) and bool(requests.awaited or requests.graces)


def note(registry: Registry, group: Group) -> None:
    """Note which members requests wait for. Where there are as many as a round needs, the others have their grace."""
    lateness, due = group.policy.lateness, is_due(group)
    assert lateness is not None
    ends = registry.now + lateness.grace if lateness.grace else None
    group.requests.wait_for(_missing(group) if due else (), registry.now)
    group.requests.grant_grace(_with_quorum(group) if due else (), ends)


def _last_section(group: Group) -> int:
    """Return the section of the round that ends all blocks: the first that exchanges anything."""
    plan = group.plans.plan
    assert plan is not None
    return next((number for number, nbytes in plan.section_bytes.items() if nbytes), plan.each[0].number)


def _next_section(group: Group) -> int | None:
    """Return the section of the round that can begin now; None if none can."""
    lines = list(group.requests.lines(group.rounds.number))
    if not lines:
        last = _last_section(group)
        return None if _with_data(group) or blockers(group, last) else last
    first = _with_those_before(group, lines[0])
    return next((section for section in lines if _can_begin_in(group, section, section in first)), None)


def _with_those_before(group: Group, section: int) -> set[int]:
    """Return ``section``, and those of lines with members that hold its round up."""
    ready, found, left = group.requests.ready(group.rounds.number), {section}, [section]
    while left:
        here = left.pop()
        before = {one.section for member_id, one in ready.items() if _holds_up(group, member_id, here)} - found
        found |= before
        left += before
    return found


def _can_begin_in(group: Group, section: int, has_room: bool) -> bool:
    if not has_quorum(group, section):
        return False
    line = group.requests.ready_in(group.rounds.number, section)
    all_are_ready = len(line) >= len(_could_come(group, section))
    grace_is_over = group.requests.graces.get(section, 0.0) is None
    return (all_are_ready or grace_is_over) and not blockers(group, section, has_room)


def can_begin(group: Group) -> bool:
    """Tell whether the next round can begin."""
    return is_due(group) and (_has_begun(group) or _next_section(group) is not None)


def begin(group: Group, effects: Effects) -> None:
    """Refuse requests that are too old. Begin the next round with the others, or with all members if none has data."""
    requests, number, mode = group.requests, group.rounds.number, group.policy.mode
    if _has_begun(group):
        pushing = sorted(requests.pushing(number))
        _begin_with(group, pushing, requests.waiting[pushing[0]].section if pushing else -1, effects)
        return
    section = _next_section(group)
    assert section is not None
    ready = requests.ready_in(number, section)
    stale = {one: requests.staleness_in(number, section, message.version) for one, message in ready.items()}
    for member_id in sorted(one for one, staleness in stale.items() if not mode.takes(staleness)):
        _tell_of_refusal(group, member_id, stale[member_id], requests.refuse(number, member_id), effects)
        effects.send(group.connection_of(member_id), Granted(number, True, _applied(group), section, stale[member_id]))
    cohort = sorted(ready.keys() & requests.waiting.keys())
    if not cohort and (ready or _with_data(group)):
        return
    _begin_with(group, cohort or sorted(requests.waiting), section, effects)


def _has_begun(group: Group) -> bool:
    """Tell whether an earlier coordinator has begun the next round, and could not write that, as when its disk is full.

    The results that members hold of it have the contributions of that time, and so must the others. Members of then
    that are here push, and have said so.
    """
    return group.requests.unrecorded == group.rounds.number


def _begin_with(group: Group, cohort: Sequence[int], section: int, effects: Effects) -> None:
    """Begin the next round, of ``section``, with the contributions of ``cohort``, and cut off all others."""
    requests, number = group.requests, group.rounds.number
    others = sorted(set(group.contributors).difference(cohort))
    requests.begin(number, cohort, section)
    group.rounds.close_without(number, others)
    journal.begun(group, number, requests.cohort, others, section, effects)
    if others:
        rounds.cut(group, number, others, effects)
    for member_id in cohort:
        effects.send(group.connection_of(member_id), _grant_of(group, requests.cohort[member_id]))


def _grant_of(group: Group, version: int) -> Granted:
    """Return the answer that a contribution of ``version`` counts in the latest round."""
    requests = group.requests
    number, section = requests.begun, requests.sections[requests.begun]
    staleness = requests.staleness_in(number, section, version)
    return Granted(number, False, _applied(group), max(section, 0), staleness)


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
    """Return when requests have waited long enough for a member."""
    awaited = group.requests.awaited
    return min(awaited.values()) + group.round_timeout if awaited and is_due(group) else None


def overdue(registry: Registry, group: Group, effects: Effects) -> None:
    """Go on without members that make no request; break a group that needs them."""
    since = registry.now - group.round_timeout
    missing = [member_id for member_id, at in sorted(group.requests.awaited.items()) if at <= since]
    what = f"round {group.rounds.number} waited {group.round_timeout:g} s (--round-timeout) for its request"
    group.requests.wait_again(missing, registry.now)
    if group.policy.needs_all:
        members.halt(group, _nothing_came(group, missing), effects)
        return
    for member_id in missing:
        connection = group.connection_of(member_id)
        effects.evict(connection, group.left_out(member_id, what), why=what)


def awaited(group: Group) -> set[int]:
    """Return connections of members that others wait for, to make a request or to push what they were granted."""
    requests = group.requests
    if not group.policy.mode.grants or not requests.waiting:
        return set()
    if requests.begun == group.rounds.number:
        return {group.connection_of(member_id) for member_id in requests.cohort}
    return {group.connection_of(member_id) for member_id in requests.awaited} if is_due(group) else set()


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
