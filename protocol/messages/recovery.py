"""Recovery: members and a coordinator that has come back tell each other which results each holds, so none is lost.

In a *durable* group (a Welcome says so) every member keeps what it gives until it has the result. It keeps the result
until no present member can lack it any more. A coordinator writes decisions, and no gradients. It may come back, or one
member may come back on a new connection to a coordinator that lives. Then every member says what it holds. Results that
some hold are passed on; the others are made again from the same contributions.

What a member keeps
───────────────────
- Of a bucket's slice it keeps what it gives, until its result is there. (In shared memory the result goes to
  `Push.target`.) It keeps the result as it came, until the same slice of the next round is answered, or another plan is
  agreed on. With it, it keeps the weights that counted there (``Result.weights``): of departed members nothing else
  tells.
- Of collectives and transfers it keeps what it gives, until its result is there. It keeps a result for a time: slices
  of its collectives (of its transfers) that were answered later cost no more than its credit and one slice. A member
  that lacks an earlier one cannot have contributed to these. A broadcast's root and a transfer's source keep a copy of
  what they gave, as if it were their result.

The conversation, in its order on each connection
─────────────────────────────────────────────────

member                                   coordinator
  (a new connection, as its own broke)
  Resume ────────────────────────────────► knows the member by its token; waits for the others
  ◄─────────────────────────────────────── Resumed, or Failure of scope CONNECTION: LeftOutError (others went on
                                           without it: join again), JoinRefusedError (there is no such group)
                                         … and Resumed, unasked, to every member with a connection
  (says nothing of exchanges until Standing; ShareMemory and Propose, if unanswered, are said again now)
  ◄─────────────────────────────────────── Membership of every epoch later than Resume's, the earliest first
  ◄─────────────────────────────────────── Agreed, if a Propose said now is for the plan that all had agreed on
  Holding + spans ───────────────────────► to each data half; of what came before this Resumed, or with it
  ◄─────────────────────────────────────── Fetch of a slice that it holds and another lacks, any number
  Held + slice ──────────────────────────► in any order
  ◄─────────────────────────────────────── Result, unasked, of each slice that it lacks and another holds: of the
                                           round that it is in, of collectives, of transfers. As payload, always
  ◄─────────────────────────────────────── RoundDone, if its round is over
  ◄─────────────────────────────────────── Result, unasked, of each slice of the round after that which one holds
  ◄─────────────────────────────────────── Failure of scope EXCHANGE for what cannot be made again
  ◄─────────────────────────────────────── Standing
  Push … ────────────────────────────────► of all that it has begun, each slice without a result, again, in order

| message   | from and to          | when                                                                             |
|-----------|----------------------|----------------------------------------------------------------------------------|
| Resume    | member → primary     | first on a new connection, instead of Join                                       |
| Resumed   | primary → member     | the answer; and at any time on a connection that stands. It makes everything     |
|           |                      | that this member pushed and that is unanswered void. A later one makes an        |
|           |                      | earlier one void, and what was said because of it                                |
| Resumed   | data shard → member  | the same ``generation``, behind the last that it has sent of what is void now:   |
|           |                      | when it hears of the recovery, or behind Attended                                |
| Holding   | member → data half   | once for every Resumed, with its ``generation``, of the slices that are that     |
|           |                      | half's: to each when all have said Resumed. What was sent before these has been  |
|           |                      | read then                                                                        |
| Fetch     | data half → member   | between Holding and Standing; only for what the Holding (or a Result since then) |
|           |                      | named                                                                            |
| Held      | member → data half   | once for every Fetch. Which holder is asked is the coordinator's choice          |
| Standing  | data half → member   | when every member present has said Holding, and has every result that any of     |
|           |                      | them holds. From then on all is as usual: what has a result is settled at all    |
|           |                      | members alike, and is never pushed                                               |

Guarantees
──────────
- Between Resumed and Standing no Result comes but what is said above, and each slice once at most. A Result for a slice
  that the member has answered already is an error of the coordinator's.
- Results of a bucket's slices always come in their order. So what any member holds of an open bucket is a prefix, and
  so is what a departed member counted for.
- A member that pushes before Standing is not heard: what it says is dropped.
- Of a collective or transfer that is not done at a member, some slices were answered without bytes while others get
  some. If it keeps no copy of these (others' chunks), they are LACKING, and are given again. Of one that is done there,
  at all data halves, they are OVER. If no member holds a slice that one lacks, each member that is not done gets a
  ConnectionLostError. Bytes for a slice of which a member gets none say that it was answered; if they are fetched from
  it, its Held has none.
- A call that has failed at a member gives a MembershipChangedError to those that lack it, if it gave one there, and
  else a ConnectionLostError. So it is called again by all members, or by none.
- The first Push of an exchange behind a Standing says all that a first slice says, whichever slice it is. That is
  ``operation``, and ``epoch`` where the world size matters. A Push of several slices contains no settled one.
- If the connection breaks at any point of it, the member begins again with Resume.
- The connections to all data shards are one. A member that loses one of them makes all anew. Behind Resumed it says
  Attend to each shard, with the ``generation`` for an epoch.
- All waits end: a member that does not come back, or does not say Holding, departs. The others hear of it (Membership).
  If the group breaks because of that, they get the error as a Failure of scope CONNECTION.
- A member of a group that is not durable is out when its connection breaks. It says Resume too, to hear that
  from a coordinator that lives: LeftOutError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import listed, text
from gradserver.protocol.declared import Field
from gradserver.protocol.errors import LimitExceededError, MalformedMessageError
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.fields import (
    Count,
    Flag,
    Key,
    Proof,
    Rank,
    Ranks,
    Squares,
    Stated,
    Text,
    Total,
    Weight,
    Weights,
)
from gradserver.protocol.limits import (
    MAX_COUNTER,
    MAX_FRAME_BYTES,
    MAX_SHARDS,
    MAX_TEXT,
    MAX_WEIGHT,
    MAX_WORLD_SIZE,
    SLICE_BYTES,
)
from gradserver.protocol.message_family import MessageKind, Payloads, message, refuse_payloads

MAX_SPANS_BYTES: Final = MAX_FRAME_BYTES
"""Bytes of a Holding, at most."""


@message(23)
@dataclass(frozen=True, slots=True)
class Resume(MessageKind):
    """The message that a member is back, on a new connection. In a group that is not durable it is a question.

    Attributes:
        group: name of the group.
        member_id: its id there.
        token: what the Welcome brought.
        epoch: the latest that it has heard of.
        plan: the hash of the plan that it goes by; empty if none was agreed on.
        serves: whether it can send its state to learners.
    """

    group: Text
    member_id: Rank
    token: Text
    epoch: Stated
    plan: Text
    serves: Flag = False


@message(24)
@dataclass(frozen=True, slots=True)
class Resumed(MessageKind):
    """The beginning of a recovery: say what you hold, and wait for Standing.

    Attributes:
        incarnation: how often the coordinator has started on its directory.
        generation: the number of this recovery; what follows names it.
        shards: where its data shards are now, as in a Welcome. A member with connections elsewhere makes all of them
            anew.
    """

    incarnation: Count
    generation: Count
    shards: Annotated[tuple[str, ...], Field(listed(text(MAX_TEXT), MAX_SHARDS))] = ()


@message(25, Payloads.one(MAX_SPANS_BYTES))
@dataclass(frozen=True, slots=True)
class Holding(MessageKind):
    """The results that this member holds; the payload is a list of `Span`, little-endian.

        how many columns of weights: u16
        each of them                 how many ids: u16, and the weight of each: f64
        each span                    state: u8, column (0: none, 1: the first, …): u16, stream: u8,
                                     number, part: u64, source, target: i16, first, stop, bytes: u32, made: u64

    Attributes:
        generation: that of the Resumed.
        round: the first round of which it lacks a result, or the RoundDone.
        weight: with which it takes part in that round; 0 if it has pushed nothing of it.
    """

    generation: Count
    round: Stated
    weight: Weight


@message(26)
@dataclass(frozen=True, slots=True)
class Fetch(MessageKind):
    """The request for the result of this slice once more."""

    generation: Count
    key: Key
    slice: Count


@message(27, Payloads.optional(SLICE_BYTES))
@dataclass(frozen=True, slots=True)
class Held(MessageKind):
    """A result that this member holds, as it came: what is said of it, and its ``proof``, are the Result's.

    The payload is the result, if it is ``present``; zeros need none.
    """

    generation: Count
    key: Key
    slice: Count
    weight: Total
    present: Flag
    without: Ranks = ()
    weights: Weights = ()
    squares: Squares = ()
    proof: Proof = b""

    def check_payloads(self, count: int) -> None:
        """Raise MalformedMessageError unless there is a payload if it is present, and none else."""
        if count != self.present:
            raise refuse_payloads("Held")


@message(28)
@dataclass(frozen=True, slots=True)
class Standing(MessageKind):
    """The end of a recovery: go on, with ``round``. What has no result is to be pushed (again)."""

    generation: Count
    round: Count


class State(IntEnum):
    """The state of some slices of an exchange at a member."""

    LACKING = 0
    """The member has begun it, and has no result. For collectives and transfers only."""
    HELD = 1
    """The member has the result, and keeps it."""
    OVER = 2
    """The member is done with it, and keeps nothing: others got the bytes, or it is too old. The latest `MAX_OVER`."""
    FAILED = 3
    """The member is done with it, as it failed. The latest of these, too."""
    CHANGED = 4
    """The same, and with a MembershipChangedError: if any member calls again, all do."""
    ELSEWHERE = 5
    """The member holds results of this bucket's section in that round, all of them at other shards. One bucket of each
    such round is named, as its slice 0. A shard that has no part of a section hears of that here only."""


class Span(NamedTuple):
    """Slices ``first`` up to ``stop`` of an exchange. Those of an exchange do not overlap.

    ``weights`` are those of the slices' Results, if these are held, by member id. Of collectives and transfers
    ``nbytes`` is the length of each result: the one that is held (0: it has no bytes), or that is lacking. A result
    that is held was ``made`` in this generation, as its proof says. If it was made anew since, that one counts.
    """

    state: State
    key: ExchangeKey
    first: int
    stop: int
    weights: tuple[float, ...] = ()
    nbytes: int = 0
    made: int = 0


MAX_OVER: Final = 256
"""Collectives and transfers that a Holding names as `State.OVER`, or `State.FAILED` and `State.CHANGED`."""
MAX_COLUMNS: Final = 256
"""Different ``weights`` that a Holding tells. It says nothing of slices with others. There is one weight for each
member and round, unless buckets are weighed differently. So there are as many as members departed from what is open."""
_SHORT: Final = struct.Struct("<H")
_SPAN: Final = struct.Struct("<BHBQQhhIIIQ")
_LAST_STREAM: Final = int(max(Stream))


def pack_spans(spans: Iterable[Span]) -> bytes:
    """Return the payload of a Holding."""
    columns: dict[tuple[float, ...], int] = {(): 0}
    packed: list[bytes] = []
    for state, key, first, stop, weights, nbytes, made in spans:
        if weights not in columns and len(columns) <= MAX_COLUMNS:
            columns[weights] = len(columns)
        packed.append(_SPAN.pack(state, columns.get(weights, 0), *key, first, stop, nbytes, made))
    told = [_SHORT.pack(len(weights)) + struct.pack(f"<{len(weights)}d", *weights) for weights in columns if weights]
    return b"".join((_SHORT.pack(len(told)), *told, *packed))


def unpack_spans(data: Buffer) -> list[Span]:
    """Return the content of a Holding. A ProtocolError says what is wrong with bytes that hold none."""
    if len(data) > MAX_SPANS_BYTES:
        raise LimitExceededError(f"{len(data)} bytes of what a member holds, the limit is {MAX_SPANS_BYTES}")
    columns, at = _unpack_columns(data)
    if (len(data) - at) % _SPAN.size:
        raise MalformedMessageError(
            f"{len(data) - at} bytes of slices that a member holds, expected a multiple of {_SPAN.size}"
        )
    return [_span(columns, *values) for values in _SPAN.iter_unpack(memoryview(data)[at:])]


def _unpack_columns(data: Buffer) -> tuple[list[tuple[float, ...]], int]:
    """Return the table of weights in front of the spans, and where it ends. The first column is the empty one."""
    columns: list[tuple[float, ...]] = [()]
    count, at = _short(data, 0, MAX_COLUMNS, "columns of weights")
    for _ in range(count):
        size, at = _short(data, at, MAX_WORLD_SIZE, "weights in a column")
        if len(data) - at < 8 * size:
            raise MalformedMessageError(f"{len(data) - at} bytes of what a member holds, where {size} weights begin")
        columns.append(struct.unpack_from(f"<{size}d", data, at))
        if not all(-MAX_WEIGHT <= weight <= MAX_WEIGHT for weight in columns[-1]):
            raise MalformedMessageError(
                f"a column of weights, of which one is not between {-MAX_WEIGHT:g} and {MAX_WEIGHT:g}"
            )
        at += 8 * size
    return columns, at


def _short(data: Buffer, at: int, most: int, what: str) -> tuple[int, int]:
    """Return how many of something follow, and where."""
    if len(data) - at < _SHORT.size:
        raise MalformedMessageError(f"what a member holds ends where the number of {what} was expected")
    (count,) = _SHORT.unpack_from(data, at)
    if count > most:
        raise LimitExceededError(f"{count} {what} in what a member holds, the limit is {most}")
    return count, at + _SHORT.size


def _span(
    columns: Sequence[tuple[float, ...]],
    state: int,
    column: int,
    stream: int,
    number: int,
    part: int,
    source: int,
    target: int,
    first: int,
    stop: int,
    nbytes: int,
    made: int,
) -> Span:
    if (
        state > State.ELSEWHERE
        or stream > _LAST_STREAM
        or max(number, part, made) > MAX_COUNTER
        or not -1 <= min(source, target) <= max(source, target) < MAX_WORLD_SIZE
        or first >= stop
        or nbytes > (SLICE_BYTES if stream != Stream.BUCKET else 0)
    ):
        what = (stream, number, part, source, target)
        raise MalformedMessageError(f"no member holds slices {first} to {stop} of {what} in the state {state}")
    if column >= len(columns) or (column and (state != State.HELD or stream != Stream.BUCKET)):
        which = f"column {column} of {len(columns) - 1}"
        raise MalformedMessageError(f"slices in the state {state} of stream {stream} with weights from {which}")
    return Span(
        State(state), ExchangeKey(stream, number, part, source, target), first, stop, columns[column], nbytes, made
    )
