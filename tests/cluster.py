"""Running systems for tests: coordinators and workers as threads of the test, or as processes of their own.

Everything that a test starts with these ends with its ``with`` block. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

import pytest

import gradserver
from gradserver.engine import Engine
from gradserver.engine.policy import Policy, on_non_finite
from gradserver.local import LocalCluster
from gradserver.protocol.compiled import loader
from gradserver.protocol.limits import CREDIT_BYTES, OTHERS
from gradserver.protocol.means import mean_of
from gradserver.runtime import Runtime
from gradserver.status import fetch
from gradserver.transport.server import TcpServer
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.fork_server import KERNELS, Child, fork_server

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

ROOT = Path(gradserver.__file__).resolve().parent.parent
PATHS = os.pathsep.join((str(ROOT / "tests" / "without_compiler"), str(ROOT)))
"""PYTHONPATH of programs that compile nothing."""
PROGRAMS = Path(__file__).with_name("worker_programs.py")

PATIENCE = 30.0
"""Seconds after which an expected event will not happen any more."""
STARTED_WITHIN = 90.0
"""The same for several programs that load torch at once, on machines that may be busy."""
BUSY = 15.0
"""Seconds that a busy machine may add to what is promised: less than `PATIENCE`, and than the workers' timeout."""
TIMEOUT = 20.0
"""The workers' own timeout, unless a test is about it. It is shorter, so that an error with names comes first."""

AMONG_MEMBERS = [pytest.param(plane, marks=pytest.mark.long) for plane in ("direct", "hierarchical")]
"""Names of planes on which members reduce among themselves, as parameters of long tests, for `members`."""

# ── calls in threads ──────────────────────────────────────────────────────────────────────────────────


class Task(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(partial(fn, *args, **kwargs),), daemon=True)
        self._thread.start()

    def _run(self, fn: Callable[[], T]) -> None:
        try:
            self._value = fn()
        except BaseException as error:
            self._error = error

    def ended(self, timeout: float = PATIENCE) -> bool:
        """Return whether the call has returned, or raised, within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self, timeout: float = PATIENCE) -> T:
        """Return the call's result, or raise its error."""
        assert self.ended(timeout), f"not done after {timeout:g} s"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def error(self, kind: type[E], timeout: float = PATIENCE) -> E:
        """Return the call's error, which must be a ``kind``."""
        try:
            value = self.result(timeout)
        except kind as error:
            return error
        raise AssertionError(f"returned {value!r} and should have raised {kind.__name__}")


