"""The processes that a run starts: their output as events in one queue, and an end for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Self

STOP_SECONDS = 5.0  # between asking a process to end and killing it


class ProcessError(Exception):
    """A process ended before its time, or is silent. The text is for people, of several lines perhaps."""


class Child:
    """A Python process of this run. Its standard error goes to the file `log`."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *arguments],  # -P: what lies in the current folder must not be imported
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
            )

    def last_words(self, lines: int) -> list[str]:
        """The last lines of the log that are not empty."""
        text = self.log.read_text("utf-8", "replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._lines: Queue[tuple[Child, str | None]] = Queue()
        self._environment = _environment()

    def start(self, name: str, *arguments: str) -> Child:
        """Starts ``python arguments…``, with its log in `folder` under its name."""
        child = Child(name, arguments, self._environment, self.folder / f"{name.replace(' ', '-')}.log")
        self._children.append(child)
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        return child

    def next_line(self, timeout: float) -> tuple[Child, str | None]:
        """The next line that any process printed; None in its place when a process has ended in order.

        Raises:
            ProcessError: a process ended with another status than 0, or nothing was heard for `timeout` seconds.
        """
        try:
            child, line = self._lines.get(timeout=timeout)
            while child not in self._children:  # what a process said that has been stopped since
                child, line = self._lines.get(timeout=timeout)
        except Empty:
            running = [child.name for child in self._children if child.process.poll() is None]
            heard = f"nothing was heard from {', '.join(running) or 'any process'} for {timeout:.0f} s"
            raise ProcessError(f"{heard}; the logs are in {self.folder}") from None
        if line is None and _wait(child) != 0:
            raise ProcessError(self._autopsy(child))
        return child, line

    def stop(self) -> None:
        """Ends all processes that are still there: the last one started first, and kills those that stay."""
        try:
            for child in reversed(self._children):
                child.process.terminate()
            for child in reversed(self._children):
                _wait(child)
        finally:  # also when the user is impatient and interrupts the wait
            for child in self._children:
                child.process.kill()
                child.process.wait()
            self._children.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _listen(self, child: Child) -> None:
        assert child.process.stdout is not None
        with child.process.stdout as stream:
            for line in stream:
                self._lines.put((child, line.rstrip("\n")))
        self._lines.put((child, None))

    def _autopsy(self, first: Child) -> str:
        """What to say when `first` has failed. Others often fail of it: they get a moment to do so."""
        time.sleep(1.0)
        text = [f"{first.name} {first.fate()}"]
        words = first.last_words(12)
        text += ["its last words:", *(f"  | {line}" for line in words)] if words else ["it left no message"]
        for child in self._children:
            if child is not first and child.process.poll():
                text.append(f"then {child.name} {child.fate()}:")
                text += [f"  | {line}" for line in child.last_words(1)]
        return "\n".join([*text, f"the logs are in {self.folder}"])


def _wait(child: Child) -> int | None:
    """The status of a process that is about to end; None if it does not."""
    with suppress(subprocess.TimeoutExpired):
        return child.process.wait(STOP_SECONDS)
    return None


def _environment() -> dict[str, str]:
    """This process's environment, in which children find the same gradserver, installed or not."""
    environment = dict(os.environ)
    # OpenMP threads that wait for each other spin, 300,000 times unless told otherwise. On a machine that is busy
    # with other things as well they so keep from its core the very thread they wait for: ten times slower.
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment
