"""The channel interface: how messages pass between a worker and the coordinator.

A channel has two ends. Each end sends, and hands what arrives to the one receiver that was attached
to it. What `send` promises: messages arrive once, whole, in order, or the receiver's ``lost`` is called;
the payloads' memory is the sender's again once the result that answers them has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ClosedError, GradServerError, UsageError
from gradserver.protocol.messages import HERE, Message, Place


class Receiver(Protocol):
    """Whoever is attached to an end of a channel."""

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take one message. ``payloads`` are read-only, and the receiver's for as long as it keeps them."""

    def lost(self, error: GradServerError) -> None:
        """The channel broke; nothing arrives any more. Called at most once."""


class Lock(Protocol):
    """As `threading.Lock` has it, which must not be imported here."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire, waiting for up to ``timeout`` seconds; whether it was possible."""


class Outlet(Protocol):
    """One end of a channel, as far as both ends have it in common. Safe to call from any thread."""

    def attach(self, receiver: Receiver) -> None:
        """From now on what arrives goes to ``receiver``."""

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Pass a message on; returns without waiting for the other side. ClosedError after `close`."""

    def close(self) -> None:
        """Let go. What was sent is still delivered; the other side then learns that this one is gone."""


class Channel(Outlet, Protocol):
    """The worker's end. Of several data shards each is reached through it, by its number."""

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        """Pass a message on to a shard; returns without waiting for it. ClosedError after `close`."""

    def empty(self, nbytes: int, /) -> npt.NDArray[np.uint8] | None:
        """Uninitialised memory that the coordinator sees too; None if it sees none, or only all of it."""

    def place_of(self, data: npt.NDArray[np.uint8], shard: int = 0, /) -> Place | None:
        """Where ``data`` (contiguous) lies in memory that ``shard`` sees too; None if it does not."""

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until ``done`` can be acquired, and acquire it; False if it cannot.

        What lets go of ``done`` is a message that arrives: a channel may use the waiting thread to read.
        """

    def watch(self, enough: Callable[[], bool]) -> None:
        """Messages are due that nobody waits for yet: receive them all the same, until ``enough()``."""

    def look(self) -> None:
        """Receive what has come in, and do not wait for more."""


class MemoryChannel:
    """One end (either) of an in-process channel: `send` calls the other end's receiver, with the very same objects.

    There is no queue and no thread: a message is handled in its sender's thread before `send` returns.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._peer: MemoryChannel | None = None
        self._receiver: Receiver | None = None

    def attach(self, receiver: Receiver) -> None:
        """From now on what arrives goes to ``receiver``."""
        self._receiver = receiver

    def send(self, message: Message, payloads: Sequence[Buffer] = (), _shard: int = 0) -> None:
        """Hand ``message`` to the other end's receiver, here and now."""
        peer = self._peer
        if peer is None:
            raise ClosedError(f"{self._name} is closed")
        if peer._receiver is None:
            raise UsageError(f"nobody is attached to {peer._name} yet")
        peer._receiver.receive(message, payloads)

    def empty(self, _nbytes: int) -> npt.NDArray[np.uint8] | None:
        """None: all memory is shared."""
        return None

    def place_of(self, _data: npt.NDArray[np.uint8], _shard: int = 0) -> Place | None:
        """Where it is."""
        return HERE

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait; messages arrive in their senders' threads."""
        return done.acquire(timeout=timeout)

    def watch(self, enough: Callable[[], bool]) -> None:
        """Nothing to do: messages arrive in their senders' threads."""

    def look(self) -> None:
        """Nothing to do: the same."""

    def close(self) -> None:
        """Let go of the other end, and tell it."""
        peer, self._peer = self._peer, None
        if peer is not None and peer._peer is not None:
            peer._peer = None
            if peer._receiver is not None:
                peer._receiver.lost(ClosedError(f"{self._name} closed the channel"))


def memory_pair(name: str = "memory channel") -> tuple[MemoryChannel, MemoryChannel]:
    """Two ends of one in-process channel: the worker's, and the coordinator's."""
    worker, coordinator = MemoryChannel(f"{name} (worker)"), MemoryChannel(f"{name} (coordinator)")
    worker._peer, coordinator._peer = coordinator, worker
    return worker, coordinator
