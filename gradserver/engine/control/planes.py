"""The choice of a group's plane, by what its workers offer and demand.

`OBSTACLES` has a table for each plane: what keeps a group from it, and what to change. The first obstacle that is found
is the reason. A group goes by the plane that is demanded, of the coordinator or of a worker. Where none is demanded it
goes by `DIRECT` if nothing is in the way, else by `HIERARCHICAL` if nothing is. Else it goes by the coordinator's
plane: each worker by its own channel.

A worker with which a demanded plane is impossible is refused when it joins (`check`). Later nothing is refused: a group
that cannot go by the plane that is demanded any more goes by the coordinator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from gradserver.protocol.errors import DisagreementError, JoinRefusedError
from gradserver.protocol.limits import MAX_PLANE_REASON
from gradserver.protocol.means import PLAIN, Mean
from gradserver.protocol.offers import UNTOLD, Offer, backend_of, by_host
from gradserver.protocol.planes import (
    AMONG_MEMBERS,
    AUTO,
    CHANNELS,
    DIRECT,
    GLOO,
    HIERARCHICAL,
    IN_PROCESS,
    NCCL,
    SHM,
    TCP,
)


class Candidate(NamedTuple):
    """A worker that is to go by the plane, with its name and offer."""

    name: str
    offer: Offer


class Choice(NamedTuple):
    """A plane, and why it is that one. ``demanded``: the coordinator or a worker demands it."""

    plane: str = TCP
    reason: str = ""
    demanded: bool = False

    def __str__(self) -> str:
        return f"{self.plane}, because {self.reason}" if self.reason else self.plane


class Demand(NamedTuple):
    """A plane that is demanded, and by what."""

    plane: str
    by: str


class Case(NamedTuple):
    """Facts that a choice goes by: the workers by rank, and whether rounds are closed without late ones."""

    workers: Sequence[Candidate]
    leaves_late: bool = False
    has_commits: bool = True
    """True if modules have a commit, or none is wrapped yet."""
    mode: str = "sync"
    """Mode of the group's rounds."""
    mean: Mean = PLAIN
    audit: str = ""

    @property
    def uses_nccl(self) -> bool:
        """True if the workers would reduce among themselves with NCCL."""
        return backend_of(offer for _, offer in self.workers) == NCCL

    def shared_hosts(self) -> list[Case]:
        """Return a case for each host with several workers."""
        hosts = by_host([offer for _, offer in self.workers])
        return [self._replace(workers=[self.workers[rank] for rank in ranks]) for ranks in hosts if len(ranks) > 1]


class Obstacle(NamedTuple):
    """One reason against a plane.

    Attributes:
        find: returns the reason as a part of a sentence; an empty text if it does not apply.
        when: the condition, for people.
        remedy: what to change.
        binds: true if the plane is impossible then; false if it is only not chosen without a demand.
        lasts: true if more workers do not remove it. Otherwise no worker is refused for it.
    """

    find: Callable[[Case], str]
    when: str
    remedy: str
    binds: bool = True
    lasts: bool = True


# ── what is in the way ────────────────────────────────────────────────────────────────────────────────


def _first(applies: Callable[[Offer], bool], what: str) -> Callable[[Case], str]:
    """Return a function that names the first worker to which ``what`` applies."""
    return lambda case: next((f"{name!r} {what}" for name, offer in case.workers if applies(offer)), "")


def _first_without(lacks: Callable[[Offer], bool], what: str) -> Callable[[Case], str]:
    """Return a function that names the first worker which ``lacks`` something, and its trouble."""

    def find(case: Case) -> str:
        for name, offer in case.workers:
            if lacks(offer):
                return f"{name!r} {what}" + (f" ({offer.trouble})" if offer.trouble else "")
        return ""

    return find


def _with_nccl(find: Callable[[Case], str]) -> Callable[[Case], str]:
    """Return ``find`` for groups that would use NCCL."""
    return lambda case: find(case) if case.uses_nccl else ""


