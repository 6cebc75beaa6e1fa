"""Processes that run one test after the other together, each as a rank of one suite.

torch's own driver starts new processes for every test, which takes seconds. These are forked once, with torch loaded.
Each test has a process group of its own. They are replaced when a test has not ended well, and by nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, ParamSpec

import torch.distributed as dist

from tests.conformance.suite import Suite

P = ParamSpec("P")

FORK: Final = multiprocessing.get_context("fork")
GRACE: Final = 3.0
"""Seconds for the other ranks when one has failed. Most fail, too, and say more."""


class Kind(StrEnum):
    """The kinds of outcomes of a test."""

    PASS = "pass"
    SKIP = "skip"
    FAIL = "fail"
    CRASH = "crash"
    HANG = "hang"


GOOD: Final = (Kind.PASS, Kind.SKIP)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test: its kind, one line that says why, and what is known besides."""

    kind: Kind
    why: str = ""
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind}, {self.why.rstrip('.')}" if self.why else str(self.kind)


PASSED: Final = Outcome(Kind.PASS)


def verdict(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a test from those of its ranks, in the order in which they ended.

    Passed has only a test that all ranks have passed. A rank that fails tells more than one that then hangs.
    """
    for kind in (Kind.CRASH, Kind.FAIL, Kind.HANG, Kind.SKIP):
        if found := [outcome for outcome in outcomes if outcome.kind == kind]:
            return found[0]
    return PASSED


class Crew:
    """The processes of a suite. They are forked for the first test."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._members: list[_Member] = []
        self._count = 0

    def run(self, test: str, seconds: float) -> Outcome:
        """Run a test in all ranks, which takes ``seconds`` at most, and return its outcome."""
        method = getattr(self._suite.case, test)
        if getattr(method, "__unittest_skip__", False):
            return Outcome(Kind.SKIP, method.__unittest_skip_why__)
        if not self._members:
            self._members = [_Member(self._suite, rank) for rank in range(self._suite.size)]
        for file in (self._suite.folder / "barrier").iterdir():
            file.unlink()
        self._count += 1
        outcome = self._ask((test, str(self._suite.folder / "init_dir" / str(self._count))), seconds)
        if outcome.kind in GOOD:
            left = self._ask(None, GRACE)
            outcome = outcome if left.kind == Kind.PASS else left
        if outcome.kind not in GOOD:
            self.end()
        return outcome

    def _ask(self, order: tuple[str, str] | None, seconds: float) -> Outcome:
        """Give all ranks an order, and return the outcome of all."""
        for member in self._members:
            member.tell(order)
        asked = {end: member for member in self._members for end in (member.line, member.sentinel)}
        heard = dict[_Member, Outcome]()
        until = time.monotonic() + seconds
        while asked and (ready := wait(list(asked), max(0.0, until - time.monotonic()))):
            for member in {asked[end] for end in ready}:  # type: ignore[index]
                heard[member] = member.outcome()
                del asked[member.line], asked[member.sentinel]
                if heard[member].kind not in GOOD:
                    until = min(until, time.monotonic() + GRACE)
        late = [member for member in self._members if member not in heard]
        return verdict([*heard.values(), *(member.hang(seconds) for member in late)])

    def end(self) -> None:
        """End the processes."""
        for member in self._members:
            member.end()
        self._members = []


class _Member:
    """A process that is one rank, as the process that has forked it sees it."""

    def __init__(self, suite: Suite, rank: int) -> None:
        self._rank = rank
        self.output: Final = suite.folder / f"output{rank}"
        self.line, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(suite, rank, theirs, self.output), daemon=True)
        self._process.start()
        theirs.close()
        self.sentinel: Final = self._process.sentinel

    def tell(self, order: tuple[str, str] | None) -> None:
        with contextlib.suppress(OSError):  # of one that has died, which its sentinel tells
            self.line.send(order)

    def outcome(self) -> Outcome:
        """Return what it has said, or that it has died."""
        try:
            if self.line.poll():
                said: Outcome = self.line.recv()
                return said
        except (EOFError, OSError):
            pass
        self._process.join()
        return Outcome(Kind.CRASH, f"rank {self._rank} ended with status {self._process.exitcode}", self._tail())

    def hang(self, seconds: float) -> Outcome:
        """Return that it has not ended, and where it is."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        self._process.join(0.5)  # which it does not: it writes the traces of its threads
        return Outcome(Kind.HANG, f"rank {self._rank} is not done after {seconds:g} s", self._tail())

    def _tail(self) -> str:
        return self.output.read_text("utf-8", errors="replace")[-6000:]

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.line.close()


def _serve(suite: Suite, rank: int, line: Connection, output: Path) -> None:
    """Be one rank: run tests for as long as there are orders."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the process that has forked this one ends it
    while True:
        try:
            order = line.recv()
        except EOFError:
            os._exit(0)
        line.send(_attempt(suite, _leave) if order is None else _attempt(suite, _run, suite, rank, *order))


def _attempt(suite: Suite, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Outcome:
    """Call ``fn``, and return the outcome."""
    try:
        fn(*args, **kwargs)
    except unittest.SkipTest as skip:
        return Outcome(Kind.SKIP, str(skip))
    except SystemExit as end:
        if end.code in suite.skips:
            return Outcome(Kind.SKIP, suite.skips[end.code])  # type: ignore[index]
        return Outcome(Kind.FAIL, f"it exits with {end.code!r}", traceback.format_exc())
    except BaseException as error:
        first, *_ = f"{type(error).__name__}: {error}".splitlines()
        return Outcome(Kind.FAIL, first[:400], traceback.format_exc())
    return PASSED


def _run(suite: Suite, rank: int, test: str, file: str) -> None:
    """Run one test in a process group that meets at ``file``."""
    timeout = timedelta(seconds=suite.prepare(test))
    case: Any = suite.case(test)
    case.rank, case.file_name = rank, file
    dist.init_process_group(suite.backend, f"file://{file}", world_size=suite.size, rank=rank, timeout=timeout)
    getattr(case, test)()


def _leave() -> None:
    """Leave the process group, when all ranks are done with the test."""
    if dist.is_initialized():
        dist.destroy_process_group()
