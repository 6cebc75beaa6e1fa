"""The offer of this process: what it can do for the plane of its group, found out without an exception.

torch is asked only if the process has imported it, or if a plane is demanded that needs it. A worker with numpy alone
stays without torch. A driver that is broken makes a reason, and never an error.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from gradserver.protocol.errors import BackendUnavailableError, InvalidArgumentError
from gradserver.protocol.limits import MAX_DEVICES, MAX_LABEL, MAX_TROUBLE
from gradserver.protocol.offers import Device, Offer
from gradserver.protocol.planes import AMONG_MEMBERS, AUTO, GLOO, NCCL

T = TypeVar("T")

LOCAL_VARIABLES: Final = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Variables with the place of a process on its host: of torchrun and `gradserver run`, mpirun, and Slurm last."""
HOST_VARIABLE: Final = "GRADSERVER_HOST"
"""Variable that says on which host a process is, for the planes alone."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_UUID: Final = re.compile(r"(?:GPU-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_NOT_IMPORTED: Final = "it was not imported before the worker joined"


class Availability(NamedTuple):
    """An answer that is true or false, with its reason. `is_nccl_available` gives it."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


def is_nccl_available() -> Availability:
    """Tell whether this process can use NCCL: with a CUDA device, and a torch that has NCCL.

    The answer is true or false where a condition is expected, and its ``reason`` says why. It imports torch.
    """
    offer = _of_torch(Offer(), imports=True)
    if not offer.torch or not offer.devices or not offer.nccl:
        return Availability(False, offer.trouble)
    device = offer.devices[0]
    return Availability(True, f"NCCL {offer.nccl} of torch {offer.torch}, on {device.name}")


def offer_of(plane: str, imports: bool = False) -> Offer:
    """Return what this process offers when it demands ``plane``. With ``imports`` it imports torch, if there is any.

    Raises:
        BackendUnavailableError: it demands a plane that needs torch.distributed, and has none.
        InvalidArgumentError: GRADSERVER_HOST is no name of a host.
    """
    offer = Offer(plane=plane, host=_label(socket.gethostname()), host_id=_host_id())
    if plane not in (AUTO, *AMONG_MEMBERS):
        return offer
    offer = _of_torch(offer, imports or plane in AMONG_MEMBERS)
    if plane in AMONG_MEMBERS and not offer.backends:
        raise BackendUnavailableError(
            f"plane is {plane!r}, which needs torch with torch.distributed: {offer.trouble}. Install torch here, or "
            f"leave plane out"
        )
    return offer


def _of_torch(offer: Offer, imports: bool) -> Offer:
    """Add what torch says; ``imports``: import it if that has not happened."""
    try:
        torch = import_module("torch") if imports else sys.modules.get("torch")
        if torch is None:
            return offer._replace(trouble=_NOT_IMPORTED)
        offer = offer._replace(torch=_label(str(torch.__version__)))
    except Exception as error:  # a broken installation raises anything
        return offer._replace(trouble=_trouble("torch cannot be imported", error))
    offer = offer._replace(backends=_asked(lambda: _backends(torch), ()))
    try:
        return _of_cuda(offer, torch)
    except Exception as error:  # so does a broken driver
        return offer._replace(devices=(), trouble=_trouble("CUDA cannot be used", error))


def _backends(torch: Any) -> tuple[str, ...]:
    distributed = torch.distributed
    if not distributed.is_available():
        return ()
    has = {GLOO: distributed.is_gloo_available, NCCL: distributed.is_nccl_available}
    return tuple(name for name, there in has.items() if there())


def _of_cuda(offer: Offer, torch: Any) -> Offer:
    """Add the CUDA devices of this process, its own first, and NCCL."""
    count = torch.cuda.device_count()
    if not count:
        return offer._replace(trouble=_why_no_device(torch))
    own = _own_device(torch, count)
    order = [own, *(index for index in range(count) if index != own)]
    devices = tuple(_device(torch.cuda.get_device_properties(index)) for index in order[:MAX_DEVICES])
    offer = offer._replace(devices=devices, driver=_asked(_driver, ""))
    if NCCL not in offer.backends:
        return offer._replace(trouble="this torch is built without NCCL")
    return offer._replace(nccl=_label(".".join(map(str, torch.cuda.nccl.version()))))


def _why_no_device(torch: Any) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {_label(str(torch.__version__))} is built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all devices"
    return "the driver shows none"


def _own_device(torch: Any, count: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the device that this process uses: the current one, or by the place of the process on its host."""
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if current:
        return int(current)
    return local_place(environment, count)


def local_place(environment: Mapping[str, str], count: int) -> int:
    """Return which of ``count`` devices a launcher means, by the place of the process on its host; 0 without one."""
    place = next((environment[name] for name in LOCAL_VARIABLES if environment.get(name)), "0")
    return int(place) % count if place.isdecimal() else 0


def _device(properties: Any) -> Device:
    identity = _asked(lambda: str(properties.uuid), "")
    found = _UUID.fullmatch(identity)  # torch 2.3 has none, and that of 2.4 is not text
    return Device(_label(properties.name), f"GPU-{found[1]}" if found else "", int(properties.total_memory))


def _driver() -> str:
    words = _DRIVER.read_text().partition("\n")[0].split()
    return _label(next((word for word in words if word[0].isdigit() and "." in word), ""))


def _host_id() -> str:
    """Return what is equal for processes of this host, in containers too; or what GRADSERVER_HOST says instead."""
    if told := os.environ.get(HOST_VARIABLE):
        if _label(told) != told:
            raise InvalidArgumentError(
                f"{HOST_VARIABLE} is {told!r}, and must be up to {MAX_LABEL} printable ASCII characters"
            )
        return told
    return _asked(lambda: _label(_BOOT_ID.read_text().strip()), "") or f"{uuid.getnode():012x}"


def _asked(ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer; ``otherwise`` if there is only an error."""
    try:
        return ask()
    except Exception:
        return otherwise


def _trouble(what: str, error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _cut(f"{what}: {lines[0]}" if lines else f"{what}: {type(error).__name__}", MAX_TROUBLE)


def _label(text: str) -> str:
    return _cut(text, MAX_LABEL)


def _cut(text: str, longest: int) -> str:
    """Return as much of a text as an offer may hold. It is printable ASCII."""
    return "".join(one if one.isascii() and one.isprintable() else "?" for one in text[:longest])
