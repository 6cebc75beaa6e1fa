"""A watch for the coordinator's word about what members do among themselves."""

from __future__ import annotations

from gradserver.protocol.errors import GradServerError, MembershipChangedError
from gradserver.worker.handle import Handle
from gradserver.worker.planes.communicator import Signal


class Watch(Handle[None]):
    """A handle that ends the wait for the other members when it fails.

    Args:
        signal: the signal of that wait.
        timeout: limit of a wait for the handle, in seconds.
        done: error with which it ends that wait when it is done, too; None if that says nothing.
    """

    __slots__ = ("_done", "_signal")

    def __init__(self, signal: Signal, timeout: float, done: GradServerError | None = None) -> None:
        super().__init__(timeout)
        self._signal, self._done = signal, done

    def _complete(self, error: GradServerError | None = None) -> None:
        super()._complete(error)
        word = error or self._done
        if word is not None:
            self._signal.interrupt(word)


def watch_for_departures(signal: Signal, timeout: float) -> Watch:
    """Return a watch to be done when a member has departed, which ends the wait for the others."""
    return Watch(signal, timeout, MembershipChangedError("a member has departed"))
