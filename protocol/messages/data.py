"""Messages about slices, and about the memory that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple

from gradserver.protocol.checks import brief, integer
from gradserver.protocol.codecs import codec_from
from gradserver.protocol.declared import Field
from gradserver.protocol.dtypes import BY_CODE
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.exchange import EXACT, Kind, Op, Operation
from gradserver.protocol.fields import (
    Count,
    Flag,
    Key,
    Proof,
    Ranks,
    Squares,
    Text,
    Texts,
    Total,
    Weight,
    Weights,
    any_rank,
    count,
)
from gradserver.protocol.limits import CODE_BYTES, MAX_NUMEL, MAX_SLICES, RUN_BYTES, STAMP_BYTES
from gradserver.protocol.message_family import MessageKind, Payloads, message, refuse_payloads

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


@message(5, Payloads.optional(RUN_BYTES), shorter=(5, 7, 8))
class Push(NamedTuple):
    """One worker's contribution to one slice, or to several that follow one another.

    A contribution either travels as payload, or lies in shared memory. There its result is written too, over it.

    Attributes:
        key: the exchange.
        slice: its slice, in order from 0.
        weight: this worker's weight, constant over an exchange; 0 means that it does not count.
        present: whether there is data. Without it the contribution is all zeros (or not called for).
        operation: the exchange's operation, as this worker has it; None for buckets, where the plan has it.
        slices: how many. Of a lossy codec, each has a message of its own.
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
        if self.target is not None and self.place is None:
            raise MalformedMessageError("a Push that names a place for its result, and none for what it gives")


@message(6, Payloads.optional(RUN_BYTES), shorter=(4, 5, 6, 7, 8, 9, 10, 11))
class Result(NamedTuple):
    """The result of a slice, or of several that were pushed together.

    ``weight`` is the sum over contributions that counted; 0 if none did. Without data (``present``) the result is
    zeros, or none was called for. If it is ``placed``, it lies in shared memory where the Push said (at its target, if
    it named one); else it is the payload. Some of the members that were there when the exchange began may be
    ``without`` a part in these slices: cut off, or late. A listener is sent results of buckets that it has not pushed,
    always as payloads. In durable groups a bucket's result names the ``weights`` of the contributions that counted, by
    member id; 0 for the others.

    With the last result of a round the round may be ``over``, and the membership stays as it is: no RoundDone follows.

    What the members ``nonfinite`` gave to these slices is not finite. If the group leaves that out, the result is the
    mean of the others. If the group skips such rounds, there is no result, and nothing of the round is to be applied.
    In ``weights`` theirs are negative.

    With the mean of a bucket come the ``squares`` of what members apply: two numbers for each slice. Their sum is the
    sum of the squares of its elements. The second is the rest that rounding has left of the first. So the sum over all
    slices is the same, rounded, however the bucket was cut. It is NaN or infinite as the elements are.

    In a durable group members keep a result for one another, with its ``proof`` that it was made: nothing else is
    handed on (`gradserver.engine.proofs`).
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
    squares: Squares = ()
    proof: Proof = b""

    def check_payloads(self, count: int) -> None:
        """Raise MalformedMessageError unless data travels as payload or lies in shared memory, one of the two."""
        if count != (self.present and not self.placed):
            raise refuse_payloads("Result")


@message(29)
@dataclass(frozen=True, slots=True)
class Taken(MessageKind):
    """The bytes of unasked results that this worker has read: `gradserver.protocol.exchange.unasked_cost` of each."""

    nbytes: Count


def squares_of(squares: Sequence[float], start: int, stop: int) -> tuple[float, ...]:
    """Return those of a `Result`'s slices from ``start`` up to ``stop``, counted from its first one."""
    return tuple(squares[2 * start : 2 * stop])


def proof_of(proof: bytes, start: int, stop: int) -> bytes:
    """Return that of a `Result`'s slices from ``start`` up to ``stop``, counted from its first one."""
    if not proof:
        return proof
    return proof[:STAMP_BYTES] + proof[STAMP_BYTES + start * CODE_BYTES : STAMP_BYTES + stop * CODE_BYTES]


def made_in(proof: bytes) -> int:
    """Return the generation in which slices were made, as their proof says."""
    return int.from_bytes(proof[:STAMP_BYTES], "little")


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
