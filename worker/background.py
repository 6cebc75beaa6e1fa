"""Threads in which torch may block, and which may outlive what they work for."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

_ENDING_SECONDS: Final = 3.0
"""Time that threads have to end when the process does."""
_background: WeakSet[threading.Thread] = WeakSet()


def in_background(target: Callable[..., object], name: str, *arguments: object) -> None:
    """Call ``target`` in a thread of its own, in which torch may block."""
    thread = threading.Thread(target=target, args=arguments, name=f"gradserver-{name}", daemon=True)
    _background.add(thread)
    thread.start()


@atexit.register
def await_background() -> None:
    """Let threads end before the interpreter does: it would end them inside torch, which aborts the process then."""
    until = time.monotonic() + _ENDING_SECONDS
    for thread in list(_background):
        thread.join(max(until - time.monotonic(), 0.0))
