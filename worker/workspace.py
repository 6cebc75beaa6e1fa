"""Memory that this process encodes and decodes in."""

from __future__ import annotations

import threading
from typing import Final

from gradserver.protocol.codecs import Scratch
from gradserver.worker.member.coder import Workspace


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


_thread = _Thread()
WORKSPACE: Final = Workspace(lambda: _thread.scratch)
