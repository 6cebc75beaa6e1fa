"""Groups that wait for workers say so: to the log of the coordinator, and to each worker that waits.

`gradserver.engine.control.group.applicants` has the times. Sub-groups are silent: their members train in the parent,
and come when their scripts come to the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gradserver.engine.control.group import Applicant, Group
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.protocol.limits import MAX_TEXT
from gradserver.protocol.messages import Notice

_MOST_NAMED: Final = 8
"""Number of workers, or of groups, that are named."""
_LONGEST: Final = MAX_TEXT - 1000
"""Characters of a text that leave place for the patience of a worker."""


def deadline(group: Group) -> float | None:
    """Return when the applicants are to hear that they wait."""
    return None if group.origin is not None else group.applicants.tells_at


def tell(registry: Registry, group: Group, effects: Effects) -> None:
    """Tell log and applicants which workers are there, how many are missing, and which other groups have workers."""
    waiting = group.applicants.waiting
    group.applicants.tell_again(registry.now)
    waited = registry.now - min(applicant.since for applicant in waiting)
    text = (
        f"group {group.name!r} has waited for workers for {waited:.0f} s: {len(waiting)} of {group.policy} came: "
        f"{_called(waiting)}{_missing(group)}{_elsewhere(registry, group)}"
    )
    effects.log(text, warning=True)
    for applicant in waiting:
        left = applicant.deadline - registry.now
        patience = f"This worker waits for another {left:.0f} s, as timeout={applicant.join.timeout:g} of connect says"
        effects.send(applicant.connection, Notice(f"{text[:_LONGEST]}. {patience}"))


def _called(applicants: Sequence[Applicant]) -> str:
    names = [repr(one.join.name) + (f" (rank {one.join.rank})" if one.join.rank >= 0 else "") for one in applicants]
    return _listed(names)


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _missing(group: Group) -> str:
    """Name the ranks that are missing, if each worker has said its rank."""
    ranks = {applicant.join.rank for applicant in group.applicants.waiting}
    absent = [str(rank) for rank in range(group.members.world) if rank not in ranks]
    if group.policy.is_elastic or -1 in ranks or not absent:
        return ""
    return f"; missing: rank{'s' * (len(absent) > 1)} {_listed(absent)}"


def _elsewhere(registry: Registry, group: Group) -> str:
    """Say which other groups here have workers: perhaps the missing ones have come to a group of another name."""
    others = [one for one in registry.groups.values() if one is not group and one.origin is None]
    told = []
    for other in others:
        names = [applicant.join.name for applicant in other.applicants.waiting]
        names += [member.name for member in other.members.by_id.values()]
        if names:
            told.append(f"group {other.name!r} has {_listed([repr(name) for name in names])}")
    return f". This coordinator also serves: {'; '.join(told[:_MOST_NAMED])}" if told else ""
