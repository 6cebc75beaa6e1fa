"""Where the results of collectives go that are not written where they came from."""

from __future__ import annotations

import numpy as np

from protocol.buffer import Buffer
from worker.outbox import Writer
from worker.tensors import Bytes


def into_rows(rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> Writer:
    """A slice of an all_gather holds that slice of every rank, one behind the other."""

    def write(start: int, stop: int, payload: Buffer | None) -> None:
        if payload is not None:
            rows[:, start:stop] = np.frombuffer(payload, np.uint8).reshape(len(rows), stop - start)

    return write


def into_part(part: Bytes, offset: int) -> Writer:
    """Slices of this rank's chunk go where they lie in the chunk; those of others are not for us."""

    def write_own(start: int, stop: int, payload: Buffer | None) -> None:
        if offset <= start < offset + part.size:
            values = 0 if payload is None else np.frombuffer(payload, np.uint8)
            part[start - offset : stop - offset] = values

    return write_own
