"""The handling of SIGTERM, which spot machines send before they stop: jobs continue until they can stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from typing import Protocol


class Stoppable(Protocol):
    """A job."""

    def stop(self) -> None:
        """Stop as soon as possible."""


log = logging.getLogger("gradserver")

_jobs: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_process = os.getpid()


def stop_on_sigterm(job: Stoppable) -> None:
    """Call ``job.stop()`` on SIGTERM, for as long as the job is referenced.

    An existing handler stays, without a word: it can call ``stop``. A thread other than the main one cannot change
    handlers: a warning says what to do. A second SIGTERM ends the process at once.
    """
    global _process
    _jobs.add(job)
    present = signal.getsignal(signal.SIGTERM)
    is_of_parent = present is _on_sigterm and _process != os.getpid()  # this process was forked behind its first job
    if present is not signal.SIG_DFL and not is_of_parent:
        return
    if threading.current_thread() is not threading.main_thread():
        log.warning(
            "this job does not save on SIGTERM: it was made in the thread %r, and only the main thread can handle "
            "signals. Make the job in the main thread, or call job.stop() from a SIGTERM handler that is set there",
            threading.current_thread().name,
        )
        return
    _process = os.getpid()
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    if not _jobs or os.getpid() != _process:  # nothing to save, or a forked child of a loader's
        os.kill(os.getpid(), number)
    for job in list(_jobs):
        job.stop()
