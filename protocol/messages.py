"""The messages, each declared once: a frozen dataclass with its number, its payloads, and the checks of its fields.

`gradserver.protocol.wire` encodes and decodes what is declared with `message`, here or elsewhere. `Push` and `Result`
are named tuples: there are two for every slice, and a named tuple is made in a sixth of the time.

worker                                  coordinator
  Join ──────────────────────────────────► waits until the group is complete
  ◄────────────────────────────────────── Welcome (or Failure)
  Attend ────────────────────────────────► to every further data shard, with the token that the Welcome brought
  ◄────────────────────────────────────── Attended
  ShareMemory ───────────────────────────► "is there memory that both of us see?"
  ◄────────────────────────────────────── MemoryAt, where to hand it over
  Propose + plan ────────────────────────► compares, when all have proposed
  ◄────────────────────────────────────── Agreed (or Failure)
  Push + slice ──────────────────────────►
  ◄────────────────────────────────────── Result + slice, until every slice of the Push has one
  ◄────────────────────────────────────── Result + slice, unasked, to a listener
  Taken ─────────────────────────────────► so much of that was read
  Register, Claim, Used ─────────────────► data: `gradserver.protocol.positions` has them, and the answers
  Inquire ───────────────────────────────► "which members are missing?", when a wait ran out
  ◄────────────────────────────────────── Missing
  Leave ─────────────────────────────────► forgets the worker
  ◄────────────────────────────────────── Leave, the same: all that was said before it was heard
  ◄────────────────────────────────────── BePresent, when it has come: also to a data shard that comes to a coordinator
  Present ───────────────────────────────► a moment later (from a worker)
  ◄────────────────────────────────────── Failure at any time; Ping at any time, not answered
  Ping ──────────────────────────────────► answered with a Ping, which shows whether anything was lost
  ◄────────────────────────────────────── Membership, when a member departed or came in
  ◄────────────────────────────────────── RoundDone, after the last Result of a round
  (Resume, Resumed, Holding, Fetch, Held, Standing, after a connection broke: drawn in `gradserver.protocol.resuming`)
  Serve ─────────────────────────────────► may ask this member for its state, for a learner
  StateFailed ───────────────────────────► asks another one

learner                                 coordinator of a group that has begun
  Join ──────────────────────────────────► waits until there is a seat, and all shards know of it
  ◄────────────────────────────────────── Welcome, which says that it joins; then as above, up to Agreed
  Enter ─────────────────────────────────► waits for the end of a round
  ◄────────────────────────────────────── RoundDone, which names the member that sends it the state: in transfers
  Ready ─────────────────────────────────►
  ◄────────────────────────────────────── Entered: it contributes, and is a member when that round is over

data shard                              coordinator
  Enlist ────────────────────────────────► uses it for the groups that become complete from now on
  ◄────────────────────────────────────── Enlisted (or Failure)
  ◄────────────────────────────────────── Ordered + order     (`gradserver.engine.orders` has them)
  Reported + report ─────────────────────►

anyone
  StatusRequest ─────────────────────────►
  ◄────────────────────────────────────── Status + JSON
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple

from gradserver.protocol.checks import Fact, brief, facts, integer, number, optional
from gradserver.protocol.codecs import codec_from
from gradserver.protocol.declared import Field, nested, several
from gradserver.protocol.dtypes import BY_CODE
from gradserver.protocol.errors import ERRORS, GradServerError, MalformedMessageError
from gradserver.protocol.exchange import EXACT, ExchangeKey, Kind, Op, Operation
from gradserver.protocol.fields import (
    AnyRank,
    Count,
    Counts,
    Flag,
    Key,
    OptionalKey,
    Rank,
    Ranks,
    Rates,
    Seconds,
    Stated,
    Text,
    Texts,
    Token,
    Total,
    Weight,
    Weights,
    any_rank,
    count,
)
from gradserver.protocol.limits import (
    MAX_COUNTER,
    MAX_FRAME_BYTES,
    MAX_LIST,
    MAX_NUMEL,
    MAX_ORDER_BYTES,
    MAX_RATE,
    MAX_REPORT_BYTES,
    MAX_SLICES,
    MAX_TEXT,
    MAX_WORLD_SIZE,
    SLICE_BYTES,
)
from gradserver.protocol.message_family import MessageKind, Payloads, message, refuse_payloads

# ── joining ───────────────────────────────────────────────────────────────────────────────────────────


@message(1)
@dataclass(frozen=True, slots=True)
class Join(MessageKind):
    """The request of a worker to join.

    Attributes:
        group: name of the group.
        name: name of this worker, for people.
        rank: the rank it must have, or -1 for any that is free.
        world_size: how many workers the group must have, or 0 for the coordinator's number.
        timeout: seconds that this worker waits for the group to be complete, and for any one exchange.
    """

    group: Text
    name: Text
    rank: AnyRank
    world_size: Annotated[int, Field(integer(0, MAX_WORLD_SIZE))]
    timeout: Seconds


@message(2)
@dataclass(frozen=True, slots=True)
class Welcome(MessageKind):
    """The answer that the group is complete. ``credit`` in bytes; ``names`` by rank.

    ``shards`` are the URLs of the data shards beside the coordinator itself. ``rates`` compare them; the coordinator's
    own is the first. The worker shows them ``token``. ``seats`` are by rank. A ``durable``
    group survives broken connections, and the coordinator, which has begun as often as ``incarnation`` says
    (`gradserver.protocol.resuming`). The worker shows the token in a Resume, too. ``founded`` is the epoch by which
    shards know the group, if that is another one. A worker that ``joins`` a running group is not a member yet: seats,
    names and its rank are those it would have as one. A ``late`` contribution is kept for the next round ("keep"), or
    forgotten ("drop"); if empty, all members are waited for. ``timeout`` is how long an exchange waits for a member
    that is alive, in seconds. ``nonfinite`` is the policy for gradients that are not finite: "halt", "leave-out",
    "skip" or "propagate". A group that ``needs_all`` ends when any member is lost.
    """

    group: Text
    rank: AnyRank
    epoch: Count
    credit: Count
    names: Texts
    shards: Texts = ()
    rates: Rates = ()
    token: Text = ""
    seats: Ranks = ()
    durable: Flag = False
    incarnation: Count = 0
    founded: Count = 0
    joins: Flag = False
    late: Text = ""
    timeout: Seconds = 0.0
    nonfinite: Text = "halt"
    needs_all: Flag = False


# ── members and learners ──────────────────────────────────────────────────────────


@message(21)
@dataclass(frozen=True, slots=True)
class Membership(MessageKind):
    """Membership of a group, from ``epoch`` on.

    It takes effect for a member when it is told so: by the RoundDone of a round, or by the failure of a collective,
    that names this epoch or a later one.

    Attributes:
        epoch: number of this membership.
        seats: seats of the members, by rank. A seat is a member's for the group's life.
        names: names of the members, by rank.
        reason: the change, for people.
        lost: true if a worker was lost, rather than left.
        entering: seats among them of the members that contribute to ``round`` as their first one. For another member
            they are not there until that round is over. It may still be in collectives that were called before they
            came.
        round: the round that they came with.
    """

    epoch: Count
    seats: Ranks
    names: Texts
    reason: Text
    lost: Flag
    entering: Ranks = ()
    round: Count = 0

    def behind(self, number: int) -> Membership:
        """Return the membership for a member that has ended round ``number``, and not the next one."""
        if not self.entering or number >= self.round:
            return self
        there = [(seat, name) for seat, name in zip(self.seats, self.names, strict=True) if seat not in self.entering]
        seats, names = zip(*there, strict=True) if there else ((), ())
        return replace(self, seats=seats, names=names)


class Transfer(NamedTuple):
    """The order that the member with seat ``donor`` sends its state to the one with seat ``joiner``, by its number.

    With ``waits`` the next round waits for the learner. Otherwise the learner is sent the results unasked, until it has
    caught up.
    """

    number: Count
    donor: Rank
    joiner: Rank
    waits: Flag = True


@message(22)
@dataclass(frozen=True, slots=True)
class RoundDone(MessageKind):
    """The end of a round at all shards; ``epoch`` is that of the next one.

    ``transfers`` are of the state that members have when they have applied this round.
    """

    round: Count
    epoch: Count
    transfers: Annotated[tuple[Transfer, ...], several(nested(Transfer), MAX_LIST)] = ()


@message(35)
@dataclass(frozen=True, slots=True)
class Serve(MessageKind):
    """The offer of this member to send its state to learners."""


@message(36)
@dataclass(frozen=True, slots=True)
class Enter(MessageKind):
    """The request of this learner for the state, by the group's plan; again, if ``transfer`` did not bring it.

    With ``waits`` the others are to wait for it, for example since more results come meanwhile than it can keep.
    """

    transfer: Count = 0
    waits: Flag = False


@message(37)
@dataclass(frozen=True, slots=True)
class Ready(MessageKind):
    """The message that this learner has the state of that transfer, and has applied all rounds since that are over."""

    transfer: Count


@message(38)
@dataclass(frozen=True, slots=True)
class Entered(MessageKind):
    """The answer that this learner contributes from ``round`` on."""

    round: Count


@message(39)
@dataclass(frozen=True, slots=True)
class StateFailed(MessageKind):
    """The message that the donor of that transfer cannot send its state."""

    transfer: Count
    reason: Text


# ── data shards ───────────────────────────────────────────────────────────────────────────────────────


@message(19)
@dataclass(frozen=True, slots=True)
class Attend(MessageKind):
    """The message to a data shard that this connection is that of ``rank``. ``token`` is from the Welcome.

    Ranks are seats here, and ``epoch`` is the first one, or the version of the latest Resumed.
    """

    group: Text
    epoch: Count
    rank: AnyRank
    token: Text


@message(20)
@dataclass(frozen=True, slots=True)
class Attended(MessageKind):
    """The answer that the shard knows the worker, which may push."""


@message(15)
@dataclass(frozen=True, slots=True)
class Enlist(MessageKind):
    """The offer of a data shard: workers reach it at ``url``; ``rate`` is its link's in Gbit/s, if it was told.

    ``token`` shows that the coordinator has started it; empty at any other.
    """

    url: Text
    rate: Annotated[float | None, Field(optional(number(0.0, MAX_RATE)))] = None
    token: Token = ""


@message(16)
@dataclass(frozen=True, slots=True)
class Enlisted(MessageKind):
    """The answer that the coordinator takes the shard as ``number``. ``returns``: wait for it if it is lost."""

    number: Annotated[int, Field(integer(1, MAX_COUNTER))]
    returns: Flag = False


@message(17, Payloads.one(MAX_ORDER_BYTES))
@dataclass(frozen=True, slots=True)
class Ordered(MessageKind):
    """An order to a data shard; the order is the payload."""


@message(18, Payloads.one(MAX_REPORT_BYTES))
@dataclass(frozen=True, slots=True)
class Reported(MessageKind):
    """A report of a data shard; the report is the payload."""


# ── plans, and the section of each round ──────────────────────────────────────────────────────────────


@message(3, Payloads.one(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Propose(MessageKind):
    """The plan (in the payload) by which this worker wants to exchange from the next round on, ``round``.

    It replaces the plan in force. Or it stands ``beside`` that, named by its hash, as one more section. Then the worker
    names the sections that it has ``dropped``. A learner names none: its plan is the group's next section.
    """

    hash: Text
    round: Stated = 0
    beside: Text = ""
    dropped: Counts = ()


@message(4, Payloads.optional(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Agreed(MessageKind):
    """The answer that every member proposed this plan; ``round`` is the first one to be exchanged by it.

    If it is a ``section`` of a plan that has more, the whole plan is the payload.
    """

    hash: Text
    round: Count
    section: Count = 0


@message(42)
@dataclass(frozen=True, slots=True)
class Opens(MessageKind):
    """The message that this member is about to exchange ``section`` in ``round``, if a plan has several sections."""

    round: Stated
    section: Count


@message(43)
@dataclass(frozen=True, slots=True)
class Steps(MessageKind):
    """The message that before ``round`` this member's job has updated models, or is at the top of its loop.

    It is the ``index``-th such message since the round before. The bits of two numbers are the models that were
    updated, and those that dropped their gradients.
    """

    round: Stated
    index: Count
    updated: Count
    dropped: Count


@message(44)
@dataclass(frozen=True, slots=True)
class Follow(MessageKind):
    """The question of a member without data: what do the others do before and in ``round``?

    It has done as many updates as ``index`` says since the round before.
    """

    round: Stated
    index: Count = 0


@message(45)
@dataclass(frozen=True, slots=True)
class Opened(MessageKind):
    """The answer to a Follow. ``updated`` models come first, as in `Steps`, or the others are at the ``top``.

    Otherwise they exchange ``section``. If all of them follow, this has ``ended``: the section is the first one, and no
    member has any data. ``index`` is that of the Follow.
    """

    round: Count
    section: Count
    top: Flag = False
    updated: Count = 0
    dropped: Count = 0
    ended: Flag = False
    index: Count = 0


# ── slices, and the memory that they lie in ───────────────────────────────────────────────────────────


@message(13)
@dataclass(frozen=True, slots=True)
class ShareMemory(MessageKind):
    """The question where this worker can hand over memory, so that its gradients need not travel."""


@message(14)
@dataclass(frozen=True, slots=True)
class MemoryAt(MessageKind):
    """A local socket's ``address``, and the ``token`` to show there. An empty address: nowhere."""

    address: Text
    token: Text


