"""The router's monitor: it says that a connection closed, and not which one. So peers are probed some moments after."""

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
"""Seconds after the disconnect of a stranger: a flood of connections would have all peers probed all the time."""
_EVENT: Final = struct.Struct("=Hi")
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)


class Monitor:
    """Moments at which to probe all peers.

    Args:
        router: the socket of the connections.
        connections: told of each that opens and closes.

    Attributes:
        descriptor: to be polled. It signals nothing before `notice` was called once, and again after each signal.
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
        """Next moment at which to probe, as of `time.monotonic`; None if there is none."""
        return self._probes[0] if self._probes else None

    def take_due(self, now: float) -> bool:
        """Return True if a moment has come, and drop it."""
        time_has_come = bool(self._probes) and self._probes[0] <= now
        self._probes = [at for at in self._probes if at > now]
        return time_has_come

    def notice(self) -> None:
        """Take in what the monitor says."""
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
            self.suspect()
        elif anonymous and not self._probes:
            self.probe_at(time.monotonic() + _ANONYMOUS)

    def suspect(self) -> None:
        """Probe now, and a few times soon: a peer may be lost."""
        now = time.monotonic()
        self._probes = sorted({*self._probes, *(now + delay for delay in _PROBES)})[: 4 * len(_PROBES)]

    def probe_at(self, moment: float) -> None:
        """Probe at ``moment``, too."""
        self._probes = sorted({*self._probes, moment})

    def close(self) -> None:
        """Close the monitor."""
        self._router.disable_monitor()
        self._monitor.close(linger=0)
