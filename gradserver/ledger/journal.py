r"""Ledger files: their bytes, and reading them whatever happened to the disk.

    file      magic `GSLEDG3\n`, u32 number of the file, then records
    record    u32 length and u32 crc32 of what follows: u8 kind, f64 clock, body (`gradserver.engine.records`)

Numbers are little-endian; the clock is the coordinator's, in seconds, when the record was first written. Every file
begins with a `Snapshot` and what it restates, so it can be read alone.

A crash ordinarily leaves half a record at the end. Or it leaves zeros, where a file system has grown a file and not yet
written it (etcd's logs broke on both). Where no whole record follows, the tail is *torn*, and was never relied on.
Where one follows, the file is *damaged*: something else has changed it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gradserver.engine.journal_state import Dated
from gradserver.engine.records import MAX_BODY_BYTES, decode, encode
from gradserver.protocol.errors import GradServerError, StateError
from gradserver.protocol.limits import MIB

MAGIC: Final = b"GSLEDG3\n"
_ANY_FORMAT: Final = re.compile(rb"GSLEDG[0-9A-Z]\n")
HEADER_BYTES: Final = len(MAGIC) + 4
_FRAME: Final = struct.Struct("<IIBd")
_STAMP: Final = struct.Struct("<Bd")
_CHECKED: Final = 8
"""Bytes of a frame in front of what its checksum covers."""
_MAX_LENGTH: Final = _STAMP.size + MAX_BODY_BYTES
_KINDS: Final = 64
"""Number above all kinds of records, with room for future ones."""
_SEARCHED: Final = 1024 * MIB
"""Limit of the bytes that the search for a record behind a fault may check: a fraction of a second."""


def header(number: int) -> bytes:
    """Make the first bytes of file ``number``."""
    return MAGIC + struct.pack("<I", number)


def frame(dated: Dated) -> bytes:
    """Encode a record as it stands in a file."""
    kind, body = encode(dated.record)
    check = zlib.crc32(body, zlib.crc32(_STAMP.pack(kind, dated.clock)))
    return _FRAME.pack(_STAMP.size + len(body), check, kind, dated.clock) + body


class Entry(NamedTuple):
    """A whole record: where it stands in its file, its kind, when it was written, and its body."""

    at: int
    kind: int
    clock: float
    body: memoryview

    @property
    def stop(self) -> int:
        """Position of the byte behind it."""
        return self.at + _FRAME.size + len(self.body)

    def read(self) -> Dated:
        """Decode the record; StateError if it cannot be read, although its checksum is right."""
        try:
            return Dated(self.clock, decode(self.kind, self.body))
        except GradServerError as error:
            raise StateError(f"the record at byte {self.at} cannot be read: {error.message}") from error


class Fault(NamedTuple):
    """Bytes ``at`` to ``stop`` that are no record: the torn end of the file, or a damaged place within it."""

    at: int
    stop: int
    torn: bool


def number_of(path: Path, data: bytes) -> int:
    """Return the number that a file begins with; StateError if it is not a ledger file."""
    check_format(path, data)
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        raise StateError(f"{path} is not a ledger file: it does not begin as one")
    (number,) = struct.unpack_from("<I", data, len(MAGIC))
    return int(number)


def check_format(path: Path, data: bytes) -> None:
    """Raise StateError if a file is a ledger's, in a format that this version does not read."""
    beginning = data[: len(MAGIC)]
    if beginning != MAGIC and re.fullmatch(_ANY_FORMAT, beginning):
        theirs, ours = (magic[6:7].decode() for magic in (beginning, MAGIC))
        raise StateError(
            f"{path} is a ledger in format {theirs}, and this gradserver reads format {ours}: use the version of "
            f"gradserver that wrote it, or give --state-dir another directory. With that version, "
            f"`gradserver ledger {path.parent} --export FILE` writes all records as JSON"
        )


def scan(data: bytes) -> Iterator[Entry | Fault]:
    """Find the records and faults behind a file's header, in order."""
    view, at = memoryview(data), HEADER_BYTES
    while at < len(data):
        stop = _whole(view, at)
        if stop is not None:
            _, _, kind, clock = _FRAME.unpack_from(view, at)
            yield Entry(at, kind, clock, view[at + _FRAME.size : stop])
        else:
            stop = _next_whole(data, view, at + 1)
            yield Fault(at, stop, stop == len(data))
        at = stop


def _whole(view: memoryview, at: int) -> int | None:
    """Return where the record that begins ``at`` ends; None if none begins there."""
    if at + _FRAME.size > len(view):
        return None
    length, check, _, _ = _FRAME.unpack_from(view, at)
    stop = at + _CHECKED + length
    if not _STAMP.size <= length <= _MAX_LENGTH or stop > len(view) or zlib.crc32(view[at + _CHECKED : stop]) != check:
        return None
    return int(stop)


def _next_whole(data: bytes, view: memoryview, start: int) -> int:
    """Find where the first whole record from ``start`` on begins; the end of the file if there is none."""
    left = _SEARCHED
    raw = np.frombuffer(data, np.uint8)
    for chunk in range(start, len(data) - _FRAME.size + 1, MIB):
        for at in _candidates(raw, chunk, min(chunk + MIB, len(data) - _FRAME.size + 1)):
            if _whole(view, at) is not None:
                return at
            left -= int(_FRAME.unpack_from(view, at)[0])
            if left < 0:
                return len(data)
    return len(data)


def _candidates(raw: npt.NDArray[np.uint8], start: int, stop: int) -> list[int]:
    """Find places from ``start`` up to ``stop`` where a record could begin, by its length and its kind."""
    count = stop - start
    length = np.zeros(count, np.int64)
    for place in range(4):
        length |= raw[start + place : stop + place].astype(np.int64) << (8 * place)
    kind = raw[start + _CHECKED : stop + _CHECKED]
    fits: npt.NDArray[Any] = length <= raw.size - _CHECKED - np.arange(start, stop)
    found = np.flatnonzero(fits & (length >= _STAMP.size) & (length <= _MAX_LENGTH) & (kind >= 1) & (kind < _KINDS))
    return [start + int(place) for place in found]
