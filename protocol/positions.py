"""Messages about the use of data: who takes which positions of an epoch's order, and what became of them.

worker                                  coordinator
  Register + used ───────────────────────► "this is the data that I use": compares
  ◄────────────────────────────────────── Located + used
  Claim ─────────────────────────────────► hands out positions, each to one worker
  ◄────────────────────────────────────── Claimed + ranges
  Used + ranges ─────────────────────────► in a round: they are used up when it is over, and this worker counted in it

``name`` tells several kinds of data of one group apart. Payloads are those of `gradserver.protocol.ranges`. A Register
or a Claim is answered, or fails with a Failure of scope DATA that has the name in its fields, when all rounds before
``round`` are over. The same Claim a second time is given the same ranges.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Register:
    """A worker uses data of this ``length`` in the order that follows from ``seed`` and ``shuffle``.

    ``epoch``, and the used ranges in the payload, are where it goes on; 0 and none if it does not care.
    """

    name: str
    length: int
    seed: int
    shuffle: bool
    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class Located:
    """The group is in ``epoch``; ranges used up in it are the payload."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker wants ``count`` positions of ``epoch``, or with 0 to know whether it is finished.

    ``number`` counts its claims of this data. From ``round`` on it says in each round what it used.
    """

    name: str
    number: int
    epoch: int
    count: int
    round: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """These ranges are the worker's own: the payload, which may be empty. ``finished``: the epoch is used up."""

    name: str
    number: int
    epoch: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Used:
    """The ranges in the payload are in this worker's contribution to ``round``. Said before its first push of it."""

    name: str
    epoch: int
    round: int
