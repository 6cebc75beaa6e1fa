"""What is written down of the use of data. `gradserver.engine.records` says how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gradserver.protocol.checks import brief, flag, integer, text
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import MAX_COUNTER, MAX_DATA, MAX_NAME_BYTES, MAX_NUMEL, MAX_SEED, MAX_WORLD_SIZE
from gradserver.protocol.ranges import Ranges, pack, packed

_epoch = integer(0, MAX_SEED)
_name = text(MAX_NAME_BYTES)
_count = integer(0, MAX_COUNTER)
_seat = integer(0, MAX_WORLD_SIZE - 1)


class Order(NamedTuple):
    """What an epoch's order follows from, besides its number."""

    length: int
    seed: int
    shuffle: bool

    def __str__(self) -> str:
        return f"{self.length} samples, " + (f"shuffled with seed {self.seed}" if self.shuffle else "in their order")


class Holder(NamedTuple):
    """What a seat holds, and the answer to its last claim."""

    seat: int
    held: Ranges
    number: int
    epoch: int
    answer: Ranges


@dataclass(frozen=True, slots=True)
class Data:
    """All about the use of one kind of data: what is left of ``epoch``, and what each seat holds of it.

    ``by`` says who used it first, and ``begun`` whether anybody has claimed anything.
    """

    group: str
    name: str
    order: Order
    by: str
    epoch: int
    begun: bool
    left: Ranges
    holders: tuple[Holder, ...]

    def pack(self) -> list[Any]:
        """Its fields, as they are written."""
        holders = [[h.seat, pack(h.held), h.number, h.epoch, pack(h.answer)] for h in self.holders]
        return [self.group, self.name, list(self.order), self.by, self.epoch, self.begun, pack(self.left), holders]


@dataclass(frozen=True, slots=True)
class Claim:
    """Ranges of ``epoch`` are handed out to ``seat``: its claim of this ``number``."""

    group: str
    name: str
    seat: int
    number: int
    epoch: int
    ranges: Ranges

    def pack(self) -> list[Any]:
        """Its fields, as they are written."""
        return [self.group, self.name, self.seat, self.number, self.epoch, pack(self.ranges)]


class Committed(NamedTuple):
    """In a round these ranges of ``epoch`` were used up by ``seat``; ``partly``: it counted in some slices only."""

    name: str
    epoch: int
    seat: int
    partly: bool
    ranges: Ranges

    def pack(self) -> list[Any]:
        """Its fields, as they are written."""
        return [*self[:4], pack(self.ranges)]


def _fields(value: Any, count: int) -> list[Any]:
    if type(value) is not list or len(value) != count:
        raise MalformedMessageError(f"expected {count} fields, got {brief(value)}")
    return value


def order(value: Any) -> Order:
    """The check of orders."""
    length, seed, shuffle = _fields(value, 3)
    return Order(integer(0, MAX_NUMEL)(length), _epoch(seed), flag(shuffle))


def holders(value: Any) -> tuple[Holder, ...]:
    """The check of who holds what."""
    found = []
    for one in _listed(value, MAX_WORLD_SIZE):
        seat, held, number, epoch, answer = _fields(one, 5)
        found.append(Holder(_seat(seat), packed(held), _count(number), _epoch(epoch), packed(answer)))
    return tuple(found)


def committed(value: Any) -> tuple[Committed, ...]:
    """The check of what was used up in a round."""
    found = []
    for one in _listed(value, MAX_DATA * MAX_WORLD_SIZE):
        name, epoch, seat, partly, ranges = _fields(one, 5)
        found.append(Committed(_name(name), _epoch(epoch), _seat(seat), flag(partly), packed(ranges)))
    return tuple(found)


def _listed(value: Any, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise MalformedMessageError(f"expected a list of at most {most} items, got {brief(value)}")
    return value


DATA: Final = (_name, _name, order, text(2 * MAX_NAME_BYTES), _epoch, flag, packed, holders)
"""The checks of `Data`, field by field."""
CLAIM: Final = (_name, _name, _seat, _count, _epoch, packed)
"""Those of `Claim`."""