def _with_gloo(find: Callable[[Case], str]) -> Callable[[Case], str]:
    """Return ``find`` for groups that would use gloo."""
    return lambda case: "" if case.uses_nccl else find(case)


def _nccl_differs(case: Case) -> str:
    first, *others = case.workers
    for name, offer in others:
        if offer.nccl != first.offer.nccl:
            return f"{first.name!r} has NCCL {first.offer.nccl}, and {name!r} has {offer.nccl}"
    return ""


def _device_is_shared(case: Case) -> str:
    owners: dict[str, str] = {}
    for name, offer in case.workers:
        device = offer.devices[0]
        if device.uuid in owners:
            return f"{owners[device.uuid]!r} and {name!r} have one CUDA device ({device.name}, {device.uuid})"
        owners[device.uuid] = name
    return ""


def _in_hosts(find: Callable[[Case], str]) -> Callable[[Case], str]:
    """Return ``find`` for the workers of each host that has several."""
    return lambda case: next((reason for host in case.shared_hosts() if (reason := find(host))), "")


def _host_of_devices(case: Case) -> str:
    """Return the name of the first host with several workers, which all have a CUDA device; empty if none has."""
    found = (host.workers[0].offer.host for host in case.shared_hosts() if host.uses_nccl)
    return next((repr(name) for name in found), "")


_first_without_device: Final = _first_without(lambda offer: not offer.devices, "has no CUDA device")


def _no_device(case: Case) -> str:
    """Return the first worker without a device, unless none has one, and each is on a host of its own."""
    offers = [offer for _, offer in case.workers]
    can_try = not any(offer.devices for offer in offers) and 1 < len(by_host(offers)) == len(offers)
    return "" if can_try else _first_without_device(case)


def _torch_differs(case: Case) -> str:
    first, *others = case.workers
    for name, offer in others:
        if offer.torch.partition("+")[0] != first.offer.torch.partition("+")[0]:
            return f"{first.name!r} has torch {first.offer.torch}, and {name!r} has {offer.torch}"
    return ""


_COMMON: Final = (
    Obstacle(
        lambda case: "" if case.mode == "sync" else f"rounds of mode {case.mode!r} do not wait for all workers",
        "the coordinator has `--mode bounded` or `--mode async`",
        "start the coordinator with --mode sync",
    ),
    Obstacle(
        lambda case: "rounds are closed without stragglers" if case.leaves_late else "",
        "the coordinator has `--quorum` or `--backup`",
        "start the coordinator without --quorum and --backup",
    ),
    Obstacle(
        lambda case: f"the mean is {case.mean}, which needs each contribution" if case.mean.is_robust else case.audit,
        "contributions have to meet (`--mean`, `--audit`, `--outliers`), and libraries among workers only add up",
        "start the coordinator without --mean and --audit, and with --outliers report",
    ),
    Obstacle(
        _first(lambda offer: offer.channel == IN_PROCESS, "is a thread of the coordinator's process"),
        "a worker is a thread of a `LocalCluster`",
        "start each worker as a process",
        binds=False,
    ),
    Obstacle(
        _first_without(lambda offer: not offer.torch, "has no torch"),
        "a worker had not imported torch when it joined",
        "install torch for each worker, and import it before connect",
    ),
)
"""Obstacles wherever members reduce among themselves."""
_UNWRAPPED: Final = Obstacle(
    lambda case: (
        ""
        if case.has_commits
        else "the first workers of the group could not reduce among themselves, and modules are wrapped since then"
    ),
    "the first workers of the group could not go by it, and modules are wrapped since then",
    "start the group anew, with these workers",
    binds=False,
)
"""Obstacle behind all others: those are the reason as long as there is one of them."""
_CONNECTED: Final = (
    Obstacle(
        _with_nccl(_first_without(lambda offer: not offer.nccl, "has no NCCL")),
        "a worker's torch has no NCCL",
        "install a torch with NCCL",
    ),
    Obstacle(
        _with_nccl(_nccl_differs),
        "the versions of NCCL differ",
        "install the same torch for all workers",
    ),
    Obstacle(
        _with_nccl(_first(lambda offer: not offer.devices[0].uuid, "does not know its CUDA device's identity")),
        "a worker's torch does not tell the UUID of a device",
        "install torch 2.5 or newer",
    ),
    Obstacle(
        _with_nccl(_device_is_shared),
        "two workers have one CUDA device",
        "give each worker a CUDA device of its own: call torch.cuda.set_device before connect, or set "
        "CUDA_VISIBLE_DEVICES. With CUDA_VISIBLE_DEVICES= the workers use gloo",
    ),
    Obstacle(
        _with_gloo(_first_without(lambda offer: GLOO not in offer.backends, "has no gloo")),
        "a worker has no CUDA device, and a worker's torch has no gloo",
        "install a torch with gloo, or give each worker a CUDA device",
    ),
    Obstacle(
        _with_gloo(_torch_differs),
        "a worker has no CUDA device, and the versions of torch differ",
        "install the same torch for all workers",
    ),
    Obstacle(
        lambda case: "" if any(offer.store for _, offer in case.workers) else "no worker hosts a rendezvous",
        "no worker could host a rendezvous",
        "look in the log of the workers for the reason",
    ),
)
"""Obstacles among workers that are in one communicator."""

