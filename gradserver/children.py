"""Data shards that a coordinator starts as processes of its own host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from protocol.errors import CoordinatorError
from protocol.url import parse_url

_PATIENCE_SECONDS: Final = 5.0
"""How long they may take to end by themselves."""
_LOCAL: Final = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Children:
    """Processes, each of them a data shard.

    They end when the coordinator does, also if it is killed: the kernel then closes their connections to it.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, url: str, count: int, options: Sequence[str]) -> None:
        """Start ``count`` of them for the coordinator at ``url``."""
        host, port = parse_url(url)
        command = [sys.executable, "-P", "-m", "gradserver", "serve", "--bind", f"tcp://{host}:0", *options]
        command += ["--join", f"tcp://{_LOCAL.get(host, host)}:{port}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._processes += [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a signal from the terminal is ours to handle, and they hear of it from us
            )
            for _ in range(count)
        ]

    def check(self) -> None:
        """CoordinatorError if one has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise CoordinatorError(
                    f"a data shard's process could not start (status {process.returncode}); what it said is above"
                )

    def end(self) -> None:
        """Wait for them to end by themselves, as they do when they are told that the coordinator stops."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_SECONDS)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
