"""The channel interface: how messages pass between a worker and the coordinator.

A channel has two ends. Each end sends, and hands each arriving message to the one receiver that is attached to it.
`send` promises that messages arrive once, whole and in order, or that the receiver's ``lost`` is called. The payloads'
memory is the sender's again once the result that answers them has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import Message, Place


class Receiver(Protocol):
    """The receiver of messages at one end of a channel."""

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take one message. ``payloads`` are read-only; the receiver may keep them."""

    def lost(self, error: GradServerError) -> None:
        """Take the news that the channel broke: nothing arrives any more. It is called at most once."""


class Lock(Protocol):
    """The interface of `threading.Lock`, which must not be imported here."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire, and wait for up to ``timeout`` seconds. Return whether it was possible."""


class Outlet(Protocol):
    """One end of a channel: what both ends have in common. Any thread may call it."""

    def attach(self, receiver: Receiver) -> None:
        """Hand messages that arrive from now on to ``receiver``."""

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Pass a message on, without waiting for the other side. ClosedError after `close`."""

    def close(self) -> None:
        """Close this end. What was sent is still delivered. Then the other side learns of it."""


class Channel(Outlet, Protocol):
    """The worker's end. It reaches each data shard by its number."""

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        """Pass a message on to a shard, without waiting for it. ClosedError after `close`."""

    def empty(self, nbytes: int, /) -> npt.NDArray[np.uint8] | None:
        """Return uninitialised memory that the coordinator sees too; None if it sees none, or all memory."""

    def place_of(self, data: npt.NDArray[np.uint8], shard: int = 0, /) -> Place | None:
        """Return where ``data`` (contiguous) lies in memory that ``shard`` sees too; None if it does not."""

    def wait(self, done: Lock, timeout: float) -> bool:
        """Acquire ``done`` within ``timeout`` seconds. Return whether it was possible.

        A message that arrives releases ``done``: a channel may use the waiting thread to read.
        """

    def watch(self, enough: Callable[[], bool]) -> None:
        """Receive messages until ``enough()``, although no thread waits for them yet."""

    def look(self) -> None:
        """Receive what has come in, without waiting for more."""