class Place(NamedTuple):
    """The place of an array in memory that a worker shares with the coordinator: ``offset`` in bytes."""

    segment: int
    offset: int


HERE: Final = Place(-1, 0)
"""The payload itself is shared memory: between threads of one process."""


def _place(value: Any) -> Place | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 2:
        raise MalformedMessageError(f"expected a place in shared memory, got {brief(value)}")
    return Place(count(value[0]), count(value[1]))


def unpack_operation(value: Any) -> Operation | None:
    """Check an operation."""
    if value is None:
        return None
    if type(value) is not list or len(value) not in (5, 7):
        raise MalformedMessageError(f"expected an operation, got {brief(value)}")
    try:
        return _known_operation(*value)
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedMessageError(f"no operation: {brief(value)}") from error


@lru_cache(maxsize=1024)
def _known_operation(kind: Any, op: Any, dtype: Any, numel: Any, root: Any, *codec: Any) -> Operation:
    """Return the operation of these numbers; the same object for the same ones, which makes comparing them quick."""
    known = codec_from(count(codec[0]), count(codec[1])) if codec else EXACT
    return Operation(Kind(kind), Op(op), BY_CODE[dtype], _numel(numel), any_rank(root), known)


@lru_cache(maxsize=1024)
def pack_operation(operation: Operation | None) -> list[int] | None:
    """Return the numbers of an operation."""
    if operation is None:
        return None
    numbers = [operation.kind, operation.op, operation.dtype.code, operation.numel, operation.root]
    return [*numbers, operation.codec.code, operation.codec.parameter] if operation.is_lossy else numbers


