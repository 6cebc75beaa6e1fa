"""Seats: places that members of an elastic group keep.

A seat is its occupant's for the group's life. Ranks are the places of those who are there, in the order of their
seats: so they are dense, and who leaves never changes the order of the others. Sums run in that order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import count

from gradserver.protocol.errors import LeftOutError, PeerError, WorkerLeftError, WorkerLostError
from gradserver.protocol.limits import MAX_NAME_BYTES
from gradserver.protocol.messages import Join


class Seats:
    """Who sits where, and who is still there. Seats are ranks while no member has left.

    Attributes:
        names: of those who sat there last, by seat; empty where nobody ever did.
        present: the seats of those who are there, by rank.
    """

    __slots__ = ("_ranks", "names", "present")

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.present = tuple(seat for seat, name in enumerate(self.names) if name)
        self._ranks = list(range(len(self.names)))
        self.reseat(self.present)

    def depart(self, seat: int) -> None:
        """``seat`` is vacant from now on; its occupant goes on to be spoken of with its last rank."""
        self.reseat(tuple(other for other in self.present if other != seat))

    def admit(self, seat: int, name: str) -> None:
        """``seat`` is that of ``name`` from now on, who is not there yet: its rank is the one that it would have."""
        names = [*self.names, *[""] * (seat + 1 - len(self.names))]
        self._ranks += [0] * (len(names) - len(self._ranks))
        names[seat] = name
        self.names = tuple(names)
        self._ranks[seat] = sum(other < seat for other in self.present)

    def reseat(self, present: tuple[int, ...]) -> None:
        """These seats, in order, are those of who is there."""
        self.present = present
        for rank, other in enumerate(present):
            self._ranks[other] = rank

    def rank(self, seat: int) -> int:
        """The rank of ``seat``, or the last that it had; of what is no seat, the number itself."""
        return self._ranks[seat] if 0 <= seat < len(self._ranks) else seat

    def present_names(self) -> tuple[str, ...]:
        """The names of those who are there, by rank."""
        return tuple(self.names[seat] for seat in self.present)

    def call(self, seat: int) -> str:
        """How to speak of an occupant; or of a seat that an earlier coordinator gave, and only members know of."""
        name = self.names[seat] if seat < len(self.names) else ""
        return f"{name!r} (rank {self._ranks[seat]})" if name else f"a worker that has departed (seat {seat})"

    def departed(self, seat: int, politely: bool, how: str) -> PeerError:
        """What to tell the others of an occupant who left, or was lost."""
        kind, verb = (WorkerLeftError, "left") if politely else (WorkerLostError, "was lost")
        return kind(f"{self.call(seat)} {verb} {how}", worker=self.names[seat], rank=self.rank(seat))

    def left_out(self, seat: int, where: str) -> LeftOutError:
        """What to tell an occupant whom the others go on without: of what it was left out, and why."""
        return LeftOutError(
            f"this worker, {self.call(seat)}, was left out of {where}. It has to join again",
            worker=self.names[seat],
            rank=self.rank(seat),
        )


def in_order(joins: Sequence[Join], places: int) -> dict[int, int]:
    """Which of ``joins`` gets which place, in order: the rank that it asked for.

    Those without a wish get the lowest of ``places`` that are left, in the order in which they came.
    """
    taken = {join.rank: index for index, join in enumerate(joins) if join.rank >= 0}
    free = (place for place in range(places) if place not in taken)
    for index, join in enumerate(joins):
        if join.rank < 0:
            taken[next(free)] = index
    return dict(sorted(taken.items()))


def numbered(names: Sequence[str]) -> list[str]:
    """``names``, of which each is there once: who has the name of another one before him gets a number behind it."""
    taken, found = set(names), list[str]()
    for name in names:
        if name in found:
            base = _base(name)
            name = next(free for number in count(2) if (free := f"{base}-{number}") not in taken)
            taken.add(name)
        found.append(name)
    return found


def _base(name: str) -> str:
    """As much of ``name`` as leaves room for a number."""
    return name.encode(errors="replace")[: MAX_NAME_BYTES - 5].decode(errors="ignore")


def namesake(name: str, names: Sequence[str], taken: Container[int]) -> int:
    """A vacant seat whose occupant got a number behind ``name``, as others were called so too; -1 if there is none."""
    for seat, other in enumerate(names):
        base, _, number = other.rpartition("-")
        if seat not in taken and base == _base(name) and number.isdecimal():
            return seat
    return -1


def seat_for(join: Join, names: Sequence[str], taken: Container[int], away: Mapping[int, int], places: int) -> int:
    """Which of ``places`` somebody gets who joins a running group; -1 if all are ``taken``.

    Its own, if this name had one; the rank that it asks for, if that was nobody's yet; the lowest that was nobody's;
    or that of whoever is ``away`` longest, by the epoch since which it is.
    """
    own = [seat for seat, name in enumerate(names) if name == join.name and seat not in taken]
    if own:
        return own[0]
    fresh = [seat for seat in range(places) if seat not in taken and (seat >= len(names) or not names[seat])]
    if fresh:
        return join.rank if join.rank in fresh else fresh[0]
    vacant = [seat for seat in range(places) if seat not in taken]
    return min(vacant, key=lambda seat: away.get(seat, 0), default=-1)
