"""Members of a process group, as a coordinator decides them: those that are there, and others when there is room.

torch leaves it to others which processes `torch.distributed._reconfigure` gets. Here it is a rendezvous at the
coordinator, the one that agents of torchrun have (`gradserver.torch.rendezvous`): each process is a worker of the group
``members/JOB``, and its connection says that it lives.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch.distributed as dist

from gradserver.protocol.errors import InvalidArgumentError, UsageError
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.log import log
from gradserver.torch.coordinator import REACHING_SECONDS, URL
from gradserver.torch.reconfiguring import Handle, ReconfigurableProcessGroup
from gradserver.torch.rendezvous import Rendezvous, Wanted, Words

_FORMING: Final = timedelta(seconds=30)
"""Time in which all members form the group that is decided. If one is lost meanwhile, it is decided anew."""
_PROCESSES: Final = Words(
    "members",
    "processes",
    "membership size",
    f"and is the URL of the Membership right, or {URL}",
    "Membership(…, timeout=SECONDS)",
    "this group decides members only",
)


class Membership:
    """The members of a reconfigurable process group. torch 2.14 or newer.

    For example, in processes that come and go:

        dist.init_process_group("gradserver", rank=0, world_size=1, store=dist.HashStore(), enable_reconfigure=True)
        members = gradserver.torch.Membership("job", 2, 8)
        members.reconfigure()
        while step < STEPS:
            try:
                train()
            except RuntimeError:  # a member is lost
                members.reconfigure()

    After `reconfigure` the script brings all members to one state, by a broadcast from a member that has it.

    Args:
        job: name of the job, the same at all its processes.
        least: the smallest number of members.
        most: the largest number. More processes wait, as spares. None: the number is always ``least``.
        url: URL of the coordinator. None means GRADSERVER_URL. If ``most`` is another number than ``least``, that
            coordinator was started with ``--groups any --workers members/JOB=LEAST:MOST``.
        timeout: seconds within which there have to be enough.
        gather: seconds to wait for more than ``least``.

    Raises:
        InvalidArgumentError: no URL is given, or the numbers cannot be right.
    """

    def __init__(
        self,
        job: str,
        least: int,
        most: int | None = None,
        *,
        url: str | None = None,
        timeout: float = 600.0,
        gather: float = 5.0,
    ) -> None:
        most, url = least if most is None else most, url or os.environ.get(URL)
        if not 1 <= least <= most <= MAX_WORLD_SIZE:
            raise InvalidArgumentError(f"a membership of {least} to {most}: expected 1 <= least <= most")
        if not url:
            raise InvalidArgumentError(f"no coordinator: give Membership(…, url='tcp://HOST:PORT'), or set {URL}")
        wanted = Wanted(job, url, least, most, timeout, gather, REACHING_SECONDS, None, is_host=False, words=_PROCESSES)
        self._rendezvous = Rendezvous(wanted)
        self._names: list[str] = []

    @property
    def has_changed(self) -> bool:
        """True if a process waits that there is room for, or a member is gone: `reconfigure` when it suits."""
        return self._rendezvous.num_nodes_waiting() > 0

    def reconfigure(self, group: Any = None) -> list[str]:
        """Give the group the processes that are there now, as many as there may be. Return their names, by rank.

        All members call it, after an error or when `has_changed` is true. Those that have not called it hear, at their
        next call in the group, that the others have left.

        Args:
            group: the process group; None for the default one.

        Raises:
            UsageError: the group was not made with ``enable_reconfigure=True``.
            torch.distributed.elastic.rendezvous.RendezvousError: not enough came in time, or there is no coordinator.
        """
        chosen: Any = dist.group.WORLD if group is None else group
        if not isinstance(chosen, ReconfigurableProcessGroup):
            raise UsageError(
                "the process group cannot be reconfigured: make it by init_process_group('gradserver', "
                "enable_reconfigure=True), with torch 2.14 or newer"
            )
        while True:
            chosen.abort()  # the others hear it, and call this, too
            decided = self._rendezvous.next_rendezvous()
            try:
                names = _form(chosen, decided.store, decided.rank, decided.world_size)
            except UsageError:
                raise
            except RuntimeError as error:  # of the backend, or of torch's store
                log.warning("members of %r are decided again: %s", self._rendezvous.get_run_id(), error)
                continue
            gone = ", ".join(repr(name) for name in self._names if name not in names) or "none"
            what = "members of %r, by rank: %s. Gone since the last time: %s"
            log.info(what, self._rendezvous.get_run_id(), ", ".join(map(repr, names)), gone)
            self._names = names
            return names

    def close(self) -> None:
        """Leave for good: the job is over, and the others hear that when they next reconfigure."""
        with suppress(RuntimeError):
            self._rendezvous.set_closed()


def _form(group: ReconfigurableProcessGroup, store: Any, rank: int, size: int) -> list[str]:
    """Form the group of processes that have met at a store. Return their names."""
    store.set(f"handle/{rank}", group.get_reconfigure_handle())
    if rank == 0:
        store.set("uuid", str(random.SystemRandom().getrandbits(62)))
    handles = [store.get(f"handle/{other}").decode() for other in range(size)]
    options = SimpleNamespace(uuid=int(store.get("uuid")), handles=handles, timeout=_FORMING)
    group.reconfigure(options).wait()
    return [Handle.read(handle).name for handle in handles]
