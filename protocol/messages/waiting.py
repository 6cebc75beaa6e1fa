"""Messages about workers of which all threads wait: how it is found out that each member waits for another one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gradserver.protocol.fields import Count, Counts, Texts
from gradserver.protocol.message_family import MessageKind, message

MAX_WAITS = 8
"""Waits of one worker that are told: a worker with more threads that wait says nothing."""


MAX_WAIT = 1000
"""Characters that say what a thread waits for, or which members that lacks."""


class Cause(IntEnum):
    """The thing that a thread waits for."""

    EXCHANGE = 0
    """Collectives, sends and receives."""
    BUCKET = 1
    """A bucket of a round."""
    PLAN = 2
    """The other members' proposals of a plan."""
    REQUEST = 3
    """The round that it has requested."""
    FOLLOW = 4
    """The next exchange of the others, of a worker without data."""
    SUBGROUP = 5
    """The other members of a sub-group."""


@message(53)
@dataclass(frozen=True, slots=True)
class Blocked(MessageKind):
    """The message that all threads of this worker have waited for a while. Without ``causes`` one of them goes on.

    Attributes:
        serial: a number that changes whenever a wait begins or ends, a push is sent or a result comes.
        check: number of the `Recheck` that this answers; 0 if it answers none.
        causes: the `Cause` of each wait.
        whats: each wait in words.
        missing: members that an exchange lacks, in words. Empty if it lacks none, and for other causes.
    """

    serial: Count
    check: Count = 0
    causes: Counts = ()
    whats: Texts = ()
    missing: Texts = ()


@message(54)
@dataclass(frozen=True, slots=True)
class Recheck(MessageKind):
    """The question, to all members, whether they are still `Blocked`."""

    check: Count
