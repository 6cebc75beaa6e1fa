"""Parts of different lengths, one behind the other: each behind its own length.

How `Op.FRAMED` travels. A contribution to ALL_GATHER or GATHER is one frame, and one to SCATTER or ALL_TO_ALL is a
frame for each rank; a reply has a frame from each rank, or the one frame that is for its receiver. What frames hold of
a slice is bounded by the slice, and so is what anybody must take for them.

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
    """``parts`` as frames, one behind the other."""
    pieces: list[Buffer] = []
    for part in parts:
        pieces += (_LENGTH.pack(len(part)), part)
    return b"".join(pieces)


def frames(data: Buffer, count: int) -> list[memoryview]:
    """The first ``count`` frames in ``data``, their heads included.

    Raises:
        MalformedMessageError: there are not as many.
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
    """What the first ``count`` frames in ``data`` hold. MalformedMessageError as of `frames`."""
    return [frame[HEAD_BYTES:] for frame in frames(data, count)]


def framed_length(longest: int, step: int) -> int:
    """Bytes of one part's frames over all slices, if the longest part has ``longest`` and a slice ``step`` bytes."""
    return longest + HEAD_BYTES * max(1, -(-longest // (step - HEAD_BYTES)))


def slices_of(whole: Sequence[Buffer], step: int, count: int) -> list[bytes]:
    """Frames of each of the ``count`` slices in which parts travel: of every part the next bytes, as many as fit."""
    room = step - HEAD_BYTES
    views = [memoryview(part) for part in whole]
    return [framed(view[index * room : (index + 1) * room] for view in views) for index in range(count)]
