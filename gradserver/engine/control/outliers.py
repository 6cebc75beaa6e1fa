"""Verdicts about members that contribute something else than the others, over many rounds.

Two figures tell: the norm of a contribution over the median norm, and its cosine to the mean of the others. One round
says little, as gradients of small batches scatter. So a verdict takes 32 rounds in which the figure is known, at least:

    a member is off when                                                                                   over rounds
    ─────────────────────────────────────────────────────────────────────────────────────────────────────  ───────────
    its norm is more than 3 times the median in 28 of them, and more than 6 times by the mean logarithm    32
    its norm is more than 1000 times the median, in 3 rounds                                               of 32
    its cosine is below 0 by 8 standard errors, and that of the others is not                              32, or 128
    its cosine is below 0.15 of that of the others by 8 standard errors, and theirs is above 0.1           32, or 128

A norm that is large is off if it was so from the start, or if it has grown by itself: the others may have learned their
samples. A cosine below 0 is off if it is about as large as those of the others, which agree, and the norm is like
theirs. A small cosine is off if it is 0 but for chance. Gradients that all lie on one line have no cosine.

These bounds leave room for batches that differ by a factor of 16 and are not weighed. Every 8 rounds they are looked
at. A small norm is no evidence: a worker that has learned its samples has small gradients, and they do no harm.

A figure is not known in these cases:

    the case                                           not known
    ─────────────────────────────────────────────────  ────────────────────────────────────────────────────────────
    a contribution is zero, or a millionth of usual    all of that member, in that round
    most contributions have vanished                   norms: those that have not would look large
    the others cancel it, as at an optimum             its cosine: workers may have data of their own
    the round has two contributions                    cosines, as both have the same, and norms
    … but one has the norm that is usual               cosines alone: the norm of the other tells
    the round has one contribution                     all

The usual norm is learned from rounds in which members agree, for each section of a plan, as sections differ. A
contribution of little weight scatters more: its norm may be larger by the root of the ratio of weights, and its cosine
smaller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from gradserver.engine.figures import OfMember
from gradserver.protocol.limits import MAX_WEIGHT

ADVICE: Final = "Look at that worker's GPU, its data, and the scale of its loss"
FEWEST: Final = 32
"""Rounds that a verdict takes at least."""
EVERY: Final = 8
"""Rounds from one look at the bounds to the next."""
_LONG: Final = 128
_SHOWN: Final = 4
"""Rounds over which figures are shown."""
_LARGE, _EACH, _OFTEN = math.log(6.0), math.log(3.0), 28
"""Logarithm of the ratio of norms that is off: its mean, and that of so many rounds of 32."""
_WILD: Final = math.log(1000.0)
_WILD_ROUNDS: Final = 3
_SIGMAS: Final = 8.0
"""Standard errors that are no chance, whichever member and round is looked at."""
_APART: Final = 0.15
"""Share of the others' cosine below which a member has nothing in common with them."""
_LINE: Final = 1 - 1e-9
"""Size of a cosine from which on all gradients are on one line, as those of one element."""
_REST: Final = 0.1
"""Square of a sum, over that of one contribution, below which the others cancel it."""
_MIRRORED: Final = 0.3
"""Share by which the cosine of a member with the wrong sign may differ from those of the others."""
_ALIKE: Final = math.log(1.5)
"""Logarithm of a ratio of norms up to which a member may be one of the others with the wrong sign."""
_CHANCE: Final = 3.0
"""Standard errors within which a cosine is 0."""
_NEGLIGIBLE: Final = 0.02
"""Share of the others' cosine below which a cosine is 0 as well."""
_COMMON: Final = 0.1
"""Cosine of the others above which they have something in common."""
_NOTHING: Final = math.log(1e-6)
_VANISHED: Final = math.log(1e-3)
"""Logarithm of a median norm over the peak, below which most contributions have vanished."""
_FORGOTTEN: Final = 0.015
"""Logarithm by which the peak falls in a round."""
_LEAST: Final = math.log(1e-140)
"""Logarithm of a norm that is zero: most contributions are."""
_LIGHTEST: Final = 1 / 256
"""Share of a weight in the median one below which cosines are not corrected further."""
_HORIZON: Final = 256
"""Rounds over which the usual norm is followed."""
_MOST: Final = 50.0
"""Bound of a logarithm: no contribution counts for more."""
_CLEAR: Final = 2
"""Looks in a row without anything off, after which a member is in line again."""


