"""A pair of sockets by which threads and signal handlers end another thread's wait in poll(2)."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """Both ends of a pipe. ``descriptor`` is readable from `wake` to `clear`."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)
        self.descriptor = self._out.fileno()

    def wake(self) -> None:
        """Make ``descriptor`` readable. Safe to call from any thread, and from signal handlers."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._in.send(b"\0")

    def clear(self) -> None:
        """Take in what `wake` has sent. Call it only when ``descriptor`` is readable."""
        self._out.recv(4096)

    def close(self) -> None:
        """Close both ends."""
        self._in.close()
        self._out.close()
