"""The processes of a run: each has a log and pipes for lines, and all of them are ended whatever happens."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Final, Protocol, Self

STOP_SECONDS = 5.0  # between asking a process to end and killing it
_LAST_WORDS: Final = 12
_LISTENING: Final = "listening on "
_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_LIBC: Final = ctypes.CDLL(None)


class RunError(Exception):
    """The run cannot continue. The text is for people and says what to do, perhaps in several lines."""


class Process(Protocol):
    """A process with pipes: a `subprocess.Popen`, or one that a `gradserver.tools.common.forks.ForkServer` has made."""

    pid: int

    @property
    def returncode(self) -> int | Any:
        """The exit status, as far as it is known."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Pipe to its standard input."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Pipe from its standard output."""

    def poll(self) -> int | None:
        """Return the exit status, or None if it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. Return the exit status."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it at once."""


Starter = Callable[[Sequence[str], int, signal.Signals], Process]
"""Start of a process with these arguments of Python, this descriptor for its standard error, and this last signal."""


class Child:
    """Process ``prefix… python arguments…``. Its standard error goes to the file `log`.

    It takes lines on its standard input, and prints lines. It gets the signal ``last`` when its parent has ended. If it
    ``keeps_log``, an earlier process's lines stay in the log. With ``starter``, this starts it, in the environment that
    the starter has.

    Attributes:
        lines: lines that it has printed and that were not taken yet.
        ended: whether it has closed its standard output.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        prefix: Sequence[str] = (),
        last: signal.Signals = signal.SIGTERM,
        keeps_log: bool = False,
        starter: Starter | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.lines: list[str] = []
        self.ended = False
        self._unread = b""
        # A signal during the fork would raise its exception in some module's fork hook, and be lost.
        with log.open("ab" if keeps_log else "wb") as errors, uninterrupted() as mask:
            self.process: Process
            if starter is not None:
                self.process = starter(arguments, errors.fileno(), last)
                return
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", *arguments],  # -P: the current folder must not be imported from
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
                preexec_fn=partial(before_exec, os.getpid(), mask, last),  # also where the parent is killed outright
            )

    @property
    def input(self) -> IO[bytes]:
        """Pipe to its standard input."""
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        """Pipe from its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout

    def say(self, line: str) -> None:
        """Send a line to the process."""
        with suppress(BrokenPipeError):  # its end shows elsewhere
            self.input.write(line.encode() + b"\n")
            self.input.flush()

    def read(self) -> None:
        """Read the lines that the process has printed."""
        data = os.read(self.output.fileno(), 1 << 16)
        self.ended = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        self.lines += [line.decode("utf-8", "replace") for line in lines]

    def hang_up(self) -> None:
        """Close the pipes to the process."""
        for stream in (self.input, self.output):
            with suppress(BrokenPipeError):
                stream.close()

    def wait(self) -> int | None:
        """Wait for a process that is about to end. Return its status; None if it does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(STOP_SECONDS)
        return None

    def last_words(self, lines: int) -> list[str]:
        """Return the last lines of the log that are not empty."""
        text = self.log.read_text("utf-8", "replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def fate(self) -> str:
        """Describe how the process ended."""
        status = self.process.poll()
        if status is None:
            return "is running"
        if status < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"


class Family:
    """Processes of one run, with their logs in `folder`. Leaving the context ends all that still run."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.children: list[Child] = []
        """Processes that have been started and not yet stopped, in the order of their start."""
        self._environment = environment
        self._selector = selectors.DefaultSelector()

    def start(
        self,
        name: str,
        *arguments: str,
        prefix: Sequence[str] = (),
        last: signal.Signals = signal.SIGTERM,
        log: str = "",
        starter: Starter | None = None,
    ) -> Child:
        """Start ``prefix… python arguments…``, with its log in `folder` under its name or ``log``."""
        path = self.folder / f"{(log or name).replace(' ', '-')}.log"
        child = Child(name, arguments, self._environment, path, prefix, last, starter=starter)
        self.children.append(child)
        self._selector.register(child.output, selectors.EVENT_READ, child)
        return child

    def hear(self, seconds: float) -> list[Child]:
        """Read what processes print, for ``seconds`` at most. Return those that have printed, or ended."""
        heard: list[Child] = [key.data for key, _ in self._selector.select(max(0.0, seconds))]
        for child in heard:
            child.read()
            if child.ended:
                self._selector.unregister(child.output)
        return heard

    def stop(self) -> None:
        """End all processes, the last one started first, and kill those that do not end."""
        children = list(self.children)
        try:
            for child in reversed(children):
                child.process.terminate()
            for child in reversed(children):
                child.wait()
        finally:  # also when the user is impatient and interrupts the wait
            for child in children:
                child.process.kill()
                child.process.wait()
                if not child.ended:
                    self._selector.unregister(child.output)
                child.hang_up()
            self.children.clear()

    def close(self) -> None:
        """End all processes. None can be started afterwards."""
        try:
            self.stop()
        finally:
            self._selector.close()

    def autopsy(self, first: Child) -> str:
        """Describe the failure of `first`, and of others that fail as a consequence within a moment."""
        time.sleep(1.0)
        text = [f"{first.name} {first.fate()}"]
        words = first.last_words(_LAST_WORDS)
        text += ["its last output:", *(f"  | {line}" for line in words)] if words else ["its log is empty"]
        for child in self.children:
            if child is not first and child.process.poll():
                text.append(f"then {child.name} {child.fate()}:")
                text += [f"  | {line}" for line in child.last_words(1)]
        return "\n".join(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listening_url(child: Child, line: str) -> str:
    """Read the URL in the line that a coordinator or data shard prints when it is ready."""
    if not line.startswith(_LISTENING):
        raise RunError(f"the {child.name} printed {line!r} instead of its address")
    return line.removeprefix(_LISTENING).split()[0]


def inherited_environment() -> dict[str, str]:
    """Copy this process's environment, so that children find the same gradserver, installed or not."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[3]
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment


_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def single_threaded() -> dict[str, str]:
    """Make the environment of processes that compute with one thread each."""
    environment = inherited_environment()
    # One thread for each process: otherwise the thread pools of several libraries compete for the cores, which
    # distorts the measurement.
    environment.update(dict.fromkeys(_ONE_THREAD, "1"))
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GRADSERVER_URL", "GRADSERVER_CHANNEL"):
        environment.pop(variable, None)  # this run passes its own
    return environment


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reserve_stdout() -> Callable[[str], None]:
    """Reserve standard output for lines to the parent: all other output of this process goes to standard error."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(line: str) -> None:
        print(line, file=stream, flush=True)

    return tell


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the run in order, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # handlers can only be set there
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[set[int]]:
    """Block Ctrl-C and requests to end during work that must not be left half done.

    Yields the signals that were blocked before.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def before_exec(parent: int, mask: set[int], last: signal.Signals) -> None:
    """Request, in the child, a ``last`` signal when the parent ends. It ends daemons after their run was killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    die_with_parent(parent, last)


def die_with_parent(parent: int, last: int) -> None:
    """Request a ``last`` signal for this process when its parent ends, and end at once if it has."""
    _LIBC.prctl(_SET_DEATH_SIGNAL, last)
    if os.getppid() != parent:  # it ended before the request
        os._exit(1)
