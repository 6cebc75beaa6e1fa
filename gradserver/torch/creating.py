"""Groups, as torch asks for them: the first one of a process connects, and those within it are its sub-groups.

Ranks of a new group agree by torch's store. Each counts its attempts there, since a store may serve several groups of
one name, one after the other. Rank 0 tells the others, under the number of the attempt:

    url      the coordinator's
    group    a name that no other group of that coordinator has
    host     rank 0's host
    error    the reason why there is no coordinator; the rest is missing then
"""

from __future__ import annotations

import os
import socket
import uuid
from datetime import timedelta
from typing import Any, Final, NamedTuple

import gradserver
from gradserver.protocol.errors import (
    DisagreementError,
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    JoinRefusedError,
    UsageError,
)
from gradserver.protocol.limits import MAX_TIMEOUT
from gradserver.protocol.log import log
from gradserver.protocol.url import parse_target
from gradserver.torch import groups
from gradserver.torch.coordinator import REACHING_SECONDS, URL, coordinator_url, hear, reach, tell
from gradserver.torch.errors import as_torchs
from gradserver.torch.operations import Operations
from gradserver.torch.private import (
    HAS_PYTHON_BACKENDS,
    TORCHCOMMS,
    Store,
    backends_by_device,
    host_of,
    uses_torchcomms,
)
from gradserver.torch.reconfiguring import ReconfigurableProcessGroup
from gradserver.worker.client import Worker

_KEY: Final = "gradserver"
GROUP: Final = "GRADSERVER_GROUP"
"""Environment variable with the name of the default group, for a coordinator that serves certain groups only."""

_PLAIN: Final = (
    "group %r of torch.distributed is on %s. Its sums are plain: without a wire format, quorum, robust mean, policy "
    "for NaN, noise scale or ledger of gradients. Rounds of gradients have these: "
    "gradserver.torch.DistributedDataParallel, or register_comm_hook(gradserver.torch.Rounds(), "
    "gradserver.torch.hook). docs/torch-backend.md says why"
)


class Root(NamedTuple):
    """The group that a process has connected to, and of which others are sub-groups."""

    url: str
    worker: Worker
    process: int
    ranks: tuple[int, ...]


_roots: list[Root] = []


def create(wanted: Any, options: Any) -> Any:
    """Make a group: torch calls this at each of its members, with what it has `wanted` and the caller's ``options``."""
    ranks = tuple(wanted.global_ranks_in_group) or tuple(range(wanted.group_size))
    try:
        others = _check(options)
        if getattr(wanted, "enable_reconfigure", False):
            return _to_be_formed(wanted, others)
        worker = _subgroup(ranks, wanted.timeout) or _connected(wanted, ranks)
    except GradServerError as error:
        raise as_torchs(error) from error.__cause__
    operations = Operations(worker, wanted.group_rank, wanted.group_size, wanted.timeout, ranks)
    return groups.made_of(operations, wanted.store, wanted.group_id, wanted.timeout, bool(others))


def _check(options: Any) -> list[str]:
    """Check what can be wrong before any process is asked. Return the backends that other devices of the group have."""
    if uses_torchcomms():
        raise UsageError(f"{TORCHCOMMS} gives all groups to torchcomms, which has no 'gradserver': unset it")
    if options is not None:
        raise InvalidArgumentError(
            f"the backend 'gradserver' has no options, and got {type(options).__name__}: formats of the wire, means "
            f"and policies are for rounds of gradients, which gradserver.torch.DistributedDataParallel exchanges"
        )
    by_device = backends_by_device()
    others = sorted({name for name in by_device.values() if name != "gradserver"})
    if others and not HAS_PYTHON_BACKENDS:
        text = ",".join(f"{device}:{name}" for device, name in by_device.items())
        raise UsageError(
            f"the backend is {text!r}, and with this torch, before 2.14, 'gradserver' would replace "
            f"{', '.join(others)} on all devices: give 'gradserver' alone, and make another group by "
            f"new_group(backend='{others[0]}')"
        )
    return others


