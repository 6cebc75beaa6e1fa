"""Sums of squares of tensors, on whichever devices they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradserver.worker.devices.cuda import fetch


def squares_of(flats: Iterable[Tensor]) -> list[float]:
    """Return the sum of squares of each tensor, in float64. Devices are waited for once."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for place, flat in enumerate(flats):
        own = torch.linalg.vector_norm(flat.detach(), dtype=_wide(flat)).double() ** 2
        by_device.setdefault(flat.device, []).append((place, own))
    found: dict[int, float] = {}
    for device, sums in by_device.items():
        stacked = torch.stack([own for _, own in sums])
        on_host = stacked if device.type == "cpu" else fetch(stacked)
        found.update(zip([place for place, _ in sums], on_host.tolist(), strict=True))
    return [squares for _, squares in sorted(found.items())]


def _wide(flat: Tensor) -> torch.dtype:
    if flat.is_complex():
        return torch.complex128 if flat.dtype == torch.complex128 else torch.complex64
    return torch.float64 if flat.dtype == torch.float64 or not flat.is_cuda else torch.float32
