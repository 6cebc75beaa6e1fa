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

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar, get_type_hints

from gradserver.protocol.errors import MalformedMessageError, ProtocolError

Code = TypeVar("Code", int, str)
Base = TypeVar("Base")
T = TypeVar("T", bound=type[Any])


def _as_it_is(value: Any) -> Any:
    return value


class Field(NamedTuple):
    """How a field is read and written: the metadata of its type, as in ``Annotated[int, Field(check)]``.

    Attributes:
        check: gives the value of what msgpack has read, or raises a ProtocolError.
        pack: gives what msgpack is to write of the value.
    """

    check: Callable[[Any], Any]
    pack: Callable[[Any], Any] = _as_it_is


class Declared:
    """Base of dataclasses that a `Family` has given a number or a name."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def pack(self) -> list[Any]:
        """Give the fields, as they are written."""
        return [field.pack(getattr(self, name)) for name, field in _FIELDS[type(self)].items()]

    @classmethod
    def unpack(cls, values: list[Any]) -> Self:
        """Make one of what was read; a ProtocolError names the kind and the field which prevent that."""
        fields = _FIELDS[cls]
        if len(values) != len(fields):
            raise MalformedMessageError(f"{cls.__name__} has {len(fields)} fields, got {len(values)}")
        made = cls(*checked(cls, values))
        made.verify()
        return made

    def verify(self) -> None:
        """Raise MalformedMessageError if fields, each right by itself, do not fit together."""


def checked(kind: type[Any], values: Sequence[Any]) -> list[Any]:
    """Check the values of the first fields; a ProtocolError names the one that is wrong."""
    found = []
    for (name, field), value in zip(_FIELDS[kind].items(), values, strict=False):
        try:
            found.append(field.check(value))
        except ProtocolError as error:
            raise type(error)(f"{kind.__name__}.{name}: {error.message}") from error
    return found


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
                types = get_type_hints(kind, include_extras=True)
                _FIELDS[kind] = {name: _field(kind, name, type_) for name, type_ in types.items()}
            return kind

        return declare


def _field(kind: type[Any], name: str, declared: Any) -> Field:
    found: Sequence[Any] = getattr(declared, "__metadata__", ())
    (field,) = found
    assert isinstance(field, Field), f"{kind.__name__}.{name} has no check"
    return field


_FIELDS: Final[dict[type[Any], Mapping[str, Field]]] = {}


def fields_of(kind: type[Any]) -> Mapping[str, Field]:
    """Give the fields of a declared class, in order. KeyError if it packs and unpacks itself."""
    return _FIELDS[kind]
