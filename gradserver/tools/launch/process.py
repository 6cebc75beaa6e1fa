"""One process that an agent has started: its output, its end, and the children that it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gradserver.tools.common.processes import before_exec

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class CannotStartError(Exception):
    """A command that cannot be started. The text says why, and ``status`` is what a shell would return."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Process:
    """A process in a session of its own. It is killed when its agent ends.

    Args:
        number: number by which the launcher knows it.
        command: the program and its arguments.
        environment: its whole environment.
        folder: its working directory.

    Attributes:
        streams: descriptors of its open outputs, each with 1 for standard output and 2 for standard error.
        status: its exit status, or minus the signal that ended it; None until it is buried.
    """

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        self.number = number
        self.status: int | None = None
        _check_folder(folder)
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # with its children it is one group, which signals reach together
                preexec_fn=partial(before_exec, os.getpid(), set(), signal.SIGKILL),
            )
        except OSError as error:
            raise _cannot_start(command[0], error) from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pipes = {pipe.fileno(): pipe for pipe in (self._process.stdout, self._process.stderr)}
        self.streams = dict(zip(self._pipes, (1, 2), strict=True))
        for descriptor in self.streams:
            os.set_blocking(descriptor, False)

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def close(self, descriptor: int) -> None:
        """Close an output that has ended."""
        del self.streams[descriptor]
        self._pipes.pop(descriptor).close()

    def bury(self) -> None:
        """Take the exit status of the process, which has ended."""
        self.status = self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the process alone: what its children are to do is its own affair."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def send_group(self, number: int) -> bool:
        """Send a signal to all that is left of its group. False if nothing is."""
        return send_to(-self.pid, number)


def send_to(pid: int, number: int) -> bool:
    """Send a signal to a process, or to the group -``pid``. False if there is none, or it is another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _check_folder(folder: str) -> None:
    """Raise CannotStartError if the working directory is missing: Popen's own error would not say which file it is."""
    if not Path(folder).is_dir():
        raise CannotStartError(f"there is no folder {folder}", _NOT_FOUND)


def _cannot_start(program: str, error: OSError) -> CannotStartError:
    if isinstance(error, FileNotFoundError):
        return CannotStartError(f"there is no program {program!r}", _NOT_FOUND)
    return CannotStartError(f"{program!r} cannot be run: {error.strerror}", _NOT_EXECUTABLE)
