"""The in-process channel: both ends are objects of one process, and share all memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Lock, Receiver
from gradserver.protocol.errors import ClosedError, UsageError
from gradserver.protocol.messages import HERE, Message, Place


class InProcessChannel:
    """One end (either) of an in-process channel. `send` calls the other end's receiver with the same objects.

    There is no queue and no thread: a message is handled in its sender's thread before `send` returns.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._peer: InProcessChannel | None = None
        self._receiver: Receiver | None = None

    def attach(self, receiver: Receiver) -> None:
        """Hand messages that arrive from now on to ``receiver``."""
        self._receiver = receiver

    def send(self, message: Message, payloads: Sequence[Buffer] = (), _shard: int = 0) -> None:
        """Hand ``message`` to the other end's receiver, in this thread."""
        peer = self._peer
        if peer is None:
            raise ClosedError(f"{self._name} is closed")
        if peer._receiver is None:
            raise UsageError(f"no other side is attached to {peer._name} yet")
        peer._receiver.receive(message, payloads)

    def empty(self, _nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return None: all memory is shared."""
        return None

    def place_of(self, _data: npt.NDArray[np.uint8], _shard: int = 0) -> Place | None:
        """Return `HERE`."""
        return HERE

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait. Messages arrive in their senders' threads."""
        return done.acquire(timeout=timeout)

    def watch(self, enough: Callable[[], bool]) -> None:
        """Do nothing: messages arrive in their senders' threads."""

    def look(self) -> None:
        """Do nothing, for the same reason."""

    def close(self) -> None:
        """Close both ends, and tell the other one."""
        peer, self._peer = self._peer, None
        if peer is not None and peer._peer is not None:
            peer._peer = None
            if peer._receiver is not None:
                peer._receiver.lost(ClosedError(f"{self._name} closed the channel"))


def in_process_pair(name: str = "in-process channel") -> tuple[InProcessChannel, InProcessChannel]:
    """Return the two ends of one in-process channel: the worker's, and the coordinator's."""
    worker, coordinator = InProcessChannel(f"{name} (worker)"), InProcessChannel(f"{name} (coordinator)")
    worker._peer, coordinator._peer = coordinator, worker
    return worker, coordinator
