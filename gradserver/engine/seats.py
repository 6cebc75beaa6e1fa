"""Seats: places that members of an elastic group keep.

A seat is its occupant's for the group's life. Ranks are the places of those who are there, in the order of their
seats: so they are dense, and who leaves never changes the order of the others. Sums run in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.messages import Join


class Seats:
    """Who sits where, and who is still there. In a group whose membership is fixed seats are ranks.

    Attributes:
        names: of all who ever sat here, by seat.
        present: the seats of those who are there, by rank.
    """

    __slots__ = ("_ranks", "names", "present")

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.present = tuple(range(len(self.names)))
        self._ranks = list(self.present)

    def depart(self, seat: int) -> None:
        """``seat`` is vacant from now on; its occupant goes on to be spoken of with its last rank."""
        self.present = tuple(other for other in self.present if other != seat)
        for rank, other in enumerate(self.present):
            self._ranks[other] = rank

    def rank(self, seat: int) -> int:
        """The rank of ``seat``, or the last that it had; of what is no seat, the number itself."""
        return self._ranks[seat] if 0 <= seat < len(self._ranks) else seat

    def present_names(self) -> tuple[str, ...]:
        """The names of those who are there, by rank."""
        return tuple(self.names[seat] for seat in self.present)

    def call(self, seat: int) -> str:
        """How to speak of an occupant."""
        return f"{self.names[seat]!r} (rank {self._ranks[seat]})"


def in_order(joins: Sequence[Join], places: int) -> list[int]:
    """The order in which applicants sit down, as indices of ``joins``: by the rank that each asked for.

    Those without a wish get the lowest of ``places`` that are left, in the order in which they came.
    """
    taken = {join.rank: index for index, join in enumerate(joins) if join.rank >= 0}
    free = (place for place in range(places) if place not in taken)
    for index, join in enumerate(joins):
        if join.rank < 0:
            taken[next(free)] = index
    return [taken[place] for place in sorted(taken)]
