"""When to look who is gone: a socket's monitor says that a connection closed, and not whose."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import zmq

_PROBES: Final = (0.0, 0.02, 0.1, 0.5)
"""Seconds after a disconnect at which to probe: the monitor may speak before routing has noticed."""


class Disconnects:
    """What is known of connections that closed.

    Args:
        router: the socket whose connections they are.

    Attributes:
        descriptor: to be polled; it signals nothing before `notice` was called once, and again after each signal.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._probes: list[float] = []
        self.descriptor = int(self._monitor.get(zmq.FD))

    @property
    def due(self) -> float | None:
        """When to look next, on `time.monotonic`'s scale; None if there is no reason to."""
        return self._probes[0] if self._probes else None

    def is_time(self, now: float) -> bool:
        """Whether to look now; asked for once each time that it is due."""
        time_has_come = bool(self._probes) and self._probes[0] <= now
        self._probes = [at for at in self._probes if at > now]
        return time_has_come

    def notice(self) -> None:
        """The monitor has something to say."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        self.suppose()

    def suppose(self) -> None:
        """Somebody may be gone: look now and a few times soon."""
        now = time.monotonic()
        self._probes = sorted({*self._probes, *(now + delay for delay in _PROBES)})[: 4 * len(_PROBES)]

    def look_at(self, moment: float) -> None:
        """Look then, too."""
        self._probes = sorted({*self._probes, moment})

    def close(self) -> None:
        """Let go of the monitor."""
        self._router.disable_monitor()
        self._monitor.close(linger=0)
