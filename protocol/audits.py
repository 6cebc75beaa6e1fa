"""Audits: rounds in which several members compute the gradients of the same samples, which must then agree.

A gradient can only be repeated at the weights with which it was computed. So the members of an audit compute the
samples in the same round: the *holder*, to which they are leased, and one or two *witnesses*, which repeat them. With
two witnesses it is known which of the three is wrong, even if it never is again.

The holder's contribution counts, and those of witnesses do not: each sample is in the mean once. A witness may thus be
lost, late or wrong without an effect on the mean, and a robust mean has one vote for each sample. A weight tells that a
contribution is a witness's, and of which holder. It is so small that it vanishes beside any other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.exchange import Operation
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.means import Mean

TOGETHER: Final = 3
"""Members that compute the samples of one audit, at most."""
_UNIT: Final = 2.0**-960
"""Weight of a witness of member 0. A weight of 1e-300, of a worker without samples, is smaller."""
WITNESS_WEIGHT: Final = _UNIT * (MAX_WORLD_SIZE + 1)
"""Bound of the weights of witnesses."""
_NONDETERMINISM: Final = 1e-5
"""Relative difference of two computations of one gradient in float32 that sum up in another order, at most."""
_STEPS: Final = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "bf16": 2.0**-7,
    "fp16": 2.0**-10,
    "int8": 0.125,
}
"""Relative difference by rounding, of a type or a codec: of both contributions, and of the residuals in both.

With bf16 and fp16, each of the four is at most half a unit in the last place. With int8, each is uniform in half a step
of 1/127 of the largest of 256 elements. That is up to 16 times their root mean square: 2 · 16/127/√12 is 0.073.
"""


@dataclass(frozen=True, slots=True)
class Audit:
    """Policy about audits.

    Attributes:
        share: share of the rounds that are audited; 0 for none.
        tolerance: relative difference that is allowed in any case, beside rounding.
    """

    share: float = 0.0
    tolerance: float = _NONDETERMINISM

    def picks(self, seed: int, number: int) -> bool:
        """Tell whether round ``number`` is audited, where data has this ``seed``. All members tell the same."""
        return self.share > 0 and _drawn(f"{seed} {number}") < self.share

    def members(self, seed: int, number: int, present: Iterable[int], mean: Mean) -> tuple[int, ...]:
        """Draw the members of an audit among those that are ``present``; empty if they are too few.

        A robust ``mean`` keeps as many contributions as it needs.
        """
        drawn = sorted(present, key=lambda member_id: _drawn(f"{seed} {number} {member_id}"))
        together = min(TOGETHER, len(drawn), len(drawn) - mean.needs + 1)
        return tuple(drawn[:together]) if together > 1 else ()

    def limit(self, operation: Operation) -> float:
        """Return the largest relative difference of contributions to a bucket that agree."""
        name = operation.codec.name if operation.is_lossy else operation.dtype.name
        return self.tolerance + _STEPS.get(name, 0.0)

    def __str__(self) -> str:
        if not self.share:
            return "off"
        return f"{self.share:g}" + ("" if self.tolerance == _NONDETERMINISM else f":{self.tolerance:g}")


NO_AUDIT: Final = Audit()


def audit_of(name: str) -> Audit:
    """Return the policy of this name, such as ``0.01`` or ``0.01:1e-3``; InvalidArgumentError if there is none."""
    if name == "off":
        return NO_AUDIT
    share, colon, tolerance = name.partition(":")
    try:
        found = Audit(float(share), float(tolerance) if colon else _NONDETERMINISM)
    except ValueError:
        found = Audit(-1.0)
    if not (0 <= found.share <= 1 and 0 < found.tolerance < 1):
        raise InvalidArgumentError(
            f"an audit is off, or SHARE[:TOLERANCE]: the share of the rounds, 0 to 1, and a relative difference, above "
            f"0 and below 1, as 0.01:1e-3; not {name[:40]!r}"
        )
    return found


def witness_weight(holder: int) -> float:
    """Return the weight of a contribution that repeats what ``holder`` computes."""
    return _UNIT * (holder + 1)


def holder_of(weight: float) -> int:
    """Return the member id of the holder of which a contribution of this ``weight`` is a repetition; -1 for others."""
    return round(weight / _UNIT) - 1 if _UNIT <= weight < WITNESS_WEIGHT else -1


def relative(difference: float, size: float) -> float:
    """Return a relative difference, of the squared norm of the difference and the mean squared norm."""
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return math.sqrt(difference / size) if size else 0.0


def _drawn(text: str) -> float:
    """Draw a number from 0 up to 1."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
