"""Lateness of members in a round: the seconds by which each came behind the others, where it is the cause itself.

Only slices that wait for no result of another member tell. The data half leaves out the others
(`gradserver.engine.data.rounds`). What is late then has one of these causes:

    the first slice                       the last slice   the others' last slices    cause
    ────────────────────────────────────  ───────────────  ─────────────────────────  ─────────────
    late by half of the lag, or more      late                                        began late
    else                                  late                                        sent slowly
    late                                  in time          before its first slice     none: in time
    late                                  in time          behind its first slice     unknown

In the last case the member has caught up, or the others have waited for its first slice: a script may wait for one
bucket before it gives the next one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Final, NamedTuple

from gradserver.engine.medians import median_without
from gradserver.engine.records import RoundRecord

BEGAN_LATE: Final = "began late"
SENT_SLOWLY: Final = "sent slowly"
UNKNOWN: Final = "unknown"
NO_MEMBER: Final[Mapping[int, int]] = MappingProxyType({})
_TOLD_SHARE, _TOLD_SECONDS = 0.05, 0.001
"""Lag, as a share of the round and in seconds, below which a member is not late."""


class Lag(NamedTuple):
    """Lag of one member behind the median of the others, and its ``cause``: empty if the member is not late."""

    seconds: float
    cause: str


class Share(NamedTuple):
    """Part of one member in the time of some rounds.

    Attributes:
        rounds: in how many the others waited for it: it came last, and was late.
        seconds: how long they waited, in all these together.
        cause: the cause in most of them; empty if there are none.
    """

    rounds: int = 0
    seconds: float = 0.0
    cause: str = ""


def was_there(record: RoundRecord, member_id: int) -> bool:
    """Return whether a member contributed anything. A member that has left an elastic group keeps its place."""
    return bool(record.weights[member_id]) or record.arrivals[member_id] != (record.opened, record.opened)


def lags(record: RoundRecord) -> dict[int, Lag]:
    """Return the lag of each member that has one: none if it is not known when members gave what waits for nothing."""
    times = {
        member_id: (first, last)
        for member_id, (first, last) in enumerate(record.arrivals)
        if last is not None and was_there(record, member_id)
    }
    if len(times) < 2:
        return {}
    least = max(_TOLD_SHARE * (record.completed - record.opened), _TOLD_SECONDS)
    firsts, lasts = (sorted(each) for each in zip(*times.values(), strict=True))
    found = {}
    for member_id, (first, last) in times.items():
        others_ended = median_without(lasts, last)
        began, ended = first - median_without(firsts, first), last - others_ended
        if ended >= least:
            cause = BEGAN_LATE if began >= ended / 2 else SENT_SLOWLY
        else:
            cause = UNKNOWN if began >= least and others_ended > first else ""
        found[member_id] = Lag(max(ended, 0.0), cause)
    return found


def slowest(found: Mapping[int, Lag]) -> int:
    """Return the member that came last; -1 if that is not known."""
    if not found or any(lag.cause == UNKNOWN for lag in found.values()):
        return -1
    return max(found, key=lambda member_id: found[member_id].seconds)


def shares(records: Iterable[RoundRecord], since: Mapping[int, int] = NO_MEMBER) -> tuple[int, dict[int, Share]]:
    """Return in how many of these rounds the lags are known, and the part of each member for which others waited.

    A member that joined has part in rounds ``since`` its first one: its id may have been another member's before.
    """
    known, causes, seconds = 0, defaultdict[int, Counter[str]](Counter), defaultdict[int, float](float)
    for record in records:
        found = lags(record)
        last = slowest(found)
        known += last >= 0
        if last >= 0 and found[last].cause and record.round >= since.get(last, 0):
            causes[last][found[last].cause] += 1
            seconds[last] += found[last].seconds
    return known, {one: Share(of.total(), seconds[one], of.most_common(1)[0][0]) for one, of in causes.items()}


def pace(records: Iterable[RoundRecord]) -> float | None:
    """Return the seconds from the end of one round to that of the next, the median; None if there is no such pair."""
    ends = [record.completed for record in records]
    return median(later - earlier for earlier, later in pairwise(ends)) if len(ends) > 1 else None
