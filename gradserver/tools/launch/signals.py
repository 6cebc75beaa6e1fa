"""The signals that the launcher passes on to the workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a process to end."""
PASSED: Final = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on."""
_RECEIVED: Final = (*PASSED, signal.SIGCHLD)


@contextmanager
def received() -> Iterator[int]:
    """Yield a descriptor from which the numbers of signals can be read: those to pass on, and that of ended children.

    A signal that is ignored already, as nohup does it, stays so.
    """
    descriptor, waker = os.pipe()
    for one in (descriptor, waker):
        os.set_blocking(one, False)
    before = {number: signal.getsignal(number) for number in _RECEIVED}
    woken_before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _wake)
    try:
        yield descriptor
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(descriptor)
        os.close(waker)


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal: its number comes through the descriptor."""