_numel = integer(0, MAX_NUMEL)
_Slices = Annotated[int, Field(integer(1, MAX_SLICES))]
_Place = Annotated[Place | None, Field(_place)]
_Operation = Annotated[Operation | None, Field(unpack_operation, pack_operation)]


@message(5, Payloads.optional(SLICE_BYTES), shorter=(5, 7, 8))
class Push(NamedTuple):
    """One worker's contribution to one slice, or to several that follow one another.

    A contribution either travels as payload, or lies in shared memory. There its result is written too, over it.

    Attributes:
        key: the exchange.
        slice: its slice, in order from 0.
        weight: this worker's weight, constant over an exchange; 0 means that it does not count.
        present: whether there is data. Without it the contribution is all zeros (or not called for).
        operation: the exchange's operation, as this worker has it; None for buckets, where the plan has it.
        slices: how many. More than one only in shared memory.
        place: where in shared memory the contribution lies (if present) and the result belongs.
        epoch: the sender's membership, on the first slice of what depends on the world size, and of transfers; 0
            elsewhere.
        target: where in shared memory the result belongs, in a durable group, which keeps what is given.
    """

    key: Key
    slice: Count
    weight: Weight = 1.0
    present: Flag = True
    operation: _Operation = None
    slices: _Slices = 1
    place: _Place = None
    epoch: Count = 0
    target: _Place = None

    def check_payloads(self, count: int) -> None:
        """Raise MalformedMessageError unless data travels as payload or lies in shared memory, one of the two."""
        if count != (self.present and self.place is None):
            raise refuse_payloads("Push")
        if self.slices > 1 and self.present and self.place is None:
            raise MalformedMessageError(f"a Push of {self.slices} slices with a payload: one at most")
        if self.target is not None and self.place is None:
            raise MalformedMessageError("a Push that names a place for its result, and none for what it gives")


