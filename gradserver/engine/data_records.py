"""What is written down of the use of data. `gradserver.engine.records` says how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from gradserver.engine.declared import Field, Kind, kind
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


def _fields(value: Any, count: int) -> list[Any]:
    if type(value) is not list or len(value) != count:
        raise MalformedMessageError(f"expected {count} fields, got {brief(value)}")
    return value


def order_of(value: Any) -> Order:
    """The check of orders."""
    length, seed, shuffle = _fields(value, 3)
    return Order(integer(0, MAX_NUMEL)(length), _epoch(seed), flag(shuffle))


def _holders(value: Any) -> tuple[Holder, ...]:
    found = []
    for one in _listed(value, MAX_WORLD_SIZE):
        seat, held, number, epoch, answer = _fields(one, 5)
        found.append(Holder(_seat(seat), packed(held), _count(number), _epoch(epoch), packed(answer)))
    return tuple(found)


def _listed(value: Any, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise MalformedMessageError(f"expected a list of at most {most} items, got {brief(value)}")
    return value


def _pack_holders(holders: tuple[Holder, ...]) -> list[Any]:
    return [[h.seat, pack(h.held), h.number, h.epoch, pack(h.answer)] for h in holders]


_Name = Annotated[str, Field(_name)]
_Epoch = Annotated[int, Field(_epoch)]
_Ranges = Annotated[Ranges, Field(packed, pack)]


@kind(10)
@dataclass(frozen=True, slots=True)
class Data(Kind):
    """All about the use of one kind of data: what is left of ``epoch``, and what each seat holds of it.

    ``by`` says who used it first, and ``begun`` whether anybody has claimed anything.
    """

    group: _Name
    name: _Name
    order: Annotated[Order, Field(order_of, list)]
    by: Annotated[str, Field(text(2 * MAX_NAME_BYTES))]
    epoch: _Epoch
    begun: Annotated[bool, Field(flag)]
    left: _Ranges
    holders: Annotated[tuple[Holder, ...], Field(_holders, _pack_holders)]


@kind(11)
@dataclass(frozen=True, slots=True)
class Claim(Kind):
    """Ranges of ``epoch`` are handed out to ``seat``: its claim of this ``number``."""

    group: _Name
    name: _Name
    seat: Annotated[int, Field(_seat)]
    number: Annotated[int, Field(_count)]
    epoch: _Epoch
    ranges: _Ranges


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


def committed(value: Any) -> tuple[Committed, ...]:
    """The check of what was used up in a round."""
    found = []
    for one in _listed(value, MAX_DATA * MAX_WORLD_SIZE):
        name, epoch, seat, partly, ranges = _fields(one, 5)
        found.append(Committed(_name(name), _epoch(epoch), _seat(seat), flag(partly), packed(ranges)))
    return tuple(found)
