"""Processor time that an operation takes: of the worker that does it, and of the coordinator and its data shards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

GIGABYTE: Final = 1e9


class Timed(NamedTuple):
    """Operations in a row, as one process saw them.

    Attributes:
        seconds: time that they took.
        processor: processor time of this process meanwhile.
        began: processor time of the coordinator and its data shards before the first of them, since these started.
        ended: the same behind the last.
    """

    seconds: float
    processor: float = 0.0
    began: float = 0.0
    ended: float = 0.0


class Cost(NamedTuple):
    """Processor seconds of one operation: of the coordinator with its data shards, and of a worker on average."""

    coordinator: float
    worker: float

    @classmethod
    def of(cls, timed: Sequence[Timed], count: int) -> Cost:
        """Make the cost of one of ``count`` operations that all workers have timed.

        The coordinator's part begins with the first worker and ends with the last one.
        """
        coordinator = max(one.ended for one in timed) - min(one.began for one in timed)
        return cls(coordinator / count, sum(one.processor for one in timed) / len(timed) / count)


def per_gigabyte(costs: Sequence[Cost], workers: int, nbytes: float) -> dict[str, float]:
    """Return the medians of ``costs`` for each GB of payload, for a row; each worker sends and gets ``nbytes``."""
    both_ways = 2 * nbytes / GIGABYTE
    return {
        "coordinator_s_per_gb": statistics.median(one.coordinator for one in costs) / (workers * both_ways),
        "worker_s_per_gb": statistics.median(one.worker for one in costs) / both_ways,
    }


def processor_seconds(processes: Iterable[int]) -> float:
    """Return the processor time that ``processes`` have taken with all their threads, also those that have ended."""
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)  # as clock_getcpuclockid makes it
