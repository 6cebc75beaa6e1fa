"""Parts of a run, as the parent sends them to its processes: plain values, as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradserver.protocol.planes import DIRECT, SHM, TCP

FLOAT_BYTES = 4
WIRES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of an element on the wire, by the name of the wire."""
BACKENDS = {f"{wrapper}-{plane}": plane for wrapper in ("ddp", "own") for plane in (TCP, SHM, DIRECT)}
"""Planes of wrappers over the backend "gradserver", by the names of these ways to train. The wrapper of "ddp-…" is
torch's, and that of "own-…" `gradserver.torch.DistributedDataParallel`."""


@dataclass(frozen=True, slots=True)
class Link:
    """Membership that a worker process opens: a wire format, the channel and the plane by name ("" is the default)."""

    wire: str = "fp32"
    channel: str = ""
    plane: str = ""

    @property
    def group(self) -> str:
        """Name of the group: each link has its own."""
        return f"bench-{self.wire}-{self.channel or 'default'}" + (f"-{self.plane}" if self.plane else "")


@dataclass(frozen=True, slots=True)
class Seat:
    """Role of one process of a fleet, and the connections that it makes before the first measurement.

    Attributes:
        rank: its place among `workers`.
        workers: number of workers.
        url: URL of the coordinator; empty for none.
        links: memberships to open.
        store: file by which the processes of a gloo group find each other; empty for no gloo.
        hub: URL of the plain pyzmq peer; empty for none.
        host: address at which this process can be reached, for the ring of plain sockets.
        ring: whether to connect that ring.
        servers: process ids of the coordinator and its data shards.
        timeout: time limit of each wait, in seconds.
    """

    rank: int
    workers: int
    url: str = ""
    links: tuple[Link, ...] = ()
    store: str = ""
    hub: str = ""
    host: str = "127.0.0.1"
    ring: bool = False
    servers: tuple[int, ...] = ()
    timeout: float = 120.0

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Seat:
        """Make a seat of the dict that `asdict` made."""
        links = tuple(Link(**link) for link in fields["links"])
        return cls(**{**fields, "links": links, "servers": tuple(fields["servers"])})


@dataclass(frozen=True, slots=True)
class Contender:
    """Way to do the work of a case. `kind` names its class (see `gradserver.tools.bench.contenders`)."""

    name: str
    kind: str
    wire: str = "fp32"
    channel: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    plane: str = ""

    @property
    def link(self) -> Link:
        """Membership that it uses, if it is one of gradserver."""
        return Link(self.wire, self.channel, self.plane)


@dataclass(frozen=True, slots=True)
class Case:
    """Work that several contenders do in turn."""

    nbytes: int
    contenders: tuple[Contender, ...]

    @property
    def numel(self) -> int:
        """Number of elements, all fp32 in the worker's memory."""
        return self.nbytes // FLOAT_BYTES

    def to_dict(self) -> dict[str, Any]:
        """Convert to the form that `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        """Make the case that `to_dict` wrote."""
        return cls(fields["nbytes"], tuple(Contender(**one) for one in fields["contenders"]))
