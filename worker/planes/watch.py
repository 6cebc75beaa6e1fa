"""A watch for the coordinator's word about a direct round."""

from __future__ import annotations

from gradserver.protocol.errors import GradServerError
from gradserver.worker.handle import Handle
from gradserver.worker.planes.communicator import Signal


class Watch(Handle[None]):
    """A handle that ends the wait for reductions when it is done."""

    __slots__ = ("_signal",)

    def __init__(self, signal: Signal, timeout: float) -> None:
        super().__init__(timeout)
        self._signal = signal

    def _complete(self, error: GradServerError | None = None) -> None:
        super()._complete(error)
        if error is not None:
            self._signal.interrupt(error)
