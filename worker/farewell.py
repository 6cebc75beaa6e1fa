"""Why a connection broke, if the coordinator lives: what a member hears who cannot come back.

A member of an elastic group that is not durable is out as soon as its connection breaks. What it was told, if anything,
may have been lost with that connection, as when it froze: libzmq's heartbeats then close the connection at either end.
So it asks once, on a new one, before its user hears that the coordinator was lost.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from protocol.buffer import Buffer
from protocol.errors import ConnectionLostError, GradServerError, LeftOutError
from protocol.messages import Failure, Message, Welcome
from protocol.resuming import Resume
from worker.line import reach
from worker.session import Session
from worker.tcp import TcpChannel

_ASK_SECONDS: Final = 1.0
"""How long to connect may take, and how long the answer."""


class Farewell:
    """Hands to ``session`` what the coordinator says; when the connection breaks, also whether this worker is out."""

    def __init__(self, session: Session, url: str) -> None:
        self.receive = session.receive
        self._session = session
        self._url = url

    def lost(self, error: GradServerError) -> None:
        """The connection broke."""
        if isinstance(error, ConnectionLostError):
            error = left_out(self._url, self._session.membership) or error
        self._session.lost(error)


def left_out(url: str, welcome: Welcome) -> LeftOutError | None:
    """That a group goes on without who got this ``welcome``. None if its coordinator does not say so."""
    with suppress(GradServerError, OSError):
        reach(url, _ASK_SECONDS)
        channel, answer = TcpChannel(url, _ASK_SECONDS), _Answer()
        try:
            channel.attach(answer)
            seat = welcome.seats[welcome.rank]
            channel.send(Resume(welcome.group, seat, welcome.token, welcome.epoch, ""))
            channel.ask()
            channel.wait(answer.come, _ASK_SECONDS)
        finally:
            channel.close()
        return answer.error
    return None


class _Answer:
    """Takes the one message that matters."""

    def __init__(self) -> None:
        self.error: LeftOutError | None = None
        self.come = threading.Lock()
        self.come.acquire()

    def receive(self, message: Message, _payloads: Sequence[Buffer]) -> None:
        if isinstance(message, Failure):
            error = message.exception()
            self.error = error if isinstance(error, LeftOutError) else None
            self._release()

    def lost(self, _error: GradServerError) -> None:
        self._release()

    def _release(self) -> None:
        if self.come.locked():
            self.come.release()
