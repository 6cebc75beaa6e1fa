"""Checkpoints on disk: a file holds one tree, and exists as a whole or not at all.

    bytes   what
    ──────  ───────────────────────────────────────────────────────
    8       ``GSCKPT1`` and a line feed
    8 + 8   lengths of manifest and buffers, little-endian
    …       the manifest (`gradserver.worker.tree`)
    …       the buffers, one behind the other
    32      SHA-256 of all that stands before: the file's *digest*

A checkpoint is written to ``NAME.tmp``, which is flushed to the disk and then renamed. After that the directory is
flushed. Whatever ends the writer, a file under a valid name is always whole, and the one before stays until then.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    GradServerError,
    InvalidArgumentError,
    MalformedMessageError,
    StateError,
    reason_of,
)
from gradserver.protocol.files import open_regular
from gradserver.worker.tree import MAX_MANIFEST_BYTES, Packed, Tree, unpack

log = logging.getLogger("gradserver")

_MAGIC: Final = b"GSCKPT1\n"
_HEAD: Final = struct.Struct("<8sQQ")
_DIGEST_BYTES: Final = 32
_WRITE_BYTES: Final = 16 << 20
"""Bytes that are written, and added to the digest, at a time."""
_SUFFIX: Final = ".gsckpt"
_NAME: Final = re.compile(rf"round-\d{{9,}}{re.escape(_SUFFIX)}")
_LATEST: Final = "latest"


@dataclass(frozen=True)
class Loaded:
    """The content of a file."""

    path: Path
    tree: Tree
    digest: bytes


# ── one file ──────────────────────────────────────────────────────────────────────────────────────────


def write(path: Path, packed: Packed) -> None:
    """Write a tree into ``path``. It replaces what is there when all of it is on the disk.

    Raises:
        StateError: it could not be written. The error names the file. What was at ``path`` is still there.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(open_regular(unfinished, flags, 0o666, links=False), "wb", buffering=0) as file:
                _write_all(file, packed)
                os.fsync(file.fileno())
            unfinished.replace(path)
            _flush_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()  # its room may be what is missing
            raise
    except OSError as error:
        raise StateError(f"cannot write the checkpoint {path}: {reason_of(error)}") from error


def read(path: Path) -> Loaded:
    """Read what `write` wrote. Each tensor is read once, into memory of its own.

    Raises:
        StateError: there is no whole and undamaged checkpoint at ``path``. The error says what is wrong with it.
    """
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise StateError(f"cannot read the checkpoint {path}: {reason_of(error)}") from error


def _write_all(file: BinaryIO, packed: Packed) -> None:
    sha = hashlib.sha256()
    head = _HEAD.pack(_MAGIC, len(packed.manifest), sum(buffer.nbytes for buffer in packed.buffers))
    for piece in _pieces([head, packed.manifest, *(buffer.data for buffer in packed.buffers)]):
        sha.update(piece)
        _write(file, piece)
    _write(file, memoryview(sha.digest()))


