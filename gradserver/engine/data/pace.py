"""Pace of a group: how long its latest rounds took says when a member is late, and how far each lags behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

_ROUNDS: Final = 64
"""Rounds that count; older ones may have been quicker."""
_FEWEST: Final = 8
"""Rounds before which no pace is known."""
_UNCOUNTED: Final = 3
"""First rounds after a change: a new member compiles, and caches are cold."""
_SIGMA: Final = 1.4826
"""Spread of a normal distribution, in median deviations."""
_SPREADS, _LEAST_FACTOR = 6.0, 1.5
"""A member is late if a round takes as many spreads longer than usual, and by this factor at least."""


class Pace:
    """Pace of one group. A round takes as long as a quorum of its members does, so stragglers do not stretch it.

    Members' lags are how much later than the median member each has given all it had.
    """

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=_ROUNDS)
        self._arrivals: deque[Mapping[int, tuple[float, float]]] = deque(maxlen=_ROUNDS)
        self._uncounted = _UNCOUNTED

    def changed(self) -> None:
        """Skip the next rounds: members, or what they exchange, have changed."""
        self._uncounted = _UNCOUNTED

    def completed(self, took: float, arrivals: Mapping[int, tuple[float, float]]) -> None:
        """Note that a round ``took`` so long, and when the first and last contribution of each member came."""
        if self._uncounted:
            self._uncounted -= 1
            return
        self._took.append(took)
        self._arrivals.append(arrivals)

    def forget(self, member: int) -> None:
        """Forget a member that has departed."""
        left = ({one: at for one, at in arrivals.items() if one != member} for arrivals in self._arrivals)
        self._arrivals = deque(left, maxlen=_ROUNDS)

    @property
    def rounds(self) -> int:
        """Number of rounds that count."""
        return len(self._took)

    @property
    def known(self) -> bool:
        """True if there were enough rounds."""
        return self.rounds >= _FEWEST

    @property
    def usual(self) -> float:
        """Seconds that a round takes, the median; 0 if there was none."""
        return median(self._took) if self._took else 0.0

    @property
    def spread(self) -> float:
        """Difference between rounds in seconds: robust, so that a few slow ones do not show."""
        usual = self.usual
        return _SIGMA * median(abs(took - usual) for took in self._took) if self._took else 0.0

    def lag(self, member: int) -> float:
        """Return the seconds that one is behind the median member, usually."""
        rounds = [arrivals for arrivals in self._arrivals if member in arrivals]
        lags = [arrivals[member][1] - median(last for _, last in arrivals.values()) for arrivals in rounds]
        return median(lags) if lags else 0.0

    def deadline(self, grace: float, timeout: float, took: float | None = None) -> float | None:
        """Return the seconds from a round's beginning after which a missing member is late; None if that is unknown.

        Before enough rounds are known it goes by ``took``: what this one has taken a quorum, if it has.
        """
        if self.known:
            usual = self.usual
            margin = max(_SPREADS * self.spread, (_LEAST_FACTOR - 1) * usual)
        elif took is not None:
            usual, margin = took, (_LEAST_FACTOR - 1) * took
        else:
            return None
        return min(usual + margin + grace, timeout)

    def explain(self, came: int, members: int) -> str:
        """Say why a member is taken for late, as a clause."""
        if not self.known:
            return f"{came} of {members} had come"
        how = f"rounds take {self.usual:.2g} s (median of {self.rounds}, spread {self.spread:.2g} s)"
        return f"{how}, and {came} of {members} had come"
