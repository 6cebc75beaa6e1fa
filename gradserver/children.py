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
"""How long they may take to end by themselves."""
_COMING_SECONDS: Final = 10.0
"""How long one may take to enlist, before another one is started in its place."""
_SHORT_SECONDS: Final = 2.0
"""Whoever ends so soon is not replaced at once: the next one might do the same."""
_MOST_KILLED: Final = 8
SHARD_TOKEN: Final = "GRADSERVER_SHARD_TOKEN"
"""The environment's variable in which a coordinator tells the data shards that it starts what to show."""
_LOCAL: Final = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Child(NamedTuple):
    """One process; when it was started, and how many shards had enlisted until then."""

    process: subprocess.Popen[bytes]
    since: float
    enlisted: int


class Children:
    """Processes, each of them a data shard.

    They end when the coordinator does, also if it is killed: the kernel then closes their connections to it.

    Args:
        enlisted: says how many of them have enlisted so far.
        token: what they show to the coordinator, so that it knows them; they find it in their environment.
    """

    def __init__(self, enlisted: Callable[[], int] = lambda: 0, token: str = "") -> None:
        self._enlisted, self._token = enlisted, token
        self._children: list[Child] = []
        self._killed = 0
        """How many were, before all were there."""
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
            start_new_session=True,  # a signal from the terminal is ours to handle, and they hear of it from us
        )
        self._children.append(Child(process, time.monotonic(), self._enlisted()))

    def check(self) -> None:
        """CoordinatorError if one has ended by itself. One that was killed is replaced, but for some times only."""
        for child in list(self._children):
            process = child.process
            if process.poll() is not None and process.returncode < 0 and self._killed < _MOST_KILLED:
                self._killed += 1
                self._children.remove(child)
                self._start_one()
            elif process.poll() is not None:
                raise CoordinatorError(
                    f"a data shard's process could not start (status {process.returncode}); what it said is above"
                )

    def replace(self) -> None:
        """Start another one for each that has ended, unless that was soon after it was started."""
        ended = [child for child in self._children if child.process.poll() is not None]
        for child in ended:
            self._children.remove(child)
            if time.monotonic() - child.since > _SHORT_SECONDS:
                self._start_one()

    def hire(self) -> None:
        """Start one more, unless one is just coming."""
        recent = time.monotonic() - _COMING_SECONDS
        started = [child for child in self._children if child.since > recent]
        came = self._enlisted() - min((child.enlisted for child in started), default=0)
        if sum(child.process.poll() is None for child in started) <= (came if started else 0):
            self._start_one()

    def end(self) -> None:
        """Wait for them to end by themselves, as they do when they are told that the coordinator stops."""
        for process, _, _ in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_SECONDS)
        for process, _, _ in self._children:
            if process.poll() is None:
                process.kill()
                process.wait()
