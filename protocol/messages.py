"""The messages, as frozen dataclasses. What bytes they become is the business of `gradserver.protocol.wire`.

`Push` and `Result` are named tuples: of these there are two for every slice, and they are made in a sixth of the time.

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
  ◄────────────────────────────────────── Result + slice, unasked, in an elastic group: to who listens
  Taken ─────────────────────────────────► so much of that was read
  Register, Claim, Used ─────────────────► data: `gradserver.protocol.positions` has them, and the answers
  Inquire ───────────────────────────────► "who is missing?", when a wait ran out
  ◄────────────────────────────────────── Missing
  Leave ─────────────────────────────────► forgets the worker
  ◄────────────────────────────────────── Leave, the same: all that was said before it was heard
  ◄────────────────────────────────────── BePresent, when it has come: also to a data shard that comes to a coordinator
  Present ───────────────────────────────► a moment later (from a worker)
  ◄────────────────────────────────────── Failure at any time; Ping at any time, not answered
  Ping ──────────────────────────────────► answered with a Ping, by which shows whether something was lost
  ◄────────────────────────────────────── Membership, in an elastic group, when somebody departed or came in
  ◄────────────────────────────────────── RoundDone, in an elastic group, after the last Result of a round
  (Resume, Resumed, Holding, Fetch, Held, Standing, after a connection broke: drawn in `gradserver.protocol.resuming`)
  Serve ─────────────────────────────────► may ask this member for its state, for a joiner
  StateFailed ───────────────────────────► asks another one

joiner                                  coordinator of an elastic group that has begun
  Join ──────────────────────────────────► waits until there is a seat, and all shards know of it
  ◄────────────────────────────────────── Welcome, which says that it joins; then as above, up to Agreed
  Enter ─────────────────────────────────► waits for the end of a round
  ◄────────────────────────────────────── RoundDone, which says who sends it the state: in transfers
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
from typing import Final, NamedTuple

from gradserver.protocol.errors import ERRORS, GradServerError
from gradserver.protocol.exchange import ExchangeKey, Operation
from gradserver.protocol.limits import MAX_TEXT
from gradserver.protocol.positions import Claim, Claimed, Located, Register, Used
from gradserver.protocol.resuming import Fetch, Held, Holding, Resume, Resumed, Standing


@dataclass(frozen=True, slots=True)
class Join:
    """A worker wants in.

    Attributes:
        group: name of the group.
        name: what people call this worker.
        rank: the rank it must have, or -1 for any that is free.
        world_size: how many workers the group must have, or 0 for what the coordinator was told.
        timeout: seconds that this worker waits for the group to be complete, and for any one exchange.
    """

    group: str
    name: str
    rank: int
    world_size: int
    timeout: float


@dataclass(frozen=True, slots=True)
class Welcome:
    """The group is complete. ``credit`` in bytes; ``names`` by rank.

    ``shards`` are the URLs of the data shards beside the coordinator itself, ``rates`` compare them (its own is the
    first), and ``token`` is what this worker shows them. ``seats``, by rank, tell that the group is elastic. A
    ``durable`` one survives broken connections, and the coordinator, which has begun as often as ``incarnation`` says
    (`gradserver.protocol.resuming`); the token is then also what a Resume shows.
    ``founded`` is the epoch by which shards know the group, if that is another one. Who ``joins`` a group that has
    begun is not a member yet: seats, names and its rank are what they would be if it were. What a member
    gives ``late`` is to be kept for the next round ("keep"), or forgotten ("drop"); if empty, all are waited for.
    ``timeout`` is how long an exchange waits for a member that is alive, in seconds.
    ``nonfinite`` says what becomes of gradients that are not finite: "halt", "leave-out", "skip" or "propagate".
    """

    group: str
    rank: int
    epoch: int
    credit: int
    names: tuple[str, ...]
    shards: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    token: str = ""
    seats: tuple[int, ...] = ()
    durable: bool = False
    incarnation: int = 0
    founded: int = 0
    joins: bool = False
    late: str = ""
    timeout: float = 0.0
    nonfinite: str = "halt"


@dataclass(frozen=True, slots=True)
class Membership:
    """Membership of an elastic group, from ``epoch`` on.

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

    epoch: int
    seats: tuple[int, ...]
    names: tuple[str, ...]
    reason: str
    lost: bool
    entering: tuple[int, ...] = ()
    round: int = 0

    def behind(self, number: int) -> Membership:
        """Return the membership for a member that has ended round ``number``, and not the next one."""
        if not self.entering or number >= self.round:
            return self
        there = [(seat, name) for seat, name in zip(self.seats, self.names, strict=True) if seat not in self.entering]
        seats, names = zip(*there, strict=True) if there else ((), ())
        return replace(self, seats=seats, names=names)


