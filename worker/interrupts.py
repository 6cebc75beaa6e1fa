"""Signal handlers that raise, put off while an exchange is worked on.

Python runs signal handlers in the main thread, between any two steps of whatever it does. A handler that raises there,
as that of Ctrl-C does, would leave an exchange half worked on: a message taken and not settled, a slice counted as sent
that is not. Therefore handlers are called through a stand-in, from the first wait of the main thread on. It looks at
the stack. Inside a function that is `uninterrupted` the handler is put off, and the signal comes again a moment later,
until that function has returned. What a raising handler interrupts is thus either done, or can be waited for again.

Of the functions on the stack that are marked, the innermost one decides: one that `admits` handlers only waits, and
notes down what it gets before any step at which a handler could run. Marks cost nothing where no signal comes. Threads
other than the main one run no handlers.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal.getsignal makes enumerations, ten times as slow
import _thread  # starts a thread without taking a lock that the interrupted code may hold
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import compress, repeat
from operator import is_
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_Handler = Callable[[int, FrameType | None], Any]

_SIGNALS: Final = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)))
"""Signals whose handlers are known to raise: Ctrl-C, and what schedulers, notebooks and time limits send."""
_AGAIN_SECONDS: Final = 0.001
"""After which a signal comes again whose handler was put off."""

_get: Final[Callable[[int], Any]] = _signal.getsignal
_interruptible: Final[dict[CodeType, bool]] = {}
"""Whether handlers run inside each function that is marked."""
_handlers: Final[dict[int, _Handler]] = {}
"""What the stand-in calls, by signal."""
_seen: tuple[Any, ...] = ()
"""Handlers of those signals when all that could be stood in for had a stand-in."""


def uninterrupted(function: F) -> F:
    """Put handlers off inside ``function``, which is returned as it is."""
    _interruptible[function.__code__] = False
    return function


def admits(function: F) -> F:
    """Let handlers run inside ``function``, which only waits, though it was called by one that is uninterrupted."""
    _interruptible[function.__code__] = True
    return function


def watch() -> None:
    """Stand in for handlers that are new. To be called where a thread is about to wait, and so has the time for it."""
    global _seen
    if (found := tuple(map(_get, _SIGNALS))) == _seen or threading.current_thread() is not threading.main_thread():
        return
    for number, handler in zip(_SIGNALS, found, strict=True):
        if handler is not _heed and callable(handler):
            _handlers[number] = handler
            signal.signal(number, _heed)
    _seen = tuple(map(_get, _SIGNALS))


def _heed(number: int, frame: FrameType | None) -> None:
    inner = frame
    while inner is not None:
        runs = _interruptible.get(inner.f_code)
        if runs is False:
            _thread.start_new_thread(_send_again, (number,))
            return
        if runs:
            break
        inner = inner.f_back
    _handlers[number](number, frame)


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECONDS)
    main = threading.main_thread().ident or 0
    # If the handler that it was for is gone, the signal might end the process. Between a look at the handler and the
    # signal no other thread may therefore run: none does within one call of a function of C.
    is_for_us = map(is_, map(_get, (number,)), (_heed,))
    deque(map(signal.pthread_kill, repeat(main), compress((number,), is_for_us)), maxlen=0)
