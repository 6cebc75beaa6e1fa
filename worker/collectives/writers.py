"""The places of collectives' contributions and results, where these are not the tensor's own memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.exchange import Layout
from gradserver.protocol.frames import parts, slices_of
from gradserver.worker.member.ends import Writer

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


class Columns:
    """The contribution to SCATTER and ALL_TO_ALL: of each slice the portions of all ranks, one behind the other.

    Args:
        rows: one for each rank.
        layout: how the operation is cut.
    """

    def __init__(self, rows: Rows, layout: Layout) -> None:
        self._rows, self._layout = rows, layout

    def part(self, index: int) -> Bytes:
        """Return the contribution to slice ``index``."""
        size = self._layout.itemsize // len(self._rows)
        start, stop = self._layout.span(index)
        return self._rows[:, start * size : stop * size].reshape(-1)


class Frames:
    """One part, or one for each rank, of an operation with uneven parts (`gradserver.protocol.frames`)."""

    def __init__(self, whole: Sequence[Buffer], step: int, count: int) -> None:
        self.slices = [np.frombuffer(piece, np.uint8) for piece in slices_of(whole, step, count)]

    def part(self, index: int) -> Bytes:
        """Return the contribution to slice ``index``."""
        return self.slices[index]


class FromFrames:
    """The receiver of such an operation's results: of each slice the next bytes of every part.

    Args:
        count: how many parts come: one from each rank that gives.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: dict[int, list[bytes]] = {}

    def __call__(self, start: int, stop: int, payload: Buffer | None) -> None:
        """Take the result of the slice that begins at byte ``start``."""
        del stop
        if payload is not None:
            self._found[start] = [bytes(part) for part in parts(payload, self._count)]

    def parts(self) -> list[bytes]:
        """Return every part, whole."""
        slices = [self._found[start] for start in sorted(self._found)]
        return [b"".join(pieces) for pieces in zip(*slices, strict=True)] if slices else [b""] * self._count


def into_rows(rows: Rows) -> Writer:
    """Write an all_gather: each slice holds that slice of every rank, one behind the other."""

    def write(start: int, stop: int, payload: Buffer | None) -> None:
        if payload is not None:
            rows[:, start:stop] = np.frombuffer(payload, np.uint8).reshape(len(rows), stop - start)

    return write


def into_part(part: Bytes, offset: int) -> Writer:
    """Write the slices of this rank's chunk where they lie in the chunk; others are not for us."""

    def write_own(start: int, stop: int, payload: Buffer | None) -> None:
        if offset <= start < offset + part.size:
            values = 0 if payload is None else np.frombuffer(payload, np.uint8)
            part[start - offset : stop - offset] = values

    return write_own


def into_columns(rows: Rows) -> Writer:
    """Write an all_to_all: each slice holds those bytes of every row."""

    def write_columns(start: int, stop: int, payload: Buffer | None) -> None:
        first, last = start // len(rows), stop // len(rows)
        rows[:, first:last] = (
            0 if payload is None else np.frombuffer(payload, np.uint8).reshape(len(rows), last - first)
        )

    return write_columns


def into_portion(part: Bytes, world_size: int) -> Writer:
    """Write a scatter: each slice is those bytes of this rank's part."""

    def write_portion(start: int, stop: int, payload: Buffer | None) -> None:
        part[start // world_size : stop // world_size] = 0 if payload is None else np.frombuffer(payload, np.uint8)

    return write_portion
