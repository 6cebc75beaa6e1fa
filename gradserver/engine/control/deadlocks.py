"""Members that all wait for something which only another waiting member could give: the group halts at once.

A worker tells (`Blocked`) when all its threads have waited for a second, and for what. A wait with a limit of its own
does not count. When all members have told, they are asked twice whether they still wait:

    a member's word                                   what happens
    ────────────────────────────────────────────────  ────────────────────────────────────────────────────────────
    it waits, and another member has not said so      it is kept
    it waits, and so do all others                    all are asked (`Recheck`)
    its answer, and another one's is still due        it is kept
    the last answer to the first check                all are asked again
    the last answer to the second check               if each wait lacks a member, the group halts: DeadlockError
    its serial is another one, or it goes on          the check ends
    a member departs, or loses its connection         the check ends

Before a worker answers, it asks each data shard, which answers behind all that it has sent there. So when all have
answered the first check, no push is on its way, as no thread has gone on since. What the answers to the second check
lack, no member will give. A wait that ends by itself, as by a quorum or a grace, lacks no member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gradserver.engine.control import members, requests
from gradserver.engine.control.group import Group, State
from gradserver.engine.control.group.blocked import Step
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.protocol.errors import DeadlockError, UnexpectedMessageError
from gradserver.protocol.messages.waiting import MAX_WAITS, Blocked, Cause, Recheck

_MOST_NAMED: Final = 8
"""Members that an error names."""
_REMEDY: Final = (
    "All workers must make the same calls in the same order: one may have left a loop, or taken another branch, before "
    "the others. Loops over unequal numbers of batches belong into model.join(optimizer)"
)


def hear(registry: Registry, group: Group, member_id: int, word: Blocked, effects: Effects) -> None:
    """Take the word of a member that waits, or goes on."""
    if group.origin is not None or not len(word.causes) == len(word.whats) == len(word.missing) <= MAX_WAITS:
        raise UnexpectedMessageError(f"{group.call(member_id)} says in a wrong way that it waits")
    if member_id not in group.members.by_id:
        return  # a learner gives nothing that members wait for here
    step = group.blocked.hear(member_id, word, group.members.by_id)
    if step is Step.NOTHING or not _is_calm(registry, group):
        group.blocked.stop() if step is not Step.NOTHING else None
        return
    if step is Step.ASK:
        for member in group.members.by_id.values():
            effects.send(member.connection, Recheck(group.blocked.check))
        return
    waits = [_wait_of(registry, group, one) for one in sorted(group.members.by_id)]
    if all(waits):
        _halt(registry, group, [text for text in waits if text], effects)


def _is_calm(registry: Registry, group: Group) -> bool:
    """Tell whether nothing but a member could let the others go on."""
    return all(
        one.state is State.ACTIVE
        and not (one.sessions.away or one.configuration.changes or one.plans.unconfirmed or one.learners.queue)
        for one in (group, *_subgroups(registry, group))
    )


def _subgroups(registry: Registry, parent: Group) -> Iterator[Group]:
    """Yield sub-groups that have begun, and are not broken."""
    for group in registry.groups.values():
        if group.origin is not None and group.origin.parent == parent.name and group.begun and group.broken is None:
            yield group


# ── what a wait lacks ─────────────────────────────────────────────────────────────────────────────────


def _wait_of(registry: Registry, group: Group, member_id: int) -> str:
    """Say for what a member waits, and which others that lacks; empty if one of its waits may end by itself."""
    word = group.blocked.said[member_id]
    texts = []
    for cause, what, missing in zip(word.causes, word.whats, word.missing, strict=True):
        lacks = _LACKS[Cause(cause)](registry, group, member_id) if cause > Cause.BUCKET else missing
        is_closed = cause == Cause.BUCKET and group.leaves_late and not group.policy.mode.grants
        if not lacks or is_closed or any(group.call(learner) in lacks for learner in group.learners.by_id):
            return ""
        texts.append(f"{what}, which lacks {lacks}")
    return f"{group.call(member_id)} waits for {'; and for '.join(texts)}"


def _lacks_proposals(_: Registry, group: Group, member_id: int) -> str:
    proposals = group.plans.proposals
    if member_id not in proposals:
        return ""
    return group.calls(one for one in group.members.by_id if one not in proposals)


def _lacks_requests(_: Registry, group: Group, member_id: int) -> str:
    """Name the members without a request that the next round waits for, unless it begins after their grace."""
    found = group.requests
    if member_id not in found.waiting or found.grace_ends is not None or not requests.is_due(group):
        return ""
    return group.calls(found.awaited)


def _lacks_exchange(_: Registry, group: Group, member_id: int) -> str:
    following = group.turns.following
    if member_id not in following:
        return ""
    return group.calls(one for one in group.contributors if one not in following)


def _lacks_splits(registry: Registry, group: Group, member_id: int) -> str:
    for forming in registry.forming.values():
        origin = forming.origin
        if origin is None or origin.parent != group.name:
            continue
        there = {origin.member_ids[applicant.join.rank] for applicant in forming.applicants.waiting}
        if member_id in there:
            waits_for = (one for place, one in enumerate(origin.member_ids) if place not in origin.absent)
            return group.calls(one for one in waits_for if one not in there)
    return ""


_LACKS: Final[dict[Cause, Callable[[Registry, Group, int], str]]] = {
    Cause.PLAN: _lacks_proposals,
    Cause.REQUEST: _lacks_requests,
    Cause.FOLLOW: _lacks_exchange,
    Cause.SUBGROUP: _lacks_splits,
}
"""Members that a wait lacks, in words, for waits of which control itself knows."""


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────


def _halt(registry: Registry, group: Group, waits: list[str], effects: Effects) -> None:
    """Halt the group, and sub-groups in which its members wait."""
    more = f"; and {len(waits) - _MOST_NAMED} more" if len(waits) > _MOST_NAMED else ""
    told = "; ".join(waits[:_MOST_NAMED])
    error = DeadlockError(
        f"no worker of group {group.name!r} can go on, as each waits for another one: {told}{more}. {_REMEDY}",
        waits=tuple(waits),
    )
    for forming in registry.forming.values():
        if forming.origin is not None and forming.origin.parent == group.name:
            for applicant in forming.applicants.waiting:
                effects.evict(applicant.connection, error)
    for one in (*_subgroups(registry, group), group):
        members.halt(one, error, effects)
        one.note_state()
