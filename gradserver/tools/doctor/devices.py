"""torch and the CUDA devices of this machine: what they are, how fast pinned memory is copied, and NCCL."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from gradserver.protocol.limits import GIB, MIB
from gradserver.protocol.offers import Offer
from gradserver.tools.doctor.report import Report, Section

_COPIED: Final = 64 * MIB
_COPIES: Final = 5
_MOST: Final = 8
"""Devices that are measured."""


def examine(report: Report, offer: Offer, copies: bool) -> None:
    """Add what ``offer`` says of this process; with ``copies`` the rates of copies, if there are CUDA devices."""
    section = report.section("devices", "torch and devices")
    section.add("torch", offer.torch, offer.torch or f"none: {offer.trouble}")
    if not offer.torch:
        return
    section.add("back_ends", list(offer.backends), ", ".join(offer.backends) or "none")
    devices = [one._asdict() for one in offer.devices]
    text = ", ".join(f"{one.name} ({one.memory / GIB:.0f} GiB)" for one in offer.devices)
    section.add("cuda", devices, text or f"no device: {offer.trouble}")
    section.add("nccl", offer.nccl, offer.nccl or f"no: {offer.trouble or 'there is no CUDA device'}")
    if not offer.devices:
        if offer.trouble.startswith("CUDA cannot be used"):
            report.find(offer.trouble, "install a driver that fits this torch (nvidia-smi shows the driver's version)")
        return
    section.add("driver", offer.driver, offer.driver or "unknown")
    if not offer.nccl:
        report.find(f"CUDA devices cannot reduce among themselves: {offer.trouble}", "install a torch with NCCL")
    _links(section, len(offer.devices))
    if copies:
        _rates(report, section, len(offer.devices))


def _links(section: Section, count: int) -> None:
    """Add how NCCL gets from device to device: by peer access, or through the host's memory."""
    cuda: Any = import_module("torch").cuda
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    by_peer = [pair for pair in pairs if _has_access(cuda, *pair)]
    if pairs:
        text = f"{len(by_peer)} of {len(pairs)} pairs have peer access; NCCL takes the host's memory for the others"
        section.add("peer_access", [list(pair) for pair in by_peer], text)


def _has_access(cuda: Any, one: int, other: int) -> bool:
    try:
        return bool(cuda.can_device_access_peer(one, other))
    except RuntimeError:
        return False


def _rates(report: Report, section: Section, count: int) -> None:
    """Add the rates at which pinned memory is copied to each device, and back."""
    for index in range(min(count, _MOST)):
        try:
            to_device, to_host = copy_rates(index)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            section.add(f"copies_{index}", None, f"not measured: {first}")
            change = "free its memory, or hide it (CUDA_VISIBLE_DEVICES)"
            report.find(f"nothing can be copied to device {index} ({first})", change)
            continue
        text = f"{to_device:.1f} GB/s to device {index}, {to_host:.1f} GB/s from it, of pinned memory"
        section.add(f"copies_{index}", {"to_device": to_device, "to_host": to_host}, text)


def copy_rates(index: int) -> tuple[float, float]:
    """Measure pinned copies to a device and from it, in GB/s: the best of some copies of 64 MiB."""
    torch: Any = import_module("torch")
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED, dtype=torch.uint8, device=f"cuda:{index}")
    with torch.cuda.device(index):
        return _best(torch, there, host), _best(torch, host, there)


def _best(torch: Any, target: Any, source: Any) -> float:
    took = []
    for _ in range(_COPIES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    return float(_COPIED / min(took) / 1e9)
