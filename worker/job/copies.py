"""The copies of a checkpoint: one on each disk, all with the same bytes.

Members tell each other the *place* of their checkpoints: what is equal for those that share a directory. In each
place the lowest rank writes. Replicas are equal in their weights. They may differ in the rest: in buffers, or with
local SGD in the optimizers' state. So the writers compare the digests of what they would write. What differs
travels from the lowest of them to the others, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.digest import digest
from gradserver.protocol.errors import GradServerError, StateError
from gradserver.worker.client import Worker
from gradserver.worker.job.checkpoint import Directory
from gradserver.worker.job.resuming import CHUNK_BYTES, broadcast, check_epoch, place_of
from gradserver.worker.torch_ddp.alike import gather, named
from gradserver.worker.tree import Packed, Tree, pack


class Agreed(NamedTuple):
    """State on which all members agreed, in the membership of ``epoch``.

    Attributes:
        tree: the state, at those that write it.
        writers: their ranks.
        epoch: number of the membership.
    """

    tree: Tree
    writers: Sequence[int]
    epoch: int


def place_in(worker: Worker, directory: Directory) -> str:
    """Return the place of this worker's checkpoints."""
    hosts = {offer.host_id for offer in worker._session.membership.offers}
    shared = directory.identity() if len(hosts) > 1 else ""
    return shared or place_of(worker, directory.path)


def writers_of(places: Sequence[str], busy: Sequence[bool]) -> list[int]:
    """Return the lowest rank of each place, unless it is ``busy``. A member with an empty place has none."""
    lowest: dict[str, int] = {}
    for rank, place in enumerate(places):
        if place:
            lowest.setdefault(place, rank)
    return [rank for rank in lowest.values() if not busy[rank]]


def alike(worker: Worker, agreed: Agreed, copy: bool) -> Packed | None:
    """Return the bytes to write, the same at all writers; None at the others. With several writers it is a collective.

    Args:
        worker: the worker.
        agreed: what is to be written.
        copy: whether the bytes must not be the tensors' own memory.

    Raises:
        StateError: the state of a writer cannot be stored. All members get this error.
    """
    packed, mine = None, {"error": "", "pieces": np.empty((0, 2), np.uint64)}
    try:
        if agreed.tree is not None:
            packed = pack(agreed.tree, copy)
            mine["pieces"] = np.array([(piece.size, digest(piece)) for piece in _pieces(packed)], np.uint64)
    except GradServerError as error:
        mine["error"] = error.message
    told = gather(worker, mine)
    check_epoch(worker, agreed.epoch)
    for rank, one in enumerate(told):
        if one["error"]:
            raise StateError(f"the state of {named(worker.names, [rank])} cannot be saved: {one['error']}")
    root, *others = agreed.writers
    rows = told[root]["pieces"]
    different = _different(rows, [told[rank]["pieces"] for rank in others])
    pieces = None if packed is None else _pieces(packed)
    sizes = rows[:, 0].tolist()
    if pieces is not None and worker.rank != root:
        of_own = dict(enumerate(pieces))
        pieces = [np.empty(size, np.uint8) if at in different else of_own[at] for at, size in enumerate(sizes)]
    for window in _windows(different, sizes):
        _exchange(worker, root, pieces, window)
    return None if pieces is None else Packed(pieces[0].tobytes(), pieces[1:])


def _pieces(packed: Packed) -> list[Bytes]:
    return [np.frombuffer(packed.manifest, np.uint8), *packed.buffers]


def _different(rows: Any, others: Sequence[Any]) -> list[int]:
    """Return the indices of pieces that some of the others have otherwise."""
    return [
        index
        for index, row in enumerate(rows.tolist())
        if any(index >= len(other) or other[index].tolist() != row for other in others)
    ]


class _Part(NamedTuple):
    """Some bytes of a piece."""

    piece: int
    start: int
    stop: int


def _windows(which: Sequence[int], sizes: Sequence[int]) -> Iterator[list[_Part]]:
    """Cut the pieces of ``which`` into parts, and yield those that travel together."""
    window: list[_Part] = []
    room = CHUNK_BYTES
    for piece in which:
        start = 0
        while start < sizes[piece]:
            part = _Part(piece, start, min(sizes[piece], start + room))
            window.append(part)
            start = part.stop
            room -= part.stop - part.start
            if not room:
                yield window
                window, room = [], CHUNK_BYTES
    if window:
        yield window


def _exchange(worker: Worker, root: int, pieces: Sequence[Bytes] | None, window: Sequence[_Part]) -> None:
    """Overwrite these parts of the pieces by those of rank ``root``. A member that writes nothing has no pieces."""
    chunk = np.empty(sum(part.stop - part.start for part in window), np.uint8)
    if worker.rank == root and pieces is not None:
        np.concatenate([pieces[part.piece][part.start : part.stop] for part in window], out=chunk)
    broadcast(worker, chunk, root)
    if worker.rank != root and pieces is not None:
        at = 0
        for part in window:
            pieces[part.piece][part.start : part.stop] = chunk[at : at + part.stop - part.start]
            at += part.stop - part.start
