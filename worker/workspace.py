"""Memory that this process encodes and decodes in."""

from __future__ import annotations

import threading
from typing import Final

from gradserver.protocol.codecs import Scratch
from gradserver.protocol.compiled import loader
from gradserver.worker.member.coder import Workspace


class _Thread(threading.local):
    scratch: Scratch | None = None


_thread = _Thread()


def _scratch() -> Scratch:
    """Return this thread's scratch memory. The first one that asks for it has kernels loaded, if they are not yet."""
    if _thread.scratch is None:
        loader.start()
        _thread.scratch = Scratch()
    return _thread.scratch


WORKSPACE: Final = Workspace(_scratch)
