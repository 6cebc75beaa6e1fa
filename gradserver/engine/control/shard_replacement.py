"""Replacement of a lost data shard of a durable group by another process.

Slices of a round in flight are named by the table with which the group began. So the table stays, and with it the
number of shards. The process that comes has the lost one's slices, and knows nothing of them. Members hold what it
knew. All of them come back, since they had a connection to it. Then the group recovers
(`gradserver.engine.control.recovery`).

    place     event                                     next      what happens
    ────────  ────────────────────────────────────────  ────────  ──────────────────────────────────────────────────────
    (none)    Restored                                  VACANT    no shard has enlisted with this coordinator
    VACANT    … and the group is a sub-group            VACANT    it takes those that its parent has
    SERVING   its connection breaks                     VACANT    members that come back wait to be told to go on
    VACANT    there is a shard that the group lacks     SERVING   it is told of the group
    VACANT    … and no other place is vacant            SERVING   … and a recovery begins: Resumed to all
    VACANT    none came for a second                    VACANT    Hire, each second: another process beside this one
    VACANT    none came for the group's timeout         (none)    DeadlineError to all members: the group is broken

Of a group that was restored time counts from the first member on that comes back.
"""

from __future__ import annotations

from functools import partial

from gradserver.engine.control.group import Group
from gradserver.engine.control.recovery import begin_if_due
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.restore import reopen
from gradserver.engine.effects import Effects
from gradserver.protocol.errors import DeadlineError


def lost(group: Group, place: int, now: float, effects: Effects) -> None:
    """Wait for another process in the ``place`` of a shard."""
    group.shards.lose(place)
    group.recovery.await_shard()
    group.shards.miss(now)
    group.sessions.allow(now + group.policy.missing)
    effects.log(f"group {group.name!r} waits for another process in the place of {group.shards.urls[place]}")


def fill(registry: Registry, group: Group, effects: Effects) -> None:
    """Give vacant places to shards that the group does not use, each to the one that had it, if possible."""
    roster = registry.roster.shards
    parent = registry.parent_of(group)  # members reach no shards but its
    among = roster if parent is None else [one for one in parent.shards.connections if one in roster]
    spare = [connection for connection in among if connection not in group.shards.connections]
    for place in sorted(group.shards.lacking):
        if not spare:
            break
        connection = next((one for one in spare if roster[one].url == group.shards.urls[place]), spare[0])
        spare.remove(connection)
        if group.plans.is_lossy:
            group.recovery.lose_residuals()
        group.shards.fill(place, connection, roster[connection].url)
        order = partial(group.shards.order_one, place, effects=effects)
        reopen(registry, group, order, place + 1)
        what = f"data shard {roster[connection].number} at {group.shards.urls[place]} takes place {place + 1}"
        effects.log(f"group {group.name!r}: {what}")
    if not group.shards.lacking:
        begin_if_due(registry, group, registry.now, effects)


def deadline(group: Group) -> float | None:
    """Return when the group has lacked data shards for too long."""
    return None if group.shards.lacking_since is None or group.broken else group.shards.lacking_since + group.timeout


def overdue(group: Group) -> DeadlineError:
    """Return what members are told when no process has come in the place of a lost shard."""
    places = ", ".join(group.shards.urls[place] or f"shard {place + 1}" for place in sorted(group.shards.lacking))
    return DeadlineError(
        f"group {group.name!r} lacks data shards ({places}), and no process has taken their place within "
        f"{group.timeout:g} s: start as many with `gradserver serve --join`"
    )


def hire_deadline(group: Group) -> float | None:
    """Return when another process is to be started in the place of a lost shard."""
    return None if group.shards.hire_at is None or group.broken else group.shards.hire_at
