"""Buckets: the flat memory in which gradients and buffers travel.

`gradserver.worker.torch_ddp.grouping` has what is in which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, groupby
from math import prod
from operator import attrgetter, is_
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import BY_NAME, UINT8
from gradserver.protocol.errors import DTypeError, LayoutError
from gradserver.protocol.exchange import Op
from gradserver.protocol.limits import KIB, MIB
from gradserver.protocol.plan import BUFFERS_KEY, Bucket, Component
from gradserver.worker.devices.cuda import fetch
from gradserver.worker.tensors import bind, wire_dtype
from gradserver.worker.torch_ddp.grouping import Group
from gradserver.worker.torch_ddp.module_buffers import Owned, check_form

USED_KEY: Final = "used"
SENDER_KEY: Final = "sender"
OPTION: Final = "broadcast_buffers=False"
"""The option by which no buffers are exchanged."""
_LARGE_BUFFER_BYTES: Final = 256 * KIB
"""Size from which a buffer's bytes weigh more than a message of its own."""
_SMALL_GRADIENT_BYTES: Final = 16 * KIB
"""Size up to which a gradient costs more to look at than to copy. Small ones are brought together."""
_FEWEST_IN_A_ROW: Final = 8
"""Number of gradients from which on it pays to bring them as one."""
_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_dtype, _grad, _made = attrgetter("dtype"), attrgetter("grad"), attrgetter("made")


