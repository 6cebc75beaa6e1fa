"""Trees of plain values and tensors, to bytes and back. A training job's state is one.

    manifest   a msgpack array: shape and values of the tree; at most 4 MiB
    buffers    the elements of its tensors and arrays, in the order in which they stand in the tree, as they are

A tree is made of dict, list, tuple, None, bool, int, float, str, bytes, numpy arrays and scalars, and torch tensors.
Element types are those of `gradserver.protocol.dtypes`. (OrderedDict and Counter, which torch's states hold, keep their
types too.) It comes back equal bit by bit, apart from what only its process knows. Tensors come back contiguous on the
CPU, without memory that they shared, and require no gradient.

Nothing is evaluated or unpickled, and no size is believed before its bytes are there. Decoding takes any bytes, and
returns a tree or raises MalformedMessageError.

    value                                        in the manifest
    ───────────────────────────────────────────  ────────────────────────────────────────────
    None, bool, int of 64 bits, float, str, bytes  as msgpack has them
    any other                                      an array that begins with one of `_Kind`
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.checks import brief, integer
from gradserver.protocol.dtypes import BY_CODE, DType, numpy_dtype
from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, MalformedMessageError
from gradserver.protocol.limits import MAX_DIMENSIONS, MAX_NUMEL, MIB
from gradserver.worker.tensors import bind, is_torch

Tree: TypeAlias = Any
"""A tree, as described at the head of this module."""
Take: TypeAlias = Callable[[int], Buffer]
"""A source of buffers, by their bytes. Tensors are made of this memory, so it should be the tree's own."""

Make: TypeAlias = Callable[[Bytes, DType, tuple[int, ...]], Any]
"""A maker of tensors, from their bytes, element type and shape."""

MAX_MANIFEST_BYTES: Final = 4 * MIB
"""Bytes of some 40,000 tensors, or 400,000 numbers. Decoding takes up to 64 times as much memory."""
MAX_DEPTH: Final = 64
"""Levels of nesting."""
_MAX_INT_BYTES: Final = 4096
_MAX_COLLIDING: Final = 64
_COLLIDING: Final = f"more than {_MAX_COLLIDING} keys with the same hash"
_MAX_ITEMS: Final = MAX_MANIFEST_BYTES
_PLAIN: Final = (type(None), bool, float, str, bytes)


class _Kind(IntEnum):
    """The meaning of an array in a manifest, and what follows in it."""

    LIST = 0  # the items
    TUPLE = 1  # the items
    DICT = 2  # key, value, key, value, …
    ORDERED_DICT = 3
    COUNTER = 4
    INT = 5  # a larger one: its bytes, little-endian, in two's complement
    NUMPY = 6  # code of the element type, sizes of the dimensions
    SCALAR = 7  # the same, of numpy, without dimensions
    TORCH = 8


_SEQUENCES: Final[dict[type, _Kind]] = {list: _Kind.LIST, tuple: _Kind.TUPLE}
_MAPPINGS: Final[dict[type, _Kind]] = {dict: _Kind.DICT, OrderedDict: _Kind.ORDERED_DICT, Counter: _Kind.COUNTER}
_MADE: Final[dict[int, type]] = {kind: made for made, kind in (_SEQUENCES | _MAPPINGS).items()}


