"""The start from a checkpoint that some members have on their disks: the others get it, and write it to theirs.

    a member has                       what becomes of it
    ─────────────────────────────────  ─────────────────────────────────────────────────────────────────────────────
    the newest checkpoint of all       it is loaded. The lowest such rank gives it to the others
    an older one, or none              it gets the newest, and loads that. The lowest rank of its host writes the file
    another one of the same round      DisagreementError at all, which names both
    one that it cannot read            StateError at all, which names it and the newest whole one beside it

The file travels as it is, in chunks. A member that gets it makes the tensors as the chunks come. So there is no second
copy of the state in memory. All members take part in each chunk, as collectives demand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.errors import (
    DisagreementError,
    MembershipChangedError,
    StateError,
    reason_of,
)
from gradserver.protocol.limits import MIB
from gradserver.worker.client import Worker
from gradserver.worker.job.checkpoint import Loaded, Unfinished, check_job, opened, read_from
from gradserver.worker.torch_ddp.alike import gather, named
from gradserver.worker.tree import Tree

log = logging.getLogger("gradserver")

CHUNK_BYTES: Final = 4 * MIB
"""Bytes that travel at a time."""


class Source(Protocol):
    """Checkpoints of one member: `gradserver.worker.job.checkpoint.Directory`, or a ``File``."""

    def find(self, whole: bool = False) -> Loaded | None:
        """Read the one to load; None if there is none."""

    def file_of(self, number: int, /) -> Path:
        """Return the file for the checkpoint of a round."""

    def make(self) -> None:
        """Make the file's directory."""

    def written(self, path: Path) -> None:
        """Note a new file."""


class GiverLostError(Exception):
    """The member that gives a checkpoint, or a part of one, was lost."""


def host_of(worker: Worker) -> str:
    """Return the id of this worker's host; empty for threads of one process."""
    here = worker._session.membership
    return here.offers[here.rank].host_id if here.offers else ""


def place_of(worker: Worker, path: Path) -> str:
    """Return what is equal for workers of one host that mean the same ``path``, and for no others."""
    return f"{host_of(worker)} {path.absolute()}"


def check_epoch(worker: Worker, epoch: int) -> None:
    """Raise MembershipChangedError if the membership is not that of ``epoch``: ranks may have changed."""
    if worker.epoch != epoch:
        raise MembershipChangedError(f"the membership changed from epoch {epoch} to {worker.epoch}")


def resume(worker: Worker, source: Source, whole: bool, exact: bool) -> Loaded | None:
    """Return the newest checkpoint that any member has, at every member; None if none has any. It is a collective.

    Args:
        worker: the worker.
        source: what this member has.
        whole: whether to pass over damaged checkpoints.
        exact: whether all that have a checkpoint must have the same.

    Raises:
        StateError: a member could not read its own, or get that of another one. The error names it and the reason.
        DisagreementError: they have different ones. The error names them.
    """
    while True:
        mine, loaded = _look(worker, source, whole)
        told = gather(worker, mine)
        epoch, giver = worker.epoch, _newest(worker.names, told, exact)
        if giver is None:
            return None
        if all(one["digest"] == told[giver]["digest"] for one in told):
            return loaded
        if mine["digest"] != told[giver]["digest"]:
            loaded = None  # its memory is needed
        try:
            return _share(worker, source, told, giver, loaded, epoch)
        except (MembershipChangedError, GiverLostError) as change:  # raised at all members, so all look again
            log.info("the checkpoint did not come: %s", change)


def _look(worker: Worker, source: Source, whole: bool) -> tuple[dict[str, Tree], Loaded | None]:
    """Return what this member tells the others of its checkpoint, and its content."""
    mine: dict[str, Tree] = {"error": "", "path": "", "round": 0, "digest": b"", "bytes": 0, "place": ""}
    loaded = None
    try:
        loaded = source.find(whole)
        if loaded is not None:
            check_job(loaded.tree, str(loaded.path))
            mine |= {"path": str(loaded.path), "round": loaded.tree["round"], "digest": loaded.digest}
            mine["bytes"] = loaded.path.stat().st_size
    except StateError as error:
        mine["error"] = error.message
    except OSError as error:
        mine["error"] = f"cannot read the checkpoint of {source.file_of(0).parent}: {reason_of(error)}"
    mine["place"] = place_of(worker, source.file_of(0))
    return mine, loaded


def _newest(names: Sequence[str], told: Sequence[Tree], exact: bool) -> int | None:
    """Return the lowest rank that has the newest checkpoint; None if none has any."""
    _check_errors(names, told, "cannot load the checkpoint")
    having = [rank for rank, one in enumerate(told) if one["path"]]
    if not having:
        return None
    giver = max(having, key=lambda rank: (told[rank]["round"], -rank))
    for rank in having:
        one, newest = told[rank], told[giver]
        if one["digest"] != newest["digest"] and (exact or one["round"] == newest["round"]):
            first, other = sorted((giver, rank))
            raise DisagreementError(
                f"the members have different checkpoints: {named(names, [first])} has {_found(told[first])}, and "
                f"{named(names, [other])} has {_found(told[other])}. Move the one that is not wanted to another "
                f"directory: a member without one gets that of the others"
            )
    return giver


