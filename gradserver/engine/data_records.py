"""Records about the use of data. `gradserver.engine.records` says how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from gradserver.engine.declared import Field, Kind, kind
from gradserver.protocol.checks import text
from gradserver.protocol.declared import nested, several
from gradserver.protocol.fields import Count, Flag, Name, Numel, Rank, Seed
from gradserver.protocol.limits import MAX_DATA, MAX_NAME_BYTES, MAX_WORLD_SIZE
from gradserver.protocol.ranges import Ranges, pack, packed

_Ranges = Annotated[Ranges, Field(packed, pack)]


class Order(NamedTuple):
    """The facts from which an epoch's order follows, besides its number."""

    length: Numel
    seed: Seed
    shuffle: Flag

    def __str__(self) -> str:
        return f"{self.length} samples, " + (f"shuffled with seed {self.seed}" if self.shuffle else "in their order")


class Holder(NamedTuple):
    """The ranges that a member holds, and the answer to its last claim."""

    member_id: Rank
    held: _Ranges
    number: Count
    epoch: Seed
    answer: _Ranges


@kind(10)
@dataclass(frozen=True, slots=True)
class Data(Kind):
    """All about the use of one kind of data: what is left of ``epoch``, and what each member holds of it.

    ``by`` names the member that used it first, and ``begun`` says whether any was claimed.
    """

    group: Name
    name: Name
    order: Annotated[Order, nested(Order)]
    by: Annotated[str, Field(text(2 * MAX_NAME_BYTES))]
    epoch: Seed
    begun: Flag
    left: _Ranges
    holders: Annotated[tuple[Holder, ...], several(nested(Holder), MAX_WORLD_SIZE)]


@kind(11)
@dataclass(frozen=True, slots=True)
class Claim(Kind):
    """Ranges of ``epoch`` are handed out to ``member_id``: its claim of this ``number``."""

    group: Name
    name: Name
    member_id: Rank
    number: Count
    epoch: Seed
    ranges: _Ranges


@kind(26)
@dataclass(frozen=True, slots=True)
class Used(Kind):
    """Ranges of ``epoch``, and no others, are in the contribution of ``member_id`` to ``round``, as it has said.

    If it is ``gone``, another member may have its id now.
    """

    group: Name
    name: Name
    member_id: Rank
    round: Count
    epoch: Seed
    ranges: _Ranges
    gone: Flag = False


OfData = Data | Claim | Used
"""Records that say where positions are."""


class Committed(NamedTuple):
    """Ranges of ``epoch`` that ``member_id`` used up in a round; ``partly``: it counted in some slices only."""

    name: Name
    epoch: Seed
    member_id: Rank
    partly: Flag
    ranges: _Ranges


COMMITTED: Final = several(nested(Committed), MAX_DATA * MAX_WORLD_SIZE)
"""The ranges that were used up in a round."""
