"""The processes that the demo starts: their output as events in one queue."""

from __future__ import annotations

import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

from gradserver.processes import Child, Family, inherited_environment


class ProcessError(Exception):
    """A process ended before its time, or is silent. The text is for people, of several lines perhaps."""


class Processes(Family[Child]):
    """Starts processes and hears them; leaving the context ends every one that is still there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lines: Queue[tuple[Child, str | None]] = Queue()
        self._killed: set[Child] = set()
        self._environment = inherited_environment()
        # OpenMP threads that wait for each other spin, 300,000 times unless told otherwise. On a machine that is busy
        # with other things as well they so keep from its core the very thread they wait for: ten times slower.
        self._environment.setdefault("GOMP_SPINCOUNT", "1000")

    def start(self, name: str, *arguments: str, waits: bool = False) -> Child:
        """Starts ``python arguments…``, with its log in `folder` under its name. One that `waits` is told to `go`."""
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
        """Tells a process that waits for it to go on."""
        assert child.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is heard of by itself
            child.process.stdin.write("go\n")
            child.process.stdin.close()

    def kill(self, child: Child) -> None:
        """Ends a process by SIGKILL, as it was meant to be."""
        self._killed.add(child)
        child.process.kill()

    def stop(self) -> None:
        """Ends all processes that are still there."""
        for child in self.children:
            if child.process.stdin is not None:
                with suppress(BrokenPipeError):
                    child.process.stdin.close()
        super().stop()

    def next_line(self, timeout: float) -> tuple[Child, str | None]:
        """The next line that any process printed; None in its place when a process has ended in order, or was killed.

        Raises:
            ProcessError: a process ended with another status than 0, or nothing was heard for `timeout` seconds.
        """
        heard = self.line_within(timeout)
        if heard is None:
            raise self.silence(timeout)
        return heard

    def silence(self, seconds: float) -> ProcessError:
        """What to say when nothing was heard for so long."""
        running = [child.name for child in self.children if child.process.poll() is None]
        heard = f"nothing was heard from {', '.join(running) or 'any process'} for {seconds:.0f} s"
        return ProcessError(f"{heard}; the logs are in {self.folder}")

    def line_within(self, timeout: float) -> tuple[Child, str | None] | None:
        """The same; None if there is none in so many seconds."""
        try:
            child, line = self._lines.get(timeout=timeout)
            while child not in self.children:  # what a process said that has been stopped since
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
