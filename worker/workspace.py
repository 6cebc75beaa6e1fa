"""Memory that this process encodes and decodes in."""

from __future__ import annotations

import threading
from typing import Final

from gradserver.protocol.codecs import Scratch
from gradserver.protocol.compiled import loader
from gradserver.worker.member.coder import Workspace


class _Thread(threading.local):
    """Scratch memory of a thread. The first one that encodes or decodes has kernels loaded, if they are not yet."""

    def __init__(self) -> None:
        loader.start()
        self.scratch = Scratch()


_thread = _Thread()
WORKSPACE: Final = Workspace(lambda: _thread.scratch)
