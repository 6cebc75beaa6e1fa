"""Rounds that control grants: the members that contribute are known before, and the others wait for these.

A round that waits for a bucket has that bucket's deadline. A member that was granted a round, and gives nothing to it,
opens no bucket. So it has a deadline of its own.
"""

from __future__ import annotations

from gradserver.engine.data.group import Group
from gradserver.engine.data.membership import left_out
from gradserver.engine.effects import Effects
from gradserver.engine.reports import Halted
from gradserver.protocol.errors import DeadlineError
from gradserver.protocol.exchange import BUCKET, ExchangeKey


def silent_since(group: Group) -> float | None:
    """Return the time since which nothing has come to a round that members were granted, and that others wait for.

    None if there is none, or the group is halted, or a bucket waits for a member: that has a deadline of its own.
    """
    if (awaited := group.stragglers.awaited) is None or group.plan is None or group.buckets_halted is not None:
        return None
    number, since = awaited
    if not _full(group, number) or any(key.number == number for key in group.exchanges):
        return None
    current = group.rounds.get(number)
    return max([since, *(last for _, last in current.arrivals.values())]) if current is not None else since


def _full(group: Group, number: int) -> int:
    """Return the number of buckets that a member gives to a round here; 0 if its section is not known."""
    assert group.plan is not None
    current = group.rounds.get(number)
    section = group.stragglers.section_of(number) if current is None else current.section
    if section < 0 and not group.plan.is_shared:
        section = group.plan.each[0].number
    return group.full_buckets.get(section, 0)


def leave_silent_out(group: Group, now: float, effects: Effects) -> None:
    """Have members evicted that were granted a round, and give nothing to it; end a group that needs them."""
    since, timeout = silent_since(group), group.order.round_timeout
    if since is None or since + timeout > now:
        return
    number, _ = group.stragglers.begun
    group.stragglers.begin(number, now)
    any_bucket = ExchangeKey(BUCKET, number, 0)
    current, full = group.rounds.get(number), _full(group, number)
    here = [one for one in group.participants(any_bucket) if not group.stragglers.is_closed(one, any_bucket)]
    silent = [one for one in here if current is None or current.given.get(one, 0) < full]
    if group.order.needs_all:
        error = DeadlineError(
            f"round {number} waited {timeout:g} s (--round-timeout) for {group.members.calls(silent)}",
            missing=tuple(group.call(member_id) for member_id in silent),
            round=number,
        )
        effects.report(Halted(group.order.group, error, True))
        return
    for member_id in silent:
        what = f"it was granted round {number}, and gave nothing to it for {timeout:g} s (--round-timeout)"
        effects.report(left_out(group, member_id, what))