class _Place:
    """A gradient's place in flat memory.

    Attributes:
        home: its elements.
        address: where they begin.
        dtype: their type.
        device: where they are.
        made: the latest view of them.
    """

    def __init__(self, flat: Tensor, begin: int, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
        self.home = flat[begin : begin + prod(shape)]
        self.address = self.home.data_ptr()
        self.dtype, self.device = flat.dtype, flat.device
        self._shape, self._order = shape, order
        self.made = self._make_view()

    def _make_view(self) -> Tensor:
        # Strides like the parameter's own: fused optimizers walk both memories side by side. Other gradients of the
        # bucket have versions of their own.
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return self.home.view(self._shape).permute(inverse).data

    @property
    def view(self) -> Tensor:
        """The place in the parameter's shape and strides."""
        if self.made.data_ptr() != self.address:  # Module.to() replaces the memory under a .grad
            self.made = self._make_view()
        return self.made

    def holds(self, gradient: Tensor | None) -> bool:
        """Return whether ``gradient`` lies here."""
        return gradient is not None and gradient.numel() > 0 and gradient.data_ptr() == self.address


class _Scaled(NamedTuple):
    """A gradient that was brought, times ``factor``, to ``address`` when it had this ``version``."""

    grad: Tensor
    version: int
    factor: float
    address: int


class Slot:
    """One parameter's place in a bucket.

    Attributes:
        name: as in ``module.named_parameters()``.
        parameter: the parameter.
        component: its name and shape in the plan. The shape is that of its memory: a channels_last weight
            of shape (O, I, H, W) has (O, H, W, I).
        expected: how often its gradient becomes ready in a whole backward.
        here: its place, from `GradientBucket.place` on.
        is_small: whether its gradient is brought together with others. On a device each is, by the stream that made it.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.expected = 1
        self.is_small = (
            parameter.device.type == "cpu" and parameter.numel() * parameter.element_size() <= _SMALL_GRADIENT_BYTES
        )
        self._scaled: _Scaled | None = None
        self.here: _Place
        self._order = memory_order(parameter)
        self.component = Component(name, tuple(parameter.shape[dimension] for dimension in self._order))

    def place_in(self, flat: Tensor, begin: int) -> _Place:
        """Return the gradient's place in ``flat`` from element ``begin`` on."""
        return _Place(flat, begin, self.component.shape, self._order)

    @property
    def view(self) -> Tensor:
        """The gradient's place, in the parameter's shape and strides."""
        return self.here.view

    @property
    def is_in_place(self) -> bool:
        """True if the parameter's gradient lies there."""
        return self.here.holds(self.parameter.grad)

    @property
    def grad(self) -> Tensor | None:
        """The parameter's gradient; LayoutError or DTypeError if it does not fit the bucket any more."""
        grad = self.parameter.grad
        return None if grad is None else self.checked(grad)

    def checked(self, grad: Tensor) -> Tensor:
        """Return ``grad``, the parameter's; LayoutError or DTypeError if it does not fit the bucket any more."""
        if grad.layout is not torch.strided:
            layout = str(grad.layout).removeprefix("torch.")
            raise LayoutError(f"the gradient of {self.name!r} is {layout}, and only dense ones travel (sparse=False)")
        here = self.here
        if grad.dtype != here.dtype == self.parameter.dtype and grad.device == here.device:
            raise DTypeError(
                f"the gradient of {self.name!r} is {grad.dtype}, and the parameter {here.dtype}: gradients travel in "
                f"the parameter's type, and their mean is taken in fp32 or wider. Leave its grad_dtype as it is"
            )
        if grad.dtype != here.dtype or grad.device != here.device:
            raise DTypeError(
                f"the gradient of {self.name!r} is {grad.dtype} on {grad.device}, but the module was wrapped with "
                f"{here.dtype} on {here.device}: move or convert a module before wrapping it"
            )
        return grad

    def scale(self, factor: float) -> bool:
        """Bring the gradient times ``factor`` into the bucket, zeros if there is none. Return whether there was one.

        It stays the parameter's gradient, and is kept until the next one is brought: so `take_kept` has it, and memory
        for the next one is not freed and had again, which would cost more than a copy.
        """
        grad, before = self.grad, self._scaled
        if grad is None:
            self.here.home.zero_()
            self._scaled = None
        elif before is None or before.grad is not grad or before[1:] != (grad._version, factor, self.here.address):
            self._scaled = _Scaled(grad, grad._version, factor, self.here.address)
            self.scale_again()
        return grad is not None

    def scale_again(self) -> None:
        """Bring into the bucket once more what `scale` has brought there."""
        if self._scaled is None:
            self.here.home.zero_()
        else:
            torch.mul(self._scaled.grad.detach(), self._scaled.factor, out=self.view)

    @property
    def kept(self) -> Tensor:
        """The gradient that was scaled, one-dimensional in the order of the bucket's memory; zeros without one."""
        if self._scaled is None:
            return torch.zeros_like(self.here.home)
        return self._scaled.grad.detach().permute(self._order).reshape(-1)

    def take_kept(self) -> None:
        """Make the gradient that was scaled the parameter's, as it is."""
        if self._scaled is not None:
            self.parameter.grad, self._scaled = self._scaled.grad, None


def bring(slots: Sequence[Slot], as_view: bool) -> list[bool]:
    """Bring the gradients of ``slots`` to their places, zeros where there is none. Return for each if there was one.

    With ``as_view`` each ``.grad`` then is that place.
    """
    have, absent, views, grads = [], [], [], []
    for slot in slots:
        grad, here = slot.parameter.grad, slot.here
        have.append(grad is not None)
        if grad is None:
            absent.append(here.home)
        elif slot.checked(grad).data_ptr() != here.address:
            view = here.view
            views.append(view)
            grads.append(grad)
            if as_view:
                slot.parameter.grad = view
    if absent:
        torch._foreach_zero_(absent)
    if views:
        torch._foreach_copy_(views, grads)
    return have


class _Row:
    """Gradients side by side in a bucket. Loops of C look at them, and bring small one-dimensional ones.

    Attributes:
        slots: their slots, in order.
    """

    def __init__(self, slots: Sequence[Slot], begin: int = 0) -> None:
        self.slots = slots
        self._parameters = [slot.parameter for slot in slots]
        self._sizes = [slot.component.numel for slot in slots]
        self._begin, self._end = begin, begin + sum(self._sizes)
        self._home: Tensor
        self._places: list[_Place]
        self._addresses: list[int]

    def place(self, flat: Tensor) -> None:
        """Note that the bucket, and each slot, is in ``flat``."""
        self._home = flat[self._begin : self._end]
        self._places = [slot.here for slot in self.slots]
        self._addresses = [here.address for here in self._places]

    @property
    def is_in_place(self) -> bool:
        """True if each parameter's gradient is the view of its place, as a rule when it was brought."""
        views = [*map(_made, self._places)]
        return all(map(is_, map(_grad, self._parameters), views)) and self._have_memory(views)

    def _have_memory(self, views: Sequence[Tensor]) -> bool:
        return [*map(Tensor.data_ptr, views)] == self._addresses

    def bring(self, as_view: bool) -> bool:
        """Bring all gradients to their places as `bring` does. Return false, without an effect, if that has to do it.

        It has to where one is missing or does not fit, and tells of that. It also has to where only some are in place.
        """
        grads, views = [*map(_grad, self._parameters)], [*map(_made, self._places)]
        if {*map(type, grads)} != {Tensor} or {*map(_dtype, grads)} != {self._home.dtype}:
            return False
        if [*map(Tensor.numel, grads)] != self._sizes or not self._have_memory(views):
            return False
        if all(map(is_, grads, views)):
            return True
        try:
            torch.cat(grads, out=self._home)
        except RuntimeError:  # sparse, on another device, or here already
            return False
        if as_view:
            for parameter, view in zip(self._parameters, views, strict=True):
                parameter.grad = view
        return True


def _rows(slots: Sequence[Slot]) -> list[_Row]:
    """Return the rows among ``slots``, which are a whole bucket's."""
    begins = accumulate((slot.component.numel for slot in slots), initial=0)
    grouped = groupby(zip(slots, begins, strict=False), lambda one: one[0].is_small and one[0].parameter.ndim == 1)
    rows = [[*members] for is_row, members in grouped if is_row]
    return [_Row([slot for slot, _ in row], row[0][1]) for row in rows if len(row) >= _FEWEST_IN_A_ROW]


def hand_out(slots: Sequence[Slot], as_view: bool) -> None:
    """Make what lies in the places of ``slots`` the parameters' gradients."""
    views, grads = [], []
    for slot in slots:
        grad, here = slot.parameter.grad, slot.here
        if as_view and grad is here.made and grad.data_ptr() == here.address:  # as a rule
            continue
        if grad is not None and slot.checked(grad).data_ptr() == here.address and as_view:
            continue
        if as_view or grad is None:
            slot.parameter.grad = here.view if as_view else here.view.clone()
        else:
            views.append(here.view)
            grads.append(grad)
    if views:
        torch._foreach_copy_(grads, views)


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
        self._whole = _Row(self.slots)
        self._rows = _rows(self.slots)
        in_rows = {slot for row in self._rows for slot in row.slots}
        self._others = [slot for slot in self.slots if slot not in in_rows]
        self._spare: tuple[Tensor, list[_Place]] | None = None
        """Memory in which the bucket was before: the gradients of another round may lie there."""
        components = tuple(slot.component for slot in self.slots)
        super().__init__(group.key, group.parameters[0][1], components, Op.MEAN)

    def place(self, flat: Tensor) -> None:
        """Place the bucket in ``flat``, which has ``spec.numel`` elements of ``dtype`` on ``device``."""
        ends = accumulate(self.spec.sizes)
        places = [slot.place_in(flat, end - slot.component.numel) for slot, end in zip(self.slots, ends, strict=True)]
        self._move_to(flat, places)

    def _move_to(self, flat: Tensor, places: list[_Place]) -> None:
        super().place(flat)
        for slot, here in zip(self.slots, places, strict=True):
            slot.here = here
        for row in (self._whole, *self._rows):
            row.place(flat)

    @property
    def is_in_place(self) -> bool:
        """True if each parameter's gradient is the view of its place, as a rule when it was brought."""
        return self._whole.is_in_place

    def vacate(self, new_memory: Callable[[], Tensor]) -> None:
        """Place the bucket where none of its gradients lies. Two memories are enough: they lie in one of them."""
        if any(slot.is_in_place for slot in self.slots):
            before = self.flat, [slot.here for slot in self.slots]
            self._change(new_memory)
            self._spare = before

    def _change(self, new_memory: Callable[[], Tensor]) -> None:
        after, self._spare = self._spare, None
        if after is None:
            self.place(new_memory())
        else:
            self._move_to(*after)

    def take(self, as_view: bool, brought: Collection[Slot] = ()) -> bool:
        """Bring all gradients into the bucket, but for those that were ``brought``. Return if there are any."""
        slots = [slot for slot in self._others if slot not in brought] if brought else [*self._others]
        has = bool(brought)
        for row in self._rows:
            if row.bring(as_view):
                has = True
            else:
                slots += row.slots
        return any(bring(slots, as_view)) or has

    def scale(self, factor: float) -> bool:
        """Bring all gradients times ``factor`` into the bucket, and leave them as they are. Return if there were any.

        `vacate` comes before.
        """
        have = [slot.scale(factor) for slot in self.slots]
        return any(have)

    def move(self, as_view: bool, new_memory: Callable[[], Tensor]) -> Tensor:
        """Take the gradients that were scaled, as they are, into other memory. Return it.

        The bucket's memory is given up: something may still write there.
        """
        self._change(new_memory)
        for slot in self.slots:
            slot.take_kept()
        bring(self.slots, as_view)
        return self.flat


class BufferBucket(FlatBucket):
    """Buffers of one element type, packed. Between rounds ``flat`` holds their values after the last exchange."""

    def __init__(self, key: str, members: Sequence[tuple[Owned, Tensor]]) -> None:
        components = tuple(Component(owned.name, tuple(buffer.shape)) for owned, buffer in members)
        super().__init__(key, members[0][1], components, Op.FIRST)
        self._members = [owned for owned, _ in members]

    def changed(self) -> bool:
        """Return whether any buffer differs from the bucket's content, bit by bit."""
        if self.flat.device.type != "cpu":
            differ = [_differ(packed, buffer) for packed, buffer in self._pairs()]
            return any(one is None for one in differ) or bool(fetch(torch.stack(differ).any()))  # type: ignore[arg-type]
        return not all(_alike(packed, buffer) for packed, buffer in self._pairs())

    def pack(self) -> None:
        """Copy the buffers, as they are now, into the bucket."""
        for packed, buffer in self._pairs():
            packed.copy_(buffer.detach())

    def unpack(self) -> None:
        """Copy the bucket's content into the buffers."""
        for packed, buffer in self._pairs():
            is_here = packed.device.type == "cpu"  # elsewhere an answer would have to be waited for
            if is_here and _is_large(packed) and _alike(packed, buffer):  # a table that never changes: only read it
                continue
            # As BatchNorm itself, past autograd's check for changes in place: a buffer that another forward saved may
            # change before its backward.
            buffer.data.copy_(packed)

    def values(self) -> list[Tensor]:
        """Return copies of the buffers, as they are now."""
        return [buffer.detach().clone() for _, buffer in self._pairs()]

    def set_values(self, values: Sequence[Tensor]) -> None:
        """Give the buffers these values."""
        for (_, buffer), value in zip(self._pairs(), values, strict=True):
            buffer.data.copy_(value)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Read anew: modules assign to their buffers.
        places = torch.split(self.flat, list(self.spec.sizes))
        for place, component, owned in zip(places, self.spec.components, self._members, strict=True):
            buffer = owned.tensor
            check_form(owned.name, buffer, component.shape, self.dtype, OPTION)
            assert buffer is not None, "it was checked"
            yield place.view(component.shape), buffer


def _is_large(buffer: Tensor) -> bool:
    return buffer.numel() * buffer.element_size() >= _LARGE_BUFFER_BYTES


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have the same bits."""
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if _is_large(one) and one.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        return _same_bytes(bind(one, writes=False).data, bind(other, writes=False).data)
    one, other = as_bits(one), as_bits(other)
    return torch.equal(one, other)


def _differ(one: Tensor, other: Tensor) -> Tensor | None:
    """Return, on the device, whether two tensors of one shape have different bits. None if they cannot be compared."""
    if one.dtype != other.dtype or one.device != other.device:
        return None
    return (as_bits(one) != as_bits(other)).any()


def as_bits(tensor: Tensor) -> Tensor:
    """Return integers of the same bits as the elements of a tensor, of complex ones as their parts."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS.get(tensor.element_size(), torch.uint8))


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


def buffer_buckets(exchanged: Sequence[tuple[Owned, Tensor]]) -> list[BufferBucket]:
    """Pack the buffers that are ``exchanged``, each with its value."""
    groups = buffers_together(exchanged)
    devices = list(dict.fromkeys(members[0][1].device for members in groups))
    count: Counter[str] = Counter()
    buckets = []
    for members in groups:
        like = members[0][1]
        number = devices.index(like.device)
        key = f"{BUFFERS_KEY}.{str(like.dtype).removeprefix('torch.')}" + (f".device{number}" if number else "")
        buckets.append(BufferBucket(f"{key}.{count[key]}" if count[key] else key, members))
        count[key] += 1
    return buckets


def buffers_together(exchanged: Sequence[tuple[Owned, Tensor]]) -> list[list[tuple[Owned, Tensor]]]:
    """Group buffers that are likely to change together, as a bucket travels if anything in it has changed.

    These are the small buffers of one element type and device of all modules of one class. A large buffer is alone.
    """
    groups: dict[tuple[torch.dtype, torch.device, str], list[tuple[Owned, Tensor]]] = {}
    for owned, buffer in exchanged:
        kind = type(owned.owner)
        together = f"buffer {owned.name}" if _is_large(buffer) else f"{kind.__module__}.{kind.__qualname__}"
        groups.setdefault((buffer.dtype, buffer.device, together), []).append((owned, buffer))
    return list(groups.values())


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
