"""The plan: the buckets that a group exchanges in every round. All members agree on it before the first one."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

from gradserver.protocol.buffer import size_text
from gradserver.protocol.codecs import Codec, codec_from
from gradserver.protocol.dtypes import BY_CODE, FLOAT32, DType
from gradserver.protocol.errors import InvalidArgumentError, LimitExceededError, MalformedMessageError, ProtocolError
from gradserver.protocol.exchange import EXACT, Kind, Op, Operation, check_codec, check_reducible
from gradserver.protocol.limits import (
    KIB,
    MAX_BUCKETS,
    MAX_COMPONENTS,
    MAX_COUNTER,
    MAX_DIMENSIONS,
    MAX_FRAME_BYTES,
    MAX_NUMEL,
    MAX_PLAN_BYTES,
    MAX_TEXT,
    SLICE_BYTES,
)

BUFFERS_KEY: Final = "buffers"
"""The first part of the key of a bucket that has a module's buffers."""


@dataclass(frozen=True, slots=True)
class Component:
    """One parameter (or buffer) inside a bucket: its name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One flat gradient: ``components`` one behind the other, of one element type.

    Attributes:
        key: its name in the plan, for example ``block.3`` or ``embedding``.
        dtype: element type of the flat buffer and of the wire.
        components: its parts, in order. May be empty: such a bucket is never sent.
        op: how contributions become one; gradients are averaged.
        codec: how elements travel; None if none was chosen, which is without loss.
        kind: ALL_REDUCE, or COMMIT for the only bucket of a section, if gradients travel among the members.
    """

    key: str
    dtype: DType
    components: tuple[Component, ...]
    op: Op = Op.MEAN
    codec: Codec | None = None
    kind: Kind = Kind.ALL_REDUCE

    @cached_property
    def numel(self) -> int:
        """Number of elements of the flat buffer."""
        return sum(component.numel for component in self.components)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each component."""
        return tuple(component.numel for component in self.components)

    @cached_property
    def operation(self) -> Operation:
        """The exchange that this bucket takes part in every round."""
        return Operation(self.kind, self.op, self.dtype, self.numel, codec=self.codec or EXACT)

    def component_at(self, element: int) -> Component:
        """Return the component that ``element`` (an index into the flat buffer) belongs to."""
        seen = 0
        for component in self.components:
            seen += component.numel
            if element < seen:
                return component
        raise InvalidArgumentError(f"bucket {self.key!r} has {self.numel} elements, there is no element {element}")

    @property
    def has_buffers(self) -> bool:
        """True for buffers of a module, such as running statistics; false for gradients."""
        return self.key.partition(".")[0] == BUFFERS_KEY

    def tensor_at(self, element: int) -> str:
        """Name the tensor that ``element`` belongs to, for an error: its kind and its name."""
        kind = "buffer" if self.has_buffers else "parameter"
        return f"{kind} {self.component_at(element).name!r}"


_REMEDY: Final = (
    "Wrap the module with blocks=() for fewer buckets, give its submodules shorter names, or leave parameters out "
    "(_ddp_params_and_buffers_to_ignore)"
)

VACANT: Final = Bucket("", FLOAT32, ())
"""The bucket in a place without a section."""


class Section(NamedTuple):
    """The buckets of one module in a group's plan. A round exchanges one section.

    Attributes:
        number: its own number, which no other section of the group ever has. Sections count in the order in which they
            came.
        since: the first round in which it could be exchanged.
        first: the number of its first bucket.
        size: how many buckets it has; they follow one another.
    """

    number: int
    since: int
    first: int
    size: int

    @property
    def parts(self) -> range:
        """The numbers of its buckets."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class Plan:
    """The table of buckets, in the order in which backward is expected to complete them.

    Attributes:
        buckets: all of them. A bucket in no section is vacant: it has no element.
        sections: those that are exchanged in one round; none at all stand for one section that has all buckets.
    """

    buckets: tuple[Bucket, ...]
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.buckets) <= MAX_BUCKETS:
            raise InvalidArgumentError(
                f"a plan has 1 to {MAX_BUCKETS} buckets, this one has {len(self.buckets)}. {_REMEDY}"
            )
        self._check_sections()
        for section in self.each:
            keys = set()
            for part in section.parts:
                key = self.buckets[part].key
                if key in keys:
                    raise InvalidArgumentError(f"the plan has two buckets called {key!r}; each needs a name of its own")
                keys.add(key)
        components = sum(len(bucket.components) for bucket in self.buckets)
        if components > MAX_COMPONENTS:
            raise InvalidArgumentError(
                f"a plan has at most {MAX_COMPONENTS} parameters, this one has {components}. {_REMEDY}"
            )
        for bucket in self.buckets:
            if bucket.op in (Op.NONE, Op.FRAMED):
                raise InvalidArgumentError(f"bucket {bucket.key!r} says no way to combine contributions")
            check_reducible(bucket.op, bucket.dtype)
            check_codec(bucket.kind, bucket.op, bucket.dtype, bucket.codec or EXACT)
            if bucket.numel > MAX_NUMEL:
                raise InvalidArgumentError(f"bucket {bucket.key!r} has {bucket.numel} elements, more than {MAX_NUMEL}")
        for section in self.each:
            self._check_kinds(section)

    def _check_kinds(self, section: Section) -> None:
        """Check that a commit is alone in its section and not cut: one data half alone decides what becomes of it."""
        for bucket in self.buckets[section.first : section.first + section.size]:
            if bucket.kind not in (Kind.ALL_REDUCE, Kind.COMMIT):
                raise InvalidArgumentError(f"bucket {bucket.key!r} is a {bucket.kind.name.lower()}: no bucket is that")
            is_cut = bucket.numel * bucket.dtype.itemsize > SLICE_BYTES
            if bucket.kind is Kind.COMMIT and (section.size > 1 or is_cut):
                raise InvalidArgumentError(
                    f"bucket {bucket.key!r} is a commit of {bucket.numel} elements, with {section.size - 1} others in "
                    f"its section: it has to be alone, and of {SLICE_BYTES} bytes at most"
                )

    def _check_sections(self) -> None:
        taken: set[int] = set()
        for before, section in pairwise((Section(-1, 0, 0, 0), *self.sections)):
            if section.number <= before.number:
                raise InvalidArgumentError("the sections of a plan are in the order of their numbers")
            if section.first + section.size > len(self.buckets) or not section.size:
                raise InvalidArgumentError(f"section {section.number} of the plan has buckets that are not there")
            if not taken.isdisjoint(section.parts):
                raise InvalidArgumentError(f"section {section.number} of the plan has a bucket of another one")
            taken.update(section.parts)
        for part in range(len(self.buckets)) if self.sections else ():
            if part not in taken and self.buckets[part].components:
                raise InvalidArgumentError(f"bucket {part} of the plan has elements, and is in no section")

    @cached_property
    def each(self) -> tuple[Section, ...]:
        """The sections, in the order in which they came."""
        return self.sections or (Section(0, 0, 0, len(self.buckets)),)

    @cached_property
    def is_shared(self) -> bool:
        """True if several modules are exchanged by it, one in a round."""
        return len(self.sections) > 1

    @cached_property
    def _sections(self) -> dict[int, Section]:
        return {part: section for section in self.each for part in section.parts}

    @cached_property
    def _numbers(self) -> dict[int, Section]:
        return {section.number: section for section in self.each}

    def section_of(self, part: int) -> Section:
        """Return the section of bucket ``part``, which is not vacant."""
        return self._sections[part]

    def is_vacant(self, part: int) -> bool:
        """Return whether there is no bucket ``part``, or it is in no section."""
        return part not in self._sections

    def section(self, number: int) -> Section | None:
        """Return the section called ``number``, if there is one."""
        return self._numbers.get(number)

    def parts_of(self, number: int) -> range:
        """Return the buckets of the section called ``number``; none if there is no such section."""
        section = self._numbers.get(number)
        return range(0) if section is None else section.parts

    @cached_property
    def section_bytes(self) -> Mapping[int, int]:
        """Bytes of gradient that one worker contributes in a round of each section, by its number."""
        buckets = self.buckets
        return {
            section.number: sum(buckets[part].numel * buckets[part].dtype.itemsize for part in section.parts)
            for section in self.each
        }

    def alone(self, section: Section) -> Plan:
        """Return the buckets of ``section``, as a plan of their own."""
        return Plan(self.buckets[section.first : section.first + section.size])

    @cached_property
    def _packed(self) -> tuple[bytes, str]:
        columns = _encode(self)
        return _pack(columns), hashlib.sha256(columns).hexdigest()

    @property
    def encoded(self) -> bytes:
        """The plan as bytes."""
        return self._packed[0]

    @property
    def hash(self) -> str:
        """The SHA-256 of the plan's columns, in hex: equal hashes mean equal plans."""
        return self._packed[1]

    def index(self, key: str) -> int:
        """Return the place of the bucket called ``key``."""
        for index, bucket in enumerate(self.buckets):
            if bucket.key == key:
                return index
        raise InvalidArgumentError(f"the plan has no bucket {key!r}; it has {[b.key for b in self.buckets][:20]}")

    @cached_property
    def nbytes(self) -> int:
        """Bytes of gradient that one worker contributes in a round; if it is shared, in a round of each section."""
        return sum(bucket.numel * bucket.dtype.itemsize for bucket in self.buckets)

    @property
    def size(self) -> str:
        """The size of a round, in words."""
        count = len(self._sections)
        modules = f" of {len(self.sections)} modules, {size_text(self.nbytes)}" if self.is_shared else ""
        return f"{count} bucket{'s' * (count != 1)}" + (modules or f", {size_text(self.nbytes)} a round")