def _check_errors(names: Sequence[str], told: Sequence[Tree], what: str) -> None:
    for rank, one in enumerate(told):
        if one["error"]:
            raise StateError(f"{named(names, [rank])} {what}: {one['error']}")


def _found(one: Tree) -> str:
    return f"round {one['round']} (digest {one['digest'].hex()[:12]}, {one['path']})"


# ── on the way ────────────────────────────────────────────────────────────────────────────────────────


def _share(
    worker: Worker, source: Source, told: Sequence[Tree], giver: int, loaded: Loaded | None, epoch: int
) -> Loaded:
    """Give the checkpoint of rank ``giver`` to all that do not have it. Return its content."""
    one, rank, failure = told[giver], worker.rank, ""
    lacking = [rank for rank, other in enumerate(told) if other["digest"] != one["digest"]]
    path = source.file_of(one["round"]) if rank in lacking else Path(one["path"])
    writes = rank in lacking and rank == min(r for r in lacking if told[r]["place"] == told[rank]["place"])
    with ExitStack() as stack:
        file = None
        copy = stack.enter_context(_Copy(source, path)) if writes else None
        try:
            file = stack.enter_context(opened(path)) if rank == giver else None
        except OSError as error:
            failure = f"cannot read {path}: {reason_of(error)}"
        stream = _Stream(worker, giver, one["bytes"], file, copy)
        if loaded is None:
            _say_what_comes(worker, told, giver)
            try:
                loaded = read_from(path, stream, one["bytes"])
                if loaded.digest != one["digest"]:
                    failure = f"{one['path']} has changed while it was sent"
            except StateError as error:
                failure = error.message
        stream.drain()
        verdicts = gather(worker, {"error": failure or stream.failure})
        check_epoch(worker, epoch)
        _check_errors(worker.names, verdicts, "could not get or give the checkpoint")
        if copy is not None:
            copy.finish()
    assert loaded is not None
    return loaded


def _say_what_comes(worker: Worker, told: Sequence[Tree], giver: int) -> None:
    mine, one = told[worker.rank], told[giver]
    has = _found(mine) if mine["path"] else "no checkpoint"
    log.warning("this worker has %s, and gets %s from %s", has, _found(one), named(worker.names, [giver]))


class _Stream:
    """The bytes of a checkpoint, as one member reads them from its disk: the same at all members."""

    def __init__(self, worker: Worker, giver: int, nbytes: int, file: FileIO | None, copy: _Copy | None) -> None:
        self._worker = worker
        self._giver = giver
        self._left = nbytes
        self._file = file
        self._copy = copy
        self._here = memoryview(b"")
        self.failure = ""
        """Reason why the giver could not read it."""

    def readinto(self, memory: memoryview, /) -> int:
        """Fill a part of ``memory``."""
        if not self._here and self._left:
            self._next()
        count = min(len(memory), len(self._here))
        memory[:count] = self._here[:count]
        self._here = self._here[count:]
        return count

    def drain(self) -> None:
        """Take part until all bytes have travelled."""
        while self._left:
            self._next()

    def _next(self) -> None:
        piece = np.zeros(min(CHUNK_BYTES, self._left), np.uint8)
        if self._file is not None:
            self._fill(self._file, piece.data)
        broadcast(self._worker, piece, self._giver)
        self._left -= piece.size
        self._here = piece.data
        if self._copy is not None:
            self._copy.write(piece.data)

    def _fill(self, file: FileIO, memory: memoryview) -> None:
        """Read the next bytes. After a failure zeros travel: their digest is wrong everywhere."""
        try:
            while memory and not self.failure:
                count = file.readinto(memory)
                self.failure = "" if count else "the file has become shorter"
                memory = memory[count:]
        except OSError as error:
            self.failure = f"cannot read it: {reason_of(error)}"


def broadcast(worker: Worker, piece: Bytes, root: int) -> None:
    """Overwrite ``piece`` by that of rank ``root``. GiverLostError at all if that one was lost."""
    handle = worker.broadcast(piece, root, async_op=True)
    handle.wait()
    if root != worker.rank and not handle.present:
        raise GiverLostError(f"rank {root} was lost before it gave all")


class _Copy:
    """The file of a member that gets a checkpoint. A disk that takes none is a warning: training needs none."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        self._path = path
        self._file: Unfinished | None = None

    def __enter__(self) -> _Copy:
        try:
            self._source.make()
            self._file = Unfinished(self._path)
        except (OSError, StateError) as error:
            self._warn(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.__exit__()

    def write(self, piece: memoryview) -> None:
        """Write the next bytes."""
        if self._file is not None:
            try:
                self._file.write(piece)
            except OSError as error:
                self._warn(error)

    def finish(self) -> None:
        """Give the file its name."""
        if self._file is None:
            return
        try:
            self._file.finish()
        except OSError as error:
            self._warn(error)
        else:
            self._source.written(self._path)
            log.info("the checkpoint is written here, too: %s", self._path)

    def _warn(self, error: OSError | StateError) -> None:
        if self._file is not None:
            self._file.__exit__()
            self._file = None
        reason = reason_of(error) if isinstance(error, OSError) else error.message
        log.warning("cannot write the checkpoint %s: %s. The job goes on without this copy", self._path, reason)
