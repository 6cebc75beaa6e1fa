"""The server's local socket, for workers of its own host: memory is handed over there, and messages pass.

The socket's name belongs to a network namespace, so a worker that cannot see this host's processes finds nothing
there, and stays with TCP. A worker shows a token here, which it gets through its ZeroMQ connection. That connection
stays, and takes over whenever a local one ends. The server knows the worker's process (`.pidfd`), so that its end is
noticed at once, and for certain.

The other end may be hostile. Nothing here waits: sockets do not block, and only one packet of each is taken at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final, Protocol

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError, LimitExceededError, UnexpectedMessageError
from gradserver.protocol.messages import Place
from gradserver.protocol.transport.local import linger
from gradserver.protocol.transport.sharing import (
    ADDRESS_PREFIX,
    Lend,
    Offer,
    Refused,
    Release,
    SharingMessage,
    Talk,
    Talking,
    decode_packet,
)
from gradserver.transport.local_peers import Guest, Line
from gradserver.transport.pidfd import has_ended, process_of
from gradserver.transport.shared_memory import Segments
from gradserver.transport.system import can_share, descriptor_limit, too_few_text

log = logging.getLogger("gradserver")

MAX_MAPPINGS: Final = 16_384
"""Limit for the segments of all workers: a quarter of what Linux lets a process map, with the allocator's needs."""
MAX_STRANGERS: Final = 64
"""Limit for connections that have yet to show a token. One more closes the oldest."""
_ACCEPTS: Final = 16
"""Connections accepted at a time: a flood of them must not stop the loop."""
_BACKLOG: Final = 1024
_DRAINED: Final = 4096
"""Packets taken at most from a worker that is gone. Linux keeps fewer."""
_LINGER_SECONDS: Final = 1.0


