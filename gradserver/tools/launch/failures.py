"""The failure that came first, told apart from those that follow from it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gradserver.tools.common.screen import harmless

_KEPT: Final = 1 << 16
"""Bytes of each output that are kept for the report."""
_SHOWN_LINES: Final = 60
_FAULTS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_WITH_TRACEBACK: Final = frozenset({1, *(-number for number in _FAULTS)})
"""Statuses of processes that end by an error, and say which. Others may have logged one long before."""
_LAST_WORDS: Final = 12
_HEADER: Final = re.compile(
    rb"^(?:Traceback \(most recent call last\):|  \+ Exception Group Traceback|Fatal Python error:)", re.MULTILINE
)
_CHAINED: Final = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
_FOLLOWS: Final = re.compile(
    rb"^(?:gradserver\.(?:[\w.]+\.)?(?:WorkerLost|WorkerLeft|LeftOut|ConnectionLost|CoordinatorStopped"
    rb"|CoordinatorUnreachable|Abandoned|MembershipChanged|Deadline|JoinTimeout)Error"
    rb"|.*(?:Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe))",
    re.MULTILINE,
)
"""Errors that another worker's end causes: gradserver's own, and those of sockets, as torch's back ends show them."""

_WAS_JOINING: Final = re.compile(rb"^gradserver\.(?:[\w.]+\.)?LeftOutError: .*\babout to join\b", re.MULTILINE)


class Tail:
    """Last part of what a worker has printed on one output.

    Attributes:
        traceback_at: time at which the last traceback began; None if there was none.
    """

    def __init__(self) -> None:
        self.traceback_at: float | None = None
        self._kept = bytearray()

    def feed(self, data: bytes, now: float) -> None:
        """Add what was printed."""
        before = len(self._kept)
        self._kept += data
        line_start = self._kept.rfind(b"\n", 0, before) + 1
        headers = [match.start() for match in _HEADER.finditer(self._kept, line_start)]
        if headers and not self._is_chained(headers[-1]):
            self.traceback_at = now
        if len(self._kept) > 2 * _KEPT:
            del self._kept[:-_KEPT]

    def _is_chained(self, start: int) -> bool:
        return bytes(self._kept[:start]).rstrip().endswith(_CHAINED)

    def traceback(self) -> bytes:
        """Return the last traceback, with those it is chained to, and what follows; empty if there is none."""
        headers = [match.start() for match in _HEADER.finditer(self._kept)]
        while len(headers) > 1 and self._is_chained(headers[-1]):
            headers.pop()
        return bytes(self._kept[headers[-1] :]) if headers else b""

    def last_lines(self, count: int) -> bytes:
        """Return the last lines that are not empty."""
        lines = [line for line in self._kept.splitlines() if line.strip()]
        return b"\n".join(bytes(line) for line in lines[-count:])


@dataclass(slots=True)
class Failure:
    """The end of a worker, of a host or of the coordinator that was no good end.

    Attributes:
        what: its name: ``rank 1``.
        where: host and process.
        status: exit status, or minus the signal that ended it.
        at: time of the first sign of it.
        report: the lines that explain it.
        follows: whether the lines say that another process had failed before.
        was_joining: whether the lines say that a worker was about to join a group, and it is the group that failed.
        lived: seconds that it has lived.
    """

    what: str
    where: str
    status: int
    at: float
    report: bytes = b""
    follows: bool = False
    was_joining: bool = False
    lived: float = 0.0
    hints: list[str] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """The status as a shell tells it."""
        return 128 - self.status if self.status < 0 else self.status

    def fate(self) -> str:
        """Describe the end."""
        return describe(self.status)

    def last_line(self) -> str:
        """Return the last line of the report, which is the error of a traceback. Of a fault it is the first."""
        lines = [line for line in self.report.splitlines() if line.strip() and not line.startswith(b" ")]
        if not lines:
            return ""
        line = lines[0 if lines[0].startswith(b"Fatal ") else -1]
        return harmless(line.decode("utf-8", "replace"))[:200]


def describe(status: int) -> str:
    """Describe an exit status."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def diagnose(failure: Failure, errors: Tail, output: Tail) -> None:
    """Explain the failure of a worker by what it has printed."""
    traceback = errors.traceback() if failure.status in _WITH_TRACEBACK else b""
    failure.report = traceback or errors.last_lines(_LAST_WORDS) or output.last_lines(_LAST_WORDS)
    if traceback and errors.traceback_at is not None:
        failure.at = min(failure.at, errors.traceback_at)
    last = traceback.rpartition(b"\n  ")[2]
    failure.follows = _FOLLOWS.search(last) is not None
    failure.was_joining = _WAS_JOINING.search(last) is not None
    if failure.status == -signal.SIGKILL:
        failure.hints.append(
            "no process here sent SIGKILL. The system does when memory runs out: `dmesg` and the log of the batch "
            "system say so"
        )
    if b"invalid device ordinal" in traceback:
        failure.hints.append(
            "a worker sees one GPU, as cuda:0, whatever LOCAL_RANK is. For scripts that use cuda:LOCAL_RANK give "
            "--gpus all"
        )
    if b"No module named 'torch'" in traceback:
        failure.hints.append("install torch for this Python: pip install 'gradserver[torch]'")


def first(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others: the first that does not say that it follows from another."""
    return min(failures, key=lambda failure: (failure.follows, failure.at))


def shown(report: bytes) -> str:
    """Return a report for people, of a page at most."""
    lines = harmless(report.decode("utf-8", "replace")).rstrip().splitlines()
    if len(lines) > _SHOWN_LINES:
        half = _SHOWN_LINES // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} lines …", *lines[-half:]]
    return "\n".join(f"  {line}" for line in lines)
