"""The interface of a device, as far as copies need it: `gradserver.worker.devices.cuda` has the real one.

Tests have another one, of which every stream executes as late, or as early, as its order allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Event(Protocol):
    """A point in a stream, which the stream has passed or not."""

    def synchronize(self) -> None:
        """Wait, in the calling thread, until the stream has passed it."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""


class Stream(Protocol):
    """Work of a device, done in order."""

    def wait_event(self, event: Event, /) -> None:
        """Do nothing more until another stream has passed ``event``. The calling thread does not wait."""

    def record_event(self, event: Event, /) -> object:
        """Make ``event`` the point behind all that is queued so far."""


class Device(Protocol):
    """One device.

    Attributes:
        name: its name, for people and threads.
    """

    name: str

    def use(self) -> None:
        """Make it the calling thread's device, before that thread does anything else with it."""

    def new_stream(self) -> Stream:
        """Return a stream beside all others."""

    def new_event(self) -> Event:
        """Return an event that no stream has recorded."""

    def current_stream(self) -> Stream:
        """Return the stream of the calling thread's computation."""

    def captures(self) -> bool:
        """Return whether the calling thread's computation is captured, to be replayed later, and not carried out."""

    def run(self, work: Callable[[], object], stream: Stream) -> None:
        """Queue what ``work`` does on the device on ``stream``."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy between the device and the host, on ``stream``."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the memory of ``tensor`` from other use until ``stream`` is done with it."""

    def lock(self, memory: Tensor) -> str | None:
        """Lock pages of the host, so that copies need no other thread. Return the reason why not, if it fails."""

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock`, when no copy is under way."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return other memory of the host with locked pages, as bytes."""
