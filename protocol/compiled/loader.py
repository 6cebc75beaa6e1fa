"""Loader of kernels: it has them compiled in the background, and then puts them in numpy's place.

Compiling takes some seconds of a processor, mostly with the interpreter's lock. So another process does that, and
leaves the machine code in a directory, from which any process loads it in half a second. Both happen in a thread. Until
then numpy does the work; the bits are the same, so this may change in the middle of a round.

The environment variable ``GRADSERVER_KERNELS`` chooses: ``auto`` (the default) uses kernels if numba is installed,
``numpy`` never, and ``compiled`` waits for them, and fails without them.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib
import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from gradserver.protocol import kernels
from gradserver.protocol.errors import BackendUnavailableError, InvalidArgumentError
from gradserver.protocol.version import __version__

VARIABLE: Final = "GRADSERVER_KERNELS"
AUTO, NUMPY, COMPILED = "auto", "numpy", "compiled"
INSTALL: Final = "pip install 'gradserver[fast]'"
_REMEDY: Final = f"install a version of numba that fits ({INSTALL}), or set {VARIABLE}={NUMPY} to do without"
_DENIED: Final = (
    "the system denies this process executable memory, as systemd does with MemoryDenyWriteExecute=yes. Leave that out "
    f"of the unit, or set {VARIABLE}={NUMPY} to do without"
)

log = logging.getLogger("gradserver")

_FILL: Final = "from gradserver.protocol.compiled.loader import fill; fill()"
_READY: Final = "ready"
"""File in a directory that has all kernels."""
_COMPILING_SECONDS: Final = 300.0
_SWITCH_SECONDS: Final = 1e-4
"""Time for which this thread keeps the interpreter's lock from others as it imports. Python's is 50 times as long."""
_ENDING_SECONDS: Final = 5.0
"""Time that the end of a process waits for a thread that is loading machine code."""


class Standing(NamedTuple):
    """Doer of the work now, ``numpy`` or ``compiled``, and the reason.

    Attributes:
        failed: whether kernels were wanted, and cannot be had with what is installed.
    """

    kernels: str
    reason: str
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.kernels} ({self.reason})"


class _Loader:
    """The loading of kernels, once in a process."""

    def __init__(self) -> None:
        self.standing = Standing(NUMPY, "kernels are not loaded yet")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_loading = False

    def start(self) -> None:
        choice = _choice()
        with self._lock:
            if self._thread is None and choice != NUMPY:
                self.standing = Standing(NUMPY, "kernels are being loaded")
                self._thread = threading.Thread(target=self._run, name="gradserver-kernels", daemon=True)
                self._thread.start()
                atexit.register(self._end)
        if choice == NUMPY:
            self.standing = Standing(NUMPY, f"{VARIABLE}={NUMPY}")
        elif choice == COMPILED:
            assert self._thread is not None
            self._thread.join()
            if self.standing.kernels != COMPILED:
                raise BackendUnavailableError(f"{VARIABLE}={COMPILED}, but {self.standing.reason}")

    def settle(self, seconds: float) -> Standing:
        self.start()
        if self._thread is not None:
            self._thread.join(seconds)
        return self.standing

    def _run(self) -> None:
        if importlib.util.find_spec("numba") is None:
            self.standing = Standing(NUMPY, f"numba is not installed: {INSTALL}")
            return
        self._is_loading, began, interval = True, time.monotonic(), sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            with _directory() as directory:
                if not (directory / _READY).exists():
                    self.standing = Standing(NUMPY, "kernels are being compiled")
                    self._is_loading = False  # this thread waits for a process, and may end before it
                    _compile(directory)
                    self._is_loading = True
                self._load(directory)
            seconds = time.monotonic() - began
            self.standing = Standing(COMPILED, f"by numba, ready after {seconds:.1f} s")
        except Exception as error:
            self.standing = Standing(NUMPY, f"kernels cannot be compiled: {str(error).rstrip('. ')}", True)
            reason = self.standing.reason
            log.warning(
                "%s. Without them numpy encodes, decodes and averages, which takes several times as long: %s",
                reason,
                remedy(reason),
            )
        finally:
            sys.setswitchinterval(interval)
            self._is_loading = False

    def _load(self, directory: Path) -> None:
        from numba import config

        before, config.CACHE_DIR = config.CACHE_DIR, str(directory)
        try:
            table = importlib.import_module("gradserver.protocol.compiled.table").TABLE
        finally:
            config.CACHE_DIR = before
        from gradserver.protocol.compiled.verification import differences

        if found := differences(table):
            raise BackendUnavailableError(f"they give other bits than numpy on this machine ({', '.join(found)})")
        kernels.use(table)

    def _end(self) -> None:
        """Let the thread finish with libraries that must not end under it."""
        if self._is_loading and self._thread is not None:
            self._thread.join(_ENDING_SECONDS)


_loader = _Loader()


def remedy(reason: str) -> str:
    """Return the remedy where kernels cannot be compiled for this ``reason``."""
    return _DENIED if "executable memory" in reason.lower() else _REMEDY


def _choice() -> str:
    choice = os.environ.get(VARIABLE, AUTO)
    if choice not in (AUTO, NUMPY, COMPILED):
        raise InvalidArgumentError(f"{VARIABLE} must be {AUTO}, {NUMPY} or {COMPILED}, not {choice!r}")
    return choice


def require() -> None:
    """Do what may fail of `start`, before a process listens: check the choice, and load kernels if there must be some.

    Raises:
        InvalidArgumentError: as `start`.
        BackendUnavailableError: as `start`.
    """
    if _choice() == COMPILED:
        _loader.start()


def start() -> None:
    """Begin to load kernels, unless this has begun before. They are used as soon as they are there.

    Raises:
        InvalidArgumentError: ``GRADSERVER_KERNELS`` has none of its values.
        BackendUnavailableError: it is ``compiled``, and they cannot be had. Then this waits for them.
    """
    _loader.start()


def settle(seconds: float) -> Standing:
    """Begin to load kernels, wait until they are there or cannot be had, and return what does the work then."""
    return _loader.settle(seconds)


def standing() -> Standing:
    """Return what does the work now."""
    return _loader.standing


def fill() -> None:
    """Compile all kernels into the directory that ``NUMBA_CACHE_DIR`` names: what the other process does."""
    os.nice(10)  # members compute meanwhile
    importlib.import_module("gradserver.protocol.compiled.table")


def _compile(directory: Path) -> None:
    """Have kernels compiled into ``directory``, unless they are there. One process at a time does it, others wait."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(directory / "lock", flags, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (directory / _READY).exists():
            return
        done = subprocess.run(
            [sys.executable, "-P", "-c", _FILL],
            env={**os.environ, "NUMBA_CACHE_DIR": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_COMPILING_SECONDS,
            pass_fds=[lock.fileno()],  # if this process ends, the other one goes on, and has the lock until it is done
            start_new_session=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise BackendUnavailableError(f"the compiling process ended with status {done.returncode}: {last[:200]}")
        (directory / _READY).touch()


@contextmanager
def _directory() -> Iterator[Path]:
    """Find a directory for machine code of this version, compiler and processor; or make one that is soon deleted.

    What is loaded from it is run. So it belongs to this user, and no other can write there or replace it.
    """
    import tempfile  # imported here: where a home can be written, this is not needed

    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = f"kernels-{_key()}"
    for folder in (Path(chosen).absolute() / "gradserver", Path(tempfile.gettempdir()) / f"gradserver-{os.geteuid()}"):
        if (found := _ours(folder / key)) is not None:
            yield found
            return
    path = Path(tempfile.mkdtemp(prefix="gradserver-kernels-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


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


def _key() -> str:
    """Name what machine code depends on."""
    import llvmlite.binding as llvm
    import numba

    folder = Path(__file__).parent
    parts = [
        *(
            __version__,
            numba.__version__,
            sys.version,
            llvm.get_host_cpu_name(),
            llvm.get_host_cpu_features().flatten(),
        ),
        *(str(folder), *(file.read_text() for file in sorted(folder.glob("*.py")))),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
