"""What a run is made of, as the parent tells it to the processes that it starts: plain values, sent as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FLOAT_BYTES = 4
WIRES = {"fp32": 4, "bf16": 2, "int8": 1}
"""What an element takes on the wire, in bytes, by the name of the wire."""


class BenchError(Exception):
    """The run cannot go on. The text is for people and says what to do; of several lines perhaps."""


@dataclass(frozen=True, slots=True)
class Link:
    """One membership that a worker process opens: a wire format, and the channel by name ("" is the default)."""

    wire: str = "fp32"
    channel: str = ""

    @property
    def group(self) -> str:
        """The group's name: each link is a group of its own."""
        return f"bench-{self.wire}-{self.channel or 'default'}"


@dataclass(frozen=True, slots=True)
class Seat:
    """One process of a fleet: who it is, and what it connects to before the first measurement.

    Attributes:
        rank: its place among `workers`.
        workers: how many there are.
        url: the coordinator; empty for none.
        links: memberships to open.
        store: file over which the processes of a gloo group find each other; empty for no gloo.
        hub: the plain pyzmq peer; empty for none.
        host: address at which this process can be reached, for the ring of plain sockets.
        ring: whether to connect that ring.
        timeout: seconds that anything may wait.
    """

    rank: int
    workers: int
    url: str = ""
    links: tuple[Link, ...] = ()
    store: str = ""
    hub: str = ""
    host: str = "127.0.0.1"
    ring: bool = False
    timeout: float = 120.0

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Seat:
        """The seat that `asdict` made a dict of."""
        return cls(**{**fields, "links": tuple(Link(**link) for link in fields["links"])})


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of doing a case's work. `kind` names the class that does it (see `gradserver.bench.contenders`)."""

    name: str
    kind: str
    wire: str = "fp32"
    channel: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def link(self) -> Link:
        """The membership that it uses, if it is one of ours."""
        return Link(self.wire, self.channel)


@dataclass(frozen=True, slots=True)
class Case:
    """The same work for several contenders, which take turns at it."""

    nbytes: int
    contenders: tuple[Contender, ...]

    @property
    def numel(self) -> int:
        """Elements, all fp32 in the worker's memory."""
        return self.nbytes // FLOAT_BYTES

    def to_dict(self) -> dict[str, Any]:
        """As `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        """The case that `to_dict` wrote."""
        return cls(fields["nbytes"], tuple(Contender(**one) for one in fields["contenders"]))
