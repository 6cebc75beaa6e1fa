"""From a module to buckets: which gradients travel together, in which order, and the memory they live in.

The order is that in which backward is expected to complete them:

    lm_head, final_norm     what is registered behind the blocks: norms, and everything else
    bucket.0 …              parameters without a role: runs of limited size, last first
    block.L-1 … block.0     the blocks: a ModuleList's children, or those that the caller names
    embedding               what is registered before the blocks, and every nn.Embedding
    sender                  the member that sends buffers, if there are any
    buffers.<dtype>         BatchNorm's running statistics and the like, and then further ones with numbers
    used                    parameters that have a gradient, where that may differ

A parameter that several modules share is complete when the first of them in forward order is. So a tied embedding and
head live in `embedding`, and a weight shared by blocks lives in the first of these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import BY_NAME, UINT8
from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, SizeMismatchError
from gradserver.protocol.exchange import Op
from gradserver.protocol.limits import KIB, MIB
from gradserver.protocol.plan import Bucket, Component
from gradserver.worker.tensors import bind, wire_dtype

USED_KEY: Final = "used"
SENDER_KEY: Final = "sender"
_LARGE_BUFFER_BYTES: Final = 256 * KIB
"""Size from which a buffer's bytes weigh more than a message of its own."""
_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)
_NORM: Final = re.compile(r"Norm(\dd)?$")


# ── which parameters belong together ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Group:
    """Parameters that travel together: their bucket's key, and ``(name, parameter)`` in the module's order."""

    key: str
    parameters: tuple[tuple[str, nn.Parameter], ...]


def group_parameters(
    module: nn.Module, blocks: Iterable[nn.Module] | None, cap_mb: float, ignored: Collection[str] = ()
) -> list[Group]:
    """Group the parameters of ``module`` that require a gradient, in the order in which backward completes them.

    Args:
        module: the module, on its device and in its final element type.
        blocks: the transformer blocks, first to last; None finds them, an empty sequence means that there are none.
        cap_mb: size in MiB of the runs of parameters that have no role. A larger parameter travels alone.
        ignored: names of parameters that are left out.

    Raises:
        InvalidArgumentError: no parameter requires a gradient, or one cannot be exchanged; names it.
    """
    check_module(module, ignored)
    trained = ((n, p) for n, p in module.named_parameters() if p.requires_grad and n not in ignored)
    named = [(n, p) for n, p in trained if _is_exchangeable(n, p)]
    if not named:
        raise InvalidArgumentError("this module has no parameter that requires a gradient: nothing to exchange")
    if not cap_mb > 0:
        raise InvalidArgumentError(f"bucket_cap_mb is a size in MiB above 0, not {cap_mb!r}")
    roles = _Roles(module, find_blocks(module) if blocks is None else list(blocks))
    by_role: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        by_role.setdefault(roles.of(parameter), []).append((name, parameter))
    behind = _runs(by_role.pop("behind", []), cap_mb)
    before = _runs(by_role.pop("before", []), cap_mb)
    in_order = [by_role.get(key, []) for key in ("lm_head", "final_norm")]
    groups = [Group(key, tuple(m)) for key, m in zip(("lm_head", "final_norm"), in_order, strict=True) if m]
    groups += [Group(f"bucket.{i}", run) for i, run in enumerate(behind)]
    for index in reversed(range(len(roles.blocks))):
        if members := by_role.get(f"block.{index}"):
            groups.append(Group(f"block.{index}", tuple(members)))
    groups += [Group(f"bucket.{len(behind) + i}", run) for i, run in enumerate(before)]
    if members := by_role.get("embedding"):
        groups.append(Group("embedding", tuple(members)))
    return [part for group in groups for part in _split(group)]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The children of the ModuleList that has the most parameters with a gradient; none if there is no such list."""

    def size(modules: nn.ModuleList) -> int:
        return sum(p.numel() for p in modules.parameters() if p.requires_grad)

    largest = max((m for m in module.modules() if isinstance(m, nn.ModuleList)), key=size, default=None)
    return list(largest) if largest is not None and size(largest) else []


class _Roles:
    """The role of each parameter, from the place where the module registers it."""

    def __init__(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        paths = dict(module.named_modules(remove_duplicate=False))
        inside = {id(part) for block in blocks for part in block.modules()}
        homes = [path for path, part in paths.items() if any(part is block for block in blocks)]
        known = {id(part) for part in paths.values()}
        for number, block in enumerate(blocks):
            if id(block) not in known:
                raise InvalidArgumentError(f"block {number} ({type(block).__name__}) is no part of the module")
        self._paths = paths
        self._position = {path: position for position, path in enumerate(paths)}
        self._first_block = min((self._position[path] for path in homes), default=len(paths))
        self._around = {prefix for path in homes for prefix in _prefixes(path) if prefix != path}
        """Paths of the modules that contain a block."""
        self._block_of: dict[int, int] = {}
        for number, block in reversed(list(enumerate(blocks))):
            self._block_of.update(dict.fromkeys(map(id, block.parameters()), number))
        self._outside: dict[int, list[str]] = {}
        """Paths of the modules outside of all blocks that own a parameter, by its id."""
        for path, part in paths.items():
            if id(part) not in inside:
                for parameter in part.parameters(recurse=False):
                    self._outside.setdefault(id(parameter), []).append(path)

    def of(self, parameter: nn.Parameter) -> str:
        """Return a bucket's key, or ``behind`` or ``before`` for parameters that are cut into runs."""
        if not self.blocks:
            return "before"
        owners = self._outside.get(id(parameter), [])
        if any(isinstance(self._paths[path], _EMBEDDINGS) for path in owners):
            return "embedding"
        if id(parameter) in self._block_of:
            return f"block.{self._block_of[id(parameter)]}"
        owner = owners[0]
        # The largest part beside the blocks that the parameter belongs to. A module around the blocks has none.
        beside = next((prefix for prefix in _prefixes(owner) if prefix not in self._around), None)
        if beside is None:
            return "embedding"  # a table of positions, a class token
        is_behind = self._position[beside] > self._first_block
        if any(isinstance(part, nn.ModuleList) for part in self._paths[beside].modules()):
            return "behind" if is_behind else "before"  # a second stack of blocks, for example an encoder's
        if not is_behind:
            return "embedding"
        return "final_norm" if _NORM.search(type(self._paths[owner]).__name__) else "lm_head"


