"""The processes of a benchmark: requests and answers are lines of JSON over pipes."""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gradserver import processes
from gradserver.bench.spec import BenchError

ERROR = '{"error":'
"""Beginning of an answer that reports an error."""

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Child(processes.Child):
    """Python process that answers requests. It gets the signal ``last`` when its parent has ended."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        prefix: Sequence[str] = (),
        last: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.unread = b""
        self.lines: list[str] = []
        self.ended = False
        # A signal during the fork would raise its exception in some module's fork hook, and be lost.
        with uninterrupted() as mask:
            super().__init__(
                name,
                arguments,
                environment,
                log,
                prefix,
                stdin=subprocess.PIPE,
                preexec_fn=partial(_before_exec, os.getpid(), mask, last),  # also where the parent is killed outright
            )

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send one request."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its end shows when its answer is read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> None:
        """Read the lines that the process has printed."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.ended = not data
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.lines += [line.decode("utf-8", "replace") for line in lines]

    def hang_up(self) -> None:
        """Close the pipes to the process."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


class Processes(processes.Family[Child]):
    """Processes of a fleet, with their output. Leaving the context ends all that still run."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self._selector = selectors.DefaultSelector()
        self._environment = {**single_threaded(), **(environment or {})}

    def start(self, name: str, *arguments: str, prefix: Sequence[str] = ()) -> Child:
        """Start ``prefix… python arguments…``, with its log in `folder` under its name."""
        child = Child(name, arguments, self._environment, self.log_of(name), prefix)
        self.children.append(child)
        assert child.process.stdout is not None
        self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
        return child

    def lines(self, children: Sequence[Child], timeout: float) -> list[str]:
        """Wait for the next line of each of `children`.

        Raises:
            BenchError: one of the run's processes reported an error, or has ended, or not all of `children` printed a
                line within `timeout` seconds.
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
                    raise BenchError(self.autopsy(child))
            if left <= 0:
                silent = ", ".join(child.name for child in children if not child.lines)
                raise BenchError(f"nothing was heard from {silent} for {timeout:.0f} s")
        return [child.lines.pop(0) for child in children]

    def answers(self, children: Sequence[Child], timeout: float) -> list[dict[str, Any]]:
        """Wait for the next answer of each of `children`, as `lines` does."""
        return [json.loads(line) for line in self.lines(children, timeout)]

    def stop(self) -> None:
        """End all processes that still run, and close their pipes."""
        children = list(self.children)
        try:
            super().stop()
        finally:
            for child in children:
                child.hang_up()
            self._selector.close()


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


_LIBC = ctypes.CDLL(None)


def _before_exec(parent: int, mask: set[int], last: signal.Signals) -> None:
    """Request, in the child, a ``last`` signal when the parent ends. It ends daemons whose run was killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _LIBC.prctl(_SET_DEATH_SIGNAL, last)
    if os.getppid() != parent:  # it ended before the request
        os._exit(1)


def single_threaded() -> dict[str, str]:
    """Make the environment of processes that compute with one thread each."""
    environment = processes.inherited_environment()
    # One thread for each process: otherwise the thread pools of several libraries compete for the cores, which
    # distorts the measurement.
    environment.update(dict.fromkeys(_ONE_THREAD, "1"))
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GRADSERVER_URL", "GRADSERVER_CHANNEL"):
        environment.pop(variable, None)  # this run passes its own
    return environment
