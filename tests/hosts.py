"""Groups of workers on several emulated hosts: threads of this process, each of which says where it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from gradserver.worker import connect as connecting, offer
from gradserver.worker.client import Worker
from tests.cluster import TIMEOUT, coordinator, together


@contextmanager
def hosted(hosts: Sequence[str], url: str = "", *, nonfinite: str = "halt", **options: Any) -> Iterator[list[Worker]]:
    """Join a group on the hierarchical plane, with a worker on each of ``hosts`` by rank.

    They join the coordinator at ``url``, or one that is started for them.
    """
    here = threading.local()

    def offered(*arguments: Any) -> Any:
        return offer.offer_of(*arguments)._replace(host=here.host, host_id=here.host)

    def join(rank: int) -> Worker:
        here.host = hosts[rank]
        told = {"plane": "hierarchical", "channel": "tcp", "timeout": TIMEOUT, **options}
        return connecting.connect(url, rank, len(hosts), name=f"w{rank}", **told)

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "offer_of", offered)
        url = url or stack.enter_context(coordinator(nonfinite=nonfinite)).url
        yield [stack.enter_context(worker) for worker in together(range(len(hosts)), join)]
