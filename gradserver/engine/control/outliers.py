"""Verdicts about members that contribute something else than the others, over several rounds.

Two figures tell: the norm of a contribution over the median norm, and its cosine to the mean of the others. One round
says little, as gradients of small batches scatter. So figures are averaged over a few rounds and over many, and must be
further off than the scatter among the members explains:

    a member is off when                                                                           over rounds
    ─────────────────────────────────────────────────────────────────────────────────────────────  ───────────
    its norm is more than 3 times the median, and far outside the scatter; twice in each round     4
    its norm is more than 3 times the median, or less than a third, and far outside the scatter    32
    its cosine is below 0, those of the others are not as low, and both is far outside the scatter  4, or 32
    its norm is more than 1000 times the median, in 3 rounds                                       of 32

The logarithm of norms is averaged, so that one large value does not decide. Scatter is taken from the steps between one
round and the next, so that a member that is always off does not hide in it. Of two members, that
one is off with the norm further from what was usual; with no history, the larger one. Which of two is off that point
away from each other cannot be told.

A contribution of little weight scatters more: its norm may be larger by the root of the ratio of weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final, NamedTuple

from gradserver.engine.figures import OfMember
from gradserver.protocol.limits import MAX_WEIGHT

_FEW, _MANY = 4, 32
_FACTOR: Final = math.log(3.0)
"""Logarithm of the ratio of norms that is off."""
_EACH: Final = math.log(2.0)
"""The same in each of a few rounds."""
_WILD: Final = math.log(1000.0)
_WILD_ROUNDS: Final = 3
_CLOSE: Final = 0.05
"""Cosine that is near 0."""
_SIGMAS: Final = 6.0
"""Standard deviations of a mean over rounds that are outside the scatter."""
_MOST: Final = 50.0
"""Bound of a logarithm: no contribution counts for more."""
_OF_STEP: Final = 1.0
"""Standard deviation over the mean or median step from one normal number to the next, about."""
_LONGEST: Final = 3.0
"""Bound of a step of logarithms: where a fault begins there is one that is no scatter."""
_PRIOR: Final = (0.5, 0.25, 4.0)
"""Scatter of logarithms and of cosines that is assumed at first, with the weight of so many rounds."""
_HORIZON: Final = 128
_CLEAR: Final = 16
"""Rounds in a row without anything off, after which a member is in line again."""


class Verdict(NamedTuple):
    """A member is off: the ``ratio`` of its norm to the median, and its ``cosine`` to the mean of the others.

    Both are means over ``rounds``. With ``contrary`` it is one of two members that point away from each other.
    """

    member_id: int
    ratio: float
    cosine: float
    rounds: int
    contrary: bool = False

    def __str__(self) -> str:
        """Say what is off."""
        times = f"{self.ratio:.3g} times the median" if self.ratio < 1e6 else f"{self.ratio:.1e} times the median"
        return f"the norm of its gradients is {times}, their cosine to the mean of the others {self.cosine:.2f}"


class _Point(NamedTuple):
    """Figures of a member in one round: logarithm of the ratio of norms, and cosine."""

    log: float
    cosine: float


@dataclass(slots=True)
class Outliers:
    """History of one group's contributions, and the members that are off.

    Attributes:
        named: verdicts about members that are off, by id.
        latest: the last figures of each member: ratio and cosine, averaged over a few rounds.
    """

    named: dict[int, Verdict] = field(default_factory=dict)
    _points: dict[int, deque[_Point]] = field(default_factory=dict)
    _clear: dict[int, int] = field(default_factory=dict)
    _log_scatter: float = _PRIOR[0]
    _cosine_scatter: float = _PRIOR[1]
    _rounds: int = 0
    _level: float | None = None
    """Usual logarithm of the norm, from rounds in which the members agreed; for groups of two."""

    def take(self, members: Sequence[OfMember], weights: Mapping[int, float]) -> tuple[list[Verdict], list[int]]:
        """Take the figures of a round. Return verdicts that are new, and members that are in line again."""
        if len(members) < 2:
            return [], []
        points = self._measure(members, weights)
        for member_id, point in points.items():
            self._points.setdefault(member_id, deque(maxlen=_MANY)).append(point)
        judged = {member_id: self._judge(member_id, points) for member_id in points}
        off = {member_id: found for member_id, found in judged.items() if found is not None}
        self._learn()
        fresh = [found for member_id, found in off.items() if member_id not in self.named]
        return fresh, self._settle(points, off)

    def is_wild(self, members: Iterable[OfMember]) -> bool:
        """Tell whether a contribution of the last round is so far off that estimates of noise are spoilt."""
        return any(one.member_id in self.named or abs(self._last(one.member_id)) > _WILD for one in members)

    def recall(self, verdict: Verdict) -> None:
        """Note a member that is off, as an earlier coordinator has found."""
        self.named[verdict.member_id] = verdict

    def forget(self, member_id: int) -> None:
        """Forget a member, which has departed or does not count any more."""
        self._points.pop(member_id, None)
        self._clear.pop(member_id, None)
        self.named.pop(member_id, None)

    def figures_of(self, member_id: int) -> tuple[float, float] | None:
        """Return the ratio of norms and the cosine of a member, over a few rounds; None if it has none."""
        points = self._points.get(member_id)
        return None if not points else _figures(list(points)[-_FEW:])

    def _last(self, member_id: int) -> float:
        points = self._points.get(member_id)
        return points[-1].log if points else 0.0

    def _measure(self, members: Sequence[OfMember], weights: Mapping[int, float]) -> dict[int, _Point]:
        logs = {one.member_id: 0.5 * math.log(max(one.squares, 1e-300)) for one in members}
        usual = self._usual(list(logs.values()))
        middle = median([weights.get(member_id, 0.0) or 1.0 for member_id in logs])
        points = {}
        for one in members:
            share = min(max((weights.get(one.member_id, 0.0) or 1.0) / middle, 1 / MAX_WEIGHT), MAX_WEIGHT)
            log, slack = logs[one.member_id] - usual, abs(0.5 * math.log(share))
            if (log > 0) == (share < 1):
                log = math.copysign(max(abs(log) - slack, 0.0), log)
            norm = math.sqrt(one.squares) * math.sqrt(one.others)
            cosine = one.inner / norm if 0 < norm < math.inf else 0.0
            points[one.member_id] = _Point(max(-_MOST, min(log, _MOST)), max(-1.0, min(cosine, 1.0)))
        return points

    def _usual(self, logs: list[float]) -> float:
        """Return the logarithm of the norm that others are compared with."""
        if len(logs) > 2:
            return median(logs)
        if self._level is None:
            return min(logs)
        return min(logs, key=lambda log: abs(log - (self._level or 0.0)))

    def _judge(self, member_id: int, points: Mapping[int, _Point]) -> Verdict | None:
        history = list(self._points[member_id])
        for rounds in (_FEW, _MANY):
            if len(history) < rounds:
                break
            recent = history[-rounds:]
            log, cosine = fmean(one.log for one in recent), fmean(one.cosine for one in recent)
            far = abs(log) > max(_FACTOR, _SIGMAS * self._log_scatter / math.sqrt(rounds))
            if far and (rounds == _MANY or min(one.log for one in recent) > _EACH):
                return Verdict(member_id, *_figures(recent), rounds)
            bound = max(_CLOSE, _SIGMAS * self._cosine_scatter / math.sqrt(rounds))
            if cosine < -bound and self._others_agree(member_id, points, rounds, bound):
                return Verdict(member_id, *_figures(recent), rounds, contrary=len(points) == 2)
        wild = [one for one in history if one.log > max(_WILD, _SIGMAS * self._log_scatter)]
        return Verdict(member_id, *_figures(wild), len(wild)) if len(wild) >= _WILD_ROUNDS else None

    def _others_agree(self, member_id: int, points: Mapping[int, _Point], rounds: int, bound: float) -> bool:
        """Tell whether the others point less far away than this member. Of one other there is nothing to say."""
        means = {one: fmean(point.cosine for point in list(self._points[one])[-rounds:]) for one in points}
        own = means.pop(member_id)
        return len(means) == 1 or median(means.values()) > own + bound

    def _learn(self) -> None:
        """Follow the scatter, by the steps of figures from one round to the next: what is always off has none."""
        steps = [(points[-1], points[-2]) for points in self._points.values() if len(points) > 1]
        if not steps:
            return
        logs = [min(abs(now.log - before.log), _LONGEST) for now, before in steps]
        log = max(logs) if len(logs) <= 2 else median(logs)
        cosine = fmean(abs(now.cosine - before.cosine) for now, before in steps)
        share = 1 / (min(self._rounds, _HORIZON) + _PRIOR[2] + 1)
        self._rounds += 1
        self._log_scatter += share * (_OF_STEP * log - self._log_scatter)
        self._cosine_scatter += share * (_OF_STEP * cosine - self._cosine_scatter)

    def follow_level(self, members: Sequence[OfMember]) -> None:
        """Note the usual norm, of a round in which the members agree."""
        logs = [0.5 * math.log(max(one.squares, 1e-300)) for one in members]
        if self.named or not logs or max(logs) - min(logs) > _FACTOR:
            return
        level = fmean(logs)
        self._level = level if self._level is None else self._level + 0.2 * (level - self._level)

    def _settle(self, points: Mapping[int, _Point], off: Mapping[int, Verdict]) -> list[int]:
        """Keep verdicts, and return members that have been in line for long enough."""
        cleared = []
        for member_id in points:
            if member_id in off:
                self.named[member_id] = off[member_id]
                self._clear[member_id] = 0
            elif member_id in self.named:
                self._clear[member_id] = self._clear.get(member_id, 0) + 1
                if self._clear[member_id] >= _CLEAR:
                    self.named.pop(member_id)
                    cleared.append(member_id)
        return cleared


def _figures(points: Sequence[_Point]) -> tuple[float, float]:
    """Return the ratio of norms and the cosine over some rounds."""
    return math.exp(fmean(one.log for one in points)), fmean(one.cosine for one in points)
