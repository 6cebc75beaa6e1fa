"""The files of a ledger's directory: names, permissions, the lock, and writing that survives a power failure."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from pathlib import Path
from typing import Final

from gradserver.protocol.errors import StateError, reason_of
from gradserver.protocol.files import open_regular
from gradserver.protocol.limits import MIB

log = logging.getLogger("gradserver")

OWN: Final = 0o600
"""Permissions of files: they are for their owner only."""
MAX_FILE_BYTES: Final = 512 * MIB
"""Bytes of a file that is read. Coordinators begin a new one long before."""
_NAME: Final = re.compile(r"ledger-(\d{6,})\.gsl")


def files_of(path: Path) -> list[tuple[int, Path]]:
    """Find the ledger's files in a directory with their numbers, the oldest first."""
    try:
        found = [(int(match[1]), entry) for entry in path.iterdir() if (match := _NAME.fullmatch(entry.name))]
    except OSError as error:
        raise StateError(f"cannot read {path}: {reason_of(error)}") from error
    return sorted(found)


def file_number(path: Path) -> int:
    """Return the number in a file's name; StateError if it is not the name of a ledger file."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise StateError(f"{path} is not named like a ledger file, such as ledger-000001.gsl")
    return int(match[1])


def lock(path: Path) -> int:
    """Lock the directory for this process. The lock lasts as long as the returned descriptor is open."""
    file = path / "lock"
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
        fd = open_regular(file, os.O_RDWR | os.O_CREAT, OWN, links=False)
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else reason_of(error)
        raise StateError(f"cannot keep a ledger in {path}: {reason}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.write(fd, b"%d\n" % os.getpid())
    except BlockingIOError:
        owner = os.read(fd, 20).decode(errors="replace").strip()
        os.close(fd)
        user = f"the coordinator with process id {owner}" if owner.isdigit() else "another coordinator"
        raise StateError(f"{path} is in use by {user}: each coordinator needs its own directory") from None
    except OSError as error:
        os.close(fd)
        raise StateError(f"cannot write {file}: {reason_of(error)}") from error
    return fd


def keep_to_owner(path: Path) -> None:
    """Restrict files to their owner. Those of an earlier version, and copies, may have wider permissions."""
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o022:
        log.warning(
            "%s can be written by other users (mode %o), which can put files there: run chmod go-w on it", path, mode
        )
    for _, file in files_of(path):
        try:
            if file.stat(follow_symlinks=False).st_mode & 0o077:
                fd = open_regular(file, links=False)
                try:
                    os.fchmod(fd, OWN)
                finally:
                    os.close(fd)
        except OSError as error:
            log.warning("%s can be read by other users, and contains secrets of groups: %s", file, reason_of(error))


def write_all(fd: int, data: bytes) -> None:
    """Write ``data``, also if the kernel takes it in pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names in it survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
