"""Fragments: parts of a model's parameters that are averaged at different steps, and the group's weights of each.

The group's weights are in float32 where a parameter is narrower, so that small changes are not rounded away. A
parameter costs its group's weight, its place in a bucket, and what the outer optimizer keeps of it: 12 bytes with
momentum, beside the parameter, its gradient and the inner optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from gradserver.protocol.dtypes import BY_NAME
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.exchange import Op
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.worker.local_sgd.group_buffers import Flat, GroupBuffers, NewMemory
from gradserver.worker.torch_ddp.grouping import group_parameters
from gradserver.worker.torch_ddp.module_buffers import Owned

_NARROW: Final = (torch.float16, torch.bfloat16)
_WORD: Final = "interval"


class Part(NamedTuple):
    """A parameter of a fragment: its name, the parameter, and the group's weight of it."""

    name: str
    local: nn.Parameter
    weight: nn.Parameter


class Fragment:
    """Parameters that are averaged together, and the floating buffers of the module with the last of them.

    Attributes:
        number: its place among the fragments.
        parts: its parameters.
        plan: what is exchanged: the changes of parameters, and buffers. When it is agreed on, a word of the interval is
            before them.
    """

    def __init__(self, number: int, parts: Sequence[Part], buffers: Sequence[tuple[Owned, Tensor]]) -> None:
        self.number = number
        self.parts = list(parts)
        self._changes = _flats(f"fragment.{number}", [(one.name, one.weight) for one in parts], lambda _: Op.MEAN)
        self.buffers = GroupBuffers(buffers)
        self.gives: list[bool] = []
        """For each bucket of what was packed last, whether there is anything in it."""
        self.plan = Plan(tuple(flat.spec for flat in (*self._changes, *self.buffers.flats)))
        self.word = torch.zeros(2, dtype=torch.float64)
        self._spent = 0.0
        """The sum of this worker's weights when it last sent the fragment."""

    def proposal(self, outer: str, pace: Bucket | None) -> Plan:
        """Return the plan to agree on. It names the ``outer`` optimizer, which must be the same at all members.

        The word is its first bucket, and ``pace`` the second one: behind a small last one no thread would read results
        while others compute.
        """
        word = Bucket(_WORD, BY_NAME["float64"], (Component(f"due, and time not waited; {outer}", (2,)),), Op.MAX)
        return Plan((word, *(() if pace is None else (pace,)), *self.plan.buckets))

    def agreed(self, plan: Plan, new_memory: NewMemory) -> None:
        """Go by the plan that all have agreed on, and take memory for the exchange."""
        self.plan = plan
        self.word = new_memory(2, torch.float64, torch.device("cpu"))
        for flat in (*self._changes, *self.buffers.flats):
            flat.place(new_memory)

    @property
    def memories(self) -> list[Tensor]:
        """The memory of each bucket, in the order of the plan."""
        return [self.word, *(flat.memory for flat in (*self._changes, *self.buffers.flats))]

    def begin(self, spent: float) -> None:
        """Take the worker's parameters for the group's weights. Its steps so far are in them."""
        self._spent = spent
        for part in self.parts:
            part.weight.copy_(part.local)
        self.buffers.begin()

    def spend(self, spent: float) -> float:
        """Return the weight of the steps since the last sending, when the sum of all is ``spent``."""
        weight, self._spent = spent - self._spent, spent
        return weight

    @property
    def due(self) -> bool:
        """True if some member has sent the last mean when it was due."""
        return bool(self.word[0])

    @property
    def rest(self) -> float:
        """The largest part of its time in which a member has not waited, with the last mean."""
        return float(self.word[1])

    def wide(self) -> dict[str, Tensor]:
        """Return the group's weights that are wider than their parameters, by name."""
        return {part.name: part.weight.detach() for part in self.parts if part.weight.dtype != part.local.dtype}

    def pack(self, due: bool, rest: float) -> None:
        """Put into memory what the parameters have changed by, negative as a gradient is, and the buffers."""
        self.word[0], self.word[1] = float(due), rest
        for part, place in zip(self.parts, self._places(), strict=True):
            torch.sub(part.weight, part.local.detach(), out=place)
        self.gives = [True] * len(self._changes) + self.buffers.pack()

    def take_gradients(self) -> None:
        """Make the mean changes the gradients of the group's weights."""
        for part, place in zip(self.parts, self._places(), strict=True):
            part.weight.grad = place

    def drop_gradients(self) -> None:
        """Leave the group's weights without gradients."""
        for part in self.parts:
            part.weight.grad = None

    def average(self) -> None:
        """Change the group's weights by the mean changes, and by nothing else."""
        for part, place in zip(self.parts, self._places(), strict=True):
            part.weight.sub_(place)

    def merge(self, mixing: float) -> None:
        """Go on from the group's weights, with the part ``mixing`` of what this worker has."""
        for part in self.parts:
            if mixing:
                part.local.copy_(part.local.to(part.weight.dtype).mul(mixing).add_(part.weight.mul(1 - mixing)))
            else:
                part.local.copy_(part.weight)

    def squares(self) -> tuple[float, float]:
        """Return the sums of squares of the mean changes, and of the group's weights."""
        return _squares(self._places()), _squares([part.weight for part in self.parts])

    def _places(self) -> list[Tensor]:
        order = {name: place for flat in self._changes for name, place in flat.named()}
        return [order[part.name] for part in self.parts]


def _squares(tensors: Sequence[Tensor]) -> float:
    norms = [float(torch.linalg.vector_norm(tensor).item()) for tensor in tensors]
    return sum(norm * norm for norm in norms)


def _flats(key: str, named: Sequence[tuple[str, Tensor]], op_of: Callable[[Tensor], Op]) -> list[Flat]:
    """Return a bucket for each element type and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        kinds.setdefault((tensor.dtype, tensor.device), []).append((name, tensor))
    keys = (key if not index else f"{key}.{index}" for index in range(len(kinds)))
    return [Flat(one, kind, op_of(kind[0][1])) for one, kind in zip(keys, kinds.values(), strict=True)]


def make_fragments(
    module: nn.Module, count: int, buffers: Sequence[tuple[Owned, Tensor]], ignored: Collection[str] = ()
) -> list[Fragment]:
    """Divide the trained parameters of ``module`` into fragments of about equal size. The last has the ``buffers``.

    The largest parameter goes first, each to the smallest fragment so far. So the fragments of all members are alike.

    Raises:
        InvalidArgumentError: there are fewer parameters than fragments, or a parameter cannot be averaged.
    """
    named = [one for group in group_parameters(module, (), 25.0, ignored) for one in group.parameters]
    places = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    sizes, chosen = [0] * count, [list[Part]() for _ in range(count)]
    for name, local in sorted(named, key=lambda one: (-one[1].numel(), places[one[0]])):
        smallest = sizes.index(min(sizes))
        wide = torch.float32 if local.dtype in _NARROW else local.dtype
        weight = nn.Parameter(local.detach().to(wide, copy=True), requires_grad=False)
        chosen[smallest].append(Part(name, local, weight))
        sizes[smallest] += local.numel() * wide.itemsize
    if not all(chosen):
        raise InvalidArgumentError(
            f"fragments={count}, and the module has {len(named)} parameters that are trained: give at most {len(named)}"
        )
    return [
        Fragment(number, sorted(parts, key=lambda one: places[one.name]), buffers if number == count - 1 else ())
        for number, parts in enumerate(chosen)
    ]
