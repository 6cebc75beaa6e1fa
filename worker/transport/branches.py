"""A worker's ends of branches: connections of sub-groups, which the worker's first connection carries.

`gradserver.protocol.transport.branches` has the table of what happens to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Lock, Receiver
from gradserver.protocol.errors import ClosedError, ConnectionLostError
from gradserver.protocol.messages import Failure, Message, Place, Scope


class Trunk(Protocol):
    """The connection that carries branches: `gradserver.worker.transport.tcp.TcpChannel`."""

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0, branch: int = 0) -> None:
        """Send a message of a branch, or queue it."""

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait until ``done`` can be acquired."""

    def watch(self, enough: Callable[[], bool], branch: int = 0) -> None:
        """Receive messages until ``enough()``, for this branch too."""

    def look(self) -> None:
        """Receive what has come in."""

    def region(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator may write to."""

    def place_of(self, data: npt.NDArray[np.uint8], shard: int = 0) -> Place | None:
        """Return the place of ``data`` in memory that ``shard`` sees too."""

    def line_to(self, url: str) -> int:
        """Return the number of the connection to the data shard at ``url``."""

    def drop(self, branch: int) -> None:
        """Take nothing from this branch any more."""


class Parent(Protocol):
    """The channel of a durable parent, which outlives connections."""

    def is_on(self, channel: object) -> bool:
        """Return true if ``channel`` is the connection that stands."""


class Branch:
    """The channel of a sub-group. It ends with its trunk, of which the session of that hears.

    Args:
        trunk: the connection that carries it.
        number: its number there.
    """

    def __init__(self, trunk: Trunk, number: int) -> None:
        self._trunk, self._number = trunk, number
        self._lines = [0]
        """Numbers of the trunk's connections by data shard of the sub-group."""
        self._receivers: dict[int, Receiver] = {}
        """Receivers by number of the trunk's connection."""
        self._closed = False
        self._lost: Callable[[ConnectionLostError], None] | None = None

    def when_lost(self, lost: Callable[[ConnectionLostError], None]) -> None:
        """Call ``lost`` when the other end says that it has lost this branch, or what it needs for it."""
        self._lost = lost

    def attach(self, receiver: Receiver) -> None:
        """Hand messages that arrive from now on to ``receiver``."""
        self._receivers[0] = receiver

    def reach(self, url: str, receiver: Receiver) -> None:
        """Reach one more data shard, through the trunk's connection to it, and hand its messages to ``receiver``."""
        line = self._trunk.line_to(url)
        self._receivers[line] = receiver
        self._lines.append(line)

    def is_on(self, parent: Parent) -> bool:
        """Return true if the connection that carries it is the present one of its ``parent``."""
        return parent.is_on(self._trunk)

    def check_on(self, parent: Parent) -> None:
        """Raise ConnectionLostError if that is another one now: no handle may have heard that it broke."""
        if not self.is_on(parent):
            raise ConnectionLostError("the parent's connection broke")

    def reaches(self, shard: int) -> bool:
        """Return true if messages to ``shard`` have a way."""
        return shard < len(self._lines)

    def hear(self, line: int, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take a message that has come through the trunk's connection ``line``."""
        is_end = type(message) is Failure and message.scope is Scope.CONNECTION
        if is_end and message.error == ConnectionLostError.__name__ and self._lost is not None:  # type: ignore[union-attr]
            self._lost(ConnectionLostError(message.text))  # type: ignore[union-attr]
        elif (receiver := self._receivers.get(line)) is not None:
            receiver.receive(message, payloads)

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        """Send on the trunk."""
        if self._closed:
            raise ClosedError("this sub-group is closed")
        self._trunk.send(message, payloads, self._lines[shard], self._number)

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait until ``done`` can be acquired: read meanwhile, unless another thread does."""
        return self._trunk.wait(done, timeout)

    def watch(self, enough: Callable[[], bool]) -> None:
        """Receive messages until ``enough()``, although no thread waits for them yet."""
        self._trunk.watch(enough, self._number)

    def look(self) -> None:
        """Receive what has come in, without waiting for more."""
        self._trunk.look()

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator sees too, and writes results to; None if there is none.

        A durable parent's other memory is sealed for reading. Only a sub-group that is durable itself has its results
        written elsewhere (`gradserver.worker.transport.lasting`): a sub-group of leaders is not.
        """
        return self._trunk.region(nbytes)

    def place_of(self, data: npt.NDArray[np.uint8], shard: int = 0) -> Place | None:
        """Return the place of ``data`` in memory that ``shard`` sees too; None if it is elsewhere."""
        return self._trunk.place_of(data, self._lines[shard])

    def close(self) -> None:
        """Send and take nothing any more. The trunk stays as it is."""
        self._closed = True
        self._trunk.drop(self._number)
