"""Costs of work: processor time of workers and coordinator, phases of a training step, bytes on an interface."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

GIGABYTE: Final = 1e9

Record = TypeVar("Record", "Usage", "Phases")

_DEVICES: Final = Path("/proc/self/net/dev")
_RECEIVED, _SENT = 0, 8  # columns behind an interface's name


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


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a process has used so far, or the difference of two such amounts.

    Attributes:
        processor: seconds of all of the process's threads.
        sent: bytes that the interface has sent, with headers; 0 if several processes share it.
        received: bytes that it has received.
    """

    processor: float
    sent: float
    received: float

    @classmethod
    def so_far(cls, interface: str) -> Usage:
        """Read those of this process, with the counters of `interface` ("" for none)."""
        sent, received = _counters(interface) if interface else (0, 0)
        return cls(time.process_time(), sent, received)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.processor - other.processor, self.sent - other.sent, self.received - other.received)

    def to_json(self) -> dict[str, float]:
        """Convert to figures with units in their names."""
        return {"processor_s": self.processor, "sent_bytes": self.sent, "received_bytes": self.received}


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a training step, one phase behind the other.

    Attributes:
        forward: from the beginning to the loss.
        gradients: from there to the last gradient.
        tail: from there until backward returns: nothing is computed any more, and the exchange is waited for.
        update: clipping, and the optimizer.
    """

    forward: float
    gradients: float
    tail: float
    update: float

    def to_json(self) -> dict[str, float]:
        """Convert to figures with units in their names."""
        return {f"{name}_s": seconds for name, seconds in asdict(self).items()}


def median_of(several: Sequence[Record]) -> Record:
    """Return the median of each figure."""
    columns = zip(*map(astuple, several), strict=True)
    return type(several[0])(*(float(statistics.median(column)) for column in columns))


def _counters(interface: str) -> tuple[int, int]:
    """Read the bytes sent and received by an interface of this process's network namespace."""
    for line in _DEVICES.read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            columns = numbers.split()
            return int(columns[_SENT]), int(columns[_RECEIVED])
    raise OSError(f"{_DEVICES} does not name the interface {interface!r}")
