"""Staleness of contributions, as the ledger has it: from the beginnings of rounds and their ends."""

from __future__ import annotations

from gradserver.engine.ends import MAX_CUTS
from gradserver.engine.records import Begun, RoundRecord
from gradserver.engine.staleness import updates_between


class Staleness:
    """The staleness of contributions to each round.

    Attributes:
        latest: that of each contribution to the last round, by member id.
    """

    def __init__(self) -> None:
        self.latest: dict[int, int] = {}
        self._begun: dict[int, dict[int, int]] = {}
        """Versions of contributions to rounds that have begun and are not complete."""
        self._sections: dict[int, int] = {}
        """Sections of the latest rounds."""

    def begin(self, begun: Begun) -> None:
        """Take the beginning of a round."""
        self._begun[begun.round] = dict(begun.cohort)

    def complete(self, record: RoundRecord) -> None:
        """Take a round that is complete."""
        number = record.round
        self.latest = {
            member_id: updates_between(version, number, record.section, self._sections)
            for member_id, version in self._begun.pop(number, {}).items()
            if record.weights[member_id]
        }
        self._sections[number] = record.section
        self._sections.pop(number - MAX_CUTS, None)
