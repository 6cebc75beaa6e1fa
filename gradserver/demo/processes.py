"""The processes that the demo starts: their output as events in one queue."""

from __future__ import annotations

import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

from gradserver.processes import Child, Family, inherited_environment


class ProcessError(Exception):
    """A process ended early, or is silent. The text is for people, perhaps in several lines."""


class Processes(Family[Child]):
    """Processes of a demo, with their output. Leaving the context ends all that still run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lines: Queue[tuple[Child, str | None]] = Queue()
        self._killed: set[Child] = set()
        self._environment = inherited_environment()
        # OpenMP threads that wait for each other spin, by default 300,000 times. On a busy machine they so keep the
        # thread that they wait for from its core, which is ten times slower.
        self._environment.setdefault("GOMP_SPINCOUNT", "1000")

    def start(self, name: str, *arguments: str, waits: bool = False) -> Child:
        """Start ``python arguments…``, with its log in `folder` under its name. With `waits` it begins after `go`."""
        child = Child(
            name,
            arguments,
            self._environment,
            self.log_of(name),
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
        self.children.append(child)
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        return child

    def go(self, child: Child) -> None:
        """Let a waiting process begin."""
        assert child.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is reported elsewhere
            child.process.stdin.write("go\n")
            child.process.stdin.close()

    def kill(self, child: Child) -> None:
        """Kill a process on purpose, by SIGKILL."""
        self._killed.add(child)
        child.process.kill()

    def stop(self) -> None:
        """End all processes that still run."""
        for child in self.children:
            if child.process.stdin is not None:
                with suppress(BrokenPipeError):
                    child.process.stdin.close()
        super().stop()

    def next_line(self, timeout: float) -> tuple[Child, str | None]:
        """Wait for the next line of any process; None for the line when a process has ended in order, or was killed.

        Raises:
            ProcessError: a process ended with another status than 0, or no line came within `timeout` seconds.
        """
        heard = self.line_within(timeout)
        if heard is None:
            raise self.silence(timeout)
        return heard

    def silence(self, seconds: float) -> ProcessError:
        """Make the error for processes that were silent for so long."""
        running = [child.name for child in self.children if child.process.poll() is None]
        heard = f"nothing was heard from {', '.join(running) or 'any process'} for {seconds:.0f} s"
        return ProcessError(f"{heard}; the logs are in {self.folder}")

    def line_within(self, timeout: float) -> tuple[Child, str | None] | None:
        """Wait for the next line as `next_line` does; None if there is none in so many seconds."""
        try:
            child, line = self._lines.get(timeout=timeout)
            while child not in self.children:  # a line of a process that has been stopped since
                child, line = self._lines.get(timeout=timeout)
        except Empty:
            return None
        if line is None and child in self._killed:
            self.children.remove(child)
        elif line is None and child.process.returncode != 0:
            raise ProcessError(f"{self.autopsy(child)}\nthe logs are in {self.folder}")
        return child, line

    def _listen(self, child: Child) -> None:
        assert child.process.stdout is not None
        with child.process.stdout as stream:
            for line in stream:
                self._lines.put((child, line.rstrip("\n")))
        child.process.wait()  # on a busy machine it may take seconds to end
        self._lines.put((child, None))
