"""A relay that loses, repeats and swaps whole messages between workers and a coordinator, in a thread of the test.

It is the relay of `gradserver chaos`. Here a function decides about each message.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from gradserver.protocol.messages import Message
from gradserver.protocol.transport.numbers import split
from gradserver.protocol.wire import decode
from gradserver.tools.chaos.relay import Fate, Faults, Frames, Lane, Relay, turn
from tests.cluster import Task

Judge = Callable[[bool, int, Message], Fate]
"""The decision about a message: (whether it is to the coordinator, how many went before it that way, the message)."""


class _Judged(Faults):
    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge
        self._counts = Counter[bool]()

    def fate(self, lane: Lane, frames: Frames) -> Fate:
        header, *payloads = [frame.bytes for frame in frames]
        message, _ = decode([split(header)[1], *payloads])
        self._counts[lane.upwards] += 1
        return self._judge(lane.upwards, self._counts[lane.upwards] - 1, message)


@contextmanager
def relay(url: str, judge: Judge) -> Iterator[str]:
    """Run a relay: a worker that connects to the URL given is connected to the coordinator at ``url``."""
    here, there = socket.socketpair()
    with zmq.Context() as context, here, there:
        between = Relay(context, url, _Judged(judge))

        def serve() -> None:
            try:
                while not turn([between], there.fileno()):
                    pass
            finally:
                between.close()

        task = Task(serve)
        try:
            yield f"tcp://127.0.0.1:{between.port}"
        finally:
            here.send(b"\0")
            task.result()


def twice(_upwards: bool, number: int, _message: Message) -> Fate:
    """Repeat every third message, and the first one."""
    return Fate.TWICE if number % 3 == 0 else Fate.PASSES


def swapped(_upwards: bool, number: int, _message: Message) -> Fate:
    """Let every other message, and the first one, wait a while for the one behind it, which goes first."""
    return Fate.OVERTAKEN if number % 2 == 0 else Fate.PASSES


class Loser:
    """Loses one message of a kind; and, if it is not armed yet, only when it is."""

    def __init__(self, upwards: bool, kind: type[Message], nth: int = 1, armed: bool = True) -> None:
        self._upwards, self._kind, self._nth = upwards, kind, nth
        self.armed = armed
        self.seen = self.lost = 0

    def __call__(self, upwards: bool, _number: int, message: Message) -> Fate:
        if self.armed and upwards == self._upwards and isinstance(message, self._kind):
            self.seen += 1
            if self.seen == self._nth:
                self.lost += 1
                return Fate.LOST
        return Fate.PASSES
