"""The links of a group: what members and data shards say of them, and the size of slices that follows.

It is decided once, when the group begins: a push names no membership, so slices are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Final

from gradserver.protocol.offers import Offer
from gradserver.protocol.planes import TCP
from gradserver.protocol.slicing import grain_of

_BYTES: Final = 1e9 / 8
"""Bytes a second of a Gbit/s."""


def grain_for(offers: Iterable[Offer], stated: Sequence[float | None]) -> int:
    """Return the grain of a group with these ``offers``, whose shards have said these rates in Gbit/s.

    It is 0, for the largest slices, if nothing is known of the links, or if all members reach memory here.
    """
    remote = [offer.rate for offer in offers if offer.channel == TCP]
    measured = [rate for rate in remote if rate > 0]
    rates = [median_low(measured) * len(remote)] if measured else []
    known = [rate for rate in stated if rate is not None]
    if len(known) == len(stated):
        rates.append(sum(known))
    busy = sum(rate != 0 for rate in stated)
    return grain_of(min(rates) * _BYTES / max(busy, 1)) if remote and rates else 0
