"""Slow workers: the one that holds its group up in most rounds is named in the log, and the status has figures.

A worker is named when it came last in three quarters of the last `_WINDOW` rounds. Each time the others have waited for
it, for a fifth of the round and `_MATERIAL` seconds at least. Every `_EVERY` rounds this is looked at. The same worker
is not named again for ten minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Final

from gradserver.engine.control.group import Group
from gradserver.engine.effects import Effects
from gradserver.engine.lateness import BEGAN_LATE, SENT_SLOWLY, lags, pace, shares, slowest
from gradserver.engine.records import RoundRecord

_SHOWN: Final = 50
"""Rounds of which the status has figures."""
_WINDOW, _EVERY = 16, 8
_MATERIAL: Final = 0.05
_SHARE: Final = 0.2
_QUIET_SECONDS: Final = 600.0
_REMEDIES: Final = {
    BEGAN_LATE: "It computes longer than the others: look at its processor, its data and its batch size, give it less "
    "(balance=), or let rounds end without it (--quorum)",
    SENT_SLOWLY: "Its gradients take longer on their way: look at its link (gradserver doctor), or send less (wire=)",
}


def look(group: Group, now: float, effects: Effects) -> None:
    """Name the worker that has held the group up in most of the last rounds, if there is one."""
    if group.rounds.number % _EVERY or len(group.members.by_id) < 2:
        return
    records = _last(group, _WINDOW)
    late: dict[int, list[tuple[float, str]]] = {}
    for record in records:
        found = lags(record)
        last = slowest(found)
        joined = group.members.first_rounds.get(last, 0)
        if last >= 0 and found[last].cause and record.round >= joined and found[last].seconds >= _material(record):
            late.setdefault(last, []).append((found[last].seconds, found[last].cause))
    for member_id, each in late.items():
        often = len(each) >= max(3 * len(records) // 4, _EVERY - 1)
        if often and member_id in group.members.by_id and group.slow.may_name(member_id, now, _QUIET_SECONDS):
            seconds, cause = median(one for one, _ in each), _most([cause for _, cause in each])
            effects.log(
                f"{group.call(member_id)} holds group {group.name!r} up: in {len(each)} of the last {len(records)} "
                f"rounds the others waited for it, {seconds:.2g} s each time; it {cause}. {_REMEDIES[cause]}",
                warning=True,
            )


def _material(record: RoundRecord) -> float:
    return max(_MATERIAL, _SHARE * (record.completed - record.opened))


def _most(causes: Sequence[str]) -> str:
    return max(_REMEDIES, key=causes.count)


def _last(group: Group, count: int) -> list[RoundRecord]:
    """Return the last rounds, in their order."""
    return list(islice(reversed(group.rounds.ledger), count))[::-1]


def describe(group: Group, members: list[dict[str, object]]) -> dict[str, object]:
    """Return how long rounds take, and in how many of them it is known which worker came last: plain JSON values.

    Each of ``members`` gets the time for which the others have waited for it.
    """
    records = _last(group, _SHOWN)
    known, found = shares(records, group.members.first_rounds)
    for member, member_id in zip(members, group.members.by_id, strict=True):
        if (one := found.get(member_id)) is not None:
            member["held_up"] = {"rounds": one.rounds, "seconds": round(one.seconds, 3), "cause": one.cause}
    return {"pace": {"rounds": len(records), "known": known, "seconds": pace(records)}}
