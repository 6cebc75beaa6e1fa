"""Events that go into the engine.

A class with an object for every slice is a named tuple: a frozen dataclass takes six times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradserver.engine.commands import Measured
from gradserver.engine.declared import Kind
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import ExchangeKey
from gradserver.protocol.messages import Message, Split


class Received(NamedTuple):
    """A message came in on a connection. Connections are numbered by the loop and never reused."""

    connection: int
    message: Message
    payloads: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class Branched:
    """The owner of the connection ``base`` asks for a sub-group on ``connection``, which ``base`` carries."""

    connection: int
    base: int
    message: Split


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
    """A reduction met NaN or Inf. ``member_id`` -1: every contribution was finite, and the mean overflowed."""

    member_id: int
    element: int
    value: str
    exact: bool = True
    """True for that very element; false for one near it that shared its encoding."""


class Finding(NamedTuple):
    """A contribution to ``slice`` is not finite; ``element`` of the reduction is the first such one."""

    slice: int
    member_id: int
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

    member_id: int
    error: GradServerError


@dataclass(frozen=True, slots=True)
class Broken:
    """A reduction ended with an exception: ``cause`` says which one."""

    cause: str


class Reduced(NamedTuple):
    """A `Reduce` was carried out. ``outcome`` holds the result's bytes, if asked for, or says what was wrong.

    ``digests`` are those that were asked for: of each contribution by its member id, and of the result by `RESULT`.
    ``squares`` are those of the result: two numbers for each slice. ``measured`` compares contributions,
    and ``compared`` those of the same samples. ``hashes`` are those of the result's slices, if they were asked for.
    """

    group: str
    epoch: int
    key: ExchangeKey
    slice: int
    outcome: Buffer | tuple[Buffer, ...] | NonFinite | Sifted | Undecodable | Broken | None
    digests: Sequence[tuple[int, int]] = ()
    squares: Sequence[float] = ()
    measured: Sequence[Measured] = ()
    compared: Sequence[tuple[int, int, float, float]] = ()
    hashes: Sequence[bytes] = ()


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


Event = Received | Garbled | Disconnected | Reduced | Tick | Stop | Restored | Branched
