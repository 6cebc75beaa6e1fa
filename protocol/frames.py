"""Frames: parts of different lengths, one behind the other, each behind its own length.

`Op.FRAMED` travels so. A contribution to ALL_GATHER or GATHER is one frame. One to SCATTER or ALL_TO_ALL is a frame for
each rank. A reply has a frame from each rank, or the one frame for its receiver. A slice bounds the frames in it, and
so the memory that they take.

    length   4 bytes, little-endian
    part     as many bytes
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import MalformedMessageError

_LENGTH: Final = struct.Struct("<I")
HEAD_BYTES: Final = _LENGTH.size


def framed(parts: Iterable[Buffer]) -> bytes:
    """Return ``parts`` as frames, one behind the other."""
    pieces: list[Buffer] = []
    for part in parts:
        pieces += (_LENGTH.pack(len(part)), part)
    return b"".join(pieces)


def frames(data: Buffer, count: int) -> list[memoryview]:
    """Return the first ``count`` frames in ``data``, with their heads.

    Raises:
        MalformedMessageError: there are fewer.
    """
    view = memoryview(data)
    found: list[memoryview] = []
    at = 0
    for _ in range(count):
        if at + HEAD_BYTES > len(view):
            raise MalformedMessageError(f"{len(found)} frames in {len(view)} bytes, and {count} are due")
        stop = at + HEAD_BYTES + _LENGTH.unpack_from(view, at)[0]
        if stop > len(view):
            raise MalformedMessageError(f"a frame that ends at byte {stop} of {len(view)}")
        found.append(view[at:stop])
        at = stop
    return found


def parts(data: Buffer, count: int) -> list[memoryview]:
    """Return the parts in the first ``count`` frames in ``data``. MalformedMessageError as of `frames`."""
    return [frame[HEAD_BYTES:] for frame in frames(data, count)]


def framed_length(longest: int, step: int) -> int:
    """Return the bytes of one part's frames over all slices of ``step`` bytes; the longest part has ``longest``."""
    return longest + HEAD_BYTES * max(1, -(-longest // (step - HEAD_BYTES)))


def slices_of(whole: Sequence[Buffer], step: int, count: int) -> list[bytes]:
    """Return the frames of each of ``count`` slices: the next bytes of every part, as many as fit."""
    room = step - HEAD_BYTES
    views = [memoryview(part) for part in whole]
    return [framed(view[index * room : (index + 1) * room] for view in views) for index in range(count)]
