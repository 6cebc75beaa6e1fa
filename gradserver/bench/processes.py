"""The processes of a run: asked and heard in lines of JSON over pipes, and ended whatever happens."""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from gradserver.bench.spec import BenchError

ERROR = '{"error":'
"""How an answer begins that says what went wrong."""

STOP_SECONDS = 5.0  # between asking a process to end and killing it
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Child:
    """A Python process of this run. Its standard error goes to the file `log`."""

    def __init__(
        self, name: str, prefix: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self.unread = b""
        self.lines: list[str] = []
        self.ended = False
        # A signal that comes while we fork would raise its exception in some module's hook for that, and be lost.
        with log.open("wb") as errors, uninterrupted() as mask:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", *arguments],  # -P: the current folder must not be imported from
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
                preexec_fn=partial(_before_exec, os.getpid(), mask),  # also where the parent is killed outright
            )

    def tell(self, message: Mapping[str, Any]) -> None:
        """Sends one request."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # that it has ended shows when its answer is read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> None:
        """Takes what the process has printed."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.ended = not data
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.lines += [line.decode("utf-8", "replace") for line in lines]

    def last_words(self, count: int) -> list[str]:
        """The last lines of the log that are not empty."""
        text = self.log.read_text("utf-8", "replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]

    def fate(self) -> str:
        """How the process ended, in words."""
        status = self.process.poll()
        if status is None:
            return "is running"
        if status < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"


class Processes:
    """Starts processes and hears them; leaving the context ends every one that is still there."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._environment = {**_environment(), **(environment or {})}

    def start(self, name: str, *arguments: str, prefix: Sequence[str] = ()) -> Child:
        """Starts ``prefix… python arguments…``, with its log in `folder` under its name."""
        log = self.folder / f"{name.replace(' ', '-')}.log"
        child = Child(name, prefix, arguments, self._environment, log)
        self._children.append(child)
        assert child.process.stdout is not None
        self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
        return child

    def lines(self, children: Sequence[Child], timeout: float) -> list[str]:
        """The next line of each of `children`.

        Raises:
            BenchError: one of the run's processes reported an error, or has ended, or not all of `children` were
                heard within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not all(child.lines for child in children):
            left = deadline - time.monotonic()
            for key, _ in self._selector.select(max(0.0, left)):
                child: Child = key.data
                child.read()
                for line in child.lines:
                    if line.startswith(ERROR):  # at once: the others may wait for this one for minutes
                        raise BenchError(f"{child.name}: {json.loads(line)['error']}")
                if child.ended:
                    raise BenchError(self._autopsy(child))
            if left <= 0:
                silent = ", ".join(child.name for child in children if not child.lines)
                raise BenchError(f"nothing was heard from {silent} for {timeout:.0f} s")
        return [child.lines.pop(0) for child in children]

    def answers(self, children: Sequence[Child], timeout: float) -> list[dict[str, Any]]:
        """The next answer of each of `children`, as `lines`."""
        return [json.loads(line) for line in self.lines(children, timeout)]

    def stop(self) -> None:
        """Ends all processes that are still there: the last one started first, and kills those that stay."""
        try:
            for child in reversed(self._children):
                child.process.terminate()
            for child in reversed(self._children):
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(STOP_SECONDS)
        finally:  # also when the user is impatient and interrupts the wait
            for child in self._children:
                child.process.kill()
                child.process.wait()
                for stream in (child.process.stdin, child.process.stdout):
                    assert stream is not None
                    with suppress(BrokenPipeError):
                        stream.close()
            self._children.clear()
            self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _autopsy(self, first: Child) -> str:
        """What to say when `first` has ended before its time. Others often fail of it: they get a moment to do so."""
        with suppress(subprocess.TimeoutExpired):
            first.process.wait(1.0)
        text = [f"{first.name} {first.fate()}"]
        words = first.last_words(12)
        text += ["its last words:", *(f"  | {line}" for line in words)] if words else ["it left no message"]
        for child in self._children:
            if child is not first and child.process.poll():
                text.append(f"then {child.name} {child.fate()}:")
                text += [f"  | {line}" for line in child.last_words(1)]
        return "\n".join(text)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Lets a request to end, or a closed terminal, end the run in order, as Ctrl-C does."""

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
    """Holds back Ctrl-C and requests to end until the block is through: for what must not be left half done.

    Yields the signals that were held back before.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LIBC = ctypes.CDLL(None)


def _before_exec(parent: int, mask: set[int]) -> None:
    """In the child: SIGTERM when the parent is gone. Nobody else would end a daemon whose run was killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def _environment() -> dict[str, str]:
    """This process's environment, in which children find the same gradserver, and compute with one thread each."""
    environment = dict(os.environ)
    # One thread for each process: otherwise the pools of several libraries fight for the cores, and what is
    # measured is that fight.
    environment.update(dict.fromkeys(_ONE_THREAD, "1"))
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GRADSERVER_URL", "GRADSERVER_CHANNEL"):
        environment.pop(variable, None)  # this run's own are given by hand
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment
