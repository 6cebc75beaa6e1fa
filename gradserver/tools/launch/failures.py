"""The failure that came first, told apart from those that follow from it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gradserver.protocol.harmless import harmless

_KEPT: Final = 1 << 16
"""Bytes of each output that are kept for the report."""
_SHOWN_LINES: Final = 60
_FAULTS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_WITH_TRACEBACK: Final = frozenset({1, *(-number for number in _FAULTS)})
"""Statuses of processes that end by an error, and say which. Others may have logged one long before."""
_LAST_WORDS: Final = 12
_HEADER: Final = re.compile(
    rb"^(?:Traceback \(most recent call last\):|  \+ Exception Group Traceback|Fatal Python error:"
    rb"|terminate called (?:after throwing|without an active exception)"
    rb"|  File \"[^\"\n]*\", line \d+\n(?:    .*\n)*\w*(?:Syntax|Indentation|Tab)Error: )",
    re.MULTILINE,
)
"""The first line of an error. That of a script which cannot be compiled has no line in front of it."""
_CHAINED: Final = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
_BESIDE: Final = re.compile(
    rb"^(?:Exception ignored |Exception in thread |Exception in threading\.excepthook|Error in atexit|Process .+:$"
    rb"|Error in sys\.\w+hook|--- Logging error ---|(?:future|task|handle|source_traceback): )"
    rb"|exception was never retrieved|[Uu]nhandled exception |[Ee]xception in callback |exception calling callback "
)
"""Lines that introduce an error which did not end the process: of a destructor, a thread, a child, at exit."""
_NOISE: Final = re.compile(
    rb"^(?:Exception ignored |Exception in thread|Error in atexit|Process .+:$|--- Logging error ---"
    rb"|[^\n]*exception was never retrieved$|\S[^\n]*:\d+: \w*Warning: |(?:\[rank\d+\]:)?\[W\d*[: \]])",
    re.MULTILINE,
)
"""Lines behind an error that are not a part of it: they begin another one, or warn."""
_OF_TORCH: Final = re.compile(rb"^\[rank\d+\]: ", re.MULTILINE)
"""Text in front of each line of an error, with which torch shows it in a process that has made a group."""
_IN_CALLBACK: Final = re.compile(rb"^RuntimeError: .*\bWorker(?:Lost|Left)Error: ", re.MULTILINE)
"""The error of another worker's end, as torch shows it that has waited in C++."""
_OF_THE_TRACKER: Final = re.compile(rb"[^\n]*\n  File \"[^\"\n]*multiprocessing/resource_tracker\.py\"")
_FINALIZING: Final = re.compile(rb"Fatal Python error:[^\n]*\n(?:Python runtime state: finalizing|[^\n]*shutdown)")
_THROWN: Final = b"terminate called "
_FOLLOWS: Final = re.compile(
    rb"^(?:gradserver\.(?:[\w.]+\.)?(?:WorkerLost|WorkerLeft|LeftOut|ConnectionLost|CoordinatorStopped"
    rb"|CoordinatorUnreachable|Abandoned|MembershipChanged|Deadline|JoinTimeout)Error"
    rb"|.*(?:Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe))",
    re.MULTILINE,
)
"""Errors that another worker's end causes: gradserver's own, and those of sockets, as torch's back ends show them."""

_WAS_JOINING: Final = re.compile(rb"^gradserver\.(?:[\w.]+\.)?LeftOutError: .*\babout to join\b", re.MULTILINE)


class Tail:
    """Last part of what a worker has printed on one output."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._dropped = 0
        """Number of bytes that were printed before those that are kept."""
        self._times: dict[int, float] = {}
        """Times at which errors began, by the number of bytes in front of them."""

    def feed(self, data: bytes, now: float) -> None:
        """Add what was printed."""
        line = self._kept.rfind(b"\n") + 1
        self._kept[line:] = _OF_TORCH.sub(b"", self._kept[line:] + data)
        for match in _HEADER.finditer(self._kept, self._begin_of_errors(line)):
            self._times.setdefault(self._dropped + match.start(), now)
        if len(self._kept) > 2 * _KEPT:
            self._dropped += len(self._kept) - _KEPT
            del self._kept[:-_KEPT]
            self._times = {place: time for place, time in self._times.items() if place >= self._dropped}

    def _begin_of_errors(self, place: int) -> int:
        """Return the beginning of the line at ``place``, and of lines in front of it that may belong to one error."""
        line = self._kept.rfind(b"\n", 0, place) + 1
        while line and self._kept.startswith(b" ", self._kept.rfind(b"\n", 0, line - 1) + 1):
            line = self._kept.rfind(b"\n", 0, line - 1) + 1
        return line

    @property
    def traceback_at(self) -> float | None:
        """Time at which the error that ended the process began; None if none was shown that could have."""
        starts = self._causes()
        return self._times.get(self._dropped + starts[-1]) if starts else None

    def traceback(self) -> bytes:
        """Return the error that ended the process, with those that it is chained to; empty if there is none.

        That is the last one that no line introduces as one beside the process's own course. If there are only such
        errors, it is the last of them, with that line.
        """
        if starts := self._causes():
            begin = starts[-1]
            ends = [start for start in self._starts() if start > begin]
            if noise := _NOISE.search(self._kept, begin):
                ends.append(noise.start())
            return bytes(self._kept[begin : min(ends, default=len(self._kept))])
        starts = self._starts()
        return bytes(self._kept[self._line_before(starts[-1]) :]) if starts else b""

    def _starts(self) -> list[int]:
        """Return where errors begin, each with those that it is chained to."""
        found: list[int] = []
        for match in _HEADER.finditer(self._kept):
            if not self._continues(found, match.start()):
                found.append(match.start())
        return found

    def _continues(self, found: list[int], start: int) -> bool:
        """Tell whether an error at ``start`` goes on with the one before: it is chained to it, or its last line."""
        before = bytes(self._kept[self._line_before(start) : start])
        if self._kept.startswith(b"  File ", start):
            return before.startswith(b" ")  # of a module that could not be imported
        if found and self._kept.startswith(_THROWN, found[-1]):
            return self._kept.startswith(b"Fatal ", start)  # the same end, as Python saw it
        return bool(found) and bytes(self._kept[:start]).rstrip().endswith(_CHAINED)

    def _causes(self) -> list[int]:
        """Return where errors begin that may have ended the process."""
        causes = [start for start in self._starts() if not self._is_beside(start)]
        while len(causes) > 1 and _FINALIZING.match(self._kept, causes[-1]):
            causes.pop()  # the interpreter was ending because of the error before
        return causes

    def _is_beside(self, start: int) -> bool:
        before = bytes(self._kept[self._line_before(start) : start]).strip(b"\n")
        return _BESIDE.search(before) is not None or _OF_THE_TRACKER.match(self._kept, start) is not None

    def _line_before(self, start: int) -> int:
        """Return the beginning of the line in front of the one at ``start``."""
        return self._kept.rfind(b"\n", 0, max(0, start - 1)) + 1

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
        line = lines[0 if lines[0].startswith((b"Fatal ", _THROWN)) else -1]
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
    failure.follows = (_FOLLOWS.search(last) or _IN_CALLBACK.search(traceback)) is not None
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
