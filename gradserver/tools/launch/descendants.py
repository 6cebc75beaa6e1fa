"""All processes that descend from this one, also those of sessions of their own, and those that have lost a parent."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, TypeVar

_SET_CHILD_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER
_LIBC: Final = ctypes.CDLL(None)


class Child(Protocol):
    """A child that ends."""

    def bury(self) -> None:
        """Take the exit status."""


C = TypeVar("C", bound=Child)


def adopt() -> None:
    """Become the parent of descendants that lose theirs. Without this they would become children of process 1."""
    with suppress(AttributeError):  # a system without this call
        _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Return the ids of all descendants that run."""
    children: dict[int, list[int]] = {}
    for process, parent, state in _processes():
        if state not in "ZX":
            children.setdefault(parent, []).append(process)
    found = list(children.get(os.getpid(), ()))
    for process in found:  # which grows meanwhile
        found += children.get(process, ())
    return found


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield each process of the system, its parent and its state."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            told = (folder / "stat").read_text("ascii", "replace")
            state, parent = told.rpartition(")")[2].split()[:2]  # the name in front may have brackets, too
            yield int(folder.name), int(parent), state


def reap(known: Mapping[int, C]) -> Iterator[C]:
    """Yield the ``known`` children, by their ids, that have ended. Other children that have ended are buried."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        child = known.get(found.si_pid)
        if child is None:
            os.waitpid(found.si_pid, 0)
        else:
            child.bury()
            yield child
