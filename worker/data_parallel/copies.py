"""Copies of a module's parameters on further devices, and the sum of the gradients that these copies get.

The parameters are the module's, and an optimizer steps these alone. A forward reads copies through `_Followed`, which
is the identity, so that autograd itself brings the gradients back:

    parameter ──► copy on cuda:1 ──► forward of its replicas ──► output ─┐
        │                                                               ├─► joined, loss
        └───────► forward of the replicas on cuda:0 ─────────► output ──┘

Parameters travel by bucket (`gradserver.worker.torch_ddp.grouping`). In backward a bucket's gradients are packed, sent
and added up as soon as all of them are there. Meanwhile the device computes those of earlier blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Final, NamedTuple

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

        These are new tensors, as modules may give a tensor other memory: recurrent ones do so for cuDNN. With autograd
        their gradients become the parameter's.
        """
        found: list[dict[int, Tensor]] = [{} for _ in self._devices]
        for bucket in (*self._trained, *self._frozen):
            keys = [id(parameter) for parameter in bucket.parameters]
            rows = bucket.followed() if torch.is_grad_enabled() and bucket in self._trained else bucket.detached()
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
    return object() if tensor.is_inference() or not has_memory(tensor) else (tensor._version, tensor.data_ptr())


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements lie in one memory. Those of a sparse or a nested one do not."""
    return tensor.layout is torch.strided and not tensor.is_nested


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
        self._forms = [_Form.of(parameter) for parameter in self.parameters]
        self._home = self.parameters[0].device
        self._flats = [self._new(device) for device in devices]
        # By `data` each copy has a counter of changes of its own, which a refresh leaves alone. So a graph of before
        # stays valid: if values have changed in between, the module's own parameters say so.
        self.rows = [[place.data for place in self._places(flat)] for flat in self._flats]

    def _new(self, device: torch.device) -> Tensor:
        return torch.empty(sum(form.room for form in self._forms), dtype=self.parameters[0].dtype, device=device)

    def _places(self, flat: Tensor) -> list[Tensor]:
        """Return the places of the parameters in ``flat``, in their shapes and strides."""
        rooms = torch.split(flat, [form.room for form in self._forms])
        return [form.shaped(room[: form.numel]) for room, form in zip(rooms, self._forms, strict=True)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Send the parameters to each device, packed into one copy."""
        packed: Tensor | None = None
        for flat, row in zip(self._flats, self.rows, strict=True):
            if is_near(flat.device, self._home):
                torch._foreach_copy_([copied.data for copied in row], list[Tensor](self.parameters))
                continue
            if packed is None:
                packed = self._new(self._home)
                torch._foreach_copy_(self._places(packed), list[Tensor](self.parameters))
            flat.copy_(packed, non_blocking=flat.is_cuda)

    def followed(self) -> list[list[Tensor]]:
        """Return the copies as results of the parameters, for autograd, for each device."""
        follow: Any = _Followed.apply
        tensors, length = follow(self, *self.parameters), len(self.parameters)
        return [list(tensors[begin : begin + length]) for begin in range(0, len(tensors), length)]

    def detached(self) -> list[list[Tensor]]:
        """Return the copies, for each device."""
        return [[copied.detach() for copied in row] for row in self.rows]

    def added_up(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the sums over the devices, in their order, on the parameters' device; None where there is nothing."""
        self._copies.backward_passes()
        length = len(self.parameters)
        rows = [gradients[begin : begin + length] for begin in range(0, len(gradients), length)]
        rows = [row for row in rows if any(gradient is not None for gradient in row)]
        if not rows:
            return [None] * length
        if len(rows) == 1 and is_near(_device_of(rows[0]), self._home):
            return rows[0]
        used = [number for number in range(length) if any(row[number] is not None for row in rows)]
        total = _sum([self._packed(row, used) for row in rows], self._home)
        pieces = torch.split(total, [self._forms[number].numel for number in used])
        found: list[Tensor | None] = [None] * length
        for number, piece in zip(used, pieces, strict=True):
            found[number] = self._forms[number].shaped(piece)
        return found

    def _packed(self, row: Sequence[Tensor | None], used: Sequence[int]) -> Tensor:
        """Return the gradients of one device behind each other, with zeros where it has none."""
        there = next(gradient for gradient in row if gradient is not None)
        pieces = ((self._forms[number], row[number]) for number in used)
        return torch.cat([there.new_zeros(form.numel) if one is None else form.flat(one) for form, one in pieces])


class _Form(NamedTuple):
    """The form of a parameter: its elements lie in memory in an order of its dimensions.

    Attributes:
        numel: number of elements.
        room: elements that a copy takes.
        shape: shape in the order in memory.
        order: dimensions from the slowest to the fastest in memory; None if that is their own order.
        inverse: the way back.
    """

    numel: int
    room: int
    shape: list[int]
    order: tuple[int, ...] | None
    inverse: list[int]

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        """Return the form of ``tensor``."""
        order, numel = memory_order(tensor), tensor.numel()
        inverse = sorted(range(len(order)), key=order.__getitem__)
        plain = list(order) == inverse == list(range(len(order)))
        room = -(-numel // _ALIGNED) * _ALIGNED
        return cls(numel, room, [tensor.shape[dimension] for dimension in order], None if plain else order, inverse)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements of ``tensor`` in the order in memory."""
        return tensor.reshape(-1) if self.order is None else tensor.permute(self.order).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """Return ``flat`` in the shape of the parameter."""
        return flat.view(self.shape) if self.order is None else flat.view(self.shape).permute(self.inverse)


def is_near(device: torch.device, home: torch.device) -> bool:
    """Return whether tensors on ``device`` are as good as at home, so that packing them is in vain."""
    return device == home


def _device_of(row: Sequence[Tensor | None]) -> torch.device:
    return next(gradient.device for gradient in row if gradient is not None)


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
