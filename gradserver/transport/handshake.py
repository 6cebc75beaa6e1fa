"""Connections that are nobody's: of those who have not said yet who they are, and of those who are known no more.

    state   event                                        next    what happens
    ──────  ───────────────────────────────────────────  ──────  ────────────────────────────────────────────────────
    (none)  a message without a number                   NEW     it is taken: `gradserver status` says no more
    NEW     the message that is due                      NEW     it is taken; whoever says who he is becomes a peer
    NEW     a later one: the first was lost, or swapped  NEW     it is kept, for as long as its numbers say …
    NEW     … and what is missing does not come          PAST    ConnectionLostError
    (peer)  it is refused, left out, has left, is lost   PAST
    PAST    a message with a number                      PAST    he is told once more what he was told

So whoever missed something hears that, and can come again on a new connection; and a message that a network repeats
late brings nobody in who has gone. As many are known as are likely to say anything more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ConnectionLostError
from gradserver.protocol.messages import Failure, Join, Message, Ping
from gradserver.protocol.numbers import Frames, Numbers, split

_KNOWN: Final = 1024
_WAITING: Final = 4096
"""Workers that wait while none may join. More are let in."""
_EARLY_BYTES: Final = 4096
"""Of one message that is kept. No longer one comes soon after a first message."""


class Strangers:
    """What has come from whom, by the identity of the connection."""

    def __init__(self) -> None:
        self._known: dict[bytes, Numbers | None] = {}
        """None for those who are past. The last one is the youngest."""
        self._farewells: dict[bytes, Failure] = {}
        """What those were told."""
        self._waiting: dict[bytes, Sequence[Buffer]] | None = None
        """What those have said who wait, if anybody has to."""

    def take(self, identity: bytes, frames: Frames, now: float) -> Iterable[Frames]:
        """The messages that are due, now that one has come.

        Raises:
            ConnectionLostError: of those who are past, and when something is missing.
        """
        if not split(frames[0])[0]:
            return (frames,)
        if self.is_past(identity):
            raise ConnectionLostError("it was given up before")
        numbers = self._known.get(identity) or self._know(identity, Numbers())
        size = sum(len(frame) for frame in frames)
        due = numbers.take(frames, now)
        if not due and size > _EARLY_BYTES:
            raise ConnectionLostError(f"its first message was lost on the way: one of {size} bytes came")
        return due

    def admit(self, identity: bytes) -> Numbers:
        """He has said who he is; what has come from him."""
        return self._known.pop(identity, None) or Numbers()

    def is_past(self, identity: bytes) -> bool:
        """Whether nothing of him is taken any more."""
        return identity in self._known and self._known[identity] is None

    def hold(self) -> None:
        """From now on whoever wants to join waits, until `release`."""
        self._waiting = {}

    def release(self) -> Mapping[bytes, Sequence[Buffer]]:
        """The messages of those who have waited. From now on nobody does."""
        waiting, self._waiting = self._waiting or {}, None
        return waiting

    def waits(self, identity: bytes, message: Message, frames: Sequence[Buffer]) -> bool:
        """Whether he who says this waits, or goes on waiting."""
        if self._waiting is None:
            return False
        if isinstance(message, Ping) and identity in self._waiting:  # it asks whether something is missing
            return True
        if not isinstance(message, Join) or len(self._waiting) >= _WAITING:
            self._waiting.pop(identity, None)
            return False
        self._waiting[identity] = frames
        return True

    def part(self, identity: bytes, farewell: Failure | None = None) -> None:
        """From now on he is past. ``farewell`` is what he was told, which may be lost; None: nothing, or not now."""
        farewell = farewell or self._farewells.get(identity)
        self._make_room(identity)
        self._known[identity] = None
        if farewell is not None:
            self._farewells[identity] = farewell

    def farewell(self, identity: bytes) -> Failure | None:
        """What he was told who is past."""
        return self._farewells.get(identity)

    def gap(self, identity: bytes) -> Numbers | None:
        """His numbers, if something is missing."""
        numbers = self._known.get(identity)
        return None if numbers is None or numbers.deadline is None else numbers

    def _know(self, identity: bytes, numbers: Numbers) -> Numbers:
        self._make_room(identity)
        self._known[identity] = numbers
        return numbers

    def _make_room(self, identity: bytes) -> None:
        self._drop(identity)
        while len(self._known) >= _KNOWN:
            self._drop(next(iter(self._known)))

    def _drop(self, identity: bytes) -> None:
        self._known.pop(identity, None)
        self._farewells.pop(identity, None)