def _prefixes(path: str) -> Iterator[str]:
    """Yield the paths of the modules on the way to one: ``a.b`` → ``""``, ``a``, ``a.b``."""
    yield ""
    for end in (i for i, character in enumerate(path + ".") if character == "."):
        if end:
            yield path[:end]


def _runs(named: Sequence[tuple[str, nn.Parameter]], cap_mb: float) -> list[tuple[tuple[str, nn.Parameter], ...]]:
    """Cut parameters into runs of at most ``cap_mb``, last first; within a run they keep their order."""
    runs: list[list[tuple[str, nn.Parameter]]] = []
    room = 0.0
    for name, parameter in reversed(named):
        size = parameter.numel() * parameter.element_size()
        if not runs or size > room:
            runs.append([])
            room = cap_mb * MIB
        runs[-1].insert(0, (name, parameter))
        room -= size
    return [tuple(run) for run in runs]


def _split(group: Group) -> list[Group]:
    """Split ``group`` by element type and device: a bucket is one piece of memory."""
    parts: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in group.parameters:
        parts.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    dtypes = list(dict.fromkeys(dtype for dtype, _ in parts))
    devices = list(dict.fromkeys(device for _, device in parts))
    groups = []
    for (dtype, device), members in parts.items():
        key = group.key if dtype == dtypes[0] else f"{group.key}.{str(dtype).removeprefix('torch.')}"
        # By number: workers may name their devices differently.
        key += f".device{devices.index(device)}" if device != devices[0] else ""
        groups.append(Group(key, tuple(members)))
    return groups


def check_module(module: nn.Module, ignored: Collection[str] = ()) -> None:
    """Refuse what cannot be trained as a replica. Raises InvalidArgumentError, or LayoutError for sparse gradients."""
    for path, part in module.named_modules():
        own = part.named_parameters(path, recurse=False)
        trained = any(parameter.requires_grad and name not in ignored for name, parameter in own)
        if trained and getattr(part, "sparse", False) is True:
            raise LayoutError(
                f"module {path!r} is an {type(part).__name__} with sparse=True, and only dense gradients travel: "
                f"build it with sparse=False"
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise InvalidArgumentError(
                f"module {path!r} is a torch.nn.SyncBatchNorm, which needs a process group of torch.distributed: "
                f"before wrapping call module = gradserver.convert_sync_batchnorm(module, worker)"
            )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
            raise InvalidArgumentError(
                f"parameter {name!r} is a DTensor, of which this process has a part only: gradserver keeps whole "
                f"replicas alike. Wrap a module that neither FSDP nor tensor parallelism has sharded"
            )
        if type(parameter).__name__ == "FlatParameter" and name not in ignored:
            raise InvalidArgumentError(
                f"parameter {name!r} is FSDP's, of which this process has a part only: gradserver keeps whole replicas "
                f"alike. Wrap a module that FSDP has not wrapped"
            )
        if hasattr(parameter, "_in_backward_optimizers") and name not in ignored:
            raise InvalidArgumentError(
                f"the optimizer of parameter {name!r} steps inside backward (_apply_optimizer_in_backward), before "
                f"gradients are averaged: step it after backward()"
            )


def _is_exchangeable(name: str, parameter: nn.Parameter) -> bool:
    """Return whether there is anything to exchange; raise for parameters that cannot be exchanged."""
    if isinstance(parameter, nn.UninitializedParameter):
        raise InvalidArgumentError(f"parameter {name!r} has no shape yet: run the lazy module once before wrapping it")
    if parameter.device.type not in ("cpu", "cuda"):
        raise LayoutError(f"parameter {name!r} is on {parameter.device}; gradients travel from cpu and cuda")
    if not parameter.dtype.is_floating_point and not parameter.dtype.is_complex:
        raise DTypeError(f"parameter {name!r} is {parameter.dtype}, which has no mean")
    return parameter.numel() > 0


# ── the memory they live in ───────────────────────────────────────────────────────────────────────────


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
        return not all(_alike(packed, buffer) for packed, buffer in self._pairs())

    def pack(self) -> None:
        """Copy the buffers, as they are now, into the bucket."""
        for packed, buffer in self._pairs():
            packed.copy_(buffer)

    def unpack(self) -> None:
        """Copy the bucket's content into the buffers."""
        for packed, buffer in self._pairs():
            if _is_large(packed) and _alike(packed, buffer):  # a table that never changes: reading it is enough
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
