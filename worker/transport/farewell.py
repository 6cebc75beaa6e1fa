"""The reason for a broken connection of a member that cannot return, if the coordinator lives.

A member of a group that is not durable is out as soon as its connection breaks. What it was told, if anything, may have
been lost with that connection. This happens when the member froze: libzmq's heartbeats then close the connection at
either end. So it asks once, on a new one, before its user hears that the coordinator was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ConnectionLostError, GradServerError, LeftOutError, OutlierError, PeerError
from gradserver.protocol.messages import Failure, Message, Welcome
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.transport.reach import reach
from gradserver.worker.handle import Handle
from gradserver.worker.session import Session
from gradserver.worker.transport.tcp import TcpChannel

_ASK_SECONDS: Final = 1.0
"""Seconds that connecting may take, and as many for the answer."""


class Farewell:
    """A receiver that hands messages to ``session``, and after a break also whether this worker is out."""

    def __init__(self, session: Session, url: str) -> None:
        self.receive = session.receive
        self._session = session
        self._url = url

    def lost(self, error: GradServerError) -> None:
        """Handle the broken connection."""
        if isinstance(error, ConnectionLostError):
            error = reason_of_group(self._url, self._session.membership) or error
        self._session.lost(error)


def reason_of_group(url: str, welcome: Welcome) -> PeerError | None:
    """Return why a group goes on without the worker of ``welcome``; None without an answer that says so."""
    with suppress(GradServerError, OSError):
        reach(url, _ASK_SECONDS)
        channel = TcpChannel(url, _ASK_SECONDS)
        try:
            answer = Handle(_ASK_SECONDS, channel)
            channel.attach(_Listener(answer))
            member_id = welcome.member_ids[welcome.rank]
            channel.send(Resume(welcome.group, member_id, welcome.token, welcome.epoch, ""))
            channel.ask()
            answer.wait(_ASK_SECONDS)
        except (LeftOutError, OutlierError) as error:
            return error
        finally:
            channel.close()
    return None


class _Listener:
    """A receiver of the one message that matters."""

    def __init__(self, answer: Handle) -> None:
        self._answer = answer

    def receive(self, message: Message, _payloads: Sequence[Buffer]) -> None:
        if isinstance(message, Failure):
            self._answer._complete(message.exception())

    def lost(self, error: GradServerError) -> None:
        self._answer._complete(error)


def out_before_entry(welcome: Welcome, error: GradServerError) -> LeftOutError:
    """Return the error for a worker that does not contribute yet: it has nothing that others need, and joins anew."""
    name = welcome.names[welcome.rank]
    what = f"this worker, {name!r}, was about to join group {welcome.group!r}, and has to connect again for that"
    return LeftOutError(f"{what}: {error.message}", worker=name, rank=welcome.rank)
