"""Signal handlers that raise, put off while an exchange is worked on.

Python runs signal handlers in the main thread, between any two steps of whatever it does. A handler that raises there,
as that of Ctrl-C does, would leave an exchange half worked on: a message taken and not settled, a slice counted as sent
that is not. Therefore the main thread puts handlers off while it works on exchanges, and lets them run while it waits
for something to come. What a raising handler interrupts is thus either done, or can be waited for again.

Handlers are called through a stand-in, from the first exchange of the main thread on. To put handlers off then costs
half a microsecond, and to replace them for each exchange would cost five. Other threads run no handlers.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal.getsignal makes enumerations, ten times as slow
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Handler = Callable[[int, FrameType | None], Any]

_SIGNALS: Final = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)))
"""Signals whose handlers are known to raise: Ctrl-C, and what schedulers, notebooks and time limits send."""

_get: Final[Callable[[int], Any]] = _signal.getsignal
_ident: Final = threading.get_ident


class _PutOff:
    """A context in which signal handlers wait. It may be entered again inside; use the one instance, `PUT_OFF`.

    Nothing here needs a lock: only the main thread changes anything, and a handler that interrupts it leaves each of
    these fields as it was.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._admits = False
        """Whether handlers run at once although the context was entered."""
        self._handlers: dict[int, _Handler] = {}
        """What the stand-in calls, by signal."""
        self._due: list[int] = []
        """Signals that came meanwhile."""
        self._stand_in = self._heed  # one object, to be known again

    def __enter__(self) -> None:
        if _ident() != self._main:
            return
        if not self._handlers:
            self._look()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _ident() != self._main:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        self._admits = False
        self._depth = 0
        if self._due:
            self._run_due()

    def admit(self) -> None:
        """Let handlers run, from now on: this thread is about to wait, and holds nothing that it has not noted down."""
        if self._depth and _ident() == self._main:
            self._look()
            self._admits = True
            if self._due:
                self._run_due()

    def refuse(self) -> None:
        """Put handlers off again."""
        if self._depth and _ident() == self._main:
            self._admits = False

    def _look(self) -> None:
        """Stand in for handlers that are new. Whoever is about to wait has the time for that."""
        for number in _SIGNALS:
            handler = _get(number)
            if handler is not self._stand_in and callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._stand_in)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if self._depth and not self._admits:
            self._due.append(number)
        else:
            self._handlers[number](number, frame)

    def _run_due(self) -> None:
        while self._due:
            number = self._due.pop(0)
            self._handlers[number](number, sys._getframe())

    def _forked(self) -> None:
        """This is a child, and its main thread the one that forked, perhaps in the midst of something."""
        self._main, self._depth, self._admits = threading.get_ident(), 0, False
        self._due.clear()


PUT_OFF: Final = _PutOff()


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` with signal handlers put off, but for the waits in it that admit them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with PUT_OFF:
            return function(*args, **kwargs)

    return call


os.register_at_fork(after_in_child=PUT_OFF._forked)
