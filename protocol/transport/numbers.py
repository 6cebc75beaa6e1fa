"""Numbers on messages. They show what a network or a relay lost, repeated or put into another order.

Each side of a connection counts what it sends, from 1 on, and puts the number in front of the header:

    8 bytes    the number, big-endian, and the highest bit: no header begins so
    header     as `gradserver.protocol.wire` encodes it

A message without a number is taken as it comes: an answer to a stranger, or one from a local socket, which loses
nothing.

    number       what happens
    ───────────  ──────────────────────────────────────────────────────────────────────
    due          handed over, and with it those kept that follow it
    below due    dropped: it was handed over before
    above due    kept until what is missing has come
    any          the connection is lost, when that takes too long or too many are kept

The loss of a last message shows when another follows. So a waiting side says Ping now and then, and is answered. The
first message of a connection is number 1. If another one comes first, number 1 was lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ConnectionLostError

Frames = list[Buffer]
"""A message: its header, which may have a number, and its payloads."""

GAP_SECONDS: Final = 0.2
"""Seconds that a missing message may take."""
MAX_EARLY: Final = 16
"""Messages kept meanwhile."""

_NUMBER: Final = struct.Struct(">Q")
_FLAG: Final = 1 << 63


def numbered(header: bytes, number: int) -> bytes:
    """Return ``header`` with its number in front."""
    return _NUMBER.pack(_FLAG | number) + header


def split(header: Buffer) -> tuple[int, Buffer]:
    """Return the number in front of a header, and the header; 0 if it has none."""
    if len(header) < _NUMBER.size or header[0] < 0x80:
        return 0, header
    number: int = _NUMBER.unpack_from(header)[0]
    return number ^ _FLAG, header[_NUMBER.size :]


class Numbers:
    """The numbers that one side of a connection has sent and taken; ``lost`` begins the text of each error.

    Attributes:
        deadline: when what is missing has to be there; None if nothing is.
    """

    __slots__ = ("_due", "_early", "_lost_text", "_sent", "deadline")

    def __init__(self, lost: str = "") -> None:
        self._lost_text = lost
        self.deadline: float | None = None
        self._due = 1
        self._early: dict[int, Frames] = {}
        self._sent = 0

    def numbered(self, header: bytes) -> bytes:
        """Return ``header`` of the next message with its number."""
        self._sent = number = self._sent + 1
        return _NUMBER.pack(_FLAG | number) + header

    def take(self, frames: Frames, now: float) -> Iterable[Frames]:
        """Return the messages to hand over, without numbers, now that one has come.

        Raises:
            ConnectionLostError: too many wait for one that is missing.
        """
        number, frames[0] = split(frames[0])
        if number != self._due:
            return self._out_of_order(number, frames, now)
        self._due += 1
        return (frames,) if self.deadline is None else self._caught_up(frames, now)

    def _out_of_order(self, number: int, frames: Frames, now: float) -> Iterable[Frames]:
        if number == 0:
            return (frames,)
        if number > self._due:
            self._early.setdefault(number, frames)
            if len(self._early) > MAX_EARLY:
                raise self._lost()
            if self.deadline is None:
                self.deadline = now + GAP_SECONDS
        return ()

    def _caught_up(self, frames: Frames, now: float) -> Iterable[Frames]:
        due = [frames]
        while self._due in self._early:
            due.append(self._early.pop(self._due))
            self._due += 1
        self.deadline = now + GAP_SECONDS if self._early else None
        return due

    def check(self, now: float) -> None:
        """Raise ConnectionLostError if what is missing should be there by ``now``."""
        if self.deadline is not None and self.deadline <= now:
            raise self._lost()

    def _lost(self) -> ConnectionLostError:
        text = f"message {self._due} was lost on the way: {min(self._early)} came, and {self._due} has not"
        return ConnectionLostError(self._lost_text + text)
