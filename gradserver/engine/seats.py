"""Seats: places that members of an elastic group keep.

A seat is its occupant's for the group's life. Ranks are the places of the members that are present, in the order of
their seats. So ranks are dense, and a departure never changes the order of the others. Sums run in that order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import count

from gradserver.protocol.errors import LeftOutError, PeerError, WorkerLeftError, WorkerLostError
from gradserver.protocol.limits import MAX_NAME_BYTES
from gradserver.protocol.messages import Join


class Seats:
    """Seats of a group, and the members in them. Seats are ranks while no member has left.

    Attributes:
        names: names of the latest members, by seat; empty where there never was one.
        present: seats of the members that are present, by rank.
    """

    __slots__ = ("_ranks", "names", "present")

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.present = tuple(seat for seat, name in enumerate(self.names) if name)
        self._ranks = list(range(len(self.names)))
        self.reseat(self.present)

    def depart(self, seat: int) -> None:
        """Take ``seat`` as vacant from now on. Its occupant goes on to be named with its last rank."""
        self.reseat(tuple(other for other in self.present if other != seat))

    def admit(self, seat: int, name: str) -> None:
        """Give ``seat`` to ``name``, which is not present yet: its rank is the one that it would have."""
        names = [*self.names, *[""] * (seat + 1 - len(self.names))]
        self._ranks += [0] * (len(names) - len(self._ranks))
        names[seat] = name
        self.names = tuple(names)
        self._ranks[seat] = sum(other < seat for other in self.present)

    def reseat(self, present: tuple[int, ...]) -> None:
        """Take these seats, in order, as those of the members that are present."""
        self.present = present
        for rank, other in enumerate(present):
            self._ranks[other] = rank

    def rank(self, seat: int) -> int:
        """Return the rank of ``seat``, or the last that it had; of what is no seat, the number itself."""
        return self._ranks[seat] if 0 <= seat < len(self._ranks) else seat

    def present_names(self) -> tuple[str, ...]:
        """Return the names of the members that are present, by rank."""
        return tuple(self.names[seat] for seat in self.present)

    def call(self, seat: int) -> str:
        """Name an occupant for people; or a seat that an earlier coordinator gave, and only members know of."""
        name = self.names[seat] if seat < len(self.names) else ""
        return f"{name!r} (rank {self._ranks[seat]})" if name else f"a worker that has departed (seat {seat})"

    def departed(self, seat: int, politely: bool, how: str) -> PeerError:
        """Return the error that tells the others of an occupant that left, or was lost."""
        kind, verb = (WorkerLeftError, "left") if politely else (WorkerLostError, "was lost")
        return kind(f"{self.call(seat)} {verb} {how}", worker=self.names[seat], rank=self.rank(seat))

    def left_out(self, seat: int, where: str) -> LeftOutError:
        """Return the error for an occupant that the others go on without: of what it was left out, and why."""
        return LeftOutError(
            f"this worker, {self.call(seat)}, was left out of {where}. It has to join again",
            worker=self.names[seat],
            rank=self.rank(seat),
        )


def in_order(joins: Sequence[Join], places: int) -> dict[int, int]:
    """Give each of ``joins`` a place, in order: the rank that it asked for.

    One without a wish gets the lowest of ``places`` that are left, in the order in which they came.
    """
    taken = {join.rank: index for index, join in enumerate(joins) if join.rank >= 0}
    free = (place for place in range(places) if place not in taken)
    for index, join in enumerate(joins):
        if join.rank < 0:
            taken[next(free)] = index
    return dict(sorted(taken.items()))


def numbered(names: Sequence[str]) -> list[str]:
    """Make ``names`` unique: one that an earlier one has as well gets a number behind it."""
    taken, found = set(names), list[str]()
    for name in names:
        if name in found:
            base = _base(name)
            name = next(free for number in count(2) if (free := f"{base}-{number}") not in taken)
            taken.add(name)
        found.append(name)
    return found


def _base(name: str) -> str:
    """Return as much of ``name`` as leaves room for a number."""
    return name.encode(errors="replace")[: MAX_NAME_BYTES - 5].decode(errors="ignore")


def namesake(name: str, names: Sequence[str], taken: Container[int]) -> int:
    """Return a vacant seat of an occupant that got a number behind ``name``, as others had it too; -1 if none."""
    for seat, other in enumerate(names):
        base, _, number = other.rpartition("-")
        if seat not in taken and base == _base(name) and number.isdecimal():
            return seat
    return -1


def seat_for(join: Join, names: Sequence[str], taken: Container[int], away: Mapping[int, int], places: int) -> int:
    """Return the seat of ``places`` for a worker that joins a running group; -1 if all are ``taken``.

    It is its own, if this name had one; or the rank that it asks for, if that had no occupant yet; or the lowest
    without one; or that of the member that is ``away`` longest, by the epoch since which it is.
    """
    own = [seat for seat, name in enumerate(names) if name == join.name and seat not in taken]
    if own:
        return own[0]
    fresh = [seat for seat in range(places) if seat not in taken and (seat >= len(names) or not names[seat])]
    if fresh:
        return join.rank if join.rank in fresh else fresh[0]
    vacant = [seat for seat in range(places) if seat not in taken]
    return min(vacant, key=lambda seat: away.get(seat, 0), default=-1)
