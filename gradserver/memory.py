"""The coordinator's side of memory that it shares with workers of its own host.

A worker hands over memory as a file descriptor, through a local socket (`protocol.sharing` has the talk). The
memory has no name in any file system: it is gone with the last process that maps it, however that one ended.
The socket's name belongs to a network namespace, so a worker that cannot see this host's processes finds
nobody there, and stays with TCP.

Whoever is at the other end may be hostile. What could become dangerous later is made impossible before the
first byte of a segment is read:

- It cannot shrink or grow (the worker's seals), so no access is ever beyond its end: that would be a SIGBUS.
- Every page of it exists, and can be taken away no more (our seal): a page that is missing would be allocated
  when *we* touch it, so that a stranger could make the coordinator run out of memory.

Nothing here waits: sockets do not block, and only one packet is taken at a time.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import select
import socket
import stat
import sys
from typing import Final

from protocol.errors import GradServerError, LimitExceededError, MalformedMessageError, UnexpectedMessageError
from protocol.messages import Place
from protocol.sharing import (
    ADDRESS_PREFIX,
    COORDINATORS_PROOF,
    F_SEAL_FUTURE_WRITE,
    MAX_PACKET_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    PAGE_BYTES,
    PROOF_BYTES,
    SEGMENT_HEADER_BYTES,
    WORKERS_PROOF,
    Lend,
    Lent,
    Offer,
    Refused,
    Release,
    Taken,
    decode_packet,
    encode_packet,
)

log = logging.getLogger("gradserver")

MAX_MAPPINGS: Final = 16_384
"""Segments of all workers together: a quarter of what Linux lets a process map, the allocator's needs included."""
MAX_STRANGERS: Final = 64
"""Connections that have yet to show a token. One more, and the oldest has to go."""
_ACCEPTS: Final = 16
"""Connections accepted before the loop goes on: a flood of them must not stop it."""
_BACKLOG: Final = 1024
_FDS_TAKEN: Final = 4
"""Descriptors taken from a packet, to be closed if they are not exactly one; the kernel closes what is beyond."""

_NEEDED_SEALS: Final = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW


