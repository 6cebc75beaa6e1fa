"""Waits of a worker's threads, which it tells the coordinator when all of them have waited for a while.

`gradserver.engine.control.deadlocks` has what becomes of that. A wait with a limit that its caller has set is not told:
the caller may do something else then. A worker waits when each thread of the process either waits here, or could not
come here:

    thread                                              could it give something to this worker?
    ──────────────────────────────────────────────────  ─────────────────────────────────────────────────────────────
    has waited here, or begun something without a wait  yes, unless it waits here now
    has done so at another worker of this process only  no: it is that worker's, as in a `LocalCluster`
    runs code of a script                               perhaps, for the first time: others wait some seconds longer
    runs code of installed packages alone               no: it is a loader's or a progress bar's
    waits inside of gradserver, as in `cluster.run`     no
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from gradserver.protocol.errors import DeadlineError, GradServerError
from gradserver.protocol.exchange import COLLECTIVE, ExchangeKey
from gradserver.protocol.messages import Message
from gradserver.protocol.messages.waiting import MAX_WAIT, MAX_WAITS, Blocked, Cause
from gradserver.worker.member.waiter import NotFinite

FIRST_SECONDS: Final = 1.0
"""Seconds of a thread's wait before it is told."""
OTHERS_SECONDS: Final = 3.0
"""Seconds more, if a thread that has never called may still come."""
LONGEST_SECONDS: Final = 16.0
"""Longest pause until it is told again. Each pause is twice as long as the one before."""
_OURS: Final = str(Path(__file__).parents[1])
_STANDARD: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED: Final = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_ANY: Final = ExchangeKey(COLLECTIVE, 0, 0)


class Asked(Protocol):
    """A session's traffic, as far as it is asked which members its exchanges lack."""

    activity: int

    @property
    def attended(self) -> Sequence[int]:
        """Numbers of the data shards, beside the coordinator, that this member has made itself known to."""

    def ask_missing(self, key: ExchangeKey, answer: Answer, shard: int | None = None) -> bool:
        """Ask ``shard``, or the first one with the exchange. Return false if there is none."""


class Wait(Protocol):
    """The thing that a handle's caller waits for."""

    @property
    def cause(self) -> Cause:
        """The kind of it."""

    @property
    def key(self) -> ExchangeKey | None:
        """The exchange, if it is one."""

    @property
    def traffic(self) -> Asked:
        """The session's traffic that it is of."""

    @property
    def stalls(self) -> Stalls | None:
        """Waits of the worker's threads; None if this one is not told."""

    def overdue(self, seconds: float) -> DeadlineError:
        """Make the error of a wait that ran out."""

    def describe(self) -> str:
        """Name it in a text."""


class Waiting(Protocol):
    """A handle that a thread waits for."""

    _open: bool

    @property
    def wait_for(self) -> Wait | None:
        """The thing that its caller waits for."""


class Stalls:
    """Waits of one worker, its sub-groups included.

    Args:
        tell: tells the coordinator.
        sessions: gives the traffic of the worker's sessions.
    """

    def __init__(self, tell: Callable[[Message], object], sessions: Callable[[], Sequence[Asked]]) -> None:
        self.sessions = sessions
        self._tell = tell
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, list[Waiting]] = {}
        """Waits of each thread, the innermost one last."""
        self._serial = 0
        self._changed = 0.0
        """Time at which a wait began or ended."""
        _all_stalls.add(self)

    def note_caller(self) -> None:
        """Note that the present thread has begun something for which it does not wait."""
        self._threads.setdefault(threading.current_thread(), [])

    @contextmanager
    def waiting(self, handle: Waiting) -> Iterator[None]:
        """Note that the present thread waits for ``handle``, until the block ends."""
        thread = threading.current_thread()
        with self._lock:
            self._threads.setdefault(thread, []).append(handle)
            self._note_change()
        try:
            yield
        finally:
            with self._lock:
                self._threads[thread].remove(handle)
                self._note_change()

    def look(self, check: int = 0) -> None:
        """Tell the coordinator if all threads wait; in answer to a ``check`` also if they do not."""
        with self._lock:
            serial, waits = self._present_serial(), self._all_waits()
        if waits:
            _Inquiry(self, serial, check, waits).begin()
        elif check:
            self.tell(Blocked(serial, check))

    def tell(self, word: Blocked) -> None:
        """Say ``word``, unless a wait has begun or ended meanwhile, or something was exchanged."""
        with self._lock:
            is_true = word.serial == self._present_serial()
        if is_true or word.check:
            with suppress(GradServerError, ConnectionError):
                self._tell(word if is_true else Blocked(word.serial, word.check))

    def _note_change(self) -> None:
        self._serial += 1
        self._changed = time.monotonic()

    def _present_serial(self) -> int:
        return self._serial + sum(traffic.activity for traffic in self.sessions())

    def _all_waits(self) -> list[Wait]:
        """Return what each thread waits for; nothing if one does not wait. With the lock held."""
        self._threads = {thread: handles for thread, handles in self._threads.items() if thread.is_alive()}
        known = {thread for stalls in _all_stalls for thread in tuple(stalls._threads)}
        idents = {thread.ident for thread in known if thread.is_alive()}
        others = (frame for ident, frame in sys._current_frames().items() if ident not in idents)
        if time.monotonic() < self._changed + OTHERS_SECONDS and any(map(_may_come_here, others)):
            return []
        waits = list[Wait]()
        for handles in self._threads.values():
            wait = handles[-1].wait_for if handles and handles[-1]._open else None
            if wait is None or len(waits) == MAX_WAITS:
                return []
            waits.append(wait)
        return waits


