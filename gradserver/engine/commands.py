"""Commands that come out of the engine.

A class with an object for every slice is a named tuple: a frozen dataclass takes six times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gradserver.engine.declared import Kind
from gradserver.engine.policy import OnNonFinite
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import ExchangeKey, Operation
from gradserver.protocol.kernels import Words
from gradserver.protocol.means import PLAIN, Mean
from gradserver.protocol.messages import Message

make: Final = tuple.__new__
"""``make(Send, (…))`` makes a named tuple of all its fields, in half the time of ``Send(…)``."""


class Send(NamedTuple):
    """Send a message on a connection."""

    connection: int
    message: Message
    payloads: Sequence[Buffer] = ()


class Contribution(NamedTuple):
    """One worker's slices. ``payload`` None stands for zeros. Weight 0 never gets this far."""

    member_id: int
    weight: float
    payload: Buffer | None


RESULT = -1
"""In the place of a member id: the digest of the result."""


class Digests(NamedTuple):
    """Digests that are wanted of a reduction, which stands at byte ``at`` of all that its bucket's round hashes.

    The reducer puts them into ``found``, in parts that add up: (member id, digest).
    """

    at: int
    found: list[tuple[int, int]]


class Measured(NamedTuple):
    """Comparison of the contributions to one block of a mean, of ``numel`` elements. Sums are scaled to all of them.

    Attributes:
        stood_out: whether it was measured because its mean was larger than usual, and not because it was its turn.
        signal: unbiased estimate of the sum of squares of the true gradient.
        noise: unbiased estimate of the trace of the covariance, for a contribution of weight 1.
        members: member id, and three sums: of squares of its contribution, of products with the mean of the others,
            and of squares of that mean.
    """

    stood_out: bool
    numel: int
    signal: float
    noise: float
    members: Sequence[tuple[int, float, float, float]]


class Measures(NamedTuple):
    """Comparisons that are wanted of a reduction; the reducer puts them into ``found``.

    Attributes:
        stride: so many units have one that is measured.
        turn: number that tells which one it is: that of the unit ``-turn``, and every ``stride`` units another one.
        unit: elements of a unit. The first one begins with the bucket.
        usual: memory of the usual sums of squares, from one round to the next.
    """

    stride: int
    turn: int
    unit: int
    usual: Memory
    found: list[Measured]


class Repeated(NamedTuple):
    """Contributions of the same samples, which are to be compared: of a holder, and of its witnesses.

    The reducer puts the differences into ``found``: (member id, another one, squared norm of the difference, mean of
    the squared norms).
    """

    rows: Sequence[Contribution]
    found: list[tuple[int, int, float, float]]


class Memory:
    """Memory of the reductions of one slice of a bucket, from one round to the next.

    One reduction at a time has it. The engine keeps it, and never looks into it.

    Attributes:
        content: what the latest reduction has left; None before the first one.
    """

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content: Any = None


class Hashes(NamedTuple):
    """The keyed hash of each slice of a result that is wanted; the reducer puts them into ``found``, in order.

    It hashes memory of its own: what lies in a member's memory that member can change meanwhile.
    """

    key: Words
    found: list[bytes]


class Reduce(NamedTuple):
    """Combine contributions, given in rank order; then tell the engine with `Reduced`.

    ALL_GATHER and GATHER put the contributions one behind the other. ALL_TO_ALL does so with the portions for each
    rank, and its outcome is a tuple of these. So is that of SCATTER, which takes one contribution apart. Op.FIRST and
    Op.NONE copy the only one given.

    Attributes:
        slice: the first one; there may be several.
        first: the first element.
        nbytes: size of one contribution.
        numel: elements of one contribution.
        memory: memory of the reductions of this slice; None if there is nothing to remember.
        targets: memory that the result is written to. Some of it may be where contributions lie.
        keep: whether the result's bytes are wanted too, in memory of their own.
        digests: what to hash for the ledger; None for nothing.
        nonfinite: the policy about contributions to a mean that are not finite.
        world: the number of members that take part.
        places: for SCATTER and ALL_TO_ALL, the place of each target's owner among those that take part.
        spans: if that is decided for each slice: its first element and the one behind its last, from ``first`` on.
        mean: the rule by which contributions to a mean are averaged.
        squares: for a mean, the list that gets the sum of squares of each slice of the result (two numbers, see
            `gradserver.protocol.messages.Result`); None if it is not wanted.
        measures: for a mean of several contributions, what is to be measured of them; None for nothing.
        repeated: contributions to be compared first, in an audited round; None for none.
        each: elements of each slice but the last; 0 for slices of the largest size.
        hashes: the keyed hashes that are wanted of the result; None for none.
    """

    group: str
    epoch: int
    key: ExchangeKey
    slice: int
    operation: Operation
    first: int
    nbytes: int
    numel: int
    memory: Memory | None
    contributions: Sequence[Contribution]
    targets: Sequence[Buffer]
    keep: bool
    digests: Digests | None = None
    nonfinite: OnNonFinite = OnNonFinite.HALT
    world: int = 0
    places: Sequence[int] = ()
    spans: Sequence[tuple[int, int]] = ()
    mean: Mean = PLAIN
    squares: list[float] | None = None
    measures: Measures | None = None
    repeated: Repeated | None = None
    each: int = 0
    hashes: Hashes | None = None


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
