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
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, Protocol, Self

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
from gradserver.worker.tree import MAX_MANIFEST_BYTES, Make, Packed, Tree, unpack

log = logging.getLogger("gradserver")

_MAGIC: Final = b"GSCKPT1\n"
_HEAD: Final = struct.Struct("<8sQQ")
_DIGEST_BYTES: Final = 32
_WRITE_BYTES: Final = 16 << 20
"""Bytes that are written, and added to the digest, at a time."""
_SUFFIX: Final = ".gsckpt"
_NAME: Final = re.compile(rf"round-\d{{9,}}{re.escape(_SUFFIX)}")
_LATEST: Final = "latest"
_IDENTITY: Final = ".directory"
"""File that tells whether two hosts have the same directory."""
RESUME_VARIABLE: Final = "GRADSERVER_RESUME"
LATEST, NEWEST_WHOLE = "latest", "newest-whole"
_RESUME_WHOLE: Final = (
    f"Job(…, resume={NEWEST_WHOLE!r}), `gradserver run --resume {NEWEST_WHOLE}` or {RESUME_VARIABLE}={NEWEST_WHOLE} in "
    f"the workers' environment goes on from it"
)


class Source(Protocol):
    """Bytes that come one after the other: a raw file, for example."""

    def readinto(self, memory: memoryview, /) -> int | None:
        """Fill a part of ``memory``, and return how many bytes that were; 0 at the end."""


@dataclass(frozen=True)
class Loaded:
    """The content of a file."""

    path: Path
    tree: Tree
    digest: bytes


# ── one file ──────────────────────────────────────────────────────────────────────────────────────────


def located(path: str | Path) -> Path:
    """Return ``path`` from the root on, as it is now: scripts change their folder later. ``~`` is the user's home."""
    try:
        return Path(os.path.expanduser(path)).absolute()
    except FileNotFoundError as error:
        raise StateError(
            f"{path} begins in the present folder, which has been removed: give a path that begins with /"
        ) from error


def write(path: Path, packed: Packed) -> None:
    """Write a tree into ``path``. It replaces what is there when all of it is on the disk.

    Raises:
        StateError: it could not be written. The error names the file. What was at ``path`` is still there.
    """
    try:
        with Unfinished(path) as file:
            _write_all(file.write, packed)
            file.finish()
    except OSError as error:
        raise StateError(f"cannot write the checkpoint {path}: {reason_of(error)}") from error


