"""Messages about leases of data: which worker takes which positions of an epoch's order, and uses them.

worker                                  coordinator
  Register + used ───────────────────────► "this is the data that I use": compares
  ◄────────────────────────────────────── Located + used
  Claim + returned ──────────────────────► hands out positions, each to one worker; others get what is returned
  ◄────────────────────────────────────── Claimed + ranges
  Used + ranges ─────────────────────────► in a round: they are used up when it is over, and this worker counted in it

``name`` tells several kinds of data of one group apart. Payloads are those of `gradserver.protocol.ranges`. A Register
or a Claim is answered when all rounds before ``round`` are over. Or it fails then, with a Failure of scope DATA that
has the name in its fields. The same Claim a second time is given the same ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gradserver.protocol.checks import number
from gradserver.protocol.declared import Field
from gradserver.protocol.fields import AnyRank, Count, Flag, Name, Numel, Seed, Stated
from gradserver.protocol.message_family import MessageKind, Payloads, message
from gradserver.protocol.ranges import MAX_RANGES_BYTES


@message(30, Payloads.one(MAX_RANGES_BYTES))
@dataclass(frozen=True, slots=True)
class Register(MessageKind):
    """The message that a worker uses data of this ``length`` in the order of ``seed`` and ``shuffle``.

    ``epoch``, and the used ranges in the payload, are where it continues; 0 and none if it does not care.
    """

    name: Name
    length: Numel
    seed: Seed
    shuffle: Flag
    epoch: Stated
    round: Stated


@message(31, Payloads.one(MAX_RANGES_BYTES))
@dataclass(frozen=True, slots=True)
class Located(MessageKind):
    """The answer that the group is in ``epoch``; ranges used up in it are the payload.

    ``audit`` is the share of the rounds that are audited.
    """

    name: Name
    epoch: Seed
    audit: Annotated[float, Field(number(0.0, 1.0))] = 0.0


@message(32, Payloads.optional(MAX_RANGES_BYTES))
@dataclass(frozen=True, slots=True)
class Claim(MessageKind):
    """The request for ``count`` positions of ``epoch``, or with 0 the question whether it is finished.

    The payload's ranges are returned: the worker has dropped what it computed of them.

    ``number`` counts the worker's claims of this data. From ``round`` on it says in each round what it used.
    ``audit`` is the audited round that the positions are for, plus 1; 0 if they are for none.
    """

    name: Name
    number: Count
    epoch: Stated
    count: Numel
    round: Stated
    audit: Stated = 0


@message(33, Payloads.one(MAX_RANGES_BYTES))
@dataclass(frozen=True, slots=True)
class Claimed(MessageKind):
    """The answer that the payload's ranges, perhaps none, are the worker's own. ``finished``: all are used up.

    If there is a ``holder``, they are that member's, and this worker is a witness that computes them, too. A worker
    that asks ``behind`` the others' round is late, and lacks the results of rounds in which they used the last ones.
    """

    name: Name
    number: Count
    epoch: Seed
    finished: Flag
    holder: AnyRank = -1
    behind: Flag = False


@message(34, Payloads.one(MAX_RANGES_BYTES))
@dataclass(frozen=True, slots=True)
class Used(MessageKind):
    """The message that the payload's ranges are in this worker's contribution to ``round``. It precedes the pushes."""

    name: Name
    epoch: Stated
    round: Stated
