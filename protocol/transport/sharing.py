"""Messages by which a worker and the coordinator of one host share memory, over a local socket.

    worker                                       coordinator
      Offer + a memory's file descriptor ──────►  maps it
      ◄─────────────────────────────────────────  Taken, or Refused
      Release ─────────────────────────────────►  unmaps it

Several data shards of one host can take the same memory. No shard trusts it before it is sealed, and nothing can map it
after that. So all of them map it first, before it is offered to one after the other.

      Lend + a memory's file descriptor ───────►  maps it, and does not touch it
      ◄─────────────────────────────────────────  Lent, or Refused
      Offer + the same file descriptor ────────►  …

On a second connection they say everything else, from then on without a network between them
(`gradserver.protocol.transport.packets`):

      Talk ────────────────────────────────────►  finds the worker by its token
      ◄─────────────────────────────────────────  Talking, or Refused
      ◄──────────────── messages ──────────────►

Both sides prove that they map the same memory. The worker writes a random number into the segment before it offers it,
and `Taken` says which number the coordinator read there. The coordinator writes one too, and `Taken` says which, for
the worker to read. Both lie in the segment's header, where no data ever lies. The coordinator can only read memory that
is not ``writable``. So that memory stays whole whenever the coordinator dies, and the next coordinator can have it too.
Sealed memory can be mapped for reading again and again, but never again for writing. There, only the worker's number
proves anything.

Each message is one packet: a msgpack array ``[type, field, …]``.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Final

import msgpack

from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import KIB, MAX_COUNTER

PAGE_BYTES: Final = 4 * KIB
SEGMENT_HEADER_BYTES: Final = PAGE_BYTES
"""Bytes before a segment's data, so that the data is aligned to pages."""
WORKERS_PROOF: Final = slice(0, 32)
COORDINATORS_PROOF: Final = slice(64, 96)
PROOF_BYTES: Final = 32

MAX_SEGMENTS: Final = 256
"""Segments that one worker may share. Each costs both sides a descriptor and a mapping, and there are few of both."""
MAX_SEGMENT_BYTES: Final = 1 << 40
MAX_PACKET_BYTES: Final = 1 * KIB
MAX_REASON: Final = 200
"""Characters of a refusal's text. Even with four bytes each they fit into a packet."""

ADDRESS_PREFIX: Final = "gradserver-"
"""The prefix of every address. So a worker hands memory to no other program of its host, whatever it is told."""

F_SEAL_FUTURE_WRITE: Final = 0x10
"""A seal of Linux 5.1 (`fcntl` does not have it yet): nothing can map the memory for writing any more, or punch
holes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The request to take this memory, of ``size`` bytes in all, as ``segment``. The ``token`` is the worker's."""

    token: str
    segment: int
    size: int
    writable: bool = True


@dataclass(frozen=True, slots=True)
class Lend:
    """The request to map this memory, of ``size`` bytes in all, and to wait until it is offered as ``segment``."""

    token: str
    segment: int
    size: int


@dataclass(frozen=True, slots=True)
class Lent:
    """The answer that ``segment`` is mapped, and can be offered."""

    segment: int


@dataclass(frozen=True, slots=True)
class Release:
    """The news that ``segment`` is used no more."""

    segment: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer that ``segment`` is mapped. ``seen`` was read there, ``written`` was written there."""

    segment: int
    seen: bytes
    written: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The last word on this socket. Segments that were taken before stay as they are."""

    reason: str


@dataclass(frozen=True, slots=True)
class Talk:
    """The request to pass messages through this connection from now on. The ``token`` is the worker's."""

    token: str


@dataclass(frozen=True, slots=True)
class Talking:
    """The answer that messages will pass. It is the last packet that is not a message, or a part of one."""


SharingMessage = Offer | Release | Taken | Refused | Lend | Lent | Talk | Talking

_KINDS: Final[tuple[type[Any], ...]] = (Offer, Release, Taken, Refused, Lend, Lent, Talk, Talking)
_LIMITS: Final = {"segment": MAX_COUNTER, "size": MAX_SEGMENT_BYTES, "token": 64, "reason": MAX_REASON}
_TYPES: Final[dict[str, type[Any]]] = {"int": int, "str": str, "bytes": bytes, "bool": bool}


def encode_packet(message: SharingMessage) -> bytes:
    """Encode ``message`` as a packet."""
    if isinstance(message, Refused):
        message = Refused(message.reason.encode("utf-8", "replace").decode()[:MAX_REASON])
    packet: bytes = msgpack.packb([_KINDS.index(type(message)), *astuple(message)])
    return packet


def decode_packet(packet: bytes) -> SharingMessage:
    """Return the message in ``packet``. MalformedMessageError if there is none."""
    if len(packet) > MAX_PACKET_BYTES:
        raise MalformedMessageError(f"a packet of {len(packet)} bytes, the limit is {MAX_PACKET_BYTES}")
    try:
        unpacked = msgpack.unpackb(
            packet, raw=False, max_str_len=MAX_PACKET_BYTES, max_bin_len=64, max_array_len=8, max_map_len=0
        )
    except Exception as error:  # msgpack raises errors of many types, all of them about these bytes
        raise MalformedMessageError(f"a packet that is not msgpack: {str(error)[:120]}") from None
    if type(unpacked) is not list or not unpacked or type(unpacked[0]) is not int:
        raise MalformedMessageError("a packet that is not an array which begins with a message type")
    code, *values = unpacked
    if not 0 <= code < len(_KINDS):
        raise MalformedMessageError(f"unknown packet type {code}")
    kind = _KINDS[code]
    names = kind.__slots__
    if len(values) != len(names):
        raise MalformedMessageError(f"{kind.__name__} has {len(names)} fields, got {len(values)}")
    for name, value in zip(names, values, strict=True):
        _check(kind, name, value)
    message: SharingMessage = kind(*values)
    return message


def _check(kind: type[Any], name: str, value: Any) -> None:
    wanted = _TYPES[kind.__annotations__[name]]
    if type(value) is not wanted:
        raise MalformedMessageError(f"{kind.__name__}.{name} is {type(value).__name__}, expected {wanted.__name__}")
    if wanted is bool:
        good = True
    elif wanted is int:
        good = 0 <= value <= _LIMITS[name]
    elif wanted is bytes:
        good = len(value) == PROOF_BYTES
    else:
        good = len(value) <= _LIMITS[name]
    if not good:
        raise MalformedMessageError(f"{kind.__name__}.{name} is out of range")
