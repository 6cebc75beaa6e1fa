"""The coordinator of a run: one that the launcher starts and ends, or another one at a URL."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gradserver.tools.common.processes import Child, RunError, inherited_environment, listening_url
from gradserver.tools.launch.failures import Failure

_WORDS = 12


class Coordinator:
    """A coordinator that the launcher has started. Its log is in ``folder``, or kept until it has ended.

    Attributes:
        url: its address; None until it listens.
        process: the process.
    """

    def __init__(self, bind: str, options: Sequence[str], folder: Path | None) -> None:
        self.url: str | None = None
        self._temporary = None if folder is not None else Path(tempfile.mkdtemp(prefix="gradserver-run-"))
        log = (folder or self._temporary or Path()) / "coordinator.log"
        command = ["-m", "gradserver", "serve", "--bind", bind, *options]
        self.process = Child("coordinator", command, inherited_environment(), log, keeps_log=True)

    def read(self) -> None:
        """Read the line that says where it listens."""
        self.process.read()
        for line in self.process.lines:
            self.url = self.url or listening_url(self.process, line)
        self.process.lines.clear()

    def failure(self, at: float) -> Failure:
        """Describe its end."""
        status = self.process.wait()
        report = "\n".join(self.process.last_words(_WORDS)).encode()
        where = f"process {self.process.process.pid}"
        return Failure("the coordinator", where, 1 if status is None else status, at, report)

    def cannot_start(self) -> RunError:
        """Return the error of a coordinator that ended before it listened: its own words."""
        self.process.wait()
        words = self.process.last_words(_WORDS) or [self.process.fate()]
        return RunError("the coordinator could not start:\n" + "\n".join(f"  {line}" for line in words))

    def close(self) -> None:
        """End it."""
        self.process.process.terminate()
        if self.process.wait() is None:
            self.process.process.kill()
            self.process.process.wait()
        self.process.hang_up()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