def _pieces(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for at in range(0, len(view), _WRITE_BYTES):
            yield view[at : at + _WRITE_BYTES]


def _write(file: BinaryIO, piece: memoryview) -> None:
    while len(piece):
        piece = piece[file.write(piece) :]  # a disk that is nearly full takes a part


def _flush_directory(directory: Path) -> None:
    """Flush the directory, so that renamed files survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Reader:
    """A reader of one file, which trusts no length."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._sha = hashlib.sha256()
        self._size = os.fstat(file.fileno()).st_size
        self._left = self._size - _DIGEST_BYTES

    def read(self) -> Loaded:
        """Return the tree, once all of it was compared with its digest."""
        if self._left < _HEAD.size:
            raise self._damaged(f"it has {self._size} bytes, and no checkpoint is so short")
        magic, manifest_bytes, buffer_bytes = _HEAD.unpack(self._take(_HEAD.size))
        if magic != _MAGIC:
            raise self._damaged(f"it begins with {magic!r} instead of {_MAGIC!r}")
        if manifest_bytes + buffer_bytes != self._left or manifest_bytes > MAX_MANIFEST_BYTES:
            expected = _HEAD.size + manifest_bytes + buffer_bytes + _DIGEST_BYTES
            raise self._damaged(f"it says that it has {expected} bytes, and has {self._size}")
        try:
            tree = unpack(self._take(manifest_bytes), self._take)
        except MalformedMessageError as error:
            raise self._damaged(error.message) from None
        digest = self._sha.digest()
        self._left += _DIGEST_BYTES
        if self._left != _DIGEST_BYTES or self._take(_DIGEST_BYTES) != digest:
            raise self._damaged("its contents do not have the digest that was written with them")
        return Loaded(self._path, tree, digest)

    def _take(self, nbytes: int) -> memoryview:
        """Return the next ``nbytes``, in memory of their own."""
        if nbytes > self._left:
            raise self._damaged(f"{nbytes} bytes should follow, and {self._left} do")
        self._left -= nbytes
        memory = np.empty(nbytes, np.uint8).data
        got = 0
        while got < nbytes:
            count = self._file.readinto(memory[got : got + _WRITE_BYTES])  # type: ignore[attr-defined]  # a raw file
            if not count:
                raise self._damaged(f"it ended while it was read, {nbytes - got} bytes early")
            self._sha.update(memory[got : got + count])
            got += count
        return memory

    def _damaged(self, what: str) -> StateError:
        return StateError(f"{self._path} is not a whole checkpoint: {what}. Load another one")


# ── a directory of them ───────────────────────────────────────────────────────────────────────────────


class Directory:
    """A job's checkpoints: ``round-000000812.gsckpt`` and so on, and ``latest``, a link to the last one written.

    Args:
        path: made when the first checkpoint is written.
        keep: how many to keep. Until a new one is whole there is room for one more.
    """

    def __init__(self, path: Path, keep: int) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InvalidArgumentError(f"keep is {keep!r}, and must be a number of checkpoints, at least 1")
        self.path = path
        self._keep = keep

    def latest(self) -> Path | None:
        """Return the checkpoint written last; None if there is none. StateError if the directory cannot be read."""
        try:
            linked = self.path / _LATEST
            if linked.exists():
                return linked.resolve()
            return next(iter(self._newest_first()), None)  # the writer was killed before it set the link
        except OSError as error:
            raise StateError(f"cannot look for checkpoints in {self.path}: {reason_of(error)}") from error

    def write(self, number: int, packed: Packed) -> Path:
        """Write the checkpoint of round ``number``, and remove the superfluous ones. Raises StateError."""
        path = self.path / f"round-{number:09}{_SUFFIX}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"cannot make the directory {self.path} for checkpoints: {reason_of(error)}") from error
        write(path, packed)
        try:
            self._link(path)
            self._remove_old(path)
        except OSError as error:  # the checkpoint itself is safe
            log.warning("the checkpoint %s is written, but its directory could not be updated: %s", path, error)
        return path

    def _link(self, path: Path) -> None:
        fresh = self.path / f"{_LATEST}.tmp"
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        fresh.symlink_to(path.name)
        fresh.replace(self.path / _LATEST)
        _flush_directory(self.path)

    def _remove_old(self, written: Path) -> None:
        others = [path for path in self._newest_first() if path != written]
        for old in [*others[self._keep - 1 :], *self.path.glob(f"round-*{_SUFFIX}.tmp")]:
            old.unlink()

    def _newest_first(self) -> list[Path]:
        """Return the whole ones, latest written first: after going back to an older one rounds are no order."""
        if not self.path.exists():
            return []
        found = [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


class Writing(threading.Thread):
    """A thread that writes one checkpoint. A process does not end before that."""

    def __init__(self, write: Callable[[], object], warns: bool = False) -> None:
        super().__init__(name="gradserver-checkpoint")
        self._write = write
        self._warns = warns
        self._outcome = ""
        self.start()

    def run(self) -> None:
        """Write it."""
        began = time.monotonic()
        try:
            self._write()
        except GradServerError as error:
            self._outcome = error.message
            if self._warns:
                log.warning("%s. Training goes on; the last checkpoint stays", error.message)
        except BaseException as error:
            self._outcome = f"a checkpoint was not written: {type(error).__name__}: {error}"
            raise
        else:
            self._outcome = "written"
            log.info("a checkpoint was written in %.1f s", time.monotonic() - began)

    def outcome(self, timeout: float) -> str:
        """Return the outcome: empty if it is not done within ``timeout`` seconds, ``written``, or what went wrong."""
        self.join(timeout)
        return self._outcome
