"""The directory in which a coordinator keeps its ledger: appending to it, in spite of all that a disk can do.

One file at a time grows, `DIR/ledger-000001.gsl` and so on (`.journal` says what is in them). A record is one
`write` in append mode: the kernel has it then, so it survives the death of this process. For the death of the machine
`fdatasync` is called from a thread, every second by default.

A disk that is full or broken does not stop training. An incomplete record is cut off again, and one warning names the
file. After a while a new file is begun, with a `Gap` that says how much is missing.

Files are for their owner only: they have the secrets by which members of durable groups are known.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gradserver.engine.declared import CODES, Kind
from gradserver.engine.journal_state import Dated, JournalState
from gradserver.engine.records import Gap, Round, Snapshot, Start
from gradserver.ledger.files import MAX_FILE_BYTES, OWN, files_of, keep_to_owner, lock, sync_directory, write_all
from gradserver.ledger.journal import Entry, Fault, frame, header, number_of, scan
from gradserver.protocol.errors import ProtocolError, StateError, reason_of
from gradserver.protocol.files import open_regular, read_regular
from gradserver.protocol.limits import MIB

log = logging.getLogger("gradserver")

EVERY_ROUND: Final = 0.0
"""Value for ``sync``, instead of seconds: sync behind every round."""
_FILE_BYTES: Final = 64 * MIB
"""Size from which on a new file is begun."""
_RESTATED_BYTES: Final = 4 * MIB
"""Bytes that are written between two snapshots within a file."""
_RETRY_SECONDS: Final = 1.0
_QUICK_SECONDS: Final = 0.05
"""Usual time of a failed write. A disk that takes longer is tried again later, as training waits meanwhile."""


class StateDir:
    """Writer of a directory. Not safe to call from several threads.

    Args:
        path: the directory, made if it is not there.
        version: of gradserver, for the ledger.
        sync: seconds between two calls of `fdatasync`; `EVERY_ROUND`; None for none.
        keep: bytes above which the oldest files are deleted; the last two stay.
        file_bytes: size from which on a new file is begun.
        retry: seconds after which a disk that failed is tried again, at least.

    Attributes:
        incarnation: number of coordinators that have begun to write here, this one included.
        restored: records of earlier coordinators that still matter; `gradserver.engine.events.Restored` takes them.

    Raises:
        StateError: another process uses the directory, a file in it is damaged, or it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        version: str,
        sync: float | None = 1.0,
        keep: int = 1024 * MIB,
        file_bytes: int = _FILE_BYTES,
        retry: float = _RETRY_SECONDS,
    ) -> None:
        self.path, self._keep, self._file_bytes, self._retry = path, keep, file_bytes, retry
        self._sync = sync
        self._fold = JournalState()
        self._trouble: str | None = None
        self._lost, self._lost_since, self._retry_at = 0, 0.0, 0.0
        self._file = path
        self._fd = -1
        self._number = self._size = 0
        self._restate_at = _RESTATED_BYTES
        self._full = file_bytes
        """Size from which on the present file is full: larger if its restated records are."""
        self._dirty = threading.Event()
        self._sync_failure: OSError | None = None
        self._closing = threading.Event()
        self._retired: list[int] = []
        """Descriptors of files that are full, and not synced yet."""
        self._syncer: threading.Thread | None = None
        self._swapping = threading.Lock()
        self._lock = lock(path)
        try:
            keep_to_owner(path)
            self.incarnation = self._resume() + 1
            self.restored: tuple[Kind, ...] = tuple(dated.record for dated in self._fold.records())
            self._begin_or_tell()
            self.append(Start(self.incarnation, version, os.getpid(), time.time(), time.monotonic()))
        except BaseException:
            self._release()
            raise
        if sync:
            self._syncer = threading.Thread(
                target=self._keep_syncing, args=(sync,), name="gradserver-sync", daemon=True
            )
            self._syncer.start()

    def append(self, record: Kind) -> None:
        """Write ``record``. When this returns, the kernel has it, or it was counted as lost."""
        dated = Dated(time.monotonic(), record)
        try:
            data = frame(dated)
        except ProtocolError as error:
            if type(record) is not Gap:
                self._refuse(dated, error)
            return
        if self._sync_failure is not None and self._trouble is None:
            self._fail(self._sync_failure)
        if self._trouble is not None and time.monotonic() >= self._retry_at:
            self._begin_or_tell()
        if self._trouble is None:
            try:
                self._write(data)
                if self._sync == EVERY_ROUND and type(record) is Round:
                    os.fdatasync(self._fd)
            except OSError as error:
                self._fail(error)
        if self._trouble is not None:
            self._lost += 1
        self._fold.apply(dated)
        if self._trouble is None and self._size >= self._full:
            self._begin_or_tell()
        elif self._trouble is None and self._size >= self._restate_at:
            self._restate()

    def _refuse(self, dated: Dated, error: ProtocolError) -> None:
        """Write a gap instead of a record that could not be read again."""
        what = f"a {type(dated.record).__name__} that cannot be read again: {error.message}"
        log.error("not written to %s: %s. This is a bug of gradserver; training continues", self._file, what)
        self.append(Gap(1, dated.clock, what))

    def port(self) -> int:
        """Return the port of the previous coordinator; 0 if there was none, or it is unknown."""
        try:
            return int((self.path / "port").read_text())
        except (OSError, ValueError):
            return 0

    def keep_port(self, port: int) -> None:
        """Write down ``port``, to which members come back, for a next coordinator that may choose any."""
        half = self.path / "port.tmp"
        try:
            half.touch(OWN)
            half.write_text(f"{port}\n")
            half.rename(self.path / "port")
        except OSError as error:
            log.warning("cannot write %s: %s. Members will not find a restarted coordinator", half, reason_of(error))

    def close(self) -> None:
        """Stop writing, and release the directory."""
        self._closing.set()
        self._dirty.set()
        if self._syncer is not None:
            self._syncer.join()
        if self._sync is not None:
            with contextlib.suppress(OSError):
                self._sync_all()
        self._release()

    def snapshot(self) -> dict[str, object]:
        """Return the file that it writes, and the trouble with it, as plain JSON values."""
        return {"file": str(self._file), "trouble": self._trouble, "lost": self._lost}

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────

    def _resume(self) -> int:
        """Find the file to continue, if there is one. Return the last incarnation that wrote. Damage is an error."""
        incarnation, found = 0, list[Entry]()
        for number, path in reversed(files_of(self.path)):
            self._number = max(self._number, number)
            try:
                data = read_regular(path, MAX_FILE_BYTES, links=False)
                if not data.strip(b"\0"):
                    log.warning("%s is empty after a crash, and is deleted", path)
                    path.unlink()
                    continue
            except OSError as error:
                raise StateError(f"cannot use {path}: {reason_of(error)}") from error
            number_of(path, data)
            items = list(scan(data))
            faults = [item for item in items if isinstance(item, Fault)]
            if any(not fault.torn for fault in faults):
                raise StateError(
                    f"{path} is damaged at byte {faults[0].at}: this is not a record, and intact records follow. "
                    f"`gradserver ledger --verify {path}` shows details, and `gradserver ledger {self.path} --repair` "
                    f"keeps the intact records"
                )
            found[:0] = entries = [item for item in items if isinstance(item, Entry)]
            starts = [entry for entry in entries if entry.kind == CODES[Start]]
            if self._fd < 0:
                self._open(path, number, len(data), faults)
            if starts:
                incarnation = _incarnation(path, starts[-1])
                break
        self._recall(found)
        return incarnation

    def _recall(self, entries: Sequence[Entry]) -> None:
        """Read the records that still matter: they stand behind the last snapshot."""
        first = max((index for index, entry in enumerate(entries) if entry.kind == CODES[Snapshot]), default=0)
        writer = "another version of gradserver"
        for entry in entries[first:]:
            dated = _read(self._file, entry, writer)
            self._fold.apply(dated)
            if isinstance(dated.record, Start):
                writer = f"gradserver {dated.record.version}"
        self._restate_at = self._size + _RESTATED_BYTES

    def _open(self, path: Path, number: int, size: int, faults: list[Fault]) -> None:
        try:
            self._fd = open_regular(path, os.O_WRONLY | os.O_APPEND, links=False)
            self._file, self._number, self._size = path, number, size
            if faults:
                self._size = faults[0].at
                os.ftruncate(self._fd, self._size)
                log.warning("%s ended within a record: its last %d bytes were removed", path, size - self._size)
        except OSError as error:
            raise StateError(f"cannot write {path}: {reason_of(error)}") from error

    def _begin_or_tell(self) -> None:
        """Begin a new file if one is due, also after trouble. If that fails, log it and continue."""
        if self._fd >= 0 and self._trouble is None and self._size < self._full:
            return
        began = time.monotonic()
        try:
            self._begin()
        except OSError as error:
            self._fail(error, time.monotonic() - began)

    def _begin(self) -> None:
        """Continue in a new file, which begins with the records that still matter."""
        number = self._number + 1
        path = self.path / f"ledger-{number:06}.gsl"
        now = time.monotonic()
        written = self._snapshot(now)
        if self._trouble is not None and self._lost:
            written.append(Dated(now, Gap(self._lost, self._lost_since, self._trouble)))
        data = header(number) + b"".join(map(frame, written))
        half = path.with_suffix(".tmp")
        fd = open_regular(half, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, OWN, links=False)
        try:
            write_all(fd, data)
            if self._sync is not None:
                os.fsync(fd)
            half.rename(path)
            if self._sync is not None:
                sync_directory(self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                half.unlink()
            raise
        with self._swapping:
            if self._fd >= 0:
                self._retired.append(self._fd)
            self._fd, self._sync_failure = fd, None
        if self._syncer is None:
            self._close_retired()
        self._file, self._number, self._size = path, number, len(data)
        self._full = max(self._file_bytes, 4 * len(data))
        self._restate_at = self._size + _RESTATED_BYTES
        if self._trouble is not None:
            log.info("%s can be written again: %d records before it were lost", path, self._lost)
            self._trouble, self._lost = None, 0
        with contextlib.suppress(OSError):  # they are deleted when the next file begins
            self._delete_old()

    def _snapshot(self, now: float) -> list[Dated]:
        restated = [dated for dated in self._fold.records() if self._is_readable(dated)]
        return [Dated(now, Snapshot(len(restated))), *restated]

    def _is_readable(self, dated: Dated) -> bool:
        try:
            frame(dated)
        except ProtocolError as error:
            log.error("not restated in %s: %r: %s", self.path, dated.record, error.message)
            return False
        return True

    def _restate(self) -> None:
        """Restate what still matters within a file. A next coordinator reads only what follows."""
        data = b"".join(map(frame, self._snapshot(time.monotonic())))
        try:
            self._write(data)
        except OSError as error:
            self._fail(error)
        self._restate_at = self._size + max(_RESTATED_BYTES, 4 * len(data))

    def _delete_old(self) -> None:
        found = [(path, path.stat().st_size) for _, path in files_of(self.path)]
        total = sum(size for _, size in found)
        for path, size in found[:-2]:
            if total <= self._keep:
                break
            path.unlink()
            total -= size

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._fd, data)
        except OSError:
            with contextlib.suppress(OSError):  # otherwise a reader finds the torn end
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self._dirty.set()

    def _fail(self, error: OSError, took: float = 0.0) -> None:
        """Note that the disk cannot be written for now. The failed call ``took`` this time, in seconds."""
        why = reason_of(error)
        if self._trouble is None:
            log.warning(
                "cannot write %s: %s. Training continues, but the ledger is not written; retrying every %g s",
                self._file,
                why,
                self._retry,
            )
            self._lost, self._lost_since = 0, time.monotonic()
        self._trouble = why
        self._retry_at = time.monotonic() + self._retry * max(took / _QUICK_SECONDS, 1.0)

    def _keep_syncing(self, seconds: float) -> None:
        """Sync written records at an interval, so that they survive a power failure. Runs in its own thread."""
        while not self._closing.wait(seconds):
            self._dirty.wait()
            self._dirty.clear()
            try:
                self._sync_all()
            except OSError as error:
                self._sync_failure = error

    def _sync_all(self) -> None:
        """Sync the present file, and those that became full since the last time. The loop does not wait for it."""
        with self._swapping:
            present = [os.dup(self._fd)] if self._fd >= 0 else []  # may fail, and loses no file then
            files, self._retired = [*self._retired, *present], []
        failure: OSError | None = None
        for fd in files:
            try:
                os.fdatasync(fd)
            except OSError as error:
                failure = error
            os.close(fd)
        if failure is not None:
            raise failure

    def _close_retired(self) -> None:
        retired, self._retired = self._retired, []
        for fd in retired:
            os.close(fd)

    def _release(self) -> None:
        self._close_retired()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        os.close(self._lock)


def _incarnation(path: Path, entry: Entry) -> int:
    record = _read(path, entry, "another version of gradserver").record
    assert isinstance(record, Start), record
    return record.incarnation


def _read(path: Path, entry: Entry, writer: str) -> Dated:
    try:
        return entry.read()
    except StateError as error:
        raise StateError(
            f"{path}: {error.message}. It was written by {writer}: start that version with this --state-dir, or remove "
            f"such records (`gradserver ledger {path.parent} --repair`, which keeps the original file), or give "
            f"--state-dir another directory. `gradserver ledger {path.parent} --export FILE` writes the readable "
            f"records as JSON"
        ) from error