@message(6, Payloads.optional(SLICE_BYTES), shorter=(4, 5, 6, 7, 8, 9))
class Result(NamedTuple):
    """The result of a slice, or of several. ``weight`` is the sum over contributions that counted; 0 if none did.

    Without data (``present``) the result is zeros, or none was called for. If it is ``placed``, it lies in
    shared memory where the Push said (at its target, if it named one); else it is the payload. Some
    of the seats that were there when the exchange began may be ``without`` a part in these slices: cut off, or late.
    A listener is sent results of buckets that it has not pushed, always as payloads. In durable groups a bucket's
    result names the ``weights`` of the contributions that counted, by seat; 0 for the others.

    With the last result of a round the round may be ``over``, and the membership stays as it is: no RoundDone follows.

    What the seats ``nonfinite`` gave to these slices is not finite. If the group leaves that out, the result is the
    mean of the others; if it skips such rounds, there is none, and nothing of the round is to be applied. In
    ``weights`` theirs are negative.
    """

    key: Key
    slice: Count
    weight: Total
    present: Flag
    slices: _Slices = 1
    placed: Flag = False
    over: Flag = False
    without: Ranks = ()
    weights: Weights = ()
    nonfinite: Ranks = ()

    def check_payloads(self, count: int) -> None:
        """Raise MalformedMessageError unless data travels as payload or lies in shared memory, one of the two."""
        if count != (self.present and not self.placed):
            raise refuse_payloads("Result")
        if self.slices > 1 and self.present and not self.placed:
            raise MalformedMessageError(f"a Result of {self.slices} slices with a payload: one at most")


