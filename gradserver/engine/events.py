"""Events that go into the engine, commands that come out, and the orders and reports between its two halves.

A class with an object for every slice is a named tuple: a frozen dataclass takes six times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self

from gradserver.engine.declared import Kind
from gradserver.engine.policy import Lateness, OnNonFinite
from gradserver.engine.records import RoundRecord, known_policy, pack_round, unpack_round
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import brief, facts, flag, integer, listed, number, text
from gradserver.protocol.declared import Declared, Family, Field
from gradserver.protocol.errors import GradServerError, InvalidArgumentError, MalformedMessageError
from gradserver.protocol.exchange import ExchangeKey, Operation
from gradserver.protocol.fields import (
    Count,
    Counts,
    EncodedPlan,
    Flag,
    Name,
    Rank,
    Ranks,
    Rates,
    Seconds,
    Text,
    Token,
    Tokens,
)
from gradserver.protocol.limits import (
    BACKLOG_BYTES,
    MAX_COUNTER,
    MAX_NAME_BYTES,
    MAX_SHARDS,
    MAX_TEXT,
    MAX_TIMEOUT,
    MAX_WORLD_SIZE,
)
from gradserver.protocol.messages import Failure, Message, Scope

# ── events: what happened ─────────────────────────────────────────────────────────────────────────────


class Received(NamedTuple):
    """A message came in on a connection. Connections are numbered by the loop and never reused."""

    connection: int
    message: Message
    payloads: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class Garbled:
    """Bytes came in on a connection that are no message; ``error`` says why not."""

    connection: int
    error: GradServerError


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection is gone; ``reason`` is for people. If it is ``ended``, its process has ended for certain.

    A ``silent`` one is still there. Its owner froze, or was cut off, and can be told that it is too late.
    """

    connection: int
    reason: str
    ended: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A reduction met NaN or Inf. ``rank`` -1: every contribution was finite, and the mean overflowed."""

    rank: int
    element: int
    value: str
    exact: bool = True
    """True for that very element; false for one near it that shared its encoding."""


class Finding(NamedTuple):
    """The contribution of ``rank`` to ``slice`` is not finite; ``element`` of the reduction is the first such one."""

    slice: int
    rank: int
    element: int


@dataclass(frozen=True, slots=True)
class Sifted:
    """A mean of which some contributions are not finite. `OnNonFinite` says what the result of their slices is.

    ``payload`` holds the other slices, if the result was asked for. Its bytes of a slice without a result are void.
    """

    payload: Buffer | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A contribution's bytes say nothing in its codec; ``error`` says why not."""

    rank: int
    error: GradServerError


@dataclass(frozen=True, slots=True)
class Broken:
    """A reduction ended with an exception: ``cause`` says which one."""

    cause: str


class Reduced(NamedTuple):
    """A `Reduce` was carried out. ``outcome`` holds the result's bytes, if asked for, or says what was wrong.

    ``digests`` are those that were asked for: of each contribution by its rank, and of the result by `RESULT`.
    """

    group: str
    epoch: int
    key: ExchangeKey
    slice: int
    outcome: Buffer | tuple[Buffer, ...] | NonFinite | Sifted | Undecodable | Broken | None
    digests: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines may have."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The coordinator is being stopped."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The records of an earlier coordinator about its groups: the first event of all.

    For the groups in ``kept`` the residuals of lossy codecs are there, too.
    """

    records: tuple[Kind, ...]
    kept: frozenset[str] = frozenset()


Event = Received | Garbled | Disconnected | Reduced | Tick | Stop | Restored

# ── commands: what is to be done ──────────────────────────────────────────────────────────────────────


class Send(NamedTuple):
    """Send a message on a connection."""

    connection: int
    message: Message
    payloads: Sequence[Buffer] = ()


class Contribution(NamedTuple):
    """One worker's slices. ``payload`` None stands for zeros. Weight 0 never gets this far."""

    rank: int
    weight: float
    payload: Buffer | None


RESULT = -1
"""In the place of a rank: the digest of the result."""


class Digests(NamedTuple):
    """Digests that are wanted of a reduction, which stands at byte ``at`` of all that its bucket's round hashes.

    The reducer puts them into ``found``, in parts that add up: (rank, digest).
    """

    at: int
    found: list[tuple[int, int]]


