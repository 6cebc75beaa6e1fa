"""A coordinator that says what a test wants: to one worker, over TCP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self, TypeVar

import zmq

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.messages import Agreed, Join, Message, Ping, Propose, Welcome
from gradserver.protocol.transport.numbers import split
from gradserver.protocol.wire import decode, encode
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import PATIENCE, Task

M = TypeVar("M")
TOKEN = "its token"


class Scripted:
    """A listener at ``url``, or anywhere if that is empty."""

    def __init__(self, url: str = "") -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(url or "tcp://127.0.0.1:*")
        self.url: str = self._router.get_string(zmq.LAST_ENDPOINT)
        self._who = b""
        self.payloads: list[bytes] = []
        """The payloads of the last message."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Close the connection, and the port, at once."""
        self._context.destroy(linger=0)

    def hear(self, kind: type[M], timeout: float = PATIENCE) -> M:
        """Return the next message, which must be of this kind."""
        until = time.monotonic() + timeout
        while True:
            assert self._router.poll(max(int((until - time.monotonic()) * 1000), 0)), f"no {kind.__name__} came"
            who, header, *rest = self._router.recv_multipart()
            if who[:1] != b"\0":  # ZeroMQ's own identities begin so; others are beacons
                continue
            self._who = who
            message, payloads = decode([split(header)[1], *rest])
            if not isinstance(message, Ping):
                self.payloads = [bytes(payload) for payload in payloads]
                assert isinstance(message, kind), message
                return message

    def hears_nothing(self, seconds: float) -> bool:
        """Return whether nothing comes for so long."""
        return not self._router.poll(int(seconds * 1000))

    def say(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Answer the peer that was heard last."""
        self._router.send_multipart([self._who, encode(message), *payloads])

    def admit(self, task: Task[Worker], credit: int) -> Worker:
        """Admit a worker that joins into a durable group, as the only one."""
        join = self.hear(Join)
        self.say(Welcome(join.group, 0, 1, credit, (join.name,), (), (), TOKEN, (0,), True, 1))
        return task.result()

    def knows(self, beacon: str) -> bool:
        """Return whether a peer with this beacon is there."""
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.send_multipart([beacon.encode(), b""], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def agree(self) -> Propose:
        """Agree to any proposal."""
        propose = self.hear(Propose)
        self.say(Agreed(propose.hash, propose.round))
        return propose


def joining(url: str, **options: object) -> Task[Worker]:
    """Start a worker that is about to join."""
    return Task(connect, url, name="w0", channel="tcp", timeout=20.0, **options)  # type: ignore[arg-type]
