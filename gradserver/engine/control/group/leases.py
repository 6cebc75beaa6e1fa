"""Leases of a group: samples that its members hold, and what they asked of data that has to wait.

`gradserver.engine.control.leases` decides what happens to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gradserver.engine.control.audits import Audits
from gradserver.engine.lease_table import Positions
from gradserver.protocol.messages.leases import Claim, Register
from gradserver.protocol.ranges import Ranges

Question = Register | Claim


@dataclass(slots=True)
class Leases:
    """Leases of one group.

    Attributes:
        positions: what is left of each data set, and which member holds which samples.
        audits: samples that several members compute.
        asked: questions that wait for a round to be over, by the data's name and member id.
    """

    positions: Positions = field(default_factory=Positions)
    audits: Audits = field(default_factory=Audits)
    asked: dict[tuple[str, int], tuple[Question, Ranges]] = field(default_factory=dict)

    def restore(self, positions: Positions, round_number: int) -> None:
        """Go on with what an earlier coordinator has written down, and with ``round_number``."""
        self.positions = positions
        positions.go_on(round_number)

    def ask_later(self, member_id: int, question: Question, ranges: Ranges) -> None:
        """Keep a question until the rounds before it are over."""
        self.asked[question.name, member_id] = question, ranges

    def due(self, number: int) -> Iterator[tuple[int, Question, Ranges]]:
        """Take out questions that can be answered, as the rounds before ``number`` are over."""
        for (name, member_id), (question, ranges) in list(self.asked.items()):
            if question.round <= number:
                del self.asked[name, member_id]
                yield member_id, question, ranges

    def depart(self, member_id: int) -> None:
        """Give the samples of a member that is gone to the others."""
        self.positions.depart(member_id)
        self.audits.depart(member_id)
        for key in [key for key in self.asked if key[1] == member_id]:
            del self.asked[key]
