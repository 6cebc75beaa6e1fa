"""The choice of a group's plane, by what its workers offer and demand.

`OBSTACLES` has a table for each plane: what keeps a group from it, and what to change. The first obstacle that is found
is the reason. A group goes by the plane that is demanded, of the coordinator or of a worker. Where none is demanded it
goes by `DIRECT` if nothing is in the way, and else by the coordinator's plane: each worker by its own channel.

A worker with which a demanded plane is impossible is refused when it joins (`check`). Later nothing is refused: a group
that cannot go by the plane that is demanded any more goes by the coordinator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from gradserver.protocol.errors import DisagreementError, JoinRefusedError
from gradserver.protocol.limits import MAX_PLANE_REASON
from gradserver.protocol.offers import UNTOLD, Offer, backend_of
from gradserver.protocol.planes import AUTO, CHANNELS, DIRECT, GLOO, IN_PROCESS, NCCL, SHM, TCP


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

    @property
    def uses_nccl(self) -> bool:
        """True if the workers' direct plane is NCCL."""
        return backend_of(offer for _, offer in self.workers) == NCCL


class Obstacle(NamedTuple):
    """One reason against a plane.

    Attributes:
        find: returns the reason as a part of a sentence; an empty text if it does not apply.
        when: the condition, for people.
        remedy: what to change.
        binds: true if the plane is impossible then; false if only nobody takes it without a demand.
        lasts: true if more workers do not remove it.
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


def _torch_differs(case: Case) -> str:
    first, *others = case.workers
    for name, offer in others:
        if offer.torch.partition("+")[0] != first.offer.torch.partition("+")[0]:
            return f"{first.name!r} has torch {first.offer.torch}, and {name!r} has {offer.torch}"
    return ""


OBSTACLES: Final[Mapping[str, tuple[Obstacle, ...]]] = {
    DIRECT: (
        Obstacle(
            lambda case: "rounds are closed without stragglers" if case.leaves_late else "",
            "the coordinator has `--quorum` or `--backup`",
            "start the coordinator without --quorum and --backup",
        ),
        Obstacle(
            lambda case: f"{case.workers[0].name!r} is alone" if len(case.workers) == 1 else "",
            "the group has one worker",
            "let more workers join",
            binds=False,
            lasts=False,
        ),
        Obstacle(
            lambda case: "" if case.has_commits else "its modules were wrapped when it was not possible",
            "the group began with workers that could not go by it",
            "start the group anew, with these workers",
            binds=False,
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
        Obstacle(
            _first_without(lambda offer: not offer.devices, "has no CUDA device"),
            "a worker has no CUDA device",
            "give each worker a CUDA device",
            binds=False,
        ),
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
    found = _obstacle(case, DIRECT if demand is None else demand.plane, not_binding=demand is None)
    channels = {offer.channel for _, offer in workers}
    farthest = next(channel for channel in CHANNELS if channel in channels)
    reason = found[0] if found is not None else ""
    if demand is None and found is None:
        return Choice(DIRECT, f"each worker has a CUDA device of its own and NCCL {workers[0].offer.nccl}")
    if demand is None:
        return Choice(farthest, _cut(reason))
    if found is None:
        return Choice(demand.plane, _cut(f"{demand.by} demands it"), True)
    return Choice(farthest, _cut(f"{demand.by} demands {demand.plane}, and {reason}"))


def can_become_direct(case: Case, demanded: str) -> bool:
    """Tell whether a group can go by the direct plane, now or when more workers have joined."""
    demand = _demand(case.workers, demanded)
    if demand is not None or all(offer == UNTOLD for _, offer in case.workers):
        return demand is not None and demand.plane == DIRECT
    return not any(one.lasts and one.find(case) for one in OBSTACLES[DIRECT])


def check(group: str, others: Sequence[Candidate], new: Candidate, leaves_late: bool, demanded: str) -> None:
    """Raise the error that keeps a worker out of a group with ``others``, as to its plane, if there is one.

    Raises:
        DisagreementError: it demands another plane than others, or than the coordinator.
        JoinRefusedError: with it the plane that is demanded is impossible.
    """
    demand = _demand(others, demanded)
    if demand is not None and new.offer.plane not in (AUTO, demand.plane):
        raise DisagreementError(
            f"{new.name!r} demands plane {new.offer.plane!r} for group {group!r}, and {demand.by} demands "
            f"{demand.plane!r}: demand the same everywhere (plane= of connect, GRADSERVER_PLANE, serve --plane), or "
            f"nothing (plane='auto')"
        )
    workers = [*others, new]
    demand = _demand(workers, demanded)
    found = None if demand is None else _obstacle(Case(workers, leaves_late), demand.plane)
    if demand is not None and found is not None:
        raise JoinRefusedError(
            f"group {group!r} cannot go by plane {demand.plane!r}, which {demand.by} demands: {found[0]}. "
            f"To go by it, {found[1].remedy}; or demand another plane, or none"
        )


def _demand(workers: Sequence[Candidate], demanded: str) -> Demand | None:
    """Return what is demanded: by the coordinator, or else by the first worker that demands anything."""
    if demanded != AUTO:
        return Demand(demanded, "the coordinator (serve --plane)")
    return next((Demand(offer.plane, repr(name)) for name, offer in workers if offer.plane != AUTO), None)


def _obstacle(case: Case, plane: str, not_binding: bool = False) -> tuple[str, Obstacle] | None:
    """Return the first reason against ``plane``, with those that are ``not_binding`` or without them."""
    for one in OBSTACLES[plane]:
        if (one.binds or not_binding) and (reason := one.find(case)):
            return reason, one
    return None


def _cut(reason: str) -> str:
    """Return as much of a reason as may travel."""
    packed = reason.encode(errors="replace")
    if len(packed) <= MAX_PLANE_REASON:
        return reason
    return packed[: MAX_PLANE_REASON - 3].decode(errors="ignore") + "…"
