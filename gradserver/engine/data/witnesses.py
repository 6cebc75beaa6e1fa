"""Contributions of witnesses, which repeat the samples of another: they do not count, and are compared with it.

A member says by the weight of a contribution that it is a witness (`gradserver.protocol.audits`), and may lie. So the
policy bounds what that costs, not what members say. In a group without audits such a weight is one like any other. In
others at most `TOGETHER` contributions to a round are compared, the same in all of its slices. That is done in about
as many rounds as are audited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gradserver.engine.commands import Contribution, Repeated
from gradserver.engine.data.rounds import Round
from gradserver.protocol.audits import TOGETHER, WITNESS_WEIGHT, holder_of

_SPARE: Final = 16
"""Rounds that may be compared beyond twice the share.

Rounds are drawn, so their number scatters: of n expected ones, 2n + 16 are eight standard deviations away, or more.
"""


@dataclass(slots=True)
class Witnesses:
    """Limit of the rounds of one group in which contributions are compared, at this data half.

    Attributes:
        share: share of the rounds that are audited; 0 for none.
    """

    share: float
    _first: int = -1
    _compared: int = 0

    def sort_out(
        self, number: int, current: Round, given: list[Contribution]
    ) -> tuple[list[Contribution], Repeated | None]:
        """Return the contributions to slices of a round that count, and those that are to be compared, if any."""
        if not self.share:
            return given, None
        for one in given:
            if one.weight < WITNESS_WEIGHT and (holder := holder_of(one.weight)) >= 0:
                break
        else:
            return given, None
        witnesses = [one for one in given if holder_of(one.weight) == holder]
        rest = [one for one in given if holder_of(one.weight) < 0]
        if current.together is None:
            ids = [holder, *(one.member_id for one in witnesses)]
            current.compare_together(ids[:TOGETHER] if self._admit(number) else ())
        rows = [one for one in rest if one.member_id == holder] + witnesses
        rows = [one for one in rows if one.member_id in (current.together or ())]
        return rest, Repeated(rows, []) if len(rows) > 1 else None

    def _admit(self, number: int) -> bool:
        """Count a round in which contributions are to be compared, unless there have been too many."""
        if self._first < 0:
            self._first = number
        if self._compared >= 2 * self.share * (number - self._first) + _SPARE:
            return False
        self._compared += 1
        return True