class Reduce(NamedTuple):
    """Combine contributions, given in rank order; then tell the engine with `Reduced`.

    ALL_GATHER and GATHER put the contributions one behind the other, ALL_TO_ALL those portions of them that are for the
    same rank, which are the outcome then, as a tuple; as of SCATTER, which takes one contribution apart. Op.FIRST and
    Op.NONE copy the only one given.

    Attributes:
        slice: the first one; there may be several.
        first: the first element.
        nbytes: size of one contribution.
        numel: elements of one contribution.
        state: the memory of this group's reductions from one round to the next. The engine only keeps it.
        targets: memory that the result is written to. Some of it may be where contributions lie.
        keep: whether the result's bytes are wanted too, in memory of their own.
        digests: what to hash for the ledger; None for nothing.
        nonfinite: the policy about contributions to a mean that are not finite.
        world: the number of members that take part.
        places: for SCATTER and ALL_TO_ALL, the place of each target's owner among those that take part.
        spans: if that is decided for each slice: its first element and the one behind its last, from ``first`` on.
    """

    group: str
    epoch: int
    key: ExchangeKey
    slice: int
    operation: Operation
    first: int
    nbytes: int
    numel: int
    state: dict[tuple[int, int], Any]
    contributions: Sequence[Contribution]
    targets: Sequence[Buffer]
    keep: bool
    digests: Digests | None = None
    nonfinite: OnNonFinite = OnNonFinite.HALT
    world: int = 0
    places: Sequence[int] = ()
    spans: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a connection, once what was sent on it has left."""

    connection: int


@dataclass(frozen=True, slots=True)
class Hire:
    """Start a data shard, if that is possible: a group lacks one, and none offers itself."""


@dataclass(frozen=True, slots=True)
class Log:
    """Show one line to the person that runs the coordinator."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """Write this down before the next commands are carried out."""

    record: Kind


Command = Send | Reduce | Close | Hire | Log | Record


# ── fields of orders and reports ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place: its connection (-1 where it has yet to come) and its name."""

    connection: int
    name: str


def _seat(value: Any) -> Seat:
    return Seat(-1, _name(value))


def _lateness(value: Any) -> Lateness | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 5:
        raise MalformedMessageError(f"expected a policy about stragglers, got {brief(value)}")
    quorum, percent, backup, grace, keeps = value
    seconds = number(0.0, MAX_TIMEOUT)(grace)
    try:
        return Lateness(_count(quorum), number(0.0, 100.0)(percent), _count(backup), seconds, flag(keeps))
    except InvalidArgumentError as error:
        raise MalformedMessageError(f"no policy about stragglers: {error.message}") from error


def _pack_error(error: GradServerError) -> list[Any]:
    failure = Failure.of(error, Scope.EXCHANGE)
    return [failure.error, failure.text, failure.fields]


def _error(value: Any) -> GradServerError:
    if type(value) is not list or len(value) != 3:
        raise MalformedMessageError(f"expected an error, got {brief(value)}")
    name, message, fields = value
    return Failure(Scope.EXCHANGE, _text(name), _text(message), facts(fields)).exception()


_name = text(MAX_NAME_BYTES)
_text = text(MAX_TEXT)
_count = integer(0, MAX_COUNTER)
_Seats = Annotated[tuple[Seat, ...], Field(listed(_seat, MAX_WORLD_SIZE), lambda seats: [seat.name for seat in seats])]
_Lateness = Annotated[Lateness | None, Field(_lateness, lambda late: late and astuple(late))]
_Error = Annotated[GradServerError, Field(_error, _pack_error)]

