"""When to look who is gone: a socket's monitor says that a connection closed, and not whose."""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Final

import zmq

from gradserver.transport.traffic import Connections

_PROBES: Final = (0.0, 0.02, 0.1, 0.5)
"""Seconds after a disconnect at which to probe: the monitor may speak before routing has noticed."""


_ANONYMOUS: Final = 0.1
"""The same for one that nobody is known by: a flood of connections would have everybody probed all the time."""
_EVENT: Final = struct.Struct("=Hi")
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)


class Disconnects:
    """What is known of connections that closed.

    Args:
        router: the socket whose connections they are.
        connections: what is known of each; they are told which there are.

    Attributes:
        descriptor: to be polled; it signals nothing before `notice` was called once, and again after each signal.
    """

    def __init__(self, router: zmq.Socket[bytes], connections: Connections) -> None:
        self._router, self._connections = router, connections
        where = f"inproc://monitor-{id(self):x}"
        router.monitor(where, int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
        self._monitor = router.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread would wait for us, with all connections
        self._monitor.connect(where)
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
        gone = anonymous = False
        with contextlib.suppress(zmq.Again):
            while True:
                event, descriptor = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
                if event == _ACCEPTED:
                    self._connections.accepted(descriptor)
                elif self._connections.disconnected(descriptor):
                    gone = True
                else:
                    anonymous = True
        if gone:
            self.suppose()
        elif anonymous and not self._probes:
            self.look_at(time.monotonic() + _ANONYMOUS)

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
