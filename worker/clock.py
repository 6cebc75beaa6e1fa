"""The time that counts for deadlines: it stands still without a coordinator, and during a recovery."""

from __future__ import annotations

import threading
import time


class Clock:
    """A clock in seconds, for differences only. Any thread may use it."""

    def __init__(self) -> None:
        self._changes = threading.Condition()
        self._stood_still = 0.0
        self._since: float | None = None
        self._runs_on = False

    @property
    def runs(self) -> bool:
        """True if it runs."""
        return self._since is None

    @property
    def seconds(self) -> float:
        """The seconds that it shows."""
        with self._changes:
            return (time.monotonic() if self._since is None else self._since) - self._stood_still

    def stop(self) -> None:
        """Stop."""
        with self._changes:
            if self._since is None and not self._runs_on:
                self._since = time.monotonic()

    def go(self) -> None:
        """Run on."""
        with self._changes:
            if self._since is not None:
                self._stood_still += time.monotonic() - self._since
                self._since = None
                self._changes.notify_all()

    def run_on(self) -> None:
        """Run on, and stop no more."""
        with self._changes:
            self._runs_on = True  # first: a connection may break in another thread now, which would stop it for ever
        self.go()

    def wait(self, timeout: float) -> bool:
        """Wait until it runs, for ``timeout`` seconds at most. Return whether it does."""
        with self._changes:
            return self._changes.wait_for(lambda: self._since is None, timeout)
