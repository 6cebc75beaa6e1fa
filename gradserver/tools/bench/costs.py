"""Costs of work: time by phases, processor time, and bytes on the host's network interface."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TypeVar

Record = TypeVar("Record", "Cost", "Phases")

_DEVICES = Path("/proc/self/net/dev")
_RECEIVED, _SENT = 0, 8  # columns behind an interface's name


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs so far, or their difference.

    Attributes:
        processor: seconds of all of the process's threads.
        sent: bytes that the interface has sent, with headers; 0 if several processes share it.
        received: bytes that it has received.
    """

    processor: float
    sent: float
    received: float

    @classmethod
    def so_far(cls, interface: str) -> Cost:
        """Read the costs of this process, with the counters of `interface` ("" for none)."""
        sent, received = _counters(interface) if interface else (0, 0)
        return cls(time.process_time(), sent, received)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.processor - other.processor, self.sent - other.sent, self.received - other.received)

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
