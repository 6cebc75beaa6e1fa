"""Warnings that would come again in every round: one in a while is told, with the number of those that were not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_QUIET_SECONDS: Final = 10.0
"""Between two warnings: a training that has gone wrong has the same fault in every round."""


@dataclass(slots=True)
class Quiet:
    """Interval behind a warning in which the same is not told again."""

    _until: float = -math.inf
    _about: frozenset[int] = frozenset()
    _untold: int = 0

    def tell(self, now: float, about: Iterable[int] = ()) -> str | None:
        """Return what to add to a warning that is told at time ``now``; None if it is not to be told.

        A warning ``about`` a member that no other was about in this interval is told at once.
        """
        about, is_over = frozenset(about), now >= self._until
        if not is_over and about <= self._about:
            self._untold += 1
            return None
        self._about = about if is_over else self._about | about
        self._until = now + _QUIET_SECONDS
        untold, self._untold = self._untold, 0
        rounds = f"{untold} more round{'s' if untold > 1 else ''}"
        return f" (and in {rounds} since the last warning)" if untold else ""
