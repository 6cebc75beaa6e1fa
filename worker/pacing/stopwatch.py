"""A worker's times: that of its own computation between two exchanges, and that of the exchange.

    arrived       begun      paused      begun                computed              arrived
       │             │ optimizer │          │  forward, backward │  the exchange       │
       └─────────────┴milliseconds──────────┴─── milliseconds ───┴─ sync_milliseconds ─┘

On a CUDA device the moments are events on the stream that computes. They are read when the device has passed them, so
the device is never waited for, and a measurement can come some rounds late. Elsewhere it is the time of the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

_MOST_PENDING: Final = 64
"""Intervals on a device that are remembered; older ones are forgotten unread."""


class Stopwatch(Protocol):
    """Measures intervals. Calls come in the order of the drawing, from the thread that trains."""

    def begin(self) -> None:
        """Note that the computation begins, or goes on, unless it is under way."""

    def pause(self) -> None:
        """Note that something else follows before the computation goes on, such as an evaluation."""

    def computed(self, batches: int, samples: float) -> None:
        """Note that the computation of so many batches and samples is over, and the exchange is waited for."""

    def arrived(self) -> None:
        """Note that the result is there."""

    def cancel(self) -> None:
        """Forget the computation that has begun."""

    def read(self) -> tuple[float, float, float, float]:
        """Return what was measured since the last call: milliseconds, batches, samples, milliseconds of the exchange.

        Several intervals are added up, but for the exchange, of which it is the latest.
        """


class WallClock:
    """Stopwatch by the clock.

    Args:
        waiting: returns the seconds that the thread has spent in exchanges so far: they do not count.
    """

    def __init__(self, waiting: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._waiting, self._clock = waiting, clock
        self._begun: tuple[float, float] | None = None
        self._before = 0.0
        """Seconds of the computation before it was paused."""
        self._computed: float | None = None
        self._measured = 0.0, 0.0, 0.0
        self._sync = 0.0

    def begin(self) -> None:
        """Note that the computation begins."""
        if self._begun is None:
            self._begun = self._clock(), self._waiting()

    def pause(self) -> None:
        """Note that something else follows."""
        self._before += self._since(self._clock())
        self._begun = None

    def computed(self, batches: int, samples: float) -> None:
        """Note that the computation is over."""
        now = self._computed = self._clock()
        if self._begun is not None:
            self._measured = 1e3 * (self._before + self._since(now)), batches, samples
        self._begun, self._before = None, 0.0

    def _since(self, now: float) -> float:
        if self._begun is None:
            return 0.0
        began, waited = self._begun
        return now - began - (self._waiting() - waited)

    def arrived(self) -> None:
        """Note that the result is there."""
        if self._computed is not None:
            self._sync = 1e3 * (self._clock() - self._computed)
        self._begun, self._computed, self._before = None, None, 0.0

    def cancel(self) -> None:
        """Forget the computation that has begun."""
        self._begun, self._before = None, 0.0

    def read(self) -> tuple[float, float, float, float]:
        """Return what was measured since the last call."""
        (milliseconds, batches, samples), self._measured = self._measured, (0.0, 0.0, 0.0)
        return max(milliseconds, 0.0), batches, samples, self._sync


class DeviceClock:
    """Stopwatch by events on the current stream of a CUDA device."""

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self._event = event or (lambda: _recorded(device))
        self._begun: Any = None
        self._before: list[tuple[Any, Any]] = []
        """Beginnings and ends of the computation before it was paused."""
        self._computed: tuple[list[tuple[Any, Any]], int, float] | None = None
        self._pending: deque[tuple[list[tuple[Any, Any]], Any, int, float]] = deque(maxlen=_MOST_PENDING)
        self._sync = 0.0

    def begin(self) -> None:
        """Note that the computation begins."""
        if self._begun is None:
            self._begun = self._event()

    def pause(self) -> None:
        """Note that something else follows."""
        if self._begun is not None:
            self._before.append((self._begun, self._event()))
        self._begun = None

    def computed(self, batches: int, samples: float) -> None:
        """Note that the computation is over."""
        if self._begun is not None:
            self._computed = [*self._before, (self._begun, self._event())], batches, samples
        self._begun, self._before = None, []

    def arrived(self) -> None:
        """Note that the result is there."""
        if self._computed is not None:
            spans, batches, samples = self._computed
            self._pending.append((spans, self._event(), batches, samples))
        self._begun, self._computed, self._before = None, None, []

    def cancel(self) -> None:
        """Forget the computation that has begun."""
        self._begun, self._before = None, []

    def read(self) -> tuple[float, float, float, float]:
        """Return what the device has passed since the last call."""
        milliseconds = batches = samples = 0.0
        while self._pending and self._pending[0][1].query():
            spans, arrived, count, size = self._pending.popleft()
            milliseconds += sum(begun.elapsed_time(end) for begun, end in spans)
            batches, samples = batches + count, samples + size
            self._sync = spans[-1][1].elapsed_time(arrived)
        return milliseconds, batches, samples, self._sync


def _recorded(device: torch.device) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def stopwatch(device: torch.device, waiting: Callable[[], float]) -> Stopwatch:
    """Return the stopwatch of a module on ``device``."""
    return DeviceClock(device) if device.type == "cuda" else WallClock(waiting)
