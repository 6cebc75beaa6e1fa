"""The processes of a run: each has a log, and all of them are ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar

STOP_SECONDS = 5.0  # between asking a process to end and killing it
_LAST_WORDS = 12


class Child:
    """Process ``prefix… python arguments…``. Its standard error goes to the file `log`.

    `options` are further options of Popen.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        prefix: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as errors:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                [*prefix, sys.executable, "-P", *arguments],  # -P: the current folder must not be imported from
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
                **options,
            )

    def wait(self) -> int | None:
        """Wait for a process that is about to end. Return its status; None if it does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(STOP_SECONDS)
        return None

    def last_words(self, lines: int) -> list[str]:
        """Return the last lines of the log that are not empty."""
        text = self.log.read_text("utf-8", "replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def fate(self) -> str:
        """Describe how the process ended."""
        status = self.process.poll()
        if status is None:
            return "is running"
        if status < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"


C = TypeVar("C", bound=Child)


class Family(Generic[C]):
    """Processes of one run, with their logs in `folder`. Leaving the context ends all that still run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[C] = []
        """Processes that have been started and not yet stopped, in the order of their start."""

    def log_of(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.folder / f"{name.replace(' ', '-')}.log"

    def stop(self) -> None:
        """End all processes, the last one started first, and kill those that do not end."""
        try:
            for child in reversed(self.children):
                child.process.terminate()
            for child in reversed(self.children):
                child.wait()
        finally:  # also when the user is impatient and interrupts the wait
            for child in self.children:
                child.process.kill()
                child.process.wait()
            self.children.clear()

    def autopsy(self, first: Child) -> str:
        """Describe the failure of `first`, and of others that fail as a consequence within a moment."""
        time.sleep(1.0)
        text = [f"{first.name} {first.fate()}"]
        words = first.last_words(_LAST_WORDS)
        text += ["its last output:", *(f"  | {line}" for line in words)] if words else ["its log is empty"]
        for child in self.children:
            if child is not first and child.process.poll():
                text.append(f"then {child.name} {child.fate()}:")
                text += [f"  | {line}" for line in child.last_words(1)]
        return "\n".join(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def inherited_environment() -> dict[str, str]:
    """Copy this process's environment, so that children find the same gradserver, installed or not."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the run in order, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # handlers can only be set there
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