class Verdict(NamedTuple):
    """A member is off: the ``ratio`` of its norm to the median, and its ``cosine`` to the mean of the others.

    Both are means over ``rounds``. ``others`` is the cosine of the others, the median.
    """

    member_id: int
    ratio: float
    cosine: float
    rounds: int
    others: float = 0.0

    @property
    def distance(self) -> tuple[float, float]:
        """Measure of how far off it is: by the norm first."""
        return abs(math.log(self.ratio)), -self.cosine

    def __str__(self) -> str:
        """Say what is off."""
        if self.ratio > math.exp(_EACH):
            times = f"{self.ratio:.3g}" if self.ratio < 1e6 else f"{self.ratio:.1e}"
            return f"the norm of its gradients is {times} times the median, over {self.rounds} rounds"
        what = "point away from" if self.cosine < -_COMMON * self.others else "have nothing in common with"
        return (
            f"its gradients {what} the mean of the others: cosine {self.cosine:.2f} over {self.rounds} rounds, that of "
            f"the others {self.others:.2f}"
        )


class Judgement(NamedTuple):
    """Outcome of a round: verdicts that are ``new``, members ``cleared``, and all that are ``off`` now."""

    new: list[Verdict]
    cleared: list[int]
    off: list[Verdict]


class _Point(NamedTuple):
    """Figures of a member in one round: logarithm of the ratio of norms, and cosine. None where they tell nothing."""

    log: float | None
    cosine: float | None
    shown: tuple[float, float]
    """The same, for people: they are there in any case."""
    givers: int
    """Contributions to the round."""
    norm: float
    """Logarithm of the norm."""
    is_wild: bool
    """The norm is far above all that is usual."""


class _Level(NamedTuple):
    """Usual logarithm of the norm, from so many rounds, and the ``peak``, which is slowly forgotten."""

    log: float
    rounds: int
    peak: float


