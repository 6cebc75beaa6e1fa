"""Numbers on messages, by which a receiver notices what a network or a relay lost, repeated or put into another order.

Each side of a connection counts what it sends, from 1 on, and puts the number in front of the header:

    8 bytes    the number, big-endian, and the highest bit: no header begins so
    header     as `protocol.wire` encodes it

What has no number is taken as it comes: answers to strangers, and what passes through a local socket, which loses
nothing.

    number       what happens
    ───────────  ──────────────────────────────────────────────────────────────────────
    due          handed over, and with it those kept that follow it
    below due    dropped: it was handed over before
    above due    kept until what is missing has come
    any          the connection is lost, when that takes too long or too many are kept

A message behind which nothing comes shows when something does: who waits says Ping now and then, and is answered.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from protocol.buffer import Buffer
from protocol.errors import ConnectionLostError

T = TypeVar("T")

GAP_SECONDS: Final = 0.2
"""How long something that is missing may take."""
MAX_EARLY: Final = 16
"""Messages kept meanwhile."""

_NUMBER: Final = struct.Struct(">Q")
_FLAG: Final = 1 << 63


def numbered(header: bytes, number: int) -> bytes:
    """``header`` with its number in front."""
    return _NUMBER.pack(_FLAG | number) + header


def split(header: Buffer) -> tuple[int, Buffer]:
    """The number in front of a header, and the header; 0 if it has none."""
    if len(header) < _NUMBER.size or header[0] < 0x80:
        return 0, header
    number: int = _NUMBER.unpack_from(header)[0]
    return number ^ _FLAG, memoryview(header)[_NUMBER.size :]


class Inbox(Generic[T]):
    """Puts what comes in on one connection into order.

    Attributes:
        due: the number of the next message.
        deadline: when what is missing has to be there; None if nothing is.
    """

    __slots__ = ("_early", "deadline", "due")

    def __init__(self, due: int = 1) -> None:
        self.due = due
        self.deadline: float | None = None
        self._early: dict[int, T] = {}

    def take(self, number: int, message: T, now: float) -> Iterable[T]:
        """What is to be handed over, now that ``message`` has come.

        Raises:
            ConnectionLostError: too many wait for one that is missing.
        """
        if number != self.due:
            return self._out_of_order(number, message, now)
        self.due += 1
        return (message,) if self.deadline is None else self._caught_up(message, now)

    def _out_of_order(self, number: int, message: T, now: float) -> Iterable[T]:
        if number == 0:
            return (message,)
        if number > self.due:
            self._early.setdefault(number, message)
            if len(self._early) > MAX_EARLY:
                raise self._lost()
            if self.deadline is None:
                self.deadline = now + GAP_SECONDS
        return ()

    def _caught_up(self, message: T, now: float) -> Iterable[T]:
        due = [message]
        while self.due in self._early:
            due.append(self._early.pop(self.due))
            self.due += 1
        self.deadline = now + GAP_SECONDS if self._early else None
        return due

    def check(self, now: float) -> None:
        """Raise ConnectionLostError if what is missing should be there by ``now``."""
        if self.deadline is not None and self.deadline <= now:
            raise self._lost()

    def _lost(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"message {self.due} was lost on the way: {min(self._early)} came, and {self.due} has not"
        )
