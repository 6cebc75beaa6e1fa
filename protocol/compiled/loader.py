"""Loader of kernels: it has them compiled in the background, and then puts them in numpy's place.

Another process compiles them into a directory (`gradserver.protocol.compiled.cache`), from which any process loads them
in half a second. Both happen in a thread. Until then numpy does the work; the bits are the same, so this may change in
the middle of a round.

The environment variable ``GRADSERVER_KERNELS`` chooses: ``auto`` (the default) uses kernels if numba is installed,
``numpy`` never, and ``compiled`` waits for them, and fails without them.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from gradserver.protocol import kernels
from gradserver.protocol.compiled import cache
from gradserver.protocol.errors import BackendUnavailableError, InvalidArgumentError

VARIABLE: Final = "GRADSERVER_KERNELS"
AUTO, NUMPY, COMPILED = "auto", "numpy", "compiled"
INSTALL: Final = "pip install 'gradserver[fast]'"
_MISSING: Final = f"numba is not installed: {INSTALL}"
_REMEDY: Final = f"install a version of numba that fits ({INSTALL}), or set {VARIABLE}={NUMPY} to do without"
_DENIED: Final = (
    "the system denies this process executable memory, as systemd does with MemoryDenyWriteExecute=yes. Leave that out "
    f"of the unit, or set {VARIABLE}={NUMPY} to do without"
)

log = logging.getLogger("gradserver")

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
        self.ends_at_once = False

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
            self.standing = Standing(NUMPY, _MISSING)
            return
        self._is_loading, began, interval = True, time.monotonic(), sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            with cache.directory() as directory:
                if not cache.is_full(directory):
                    self.standing = Standing(NUMPY, "kernels are being compiled")
                    self._is_loading = False  # this thread waits for a process, and may end before it
                    cache.fill(directory)
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
        """Let the thread finish with libraries that must not end under it, and which nothing can interrupt."""
        if self._is_loading and self._thread is not None:
            if self.ends_at_once:
                logging.shutdown()
                sys.stdout.flush()
                os._exit(0)
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


def end_at_once() -> None:
    """Let this process end with status 0 without waiting for a thread that loads: it has nothing else to do."""
    _loader.ends_at_once = True


def compile_ahead(for_all: bool) -> str:
    """Compile all kernels now, and return what was done.

    Args:
        for_all: whether for all users of this installation, beside the package.

    Raises:
        BackendUnavailableError: they cannot be compiled, or there is no place for them.
    """
    if importlib.util.find_spec("numba") is None:
        raise BackendUnavailableError(f"kernels cannot be compiled: {_MISSING}")
    began = time.monotonic()
    path = cache.installed() if for_all else cache.own()
    if path is None:
        raise BackendUnavailableError(
            "there is no directory that this user alone can write, to keep kernels in: set XDG_CACHE_HOME to one"
        )
    if cache.is_full(path):
        return f"kernels are compiled already, in {path}"
    try:
        if for_all:
            cache.install(path)
        else:
            cache.fill(path)
    except OSError as error:
        raise BackendUnavailableError(f"kernels cannot be written to {path}: {error.strerror}") from error
    return f"compiled kernels in {time.monotonic() - began:.1f} s, into {path}"
