"""Directory of machine code: its place, trust in it, and the process that fills it.

Compiling takes some seconds of a processor, mostly with the interpreter's lock. So a process of its own does that, once
for each version, compiler and processor. What lies in the directory is run. So no other user can write there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gradserver.protocol.errors import BackendUnavailableError
from gradserver.protocol.version import __version__

_FILL: Final = "from gradserver.protocol.compiled.cache import compile_all; compile_all()"
_READY: Final = "ready"
"""File in a directory that has all kernels."""
_COMPILING_SECONDS: Final = 300.0
_PACKAGE: Final = Path(__file__).parent


def is_full(directory: Path) -> bool:
    """Tell whether all kernels are in ``directory``."""
    return (directory / _READY).exists()


@contextmanager
def directory() -> Iterator[Path]:
    """Find this user's directory for this version, compiler and processor; or make one that is soon deleted."""
    if (found := own()) is not None:
        yield found
        return
    import tempfile  # imported here: as in `own`

    path = Path(tempfile.mkdtemp(prefix="gradserver-kernels-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def own() -> Path | None:
    """Find this user's directory; None if there is no place for it that other users cannot write."""
    import tempfile  # imported here: a process has to listen first

    name = _name()
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    for folder in (Path(chosen).absolute() / "gradserver", Path(tempfile.gettempdir()) / f"gradserver-{os.geteuid()}"):
        if (found := _ours(folder / name)) is not None:
            return found
    return None


def installed() -> Path:
    """Return the directory beside the package, from which those of all its users are filled."""
    return _PACKAGE / "machine_code" / _name()


def install(path: Path) -> None:
    """Fill ``path``, the directory that is `installed`, for all users.

    Raises:
        OSError: this user cannot write there.
        BackendUnavailableError: the kernels cannot be compiled.
    """
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    fill(path)
    for folder in (path.parent, path):
        folder.chmod(0o755)
    for file in path.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)  # whatever the umask: it is code as the package's own


def fill(directory: Path) -> None:
    """Fill ``directory`` unless it is full: with a copy of the installed one, or by compiling.

    One process at a time does it, others wait.

    Raises:
        BackendUnavailableError: the kernels cannot be compiled.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(directory / "lock", flags, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_full(directory):
            return
        if not _copy_installed(directory):
            _compile(directory, lock.fileno())
        (directory / _READY).touch()


def _copy_installed(directory: Path) -> bool:
    """Copy the directory beside the package, if it is full, and as safe as the package.

    Numba takes no directory that it cannot write. So there is a copy for each user.
    """
    source = installed()
    try:
        package = _PACKAGE.lstat()
        for folder in (source.parent, source):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != package.st_uid or found.st_mode & 0o022:
                return False
        if not is_full(source):
            return False
        shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock", _READY))
    except (OSError, shutil.Error):
        return False
    return True


def _compile(directory: Path, lock: int) -> None:
    """Have another process compile all kernels into ``directory``."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _FILL],
        env={**os.environ, "NUMBA_CACHE_DIR": str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=_COMPILING_SECONDS,
        pass_fds=[lock],  # if this process ends, the other one goes on, and has the lock until it is done
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendUnavailableError(f"the compiling process ended with status {done.returncode}: {last[:200]}")


def compile_all() -> None:
    """Compile all kernels into the directory that ``NUMBA_CACHE_DIR`` names: what the other process does."""
    os.nice(10)  # members compute meanwhile
    importlib.import_module("gradserver.protocol.compiled.table")


def _ours(path: Path) -> Path | None:
    """Make a directory in one of this user's, if there is none. Return its path without links; None if others have it.

    What an administrator has linked is resolved once. The last two names are this package's own, and no links.
    """
    try:
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.parent.parent.resolve(strict=True) / path.parent.name / path.name
        for folder in (path.parent, path):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not _is_own(folder):
                return None
        safe = all(map(_keeps_entries, path.parent.parents))
    except OSError:
        return None
    return path if safe and os.access(path, os.W_OK) else None


def _is_own(path: Path) -> bool:
    """Tell whether this is a directory, and no link to one, in which this user alone can write."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _keeps_entries(path: Path) -> bool:
    """Tell whether no other user can put something in the place of this user's entries in a directory."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        return False
    return not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX)


def _name() -> str:
    """Return a name of all that machine code depends on."""
    import llvmlite.binding as llvm
    import numba

    machine = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    sources = [file.read_text() for file in sorted(_PACKAGE.glob("*.py"))]
    parts = [__version__, numba.__version__, sys.version, *machine, str(_PACKAGE), *sources]
    return "kernels-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
