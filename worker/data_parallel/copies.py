"""Copies of a module's parameters on further devices, and the sum of the gradients that these copies get.

The parameters are the module's, and an optimizer steps these alone. A forward reads copies through `_Followed`, which
is the identity, so that autograd itself brings the gradients back:

    parameter ──► copy on cuda:1 ──► forward of its replicas ──► output ─┐
        │                                                               ├─► joined, loss
        └───────► forward of the replicas on cuda:0 ─────────► output ──┘

Parameters travel by bucket (`gradserver.worker.torch_ddp.grouping`). In backward a bucket's gradients are packed, sent
and added up as soon as all of them are there, while the device computes those of earlier blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradserver.worker.torch_ddp.buckets import memory_order
from gradserver.worker.torch_ddp.grouping import Group, group_parameters

_ALIGNED: Final = 64
"""Elements to which a copy's place is aligned: kernels for matrices are slower at odd addresses."""


class Copies:
    """Copies of all parameters of a module, on each of some devices.

    Args:
        module: the module.
        devices: devices of the copies. Each is another one than the module's.
        cap_mb: size in MiB of the buckets of a module, or of a part of one, that has no blocks.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], cap_mb: float) -> None:
        self._parameters = list(module.parameters())
        self._like = _likeness(self._parameters)
        self._seen: list[object] = []
        """Marks of the parameters at the latest look, and at the latest refresh."""
        self._marks: list[object] = []
        trained = [p for p in self._parameters if p.requires_grad and p.numel()]
        groups = group_parameters(module, None, cap_mb) if trained else []
        grouped = {id(p) for group in groups for _, p in group.parameters}
        by_type: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters():
            if id(parameter) not in grouped:
                by_type.setdefault(parameter.dtype, []).append((name, parameter))
        self._trained = [_Bucket(self, group, devices) for group in groups]
        self._frozen = [_Bucket(self, Group("frozen", tuple(named)), devices) for named in by_type.values()]
        self._devices = devices
        self._stale, self._accumulates = True, False

    def fit(self) -> bool:
        """Look at the parameters. Return whether these can be their copies, as no shape, type or device has changed."""
        marks = [(mark(parameter), parameter.requires_grad) for parameter in self._parameters]
        self._seen = [_latest_step.number, *marks]
        return self._seen == self._marks or _likeness(self._parameters) == self._like

    def may_have_changed(self) -> None:
        """Note that the parameters' values may have changed, although nothing shows it."""
        self._stale = True

    def accumulate(self, accumulates: bool) -> None:
        """Say whether values stay as they are after a backward, unless something shows a change."""
        self._accumulates = accumulates

    def backward_passes(self) -> None:
        """Note a backward. The loop may step now, also by hand, in ways that nothing shows."""
        self._stale = self._stale or not self._accumulates

    def refresh(self) -> None:
        """Give the copies the parameters' values of the latest look, unless these cannot have changed."""
        if self._stale or self._seen != self._marks:
            for bucket in (*self._trained, *self._frozen):
                bucket.refresh()
        self._marks, self._stale = self._seen, False

    def tensors(self) -> list[dict[int, Tensor]]:
        """Return, for each device, what a forward is to use for a parameter, by the parameter's id.

        With autograd these are new tensors, whose gradients become the parameter's.
        """
        found: list[dict[int, Tensor]] = [{} for _ in self._devices]
        for bucket in (*self._trained, *self._frozen):
            keys = [id(parameter) for parameter in bucket.parameters]
            rows = bucket.followed() if torch.is_grad_enabled() and bucket in self._trained else bucket.rows
            for device, row in zip(found, rows, strict=True):
                device.update(zip(keys, row, strict=True))
        return found


class _LatestStep:
    """Number of the latest step of any optimizer in this process. Fused ones do not count in autograd's counters."""

    def __init__(self) -> None:
        self._numbers = count()
        self.number = next(self._numbers)

    def __call__(self, *_: object) -> None:
        self.number = next(self._numbers)


_latest_step = _LatestStep()
register_optimizer_step_post_hook(_latest_step)  # once, as other threads may iterate over the hooks at any time


def mark(tensor: Tensor) -> object:
    """Return what differs after a change that autograd knows of, and after ``tensor.data = …``."""
    return object() if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def _likeness(parameters: Sequence[nn.Parameter]) -> list[tuple[Any, ...]]:
    return [(p.shape, p.dtype, p.device, p.requires_grad) for p in parameters]


