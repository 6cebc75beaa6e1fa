"""A place where workers find each other: a torch store that a worker hosts. It offers the address when it joins.

The store of the lowest rank that has one is the rendezvous of a group's direct plane. On the hierarchical plane each
host has such a rendezvous. The coordinator carries the addresses. So the coordinator needs no torch.
"""

from __future__ import annotations

import logging
import socket
from datetime import timedelta
from importlib import import_module
from typing import Any, Final, cast

from gradserver.protocol.offers import Offer
from gradserver.protocol.planes import AMONG_MEMBERS, AUTO
from gradserver.protocol.url import parse_target

log = logging.getLogger("gradserver")

_SECONDS: Final = 60.0


def with_store(offer: Offer, url: str) -> tuple[Offer, object]:
    """Return ``offer`` with the address of a new store, if members may reduce among themselves; and the store.

    The store is reached at the address from which this host reaches the coordinator at ``url``. It lasts as long as it
    is referenced. Each membership has one of its own: what an earlier one has left there would mislead.
    """
    if not offer.backends or not (offer.plane in AMONG_MEMBERS or (offer.plane == AUTO and offer.devices)):
        return offer, None
    try:
        host, distributed = _host_towards(url), cast(Any, import_module("torch.distributed"))
        store = distributed.TCPStore(host, 0, None, True, timedelta(seconds=_SECONDS), wait_for_workers=False)
        return offer._replace(store=f"{host}:{store.port}"), store
    except (OSError, RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
        log.warning("this worker cannot host a rendezvous for other workers: %s", error)
        return offer, None


def _host_towards(url: str) -> str:
    """Return the address of this host from which the coordinator is reached. Nothing is sent for that."""
    host, port = parse_target(url)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
