"""What control does when a data shard of a durable group is lost: another process takes its place.

Slices of a round in flight are named by the table that the group was founded with, so that stays what it is, and with
it the number of shards: whoever comes has the lost one's slices, and knows nothing of them. Members hold what it knew,
and all of them come back, since they had a connection to it: then the group recovers
(`gradserver.engine.control.recovery`).

    place     event                                     next      what happens
    ────────  ────────────────────────────────────────  ────────  ──────────────────────────────────────────────────────
    (none)    Restored                                  VACANT    nobody has enlisted with this coordinator yet
    SERVING   its connection breaks                     VACANT    members who come back wait to be told that they may
    VACANT    there is a shard that the group lacks     SERVING   it is told of the group
    VACANT    … and no other place is vacant            SERVING   … and the books are opened: Resumed to all
    VACANT    nobody came for a second                  VACANT    Hire, each second: another process beside this one
    VACANT    nobody came for the group's timeout       (none)    DeadlineError to everybody, and the group is broken

Of a group that was restored time counts from the first member on that comes back.
"""

from __future__ import annotations

from typing import Final

from gradserver.engine.control.group import VACANT, Group
from gradserver.engine.control.recovery import begin_if_due
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.restore import reopen
from gradserver.engine.effects import Effects
from gradserver.engine.link import encode_order
from gradserver.engine.order_fields import Seat
from gradserver.engine.orders import Admit, RemoteOrder
from gradserver.engine.policy import Policy
from gradserver.protocol.errors import DeadlineError
from gradserver.protocol.messages import Ordered

HIRE_SECONDS: Final = 1.0
"""How long a place is kept for whoever had it, or offers himself."""


def vacate(group: Group, connection: int) -> int:
    """Give no more orders to the shard with this connection. Return its place."""
    place = group.shards.index(connection)
    group.shards = (*group.shards[:place], VACANT, *group.shards[place + 1 :])
    return place


def lost(group: Group, place: int, now: float, effects: Effects) -> None:
    """Wait for another process in the ``place`` of a shard."""
    group.lacking.add(place)
    group.recovering = True
    for void in (group.partial, group.caught_up, group.standing):
        void.clear()  # what it had reported is worth nothing without the others, and they do not get there without it
    missed(group, now)
    policy = group.policy or Policy(1)
    group.away = {seat: max(until, now + policy.missing) for seat, until in group.away.items()}
    effects.log(f"group {group.name!r} waits for another process in the place of {group.urls[place]}")


def missed(group: Group, now: float) -> None:
    """Somebody is here who needs the shards that the group lacks."""
    if group.lacking and group.lacking_since is None:
        group.lacking_since, group.hire_at = now, now + HIRE_SECONDS


def fill(registry: Registry, group: Group, effects: Effects) -> None:
    """Give vacant places to shards that the group does not use, each to the one that had it, if possible."""
    roster = registry.roster.shards
    spare = [connection for connection in roster if connection not in group.shards]
    for place in sorted(group.lacking):
        if not spare:
            break
        connection = next((one for one in spare if roster[one].url == group.urls[place]), spare[0])
        spare.remove(connection)
        group.lacking.discard(place)
        group.owed_nothing = group.owed_nothing or group.is_lossy
        group.shards = (*group.shards[:place], connection, *group.shards[place + 1 :])
        group.urls = (*group.urls[:place], roster[connection].url, *group.urls[place + 1 :])
        orders = list[RemoteOrder](reopen(registry, group, place + 1))
        for seat, joiner in group.learners.items():
            orders.append(Admit(group.name, seat, Seat(-1, joiner.join.name), joiner.token))
        for order in orders:
            effects.send(connection, Ordered(), (encode_order(order),))
        what = f"data shard {roster[connection].number} at {group.urls[place]} takes place {place + 1}"
        effects.log(f"group {group.name!r}: {what}")
    if not group.lacking:
        group.lacking_since = group.hire_at = None
        begin_if_due(registry, group, registry.now, effects)


def deadline(group: Group) -> float | None:
    """Return when the group has lacked data shards for too long."""
    return None if group.lacking_since is None or group.broken else group.lacking_since + group.timeout


def overdue(group: Group) -> DeadlineError:
    """Return what members are told when no process has come in the place of a lost shard."""
    places = ", ".join(group.urls[place] or f"shard {place + 1}" for place in sorted(group.lacking))
    return DeadlineError(
        f"group {group.name!r} lacks data shards ({places}), and nobody has taken their place within "
        f"{group.timeout:g} s: start as many with `gradserver serve --join`"
    )


def hire_deadline(group: Group) -> float | None:
    """Return when another process is to be started in the place of a lost shard."""
    return None if group.hire_at is None or group.broken else group.hire_at


def hire(group: Group, now: float, effects: Effects) -> None:
    """Have a process started in the place of a lost shard."""
    group.hire_at = now + HIRE_SECONDS
    effects.hire()
