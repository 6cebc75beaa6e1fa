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
round and the next, so that a member that is always off does not hide in it.

Of two members, the one is off with the norm that is not as usual. The usual norm is known from rounds in which members
agreed, for each section of a plan, as sections differ. Which of two is off cannot be told in three cases: the usual
norm is not known, both are far from it, or they point away from each other. Then the verdict is about either.

In modes that do not wait for all, a round of a larger group may have two contributions. It counts if norms tell.

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

ADVICE: Final = "Look at that worker's GPU, its data, and the scale of its loss"
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
_LONGEST: Final = 3.0
"""Bound of a step of logarithms: where a fault begins there is one that is no scatter."""
_PRIOR: Final = (0.5, 0.25, 4.0)
"""Scatter of logarithms and of cosines that is assumed at first, with the weight of so many rounds."""
_HORIZON: Final = 128
_CLEAR: Final = 16
"""Rounds in a row without anything off, after which a member is in line again."""


class Verdict(NamedTuple):
    """A member is off: the ``ratio`` of its norm to the median, and its ``cosine`` to the mean of the others.

    Both are means over ``rounds``. With ``either`` it is one of two members, and which of them is off cannot be told.
    """

    member_id: int
    ratio: float
    cosine: float
    rounds: int
    either: bool = False

    @property
    def distance(self) -> tuple[float, float]:
        """Measure of how far off it is: by the norm first."""
        return abs(math.log(self.ratio)), -self.cosine

    def __str__(self) -> str:
        """Say what is off."""
        times = f"{self.ratio:.3g} times the median" if self.ratio < 1e6 else f"{self.ratio:.1e} times the median"
        return f"the norm of its gradients is {times}, their cosine to the mean of the others {self.cosine:.2f}"


class Judgement(NamedTuple):
    """Outcome of a round: verdicts that are ``new``, members ``cleared``, and all that are ``off`` now."""

    new: list[Verdict]
    cleared: list[int]
    off: list[Verdict]


class _Point(NamedTuple):
    """Figures of a member in one round: logarithm of the ratio of norms, and cosine.

    ``is_sure``: that ratio tells which member is off. ``is_pair``: the round had two contributions.
    """

    log: float
    cosine: float
    is_sure: bool
    is_pair: bool

    @property
    def is_far(self) -> bool:
        """Tell whether this round could be one of those because of which a member is off."""
        return self.cosine < -_CLOSE or abs(self.log) > _FACTOR


class _Level(NamedTuple):
    """Usual logarithm of the norm, from so many rounds."""

    log: float
    rounds: int