# ── orders: what control tells data ───────────────────────────────────────────────────────────────────


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
    """A group is complete. ``seats`` by rank; ``credit`` in bytes for each; ``timeout`` in seconds.

    ``rates`` are those of its data shards (none if there is one only), and ``shard`` is the place of this one among
    them. Workers come to a shard elsewhere by themselves, and show ``tokens``, which are by rank too. A group
    that ``needs_all`` ends when any member is lost. Ranks are seats here, and a seat without a name has no member yet.
    With ``digests`` rounds are hashed for the ledger. A listener may leave as many bytes unread as its ``backlog``;
    ``lateness`` says when a round is closed without stragglers. A ``durable`` group survives its coordinator, so its
    members are told the facts that a later coordinator needs. ``nonfinite`` says what becomes of gradients that are
    not finite. In a ``steady`` group of one shard a round ends with its last results, until the membership changes.
    """

    group: Name
    epoch: Count
    seats: _Seats
    credit: Count
    timeout: Seconds
    rates: Rates = ()
    shard: Annotated[int, Field(integer(1, MAX_SHARDS - 1))] = 0
    tokens: Tokens = ()
    needs_all: Flag = False
    digests: Flag = False
    backlog: Count = BACKLOG_BYTES
    lateness: _Lateness = None
    durable: Flag = False
    nonfinite: Annotated[OnNonFinite, Field(known_policy)] = OnNonFinite.HALT
    steady: Flag = False

    def verify(self) -> None:
        """Raise MalformedMessageError if there are not as many tokens as seats, or no shard of this number."""
        if not self.seats or len(self.tokens) != len(self.seats):
            raise MalformedMessageError(f"OpenGroup has {len(self.seats)} seats and {len(self.tokens)} tokens")
        if self.shard >= len(self.rates) or not any(self.rates):
            raise MalformedMessageError(f"OpenGroup is for shard {self.shard}, and has the rates {self.rates}")


@order("steady")
@dataclass(frozen=True, slots=True)
class Steady(RemoteOrder):
    """No member comes or goes any more: a round now ends with its last results, and no RoundDone is sent for it.

    Admit, Depart and Recover end that.
    """

    group: Name


@order("plan")
@dataclass(frozen=True, slots=True)
class SetPlan(RemoteOrder):
    """All members agreed; ``first_round`` is the first one to be exchanged by this plan."""

    group: Name
    plan: EncodedPlan
    first_round: Count


@order("depart")
@dataclass(frozen=True, slots=True)
class Depart(RemoteOrder):
    """A member is gone: its contributions count, and exchanges that still need it fail with ``error``.

    ``epoch`` is that of the membership without it. If its process has ``ended``, no process writes to memory that it
    shared. If its loss ``breaks`` the group, every exchange that lacks some of it fails.
    """

    group: Name
    rank: Rank
    error: _Error
    epoch: Count = 0
    ended: Flag = False
    breaks: Flag = False


@order("close")
@dataclass(frozen=True, slots=True)
class CloseGroup(RemoteOrder):
    """The last member is gone."""

    group: Name


@order("halt")
@dataclass(frozen=True, slots=True)
class Halt(RemoteOrder):
    """Another shard has reported `Halted`: here, too, the group exchanges nothing more, or no bucket any more."""

    group: Name
    error: _Error
    buckets_only: Flag


@order("cut")
@dataclass(frozen=True, slots=True)
class CutRound(RemoteOrder):
    """Round ``round`` goes on without the slices that these seats have not given to it yet. The next one has all."""

    group: Name
    round: Count
    seats: Ranks


@dataclass(frozen=True, slots=True)
class Attach:
    """A member of a durable group has this connection from now on."""

    group: str
    seat: int
    connection: int


@order("detach")
@dataclass(frozen=True, slots=True)
class Detach(RemoteOrder):
    """The connection of a member of a durable group broke. It is waited for."""

    group: Name
    seat: Rank


@order("recover")
@dataclass(frozen=True, slots=True)
class Recover(RemoteOrder):
    """All that is open is void. The shard asks members for the results that they hold, and goes on from there.

    ``version`` is a new number, by which this is told from what was before. The group is in ``round``, as far as
    control knows, and in none behind ``latest``; or the round before, for members that have yet to hear of its end.
    Results of rounds before ``own`` may be an earlier coordinator's, and name seats that only members know of.
    """

    group: Name
    version: Count
    round: Count
    latest: Count
    own: Count


@order("proceed")
@dataclass(frozen=True, slots=True)
class Proceed(RemoteOrder):
    """The members that had yet to hear that their round is over have been told."""

    group: Name


@order("admit")
@dataclass(frozen=True, slots=True)
class Admit(RemoteOrder):
    """A learner is to join with this ``seat``. It shows ``token`` to a shard elsewhere, and may take transfers."""

    group: Name
    seat: Rank
    occupant: Annotated[Seat, Field(_seat, attrgetter("name"))]
    token: Token = ""