class Transfer(NamedTuple):
    """The member with seat ``donor`` sends its state to the one with seat ``joiner``. Each transfer has a number.

    With ``waits`` the next round waits for the joiner; else that is sent the results unasked, until it has caught up.
    """

    number: int
    donor: int
    joiner: int
    waits: bool = True


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A round of an elastic group is over at all shards; ``epoch`` is that of the next one.

    ``transfers`` are of the state that members have when they have applied this round.
    """

    round: int
    epoch: int
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Serve:
    """This member can send its state to those who join."""


@dataclass(frozen=True, slots=True)
class Enter:
    """This joiner goes by the group's plan, and wants the state. Again, if it did not get it in ``transfer``.

    With ``waits`` the others are to wait for it, since more results come meanwhile than it can keep, for example.
    """

    transfer: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """This joiner has the state of that transfer, and has applied all rounds since that are over."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Entered:
    """From ``round`` on this joiner contributes."""

    round: int


@dataclass(frozen=True, slots=True)
class StateFailed:
    """The donor of that transfer cannot send its state."""

    transfer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Attend:
    """To a data shard: this connection is the one of ``rank`` in that group. ``token`` is from the Welcome.

    In an elastic group ranks are seats here, and ``epoch`` is the first one, or the version of the latest Resumed.
    """

    group: str
    epoch: int
    rank: int
    token: str


@dataclass(frozen=True, slots=True)
class Attended:
    """The shard knows the worker, who may push."""


@dataclass(frozen=True, slots=True)
class Enlist:
    """A data shard offers itself: workers reach it at ``url``; ``rate`` is its link's in Gbit/s, if it was told.

    ``token`` shows that the coordinator has started it; empty at any other.
    """

    url: str
    rate: float | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class Enlisted:
    """The coordinator takes it, and calls it by ``number``. If it is lost, and ``returns``, it is to be waited for."""

    number: int
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Ordered:
    """What a data shard is to do: the order is the payload."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What happened at a data shard: the report is the payload."""


@dataclass(frozen=True, slots=True)
class Propose:
    """The plan (in the payload) by which this worker wants to exchange from the next round on, ``round``.

    In place of the plan that is in force; or ``beside`` it, whose hash that is, as one more section. Then the worker
    names the sections that it has ``dropped``: who joins names none, and its plan is that of the group's next section.
    """

    hash: str
    round: int = 0
    beside: str = ""
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreed:
    """Every member proposed this plan; ``round`` is the first one to be exchanged by it.

    If it is a ``section`` of a plan that has more, the whole plan is the payload.
    """

    hash: str
    round: int
    section: int = 0


@dataclass(frozen=True, slots=True)
class Opens:
    """This member is about to exchange ``section`` in ``round``. Said only where a plan has several sections."""

    round: int
    section: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Before ``round`` this member's job has updated models, or has come to the top of its loop: neither of both.

    For the ``index``-th time since the round before. Which ones it has updated, and of which others it has dropped the
    gradients, are the bits of two numbers.
    """

    round: int
    index: int
    updated: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Follow:
    """This member has no data of its own: what do the others do before and in ``round``?

    It has done as many updates as ``index`` says since the round before.
    """

    round: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """What the others do: if anything is ``updated``, that comes first, as in `Steps`, or they are at the ``top``.

    Else they exchange ``section``. If all of them follow, which is to say that this has ``ended``, it is the first one,
    and nobody has any data. ``index`` is that of the Follow which this answers.
    """

    round: int
    section: int
    top: bool = False
    updated: int = 0
    dropped: int = 0
    ended: bool = False
    index: int = 0


@dataclass(frozen=True, slots=True)
class ShareMemory:
    """Where can this worker hand over memory, so that its gradients need not travel?"""


@dataclass(frozen=True, slots=True)
class MemoryAt:
    """A local socket's ``address``, and the ``token`` to show there. An empty address: nowhere."""

    address: str
    token: str


class Place(NamedTuple):
    """Where something lies in memory that a worker shares with the coordinator: ``offset`` in bytes."""

    segment: int
    offset: int


HERE: Final = Place(-1, 0)
"""The payload itself is shared memory: between threads of one process."""


class Push(NamedTuple):
    """One worker's contribution to one slice, or to several that follow one another.

    A contribution either travels as payload, or lies in shared memory. There its result is written too, over it.

    Attributes:
        key: which exchange.
        slice: which piece of it, in order from 0.
        weight: this worker's weight, constant over an exchange; 0 means that it does not count.
        present: whether there is data. Without it the contribution is all zeros (or not called for).
        operation: what this worker believes the exchange to be; None for buckets, the plan says it.
        slices: how many. More than one only in shared memory.
        place: where in shared memory the contribution lies (if present) and the result belongs.
        epoch: on the first slice of what depends on the world size, and of transfers, the membership that its sender
            goes by; 0 elsewhere, and in groups whose membership is fixed.
        target: where in shared memory the result belongs, in a durable group: there what is given is kept.
    """

    key: ExchangeKey
    slice: int
    weight: float = 1.0
    present: bool = True
    operation: Operation | None = None
    slices: int = 1
    place: Place | None = None
    epoch: int = 0
    target: Place | None = None


