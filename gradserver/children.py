"""Data shards that a coordinator starts as processes of its own host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gradserver.protocol.errors import CoordinatorError
from gradserver.protocol.url import parse_url

_PATIENCE_SECONDS: Final = 5.0
"""Time that data shards have to end by themselves."""
_COMING_SECONDS: Final = 10.0
"""Time that a data shard has to enlist before another one is started in its place."""
_SHORT_SECONDS: Final = 2.0
"""Lifetime below which a data shard is not replaced at once: the next one might end as soon."""
_MOST_KILLED: Final = 8
SHARD_TOKEN: Final = "GRADSERVER_SHARD_TOKEN"
"""Environment variable with the token that data shards show to the coordinator that started them."""
_LOCAL: Final = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Child(NamedTuple):
    """One process, the time of its start, and the number of shards that had enlisted by then."""

    process: subprocess.Popen[bytes]
    since: float
    enlisted: int


class Children:
    """Processes of data shards.

    They end when the coordinator does, also if it is killed: the kernel then closes their connections to it.

    Args:
        enlisted: returns how many of them have enlisted so far.
        token: secret by which the coordinator knows them; they find it in their environment.
    """

    def __init__(self, enlisted: Callable[[], int] = lambda: 0, token: str = "") -> None:
        self._enlisted, self._token = enlisted, token
        self._children: list[Child] = []
        self._killed = 0
        """Number of processes that were killed before all had enlisted."""
        self._command: list[str] = []

    def start(self, url: str, count: int, options: Sequence[str]) -> None:
        """Start ``count`` of them for the coordinator at ``url``."""
        host, port = parse_url(url)
        self._command = [sys.executable, "-P", "-m", "gradserver", "serve", "--bind", f"tcp://{host}:0", *options]
        self._command += ["--join", f"tcp://{_LOCAL.get(host, host)}:{port}", "--reconnect", "0"]
        for _ in range(count):
            self._start_one()

    def _start_one(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment[SHARD_TOKEN] = self._token
        process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # this process handles signals from the terminal, and tells its children
        )
        self._children.append(Child(process, time.monotonic(), self._enlisted()))

    def check(self) -> None:
        """Raise CoordinatorError if a process has ended by itself. Killed ones are replaced, up to a limit."""
        for child in list(self._children):
            process = child.process
            if process.poll() is not None and process.returncode < 0 and self._killed < _MOST_KILLED:
                self._killed += 1
                self._children.remove(child)
                self._start_one()
            elif process.poll() is not None:
                raise CoordinatorError(
                    f"a data shard could not start (status {process.returncode}); its output is above"
                )

    def replace(self) -> None:
        """Start a data shard in place of each that has ended, unless it ended soon after its start."""
        ended = [child for child in self._children if child.process.poll() is not None]
        for child in ended:
            self._children.remove(child)
            if time.monotonic() - child.since > _SHORT_SECONDS:
                self._start_one()

    def hire(self) -> None:
        """Start one more data shard, unless one is about to enlist."""
        recent = time.monotonic() - _COMING_SECONDS
        started = [child for child in self._children if child.since > recent]
        came = self._enlisted() - min((child.enlisted for child in started), default=0)
        if sum(child.process.poll() is None for child in started) <= (came if started else 0):
            self._start_one()

    def end(self) -> None:
        """Wait for the processes to end by themselves, as they do when the coordinator stops."""
        for process, _, _ in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_SECONDS)
        for process, _, _ in self._children:
            if process.poll() is None:
                process.kill()
                process.wait()