_all_stalls: Final = weakref.WeakSet[Stalls]()
"""Instances of all workers in this process."""


def _may_come_here(frame: FrameType) -> bool:
    """Return true if a thread runs code of a script, and does not wait inside of gradserver."""
    innermost: FrameType | None = frame
    while innermost is not None and _origin(innermost.f_code.co_filename) is _Origin.STANDARD:
        innermost = innermost.f_back
    if innermost is None or _origin(innermost.f_code.co_filename) is _Origin.OURS:
        return False
    outer: FrameType | None = innermost
    while outer is not None and _origin(outer.f_code.co_filename) is not _Origin.SCRIPT:
        outer = outer.f_back
    return outer is not None


class _Origin(Enum):
    """The place that code is from."""

    OURS = 0
    STANDARD = 1
    INSTALLED = 2
    SCRIPT = 3


@cache
def _origin(filename: str) -> _Origin:
    if filename.startswith(_OURS):
        return _Origin.OURS
    if filename.startswith(_INSTALLED):
        return _Origin.INSTALLED
    return _Origin.STANDARD if filename.startswith((*_STANDARD, "<frozen ")) else _Origin.SCRIPT


class _Inquiry:
    """Questions to all shards which members the exchanges lack that threads wait for.

    Shards with which none is under way are asked, too: their answers come behind all that was pushed there.
    """

    def __init__(self, stalls: Stalls, serial: int, check: int, waits: list[Wait]) -> None:
        self._stalls = stalls
        self._serial, self._check, self._waits = serial, check, waits
        self._missing = [""] * len(waits)
        self._lock = threading.Lock()
        self._open = 1
        """Answers that are due, and one until all is asked."""

    def begin(self) -> None:
        """Ask."""
        with suppress(GradServerError, ConnectionError):
            for place, wait in enumerate(self._waits):
                if wait.key is not None:
                    self._ask(wait.traffic, wait.key, place)
            for traffic in self._stalls.sessions():
                for shard in traffic.attended:  # others may have no connection yet
                    self._ask(traffic, _ANY, shard=shard)
            self.answer()

    def _ask(self, traffic: Asked, key: ExchangeKey, place: int = -1, shard: int | None = None) -> None:
        with self._lock:
            self._open += 1
        if not traffic.ask_missing(key, Answer(self, place), shard):
            self.answer()

    def answer(self, place: int = -1, names: Sequence[str] = ()) -> None:
        """Take an answer. With the last one the coordinator is told."""
        with self._lock:
            self._open -= 1
            if place >= 0:
                self._missing[place] = ", ".join(names)
            is_last = self._open == 0
        if is_last:
            causes = tuple(int(wait.cause) for wait in self._waits)
            whats = tuple(wait.describe()[:MAX_WAIT] for wait in self._waits)
            missing = tuple(names[:MAX_WAIT] for names in self._missing)
            self._stalls.tell(Blocked(self._serial, self._check, causes, whats, missing))


class Answer:
    """The end of a question, as a member completes it (`gradserver.worker.member.waiter.Waiter`)."""

    def __init__(self, inquiry: _Inquiry, place: int) -> None:
        self.weight, self.present = 0.0, False
        self.left_alone: tuple[tuple[int, int], ...] = ()
        self.not_finite: NotFinite | None = None
        self.squares: dict[int, tuple[float, ...]] = {}
        self._open = True
        self._value: object = ()
        self._inquiry, self._place = inquiry, place

    def _complete(self, error: GradServerError | None = None) -> None:
        """Hand the names on. Behind an error there are none to come."""
        if self._open and error is None:
            assert isinstance(self._value, tuple)
            self._inquiry.answer(self._place, self._value)
        self._open = False