OBSTACLES: Final[Mapping[str, tuple[Obstacle, ...]]] = {
    DIRECT: (
        *_COMMON[:3],
        Obstacle(
            lambda case: f"{case.workers[0].name!r} is alone" if len(case.workers) == 1 else "",
            "the group has one worker",
            "let more workers join",
            binds=False,
            lasts=False,
        ),
        *_COMMON[3:],
        Obstacle(
            _no_device,
            "a worker has no CUDA device; if none has, and each has a host of its own, rounds take the quicker way",
            "give each worker a CUDA device",
            binds=False,
        ),
        *_CONNECTED,
        _UNWRAPPED,
    ),
    HIERARCHICAL: (
        *_COMMON,
        Obstacle(
            lambda case: "" if case.shared_hosts() else "each host has one worker",
            "each host has one worker",
            "let more workers join on each host; in containers that share a host, set GRADSERVER_HOST to its name",
            lasts=False,
        ),
        Obstacle(
            lambda case: "" if _host_of_devices(case) else "no host has several workers with a CUDA device each",
            "no host has several workers with a CUDA device each",
            "give each worker a CUDA device",
            binds=False,
            lasts=False,
        ),
        *(one._replace(find=_in_hosts(one.find), when=f"of workers on one host: {one.when}") for one in _CONNECTED),
        _UNWRAPPED,
    ),
    TCP: (
        Obstacle(
            _first(lambda offer: offer.channel == IN_PROCESS, "is a thread of the coordinator's process"),
            "a worker is a thread of a `LocalCluster`",
            "start each worker as a process",
        ),
    ),
    SHM: (
        Obstacle(
            _first(lambda offer: offer.channel == TCP, "is on another host than the coordinator, or has channel='tcp'"),
            'a worker is on another host than the coordinator, or connects with `channel="tcp"`',
            "start all workers on the coordinator's host, with channel='auto' or 'shm'",
        ),
        Obstacle(
            _first(lambda offer: offer.channel == IN_PROCESS, "is a thread of the coordinator's process"),
            "a worker is a thread of a `LocalCluster`",
            "start each worker as a process",
        ),
    ),
    IN_PROCESS: (
        Obstacle(
            _first(lambda offer: offer.channel != IN_PROCESS, "is another process than the coordinator"),
            "a worker is another process than the coordinator",
            "use gradserver.LocalCluster",
        ),
    ),
}
"""Obstacles of each plane; the first that applies is the reason."""

# ── the choice ────────────────────────────────────────────────────────────────────────────────────────


