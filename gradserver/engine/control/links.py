"""The links of a group: what members and data shards say of them, and what follows from it.

It is decided once, when the group begins. A push names no membership, so slices are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Final

from gradserver.protocol.limits import MIN_CREDIT_BYTES
from gradserver.protocol.offers import Offer
from gradserver.protocol.planes import TCP
from gradserver.protocol.slicing import grain_of

_BYTES: Final = 1e9 / 8
"""Bytes a second of a Gbit/s."""
APART_SECONDS: Final = 0.1
"""Time that members can be apart before the first of them has to wait with its gradients. As long may a word of a
member wait behind what it has sent."""


def grain_for(offers: Iterable[Offer], stated: Sequence[float | None]) -> int:
    """Return the grain of a group with these ``offers``, of which the shards have ``stated`` these rates in Gbit/s.

    It is 0, for the largest slices, if nothing is known of the links, or if all members reach memory here.
    """
    remote = _remote(offers)
    measured = [rate for rate in remote if rate > 0]
    rates = [median_low(measured) * len(remote)] if measured else []
    known = [rate for rate in stated if rate is not None]
    if len(known) == len(stated):
        rates.append(sum(known))
    if not (remote and rates):
        return 0
    shards = max(sum(rate != 0 for rate in stated), 1)
    return grain_of(min(rates) * _BYTES * (1 / shards + 1 / len(remote)))


def credit_for(offers: Iterable[Offer], most: int) -> int:
    """Return the credit of each member of a group: what the fastest link carries in a round trip and `APART_SECONDS`.

    It is ``most``, which is the limit, if a link is unknown, or if a member reaches memory here.
    """
    offers = tuple(offers)
    remote = _remote(offers)
    if len(remote) < len(offers) or not remote or min(remote) <= 0:
        return most
    carried = max(one.rate * _BYTES * (one.trip + APART_SECONDS) for one in offers)
    return max(min(round(carried), most), min(MIN_CREDIT_BYTES, most))


def _remote(offers: Iterable[Offer]) -> list[float]:
    """Return the rates of the links of members that send their gradients."""
    return [offer.rate for offer in offers if offer.channel == TCP]