class Unfinished:
    """A file that gets its name when all of it is on the disk. The end of its ``with`` block removes it before that.

    All methods may raise an OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = open_regular(self._temporary, flags, 0o666, links=False)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()  # its room may be what is missing

    def write(self, piece: memoryview) -> None:
        """Write the next bytes."""
        while len(piece):
            piece = piece[self._file.write(piece) :]  # a disk that is nearly full takes a part

    def finish(self) -> None:
        """Give the file its name."""
        os.fsync(self._file.fileno())
        self._temporary.replace(self._path)
        self._file.close()
        _flush_directory(self._path.parent)


def opened(path: Path) -> FileIO:
    """Open a checkpoint to be read. Raises OSError if it is no regular file: a pipe would keep the reader for ever."""
    return FileIO(open_regular(path), "rb")


def read(path: Path, tensor: Make | None = None) -> Loaded:
    """Read what `write` wrote. Each tensor is read once, into memory of its own.

    Args:
        path: the file.
        tensor: what makes the torch tensors; None for torch. See `gradserver.worker.tree.unpack`.

    Raises:
        StateError: there is no whole and undamaged checkpoint at ``path``. The error says what is wrong with it.
    """
    try:
        with opened(path) as file:
            return read_from(path, file, os.fstat(file.fileno()).st_size, tensor)
    except OSError as error:
        raise StateError(f"cannot read the checkpoint {path}: {reason_of(error)}") from error


def read_from(path: Path, source: Source, size: int, tensor: Make | None = None) -> Loaded:
    """Read the ``size`` bytes of the checkpoint ``path`` from any ``source``. Raises StateError, as `read`."""
    return _Reader(path, source, size).read(tensor)


def check_whole(path: Path) -> bytes:
    """Read a file without keeping it, and return its digest. Raises StateError, as `read`."""
    try:
        with opened(path) as file:
            return _Reader(path, file, os.fstat(file.fileno()).st_size).check()
    except OSError as error:
        raise StateError(f"cannot read the checkpoint {path}: {reason_of(error)}") from error


def check_job(tree: Tree, what: str) -> Tree:
    """Return ``tree`` if it has the parts that `Job.save` writes; otherwise raise StateError."""
    parts = ("round", "model", "optimizer", "scheduler", "state", "data", "chance", "weights", "versions")
    if type(tree) is not dict or any(part not in tree for part in parts) or type(tree["round"]) is not int:
        raise StateError(f"{what} is not the checkpoint of a job")
    return tree


def _write_all(write: Callable[[memoryview], None], packed: Packed) -> None:
    sha = hashlib.sha256()
    head = _HEAD.pack(_MAGIC, len(packed.manifest), sum(buffer.nbytes for buffer in packed.buffers))
    for piece in _pieces([head, packed.manifest, *(buffer.data for buffer in packed.buffers)]):
        sha.update(piece)
        write(piece)
    write(memoryview(sha.digest()))


def _pieces(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for at in range(0, len(view), _WRITE_BYTES):
            yield view[at : at + _WRITE_BYTES]


def _flush_directory(directory: Path) -> None:
    """Flush the directory, so that renamed files survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Reader:
    """A reader of one file, which trusts no length."""

    def __init__(self, path: Path, file: Source, size: int) -> None:
        self._path = path
        self._file = file
        self._sha = hashlib.sha256()
        self._size = size
        self._left = size - _DIGEST_BYTES

    def read(self, tensor: Make | None) -> Loaded:
        """Return the tree, once all of it was compared with its digest."""
        manifest_bytes = self._head()
        try:
            tree = unpack(self._take(manifest_bytes), self._take, tensor)
        except MalformedMessageError as error:
            raise self._damaged(error.message) from None
        return Loaded(self._path, tree, self._end())

    def check(self) -> bytes:
        """Compare all with its digest, and return that."""
        self._head()
        while self._left:
            self._take(min(self._left, _WRITE_BYTES))
        return self._end()

    def _head(self) -> int:
        """Return the length of the manifest, which follows."""
        if self._left < _HEAD.size:
            raise self._damaged(f"it has {self._size} bytes, and no checkpoint is so short")
        magic, manifest_bytes, buffer_bytes = _HEAD.unpack(self._take(_HEAD.size))
        if magic != _MAGIC:
            raise self._damaged(f"it begins with {magic!r} instead of {_MAGIC!r}")
        if manifest_bytes + buffer_bytes != self._left or manifest_bytes > MAX_MANIFEST_BYTES:
            expected = _HEAD.size + manifest_bytes + buffer_bytes + _DIGEST_BYTES
            raise self._damaged(f"it says that it has {expected} bytes, and has {self._size}")
        return int(manifest_bytes)

    def _end(self) -> bytes:
        """Return the digest, if it is that of all that was read."""
        digest = self._sha.digest()
        self._left += _DIGEST_BYTES
        if self._left != _DIGEST_BYTES or self._take(_DIGEST_BYTES) != digest:
            raise self._damaged("its contents do not have the digest that was written with them")
        return digest

    def _take(self, nbytes: int) -> memoryview:
        """Return the next ``nbytes``, in memory of their own."""
        if nbytes > self._left:
            raise self._damaged(f"{nbytes} bytes should follow, and {self._left} do")
        self._left -= nbytes
        memory = np.empty(nbytes, np.uint8).data
        got = 0
        while got < nbytes:
            count = self._file.readinto(memory[got : got + _WRITE_BYTES])
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

    def find(self, whole: bool = False) -> Loaded | None:
        """Read the checkpoint written last; with ``whole`` the last one that is not damaged. None if there is none.

        Raises:
            StateError: it cannot be read. The error names the newest one that is whole.
        """
        path = self.latest()
        if path is None:
            return None
        try:
            return read(path)
        except StateError as error:
            other = self.newest_whole(path)
            if other is None:
                raise StateError(f"{error.message}. {self.path} has no other one that is whole") from error
            if not whole:
                raise StateError(f"{error.message}{beside(other, _RESUME_WHOLE)}") from error
            log.warning("%s. The job goes on from %s, the newest whole one beside it", error.message, other)
            return read(other)

    def newest_whole(self, other: Path) -> Path | None:
        """Return the one written last that is whole, apart from the ``other``. It reads them until it has found one."""
        for path in self._newest_first():
            if path != other:
                with contextlib.suppress(StateError):
                    check_whole(path)
                    return path
        return None

    def file_of(self, number: int) -> Path:
        """Return the file of the checkpoint of round ``number``."""
        return self.path / f"round-{number:09}{_SUFFIX}"

    def write(self, number: int, packed: Packed) -> Path:
        """Write the checkpoint of round ``number``, and remove the superfluous ones. Raises StateError."""
        path = self.file_of(number)
        self.make()
        write(path, packed)
        self.written(path)
        return path

    def make(self) -> None:
        """Make the directory. Raises StateError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"cannot make the directory {self.path} for checkpoints: {reason_of(error)}") from error

    def written(self, path: Path) -> None:
        """Note that ``path`` is the one written last, and remove the superfluous ones."""
        try:
            self._link(path)
            self._remove_old(path)
        except OSError as error:  # the checkpoint itself is safe
            log.warning("the checkpoint %s is written, but its directory could not be updated: %s", path, error)

    def identity(self) -> str:
        """Return what is equal for workers that share this directory, on any host, and for no others; empty if unknown.

        It is a random name in a file, with the number of that file: a copy of the directory has another one.
        """
        file = self.path / _IDENTITY
        try:
            self.make()
            if not file.exists():
                fresh = self.path / f"{_IDENTITY}.{secrets.token_hex(8)}.tmp"
                fresh.write_text(fresh.name)
                with contextlib.suppress(FileExistsError):  # another worker was the first
                    file.hardlink_to(fresh)
                fresh.unlink()
            return f"{file.read_text()[:80]} {file.stat().st_ino}"
        except (OSError, StateError, ValueError):
            return ""

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
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


class File:
    """A checkpoint that a script names itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, _whole: bool = False) -> Loaded | None:
        """Read it; None if there is none. StateError if it is damaged, which names the newest whole one beside it."""
        if not self.path.exists():
            return None
        try:
            return read(self.path)
        except StateError as error:
            other = Directory(self.path.parent, keep=1).newest_whole(self.path)
            if other is None:
                raise
            raise StateError(f"{error.message}{beside(other, f'job.load({str(other)!r}) takes it')}") from error

    def file_of(self, _number: int) -> Path:
        """Return the file."""
        return self.path

    def make(self) -> None:
        """Make nothing: the directory of such a file is the script's."""

    def written(self, path: Path) -> None:
        """Note that it was written, which changes nothing."""


def check_resume(given: str | None) -> str:
    """Return ``given``, or what the environment says: `LATEST` or `NEWEST_WHOLE`. Raises InvalidArgumentError."""
    chosen, source = (given, "resume") if given is not None else (os.environ.get(RESUME_VARIABLE), RESUME_VARIABLE)
    if chosen not in (None, "", LATEST, NEWEST_WHOLE):
        raise InvalidArgumentError(f"{source} is {chosen!r}, and must be {LATEST!r} or {NEWEST_WHOLE!r}")
    return chosen or LATEST


def beside(other: Path, remedy: str) -> str:
    """Say which checkpoint beside a damaged one is whole, and how to take it."""
    return f". The newest whole one beside it is {other}: {remedy}"


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