class Result(NamedTuple):
    """What became of a slice, or of several. ``weight`` is the sum over contributions that counted; 0 if none did.

    Without data (``present``) the result is zeros, or none was called for. If it is ``placed``, it lies in
    shared memory where the Push said (at its target, if it named one); else it is the payload. In elastic groups some
    of the seats that were there when the exchange began may be ``without`` a part in these slices: cut off, or late.
    Who listens is sent results of buckets that it has not pushed, always as payloads. In durable groups a bucket's
    result names the ``weights`` of those who counted, by seat; 0 for who did not.

    With the last result of a round the round may be ``over``, and the membership stays as it is: no RoundDone follows.

    What the seats ``nonfinite`` gave to these slices is not finite. If the group leaves that out, the result is the
    mean of the others; if it skips such rounds, there is none, and nothing of the round is to be applied. In
    ``weights`` theirs are negative.
    """

    key: ExchangeKey
    slice: int
    weight: float
    present: bool
    slices: int = 1
    placed: bool = False
    over: bool = False
    without: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    nonfinite: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """This worker has read so many bytes of unasked results: `gradserver.protocol.exchange.unasked_cost` of each."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Inquire:
    """Who is missing from this exchange?"""

    key: ExchangeKey


@dataclass(frozen=True, slots=True)
class Missing:
    """The workers that have yet to contribute, by name and rank; none when it is not they who are late."""

    key: ExchangeKey
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """A goodbye. ``failed`` says that an error is the reason, so that the others hear of a loss."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """Sent to see whether the connection still stands; nobody answers it."""


@dataclass(frozen=True, slots=True)
class BePresent:
    """Connect once more, as ``identity``, and let libzmq say there that this process runs.

    It may say nothing for ``silence`` seconds. No message ever passes there but the first, a Ping. Who is told so once
    more, with another identity, is to be present as that instead.
    """

    identity: str
    silence: float


@dataclass(frozen=True, slots=True)
class Present:
    """That has been done, and libzmq has said there for the first time that this process runs.

    From now on it would be noticed if it froze, whoever keeps Python's lock.
    """

    identity: str


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """What does the coordinator see? Anyone may ask."""


@dataclass(frozen=True, slots=True)
class Status:
    """The coordinator's snapshot; the payload is JSON."""


class Scope(IntEnum):
    """How much a failure takes with it."""

    EXCHANGE = 0
    """One exchange; the group goes on."""
    PROPOSAL = 1
    """The proposed plan; the worker may propose another."""
    CONNECTION = 2
    """This worker's connection, which the coordinator forgets after this message."""
    DATA = 3
    """What was asked about data; its name is in the fields."""


_MAX_LISTED = 32


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way to the worker that has to raise it.

    Attributes:
        scope: how much fails.
        error: name of the class in `gradserver.protocol.errors`.
        text: the message.
        fields: the error's typed facts: text, integer, or tuple of text.
        key: the exchange, for Scope.EXCHANGE.
    """

    scope: Scope
    error: str
    text: str
    fields: dict[str, str | int | tuple[str, ...]] = field(default_factory=dict)
    key: ExchangeKey | None = None

    @classmethod
    def of(cls, error: GradServerError, scope: Scope, key: ExchangeKey | None = None) -> Failure:
        """The message that carries ``error``."""
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
        """The error to raise. A class or field that this version does not know becomes the nearest it does."""
        kind = ERRORS.get(self.error, GradServerError)
        known = {name: value for name, value in self.fields.items() if name in kind._FIELDS}
        return kind(self.text, **known)


Message = (
    Join
    | Welcome
    | ShareMemory
    | MemoryAt
    | Propose
    | Agreed
    | Opens
    | Steps
    | Follow
    | Opened
    | Push
    | Result
    | Inquire
    | Missing
    | Leave
    | Ping
    | BePresent
    | Present
    | StatusRequest
    | Status
    | Failure
    | Enlist
    | Enlisted
    | Ordered
    | Reported
    | Attend
    | Attended
    | Membership
    | RoundDone
    | Resume
    | Resumed
    | Holding
    | Fetch
    | Held
    | Standing
    | Taken
    | Register
    | Located
    | Claim
    | Claimed
    | Used
    | Serve
    | Enter
    | Ready
    | Entered
    | StateFailed
)
