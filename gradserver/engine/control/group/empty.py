"""Rounds in a row to which no member gave anything: at the end of an epoch there are a few, and more are a fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gradserver.engine.records import RoundRecord

_SECONDS: Final = 2.0
"""Duration of such rounds after which they are told. Then they are told after twice that time, and so on."""


@dataclass(slots=True)
class Empty:
    """Rounds without an update, the latest ones in a row.

    Attributes:
        rounds: how many.
        seconds: duration of these.
    """

    rounds: int = 0
    seconds: float = 0.0
    _since: float = 0.0
    _tell_at: float = _SECONDS

    def note(self, record: RoundRecord) -> bool:
        """Note a round that is complete. Return true if it is time to tell that nothing is done."""
        if any(record.weights) or record.nonfinite:
            self.rounds, self.seconds, self._tell_at = 0, 0.0, _SECONDS
            return False
        if not self.rounds:
            self._since = record.opened
        self.rounds, self.seconds = self.rounds + 1, record.completed - self._since
        if self.seconds < self._tell_at:
            return False
        self._tell_at = 2 * self.seconds
        return True

    def describe(self) -> dict[str, object] | None:
        """Return them as plain JSON values; None if the last round had an update."""
        return {"rounds": self.rounds, "seconds": round(self.seconds, 3)} if self.rounds else None
