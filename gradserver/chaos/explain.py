"""Where a result can come from: tried out, where it is not what it should be, or nobody wrote down who gave to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy.typing as npt

from gradserver.chaos import generator, recount
from gradserver.chaos.recount import Giver
from protocol.digest import digest, places
from protocol.shards import Share

Array = npt.NDArray[Any]
Row = tuple[int, float, Array]

_EARLIER: Final = 3
"""Rounds that are gone back."""
_UNKNOWN: Final = 2
"""Those who may have contributed or not."""


class Case(NamedTuple):
    """One bucket of one round."""

    seed: int
    number: int
    part: int
    share: Share

    def given(self, name: str, number: int | None = None) -> Array:
        """What somebody gives to it, or gave to it in another round."""
        return generator.values(self.seed, name, self.number if number is None else number, self.part)

    def fits(self, rows: Sequence[Row], cut: Mapping[int, frozenset[int]], seen: int) -> Array | None:
        """The result of these rows, if it is the one with the digest ``seen``."""
        result = recount.bucket(self.share, rows, cut, generator.SIZES[self.part])
        return result if digest(result, places(generator.plan())[self.part]) == seen else None


def explain(case: Case, givers: Sequence[Giver], cut: Mapping[int, frozenset[int]], seen: int) -> tuple[str, str]:
    """What kind of fault a result is that is not the mean, and why: something twice, too old, left out, or unknown."""
    rows = [(giver.seat, giver.weight, case.given(giver.name)) for giver in givers]
    for index, giver in enumerate(givers):
        before, own, behind = rows[:index], rows[index], rows[index + 1 :]
        for twice in ([*before, own, own, *behind], [*rows, own]):
            if case.fits(twice, cut, seen) is not None:
                return "double", f"the mean with {giver.name} in it twice"
        if case.fits([*before, *behind], cut, seen) is not None:
            return "lost", f"the mean without {giver.name}, which is said to have counted"
        for earlier in range(max(0, case.number - _EARLIER), case.number):
            old = (giver.seat, giver.weight, case.given(giver.name, earlier))
            if case.fits([*before, old, *behind], cut, seen) is not None:
                return "double", f"the mean with what {giver.name} gave to round {earlier}"
    return "wrong", f"{seen:016x}, which is not the mean of what was given"


Placement = tuple[tuple[int, str], ...]
"""Who contributed as well: behind how many of those who did so for sure, and the name."""


def search(
    case: Case, sure: Sequence[str], perhaps: Sequence[str], seen: int, first: Placement = ()
) -> tuple[Array, Placement] | None:
    """A mean with the digest ``seen`` of those who are ``sure``, in the order of seats, and few of the others.

    Which seats the others had nobody knows: all places are tried, ``first`` before the others.
    """
    rows = {name: (generator.weight(case.seed, name, case.number), case.given(name)) for name in (*sure, *perhaps)}
    for placement in itertools.chain((first,), _placements(len(sure), perhaps)):
        order = list(sure)
        for place, name in reversed(placement):
            order.insert(place, name)
        chosen = [(seat, *rows[name]) for seat, name in enumerate(order)]
        others = [order.index(name) for _, name in placement]
        for cut in _cuts(case.share, others):
            if (result := case.fits(chosen, cut, seen)) is not None:
                return result, placement
    return None


def _placements(sure: int, perhaps: Sequence[str]) -> Iterator[Placement]:
    for extra in range(1, min(_UNKNOWN, len(perhaps)) + 1):
        for places_ in itertools.combinations_with_replacement(range(sure + 1), extra):
            for names in itertools.permutations(perhaps, extra):
                yield tuple(zip(places_, names, strict=True))


def _cuts(share: Share, seats: Sequence[int]) -> Iterator[dict[int, frozenset[int]]]:
    """All prefixes that each of these can have given."""
    each = [[which for count in range(1, share.layout.count + 1) for which in recount.prefixes(share, count)]] * len(
        seats
    )
    for sets in itertools.product(*each):
        yield dict(zip(seats, sets, strict=True))
