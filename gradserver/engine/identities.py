"""Identities of members: ids that they keep, names, and the ranks that follow.

A member keeps its id; when it has gone, another worker can get it. Ranks are the places of the members that are
present, in the order of their ids. So ranks are dense, and a departure never changes the order of the others. Sums run
in that order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import count

from gradserver.protocol.errors import LeftOutError, PeerError, WorkerLeftError, WorkerLostError
from gradserver.protocol.limits import MAX_NAME_BYTES
from gradserver.protocol.messages import Join


class Identities:
    """Ids and names of the members of a group. Ids are ranks while no member has left.

    Attributes:
        names: names of the latest members, by member id; empty where there never was one.
        present: ids of the members that are present, by rank.
    """

    __slots__ = ("_ranks", "names", "present")

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.present = tuple(member_id for member_id, name in enumerate(self.names) if name)
        self._ranks = list(range(len(self.names)))
        self.set_present(self.present)

    def depart(self, member_id: int) -> None:
        """Take ``member_id`` as free from now on. Its member goes on to be named with its last rank."""
        self.set_present(tuple(other for other in self.present if other != member_id))

    def admit(self, member_id: int, name: str) -> None:
        """Give ``member_id`` to ``name``, which is not present yet: its rank is the one that it would have."""
        names = [*self.names, *[""] * (member_id + 1 - len(self.names))]
        self._ranks += [0] * (len(names) - len(self._ranks))
        names[member_id] = name
        self.names = tuple(names)
        self._ranks[member_id] = sum(other < member_id for other in self.present)

    def set_present(self, present: tuple[int, ...]) -> None:
        """Take these ids, in order, as those of the members that are present."""
        self.present = present
        for rank, other in enumerate(present):
            self._ranks[other] = rank

    def rank(self, member_id: int) -> int:
        """Return the rank of ``member_id``, or the last that it had; of what is no member id, the number itself."""
        return self._ranks[member_id] if 0 <= member_id < len(self._ranks) else member_id

    def present_names(self) -> tuple[str, ...]:
        """Return the names of the members that are present, by rank."""
        return tuple(self.names[member_id] for member_id in self.present)

    def call(self, member_id: int) -> str:
        """Name a member for people; or an id that an earlier coordinator gave, and only members know of."""
        name = self.names[member_id] if member_id < len(self.names) else ""
        return (
            f"{name!r} (rank {self._ranks[member_id]})"
            if name
            else f"a worker that has departed (member id {member_id})"
        )

    def departed(self, member_id: int, politely: bool, how: str) -> PeerError:
        """Return the error that tells the others of a member that left, or was lost."""
        kind, verb = (WorkerLeftError, "left") if politely else (WorkerLostError, "was lost")
        return kind(f"{self.call(member_id)} {verb} {how}", worker=self.names[member_id], rank=self.rank(member_id))

    def left_out(self, member_id: int, where: str) -> LeftOutError:
        """Return the error for a member that the others go on without: of what it was left out, and why."""
        return LeftOutError(
            f"this worker, {self.call(member_id)}, was left out of {where}. It has to join again",
            worker=self.names[member_id],
            rank=self.rank(member_id),
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
    """Return a free id of an earlier member that got a number behind ``name``, as others had it too; -1 if none."""
    for member_id, other in enumerate(names):
        base, _, number = other.rpartition("-")
        if member_id not in taken and base == _base(name) and number.isdecimal():
            return member_id
    return -1


def member_id_for(join: Join, names: Sequence[str], taken: Container[int], away: Mapping[int, int], places: int) -> int:
    """Return the id, of as many as ``places``, for a worker that joins a running group; -1 if all are ``taken``.

    A name that had an id gets it again. Otherwise the id is the rank that the worker asks for, or else the lowest, of
    those that were never given. If all were, it is the id of the member that is ``away`` longest: since the earliest
    epoch.
    """
    own = [member_id for member_id, name in enumerate(names) if name == join.name and member_id not in taken]
    if own:
        return own[0]
    fresh = [
        member_id
        for member_id in range(places)
        if member_id not in taken and (member_id >= len(names) or not names[member_id])
    ]
    if fresh:
        return join.rank if join.rank in fresh else fresh[0]
    vacant = [member_id for member_id in range(places) if member_id not in taken]
    return min(vacant, key=lambda member_id: away.get(member_id, 0), default=-1)
