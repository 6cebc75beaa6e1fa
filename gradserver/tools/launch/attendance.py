"""The workers of a run that have come to the coordinator, as its status says: a run in which none comes is told so.

    what is known                                 what is said
    ────────────────────────────────────────────  ───────────────────────────────────────────────────────────────────
    groups have begun with all workers            once: all workers have joined
    no worker has come for `JOIN_SECONDS`         once, and at the end: they train by themselves, and what to do
    some have come, or wait in several groups     once, after `JOIN_SECONDS`: which have not, which wait, and where
    all workers ended well, and none had come     at the end: no worker has joined
    all workers ended well, and some had come     at the end: rounds, time and lost workers, of a coordinator of its own
    the coordinator does not answer               at the end, if it has never answered, and all workers are on this host

A worker may train, end and leave between two looks: the coordinator also counts all that have come. Groups wait for
workers with a word of their own (`gradserver.engine.control.waiting`), which workers print.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from gradserver.protocol.errors import GradServerError
from gradserver.tools.launch.output import Console
from gradserver.tools.launch.report import counted, ranks

JOIN_SECONDS: Final = 30.0
"""Time after which workers that have not come to the coordinator are told of."""
_LOOK_SECONDS: Final = 0.5
"""Time between two looks until then."""
_SELDOM_SECONDS: Final = 5.0
"""Time between two looks later."""
_LAST_SECONDS: Final = 5.0
"""Time that the last look may take."""
_REMEDY: Final = (
    "A script joins by gradserver.connect() or gradserver.setup(), and wraps its model in "
    "gradserver.DistributedDataParallel; or by init_process_group('gradserver'). A script or a trainer that makes a "
    "group of torch.distributed with another backend (transformers.Trainer, accelerate, Lightning) trains by gloo or "
    "NCCL beside the coordinator: give it the backend 'gradserver', or start it by torchrun"
)


class Attendance:
    """Attendance of one run's workers at the coordinator.

    Args:
        url: the coordinator's.
        names: names of the workers, by rank, unless their script gives them others.
        is_own: whether the coordinator was started for this run.
        console: where it is told.
        waker: descriptor that gets a byte when there is news.
        is_only_here: whether all workers run on this host, so that they reach the coordinator if this process does.
    """

    def __init__(
        self, url: str, names: Sequence[str], is_own: bool, console: Console, waker: int, is_only_here: bool = True
    ) -> None:
        self._url, self._names, self._is_own, self._console, self._waker = url, names, is_own, console, waker
        self._is_only_here = is_only_here
        self._since = time.monotonic()
        self._first: dict[str, Any] | None = None
        """The first status. Another run's workers may have come to the coordinator before."""
        self._status: dict[str, Any] | None = None
        self._seen = set[str]()
        """Names of the workers that were seen."""
        self._told_all = self._told_missing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gradserver-attendance", daemon=True)
        self._thread.start()

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        """Look again and again, in the thread, until all workers have joined; and once more when the run is over."""
        while not self._over.is_set():
            self._look_once()
            late = time.monotonic() - self._since > JOIN_SECONDS
            self._over.wait(None if self._have_joined() else _SELDOM_SECONDS if late else _LOOK_SECONDS)
        self._look_once()

    def _look_once(self) -> None:
        from gradserver.status import fetch  # imported here: the first worker starts before ZeroMQ is loaded

        try:
            status = fetch(self._url)
        except (GradServerError, OSError):  # it does not answer, or is about to be started again
            return
        self._first = self._first or status
        self._status = status
        self._seen |= {name for names in self._present(status).values() for name in names}
        with suppress(OSError):  # the run is over, or there is news already
            os.write(self._waker, b".")

    def _present(self, status: dict[str, Any]) -> dict[str, list[str]]:
        """Return the workers that are there, by group: of another run's coordinator those that have our names."""
        found = {}
        for group, told in status["groups"].items():
            names = [one["name"] for one in (*told["members"], *told["waiting"])]
            if own := [name for name in names if self._is_own or name in self._names]:
                found[group] = own
        return found

    def _grown(self, count: str) -> int:
        """Return how much a count of the coordinator has grown since the first look."""
        if self._status is None or self._first is None:
            return 0
        before = 0 if self._is_own else self._first["totals"][count]
        return int(self._status["totals"][count] - before)

    def _have_joined(self) -> bool:
        return self._grown("joined") >= len(self._names)

    def _come(self) -> int:
        """Return the number of workers that have come."""
        return len(self._seen) or min(self._grown("came"), len(self._names))

    # ── telling ───────────────────────────────────────────────────────────────────────────────────────

    def deadline(self) -> float | None:
        """Return when `check_time` has something to do."""
        is_told = self._told_missing or self._told_all or self._status is None
        return None if is_told else self._since + JOIN_SECONDS

    def check_time(self, now: float, running: int) -> None:
        """Tell what has become known, while so many workers run."""
        if not self._told_all and self._have_joined() and running:
            self._told_all = True
            count = len(self._names)
            self._console.say("the worker has joined" if count == 1 else f"all {count} workers have joined")
        due = self.deadline()
        if due is not None and now >= due:
            self._told_missing = True
            if running:
                self._tell_missing(f"after {JOIN_SECONDS:g} s")

    def _tell_missing(self, when: str) -> None:
        come, names = self._come(), self._names
        if not come:
            self._console.say(f"no worker has joined a group at {self._url} {when}. {_REMEDY}")
            return
        absent = [rank for rank, name in enumerate(names) if name not in self._seen]
        known = self._seen <= {*names}  # else the script gives names of its own
        text = f"{come} of {counted(len(names), 'worker')} {_have(come)} come to the coordinator {when}"
        text += f"; {ranks(absent)} {_have(len(absent))} not" if known and absent else ""
        for group, there in self._present(self._status or {"groups": {}}).items():
            text += f". Group {group!r} has {', '.join(map(repr, sorted(there)))}"
        self._console.say(f"{text}. Each worker of a run calls gradserver.connect(), with the same group and URL")

    def close(self, ended_well: bool) -> None:
        """Look once more, and tell at the end of a run what it was; nothing if it ``ended_well`` not."""
        self._over.set()
        if not ended_well:
            return
        self._thread.join(_LAST_SECONDS)
        if self._status is None and not self._is_only_here:
            return
        if self._status is None:
            self._console.say(f"no coordinator has answered at {self._url}, so no worker can have joined a group there")
        elif not self._come():
            self._console.say(f"no worker has joined a group at {self._url}. {_REMEDY}")
        elif self._come() < len(self._names) and not self._have_joined():
            self._tell_missing("at the end")
        elif self._is_own and (rounds := self._grown("rounds")):
            count = self._grown("lost")
            lost = "no worker was lost" if not count else f"{counted(count, 'worker')} {_have(count)} been lost"
            self._console.say(f"{counted(rounds, 'round')} in {time.monotonic() - self._since:.1f} s, {lost}")


def _have(count: int) -> str:
    return "has" if count == 1 else "have"