class _Bucket:
    """Parameters that travel together, and their copies.

    Attributes:
        parameters: the parameters.
        rows: the copies, for each device.
    """

    def __init__(self, copies: Copies, group: Group, devices: Sequence[torch.device]) -> None:
        self.parameters = [parameter for _, parameter in group.parameters]
        self._copies = copies
        self._length = sum(_room(parameter) for parameter in self.parameters)
        self._flats = [self._new(device) for device in devices]
        # By `data` each copy has a counter of changes of its own, which a refresh leaves alone. So a graph of before
        # stays valid: if values have changed in between, the module's own parameters say so.
        self.rows = [[place.data for place in self._places(flat)] for flat in self._flats]

    def _new(self, device: torch.device) -> Tensor:
        return torch.empty(self._length, dtype=self.parameters[0].dtype, device=device)

    def _places(self, flat: Tensor) -> list[Tensor]:
        """Return the places of the parameters in ``flat``, in their shapes and strides."""
        rooms = torch.split(flat, [_room(parameter) for parameter in self.parameters])
        return [_shaped(room[: p.numel()], p) for room, p in zip(rooms, self.parameters, strict=True)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack the parameters, and send them to each device at once."""
        packed = self._new(self.parameters[0].device)
        torch._foreach_copy_(self._places(packed), list[Tensor](self.parameters))
        for flat in self._flats:
            flat.copy_(packed, non_blocking=flat.is_cuda)

    def followed(self) -> list[list[Tensor]]:
        """Return the copies as results of the parameters, for autograd, for each device."""
        follow: Any = _Followed.apply
        tensors, length = follow(self, *self.parameters), len(self.parameters)
        return [list(tensors[begin : begin + length]) for begin in range(0, len(tensors), length)]

    def added_up(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the sums over the devices, in their order, on the parameters' device; None where there is nothing."""
        self._copies.backward_passes()
        length, home = len(self.parameters), self.parameters[0].device
        rows = [gradients[begin : begin + length] for begin in range(0, len(gradients), length)]
        used = [number for number in range(length) if any(row[number] is not None for row in rows)]
        if not used:
            return [None] * length
        sizes = [self.parameters[number].numel() for number in used]
        packed = [self._packed(row, used) for row in rows if any(gradient is not None for gradient in row)]
        total = _sum(packed, home)
        found: list[Tensor | None] = [None] * length
        for number, piece in zip(used, torch.split(total, sizes), strict=True):
            found[number] = _shaped(piece, self.parameters[number])
        return found

    def _packed(self, row: Sequence[Tensor | None], used: Sequence[int]) -> Tensor:
        """Return the gradients of one device behind each other."""
        there = next(gradient for gradient in row if gradient is not None)
        pieces = []
        for number in used:
            parameter, gradient = self.parameters[number], row[number]
            if gradient is None:
                pieces.append(there.new_zeros(parameter.numel()))
            else:
                pieces.append(gradient.permute(memory_order(parameter)).reshape(-1))
        return torch.cat(pieces)


def _sum(packed: list[Tensor], home: torch.device) -> Tensor:
    if len(packed) > 1 and not torch.is_grad_enabled() and all(one.is_cuda for one in packed) and home.type == "cuda":
        none = torch.zeros_like(packed[0], device=home)  # what is on `home` itself, autograd adds
        add: Any = comm.reduce_add  # by NCCL where torch can, and otherwise one after the other
        reduced: Tensor = add([none, *packed], home.index)
        return reduced
    total = packed[0].to(home)
    for other in packed[1:]:
        total = total + other.to(home)
    return total


class _Followed(torch.autograd.Function):
    """Identity from parameters to their copies. The gradient of a parameter is the sum of those of its copies."""

    @staticmethod
    def forward(ctx: Any, bucket: _Bucket, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(copied.detach() for row in bucket.rows for copied in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        bucket: _Bucket = ctx.bucket
        return (None, *bucket.added_up(gradients))


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGNED) * _ALIGNED


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return ``flat`` in the shape of ``like``, with its elements in the same order in memory."""
    order = memory_order(like)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([like.shape[dimension] for dimension in order]).permute(inverse)
