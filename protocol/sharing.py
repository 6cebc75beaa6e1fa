"""What a worker and the coordinator of one host say to each other to share memory, over a local socket.

worker                                       coordinator
  Offer + a memory's file descriptor ──────►  maps it
  ◄─────────────────────────────────────────  Taken, or Refused
  Release ─────────────────────────────────►  lets go of it

Several data shards of one host can take the same memory. None of them trusts it before it is sealed, and then
nobody can map it any more: so all of them map it first, before it is offered to one after the other.

  Lend + a memory's file descriptor ───────►  maps it, and does not touch it
  ◄─────────────────────────────────────────  Lent, or Refused
  Offer + the same file descriptor ────────►  …

On a second connection they say everything else, from then on without a network between them
(`gradserver.protocol.packets`):

  Talk ────────────────────────────────────►  whose connection this is
  ◄─────────────────────────────────────────  Talking, or Refused
  ◄──────────────── messages ──────────────►

That both map the same memory is not believed but proven. The worker writes a random number into the segment
before it offers it, and `Taken` says which number the coordinator read there; the coordinator writes one too,
and `Taken` says which, for the worker to read. Both lie in the segment's header, where no data ever lies. Memory that
is not ``writable`` the coordinator can only read, so that it stays whole whenever the coordinator dies, and the next
one can have it too: what is sealed can be mapped for reading again and again, for writing never more. Its proof is
the worker's alone.

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
"""A segment's data begins here, so that it is aligned to pages."""
WORKERS_PROOF: Final = slice(0, 32)
COORDINATORS_PROOF: Final = slice(64, 96)
PROOF_BYTES: Final = 32

MAX_SEGMENTS: Final = 256
"""Segments that one worker may share. Each costs both sides a descriptor and a mapping, and there are few of both."""
MAX_SEGMENT_BYTES: Final = 1 << 40
MAX_PACKET_BYTES: Final = 1 * KIB
MAX_REASON: Final = 200
"""Characters of a refusal's text: even if each takes four bytes they go into a packet."""

ADDRESS_PREFIX: Final = "gradserver-"
"""Every address begins so: a worker hands memory to no other program of its host, whatever it is told."""

F_SEAL_FUTURE_WRITE: Final = 0x10
"""Of Linux 5.1 (`fcntl` does not have it yet): nobody can map the memory for writing any more, or punch holes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Take this memory, of ``size`` bytes in all, as ``segment``. The ``token`` says whose it is."""

    token: str
    segment: int
    size: int
    writable: bool = True


@dataclass(frozen=True, slots=True)
class Lend:
    """Map this memory, of ``size`` bytes in all, and wait until it is offered as ``segment``."""

    token: str
    segment: int
    size: int


@dataclass(frozen=True, slots=True)
class Lent:
    """``segment`` is mapped, and can be offered."""

    segment: int


@dataclass(frozen=True, slots=True)
class Release:
    """``segment`` is used no more."""

    segment: int


@dataclass(frozen=True, slots=True)
class Taken:
    """``segment`` is mapped. ``seen`` was read there, ``written`` was written there."""

    segment: int
    seen: bytes
    written: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The last word on this socket. Segments that were taken before stay as they are."""

    reason: str


@dataclass(frozen=True, slots=True)
class Talk:
    """Messages shall pass through this connection from now on. The ``token`` says whose it is."""

    token: str


@dataclass(frozen=True, slots=True)
class Talking:
    """So they will: this packet was the last one that is not a message, or a part of one."""


SharingMessage = Offer | Release | Taken | Refused | Lend | Lent | Talk | Talking

_KINDS: Final[tuple[type[Any], ...]] = (Offer, Release, Taken, Refused, Lend, Lent, Talk, Talking)
_LIMITS: Final = {"segment": MAX_COUNTER, "size": MAX_SEGMENT_BYTES, "token": 64, "reason": MAX_REASON}
_TYPES: Final[dict[str, type[Any]]] = {"int": int, "str": str, "bytes": bytes, "bool": bool}


def encode_packet(message: SharingMessage) -> bytes:
    """The packet that is ``message``."""
    if isinstance(message, Refused):
        message = Refused(message.reason.encode("utf-8", "replace").decode()[:MAX_REASON])
    packet: bytes = msgpack.packb([_KINDS.index(type(message)), *astuple(message)])
    return packet


def decode_packet(packet: bytes) -> SharingMessage:
    """The message in ``packet``; MalformedMessageError if there is none."""
    if len(packet) > MAX_PACKET_BYTES:
        raise MalformedMessageError(f"a packet of {len(packet)} bytes, the limit is {MAX_PACKET_BYTES}")
    try:
        unpacked = msgpack.unpackb(
            packet, raw=False, max_str_len=MAX_PACKET_BYTES, max_bin_len=64, max_array_len=8, max_map_len=0
        )
    except Exception as error:  # msgpack raises a zoo of types, all of them about these bytes
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