def _to_be_formed(wanted: Any, others: list[str]) -> Any:
    """Make a group that has no members yet."""
    if others:
        raise UsageError(f"a group that is reconfigured has one backend, and this one has {others[0]!r}, too")

    def formed(url: str, worker: Worker) -> None:
        if not wanted.global_ranks_in_group:
            _roots.append(Root(url, worker, os.getpid(), tuple(range(worker.world_size))))

    return ReconfigurableProcessGroup(
        wanted.group_rank, wanted.group_size, wanted.store, wanted.group_id, wanted.timeout, formed
    )


def _subgroup(ranks: tuple[int, ...], timeout: timedelta) -> Worker | None:
    """Return a sub-group of a group that this process has connected to; None if there is none that has these ranks."""
    _roots[:] = [root for root in _roots if root.process == os.getpid() and not root.worker.closed]
    for root in _roots:
        if set(ranks) <= set(root.ranks) and list(ranks) == sorted(ranks):
            return root.worker.subgroup([root.ranks.index(rank) for rank in ranks], _limit(timeout))
    return None


def _connected(wanted: Any, ranks: tuple[int, ...]) -> Worker:
    """Connect to a group of its own."""
    rank, size, store = wanted.group_rank, wanted.group_size, wanted.store
    if not 0 <= rank < size:
        raise InvalidRankError(f"rank is {rank}, and must be from 0 to {size - 1}: world_size is {size}")
    url, group = "", f"torch-{uuid.uuid4().hex[:12]}"
    if size > 1 or os.environ.get(URL):
        url, group = _agreed(store, rank, group)
        reach(url, min(_limit(wanted.timeout), REACHING_SECONDS))
    worker = gradserver.connect(url, rank, size, group, timeout=max(_limit(wanted.timeout), 1.0))
    if not wanted.global_ranks_in_group:
        _roots.append(Root(url, worker, os.getpid(), ranks))
        if rank == 0:
            log.info(_PLAIN, worker.group, f"the coordinator at {url}" if url else "a coordinator of its own")
    return worker


def _agreed(store: Store, rank: int, group: str) -> tuple[str, str]:
    """Return the coordinator's URL and the group's name, which rank 0 decides."""
    attempt, own = _attempt(store, rank), os.environ.get(URL)
    key = f"{_KEY}/{attempt}"

    def found() -> str:
        return _checked(own or (_roots[0].url if _roots else "") or coordinator_url(host_of(store)))

    if rank == 0:
        told = tell(store, key, found, group=os.environ.get(GROUP) or group, given=bool(own))
    else:
        told = hear(store, key)
    if own and not told["given"]:
        raise DisagreementError(
            f"{URL} is {own} at this rank {rank}, and not set at rank 0, on {told['host']}, which has started a "
            f"coordinator at {told['url']}: set it for all ranks, or for none"
        )
    return _checked(own or str(told["url"])), str(told["group"])


def _checked(url: str) -> str:
    try:
        parse_target(url)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{URL} in the environment: {error.message}") from None
    return url


def _attempt(store: Store, rank: int) -> int:
    """Count this rank's attempts to make the group. JoinRefusedError if another process has this rank."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    attempt = store.add(f"{_KEY}/rank/{rank}", 1)
    if attempt > 1:
        other = store.get(f"{_KEY}/rank/{rank}/{attempt - 1}").decode()
        if other != me:
            store.add(f"{_KEY}/rank/{rank}", -1)
            raise JoinRefusedError(
                f"rank {rank} of this group is {other}, and this is {me}: give each process a rank of its own, and "
                f"each run a store (or file) of its own. torchrun keeps the store over a restart, unless it has "
                f"--rdzv-backend=gradserver, or TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set"
            )
    store.set(f"{_KEY}/rank/{rank}/{attempt}", me)
    return int(attempt)


def _limit(timeout: timedelta) -> float:
    return min(timeout.total_seconds(), MAX_TIMEOUT)
