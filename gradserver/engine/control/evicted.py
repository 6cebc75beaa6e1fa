"""Workers that were evicted, as they were far off: none comes back by itself, or soon.

    what one does                                        what it is told
    ───────────────────────────────────────────────────  ──────────────────────────────────────────────────────────
    Resume, as its connection broke in that moment       OutlierError, as on the connection that it had
    Join with its name, before `EVICTED_SECONDS` passed  JoinRefusedError, with what was found and the time to wait
    … later, or with another name                        it joins like any other, and is measured anew

A denial ends by itself, as with peers of libp2p: a worker that was mended need not be pardoned by anybody. It holds for
the life of the group, also behind another coordinator, which counts the time anew.
"""

from __future__ import annotations

from gradserver.engine.control.group import Group
from gradserver.protocol.errors import JoinRefusedError


def check_join(group: Group, name: str, now: float) -> None:
    """Raise JoinRefusedError if a worker with this ``name`` was evicted, and not long ago."""
    evicted = group.watch.evicted.get(name)
    if evicted is not None and now < evicted.until:
        raise JoinRefusedError(
            f"{evicted.error.message}. A worker called {name!r} may join again in {evicted.until - now:.0f} s, and one "
            f"with another name now"
        )


def check_return(group: Group, member_id: int) -> None:
    """Raise OutlierError if the worker that comes back as ``member_id`` was evicted meanwhile."""
    if group.is_inside(member_id):
        return
    names = group.members.identities.names
    name = names[member_id] if member_id < len(names) else ""  # an earlier coordinator may have given that id
    for evicted_name, one in group.watch.evicted.items():
        if one.member_id == member_id and name in ("", evicted_name):
            raise one.error.again()
