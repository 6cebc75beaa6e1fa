"""Members of which all threads wait, and the checks whether that is so at all members at once.

`gradserver.engine.control.deadlocks` acts on it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from gradserver.protocol.messages.waiting import Blocked

_CHECKS = 2
"""Checks in a row that all members answer while they wait on. The first one brings everything that was on its way."""


class Step(Enum):
    """Consequence of the word of a member."""

    NOTHING = "nothing"
    ASK = "all members are asked"
    STILL = "all members have waited since before the first check"


@dataclass(slots=True)
class BlockedMembers:
    """Members that wait.

    Attributes:
        said: the latest word of each.
        check: number of the check that is open; 0 if none is.
    """

    said: dict[int, Blocked] = field(default_factory=dict)
    check: int = 0
    _count: int = 0
    """Number of the latest check."""
    _passed: int = 0
    """Checks in a row that all have answered."""
    _answered: set[int] = field(default_factory=set)

    def hear(self, member_id: int, word: Blocked, present: Collection[int]) -> Step:
        """Take the word of one of the members that are ``present``."""
        before = self.said.get(member_id)
        if before is None or before.serial != word.serial or not word.causes:
            self.stop()
        if not word.causes:
            self.said.pop(member_id, None)
            return Step.NOTHING
        self.said[member_id] = word
        if not self.said.keys() >= set(present):
            return Step.NOTHING
        if self.check:
            if word.check != self.check:
                return Step.NOTHING
            self._answered.add(member_id)
            if not self._answered >= set(present):
                return Step.NOTHING
            self._passed += 1
        if self._passed == _CHECKS:
            self.stop()
            return Step.STILL
        self._count += 1
        self.check, self._answered = self._count, set()
        return Step.ASK

    def stop(self) -> None:
        """End the open check: not all members wait."""
        self.check = self._passed = 0

    def forget(self, member_id: int) -> None:
        """Forget a member that is gone, or has no connection."""
        self.said.pop(member_id, None)
        self.stop()