def choose(case: Case, demanded: str = AUTO) -> Choice:
    """Return the plane of a group with some workers, by rank. ``demanded`` is what the coordinator demands."""
    workers = case.workers
    if all(offer == UNTOLD for _, offer in workers):
        return Choice()
    demand = _demand(workers, demanded)
    if demand is None:
        return _best(case)
    found = _obstacle(OBSTACLES[demand.plane], case, lambda one: one.binds)
    if found is None:
        return Choice(demand.plane, _cut(f"{demand.by} demands it"), True)
    return Choice(_farthest(case), _cut(f"{demand.by} demands {demand.plane}, and {found[0]}"))


def _best(case: Case) -> Choice:
    """Return the plane that nothing is in the way of, where none is demanded."""
    direct, levels = (_obstacle(OBSTACLES[plane], case, lambda _: True) for plane in AMONG_MEMBERS)
    if direct is None:
        with_nccl = f"each worker has a CUDA device of its own and NCCL {case.workers[0].offer.nccl}"
        tried = "each worker is on a host of its own: rounds go over the coordinator where that is quicker"
        return Choice(DIRECT, with_nccl if case.uses_nccl else tried)
    if levels is None:
        return Choice(HIERARCHICAL, _cut(f"{direct[0]}, and workers on {_host_of_devices(case)} have one each"))
    return Choice(_farthest(case), _cut(direct[0]))


def _farthest(case: Case) -> str:
    """Return the plane that is called after the farthest channel."""
    channels = {offer.channel for _, offer in case.workers}
    return next(channel for channel in CHANNELS if channel in channels)


def can_have_commits(case: Case, demanded: str) -> bool:
    """Tell whether members of a group can reduce among themselves, now or when more workers have joined."""
    demand = _demand(case.workers, demanded)
    if demand is not None or all(offer == UNTOLD for _, offer in case.workers):
        return demand is not None and demand.plane in AMONG_MEMBERS
    return any(_obstacle(OBSTACLES[plane], case, lambda one: one.lasts) is None for plane in AMONG_MEMBERS)


def check(group: str, others: Case, new: Candidate, demanded: str) -> None:
    """Raise the error that keeps a worker out of a group with ``others``, as to its plane, if there is one.

    ``facts`` are those of the group; the workers in them do not matter.

    Raises:
        DisagreementError: it demands another plane than others, or than the coordinator.
        JoinRefusedError: with it the plane that is demanded is impossible.
    """
    demand = _demand(others.workers, demanded)
    if demand is not None and new.offer.plane not in (AUTO, demand.plane):
        raise DisagreementError(
            f"{new.name!r} demands plane {new.offer.plane!r} for group {group!r}, and {demand.by} demands "
            f"{demand.plane!r}: demand the same everywhere (plane= of connect, GRADSERVER_PLANE, serve --plane), or "
            f"nothing (plane='auto')"
        )
    workers = [*others.workers, new]
    demand = _demand(workers, demanded)
    if demand is None:
        return
    found = _obstacle(OBSTACLES[demand.plane], others._replace(workers=workers), lambda one: one.binds and one.lasts)
    if found is not None:
        raise JoinRefusedError(
            f"group {group!r} cannot go by plane {demand.plane!r}, which {demand.by} demands: {found[0]}. "
            f"To go by it, {found[1].remedy}; or demand another plane, or none"
        )


def _demand(workers: Sequence[Candidate], demanded: str) -> Demand | None:
    """Return what is demanded: by the coordinator, or else by the first worker that demands anything."""
    if demanded != AUTO:
        return Demand(demanded, "the coordinator (serve --plane)")
    return next((Demand(offer.plane, repr(name)) for name, offer in workers if offer.plane != AUTO), None)


def _obstacle(
    obstacles: Sequence[Obstacle], case: Case, counts: Callable[[Obstacle], bool]
) -> tuple[str, Obstacle] | None:
    """Return the first reason against a plane, of the obstacles that count."""
    for one in obstacles:
        if counts(one) and (reason := one.find(case)):
            return reason, one
    return None


def _cut(reason: str) -> str:
    """Return as much of a reason as may travel."""
    packed = reason.encode(errors="replace")
    if len(packed) <= MAX_PLANE_REASON:
        return reason
    return packed[: MAX_PLANE_REASON - 3].decode(errors="ignore") + "…"