class MemoryServer:
    """Takes memory from workers, and finds the places in it that their messages speak of.

    Args:
        poller: of the loop that calls `ready` with those descriptors that are not its own.
    """

    def __init__(self, poller: select.poll) -> None:
        self._poller = poller
        self._members: dict[bytes, _Member] = {}
        self._tokens: dict[str, _Member] = {}
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[int, _Connection] = {}
        self._paused = False
        self.address = ""
        """Of the local socket; empty where there is none, and then no memory can be shared."""
        self._listener = self._listen()

    def _listen(self) -> socket.socket | None:
        if sys.platform != "linux":
            return None
        address = ADDRESS_PREFIX + secrets.token_hex(16)
        listener = None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            listener.bind("\0" + address)
            listener.listen(_BACKLOG)
        except OSError as error:  # a sandbox may forbid it
            log.info("no memory can be shared with workers of this host: %s", error.strerror or error)
            if listener is not None:
                listener.close()
            return None
        self.address = address
        self._poller.register(listener.fileno(), select.POLLIN)
        return listener

    # ── what the server of workers calls ──────────────────────────────────────────────────────────────

    def admit(self, identity: bytes) -> tuple[str, str]:
        """Where ``identity`` may hand over memory, and the token it has to show; twice empty if nowhere."""
        if self._listener is None:
            return "", ""
        if self._paused:
            self._paused = False
            self._poller.register(self._listener.fileno(), select.POLLIN)
        member = self._members.get(identity)
        if member is None:
            member = self._members[identity] = _Member(secrets.token_hex(16))
            self._tokens[member.token] = member
        return self.address, member.token

    def view(self, identity: bytes, place: Place) -> memoryview | None:
        """The memory from ``place`` to the end of its segment, to be read and written; None if there is no such."""
        member = self._members.get(identity)
        segment = member.segments.get(place.segment) if member is not None else None
        if segment is None or not SEGMENT_HEADER_BYTES <= place.offset < len(segment):
            return None
        return segment[place.offset :]

    def forget(self, identity: bytes) -> None:
        """Let go of all that ``identity`` shared. What is still being read or written of it stays until then."""
        member = self._members.pop(identity, None)
        if member is None:
            return
        self._tokens.pop(member.token, None)
        member.segments.clear()
        if member.connection is not None:
            self._hang_up(member.connection)

    def close(self) -> None:
        """Let go of everything."""
        for identity in list(self._members):
            self.forget(identity)
        for connection in list(self._connections.values()):
            self._hang_up(connection)
        if self._listener is not None:
            if not self._paused:
                self._poller.unregister(self._listener.fileno())
            self._listener.close()
            self._listener = None
        self.address = ""

    @property
    def segments(self) -> int:
        """How many segments are mapped."""
        return sum(len(member.segments) for member in self._members.values())

    @property
    def nbytes(self) -> int:
        """How large they are, together."""
        return sum(len(segment) for member in self._members.values() for segment in member.segments.values())

    # ── the local socket ──────────────────────────────────────────────────────────────────────────────

    def ready(self, descriptor: int) -> None:
        """Something happened at ``descriptor``; nothing, if it is unknown: it may be closed by now."""
        if self._listener is not None and descriptor == self._listener.fileno():
            self._accept(self._listener)
        elif (connection := self._connections.get(descriptor)) is not None:
            self._take(connection)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:  # no descriptors left: poll would report the same again and again
                log.warning("nobody can share memory for now: %s", error.strerror or error)
                self._poller.unregister(listener.fileno())
                self._paused = True
                return
            accepted.setblocking(False)
            if len(self._strangers) >= MAX_STRANGERS:
                self._hang_up(next(iter(self._strangers.values())))
            connection = _Connection(accepted)
            self._connections[connection.descriptor] = self._strangers[connection.descriptor] = connection
            self._poller.register(connection.descriptor, select.POLLIN)
            self._take(connection)  # a worker speaks at once: a flood of strangers behind it cannot push it out

    def _take(self, connection: _Connection) -> None:
        """Take one packet, if there is one."""
        try:
            packet, descriptors = connection.receive()
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(connection)
            return
        try:
            if not packet and not descriptors:  # the end
                self._hang_up(connection)
                return
            message = decode_packet(packet)
            if isinstance(message, Offer):
                answer = self._take_offer(connection, message, descriptors)
                connection.send(encode_packet(answer))
            elif isinstance(message, Lend):
                self._check_offer(connection, message, descriptors)
                connection.lent = _Lent.of(message, descriptors[0])
                connection.send(encode_packet(Lent(message.segment)))
            elif isinstance(message, Release) and not descriptors:
                self._release(connection, message)
            else:
                raise UnexpectedMessageError(f"a {type(message).__name__} is not what a worker says here")
        except (GradServerError, OSError) as error:
            reason = str(error) if isinstance(error, GradServerError) else error.strerror or str(error)
            log.info("memory was not taken: %s", reason)
            with contextlib.suppress(OSError):
                connection.send(encode_packet(Refused(reason)))
            self._hang_up(connection)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _take_offer(self, connection: _Connection, offer: Offer, descriptors: list[int]) -> Taken:
        member = self._check_offer(connection, offer, descriptors)
        lent, connection.lent = connection.lent, None
        if lent is not None and lent.is_of(offer, descriptors[0]):
            mapping = _secure(descriptors[0], offer.size, lent.mapping)
        else:
            mapping = _secure(descriptors[0], offer.size, _map(descriptors[0], offer.size))
        seen = bytes(mapping[WORKERS_PROOF])
        written = secrets.token_bytes(PROOF_BYTES)
        mapping[COORDINATORS_PROOF] = written
        member.segments[offer.segment] = memoryview(mapping)
        return Taken(offer.segment, seen, written)

    def _check_offer(self, connection: _Connection, offer: Offer | Lend, descriptors: list[int]) -> _Member:
        """Whose memory this is, if it may be taken as far as can be said before looking at it."""
        member = self._tokens.get(offer.token)
        if member is None:
            raise UnexpectedMessageError("memory with a token that nobody was given")
        if member.connection is not connection:
            if member.connection is not None or connection.member is not None:
                raise UnexpectedMessageError("memory with the token of another connection")
            member.connection, connection.member = connection, member
            self._strangers.pop(connection.descriptor, None)
        if len(descriptors) != 1:
            raise MalformedMessageError(f"memory goes with one descriptor, got {len(descriptors) or 'none'}")
        if offer.segment in member.segments:
            raise UnexpectedMessageError(f"segment {offer.segment} a second time")
        if len(member.segments) >= MAX_SEGMENTS:
            raise LimitExceededError(f"more than {MAX_SEGMENTS} segments of memory")
        if self.segments >= MAX_MAPPINGS:
            raise LimitExceededError(f"the coordinator has {MAX_MAPPINGS} segments of memory already, of all workers")
        return member

    def _release(self, connection: _Connection, release: Release) -> None:
        if connection.member is None or connection.member.segments.pop(release.segment, None) is None:
            raise UnexpectedMessageError(f"segment {release.segment} was released, and never given")

    def _hang_up(self, connection: _Connection) -> None:
        """Close a connection. What came through it stays: messages may be on their way that speak of it."""
        if self._connections.get(connection.descriptor) is not connection:
            return  # it was closed before, and its descriptor may be another's by now
        del self._connections[connection.descriptor]
        self._strangers.pop(connection.descriptor, None)
        self._poller.unregister(connection.descriptor)
        connection.socket.close()


