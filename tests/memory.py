"""Memory that a function takes. The fixture `measured` calls what measures in a process that has one thread."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Measured(Protocol):
    """A call of a module's function in another process. Its arguments and its result can be pickled."""

    def __call__(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T: ...


@contextmanager
def one_thread() -> Iterator[Measured]:
    """Start a process that has one thread. Yield what calls functions in it, and end it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:

        def call(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
            return process.submit(function, *arguments, **named).result()

        yield call


class Memory(NamedTuple):
    """Bytes of memory that a call has taken."""

    left: int
    """Bytes in use when it has returned."""
    peak: int
    """Most bytes in use at one time."""


def memory_of(call: Callable[[], object]) -> Memory:
    """Call it, and return the memory that this process has taken meanwhile."""
    tracemalloc.start()
    try:
        call()
        return Memory(*tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()


def growth_of(exchange: Callable[[int], None], before: int, more: int) -> int:
    """Return how many objects are left by ``more`` rounds of an exchange, after ``before`` rounds."""
    exchange(before)
    gc.collect()
    blocks = sys.getallocatedblocks()
    exchange(more)
    gc.collect()
    return sys.getallocatedblocks() - blocks


def names_in_shm() -> set[str]:
    """Return the names of this machine's shared segments.

    Folders are of other programs. Semaphores, which glibc names ``sem.*``, are of the tests that run beside this one
    and use multiprocessing: the product has none.
    """
    with os.scandir("/dev/shm") as entries:
        files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    return {name for name in files if not name.startswith("sem.")}
