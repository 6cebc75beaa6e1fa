"""Ends of rounds, as they are written down: the epoch in force behind each of the last rounds.

Where members can be late, a group may have to go back: all members that had the results of its last rounds are lost.
Some of the others may have heard that the round before is over, and begun the next one. So the rest hear of the same
epoch, whatever came into force behind later rounds, or in a coordinator since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

MAX_CUTS: Final = 256
"""Rounds that are known to have been closed for late members, and rounds of which the end is known."""


class Ends:
    """Epochs in force behind rounds that are over.

    Attributes:
        told: the last round that is over, and the epoch in force behind it.
    """

    def __init__(self) -> None:
        self.told = (-1, 0)
        self._changes: deque[tuple[int, int]] = deque()
        """Rounds behind which another epoch came into force, with that epoch."""

    def write(self, number: int, epoch: int) -> bool:
        """Note what is written of the end of a round; return False if it was known.

        Later rounds are made anew.
        """
        if self.told == (number, epoch):
            return False
        self.told = number, epoch
        while self._changes and self._changes[-1][0] >= number:
            self._changes.pop()
        if not self._changes or self._changes[-1][1] != epoch:
            self._changes.append((number, epoch))
        while len(self._changes) > 1 and self._changes[1][0] <= number - MAX_CUTS:
            self._changes.popleft()
        return True

    def behind(self, number: int) -> int | None:
        """Return the epoch in force behind round ``number``, or behind the first one that is known.

        None if nothing is written of it.
        """
        if number > self.told[0] or not self._changes:
            return None
        return max((change for change in self._changes if change[0] <= number), default=self._changes[0])[1]

    @property
    def earliest(self) -> int:
        """The epoch in force behind the first round that is known; 0 before there is one."""
        return self._changes[0][1] if self._changes else 0

    def changes(self) -> Iterable[tuple[int, int]]:
        """Yield what `told` does not say: rounds behind which another epoch came into force, with that epoch."""
        if len(self._changes) > 1:
            yield from (change for change in self._changes if change[0] < self.told[0])