@dataclass(slots=True)
class Outliers:
    """History of one group's contributions, and the members that are off.

    Attributes:
        named: verdicts about members that are off, by id.
    """

    named: dict[int, Verdict] = field(default_factory=dict)
    _points: dict[int, deque[_Point]] = field(default_factory=dict)
    _clear: dict[int, int] = field(default_factory=dict)
    _log_scatter: float = _PRIOR[0]
    _cosine_scatter: float = _PRIOR[1]
    _rounds: int = 0
    _levels: dict[int, _Level] = field(default_factory=dict)
    """Usual norms, by section."""

    def take(
        self, members: Sequence[OfMember], weights: Mapping[int, float], section: int = 0, present: int = 2
    ) -> Judgement:
        """Take the figures of a round of a section of the plan. So many members are ``present``."""
        if len(members) < 2:
            return Judgement([], [], [])
        points = self._measure(members, weights, self._levels.get(section))
        self._follow_level(members, section)
        if len(points) == 2 < present and not all(point.is_sure for point in points.values()):
            return Judgement([], [], [])
        for member_id, point in points.items():
            self._points.setdefault(member_id, deque(maxlen=_MANY)).append(point)
        judged = {member_id: self._judge(member_id, points) for member_id in points}
        off = {member_id: found for member_id, found in judged.items() if found is not None}
        if len(points) == 2:
            off = self._of_two(points, off, present)
        self._learn()
        new = [found for found in off.values() if self._is_new(found)]
        return Judgement(new, self._settle(points, off), list(off.values()))

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

    def restart(self) -> None:
        """Forget which norms are usual, as there is another plan."""
        self._levels.clear()

    def figures_of(self, member_id: int) -> tuple[float, float] | None:
        """Return the ratio of norms and the cosine of a member, over a few rounds; None if it has none."""
        points = self._points.get(member_id)
        return None if not points else _figures(list(points)[-_FEW:])

    def _last(self, member_id: int) -> float:
        points = self._points.get(member_id)
        return points[-1].log if points else 0.0

    def _measure(
        self, members: Sequence[OfMember], weights: Mapping[int, float], level: _Level | None
    ) -> dict[int, _Point]:
        logs = {one.member_id: _log_of(one) for one in members}
        usual, is_sure = _usual(list(logs.values()), level)
        middle = median([weights.get(member_id, 0.0) or 1.0 for member_id in logs])
        points = {}
        for one in members:
            share = min(max((weights.get(one.member_id, 0.0) or 1.0) / middle, 1 / MAX_WEIGHT), MAX_WEIGHT)
            log, slack = logs[one.member_id] - usual, abs(0.5 * math.log(share))
            if (log > 0) == (share < 1):
                log = math.copysign(max(abs(log) - slack, 0.0), log)
            norm = math.sqrt(one.squares) * math.sqrt(one.others)
            cosine = one.inner / norm if 0 < norm < math.inf else 0.0
            log, cosine = max(-_MOST, min(log, _MOST)), max(-1.0, min(cosine, 1.0))
            points[one.member_id] = _Point(log, cosine, is_sure, len(members) == 2)
        return points

    def _judge(self, member_id: int, points: Mapping[int, _Point]) -> Verdict | None:
        history = list(self._points[member_id])
        if not any(one.is_far for one in history):  # nor is any mean of them
            return None
        for rounds in (_FEW, _MANY):
            if len(history) < rounds:
                break
            recent = history[-rounds:]
            log = fmean(one.log for one in recent)
            far = abs(log) > max(_FACTOR, _SIGMAS * self._log_scatter / math.sqrt(rounds))
            if far and (rounds == _MANY or min(one.log for one in recent) > _EACH):
                return _verdict(member_id, recent)
            alike = [one for one in recent if one.is_pair == (len(points) == 2)]
            if len(alike) < _FEW:
                continue
            if len(points) == 2 and rounds == _FEW and max(one.cosine for one in alike) > 0:
                continue  # norms may tell soon which one of two it is
            bound = max(_CLOSE, _SIGMAS * self._cosine_scatter / math.sqrt(len(alike)))
            if fmean(one.cosine for one in alike) < -bound and self._others_agree(member_id, points, rounds, bound):
                return _verdict(member_id, recent)._replace(either=len(points) == 2)
        wild = [one for one in history if one.log > max(_WILD, _SIGMAS * self._log_scatter)]
        return _verdict(member_id, wild) if len(wild) >= _WILD_ROUNDS else None

    def _of_two(self, points: Mapping[int, _Point], off: Mapping[int, Verdict], present: int) -> dict[int, Verdict]:
        """Return the verdict about one of two contributions.

        If which of them is off cannot be told, it is about each. Where more members are ``present`` other rounds tell.
        """
        sure = {member_id: found for member_id, found in off.items() if not found.either}
        if len(sure) == 1 or not off or present > 2:
            return sure
        rounds = max(found.rounds for found in off.values())
        each = {member_id: list(self._points[member_id])[-rounds:] for member_id in points}
        return {
            member_id: off.get(member_id, _verdict(member_id, recent))._replace(either=True)
            for member_id, recent in each.items()
        }

    def _is_new(self, found: Verdict) -> bool:
        """Tell whether a verdict says of a member what was not known."""
        before = self.named.get(found.member_id)
        return before is None or (before.either and not found.either)

    def _others_agree(self, member_id: int, points: Mapping[int, _Point], rounds: int, bound: float) -> bool:
        """Tell whether the others point less far away than this member. Of one other there is nothing to say."""
        is_pair, means = len(points) == 2, {}
        for one in points:
            alike = [point.cosine for point in list(self._points[one])[-rounds:] if point.is_pair == is_pair]
            means[one] = fmean(alike)
        own = means.pop(member_id)
        return is_pair or median(means.values()) > own + bound

    def _learn(self) -> None:
        """Follow the scatter, by the steps of figures from one round to the next: what is always off has none."""
        steps = [(points[-1], points[-2]) for points in self._points.values() if len(points) > 1]
        if not steps:
            return
        logs = [min(abs(now.log - before.log), _LONGEST) for now, before in steps]
        log = max(logs) if len(logs) <= 2 else median(logs)
        cosine = fmean(abs(now.cosine - before.cosine) for now, before in steps)  # of pairs too, which scatter more
        share = 1 / (min(self._rounds, _HORIZON) + _PRIOR[2] + 1)
        self._rounds += 1
        self._log_scatter += share * (log - self._log_scatter)  # a step of normal numbers is about one deviation
        self._cosine_scatter += share * (cosine - self._cosine_scatter)

    def _follow_level(self, members: Sequence[OfMember], section: int) -> None:
        """Note the usual norm, of a round in which the members agree."""
        logs = [_log_of(one) for one in members]
        if self.named or max(logs) - min(logs) > _FACTOR:
            return
        before, now = self._levels.get(section), fmean(logs)
        usual, rounds = (now, 0) if before is None else before
        self._levels[section] = _Level(usual + 0.2 * (now - usual), rounds + 1)

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


def _log_of(one: OfMember) -> float:
    """Return the logarithm of a norm."""
    return 0.5 * math.log(max(one.squares, 1e-300))


def _usual(logs: list[float], level: _Level | None) -> tuple[float, bool]:
    """Return the logarithm of the norm that others are compared with, and whether that tells which one is off."""
    if len(logs) > 2:
        return median(logs), True
    if level is None or level.rounds < _FEW:
        return min(logs), False
    nearest = min(logs, key=lambda log: abs(log - level.log))
    return nearest, abs(nearest - level.log) < _FACTOR


def _verdict(member_id: int, points: Sequence[_Point]) -> Verdict:
    """Return the verdict about a member that is off over these rounds."""
    return Verdict(member_id, *_figures(points), len(points), not all(one.is_sure for one in points))


def _figures(points: Sequence[_Point]) -> tuple[float, float]:
    """Return the ratio of norms and the cosine over some rounds."""
    return math.exp(fmean(one.log for one in points)), fmean(one.cosine for one in points)