@message(29)
@dataclass(frozen=True, slots=True)
class Taken(MessageKind):
    """This worker has read so many bytes of unasked results: `gradserver.protocol.exchange.unasked_cost` of each."""

    nbytes: Count


# ── waiting ───────────────────────────────────────────────────────────────────────────────────────────


@message(7)
@dataclass(frozen=True, slots=True)
class Inquire(MessageKind):
    """A question: which members are missing from this exchange?"""

    key: Key


@message(8)
@dataclass(frozen=True, slots=True)
class Missing(MessageKind):
    """The workers that have yet to contribute, by name and rank; none if no worker is late."""

    key: Key
    workers: Texts


# ── connections, and liveness ─────────────────────────────────────────────────────────────────────────


@message(9)
@dataclass(frozen=True, slots=True)
class Leave(MessageKind):
    """A goodbye. ``failed`` says that an error is the reason, so that the others hear of a loss."""

    reason: Text
    failed: Flag = False


@message(10)
@dataclass(frozen=True, slots=True)
class Ping(MessageKind):
    """A message that shows whether the connection still stands; it is not answered."""


@message(40)
@dataclass(frozen=True, slots=True)
class BePresent(MessageKind):
    """The request to connect once more, as ``identity``, and to let libzmq show there that this process runs.

    It may be silent for ``silence`` seconds. No message ever passes there but the first, a Ping. A later BePresent with
    another identity replaces this one.
    """

    identity: Token
    silence: Seconds


@message(41)
@dataclass(frozen=True, slots=True)
class Present(MessageKind):
    """The answer that this is done, and that libzmq has shown there for the first time that this process runs.

    From now on a freeze would be noticed, even while a thread keeps Python's lock.
    """

    identity: Token


# ── status ────────────────────────────────────────────────────────────────────────────────────────────


@message(11)
@dataclass(frozen=True, slots=True)
class StatusRequest(MessageKind):
    """A question: what does the coordinator see? Any process may ask."""


@message(12, Payloads.one(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Status(MessageKind):
    """The coordinator's snapshot; the payload is JSON."""


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────


class Scope(IntEnum):
    """The extent of a failure."""

    EXCHANGE = 0
    """One exchange; the group goes on."""
    PROPOSAL = 1
    """The proposed plan; the worker may propose another."""
    CONNECTION = 2
    """This worker's connection, which the coordinator forgets after this message."""
    DATA = 3
    """A question about data; the name of the data is in the fields."""


_MAX_LISTED = 32
_known_scope = integer(0, max(Scope))


def _scope(value: Any) -> Scope:
    return Scope(_known_scope(value))


@message(0)
@dataclass(frozen=True, slots=True)
class Failure(MessageKind):
    """An error on its way to the worker that has to raise it.

    Attributes:
        scope: how much fails.
        error: name of the class in `gradserver.protocol.errors`.
        text: the message.
        fields: the error's typed facts: text, integer, or tuple of text.
        key: the exchange, for Scope.EXCHANGE.
    """

    scope: Annotated[Scope, Field(_scope)]
    error: Text
    text: Text
    fields: Annotated[dict[str, Fact], Field(facts)] = field(default_factory=dict)
    key: OptionalKey = None

    @classmethod
    def of(cls, error: GradServerError, scope: Scope, key: ExchangeKey | None = None) -> Failure:
        """Return the message that carries ``error``."""
        fields: dict[str, str | int | tuple[str, ...]] = {}
        for name, value in error.fields.items():
            if isinstance(value, str):
                fields[name] = value[:MAX_TEXT]
            elif isinstance(value, int):
                fields[name] = value
            elif isinstance(value, (tuple, list)):
                fields[name] = tuple(str(item)[:MAX_TEXT] for item in value[:_MAX_LISTED])
        return cls(scope, type(error).__name__, error.message[:MAX_TEXT], fields, key)

    def exception(self) -> GradServerError:
        """Return the error to raise. A class or field that this version does not know becomes the nearest it does."""
        kind = ERRORS.get(self.error, GradServerError)
        known = {name: value for name, value in self.fields.items() if name in kind._FIELDS}
        return kind(self.text, **known)


Message = MessageKind | Push | Result
"""All messages; those of `gradserver.protocol.resuming` and `gradserver.protocol.positions` are among them."""
