"""The family of messages: how one is declared, with its number, its fields, and the payloads that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from gradserver.protocol.declared import Declared, Family, fields_of
from gradserver.protocol.errors import MalformedMessageError

T = TypeVar("T", bound=type[Any])


class Payloads(NamedTuple):
    """The payloads that go with a message: the fewest, the most, and the bytes in one."""

    fewest: int = 0
    most: int = 0
    largest: int = 0

    @classmethod
    def one(cls, largest: int) -> Payloads:
        """Exactly one payload."""
        return cls(1, 1, largest)

    @classmethod
    def optional(cls, largest: int) -> Payloads:
        """One payload at most."""
        return cls(0, 1, largest)


_NONE: Final = Payloads()


class MessageKind(Declared):
    """A message: the base of dataclasses that `message` has given a number."""

    __slots__ = ()

    def check_payloads(self, count: int) -> None:
        """Raise MalformedMessageError if the fields say that there are not ``count`` payloads."""


class Row(NamedTuple):
    """One message, as decoding needs it. ``lengths`` says how many fields it can have: all, or some of the first."""

    kind: type[Any]
    checks: tuple[Callable[[Any], Any], ...]
    lengths: tuple[int, ...]
    payloads: Payloads


class MessageFamily(Family[int, Any]):
    """All messages, by number; ``rows`` has what decoding needs."""

    def __init__(self) -> None:
        super().__init__("message")
        self.rows: Final[dict[int, Row]] = {}

    def __call__(self, code: int, payloads: Payloads = _NONE, shorter: tuple[int, ...] = ()) -> Callable[[T], T]:
        """Declare a message with ``code``, which no other message has, or has ever had.

        Args:
            code: its number on the wire.
            payloads: what goes with it.
            shorter: numbers of fields that it may also have. The others then have their defaults.
        """
        declare = super().__call__(code)

        def declare_message(kind: T) -> T:
            declare(kind)
            checks = tuple(field.check for field in fields_of(kind).values())
            self.rows[code] = Row(kind, checks, (len(checks), *shorter), payloads)
            return kind

        return declare_message


message: Final = MessageFamily()
"""Declares a message by its number."""


def refuse_payloads(name: str) -> MalformedMessageError:
    """Return the error of a message that says something else about its payloads than what came with it."""
    return MalformedMessageError(f"a {name} that announces a payload without one, or has one without announcing it")
