"""Members that contribute something else than the others: they are named, evicted, or halt their group.

In the round in which a member is found to be far off (`gradserver.engine.control.outliers`):

    the policy   what happens
    ───────────  ─────────────────────────────────────────────────────────────────────────────────────────────────
    report       it is written down and logged, and the member hears of it
    leave-out    the same, and the member is evicted with an OutlierError: one in a round, the furthest off first
    halt         the same, and the group is broken

An evicted member departs like any other: what it holds is handed out again, and what it has given to open rounds
counts or not. It may not join under its name for `EVICTED_SECONDS`, so that no supervisor brings it back as it was
(`gradserver.engine.control.evicted`). A process with another name may join at once.

In some cases leave-out acts as report, and says why. `KEPT` has these, in the order in which they are looked at. As
soon as none applies to a member that is still off, it is evicted.

    the case                                               why
    ─────────────────────────────────────────────────────  ─────────────────────────────────────────────────────────
    the group is a sub-group                               its members are members of the parent as well
    fewer than MIN would be left                           it would wait for another worker, or end
    as many were evicted as would be left                  where half are off, the others may be the ones that are

Where leave-out could never act it is refused, when the coordinator starts or when the group is founded
(`check_policy`): in a group that needs all its members. With leave-out and halt contributions go over the
coordinator, as with audits: a group does not choose the planes direct and hierarchical, and ``--plane`` is refused. A
robust mean needs a number of members, which MIN has (`Policy.check_mean`). Modes, shards, audits and sections are as
with any departure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gradserver.engine.control import journal, members
from gradserver.engine.control.group import Group
from gradserver.engine.control.outliers import ADVICE, Verdict
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.figures import Figures
from gradserver.engine.policy import OnOutlier, Policy
from gradserver.engine.records import RoundRecord
from gradserver.protocol.errors import InvalidArgumentError, OutlierError
from gradserver.protocol.messages import Notice


class Kept(NamedTuple):
    """A case in which leave-out evicts no member. ``why`` is a part of a sentence."""

    holds: Callable[[Group], bool]
    why: Callable[[Group], str]


KEPT: Final = (
    Kept(
        lambda group: group.origin is not None,
        lambda _: "it is a sub-group, and its workers are also in the parent",
    ),
    Kept(
        lambda group: len(group.members.by_id) <= group.policy.minimum,
        lambda group: f"it has {len(group.members.by_id)} workers, and needs {group.policy.minimum}",
    ),
    Kept(
        lambda group: len(group.watch.evicted) + 2 > len(group.members.by_id),
        lambda group: (
            f"{len(group.watch.evicted)} were evicted before, and {len(group.members.by_id)} are left: "
            f"look at what they have in common"
        ),
    ),
)
"""Cases in which a group keeps all its members."""


def why_kept(group: Group) -> str:
    """Return why leave-out evicts no member of the group now; empty if it does, or if that is not the policy."""
    if group.policy.outliers is not OnOutlier.LEAVE_OUT:
        return ""
    return next((case.why(group) for case in KEPT if case.holds(group)), "")


def check_policy(policy: Policy, group: str = "") -> None:
    """Raise InvalidArgumentError if a group is to evict members that are far off, and needs all that it has."""
    if policy.outliers is OnOutlier.LEAVE_OUT and not 0 < policy.minimum < policy.maximum:
        named = f"group {group!r}: " if group else ""
        needed = (
            f"the group needs all its {policy.minimum} workers" if policy.minimum else "a group needs all its workers"
        )
        raise InvalidArgumentError(
            f"{named}outliers is 'leave-out', which evicts a worker, and {needed}: make it elastic, such as --workers "
            f"2:8, or choose 'report' or 'halt'"
        )


def describe(group: Group) -> dict[str, object]:
    """Return the policy as plain JSON values, why it evicts no member now, and those that it has evicted."""
    evicted = {name: one.error.message for name, one in group.watch.evicted.items()}
    kept = why_kept(group) if group.begun else ""
    return {"outliers": {"policy": str(group.policy.outliers), "keeps_all": kept, "evicted": evicted}}


def compare(registry: Registry, group: Group, record: RoundRecord, figures: Figures, effects: Effects) -> None:
    """Take the figures of a round that all shards are done with."""
    if not figures.members or group.broken is not None:
        return
    known = tuple(one for one in figures.members if one.member_id in group.members.by_id)
    weights = dict(enumerate(record.weights))
    found = group.watch.take(Figures(known, figures.buckets), weights, record.section)
    worst = _to_evict(group, found.off)
    for verdict in found.new:
        if verdict is not worst:
            _name(group, record.round, verdict, effects)
    for member_id in found.cleared:
        effects.log(f"{group.call(member_id)} of group {group.name!r} is in line again: its gradients are as usual")
        journal.outlier(group, record.round, Verdict(member_id, 1.0, 0.0, 0), effects, off=False)
    if worst is not None:
        _evict(registry, group, record.round, worst, effects)


def _to_evict(group: Group, off: list[Verdict]) -> Verdict | None:
    """Return the verdict about the member that is to go: of those that are off, the one that is furthest off."""
    if group.policy.outliers is not OnOutlier.LEAVE_OUT or why_kept(group):
        return None
    return max(off, key=lambda one: one.distance, default=None)


def _found(group: Group, number: int, verdict: Verdict) -> str:
    """Say what was found."""
    called = group.call(verdict.member_id)
    return f"round {number} of group {group.name!r}: the gradients of {called} are far off: {verdict}"


def _name(group: Group, number: int, verdict: Verdict, effects: Effects) -> None:
    """Name a member that is far off and stays, and halt the group if that is its policy."""
    policy, member_id = group.policy.outliers, verdict.member_id
    found, becomes = _found(group, number, verdict), "they count"
    if policy is OnOutlier.LEAVE_OUT:
        becomes += f", as {why_kept(group) or 'another worker is further off'}"
    becomes = "the group halts" if policy is OnOutlier.HALT else becomes
    effects.log(f"{found}; {becomes} (--outliers {policy}). {ADVICE}", warning=True)
    journal.outlier(group, number, verdict, effects)
    if policy is OnOutlier.HALT:
        members.halt(group, _error(group, member_id, f"{found} (--outliers halt). {ADVICE}", number), effects)
        return
    effects.send(group.connection_of(member_id), Notice(f"{found}; {becomes}. {ADVICE}"))


def _evict(registry: Registry, group: Group, number: int, verdict: Verdict, effects: Effects) -> None:
    """Go on without a member that is far off."""
    member_id, name = verdict.member_id, group.members.identities.names[verdict.member_id]
    text = f"{_found(group, number, verdict)}; the others go on without it (--outliers leave-out). {ADVICE}"
    effects.log(text, warning=True)
    group.watch.evict(member_id, name, _error(group, member_id, text, number), registry.now)
    journal.outlier(group, number, verdict, effects, evicted=name)
    why = f"its gradients were far off: {verdict} (--outliers leave-out)"
    connection = group.connection_of(member_id)
    if connection < 0:  # its connection broke meanwhile: it hears of this when it comes back
        members.remove(registry, group, member_id, why, registry.now, effects)
    else:
        effects.evict(connection, group.watch.evicted[name].error, why=why)


def _error(group: Group, member_id: int, text: str, number: int) -> OutlierError:
    identities = group.members.identities
    return OutlierError(text, worker=identities.names[member_id], rank=identities.rank(member_id), round=number)
