"""A lane: a thread that does one thing after the other, in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from gradserver.worker.background import in_background

_LINGER_SECONDS: Final = 0.2
"""Seconds that the thread waits for more to do: another thread would take a tenth of a millisecond to start."""


class Lane:
    """Work that is done in its order, beside the threads that ask for it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: int | None = None
        """The thread's identity, while there is one."""
        self._is_running = self._is_busy = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have ``work``, which raises nothing, done after all that was submitted before."""
        with self._changed:
            self._due.append(work)
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                in_background(self._run, self._name)

    @property
    def is_idle(self) -> bool:
        """True if nothing is left to do."""
        with self._changed:
            return not self._due and not self._is_busy

    def settle(self) -> None:
        """Wait until nothing is left to do. In the lane's own thread it returns at once."""
        with self._changed:
            while (self._due or self._is_busy) and self._thread != threading.get_ident():
                self._changed.wait()

    def _run(self) -> None:
        with self._changed:
            self._thread = threading.get_ident()
            while self._due or self._changed.wait_for(lambda: self._due, _LINGER_SECONDS):
                work, self._is_busy = self._due.popleft(), True
                self._changed.release()
                try:
                    work()
                finally:
                    del work  # it refers to tensors
                    self._changed.acquire()
                    self._is_busy = False
                    self._changed.notify_all()
            self._thread, self._is_running = None, False