def together(
    subjects: Iterable[S], fn: Callable[Concatenate[S, P], T], /, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Call ``fn(subject, …)`` for all subjects at once. Return the results, or raise the first one's error."""
    tasks = [Task(fn, subject, *args, **kwargs) for subject in subjects]
    return [task.result() for task in tasks]


def errors(kind: type[E], subjects: Iterable[S], fn: Callable[[S], object]) -> list[E]:
    """Call ``fn(subject)`` for all subjects at once. Return the errors, which must be of ``kind``."""
    tasks = [Task(fn, subject) for subject in subjects]
    return [task.error(kind) for task in tasks]


def wait_until(condition: Callable[[], T], what: str, timeout: float = PATIENCE) -> T:
    """Wait until ``condition()`` is true, and return its value."""
    until = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < until, f"after {timeout:g} s still not: {what}"
        time.sleep(0.001)
    return value


def add_waiting(cluster: LocalCluster, count: int = 1, name: str | None = None) -> None:
    """Add workers to the cluster, and return when they wait to come in."""

    def stages() -> list[str]:
        groups: Any = cluster.snapshot()["groups"]
        return [learner["stage"] for learner in groups["local"]["joining"]]

    for _ in range(count):
        cluster.add(name)
    wait_until(lambda: stages() == ["waiting"] * count, "they wait to come in")


# ── a system in threads ───────────────────────────────────────────────────────────────────────────────


@contextmanager
def coordinator(
    worlds: Mapping[str, int | Policy] | None = None,
    *,
    credit: int = CREDIT_BYTES,
    bind: str = "tcp://127.0.0.1:0",
    nonfinite: str = "halt",
    mean: str = "plain",
) -> Iterator[TcpServer]:
    """Run a coordinator in a thread of the test, on a free port if ``bind`` names none."""
    told: Mapping[str, int | Policy] = worlds or {OTHERS: Policy(mean=mean_of(mean))}
    runtime = Runtime(Engine(told, credit, nonfinite=on_non_finite(nonfinite)))
    server = TcpServer(runtime, bind)
    task = Task(server.run)
    try:
        yield server
    finally:
        server.request_stop("the test is over")
        task.result()
        server.close()
        runtime.close()


@contextmanager
def joined(
    url: str,
    world_size: int,
    *,
    group: str = "default",
    timeout: float = TIMEOUT,
    channel: str | None = None,
    plane: str | None = None,
) -> Iterator[list[Worker]]:
    """Join a complete group at ``url``. Its workers, by rank, are called ``w0``, ``w1``, …"""

    def join(rank: int) -> Worker:
        return connect(url, rank, world_size, group, f"w{rank}", timeout, channel, plane=plane)

    with ExitStack() as stack:
        yield [stack.enter_context(worker) for worker in together(range(world_size), join)]


@contextmanager
def members(
    channel: str,
    world_size: int,
    *,
    timeout: float = TIMEOUT,
    credit: int = CREDIT_BYTES,
    nonfinite: Any = "halt",
    mean: str = "plain",
) -> Iterator[list[Worker]]:
    """Join a group over ``channel``, "memory", "shm" or "tcp", all of it in threads of this process.

    With "direct" they have the channel "tcp" and the direct plane. With "hierarchical" they have that plane, and each
    host has two of them.
    """
    if channel == "memory":
        with LocalCluster(world_size, timeout=timeout, credit=credit, nonfinite=nonfinite, mean=mean) as cluster:
            yield cluster.workers
    elif channel == "hierarchical":
        from tests.hosts import hosted

        hosts = [f"host-{rank // 2}" for rank in range(world_size)]
        with (
            coordinator(credit=credit, nonfinite=nonfinite, mean=mean) as server,
            hosted(hosts, server.url, timeout=timeout) as workers,
        ):
            yield workers
    else:
        with (
            coordinator(credit=credit, nonfinite=nonfinite, mean=mean) as server,
            joined(
                server.url,
                world_size,
                timeout=timeout,
                channel="tcp" if channel == "direct" else channel,
                plane="direct" if channel == "direct" else None,
            ) as workers,
        ):
            yield workers


class Gather(Protocol):
    """The maker of a group over the channel that a test is run with: the fixture ``gather``."""

    def __call__(
        self, world_size: int, *, timeout: float = ..., credit: int = ..., nonfinite: str = ..., mean: str = ...
    ) -> list[Worker]: ...


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────


def marked(name: str, value: str) -> dict[int, list[str]]:
    """Return the command of each process that has a variable with this value in its environment, by its id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
    return found


class _Lines:
    """The lines that a process prints, read by a thread so that no pipe is ever full."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: list[str] = []
        self._given = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def next(self, start: str, timeout: float) -> str | None:
        """Return what follows ``start`` in the next line that begins with it; None if none came."""
        until = time.monotonic() + timeout
        with self._changed:
            while True:
                for index in range(self._given, len(self._lines)):
                    if self._lines[index].startswith(start):
                        self._given = index + 1
                        return self._lines[index].removeprefix(start)
                left = until - time.monotonic()
                if self._ended or left <= 0:
                    return None
                self._changed.wait(left)

    def all(self) -> list[str]:
        """Return every line so far."""
        with self._changed:
            return list(self._lines)

    def rest(self) -> list[str]:
        """Return every line, once the process has ended."""
        self._thread.join(PATIENCE)
        return self.all()


class Program:
    """A Python process. Its ``with`` block ends it, whatever it is doing.

    It begins with what it needs ``loaded``, one of `tests.fork_server.LOADED`. Nothing is loaded where that is empty,
    for a few lines of a script, and for other kernels than those of the tests. With torch it ends soon, unless it fails
    or has to end ``as_usual``.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        loaded: str = "numpy",
        as_usual: bool = False,
    ) -> None:
        given = {**os.environ, **(environment or {})}
        is_as_loaded = given.get(loader.VARIABLE, loader.AUTO) == KERNELS
        is_copy = bool(loaded) and arguments[0] != "-c" and is_as_loaded
        environment = {**given, "PYTHONPATH": PATHS if is_copy else str(ROOT), **(environment or {})}
        self._process: subprocess.Popen[str] | Child
        if is_copy:
            ends_soon = loaded == "torch" and not as_usual
            self._process = fork_server(loaded).start(arguments, environment, ends_soon)
        else:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = _Lines(self._process.stdout), _Lines(self._process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._out.rest()
        self._err.rest()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def expect(self, start: str, timeout: float = PATIENCE) -> str:
        """Wait for the next line on stdout that begins with ``start``. Return the rest of that line."""
        line = self._out.next(start, timeout)
        assert line is not None, f"no line {start!r} within {timeout:g} s\n{self._said()}"
        return line

    def tell(self, line: str = "") -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hang_up(self) -> None:
        """Close its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def lines(self) -> list[str]:
        """Return all that it has said, once it has ended."""
        return self._out.rest()

    def end(self, timeout: float = PATIENCE) -> int:
        """Wait until the process ends by itself. Return its exit status."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s\n{self._said()}") from None

    def output(self) -> list[str]:
        """Return all lines of stdout; the process has ended."""
        return self._out.rest()

    def so_far(self) -> list[str]:
        """Return the lines of stdout that have come."""
        return self._out.all()

    def complaints(self) -> list[str]:
        """Return all lines of stderr; the process has ended."""
        return self._err.rest()

    def memory(self, what: str = "VmRSS") -> int:
        """Return the bytes of memory that it uses, or (VmHWM) has used at most."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith(f"{what}:")]
        return int(line.split()[1]) * 1024

    def _said(self) -> str:
        return "\n".join(["stdout:", *self._out.all(), "stderr:", *self._err.all()])


class Daemon(Program):
    """A process of ``gradserver serve`` on a free port. It is ready when it is constructed."""

    def __init__(self, *options: str, loaded: str = "numpy") -> None:
        super().__init__("-m", "gradserver", "serve", "--bind", "tcp://127.0.0.1:0", *options, loaded=loaded)
        try:
            self.url = self.expect("listening on ")
        except BaseException:
            self.__exit__()
            raise

    def snapshot(self) -> dict[str, Any]:
        """Return the coordinator's snapshot."""
        return fetch(self.url)

    def group(self, name: str = "default") -> dict[str, Any]:
        """Return the snapshot of one group; empty if there is none."""
        group: dict[str, Any] = self.snapshot()["groups"].get(name, {})
        return group


def worker_program(
    url: str, name: str, /, rank: int = 0, world_size: int = 1, channel: str = "auto", **arguments: Any
) -> Program:
    """Start a process that joins a group at ``url`` and runs the function ``name`` of `worker_programs`.

    ``group`` in ``arguments`` names the group, if it is not the default one; the others are the function's.
    """
    words = str(PROGRAMS), name, url, str(rank), str(world_size), json.dumps(arguments)
    return Program(*words, environment={"GRADSERVER_CHANNEL": channel})
