"""One life of a worker, as the launcher sees it: from its start to its end, with its output."""

from __future__ import annotations

import time
from typing import Final

from gradserver.tools.launch.failures import Failure, Tail, diagnose
from gradserver.tools.launch.output import Console, Lines, Logs
from gradserver.tools.launch.places import Place
from gradserver.tools.launch.station import Station

_ENDING_SECONDS: Final = 5.0
"""Time that a process may take to end by an error that it has shown."""


class Attempt:
    """A process of a worker.

    Attributes:
        number: number by which its agent knows it.
        place: the worker's place.
        station: the host that it runs on.
        since: time of its start.
        pid: its id; 0 until it has started.
        status: its exit status, or minus the signal that ended it; None while it runs.
        asked_at: time at which it was asked to end; None if it was not.
    """

    def __init__(self, number: int, place: Place, station: Station) -> None:
        self.number, self.place, self.station = number, place, station
        self.since = time.monotonic()
        self.pid = 0
        self.status: int | None = None
        self.asked_at: float | None = None
        self._lines = {1: Lines(), 2: Lines()}
        self._tails = {1: Tail(), 2: Tail()}

    @property
    def is_running(self) -> bool:
        """True until its end is known."""
        return self.status is None

    @property
    def name(self) -> str:
        """Return the worker's name in messages."""
        return f"rank {self.rank}"

    @property
    def where(self) -> str:
        """Return the host, and the process if it has started."""
        host = self.station.hello.host if self.station.hello else self.station.host
        return f"host {host}, process {self.pid}" if self.pid else f"host {host}"

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self.place.rank

    def take(self, stream: int, data: bytes, console: Console, logs: Logs) -> None:
        """Take what it has printed."""
        now = time.monotonic()
        self._tails[stream].feed(data, now)
        console.lines(self.rank, stream, self._lines[stream].feed(data, now))
        logs.write(self.rank, data)

    def deadline(self) -> float | None:
        """Return when an unfinished line is to be shown."""
        return min((at for one in self._lines.values() if (at := one.deadline()) is not None), default=None)

    def show_unfinished(self, console: Console, now: float) -> None:
        """Show lines that have been unfinished for long."""
        for stream, lines in self._lines.items():
            console.lines(self.rank, stream, lines.unfinished(now))

    def end(self, status: int, console: Console) -> None:
        """Note its end, and show what it has printed without a line end."""
        self.status = status
        for stream, lines in self._lines.items():
            console.lines(self.rank, stream, lines.end())

    def failure(self) -> Failure | None:
        """Describe a failure; None if it ended well, or because it was asked to.

        A worker that has shown an error was perhaps asked while its process ended. Its failure counts, with status 1.
        """
        assert self.status is not None
        if self.status == 0:
            return None
        now = time.monotonic()
        failure = Failure(self.name, self.where, self.status, now, lived=now - self.since)
        if self.asked_at is not None:
            shown_at = self._tails[2].traceback_at
            if shown_at is None or not self.asked_at - _ENDING_SECONDS < shown_at < self.asked_at:
                return None
            failure.status = 1
        diagnose(failure, self._tails[2], self._tails[1])
        return failure
