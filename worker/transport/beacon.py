"""A worker's beacon at its coordinator, or at a data shard.

The server asks for it while this worker joins. When libzmq's own thread has shown for the first time that it runs, the
other side is told so. From then on that side notices if this process freezes. `connect` waits for that. Afterwards the
user's program may keep Python's lock for as long as it likes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq

from gradserver.protocol.beacon import beat_seconds
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import BePresent, Message, Present
from gradserver.protocol.transport.beacon import beacon_socket, light_beacon
from gradserver.worker.transport import forking

_LOOK_MS: Final = 50
"""Milliseconds between two looks whether the beacon was closed before it has reached the server."""
_MARGIN_SECONDS: Final = 0.01


class Beacon:
    """Shows that this process runs, until it is closed. It outlives the connection on which it was asked for.

    Args:
        address: numeric URL of the server.
        wanted: the server's request.
        tell: sends the answer on the connection of the request.
    """

    def __init__(self, address: str, wanted: BePresent, tell: Callable[[Message], None]) -> None:
        self.identity = wanted.identity
        self._address, self._beat, self._tell = address, beat_seconds(wanted), tell
        self._context = zmq.Context()
        self._socket = beacon_socket(self._context, wanted, address)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._closing, self._shown = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        light_beacon(self._socket, address)
        forking.guard(address)
        self._thread = threading.Thread(target=self._show, name="gradserver-beacon", daemon=True)
        self._thread.start()

    def _show(self) -> None:
        """Run in the beacon's own thread until the beacon has shown. From then on libzmq's thread goes on."""
        while not self._monitor.poll(_LOOK_MS):
            if self._closing.is_set():
                return
        if self._closing.wait(self._beat + _MARGIN_SECONDS):
            return
        with suppress(GradServerError, ConnectionError):
            self._tell(Present(self.identity))
        self._shown.set()

    def wait(self, timeout: float) -> bool:
        """Wait until the beacon has shown. Return False if ``timeout`` has passed first."""
        return self._shown.wait(timeout)

    def close(self) -> None:
        """Put the beacon out. May be called again, in any thread."""
        with self._lock:
            closed = self._closing.is_set()
            self._closing.set()
        if closed:
            return
        self._thread.join()
        forking.unguard(self._address)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()