@dataclass(frozen=True)
class Packed:
    """A tree as bytes."""

    manifest: bytes
    buffers: list[Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of manifest and buffers together."""
        return len(self.manifest) + sum(buffer.nbytes for buffer in self.buffers)


# ── to bytes ──────────────────────────────────────────────────────────────────────────────────────────


def pack(tree: Tree, copy: bool = False) -> Packed:
    """Return the bytes of a tree. With ``copy`` its buffers are copies; otherwise they may be the tensors' memory.

    Raises:
        InvalidArgumentError: something in the tree cannot be stored. The error names where it stands. (Also DTypeError
            and LayoutError.)
    """
    packer = _Packer(copy)
    packed = msgpack.packb(packer.node(tree, "the tree", 0), use_bin_type=True, unicode_errors="surrogatepass")
    if len(packed) > MAX_MANIFEST_BYTES:
        raise InvalidArgumentError(
            f"all but the tensors' elements takes {len(packed):,} bytes, the limit is {MAX_MANIFEST_BYTES:,}: "
            f"make arrays of long lists of numbers"
        )
    return Packed(packed, packer.buffers)


class _Packer:
    def __init__(self, copy: bool) -> None:
        self.buffers: list[Bytes] = []
        self._copy = copy

    def node(self, value: Any, where: str, depth: int) -> Any:
        """Return the manifest's entry for ``value``."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else [_Kind.INT, _int_bytes(value, where)]
        if depth > MAX_DEPTH:
            raise InvalidArgumentError(f"{where} is nested more than {MAX_DEPTH} deep, or holds itself")
        if kind in _SEQUENCES:
            items = [self.node(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
            return [_SEQUENCES[kind], *items]
        if kind in _MAPPINGS:
            return [_MAPPINGS[kind], *self._items(value, where, depth)]
        if isinstance(value, (np.ndarray, np.generic)) or is_torch(value):
            return self._tensor(value, where)
        raise InvalidArgumentError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored: a state is made of dict, "
            f"list, tuple, None, bool, int, float, str, bytes, numpy arrays and torch tensors"
        )

    def _items(self, mapping: dict[Any, Any], where: str, depth: int) -> list[Any]:
        if _collide(mapping):
            raise InvalidArgumentError(f"{where} has {_COLLIDING}, which cannot be stored")
        items = []
        for key, value in mapping.items():
            if not _is_key(key):
                raise InvalidArgumentError(f"{where} has a key of type {type(key).__name__}, which cannot be stored")
            items += [self.node(key, where, depth + 1), self.node(value, f"{where}[{key!r}]", depth + 1)]
        return items

    def _tensor(self, value: Any, where: str) -> list[Any]:
        scalar = isinstance(value, np.generic)
        try:
            bound = bind(np.asarray(value) if scalar else value, writes=False)
        except (DTypeError, LayoutError) as error:
            raise type(error)(f"{where} cannot be stored: {error}") from None
        self.buffers.append(bound.data.copy() if self._copy else bound.data)
        kind = _Kind.SCALAR if scalar else _Kind.TORCH if is_torch(value) else _Kind.NUMPY
        return [kind, bound.dtype.code, *bound.shape]


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) is int or type(key) in _PLAIN


def _collide(keys: Iterable[Any]) -> bool:
    """Tell whether so many keys have one hash that a dict of them takes long: strangers can compute such keys."""
    return max(Counter(map(hash, keys)).values(), default=0) > _MAX_COLLIDING


def _int_bytes(value: int, where: str) -> bytes:
    size = value.bit_length() // 8 + 1
    if size > _MAX_INT_BYTES:
        raise InvalidArgumentError(f"{where} is an integer of {size:,} bytes, the limit is {_MAX_INT_BYTES:,}")
    return value.to_bytes(size, "little", signed=True)


# ── and back ──────────────────────────────────────────────────────────────────────────────────────────


def unpack(manifest: Buffer, take: Take, tensor: Make | None = None) -> Tree:
    """Return the tree of a manifest.

    Args:
        manifest: bytes that `pack` has made.
        take: is asked for the buffers, one after the other.
        tensor: makes torch tensors of their bytes, element type and shape; None for torch itself.

    Raises:
        MalformedMessageError: these bytes are no tree, or a buffer is not as long as was asked for.
    """
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise MalformedMessageError(f"a manifest of {len(manifest):,} bytes, the limit is {MAX_MANIFEST_BYTES:,}")
    try:
        root = msgpack.unpackb(
            manifest, raw=False, unicode_errors="surrogatepass", max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0
        )
    except Exception as error:  # msgpack raises errors of many types, all of them about these bytes
        raise MalformedMessageError(f"a manifest that is not msgpack: {str(error)[:120]}") from None
    return _Unpacker(take, tensor or _torch_tensor).value(root, 0)


class _Unpacker:
    def __init__(self, take: Take, torch_tensor: Make) -> None:
        self._take = take
        self._torch_tensor = torch_tensor

    def value(self, node: Any, depth: int) -> Any:
        """Return the value of the manifest's ``node``."""
        if type(node) is not list:
            return node
        if not node or type(node[0]) is not int or depth > MAX_DEPTH:
            raise MalformedMessageError(f"expected a part of a tree, got {brief(node)}")
        kind, *rest = node
        if kind in (_Kind.LIST, _Kind.TUPLE):
            return _MADE[kind](self.value(item, depth + 1) for item in rest)
        if kind in _MADE:
            return self._mapping(kind, rest, depth)
        if kind == _Kind.INT:
            return _int_from(rest)
        if kind in (_Kind.NUMPY, _Kind.SCALAR, _Kind.TORCH):
            return self._tensor(kind, rest)
        raise MalformedMessageError(f"expected a part of a tree, got one of kind {kind}")

    def _mapping(self, kind: int, rest: list[Any], depth: int) -> Any:
        made: dict[Any, Any] = _MADE[kind]()
        if len(rest) % 2:
            raise MalformedMessageError("a dict in a manifest has a key without a value")
        keys = [self.value(key, depth + 1) for key in rest[::2]]
        wrong = next((key for key in keys if not _is_key(key)), None)
        if wrong is not None:
            raise MalformedMessageError(f"a dict in a manifest has {brief(wrong)} as a key")
        if _collide(keys):
            raise MalformedMessageError(f"a dict in a manifest has {_COLLIDING}")
        for key, node in zip(keys, rest[1::2], strict=True):
            if key in made:
                raise MalformedMessageError(f"a dict in a manifest has {brief(key)} as a key twice")
            made[key] = self.value(node, depth + 1)
        return made

    def _tensor(self, kind: int, rest: list[Any]) -> Any:
        dtype, shape = _layout(rest)
        numel = math.prod(shape)
        if math.prod(max(size, 1) for size in shape) > MAX_NUMEL or (kind == _Kind.SCALAR and shape):
            raise MalformedMessageError(f"no tensor: {brief(rest)}")
        data = np.frombuffer(self._take(numel * dtype.itemsize), np.uint8)
        if data.nbytes != numel * dtype.itemsize:
            raise MalformedMessageError(
                f"a tensor of {numel} × {dtype.name} takes {numel * dtype.itemsize} bytes, and {data.nbytes} came"
            )
        try:
            if kind == _Kind.TORCH:
                return self._torch_tensor(data, dtype, shape)
            return _numpy_array(data, dtype, shape, kind)
        except (ValueError, RuntimeError) as error:  # dimensions that this library does not have
            raise MalformedMessageError(f"no tensor of shape {brief(shape)}: {str(error)[:120]}") from None


_code = integer(min(BY_CODE), max(BY_CODE))
_size = integer(0, (1 << 63) - 1)


def _layout(rest: list[Any]) -> tuple[DType, tuple[int, ...]]:
    if not 1 <= len(rest) <= 1 + MAX_DIMENSIONS:
        raise MalformedMessageError(f"expected type and shape of a tensor, got {brief(rest)}")
    return BY_CODE[_code(rest[0])], tuple(map(_size, rest[1:]))


def _int_from(rest: list[Any]) -> int:
    if len(rest) != 1 or type(rest[0]) is not bytes or not 0 < len(rest[0]) <= _MAX_INT_BYTES:
        raise MalformedMessageError(f"expected the bytes of an integer, got {brief(rest)}")
    return int.from_bytes(rest[0], "little", signed=True)


def _numpy_array(data: Bytes, dtype: DType, shape: tuple[int, ...], kind: int) -> Any:
    if dtype.name == "complex32":
        raise MalformedMessageError("numpy has no complex32")
    array = data.view(numpy_dtype(dtype)).reshape(shape)
    return array[()] if kind == _Kind.SCALAR else array


def _torch_tensor(data: Bytes, dtype: DType, shape: tuple[int, ...]) -> Any:
    import torch  # only states with tensors need it

    kind = getattr(torch, dtype.name, None)
    if kind is None:
        raise ValueError(f"torch {torch.__version__} has no {dtype.name}")
    return torch.from_numpy(data).view(kind).reshape(shape) if data.size else torch.empty(shape, dtype=kind)


# ── small trees ───────────────────────────────────────────────────────────────────────────────────────


def to_bytes(tree: Tree) -> bytes:
    """Encode a small tree as one piece: the manifest's length, the manifest, the buffers."""
    packed = pack(tree)
    return b"".join([len(packed.manifest).to_bytes(4, "little"), packed.manifest, *map(bytes, packed.buffers)])


def from_bytes(data: bytes) -> Tree:
    """Return the tree that `to_bytes` has encoded. Raises MalformedMessageError."""
    at = 4 + int.from_bytes(data[:4], "little")
    if at > len(data):
        raise MalformedMessageError(f"a tree of {len(data)} bytes, with a manifest that ends at {at}")
    manifest = data[4:at]

    def take(nbytes: int) -> bytearray:
        nonlocal at
        at += nbytes
        if at > len(data):
            raise MalformedMessageError(f"a tree of {len(data)} bytes with tensors of more than {at}")
        return bytearray(data[at - nbytes : at])

    tree = unpack(manifest, take)
    if at != len(data):
        raise MalformedMessageError(f"a tree that ends at {at} of {len(data)} bytes")
    return tree
