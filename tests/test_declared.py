"""Declarations: each kind has a number or name of its own, and each of its fields a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import pytest

from gradserver.engine.declared import kind as record
from gradserver.engine.orders import order
from gradserver.engine.records import Round
from gradserver.engine.reports import report
from gradserver.protocol.checks import integer
from gradserver.protocol.declared import Declared, Family, Field, fields_of
from gradserver.protocol.errors import LimitExceededError, MalformedMessageError, ProtocolError
from gradserver.protocol.fields import Count, Ranks, Text
from gradserver.protocol.limits import PROTOCOL_VERSION
from gradserver.protocol.message_family import message
from gradserver.protocol.wire import decode
from tests.declared_tables import PAGE, page

LARGEST = 7


def small(value: Any) -> int:
    if value == 0:
        raise LimitExceededError("too little")
    return integer(1, LARGEST)(value)


class Fruit(Declared):
    __slots__ = ()


fruit = Family[int, Fruit]("fruit")


@fruit(1)
@dataclass(frozen=True, slots=True)
class Apple(Fruit):
    name: Text
    places: Ranks = ()


@fruit(2)
@dataclass(frozen=True, slots=True)
class Plum(Fruit):
    size: Annotated[int, Field(small, lambda size: min(size, LARGEST))]
    stones: Count

    def verify(self) -> None:
        if self.stones > self.size:
            raise MalformedMessageError("a Plum of stones")


def test_the_fields_are_written_in_their_order_and_read_back() -> None:
    assert Apple("boskop", (1, 2)).pack() == ["boskop", (1, 2)]
    assert Apple.unpack(["boskop", [1, 2]]) == Apple("boskop", (1, 2))
    assert Plum(99, 1).pack() == [7, 1]
    assert (fruit.kinds, fruit.codes) == ({1: Apple, 2: Plum}, {Apple: 1, Plum: 2})
    assert list(fields_of(Plum)) == ["size", "stones"]


@pytest.mark.parametrize(
    ("kind", "values", "error"),
    [
        (Apple, ["boskop"], MalformedMessageError("Apple has 2 fields, got 1")),
        (Apple, [3, []], MalformedMessageError("Apple.name: expected text of at most 4096 characters, got 3")),
        (Apple, ["", [-1]], MalformedMessageError("Apple.places: expected an integer from 0 to 1023, got -1")),
        (Plum, [0, 0], LimitExceededError("Plum.size: too little")),
        (Plum, [8, -1], MalformedMessageError("Plum.size: expected an integer from 1 to 7, got 8")),
        (Plum, [1, 2], MalformedMessageError("a Plum of stones")),
    ],
)
def test_a_refusal_names_the_kind_and_the_field(kind: type[Fruit], values: list[Any], error: ProtocolError) -> None:
    with pytest.raises(ProtocolError) as refused:
        kind.unpack(values)
    assert (type(refused.value), refused.value.message) == (type(error), error.message)


def test_a_number_is_given_once() -> None:
    with pytest.raises(AssertionError, match="Plum and Pear are both fruit 2"):

        @fruit(2)
        @dataclass(frozen=True, slots=True)
        class Pear(Fruit):
            pass

    assert fruit.kinds[2] is Plum


@pytest.mark.parametrize("declared", [int, Annotated[int, "small"], Annotated[int, Field(small), Field(small)]])
def test_a_field_without_a_check_is_noticed_at_once(declared: Any) -> None:
    nuts = Family[str, Any]("nut")
    nut = type("Nut", (), {"__annotations__": {"size": declared}, "__module__": __name__})
    with pytest.raises(AssertionError, match="Nut.size has no check, or several"):
        nuts("nut")(nut)


# ── what gradserver declares ──────────────────────────────────────────────────────────────────────────


def test_messages_keep_their_numbers() -> None:
    assert sorted(message.kinds) == list(range(55))
    assert {code: message.kinds[code].__name__ for code in (0, 1, 5, 6, 22, 34, 45, 46, 48, 49, 50, 52)} == {
        0: "Failure",
        1: "Join",
        5: "Push",
        6: "Result",
        22: "RoundDone",
        34: "Used",
        45: "Opened",
        46: "Split",
        48: "Granted",
        49: "Paced",
        50: "Notice",
        52: "Probed",
    }


def checked_kinds() -> list[type[Any]]:
    every = [kind for family in (record, order, report, message) for kind in family.kinds.values()]
    return [kind for kind in every if kind is not Round]  # which packs and unpacks itself


@pytest.mark.parametrize("kind", checked_kinds(), ids=lambda kind: kind.__qualname__)
def test_every_field_of_every_kind_is_checked(kind: type[Any]) -> None:
    for name, field in fields_of(kind).items():
        with pytest.raises(ProtocolError):
            field.check(object())
        assert name in kind.__annotations__


def test_the_page_shows_what_is_declared() -> None:
    shown = PAGE.read_text("utf-8")
    assert shown == page(), "`python -m tests.declared_tables` writes it anew"


def test_a_refusal_of_a_message_names_it_and_the_field() -> None:
    header = b"GS" + bytes([PROTOCOL_VERSION]) + msgpack.packb([1, "g", "w0", -2, 4, 60.0, [], ""])
    with pytest.raises(MalformedMessageError, match=r"^Join\.rank: expected an integer from -1 to 1023, got -2$"):
        decode([header])
