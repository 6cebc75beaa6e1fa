"""Regions of memory in which a durable group's coordinator writes results, beside contributions: these stay whole.

There is a region for each bucket that lies in shared memory. A result stays there when it was copied over, as what the
worker keeps of it (`gradserver.worker.member.retained`), until the next round's takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.exchange import BUCKET, ExchangeKey
from gradserver.protocol.messages import Place


class Region(NamedTuple):
    """A piece of shared memory as long as a bucket, and where the coordinator finds it."""

    place: Place
    memory: Bytes


class Regions:
    """A worker's regions. Not safe to share: the session's lock guards it.

    Args:
        allocate: gives a number of bytes of memory that the coordinator may write to; None if there is none.
        place_of: says where such memory lies.
    """

    def __init__(self, allocate: Callable[[int], Bytes | None], place_of: Callable[[Bytes], Place | None]) -> None:
        self._allocate = allocate
        self._place_of = place_of
        self._regions: dict[int, Region] = {}

    def take(self, key: ExchangeKey, nbytes: int) -> Region | None:
        """Take the region for the result of ``key``; None if it is no bucket's, or no memory can be shared."""
        if key.stream != BUCKET:
            return None
        region = self._regions.get(key.part)
        if region is None or region.memory.size != nbytes:
            memory = self._allocate(nbytes)
            place = None if memory is None else self._place_of(memory)
            if memory is None or place is None:
                return None
            region = self._regions[key.part] = Region(place, memory)
        return region

    def forget(self) -> None:
        """Use none of them any more: a coordinator may still write there, and another one cannot."""
        self._regions.clear()
