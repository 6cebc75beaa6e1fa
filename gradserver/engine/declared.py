"""How a kind of record is declared: once, as a class with a number, whose fields say how each is written and checked.

    @kind(13)
    @dataclass(frozen=True, slots=True)
    class Boundary(Kind):
        group: Name
        round: Count
        epoch: Count

The body of such a record is the list of its fields. A kind with another body has `pack` and `unpack` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self, TypeVar, get_type_hints

from gradserver.protocol.errors import MalformedMessageError

K = TypeVar("K", bound="type[Kind]")


def _as_it_is(value: Any) -> Any:
    return value


class Field(NamedTuple):
    """How a field is read and written: the metadata of its type, as in ``Annotated[int, Field(check)]``.

    Attributes:
        check: gives the value of what msgpack has read, or raises MalformedMessageError.
        pack: gives what msgpack is to write of the value.
    """

    check: Callable[[Any], Any]
    pack: Callable[[Any], Any] = _as_it_is


class Kind:
    """A kind of record: the base of dataclasses that `kind` has given a number."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def of_group(self) -> str:
        """The group that it is of; empty for the coordinator's own records."""
        return str(getattr(self, "group", ""))

    def pack(self) -> list[Any]:
        """Give its fields, as they are written."""
        return [field.pack(getattr(self, name)) for name, field in _FIELDS[type(self)].items()]

    @classmethod
    def unpack(cls, values: list[Any]) -> Self:
        """Make a record of what was read; MalformedMessageError says why there is none."""
        checks = _FIELDS[cls].values()
        if len(values) != len(checks):
            raise MalformedMessageError(f"{cls.__name__} has {len(checks)} fields, got {len(values)}")
        return cls(*(field.check(value) for field, value in zip(checks, values, strict=True)))


KINDS: Final[dict[int, type[Kind]]] = {}
"""All kinds, by number."""
CODES: Final[dict[type[Kind], int]] = {}
"""The number of each kind."""
_FIELDS: Final[dict[type[Kind], dict[str, Field]]] = {}


def kind(code: int) -> Callable[[K], K]:
    """Declare a kind of record with the number ``code``, which no other kind has, or has ever had."""

    def declare(cls: K) -> K:
        assert code not in KINDS, f"{KINDS[code].__name__} and {cls.__name__} have the number {code}"
        KINDS[code], CODES[cls] = cls, code
        if cls.pack is Kind.pack:
            types = get_type_hints(cls, include_extras=True)
            _FIELDS[cls] = {field.name: types[field.name].__metadata__[0] for field in fields(cls)}
        return cls

    return declare
