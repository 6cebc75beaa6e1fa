"""The handling of SIGTERM, which spot machines send before they stop: jobs continue until they can stop."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Protocol


class Stoppable(Protocol):
    """A job."""

    def stop(self) -> None:
        """Stop as soon as possible."""


_jobs: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_process = os.getpid()


def stop_on_sigterm(job: Stoppable) -> None:
    """Call ``job.stop()`` on SIGTERM, for as long as the job is referenced.

    An existing handler stays. In a thread other than the main one, which cannot change handlers, nothing changes. A
    second SIGTERM ends the process at once.
    """
    global _process
    _jobs.add(job)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _process = os.getpid()
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    if not _jobs or os.getpid() != _process:  # nothing to save, or a forked child of a loader's
        os.kill(os.getpid(), number)
    for job in list(_jobs):
        job.stop()