@dataclass(slots=True)
class Outliers:
    """History of one group's contributions, and the members that are off.

    Attributes:
        named: verdicts about members that are off, by id.
    """

    named: dict[int, Verdict] = field(default_factory=dict)
    _points: dict[int, deque[_Point]] = field(default_factory=dict)
    _clear: dict[int, int] = field(default_factory=dict)
    _rounds: int = 0
    _levels: dict[int, _Level] = field(default_factory=dict)
    """Usual norms, by section."""

    def take(self, members: Sequence[OfMember], weights: Mapping[int, float], section: int = 0) -> Judgement:
        """Take the figures of a round of a section of the plan."""
        if len(members) < 2:
            return Judgement([], [], [])
        for member_id, point in self._measure(members, weights, section).items():
            self._points.setdefault(member_id, deque(maxlen=_LONG)).append(point)
        self._rounds += 1
        if self._rounds % EVERY:
            return Judgement([], [], list(self.named.values()))
        off = self._judge()
        new = [found for member_id, found in off.items() if member_id not in self.named]
        return Judgement(new, self._settle(off), list(off.values()))

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
        if not points:
            return None
        recent = list(islice(reversed(points), _SHOWN))
        return math.exp(fmean(one.shown[0] for one in recent)), fmean(one.shown[1] for one in recent)

    def _last(self, member_id: int) -> float:
        points = self._points.get(member_id)
        return points[-1].shown[0] if points else 0.0

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────

    def _measure(self, members: Sequence[OfMember], weights: Mapping[int, float], section: int) -> dict[int, _Point]:
        logs = {one.member_id: 0.5 * math.log(max(one.squares, 1e-300)) for one in members}
        there = [log for log in logs.values() if log > _LEAST]
        usual = min(there, default=_LEAST) if len(logs) == 2 else median(there or [_LEAST])
        references = self._references(logs, usual, section)
        middle = median([weights.get(member_id, 0.0) or 1.0 for member_id in logs])
        shares = {one: min(max((weights.get(one, 0.0) or 1.0) / middle, _LIGHTEST), 1.0) for one in logs}
        told = [one for one in members if logs[one.member_id] > usual + _NOTHING and not _cancels(one, len(members))]
        known = {one.member_id: _cosine(one) for one in told}
        cosines = {
            one: own / math.sqrt(shares[one]) for one, own in known.items() if own is not None and abs(own) < _LINE
        }
        if len(cosines) < 3:
            cosines = {}
        points = {}
        for one in members:
            share = min(max((weights.get(one.member_id, 0.0) or 1.0) / middle, 1 / MAX_WEIGHT), MAX_WEIGHT)
            own, reference = logs[one.member_id], references.get(one.member_id)
            slack = max(-0.5 * math.log(share), 0.0)
            is_there = one.squares > 0 and own > (usual if reference is None else reference) + _NOTHING
            log = _bounded(own - reference - slack) if is_there and reference is not None else None
            shown = _bounded(max(own, _LEAST) - usual), _cosine(one) or 0.0
            is_wild = log is not None and log > _WILD and own - slack > self._levels[section].peak + _WILD
            points[one.member_id] = _Point(log, cosines.get(one.member_id), shown, len(members), own, is_wild)
        return points

    def _references(self, logs: Mapping[int, float], usual: float, section: int) -> dict[int, float]:
        """Return the logarithm of the norm that that of each member is compared with, if there is one."""
        level = self._levels.get(section)
        spread = max(logs.values()) - min(logs.values())
        if len(logs) > 2 or spread < _EACH:
            before = level or _Level(usual, 0, usual)
            share = 1 / (min(before.rounds, _HORIZON) + 1)
            peak = max(before.peak - _FORGOTTEN, usual)
            self._levels[section] = _Level(before.log + share * (usual - before.log), before.rounds + 1, peak)
        if len(logs) > 2:
            peak = self._levels[section].peak
            few = sum(log > _LEAST for log in logs.values()) < 3
            return {} if few or usual < peak + _VANISHED else dict.fromkeys(logs, usual)
        if level is None or level.rounds < FEWEST:
            return {}
        (one, log), (other, its_log) = logs.items()
        known = ((one, its_log), (other, log))
        return {member_id: of_other for member_id, of_other in known if abs(of_other - level.log) < _EACH}

    # ── verdicts ──────────────────────────────────────────────────────────────────────────────────────

    def _judge(self) -> dict[int, Verdict]:
        """Return the verdicts about all members that are off now."""
        found = {one: self._by_norm(one) or self._by_cosine(one) for one in self._points}
        return {one: verdict for one, verdict in found.items() if verdict is not None}

    def _by_cosine(self, member_id: int) -> Verdict | None:
        """Return the verdict about a member with gradients that point elsewhere."""
        points = [one for one in self._points[member_id] if one.cosine is not None]
        for rounds in (FEWEST, _LONG):
            owns = [one.cosine for one in points[-rounds:] if one.cosine is not None]
            others = sorted(mean for one in self._points if one != member_id and (mean := self._mean(one, rounds)))
            if len(owns) < rounds or len(others) < 2:
                return None
            count = median(one.givers for one in points[-rounds:])
            ratio = fmean(one.shown[0] for one in points[-rounds:])
            is_opposed = abs(ratio) < _ALIKE and _is_opposed(owns, others, count)
            if is_opposed or (abs(ratio) < _EACH and _is_apart(owns, others)):
                return Verdict(member_id, math.exp(ratio), max(-1.0, fmean(owns)), rounds, median(others))
        return None

    def _mean(self, member_id: int, rounds: int) -> float | None:
        """Return the mean cosine of a member over so many rounds; None if it has less than 32 of them."""
        known = [one.cosine for one in self._points[member_id] if one.cosine is not None][-rounds:]
        return fmean(known) if len(known) >= FEWEST else None

    def _by_norm(self, member_id: int) -> Verdict | None:
        """Return the verdict about a member of which the norm is off."""
        points = [one for one in self._points[member_id] if one.log is not None][-FEWEST:]
        known = [one.log for one in points if one.log is not None]
        if len(known) < FEWEST:
            return None
        is_new = member_id not in self.named
        is_judged = is_new and not self._began_large(member_id)
        grown = median(one.norm for one in self._points[member_id]) + _EACH if is_judged else -math.inf
        wild = [one.log for one in points if one.log is not None and one.is_wild and one.norm > grown]
        is_large = sum(log > _EACH for log in known) >= _OFTEN and fmean(known) > _LARGE
        if len(wild) < _WILD_ROUNDS and not (is_large and (not is_new or self._has_grown(member_id, points))):
            return None
        cosine = fmean(one.shown[1] for one in islice(reversed(self._points[member_id]), FEWEST))
        return Verdict(member_id, math.exp(fmean(known if is_large else wild)), cosine, FEWEST)

    def _has_grown(self, member_id: int, recent: Sequence[_Point]) -> bool:
        """Tell whether a norm that is large was so from the start, or has grown at once, and not only beside others.

        Where it is large because the others have learned their samples, it has not.
        """
        if self._began_large(member_id):
            return True
        points = list(self._points[member_id])
        before = points[:-FEWEST][-FEWEST - EVERY : -EVERY]
        if len(before) < EVERY:
            return False
        ratios = [one.log for one in before if one.log is not None]
        ratio = max(median(ratios), 0.0) if ratios else 0.0
        grown = median(one.norm for one in recent) - median(one.norm for one in before)
        return grown > _EACH and fmean(one.log or 0.0 for one in recent) > ratio + _EACH

    def _began_large(self, member_id: int) -> bool:
        points = self._points[member_id]
        first = [one.log for one in islice(points, EVERY) if one.log is not None]
        return len(points) < _LONG and bool(first) and median(first) > _EACH

    def _settle(self, off: Mapping[int, Verdict]) -> list[int]:
        """Keep verdicts, and return members that have been in line for long enough."""
        cleared = []
        for member_id, verdict in off.items():
            self.named[member_id], self._clear[member_id] = verdict, 0
        for member_id in [one for one in self.named if one not in off and one in self._points]:
            self._clear[member_id] = self._clear.get(member_id, 0) + 1
            if self._clear[member_id] >= _CLEAR:
                self.named.pop(member_id)
                cleared.append(member_id)
        return cleared


