"""Handles of calls that do not wait."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias

from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import DeadlineError, GradServerError, InvalidArgumentError
from gradserver.worker.interrupts import admits
from gradserver.worker.member.waiter import NotFinite
from gradserver.worker.stalls import FIRST_SECONDS, LONGEST_SECONDS, Stalls, Wait

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # a plain Handle is a Handle[Any]

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

Timeout: TypeAlias = float | timedelta | None
"""The limit of a call's wait: seconds, or a timedelta as in torch; None for the worker's own."""

log = logging.getLogger("gradserver")

VERDICT_SECONDS: Final = 2.0
"""Seconds after its own timeout that a worker waits for the coordinator to name the missing workers."""
REMINDER_SECONDS: Final = 60.0
"""Seconds until the log first names what is waited for. Each further reminder comes after twice as long."""


class Handle(Generic[T_co]):
    """An operation in progress: an exchange, or joining. `wait` returns its result.

    Attributes:
        weight: sum of the weights that counted, known when done. 0.0 if none counted.
        present: true if some worker contributed data, known when done. Otherwise the result is zeros.
        left_alone: byte ranges without a contribution, in which the result is what was there before.
        not_finite: outcome for gradients that are not finite, known when done. None if there were none, and in groups
            that pass them on.
        squares: sums of squares that came with the results of a bucket, by the first slice of each
            (`gradserver.protocol.messages.Result`).
    """

    __slots__ = (
        "__weakref__",
        "_channel",
        "_error",
        "_finish",
        "_lock",
        "_on_error",
        "_open",
        "_patience",
        "_timeout",
        "_value",
        "_wait_for",
        "left_alone",
        "not_finite",
        "present",
        "squares",
        "weight",
    )

    def __init__(
        self,
        timeout: float,
        channel: Channel | None = None,
        value: Any = None,
        wait_for: Wait | None = None,
    ) -> None:
        self.weight = 0.0
        self.present = False
        self.left_alone: tuple[tuple[int, int], ...] = ()
        self.not_finite: NotFinite | None = None
        self.squares: dict[int, tuple[float, ...]] = {}
        self._timeout = timeout
        self._patience: float | None = None
        self._channel = channel
        self._value = value
        self._error: GradServerError | None = None
        self._finish: Callable[[], None] | None = None
        self._on_error: Callable[[GradServerError], None] | None = None
        self._wait_for = wait_for
        self._open = True
        self._lock = threading.Lock()  # held until done: cheaper than an Event, and there is one per exchange
        self._lock.acquire()

    def done(self) -> bool:
        """Return true if `wait` would return (or raise) at once."""
        if self._open and self._channel is not None:
            self._channel.look()
        return not self._open

    def is_completed(self) -> bool:
        """Return true if `wait` would return (or raise) at once. It is `done` by torch's name."""
        return self.done()

    def wait(self, timeout: Timeout = None) -> T_co:
        """Wait until done, and return the result. For collectives this is the tensor.

        Args:
            timeout: seconds. None means the timeout of the call, or that of the worker. After a DeadlineError, a
                further wait is allowed.

        Raises:
            DeadlineError: the operation was not done in time. The error names the missing workers.
            GradServerError: the exchange failed.
        """
        if self._open:
            self._wait(timeout)
        self.raise_error()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        result: T_co = self._value
        return result

    @property
    def wait_for(self) -> Wait | None:
        """The thing that a caller waits for, in words; None if that is not told."""
        return self._wait_for

    def within(self, patience: float | None) -> None:
        """Limit a `wait` without a timeout to ``patience`` seconds."""
        self._patience = patience

    def then(self, finish: Callable[[], None] | None) -> None:
        """Call ``finish`` once, in the first `wait` that finds the result there."""
        self._finish = finish

    def on_error(self, heed: Callable[[GradServerError], None]) -> None:
        """Call ``heed`` with the error that made this fail, each time before it is raised."""
        self._on_error = heed

    def raise_error(self) -> None:
        """Raise the error that made this fail, if it is done and failed."""
        if self._error is not None:
            if self._on_error is not None:
                self._on_error(self._error)
            raise self._error.again()

    def _wait(self, given: Timeout) -> None:
        timeout = self._patience if given is None else seconds(given)
        # The coordinator's own deadline is as long as the worker's, and its error says more: it gets time to come.
        patience = self._timeout + VERDICT_SECONDS if timeout is None else timeout
        patience = min(max(patience, 0.0), threading.TIMEOUT_MAX)
        first = min(patience, FIRST_SECONDS)
        if self._wait_once(first) or self._wait_on(first, patience, looks=timeout is None):
            self._lock.release()

    def _wait_on(self, waited: float, patience: float, looks: bool) -> bool:
        """Wait on behind the first second. Return false if it is done with a lock that is free already."""
        wait_for = self._wait_for
        stalls = wait_for.stalls if wait_for is not None and looks else None
        due = pause = REMINDER_SECONDS if wait_for is not None else math.inf
        while not self._wait_and_look(stalls, min(due, patience) - waited):
            waited = min(due, patience)
            error = self.overdue(waited)
            if not self._open:
                return False
            if waited >= patience:
                raise error
            log.warning("%s. Waiting on, for %g s in all", error.message, patience)
            pause *= 2
            due += pause
        return True

    def overdue(self, seconds: float) -> DeadlineError:
        """Make the error of a wait that ran out after so many ``seconds``. It names what is missing."""
        if self._wait_for is None:
            return DeadlineError(f"not done after {seconds:g} s")
        return self._wait_for.overdue(seconds)

    def _wait_and_look(self, stalls: Stalls | None, seconds: float) -> bool:
        """Wait, as a thread that counts as one that waits if there are ``stalls``."""
        if stalls is None or seconds <= 0:
            return seconds > 0 and self._wait_once(seconds)
        pause = FIRST_SECONDS
        with stalls.waiting(self):
            while True:
                stalls.look()
                if self._wait_once(min(pause, seconds)):
                    return True
                seconds -= pause
                if seconds <= 0:
                    return False
                pause = min(2 * pause, LONGEST_SECONDS)

    @admits
    def _wait_once(self, seconds: float) -> bool:
        assert self._channel is not None
        return self._channel.wait(self._lock, seconds)

    def _complete(self, error: GradServerError | None = None) -> None:
        """Mark the operation as done, once. The caller makes sure that no two threads do."""
        if self._open:
            self._error = error
            self._open = False
            self._lock.release()


def seconds(timeout: Timeout) -> float | None:
    """Return ``timeout`` in seconds; None for the worker's own. InvalidArgumentError if it is no timeout."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise InvalidArgumentError(f"timeout is {timeout!r}, and must be seconds, a timedelta or None")
    return timeout


def finished(value: Any, weight: float = 1.0) -> Handle[Any]:
    """Return a handle of a result that needed no exchange."""
    handle: Handle[Any] = Handle(0.0, None, value)
    handle.weight, handle.present = weight, True
    handle._complete()
    return handle
