"""A worker's presence at its coordinator, or a data shard.

It is made when that asks for it, while this worker joins. Once libzmq's own thread has said there for the first time
that this process runs, the other side would notice if it froze, and is told so. That is waited for before anybody gets
the worker to use it: his program may keep Python's lock from then on for as long as it likes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq

from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import BePresent, Message, Ping, Present
from gradserver.protocol.presence import beat_of, presence_options
from gradserver.protocol.wire import encode
from gradserver.worker.transport import forking

_LOOK_MS: Final = 50
"""How often to look whether it was closed before it has reached anybody."""
_MARGIN_SECONDS: Final = 0.01


class Presence:
    """Shows that this process runs, until it is closed. It outlives the connection on which it was asked for.

    Args:
        address: numeric URL of the other side.
        wanted: what is asked for.
        tell: says on that connection that it is there.
    """

    def __init__(self, address: str, wanted: BePresent, tell: Callable[[Message], None]) -> None:
        self.identity = wanted.identity
        self._address, self._beat, self._tell = address, beat_of(wanted), tell
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in presence_options(wanted, address).items():
            self._socket.setsockopt(getattr(zmq, option), value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._closing, self._shown = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._socket.connect(address)
        self._socket.send(encode(Ping()))
        forking.guard(address)
        self._thread = threading.Thread(target=self._show, name="gradserver-presence", daemon=True)
        self._thread.start()

    def _show(self) -> None:
        """The life of our own thread. What goes on then is libzmq's."""
        while not self._monitor.poll(_LOOK_MS):
            if self._closing.is_set():
                return
        if self._closing.wait(self._beat + _MARGIN_SECONDS):
            return
        with suppress(GradServerError, ConnectionError):
            self._tell(Present(self.identity))
        self._shown.set()

    def wait(self, timeout: float) -> bool:
        """Wait until it has shown, and say whether it has."""
        return self._shown.wait(timeout)

    def close(self) -> None:
        """Be there no more. May be called again, in any thread."""
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