@order("expect")
@dataclass(frozen=True, slots=True)
class Expect(RemoteOrder):
    """Learners with these seats contribute from ``round`` on, which has not begun; or they ``listen``.

    ``transfers`` has the number of the transfer in which each gets the state, in the order of ``seats``; it is empty if
    they have it.
    """

    group: Name
    seats: Ranks
    round: Count
    listen: Flag = False
    transfers: Counts = ()

    def verify(self) -> None:
        """Raise MalformedMessageError if there are neither no transfers nor one for each seat."""
        if len(self.transfers) not in (0, len(self.seats)):
            raise MalformedMessageError(f"Expect has {len(self.seats)} seats and {len(self.transfers)} transfers")


@order("excuse")
@dataclass(frozen=True, slots=True)
class Excuse(RemoteOrder):
    """The learner with this seat does not contribute after all: it has not got the state."""

    group: Name
    seat: Rank


@order("reseat")
@dataclass(frozen=True, slots=True)
class Reseat(RemoteOrder):
    """From ``epoch`` on ``seats`` are the members. New ones take part in everything from the next round on."""

    group: Name
    epoch: Count
    seats: Ranks


HEEDED: Final = (Admit, Expect, Excuse, Reseat)
"""Orders about the members of an elastic group: a data shard elsewhere reports `Heeded`, as of some `Depart`."""
Order = RemoteOrder | Attach
"""A member attaches to data halves elsewhere by itself."""

# ── reports: what data tells control ──────────────────────────────────────────────────────────────────


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

    def at(self, now: float) -> Self:
        """Return the same, as if the round had ended ``now``."""
        return replace(self, record=self.record.moved(now))


@report("halted")
@dataclass(frozen=True, slots=True)
class Halted(RemoteReport):
    """The group can exchange nothing more (or no bucket any more). The data half has failed all open exchanges."""

    group: Name
    error: _Error
    buckets_only: Flag = False


@dataclass(frozen=True, slots=True)
class Violation:
    """A member broke the protocol, and is to lose its connection."""

    connection: int
    error: GradServerError


@report("planned")
@dataclass(frozen=True, slots=True)
class Planned(RemoteReport):
    """A shard elsewhere goes by the plan of this hash from now on."""

    group: Name
    hash: Token


@report("absent")
@dataclass(frozen=True, slots=True)
class Absent(RemoteReport):
    """A member is not at this shard any more: its connection broke, or it broke the protocol. It is to depart.

    ``ended`` is as in `Disconnected`.
    """

    group: Name
    rank: Rank
    error: _Error
    ended: Flag = False


@report("heeded")
@dataclass(frozen=True, slots=True)
class Heeded(RemoteReport):
    """A shard elsewhere goes by the next of the orders that concern the members of an elastic group."""

    group: Name


@report("behind")
@dataclass(frozen=True, slots=True)
class Behind(RemoteReport):
    """A listener has left too much unread, and is sent nothing more unasked, from ``round`` on."""

    group: Name
    rank: Rank
    round: Count


@report("late")
@dataclass(frozen=True, slots=True)
class Late(RemoteReport):
    """These seats keep a quorum waiting in ``round``; ``why`` says how long, and what is usual.

    ``tell`` is whether people are to hear of it: not of every round.
    """

    group: Name
    round: Count
    seats: Ranks
    why: Text
    tell: Flag


@report("state")
@dataclass(frozen=True, slots=True)
class StateComes(RemoteReport):
    """``nbytes`` more of the state that ``donor`` sends to ``rank`` in a transfer have come; 0: the donor is asked."""

    group: Name
    rank: Rank
    donor: Rank
    number: Count
    nbytes: Count


@report("caught up")
@dataclass(frozen=True, slots=True)
class CaughtUp(RemoteReport):
    """In recovery these ``seats`` have all of the round before ``round``, and have not heard that it is over."""

    group: Name
    round: Count
    seats: Ranks


@report("recovered")
@dataclass(frozen=True, slots=True)
class Recovered(RemoteReport):
    """The recovery is over: members go on with ``round``."""

    group: Name
    round: Count


Report = RemoteReport | Violation
