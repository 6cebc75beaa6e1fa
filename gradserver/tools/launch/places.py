"""The workers of a run: which rank runs where, with which device, and what its environment says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.tools.launch.devices import VISIBLE, visible_to
from gradserver.tools.launch.hosts import Host

PER_GPU: Final = "gpu"
"""The number of workers of a host that stands for one per GPU."""
_OF_THE_HOST: Final = frozenset(
    {"_", "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOST", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "TMP"}
    | {"TEMP", "DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "TERM_PROGRAM", "LS_COLORS", "PYTHONPATH"}
)
_OF_THE_SESSION: Final = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_", "GRADSERVER_SHARD_TOKEN")
_ONE_LINE_EACH: Final = {"PYTHONUNBUFFERED": "1"}
"""Lines come when they are printed, and are not lost when a worker is killed."""
_LAST_SIGHT: Final = {"PYTHONFAULTHANDLER": "1"}
"""A worker that is killed by a fault of its own prints where it was."""


class Hello(NamedTuple):
    """The description of a host, as its agent gives it.

    Attributes:
        host: its own name.
        address: its address as the launcher reached it, if the remote shell says so.
        devices: its GPUs.
        cores: number of cores that its processes may use.
        port: a free port, kept for rank 0's rendezvous.
    """

    host: str
    address: str
    devices: tuple[str, ...]
    cores: int
    port: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Hello:
        """Read an agent's first frame."""
        devices = tuple(map(str, fields["devices"]))
        return cls(str(fields["host"]), str(fields["address"]), devices, int(fields["cores"]), int(fields["port"]))


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one worker.

    Attributes:
        host: the number of its host in the list of hosts.
        device: its CUDA_VISIBLE_DEVICES; None to leave that as it is.
        environment: variables that it gets beside those of the launcher.
    """

    rank: int
    local_rank: int
    host: int
    name: str
    device: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def counts(hosts: Sequence[Host], hellos: Sequence[Hello], asked: int | str | None) -> list[int]:
    """Return the number of workers of each host: its own, or ``asked``, or one per GPU, or one.

    Raises:
        InvalidArgumentError: one per GPU is asked for, and a host has none; or there are too many.
    """
    found = []
    for host, hello in zip(hosts, hellos, strict=True):
        if host.workers is None and asked == PER_GPU and not hello.devices:
            raise InvalidArgumentError(
                f"--nproc gpu: {host} has no GPU, by CUDA_VISIBLE_DEVICES, nvidia-smi -L or /dev/nvidia*. "
                f"For workers on the CPU give their number: --nproc 2"
            )
        each = max(1, len(hello.devices)) if asked in (None, PER_GPU) else int(asked or 1)
        found.append(each if host.workers is None else host.workers)
    if sum(found) > MAX_WORLD_SIZE:
        raise InvalidArgumentError(f"{sum(found)} workers are too many: a group has {MAX_WORLD_SIZE} at most")
    return found


def assign(
    hosts: Sequence[Host], hellos: Sequence[Hello], counts: Sequence[int], all_gpus: bool = False
) -> list[Place]:
    """Give each worker its place: ranks in the order of the hosts, devices in turn."""
    places: list[Place] = []
    for number, (hello, count) in enumerate(zip(hellos, counts, strict=True)):
        base = hosts[number].name.rpartition("@")[2] or hello.host
        for local_rank in range(count):
            device = None if all_gpus else visible_to(local_rank, hello.devices)
            places.append(Place(len(places), local_rank, number, f"{base}:{local_rank}", device))
    return places


def environment_of(
    place: Place, places: Sequence[Place], hello: Hello, master: tuple[str, int], url: str, own: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that a worker gets beside those that it inherits.

    Args:
        place: its place.
        places: those of all workers.
        hello: what its host has.
        master: address and port for the rendezvous of torch.distributed, at rank 0's host.
        url: the coordinator's.
        own: environment of the launcher.
    """
    here = sum(other.host == place.host for other in places)
    group = own.get("GRADSERVER_NAME")
    found = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(place.host),
        "NODE_RANK": str(place.host),
        "GROUP_WORLD_SIZE": str(places[-1].host + 1),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "GRADSERVER_URL": url,
        "GRADSERVER_NAME": f"{group}:{place.rank}" if group else place.name,
    }
    if "OMP_NUM_THREADS" not in own:
        found["OMP_NUM_THREADS"] = str(max(1, hello.cores // here))
    for name, value in (_ONE_LINE_EACH | _LAST_SIGHT).items():
        if name not in own:
            found[name] = value
    if place.device is not None:
        found[VISIBLE] = place.device
    return found


def carried(own: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the launcher's environment that holds on other hosts, too."""
    found = {
        name: value for name, value in own.items() if name not in _OF_THE_HOST and not name.startswith(_OF_THE_SESSION)
    }
    if re.search(r"GPU-|MIG-", found.get(VISIBLE, "")):  # names of this host's devices
        del found[VISIBLE]
    return found