class Host(Protocol):
    """The server that gets what comes in. Workers are known by the identities with which they were admitted."""

    def talks(self, identity: bytes, line: Line) -> None:
        """Send messages to this worker through ``line`` from now on."""

    def heard(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Take a message."""

    def garbled(self, identity: bytes, error: GradServerError) -> None:
        """Report bytes that are no message. The line is closed."""

    def hung_up(self, identity: bytes) -> None:
        """Note that the worker has closed its line, or has died."""

    def ended(self, identity: bytes) -> None:
        """Note that the worker's process has ended. All that it sent here has been taken."""


class UnixServer:
    """Maps memory of workers, takes their messages, and gives the host lines through which to answer.

    Args:
        poller: poller of the loop, which calls `ready` with descriptors that are not its own.
        host: gets what comes in.
    """

    def __init__(self, poller: select.poll, host: Host) -> None:
        self._poller = poller
        self._host = host
        self._guests: dict[bytes, Guest] = {}
        self._tokens: dict[str, Guest] = {}
        self._connections: dict[int, Line] = {}
        self._strangers: dict[int, Line] = {}
        self._processes: dict[int, Guest] = {}
        """Workers by descriptors of their processes."""
        self._paused = False
        self.address = ""
        """Address of the socket; empty where there is none."""
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
        """Return the address for ``identity``, and its token; twice empty if there is no socket."""
        if self._listener is None:
            return "", ""
        if self._paused:
            self._paused = False
            self._poller.register(self._listener.fileno(), select.POLLIN)
        guest = self._guests.get(identity)
        if guest is None:
            guest = self._guests[identity] = Guest(identity, secrets.token_hex(16))
            self._tokens[guest.token] = guest
        return self.address, guest.token

    def view(self, identity: bytes, place: Place) -> memoryview | None:
        """Return the memory from ``place`` to the end of its segment, read-only if that is; None if there is none."""
        guest = self._guests.get(identity)
        return None if guest is None else guest.segments.view(place)

    def unshare(self, identity: bytes) -> None:
        """Unmap all memory that ``identity`` shared. Memory that is being read or written stays until that is done."""
        guest = self._guests.get(identity)
        if guest is not None:
            guest.segments.clear()
            if guest.sharing is not None:
                self._hang_up(guest.sharing)

    def queued(self, identity: bytes) -> int:
        """Return the bytes that ``identity`` was sent and has not read."""
        guest = self._guests.get(identity)
        return 0 if guest is None or guest.line is None else guest.line.stream.queued_bytes

    def cut(self, identity: bytes) -> None:
        """Close the connection of ``identity``, whatever it has not read."""
        guest = self._guests.get(identity)
        if guest is not None and guest.line is not None:
            self._hang_up(guest.line)

    def drain(self, identity: bytes) -> None:
        """Take all messages of ``identity``, which is gone."""
        guest = self._guests.get(identity)
        if guest is not None and guest.line is not None:
            self._drain(guest.line)

    def lives(self, identity: bytes) -> bool | None:
        """Return True if the process of ``identity`` lives; None if that is unknown."""
        guest = self._guests.get(identity)
        if guest is None or (guest.process is None and not guest.ended):
            return None
        if guest.process is not None and has_ended(guest.process):
            self._part_with(guest, ended=True)
        return not guest.ended

    def forget(self, identity: bytes) -> None:
        """Unmap all that ``identity`` shared, and close its connection when it has read its messages."""
        self.unshare(identity)
        guest = self._guests.pop(identity, None)
        if guest is None:
            return
        self._part_with(guest)
        self._tokens.pop(guest.token, None)
        if guest.line is not None:
            guest.line.guest = None
            if not guest.line.stream.queued:
                self._hang_up(guest.line)

    def close(self) -> None:
        """Close everything. Messages to workers have a second to leave."""
        until = time.monotonic() + _LINGER_SECONDS
        for identity in list(self._guests):
            self.forget(identity)
        for line in list(self._connections.values()):
            linger(line.socket, line.stream, until)
            self._hang_up(line)
        if self._listener is not None:
            if not self._paused:
                self._poller.unregister(self._listener.fileno())
            self._listener.close()
            self._listener = None
        self.address = ""

    @property
    def segments(self) -> int:
        """Number of mapped segments."""
        return sum(len(guest.segments) for guest in self._guests.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(guest.segments.nbytes for guest in self._guests.values())

    # ── connections ───────────────────────────────────────────────────────────────────────────────────

    def ready(self, descriptor: int, events: int) -> None:
        """Handle events at ``descriptor``. An unknown one is ignored: it may be closed by now."""
        line = self._connections.get(descriptor)
        if (guest := self._processes.get(descriptor)) is not None:
            self._part_with(guest, ended=True)
            self.drain(guest.identity)
            self._host.ended(guest.identity)
        elif line is None:
            if self._listener is not None and descriptor == self._listener.fileno():
                self._accept(self._listener)
        elif events & select.POLLOUT:
            self._flush(line)
        elif line.talks:
            self._hear(line)
        else:
            self._take(line)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:  # no descriptors left: poll would report the same again and again
                log.warning("workers cannot share memory for now: %s", error.strerror or error)
                self._poller.unregister(listener.fileno())
                self._paused = True
                return
            accepted.setblocking(False)
            if len(self._strangers) >= MAX_STRANGERS:
                self._hang_up(next(iter(self._strangers.values())))
            line = Line(accepted, self._poller)
            self._connections[line.descriptor] = self._strangers[line.descriptor] = line
            self._poller.register(line.descriptor, select.POLLIN)
            self._take(line)  # a worker speaks at once: a flood of strangers behind it cannot push it out

    def _hang_up(self, line: Line) -> None:
        """Close a connection. Memory that came through it stays: messages that name it may be on their way."""
        if self._connections.get(line.descriptor) is not line:
            return  # it was closed before, and its descriptor may be another's by now
        del self._connections[line.descriptor]
        self._strangers.pop(line.descriptor, None)
        self._poller.unregister(line.descriptor)
        line.socket.close()

    def _watch(self, line: Line, guest: Guest) -> None:
        """Watch the process of ``guest``, which is at the other end of ``line``."""
        if guest.process is None and (process := process_of(line.socket)) is not None:
            guest.process = process
            self._processes[process] = guest
            self._poller.register(process, select.POLLIN)

    def _part_with(self, guest: Guest, ended: bool = False) -> None:
        """Watch its process no more."""
        guest.ended = guest.ended or ended
        process, guest.process = guest.process, None
        if process is not None:
            del self._processes[process]
            self._poller.unregister(process)
            os.close(process)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, line: Line) -> None:
        """Take one packet, if there is one."""
        try:
            packet, descriptors = line.receive()
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(line)
            return
        try:
            if not packet and not descriptors:  # the end
                self._hang_up(line)
                return
            answer = self._answer(line, decode_packet(packet), descriptors)
            if answer is not None:
                line.say(answer)
            if isinstance(answer, Talking) and line.guest is not None:
                line.talks = True
                self._host.talks(line.guest.identity, line)
        except (GradServerError, OSError) as error:
            reason = str(error) if isinstance(error, GradServerError) else error.strerror or str(error)
            log.info("memory was not taken: %s", reason)
            with contextlib.suppress(OSError):
                line.say(Refused(reason))
            self._hang_up(line)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, line: Line, message: SharingMessage, descriptors: list[int]) -> SharingMessage | None:
        if isinstance(message, Offer | Lend):
            if not can_share():
                raise LimitExceededError(too_few_text(descriptor_limit()))
            guest = self._guest(line, message.token)
            if guest.sharing is not line:
                if guest.sharing is not None:
                    raise UnexpectedMessageError("memory with the token of another connection")
                guest.sharing = line
            if self.segments >= MAX_MAPPINGS:
                raise LimitExceededError(f"the coordinator has {MAX_MAPPINGS} segments of memory, from all workers")
            if isinstance(message, Offer):
                return guest.segments.take(message, descriptors)
            return guest.segments.lend(message, descriptors)
        if isinstance(message, Talk) and not descriptors:
            guest = self._guest(line, message.token)
            if guest.line is not None or guest.sharing is line:
                raise UnexpectedMessageError("messages with the token of another connection")
            guest.line = line
            return Talking()
        if isinstance(message, Release) and not descriptors:
            (Segments() if line.guest is None else line.guest.segments).release(message)
            return None
        raise UnexpectedMessageError(f"a {type(message).__name__} is not what a worker says here")

    def _guest(self, line: Line, token: str) -> Guest:
        """Return the worker with this token, if ``line`` is its connection."""
        guest = self._tokens.get(token)
        if guest is None:
            raise UnexpectedMessageError("a token that was given to no worker")
        if line.guest is None:
            line.guest = guest
            self._strangers.pop(line.descriptor, None)
            self._watch(line, guest)
        elif line.guest is not guest:
            raise UnexpectedMessageError("the token of another connection")
        return guest

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, line: Line) -> bool:
        """Take one packet, a message or a part of one. Return False if there was none."""
        guest = line.guest
        try:
            frames = line.stream.receive()
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            self._end(line)
            return False
        except GradServerError as error:
            self._hang_up(line)
            if guest is not None:
                self._host.garbled(guest.identity, error)
            return False
        if frames is not None and guest is not None:
            self._host.heard(guest.identity, frames)
        return True

    def _drain(self, line: Line) -> None:
        """Take all messages that came through ``line``."""
        for _ in range(_DRAINED):
            if not self._hear(line):
                break

    def _end(self, line: Line) -> None:
        """Close a ``line`` after its other side has closed it, or has died. Does nothing the second time."""
        if self._connections.get(line.descriptor) is line:
            self._hang_up(line)
            if line.guest is not None:
                self._host.hung_up(line.guest.identity)

    def _flush(self, line: Line) -> None:
        """Send what is queued for a worker that reads again."""
        try:
            if not line.stream.flush():
                return
        except OSError:  # what it sent before counts
            self._drain(line)
            self._end(line)
            return
        if line.guest is None:
            self._hang_up(line)
        else:
            self._poller.modify(line.descriptor, select.POLLIN)