class _Member:
    """Someone who may share memory, once, and what he shares."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.segments: dict[int, memoryview] = {}
        self.connection: _Connection | None = None
        """The one that has shown the token. It stays here when it is closed: no token is good for a second one."""


class _Connection:
    """One connection to the local socket."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.descriptor = accepted.fileno()
        self.member: _Member | None = None
        self.lent: _Lent | None = None

    def receive(self) -> tuple[bytes, list[int]]:
        """One packet and the descriptors that came with it. BlockingIOError if there is none."""
        descriptors = array.array("i")
        packet, ancillary, flags, _ = self.socket.recvmsg(
            MAX_PACKET_BYTES, socket.CMSG_LEN(_FDS_TAKEN * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if flags & socket.MSG_TRUNC:
            packet = b"\xc1"  # which begins no message
        return packet, list(descriptors)

    def send(self, packet: bytes) -> None:
        self.socket.send(packet, socket.MSG_NOSIGNAL)


class _Lent:
    """Memory that is mapped and not touched, because others have yet to map it before it is sealed."""

    def __init__(self, segment: int, mapping: mmap.mmap, facts: os.stat_result) -> None:
        self._which = segment, len(mapping), facts.st_dev, facts.st_ino
        self.mapping = mapping

    @classmethod
    def of(cls, offer: Lend, descriptor: int) -> _Lent:
        return cls(offer.segment, _map(descriptor, offer.size), os.fstat(descriptor))

    def is_of(self, offer: Offer, descriptor: int) -> bool:
        """Whether this very memory is offered."""
        facts = os.fstat(descriptor)
        return self._which == (offer.segment, offer.size, facts.st_dev, facts.st_ino)


def _map(descriptor: int, size: int) -> mmap.mmap:
    """Map memory of ``size`` bytes, which can shrink or grow no more. It is not safe yet to touch it.

    Raises:
        MalformedMessageError: it is no such memory.
        OSError: the system does not allow it.
    """
    if not 2 * PAGE_BYTES <= size <= MAX_SEGMENT_BYTES or size % PAGE_BYTES:
        raise MalformedMessageError(f"a segment of {size} bytes: that is not a number of pages within limits")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise MalformedMessageError("a descriptor that is not of memory which can be sealed") from None
    if seals & _NEEDED_SEALS != _NEEDED_SEALS:
        raise MalformedMessageError("memory that is not sealed against shrinking and growing")
    _check_size(descriptor, size)
    return _mapping(descriptor, size)


def _secure(descriptor: int, size: int, mapping: mmap.mmap) -> mmap.mmap:
    """``mapping`` of a descriptor's memory, once it can become dangerous no more.

    Raises:
        MalformedMessageError: it could.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE:  # another shard has done it
        _check_size(descriptor, size)
        return mapping
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:  # an old kernel, or the worker has forbidden it
        raise MalformedMessageError(
            f"memory cannot be sealed against holes ({error.strerror}); Linux 5.1 can"
        ) from None
    _check_size(descriptor, size)  # from now on what is there stays there
    return mapping


def _check_size(descriptor: int, size: int) -> None:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
        raise MalformedMessageError(f"memory of {facts.st_size} bytes was announced as {size}")
    if facts.st_blocks * 512 < size:
        raise MalformedMessageError("memory with holes: it has to be allocated by whoever shares it")


def _mapping(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)  # else it keeps a descriptor of its own
    return mmap.mmap(descriptor, size)
