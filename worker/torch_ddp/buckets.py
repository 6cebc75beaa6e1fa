"""Buckets: the flat memory in which gradients and buffers travel.

`gradserver.worker.torch_ddp.grouping` has what is in which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import BY_NAME, UINT8
from gradserver.protocol.errors import DTypeError, LayoutError, SizeMismatchError
from gradserver.protocol.exchange import Op
from gradserver.protocol.limits import KIB, MIB
from gradserver.protocol.plan import Bucket, Component
from gradserver.worker.devices.cuda import fetch
from gradserver.worker.tensors import bind, wire_dtype
from gradserver.worker.torch_ddp.grouping import Group

USED_KEY: Final = "used"
SENDER_KEY: Final = "sender"
_LARGE_BUFFER_BYTES: Final = 256 * KIB
"""Size from which a buffer's bytes weigh more than a message of its own."""
_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slot:
    """One parameter's place in a bucket.

    Attributes:
        name: as in ``module.named_parameters()``.
        parameter: the parameter.
        component: its name and shape in the plan. The shape is that of its memory: a channels_last weight
            of shape (O, I, H, W) has (O, H, W, I).
        fired: how often its gradient became ready in this backward.
        expected: how often it does in a whole one.
        touched: whether it became ready since the last exchange.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.fired = 0
        self.expected = 1
        self.touched = False
        self._order = memory_order(parameter)
        self.component = Component(name, tuple(parameter.shape[dimension] for dimension in self._order))

    def place(self, flat: Tensor, begin: int) -> None:
        """Place the gradient in ``flat`` from element ``begin`` on."""
        self._home = flat[begin : begin + self.component.numel]
        self._address = self._home.data_ptr()
        self._view = self._make_view()

    def _make_view(self) -> Tensor:
        # Strides like the parameter's own: fused optimizers walk both memories side by side.
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return self._home.view(self.component.shape).permute(inverse)

    @property
    def view(self) -> Tensor:
        """The gradient's place, in the parameter's shape and strides."""
        if self._view.data_ptr() != self._address:  # Module.to() replaces the memory under a .grad
            self._view = self._make_view()
        return self._view

    @property
    def grad(self) -> Tensor | None:
        """The parameter's gradient; LayoutError or DTypeError if it does not fit the bucket any more."""
        grad = self.parameter.grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            layout = str(grad.layout).removeprefix("torch.")
            raise LayoutError(f"the gradient of {self.name!r} is {layout}, and only dense ones travel (sparse=False)")
        if grad.dtype != self._home.dtype or grad.device != self._home.device:
            raise DTypeError(
                f"the gradient of {self.name!r} is {grad.dtype} on {grad.device}, but the module was wrapped with "
                f"{self._home.dtype} on {self._home.device}: move or convert a module before wrapping it"
            )
        return grad

    def take(self, as_view: bool) -> bool:
        """Bring the gradient into the bucket, zeros if there is none. Return whether there was one.

        With ``as_view`` the parameter's ``.grad`` then is that place in the bucket.
        """
        grad = self.grad
        if grad is None:
            self._home.zero_()
            return False
        if grad.data_ptr() != self._address:
            self.view.copy_(grad.detach())
            if as_view:
                self.parameter.grad = self.view
        return True

    def give(self, as_view: bool) -> None:
        """Make the bucket's content the parameter's gradient."""
        grad = self.grad
        if as_view:
            if grad is None or grad.data_ptr() != self._address:
                self.parameter.grad = self.view
        elif grad is None:
            self.parameter.grad = self.view.clone()
        else:
            grad.copy_(self.view)


class FlatBucket:
    """One row of the plan, and the memory that it is exchanged from and received into.

    Attributes:
        spec: the row.
        dtype: torch's element type.
        device: where its tensors are.
        flat: the memory, one-dimensional; empty until `place`.
    """

    def __init__(self, key: str, like: Tensor, components: tuple[Component, ...], op: Op) -> None:
        self.spec = Bucket(key, wire_dtype(like), components, op)
        self.dtype, self.device = like.dtype, like.device
        self.flat = torch.empty(0)

    def place(self, flat: Tensor) -> None:
        """Place the bucket in ``flat``, which has ``spec.numel`` elements of ``dtype`` on ``device``."""
        self.flat = flat


class GradientBucket(FlatBucket):
    """One bucket of gradients, with a slot for each parameter, in order."""

    def __init__(self, group: Group) -> None:
        self.slots = [Slot(name, parameter) for name, parameter in group.parameters]
        components = tuple(slot.component for slot in self.slots)
        super().__init__(group.key, group.parameters[0][1], components, Op.MEAN)

    def place(self, flat: Tensor) -> None:
        """Place the bucket in ``flat``, which has ``spec.numel`` elements of ``dtype`` on ``device``."""
        super().place(flat)
        begin = 0
        for slot in self.slots:
            slot.place(flat, begin)
            begin += slot.component.numel


