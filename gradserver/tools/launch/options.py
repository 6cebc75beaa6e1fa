"""The options of `gradserver run`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradserver.tools.launch.hosts import Host


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one run.

    Attributes:
        command: the program of each worker, with its arguments, or the arguments of Python.
        is_python: whether Python runs it.
        folder: working directory of the workers.
        hosts: the hosts.
        nproc: number of workers of a host that has none of its own; `places.PER_GPU`, or None for the default.
        url: the coordinator's; None to start one.
        bind: where that one listens; None for a free port of the address that all hosts reach.
        serve: further options of it.
        restarts: how often each worker may be started again.
        minimum: number of workers without which the run goes on; None if it needs all.
        grace: seconds from a request to end until workers are killed.
        log_dir: folder for the output; None for none.
        all_gpus: whether each worker sees all GPUs of its host.
        rsh: the remote shell.
        python: Python on other hosts.
        pythonpath: PYTHONPATH of the workers.
        resume: checkpoint that jobs take, "latest" or "newest-whole"; None for that of the environment.
    """

    command: tuple[str, ...]
    is_python: bool
    folder: str
    hosts: tuple[Host, ...]
    nproc: int | str | None
    url: str | None
    bind: str | None
    serve: tuple[str, ...]
    restarts: int
    minimum: int | None
    grace: float
    log_dir: Path | None
    all_gpus: bool
    rsh: tuple[str, ...]
    python: str
    pythonpath: str | None
    resume: str | None = None

    @property
    def is_elastic(self) -> bool:
        """True if the group goes on without a worker that is lost, or until it is back."""
        return self.minimum is not None or self.restarts > 0
