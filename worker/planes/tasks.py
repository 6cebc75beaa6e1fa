"""Tasks of a lane, of which another thread waits for the outcome with a signal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradserver.worker.planes.communicator import Signal
from gradserver.worker.planes.lane import Lane

Task = Callable[[], object]


class Done:
    """Outcome of a task.

    Attributes:
        is_done: true if there is one.
        value: what the task returned.
        signal: what is woken when the task is done.
    """

    def __init__(self, signal: Signal) -> None:
        self.is_done = False
        self.value: Any = None
        self.signal = signal

    def come(self, value: object = None) -> None:
        """Note that the task is done, and wake the thread that waits."""
        self.value, self.is_done = value, True
        self.signal.wake()


class Tasks:
    """Tasks that are done in order, until one fails or they are ended. What comes after that is not done.

    Attributes:
        error: what ended them; None if nothing did.
    """

    def __init__(self, name: str) -> None:
        self.error: Exception | None = None
        self._lane = Lane(name)

    def do(self, task: Task, signal: Signal) -> Done:
        """Have a task done. ``signal`` is woken when it is done, or is not to be done."""
        done = Done(signal)
        self._lane.submit(lambda: self._run(task, done))
        return done

    def end(self, error: Exception) -> None:
        """End behind the present task."""
        self.error = self.error or error

    def _run(self, task: Task, done: Done) -> None:
        if self.error is None:
            try:
                done.come(task())
                return
            except Exception as error:  # of torch, or of the session: the thread that waits is to have any
                self.end(error.with_traceback(None))  # frames refer to reductions, and these to sockets
        done.signal.wake()
