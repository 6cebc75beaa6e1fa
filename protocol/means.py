"""Rules by which a group averages the gradients of its members: the plain mean, and robust ones.

A robust mean stays near the gradients of most members when a few members give wrong ones: a faulty GPU, a scaled loss,
wrong data, or malice.

| name          | result                                                                        | source               |
|---------------|-------------------------------------------------------------------------------|----------------------|
| ``plain``     | the weighted mean                                                             |                      |
| ``median``    | the middle value of each element                                              | Yin et al. 2018      |
| ``trimmed:B`` | the mean of each element without the B·n smallest and the B·n largest values  | Yin et al. 2018      |
| ``clipped:C`` | the mean, with norms above C times the median norm scaled down to that        | Sun et al. 2019      |
| ``krum:F``    | multi-Krum: the mean of those nearest to the others, of which F may be faulty | Blanchard et al. '17 |

Each member has one vote, whatever its weight: a weight is its own claim. So values are ordered, and norms and distances
are compared, without weights. Weights count in the mean of what is left. A member without samples has no vote.

The first two rules take each element by itself. The other two decide about `UNIT` elements at a time, from the first
element of a bucket on. Neither slices nor data shards cut a unit, so results do not depend on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.errors import InvalidArgumentError, InvalidWorldSizeError, MalformedMessageError
from gradserver.protocol.limits import MAX_WORLD_SIZE

UNIT: Final = BLOCK
"""Elements of a bucket that norms and distances are of. A slice is a whole number of them, as of a codec's blocks."""
_MAX_FAULTY: Final = (MAX_WORLD_SIZE - 3) // 2
_MAX_TIMES: Final = 1e6


class Rule(StrEnum):
    """Kind of a mean."""

    PLAIN = "plain"
    MEDIAN = "median"
    TRIMMED = "trimmed"
    CLIPPED = "clipped"
    KRUM = "krum"


@dataclass(frozen=True, slots=True)
class Mean:
    """Rule with its parameter. `mean_of` makes one of its name, and ``str`` gives the name.

    Attributes:
        rule: the kind.
        parameter: share that is trimmed at each end, factor of the median norm, or number of faulty members.
    """

    rule: Rule = Rule.PLAIN
    parameter: float = 0.0

    @property
    def is_robust(self) -> bool:
        """True for any rule but the plain mean."""
        return self.rule is not Rule.PLAIN

    @property
    def unit(self) -> int:
        """Elements that are decided about together, which no cut may divide; 1 if each is by itself."""
        return UNIT if self.rule in (Rule.CLIPPED, Rule.KRUM) else 1

    @property
    def needs(self) -> int:
        """The smallest number of members with which the rule withstands a faulty one."""
        if self.rule is Rule.TRIMMED:
            return next(count for count in range(3, MAX_WORLD_SIZE + 2) if self.trimmed(count))
        return {Rule.PLAIN: 1, Rule.MEDIAN: 3, Rule.CLIPPED: 3, Rule.KRUM: 2 * int(self.parameter) + 3}[self.rule]

    def trimmed(self, count: int) -> int:
        """Return the number of values that are trimmed at each end, of ``count``."""
        return int(self.parameter * count + 1e-9)

    def faulty(self, count: int) -> int:
        """Return the number of faulty members that Krum withstands among ``count``: F, or as many as it can."""
        return max(min(int(self.parameter), (count - 3) // 2), 0)

    def check_size(self, least: int, group: str = "") -> None:
        """Raise InvalidWorldSizeError if a round may have ``least`` contributions, too few for the rule."""
        if least >= self.needs:
            return
        named = f"group {group!r}: " if group else ""
        instead = "start at least so many workers, or choose another mean"
        if self.rule is Rule.TRIMMED and least >= 3:
            instead = f"start more workers, or trim more: {Rule.TRIMMED}:{math.ceil(100 / least) / 100:g}"
        elif self.rule is Rule.KRUM and least >= 5:
            instead = f"start more workers, or withstand fewer: {Rule.KRUM}:{(least - 3) // 2}"
        raise InvalidWorldSizeError(
            f"{named}the mean {self} needs at least {self.needs} workers, and a round may have {least}: {instead}"
        )

    def __str__(self) -> str:
        return str(self.rule) if self.rule in _BARE else f"{self.rule}:{self.parameter:g}"


PLAIN: Final = Mean()
_BARE: Final = (Rule.PLAIN, Rule.MEDIAN)
NAMES: Final = "plain, median, trimmed:B, clipped:C, krum:F"
"""Names of means, for people."""
_PARAMETERS: Final = {
    Rule.TRIMMED: "B is the share that is trimmed at each end, above 0 and below 0.5, as trimmed:0.25",
    Rule.CLIPPED: "C is a factor of the median norm, 1 or more, as clipped:1",
    Rule.KRUM: f"F is the number of faulty workers, 1 to {_MAX_FAULTY}, as krum:1",
}


@lru_cache(maxsize=256)
def mean_of(name: str) -> Mean:
    """Return the mean of this name, such as ``trimmed:0.25``; InvalidArgumentError if there is none."""
    kind, colon, text = name.partition(":")
    if kind not in tuple(Rule) or (Rule(kind) in _BARE and colon):
        raise InvalidArgumentError(f"there is no mean {name[:40]!r}; there are {NAMES}")
    rule = Rule(kind)
    if rule in _BARE:
        return Mean(rule)
    try:
        value = float(text) if rule is not Rule.KRUM else int(text)
    except ValueError:
        value = math.nan
    inside = {
        Rule.TRIMMED: 1 / MAX_WORLD_SIZE <= value < 0.5,
        Rule.CLIPPED: 1 <= value <= _MAX_TIMES,
        Rule.KRUM: 1 <= value <= _MAX_FAULTY,
    }
    if not inside[rule]:
        raise InvalidArgumentError(f"there is no mean {name[:40]!r}: {_PARAMETERS[rule]}")
    return Mean(rule, float(f"{value:g}"))


def known_mean(value: Any) -> Mean:
    """Return the mean that a peer names; MalformedMessageError if there is none."""
    try:
        return mean_of(value if type(value) is str else "")
    except InvalidArgumentError as error:
        raise MalformedMessageError(error.message) from error
