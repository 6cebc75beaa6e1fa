"""Signal handlers that raise, delayed while code works on an exchange.

Python runs signal handlers in the main thread, between any two steps of whatever it does. A handler that raises there,
as that of Ctrl-C does, would leave an exchange half done. A message would be taken and not settled, or a slice would
count as sent and be unsent. Therefore handlers are called through a stand-in, from the first wait of the main thread
on. It looks at the stack. Inside a function that is `uninterrupted` it delays the handler, and the signal comes again a
moment later, until that function has returned. A call that a raising handler interrupts is thus either done, or can be
waited for again.

Of the functions on the stack that are marked, the innermost one decides. One that `admits` handlers only waits. It
notes what it gets before any step at which a handler could run. Marks cost nothing where no signal comes. Threads other
than the main one run no handlers.
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
"""Signals with handlers that are known to raise: of Ctrl-C, schedulers, notebooks and time limits."""
_AGAIN_SECONDS: Final = 0.001
"""Seconds after which a delayed signal comes again."""

_get: Final[Callable[[int], Any]] = _signal.getsignal
_interruptible: Final[dict[CodeType, bool]] = {}
"""Functions with a mark, and whether handlers run inside each."""
_handlers: Final[dict[int, _Handler]] = {}
"""The handlers that the stand-in calls, by signal."""
_seen: tuple[Any, ...] = ()
"""Handlers of those signals when all that could have a stand-in had one."""


def uninterrupted(function: F) -> F:
    """Delay handlers inside ``function``, which is returned as it is."""
    _interruptible[function.__code__] = False
    return function


def admits(function: F) -> F:
    """Let handlers run inside ``function``, which only waits, even if an uninterrupted one called it."""
    _interruptible[function.__code__] = True
    return function


def watch() -> None:
    """Stand in for new handlers. Call it where a thread is about to take messages or to wait for some."""
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
    # If the handler that it was for is gone, the signal might end the process. So no other thread may run between a
    # look at the handler and the signal: none does within one call of a function of C.
    is_for_us = map(is_, map(_get, (number,)), (_heed,))
    deque(map(signal.pthread_kill, repeat(main), compress((number,), is_for_us)), maxlen=0)
