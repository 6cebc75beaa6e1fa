"""Devices of replicas, and checks of the module that is put there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gradserver.protocol.errors import InvalidArgumentError, LayoutError
from gradserver.protocol.limits import MIB

Device = int | str | torch.device


def checked_devices(devices: Iterable[Device] | None) -> tuple[torch.device, ...]:
    """Return the devices of the replicas: by default all CUDA devices, or one CPU without any.

    Raises:
        InvalidArgumentError: there is none, or one does not exist.
        LayoutError: one is neither a CPU nor a CUDA device.
    """
    if devices is None:
        return tuple(torch.device("cuda", number) for number in range(_cuda_count())) or (torch.device("cpu"),)
    if isinstance(devices, (str, int, torch.device)):
        raise InvalidArgumentError(f"devices is a list with the device of each replica, not {devices!r}")
    found = tuple(_checked(device) for device in devices)
    if not found:
        raise InvalidArgumentError("devices is empty: there is a replica for each device, so give one at least")
    return found


def _cuda_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _checked(named: Device) -> torch.device:
    try:
        device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"{named!r} is not a device of torch: {error}") from None
    if device.type == "cpu":
        return device if device.index else torch.device("cpu")
    if device.type != "cuda":
        raise LayoutError(f"a replica on {named!r} is not possible: they are on the CPU or on CUDA devices")
    count = _cuda_count()
    number = device.index if device.index is not None else (torch.cuda.current_device() if count else 0)
    if number >= count:
        raise InvalidArgumentError(f"there is no device {named!r}: this process sees {count} CUDA devices")
    return torch.device("cuda", number)


def plain(device: torch.device) -> torch.device:
    """Return the device of tensors: a CPU with a number is the CPU."""
    return torch.device("cpu") if device.type == "cpu" else device


def described(devices: Sequence[torch.device], is_balanced: bool) -> str:
    """Return a line about the replicas' devices: how many, which, and whether they are alike."""
    counted = "1 replica" if len(devices) == 1 else f"{len(devices)} replicas"
    shown = ", ".join(f"{device} ({_kind(device)})" for device in dict.fromkeys(devices))
    pace = "each gets a part of the batch by its speed" if is_balanced else "the slowest sets the pace"
    return f"{counted} on {shown}" + ("" if are_alike(devices) else f"; devices differ, and {pace}")


def are_alike(devices: Iterable[torch.device]) -> bool:
    """Return true if all devices are of one kind, so that they are about as fast."""
    return len({_kind(device) for device in devices}) == 1


def _kind(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return "1 thread" if threads == 1 else f"{threads} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory // MIB:,} MiB"


def moved_to(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device. LayoutError, with its name, for a tensor that has no elements."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise LayoutError(
                f"{name!r} is on the meta device, and has no elements: call module.to_empty(device=…), and load a state"
            )
    return module.to(device)


def check_replicable(module: nn.Module, home: torch.device) -> None:
    """Refuse a module of which there cannot be replicas, or that is not on the first device.

    Raises:
        InvalidArgumentError: some part cannot be replicated. The error names it and says what to do.
        LayoutError: a parameter or a buffer is on another device.
    """
    for path, part in module.named_modules():
        at = f"module {path!r}" if path else "the module"
        if isinstance(part, torch.jit.ScriptModule):
            raise InvalidArgumentError(f"{at} is compiled by torch.jit, and has no replicas: give the plain module")
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None:
            raise InvalidArgumentError(
                f"{at} is compiled, and its replicas would run the compiled one's parameters: give the plain module"
            )
        if "forward" in vars(part):
            raise InvalidArgumentError(
                f"the forward of {at} was replaced on the object itself, and so belongs to this object alone: replace "
                f"it on the class"
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise InvalidArgumentError(
                f"{at} is a torch.nn.SyncBatchNorm, which needs a process for each device: use BatchNorm. Its "
                f"statistics are those of the first replica's samples"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise InvalidArgumentError(f"{name!r} has no shape yet: run the lazy module once before")
        if tensor.device != home:
            raise LayoutError(
                f"{name!r} is on {tensor.device}, and the first replica on {home}: the module stays on the first of "
                f"the devices"
            )
