"""Reports of data halves to control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Self

from gradserver.engine.figures import NONE, Figures, pack_figures, unpack_figures
from gradserver.engine.order_fields import Error
from gradserver.engine.records import RoundRecord, pack_round, unpack_round
from gradserver.protocol.declared import Declared, Family, Field
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.fields import Count, Flag, Name, Rank, Ranks, Text, Token


class RemoteReport(Declared):
    """A report about one group, also from data halves elsewhere: the base of dataclasses that `report` has named."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def group(self) -> str:
            """The name of the group."""

    def at(self, now: float) -> Self:  # noqa: ARG002 - some reports speak of times
        """Return the same by the clock of its receiver, which shows ``now``. It was read as if that had shown zero."""
        return self


report: Final = Family[str, RemoteReport]("report")
"""Declares a report by the name that it has on its way from a data shard."""


@report("round")
@dataclass(frozen=True, slots=True)
class RoundCompleted(RemoteReport):
    """Every bucket of a round was exchanged, as far as it is this shard's."""

    group: Name
    record: Annotated[RoundRecord, Field(partial(unpack_round, completed=0.0), pack_round)]
    adopted: Flag = False
    """True if nothing of it was made anew since the recovery began."""
    told: Flag = False
    """True if its last results said that it is over."""
    figures: Annotated[Figures, Field(unpack_figures, pack_figures)] = NONE
    """Comparison of the contributions, as far as they came to this shard."""

    def at(self, now: float) -> Self:
        """Return the same, as if the round had ended ``now``."""
        return replace(self, record=self.record.moved(now))


@report("halted")
@dataclass(frozen=True, slots=True)
class Halted(RemoteReport):
    """The group can exchange nothing more (or no bucket any more): control is to say so to all shards.

    A shard halts no group by itself. So a report that a recovery makes void leaves nothing behind.
    """

    group: Name
    error: Error
    buckets_only: Flag = False


@dataclass(frozen=True, slots=True)
class Violation:
    """A member broke the protocol, and is to lose its connection."""

    connection: int
    error: GradServerError


@report("planned")
@dataclass(frozen=True, slots=True)
class Planned(RemoteReport):
    """A shard goes by the plan of this hash from now on."""

    group: Name
    hash: Token


@report("absent")
@dataclass(frozen=True, slots=True)
class Absent(RemoteReport):
    """A member is not at this shard any more: its connection broke, or it broke the protocol.

    Control keeps its place, or evicts it.
    ``ended`` is as in `Disconnected`.
    """

    group: Name
    member_id: Rank
    error: Error
    ended: Flag = False


@report("applied")
@dataclass(frozen=True, slots=True)
class Applied(RemoteReport):
    """A shard goes by this version of the membership, and by all before it."""

    group: Name
    version: Count


@report("behind")
@dataclass(frozen=True, slots=True)
class Behind(RemoteReport):
    """A listener has left too much unread, and is sent nothing more unasked, from ``round`` on."""

    group: Name
    member_id: Rank
    round: Count


@report("late")
@dataclass(frozen=True, slots=True)
class Late(RemoteReport):
    """These members keep a quorum waiting in ``round``; ``why`` says how long, and what is usual.

    ``tell`` is whether people are to hear of it: not of every round.
    """

    group: Name
    round: Count
    member_ids: Ranks
    why: Text
    tell: Flag


@report("state")
@dataclass(frozen=True, slots=True)
class StateComes(RemoteReport):
    """``nbytes`` more of the state from ``donor`` to ``member_id`` have come in a transfer; 0: the donor is asked."""

    group: Name
    member_id: Rank
    donor: Rank
    number: Count
    nbytes: Count


@report("caught up")
@dataclass(frozen=True, slots=True)
class CaughtUp(RemoteReport):
    """In recovery these ``member_ids`` have all of the round before ``round``, and have not heard that it is over."""

    group: Name
    round: Count
    member_ids: Ranks


@report("recovered")
@dataclass(frozen=True, slots=True)
class Recovered(RemoteReport):
    """The recovery is over: members go on with ``round``."""

    group: Name
    round: Count
    begun: Flag = False
    """True if members hold results of it."""


Report = RemoteReport | Violation