def _cosine(one: OfMember) -> float | None:
    """Return the cosine of a contribution to the mean of the others; None if either is zero."""
    norm = math.sqrt(one.squares) * math.sqrt(one.others)
    return max(-1.0, min(one.inner / norm, 1.0)) if 0 < norm < math.inf else None


def _cancels(one: OfMember, count: int) -> bool:
    """Tell whether a contribution and the others add up to nothing, as at the optimum of different data."""
    others = count - 1
    return one.squares + 2 * others * one.inner + others**2 * one.others < _REST * one.squares


def _is_opposed(owns: Sequence[float], others: Sequence[float], count: float) -> bool:
    """Tell whether a member looks like one of the others with the wrong sign.

    The others then agree, and their cosines are about as large as its own. Its part makes the mean smaller. So their
    cosines are smaller in small groups, and next to 0 in a group of three.
    """
    own = fmean(owns)
    if own + _SIGMAS * stdev(owns) / math.sqrt(len(owns)) >= 0:
        return False
    least, most = (count - 3) / (count - 1), 0.0 if len(others) == 2 else 1.0
    return others[len(others) // 4] > -own * (least - _MIRRORED) and median(others) < -own * (most + _MIRRORED)


def _is_apart(owns: Sequence[float], others: Sequence[float]) -> bool:
    """Tell whether a member has nothing in common with the others, which agree.

    Its cosine is 0 then, but for chance. One that is small but not 0 is that of a worker with data of its own.
    """
    own, usual = fmean(owns), median(others)
    if usual < _COMMON or others[len(others) // 4] < usual / 2:
        return False
    if own + _SIGMAS * stdev(owns) / math.sqrt(len(owns)) >= _APART * usual:
        return False
    steps = math.sqrt(fmean((later - earlier) ** 2 for earlier, later in pairwise(owns)) / 2)
    return abs(own) < max(_CHANCE * steps / math.sqrt(len(owns)), _NEGLIGIBLE * usual)


def _bounded(log: float) -> float:
    return max(-_MOST, min(log, _MOST))
