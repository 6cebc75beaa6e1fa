"""Declarations: a record, an order, a report or a message is declared once, as a class with a number or a name.

    record = Family[int, Declared]("record")

    @record(13)
    @dataclass(frozen=True, slots=True)
    class Boundary(Declared):
        group: Name
        round: Count
        epoch: Count

The type of each field has its check: ``Count`` is ``Annotated[int, Field(integer(0, MAX_COUNTER))]``. Encoder, decoder,
listings, tests and documentation follow from the declarations. What travels is the list of the fields. A kind with
another body has `Declared.pack` and `Declared.unpack` of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar, get_type_hints

from gradserver.protocol.checks import brief, listed
from gradserver.protocol.errors import MalformedMessageError, ProtocolError

Code = TypeVar("Code", int, str)
Base = TypeVar("Base")
T = TypeVar("T", bound=type[Any])


class Field(NamedTuple):
    """Reading and writing of a field: the metadata of its type, as in ``Annotated[int, Field(check)]``.

    Attributes:
        check: gives the value of what msgpack has read, or raises a ProtocolError.
        pack: gives what msgpack is to write of the value; None if msgpack writes the value itself.
    """

    check: Callable[[Any], Any]
    pack: Callable[[Any], Any] | None = None

    def write(self, value: Any) -> Any:
        """Return what msgpack is to write."""
        return value if self.pack is None else self.pack(value)


BESIDE: Final = "beside"
"""Metadata of the type of a last field that the others do not travel with. Its message says how it does."""


class Declared:
    """Base of dataclasses that a `Family` has given a number or a name."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def pack(self) -> list[Any]:
        """Return the fields, as they are written."""
        fields = _FIELDS[type(self)].items()
        return [getattr(self, name) if pack is None else pack(getattr(self, name)) for name, (_, pack) in fields]

    @classmethod
    def unpack(cls, values: list[Any]) -> Self:
        """Make one of what was read; a ProtocolError names the kind and the field which prevent that."""
        fields = _FIELDS[cls]
        if len(values) != len(fields):
            raise MalformedMessageError(f"{cls.__name__} has {len(fields)} fields, got {len(values)}")
        try:
            made = cls(*[field.check(value) for field, value in zip(fields.values(), values, strict=True)])
        except ProtocolError as error:
            raise named(error, cls, values) from error
        made.verify()
        return made

    def verify(self) -> None:
        """Raise MalformedMessageError if fields, each right by itself, do not fit together."""


def named(error: ProtocolError, kind: type[Any], values: Sequence[Any]) -> ProtocolError:
    """Return an error of a check again, with the name of the kind and of the first field with a wrong value."""
    for (name, field), value in zip(_FIELDS[kind].items(), values, strict=False):
        try:
            field.check(value)
        except ProtocolError:
            return type(error)(f"{kind.__name__}.{name}: {error.message}")
    return error


class Family(Generic[Code, Base]):
    """All kinds of records, or of messages …; a decorator, which gives a class its number or its name.

    Args:
        what: the word for one of them, in errors.

    Attributes:
        kinds: the classes, by number or name.
        codes: the number or name of each class.
    """

    def __init__(self, what: str) -> None:
        self.what: Final = what
        self.kinds: Final[dict[Code, type[Base]]] = {}
        self.codes: Final[dict[type[Base], Code]] = {}

    def __call__(self, code: Code) -> Callable[[T], T]:
        """Declare a class with ``code``, which no other class of the family has, or has ever had."""

        def declare(kind: T) -> T:
            assert code not in self.kinds, (
                f"{self.kinds[code].__name__} and {kind.__name__} are both {self.what} {code}"
            )
            self.kinds[code], self.codes[kind] = kind, code
            if getattr(kind, "pack", None) in (None, Declared.pack):
                _FIELDS[kind] = _declared(kind)
            return kind

        return declare


def nested(kind: type[Any]) -> Field:
    """Return the field that holds a named tuple with fields that are declared in the same way."""
    fields = tuple(_declared(kind).items())

    def check(value: Any) -> Any:
        if type(value) is not list or len(value) != len(fields):
            raise MalformedMessageError(f"expected the {len(fields)} fields of a {kind.__name__}, got {brief(value)}")
        return kind(*[field.check(one) for (_, field), one in zip(fields, value, strict=True)])

    def pack(value: Any) -> list[Any]:
        return [field.write(one) for (_, field), one in zip(fields, value, strict=True)]

    return Field(check, pack if any(field.pack for _, field in fields) else None)


def several(field: Field, most: int) -> Field:
    """Return the field that holds a tuple of what ``field`` holds."""
    pack = None if field.pack is None else lambda values: [field.write(one) for one in values]
    return Field(listed(field.check, most), pack)


def _declared(kind: type[Any]) -> Mapping[str, Field]:
    types = get_type_hints(kind, vars(sys.modules[kind.__module__]), include_extras=True)
    return {name: _field(kind, name, declared) for name, declared in types.items() if not _is_beside(declared)}


def _is_beside(declared: Any) -> bool:
    return BESIDE in getattr(declared, "__metadata__", ())


def _field(kind: type[Any], name: str, declared: Any) -> Field:
    found = [one for one in getattr(declared, "__metadata__", ()) if isinstance(one, Field)]
    assert len(found) == 1, f"{kind.__name__}.{name} has no check, or several"
    return found[0]


_FIELDS: Final[dict[type[Any], Mapping[str, Field]]] = {}


def fields_of(kind: type[Any]) -> Mapping[str, Field]:
    """Return the fields of a declared class, in order. KeyError if it packs and unpacks itself."""
    return _FIELDS[kind]
