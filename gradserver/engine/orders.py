"""Orders of control to data halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from gradserver.engine.order_fields import Departures, Error, Founders, Newcomers, StragglerPolicy
from gradserver.engine.policy import OnNonFinite
from gradserver.engine.records import known_policy
from gradserver.protocol.checks import integer, number
from gradserver.protocol.declared import Declared, Family, Field
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.fields import (
    Count,
    EncodedPlan,
    Flag,
    Grain,
    MeanRule,
    Name,
    Rank,
    Ranks,
    Rates,
    Seconds,
    Token,
    Tokens,
)
from gradserver.protocol.limits import BACKLOG_BYTES, MAX_COUNTER, MAX_SHARDS
from gradserver.protocol.means import PLAIN


class RemoteOrder(Declared):
    """An order that data halves elsewhere are told, too: the base of dataclasses that `order` has given a name."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def group(self) -> str:
            """The name of the group."""


order: Final = Family[str, RemoteOrder]("order")
"""Declares an order by the name that it has on its way to a data shard."""


@order("open")
@dataclass(frozen=True, slots=True)
class OpenGroup(RemoteOrder):
    """A group is complete, with its ``founders`` by member id; ``credit`` in bytes for each.

    An exchange waits ``round_timeout`` seconds for a member. ``rates`` are those of its data shards (none if there is
    one only), and ``shard`` is the place of this one among them. Workers come to a shard elsewhere by themselves, and
    show ``tokens``, which are by member id too. A group that ``needs_all`` ends when any member is lost. An id without
    a name has no member yet. With ``digests`` rounds are hashed for the ledger. A listener may leave as many bytes
    unread as its ``backlog``; ``lateness`` says when a round is closed without stragglers. A ``durable`` group survives
    its coordinator, so its members are told the facts that a later coordinator needs. ``nonfinite`` says what becomes
    of gradients that are not finite. In a ``steady`` group a round ends with the last results of each shard, until the
    membership changes. If control ``grants`` rounds, it says before each which members contribute.
    Gradients are averaged by the rule ``mean``. The share ``audits`` of the rounds is audited.
    Sizes of slices follow from the ``grain``. Proofs of a durable group's results follow from ``proves``.
    """

    group: Name
    epoch: Count
    founders: Founders
    credit: Count
    round_timeout: Seconds
    rates: Rates = ()
    shard: Annotated[int, Field(integer(1, MAX_SHARDS - 1))] = 0
    tokens: Tokens = ()
    needs_all: Flag = False
    digests: Flag = False
    backlog: Count = BACKLOG_BYTES
    lateness: StragglerPolicy = None
    durable: Flag = False
    nonfinite: Annotated[OnNonFinite, Field(known_policy)] = OnNonFinite.HALT
    steady: Flag = False
    grants: Flag = False
    mean: MeanRule = PLAIN
    audits: Annotated[float, Field(number(0.0, 1.0))] = 0.0
    grain: Grain = 0
    proves: Token = ""

    def verify(self) -> None:
        """Raise MalformedMessageError if there are not as many tokens as founders, or no shard of this number."""
        if not self.founders or len(self.tokens) != len(self.founders):
            raise MalformedMessageError(f"OpenGroup has {len(self.founders)} founders and {len(self.tokens)} tokens")
        if self.shard >= len(self.rates) or not any(self.rates):
            raise MalformedMessageError(f"OpenGroup is for shard {self.shard}, and has the rates {self.rates}")


@order("configure")
@dataclass(frozen=True, slots=True)
class Configure(RemoteOrder):
    """The membership is this one from now on; the shard reports that it has `Applied` this ``version``.

    ``members`` are member ids by rank, in force since ``epoch``. ``newcomers`` are all learners, and members in their
    first round. ``departed`` are members and learners that are gone since the version before: what they gave before
    counts. In a ``steady`` membership no worker comes or goes: a round ends with its last results, and no RoundDone
    follows.
    """

    group: Name
    version: Count
    epoch: Count
    members: Ranks
    newcomers: Newcomers = ()
    departed: Departures = ()
    steady: Flag = False


@order("plan")
@dataclass(frozen=True, slots=True)
class SetPlan(RemoteOrder):
    """All members agreed; ``first_round`` is the first one to be exchanged by this plan."""

    group: Name
    plan: EncodedPlan
    first_round: Count


@order("break")
@dataclass(frozen=True, slots=True)
class Break(RemoteOrder):
    """A member is gone that the group cannot do without: all that lacks some of it fails with ``error``."""

    group: Name
    member_id: Rank
    error: Error


@order("close")
@dataclass(frozen=True, slots=True)
class CloseGroup(RemoteOrder):
    """The group has ended: it is forgotten."""

    group: Name


@order("halt")
@dataclass(frozen=True, slots=True)
class Halt(RemoteOrder):
    """The group exchanges nothing more, or no bucket any more, because of ``error``."""

    group: Name
    error: Error
    buckets_only: Flag


@order("cut")
@dataclass(frozen=True, slots=True)
class CutRound(RemoteOrder):
    """Round ``round`` goes on without the slices that these members have not given to it yet. The next one has all.

    It is of ``section``, or no member has said of which: -1. A shard may have no push of the round that would tell.
    """

    group: Name
    round: Count
    member_ids: Ranks
    section: Annotated[int, Field(integer(-1, MAX_COUNTER))] = -1


@dataclass(frozen=True, slots=True)
class Attach:
    """A member of a durable group has this connection from now on."""

    group: str
    member_id: int
    connection: int


@order("detach")
@dataclass(frozen=True, slots=True)
class Detach(RemoteOrder):
    """The connection of a member of a durable group broke. It is waited for."""

    group: Name
    member_id: Rank


@order("recover")
@dataclass(frozen=True, slots=True)
class Recover(RemoteOrder):
    """All that is open is void. The shard asks members for the results that they hold, and goes on from there.

    ``generation`` is a new number, by which this is told from what was before. The group is in ``round``, as far as
    control knows, and in none behind ``latest``. Members that have yet to hear of the end of the round before are still
    in that one. Results of rounds before ``own`` may be an earlier coordinator's, and name ids that members alone know.
    """

    group: Name
    generation: Count
    round: Count
    latest: Count
    own: Count


@order("proceed")
@dataclass(frozen=True, slots=True)
class Proceed(RemoteOrder):
    """The members that had yet to hear that their round is over have been told."""

    group: Name


Order = RemoteOrder | Attach
"""A member attaches to data halves elsewhere by itself."""