# The encoding is flat, little-endian columns: reading it allocates in proportion to its length, and
# nothing in it names a size that is not checked against what is there.
#   u32 buckets, then per bucket: text key, u8 kind, u8 dtype, u8 op, u8 codec, u32 its parameter, u32 components,
#     then per component: text name, u8 dimensions, u64 each;   text: u16 length, UTF-8
#   and if it says which are its sections: u32 sections, then per section: u64 number, u64 since, u32 first, u32 size
# A plan that is long travels packed: u32 0xffffffff, then the columns as zlib has them.
_PACKED: Final = b"\xff\xff\xff\xff"
_PLAIN_BYTES: Final = 64 * KIB
"""Bytes of columns that are not packed."""


def _encode(plan: Plan) -> bytes:
    out = bytearray(struct.pack("<I", len(plan.buckets)))
    for bucket in plan.buckets:
        codec = bucket.codec or EXACT
        columns = (bucket.kind, bucket.dtype.code, bucket.op, codec.code, codec.parameter, len(bucket.components))
        out += _text(bucket.key) + struct.pack("<BBBBII", *columns)
        for component in bucket.components:
            shape = component.shape
            if len(shape) > MAX_DIMENSIONS:
                raise InvalidArgumentError(f"{component.name}: {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
            out += _text(component.name) + struct.pack(f"<B{len(shape)}Q", len(shape), *shape)
    if plan.sections:
        out += struct.pack("<I", len(plan.sections))
        for section in plan.sections:
            out += struct.pack("<QQII", *section)
    return bytes(out)


def _pack(columns: bytes) -> bytes:
    """Return the columns of a plan as they travel. LimitExceededError if they are too long."""
    packed = columns if len(columns) <= _PLAIN_BYTES else _PACKED + zlib.compress(columns, 1)
    for size, limit, what in (
        (len(columns), MAX_PLAN_BYTES, "encodes"),
        (len(packed), MAX_FRAME_BYTES, "can be packed"),
    ):
        if size > limit:
            raise LimitExceededError(f"the plan {what} to {size} bytes, the limit is {limit}. {_REMEDY}")
    return packed


def _unpack(data: bytes | memoryview) -> bytes | memoryview:
    """Return the columns of a plan. No more memory is taken than a plan may have, however they were packed."""
    if bytes(data[: len(_PACKED)]) != _PACKED:
        return data
    inflating = zlib.decompressobj()
    columns = inflating.decompress(data[len(_PACKED) :], MAX_PLAN_BYTES + 1)
    if len(columns) > MAX_PLAN_BYTES:
        raise LimitExceededError(f"a packed plan of more than {MAX_PLAN_BYTES} bytes, which is the limit")
    if not inflating.eof or inflating.unused_data:
        raise MalformedMessageError(f"a packed plan of {len(data)} bytes that is cut off, or has bytes behind its end")
    return columns


def _text(value: str) -> bytes:
    data = value.encode()
    if len(data) > MAX_TEXT:
        raise InvalidArgumentError(f"the name {value[:40]!r}… is {len(data)} bytes long, the limit is {MAX_TEXT}")
    return struct.pack("<H", len(data)) + data


class _Reader:
    """A reader that takes checked pieces off the front of untrusted bytes."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0
        self._components = 0

    def unpack(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        return struct.unpack(layout, self._take(size))

    def text(self) -> str:
        (length,) = self.unpack("<H")
        if length > MAX_TEXT:
            raise LimitExceededError(f"a name of {length} bytes in a plan, the limit is {MAX_TEXT}")
        return str(self._take(length), "utf-8")

    def component_count(self, count: int) -> int:
        """Count ``count`` more components. They are refused before they are read when the plan would have too many."""
        self._components += count
        if self._components > MAX_COMPONENTS:
            raise LimitExceededError(f"a plan of {self._components} parameters, the limit is {MAX_COMPONENTS}")
        return count

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def end(self) -> None:
        if self._at != len(self._data):
            raise MalformedMessageError(f"{len(self._data) - self._at} bytes behind the end of a plan")

    def _take(self, size: int) -> memoryview:
        if self._at + size > len(self._data):
            raise MalformedMessageError(f"a plan of {len(self._data)} bytes is cut off")
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece


def decode_plan(data: bytes | memoryview, known: Iterable[Plan] = ()) -> Plan:
    """Return the plan in ``data``, one of the ``known`` if it is that.

    A ProtocolError says what is wrong with bytes that hold none.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise LimitExceededError(f"a plan of {len(data)} bytes, the limit is {MAX_FRAME_BYTES}")
    try:
        columns = _unpack(data)
        digest = hashlib.sha256(columns).hexdigest()
        if (same := next((plan for plan in known if plan.hash == digest), None)) is not None:
            return same
        reader = _Reader(columns)
        (count,) = reader.unpack("<I")
        if count > MAX_BUCKETS:
            raise LimitExceededError(f"a plan of {count} buckets, the limit is {MAX_BUCKETS}")
        buckets = tuple(_read_bucket(reader) for _ in range(count))
        sections = _read_sections(reader) if reader.left >= _LEAST_SECTIONS else ()
        reader.end()
        return Plan(buckets, sections)
    except ProtocolError:
        raise
    except (ValueError, KeyError, zlib.error) as error:  # bad UTF-8, an unknown code, or an impossible plan
        raise MalformedMessageError(f"no valid plan: {error}") from error


_LEAST_SECTIONS: Final = struct.calcsize("<IQQII")


def _read_sections(reader: _Reader) -> tuple[Section, ...]:
    (count,) = reader.unpack("<I")
    if not 1 <= count <= MAX_BUCKETS:
        raise LimitExceededError(f"a plan of {count} sections, it has 1 to {MAX_BUCKETS}")
    sections = tuple(Section(*reader.unpack("<QQII")) for _ in range(count))
    if max(max(section) for section in sections) > MAX_COUNTER:
        raise LimitExceededError("a section of a plan with a number that no group comes to")
    return sections


def _read_bucket(reader: _Reader) -> Bucket:
    key = reader.text()
    kind, dtype, op, code, parameter, count = reader.unpack("<BBBBII")
    components = tuple(_read_component(reader) for _ in range(reader.component_count(count)))
    codec = codec_from(code, parameter)
    return Bucket(key, BY_CODE[dtype], components, Op(op), None if codec is EXACT else codec, Kind(kind))


def _read_component(reader: _Reader) -> Component:
    name = reader.text()
    (dimensions,) = reader.unpack("<B")
    if dimensions > MAX_DIMENSIONS:
        raise LimitExceededError(f"{dimensions} dimensions in a plan, the limit is {MAX_DIMENSIONS}")
    return Component(name, reader.unpack(f"<{dimensions}Q"))


def simple_plan(sizes: Iterable[tuple[str, int]], dtype: DType, op: Op = Op.MEAN) -> Plan:
    """Return a plan of one-component buckets, from ``(key, elements)`` pairs."""
    return Plan(tuple(Bucket(key, dtype, (Component(key, (size,)),), op) for key, size in sizes))
