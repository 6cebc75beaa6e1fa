"""The measurement of a worker's link to the coordinator, before it joins: a round trip, and a rate.

Bytes are sent and confirmed, each time more of them, until that takes long enough to tell. So it takes some
milliseconds, on fast links and on slow ones. The workers of a group often measure at the same time. Then they share the
coordinator's link, as they will in each round.
"""

from __future__ import annotations

import math
import time
from typing import Final, NamedTuple, Protocol

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.limits import KIB, MAX_RATE, PROBE_BYTES

_SIZES: Final = (32 * KIB, 128 * KIB, PROBE_BYTES)
"""Bytes, of which links often let 256 KiB pass at once."""
_LONG: Final = 10e-3
"""Seconds of a measurement behind which there is no larger one."""
_TRIES: Final = 2
"""Times that it must take so long: a worker that waits for a processor has no slow link, and no long one."""
_FAR: Final = 5e-3
"""Round trip in seconds from which on a connection's first bytes say nothing of the rate: it takes trips to grow."""
_PATIENCE: Final = 1.0


class Link(NamedTuple):
    """A link: its rate in Gbit/s, and the round trip in seconds. 0 is what is not known."""

    rate: float = 0.0
    trip: float = 0.0


class Probing(Protocol):
    """A connection to a coordinator that has not joined."""

    def probe(self, payload: Buffer, timeout: float) -> bool:
        """Send some bytes, and wait for the answer. False if there is none."""


def measure(connection: Probing) -> Link:
    """Measure the link of ``connection``."""
    if not connection.probe(b"", _PATIENCE) or (trip := _least(connection, 0, _FAR)) is None:
        return Link()
    if trip >= _FAR:
        return Link(trip=trip)
    rate = 0.0
    for size in _SIZES:
        if (took := _least(connection, size, _LONG)) is None:
            return Link(rate, trip)
        rate = min(8e-9 * size / max(took - trip, took / 8), MAX_RATE)
        if took >= _LONG:
            break
    return Link(rate, trip)


def _least(connection: Probing, size: int, long: float) -> float | None:
    """Return the seconds until ``size`` bytes have come, measured again if they are ``long``; None if they never do."""
    payload, least = bytes(size), math.inf
    for _ in range(_TRIES):
        began = time.perf_counter()
        if not connection.probe(payload, _PATIENCE):
            return None
        least = min(least, time.perf_counter() - began)
        if least < long:
            break
    return least
