"""Groups of parameters that travel together: one for each bucket of gradients.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MIB
from gradserver.protocol.plan import Plan
from gradserver.worker.torch_ddp.wrapping import check_module, is_exchangeable

_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)
_NORM: Final = re.compile(r"Norm(\dd)?$")


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
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
    named = [(n, p) for n, p in trained if is_exchangeable(n, p)]
    if not named:
        empty = ", ".join(repr(name) for name, _ in trained[:4])
        but = f" but {empty}, without elements" if empty else ""
        raise InvalidArgumentError(
            f"this module has no parameter that requires a gradient{but}: there is nothing to exchange. Use the module "
            f"without a wrapper, or unfreeze a part of it before wrapping it"
        )
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
    """Return the children of the ModuleList with the most parameters that require a gradient; none without a list."""

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
                raise InvalidArgumentError(f"block {number} ({type(block).__name__}) is not a part of the module")
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
        runs[-1].append((name, parameter))
        room -= size
    return [tuple(reversed(run)) for run in runs]


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


def described(plan: Plan) -> str:
    """Return a table of the buckets of a plan: for each its key, element type, elements and MiB."""
    rows = [("bucket", "type", "elements", "MiB")]
    rows += [(b.key, b.dtype.name, f"{b.numel:,}", f"{b.numel * b.dtype.itemsize / MIB:.2f}") for b in plan.buckets]
    rows.append((f"{len(plan.buckets)} in all", "", "", f"{plan.nbytes / MIB:.2f}"))
    key, kind, numel, size = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{a:<{key}}  {b:<{kind}}  {c:>{numel}}  {d:>{size}}" for a, b, c, d in rows)