class BufferBucket(FlatBucket):
    """Buffers of one element type, packed. Between rounds ``flat`` holds their values after the last exchange."""

    def __init__(self, key: str, module: nn.Module, names: Sequence[str]) -> None:
        components = tuple(Component(name, tuple(module.get_buffer(name).shape)) for name in names)
        super().__init__(key, module.get_buffer(names[0]), components, Op.FIRST)
        self._owners = [module.get_submodule(name.rpartition(".")[0]) for name in names]

    def changed(self) -> bool:
        """Return whether any buffer differs from the bucket's content, bit by bit."""
        if self.flat.device.type != "cpu":
            differ = [_differ(packed, buffer) for packed, buffer in self._pairs()]
            return any(one is None for one in differ) or bool(fetch(torch.stack(differ).any()))  # type: ignore[arg-type]
        return not all(_alike(packed, buffer) for packed, buffer in self._pairs())

    def pack(self) -> None:
        """Copy the buffers, as they are now, into the bucket."""
        for packed, buffer in self._pairs():
            packed.copy_(buffer)

    def unpack(self) -> None:
        """Copy the bucket's content into the buffers."""
        for packed, buffer in self._pairs():
            is_here = packed.device.type == "cpu"  # elsewhere an answer would have to be waited for
            if is_here and _is_large(packed) and _alike(packed, buffer):  # a table that never changes: only read it
                continue
            # As BatchNorm itself, past autograd's check for changes in place: a buffer that another forward saved may
            # change before its backward.
            buffer.data.copy_(packed)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Read anew: modules assign to their buffers.
        places = torch.split(self.flat, list(self.spec.sizes))
        for place, component, owner in zip(places, self.spec.components, self._owners, strict=True):
            name = component.name
            buffer = owner._buffers.get(name.rpartition(".")[2])
            if buffer is None or tuple(buffer.shape) != component.shape:
                now = "gone" if buffer is None else f"of shape {tuple(buffer.shape)}"
                raise SizeMismatchError(
                    f"buffer {name!r} had shape {component.shape} when the module was wrapped and is {now}; "
                    f"with broadcast_buffers=False it is not exchanged"
                )
            yield place.view(component.shape), buffer


def _is_large(buffer: Tensor) -> bool:
    return buffer.numel() * buffer.element_size() >= _LARGE_BUFFER_BYTES


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have the same bits."""
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if _is_large(one) and one.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        return _same_bytes(bind(one, writes=False).data, bind(other, writes=False).data)
    bits = _BITS.get(one.element_size(), torch.uint8)
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
        bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


def _differ(one: Tensor, other: Tensor) -> Tensor | None:
    """Return, on the device, whether two tensors of one shape have different bits. None if they cannot be compared."""
    if one.dtype != other.dtype or one.device != other.device:
        return None
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = _BITS.get(one.element_size(), torch.uint8)
    return (one.view(bits) != other.view(bits)).any()


def _same_bytes(one: Bytes, other: Bytes) -> bool:
    """Compare words, in blocks that stay in a core's cache: some ten times faster than `torch.equal` of bytes."""
    for begin in range(0, one.size, MIB):
        mine, theirs = one[begin : begin + MIB], other[begin : begin + MIB]
        words = mine.size // 8 * 8
        if not np.array_equal(mine[:words].view(np.uint64), theirs[:words].view(np.uint64)):
            return False
        if not np.array_equal(mine[words:], theirs[words:]):
            return False
    return True


def buffer_buckets(module: nn.Module, ignored: Collection[str] = ()) -> list[BufferBucket]:
    """Pack the module's buffers, but for those with ``ignored`` names.

    A bucket travels if anything in it has changed. So buffers that are likely to change together share one: the small
    buffers of one element type and device of all modules of one class. A large buffer has a bucket of its own.
    """
    groups: dict[tuple[torch.dtype, torch.device, str], list[str]] = {}
    for name, buffer in module.named_buffers():
        if buffer.numel() and name not in ignored:
            owner = type(module.get_submodule(name.rpartition(".")[0]))
            together = f"buffer {name}" if _is_large(buffer) else f"{owner.__module__}.{owner.__qualname__}"
            groups.setdefault((buffer.dtype, buffer.device, together), []).append(name)
    devices = list(dict.fromkeys(device for _, device, _ in groups))
    count: Counter[str] = Counter()
    buckets = []
    for (dtype, device, _), names in groups.items():
        number = devices.index(device)
        key = f"buffers.{str(dtype).removeprefix('torch.')}" + (f".device{number}" if number else "")
        buckets.append(BufferBucket(f"{key}.{count[key]}" if count[key] else key, module, names))
        count[key] += 1
    return buckets


def sender_spec() -> Bucket:
    """Return the plan's row for the member that sends its buffers to all: the lowest that has a batch."""
    return Bucket(SENDER_KEY, BY_NAME["int32"], (Component("member whose buffers are sent", (1,)),), Op.FIRST)


def used_spec(slots: int) -> Bucket:
    """Return the plan's row for the ``slots`` parameters that any worker has a gradient for: one byte each."""
    return Bucket(USED_KEY, UINT8, (Component("parameters with a gradient", (slots,)),), Op.MAX)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest in memory; as they are if the tensor has gaps."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dimension: -strides[dimension]))
    plain = tuple(range(tensor.ndim))
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else plain
