"""The processes of the demo: their lines as events in one queue."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Final

from gradserver.tools.common.forks import Copies
from gradserver.tools.common.processes import Child, Family, RunError, inherited_environment

_IMPORTS: Final = (
    "gradserver.tools.demo.corpus",
    "gradserver.tools.demo.train",
    "gradserver.worker.connect",
    "gradserver.worker.torch_ddp.ddp",
    "torch._dynamo",  # the first optimizer of a process imports it
)
"""Imports of processes that train, which take seconds of a processor."""


class Processes(Family):
    """Processes of a demo, with their lines. Leaving the context ends all that still run."""

    def __init__(self, folder: Path) -> None:
        # OpenMP threads that wait for each other spin, by default 300,000 times. On a busy machine they so keep the
        # thread that they wait for from its core, which is ten times slower.
        super().__init__(folder, {"GOMP_SPINCOUNT": "1000", **inherited_environment()})
        self._copies = Copies(_IMPORTS, self._environment, folder / "forks.log")
        self._unread: deque[tuple[Child, str | None]] = deque()
        self._killed: set[Child] = set()

    def start_trainer(self, name: str, *arguments: str, patience: float) -> Child:
        """Start ``python arguments…``, of a module that imports torch. All are copies of one that has imported it.

        The first call waits until it has, ``patience`` seconds at most.
        """
        return self.start(name, *arguments, starter=self._copies.starter(patience))

    def close(self) -> None:
        """End all processes. None can be started afterwards."""
        try:
            super().close()
        finally:
            self._copies.close()

    def kill(self, child: Child) -> None:
        """Kill a process on purpose, by SIGKILL."""
        self._killed.add(child)
        child.process.kill()

    def stop(self) -> None:
        """End all processes that still run, and forget their lines."""
        super().stop()
        self._unread.clear()

    def next_line(self, timeout: float) -> tuple[Child, str | None]:
        """Wait for the next line of any process; None for the line when a process has ended in order, or was killed.

        Raises:
            RunError: a process ended with another status than 0, or no line came within `timeout` seconds.
        """
        heard = self.line_within(timeout)
        if heard is None:
            raise self.silence(timeout)
        return heard

    def silence(self, seconds: float) -> RunError:
        """Make the error for processes that were silent for so long."""
        running = [child.name for child in self.children if child.process.poll() is None]
        heard = f"nothing was heard from {', '.join(running) or 'any process'} for {seconds:.0f} s"
        return RunError(f"{heard}; the logs are in {self.folder}")

    def line_within(self, timeout: float) -> tuple[Child, str | None] | None:
        """Wait for the next line as `next_line` does; None if there is none within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not self._unread:
            left = deadline - time.monotonic()
            for child in self.hear(left):
                self._unread += [(child, line) for line in child.lines]
                child.lines.clear()
                if child.ended:
                    self._unread.append((child, None))
            if left <= 0 and not self._unread:
                return None
        child, line = self._unread.popleft()
        if line is None:
            child.process.wait()  # on a busy machine it may take seconds to end
            if child in self._killed:
                self.children.remove(child)
                child.hang_up()
            elif child.process.returncode != 0:
                raise RunError(f"{self.autopsy(child)}\nthe logs are in {self.folder}")
        return child, line
