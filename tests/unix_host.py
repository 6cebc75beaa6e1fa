"""A coordinator's local socket without a coordinator, and a client that says there what it likes."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import Place
from gradserver.protocol.transport.sharing import Offer, SharingMessage, decode_packet, encode_packet
from gradserver.transport.local import UnixServer
from gradserver.transport.local_peers import Line
from tests.cluster import Task, wait_until

WORKER = b"worker"


class Host:
    """A UnixServer. Either the test calls `pump` between what it does, or a thread serves."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self.server = UnixServer(self._poller, self)
        self._lock = threading.Lock()
        self.lines: dict[bytes, Line] = {}
        self.messages: list[tuple[bytes, list[bytes]]] = []
        """The messages, with their senders."""
        self.errors: list[tuple[bytes, GradServerError]] = []
        self.ends: list[bytes] = []
        self.deaths: list[bytes] = []

    def talks(self, identity: bytes, line: Line) -> None:
        self.lines[identity] = line

    def heard(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        self.messages.append((identity, [bytes(frame) for frame in frames]))

    def garbled(self, identity: bytes, error: GradServerError) -> None:
        self.errors.append((identity, error))

    def hung_up(self, identity: bytes) -> None:
        self.ends.append(identity)

    def ended(self, identity: bytes) -> None:
        self.deaths.append(identity)

    def pump(self) -> None:
        """Handle all that has happened."""
        while events := self._poller.poll(0):
            for descriptor, what in events:
                self.server.ready(descriptor, what)

    @contextmanager
    def serving(self) -> Iterator[None]:
        wake, end = os.pipe()
        self._poller.register(wake, select.POLLIN)

        def serve() -> None:
            while True:
                for descriptor, what in self._poller.poll():
                    if descriptor == wake:
                        return
                    with self._lock:
                        self.server.ready(descriptor, what)

        task = Task(serve)
        try:
            yield
        finally:
            os.write(end, b"\0")
            task.result()
            self._poller.unregister(wake)
            os.close(wake)
            os.close(end)

    def view(self, place: Place | None, who: bytes = WORKER) -> memoryview:
        assert place is not None
        with self._lock:
            view = self.server.view(who, place)
        assert view is not None
        return view

    def forget(self, who: bytes) -> None:
        with self._lock:
            self.server.forget(who)

    def admit(self, who: bytes) -> tuple[str, str]:
        with self._lock:
            return self.server.admit(who)

    def has(self, segments: int) -> None:
        """Wait until so many segments are mapped."""
        wait_until(lambda: self.server.segments == segments, f"{segments} segments are mapped")


class Hostile:
    """Says what it likes at a local socket."""

    def __init__(self, host: Host, who: bytes = b"hostile") -> None:
        self._host = host
        address, self.token = host.server.admit(who)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect("\0" + address)
        self._socket.settimeout(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._host.pump()

    def say(self, packet: bytes | SharingMessage, *given: int) -> None:
        """Send a packet with descriptors, which are closed here."""
        data = packet if isinstance(packet, bytes) else encode_packet(packet)
        socket.send_fds(self._socket, [data], given)
        for descriptor in set(given):
            os.close(descriptor)
        self._host.pump()

    def offer(self, *given: int, segment: int = 0, size: int = 8192, token: str | None = None) -> None:
        self.say(Offer(self.token if token is None else token, segment, size), *given)

    def hear(self) -> SharingMessage | None:
        """Return what is said next; None when it was hung up."""
        packet = self._socket.recv(10_000)
        return decode_packet(packet) if packet else None
