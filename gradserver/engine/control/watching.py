"""Members that contribute something else than the others: they are named, left out, or halt their group.

    the policy   in the round in which a member is found to be far off
    ───────────  ─────────────────────────────────────────────────────────────────────────────────────────────────
    report       it is written down and logged, and told to the member
    leave-out    … and its contributions have weight 0, from the next round that no shard has begun
    leave-out    … as report, if half of the members are left out already, or which of two is off cannot be told
    halt         … and the group is broken

A member that is left out gets all results. It is so until it departs: nothing more is measured of it.
"""

from __future__ import annotations

from gradserver.engine.control import journal, members
from gradserver.engine.control.group import Group
from gradserver.engine.control.outliers import Verdict
from gradserver.engine.effects import Effects
from gradserver.engine.figures import Figures
from gradserver.engine.orders import LeaveOut
from gradserver.engine.policy import OnOutlier
from gradserver.engine.records import RoundRecord
from gradserver.protocol.errors import OutlierError
from gradserver.protocol.messages import Notice

_ADVICE = "Look at that worker's GPU, its data, and the scale of its loss"


def compare(group: Group, record: RoundRecord, figures: Figures, effects: Effects) -> None:
    """Take the figures of a round that all shards are done with."""
    if not figures.members or group.broken is not None:
        return
    known = [one for one in figures.members if one.member_id in group.members.by_id]
    fresh, cleared = group.watch.take(Figures(tuple(known), figures.buckets), dict(enumerate(record.weights)))
    for verdict in fresh:
        _name(group, record.round, verdict, effects)
    for member_id in cleared:
        if member_id not in group.watch.left_out:
            effects.log(f"{group.call(member_id)} of group {group.name!r} is in line again: its gradients are as usual")
            journal.outlier(group, record.round, Verdict(member_id, 1.0, 0.0, 0), False, False, effects)


def order(group: Group, number: int) -> LeaveOut:
    """Return what data halves are told of members that are left out."""
    return LeaveOut(group.name, tuple(sorted(group.watch.left_out)), number)


def _name(group: Group, number: int, verdict: Verdict, effects: Effects) -> None:
    """Name a member that is far off, and act by the policy."""
    policy, member_id = group.policy.outliers, verdict.member_id
    is_left_out = policy is OnOutlier.LEAVE_OUT and not verdict.contrary and _can_spare(group)
    found = f"round {number} of group {group.name!r}: the gradients of {group.call(member_id)} are far off: {verdict}"
    if verdict.contrary:
        found += ". It and the only other worker point away from each other: one of the two is wrong"
    becomes = "they have weight 0 from the next round on" if is_left_out else "they count"
    if policy is OnOutlier.LEAVE_OUT and not is_left_out:
        becomes = "they count, as too few others are left to tell that it is the one that is wrong"
    becomes = "the group halts" if policy is OnOutlier.HALT else becomes
    effects.log(f"{found}; {becomes} (--outliers {policy}). {_ADVICE}", warning=True)
    journal.outlier(group, number, verdict, True, is_left_out, effects)
    if policy is OnOutlier.HALT:
        identities = group.members.identities
        facts = {"worker": identities.names[member_id], "rank": identities.rank(member_id)}
        members.conflict(group, OutlierError(f"{found} (--outliers halt). {_ADVICE}", **facts, round=number), effects)
        return
    if is_left_out:
        group.watch.leave_out(member_id)
        group.order(order(group, number + 1), effects)
    effects.send(group.connection_of(member_id), Notice(f"{found}; {becomes}. {_ADVICE}"))


def _can_spare(group: Group) -> bool:
    """Tell whether half of the members still count when one more is left out."""
    return 2 * (len(group.watch.left_out) + 1) <= len(group.members.by_id)
