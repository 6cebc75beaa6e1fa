"""Buffers of a module that workers train by themselves: what each has changed is averaged, and nothing else travels.

All members have the same *group's* values of the buffers, from the wrapping on or from the member that they join at.

    kind       a member gives                                   the group's value becomes
    ─────────  ───────────────────────────────────────────────  ─────────────────────────────────────────────
    floating   the change since the last exchange, or nothing   that plus the mean of all changes
    other      its value if it has changed, or nothing          the value of the lowest rank that gives one

So a constant neither travels nor is judged, whatever it holds: -Inf in a mask, for example. Members need not agree on
what is constant, as a change of nothing is a change, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from gradserver.protocol.exchange import Op
from gradserver.protocol.plan import BUFFERS_KEY, Bucket, Component
from gradserver.worker.planes.plane import Outcome
from gradserver.worker.tensors import wire_dtype
from gradserver.worker.torch_ddp.buckets import as_bits, buffers_together
from gradserver.worker.torch_ddp.module_buffers import Owned, check_form

OPTION: Final = "average_buffers=False"
"""The option by which no buffers are exchanged."""
_AVERAGED: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NewMemory = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes zeros that the exchange reads and writes without a copy."""


class Flat:
    """One bucket of a fragment: tensors of one element type and device, one behind the other."""

    def __init__(self, key: str, named: Sequence[tuple[str, Tensor]], op: Op) -> None:
        components = tuple(Component(name, tuple(tensor.shape)) for name, tensor in named)
        self.like = named[0][1]
        self.spec = Bucket(key, wire_dtype(self.like), components, op)
        self.memory = torch.empty(0)
        self._shapes = [tensor.shape for _, tensor in named]

    def place(self, new_memory: NewMemory) -> None:
        """Take memory."""
        self.memory = new_memory(self.spec.numel, self.like.dtype, self.like.device)

    def views(self) -> list[Tensor]:
        """Return the tensors' places."""
        places = torch.split(self.memory, list(self.spec.sizes))
        return [place.view(shape) for place, shape in zip(places, self._shapes, strict=True)]

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors' names and places."""
        return list(zip((component.name for component in self.spec.components), self.views(), strict=True))


class GroupBuffers:
    """The buffers that are exchanged, and the group's values of them.

    Attributes:
        flats: their buckets.
    """

    def __init__(self, exchanged: Sequence[tuple[Owned, Tensor]]) -> None:
        self._owned = {owned.name: owned for owned, _ in exchanged}
        together = buffers_together(exchanged)
        keys = [BUFFERS_KEY if not number else f"{BUFFERS_KEY}.{number}" for number in range(len(together))]
        self.flats = [
            Flat(
                key,
                [(owned.name, buffer) for owned, buffer in members],
                Op.MEAN if members[0][1].dtype in _AVERAGED else Op.FIRST,
            )
            for key, members in zip(keys, together, strict=True)
        ]
        self._group: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Take this worker's buffers for the group's."""
        self._group = {name: self._own(name).clone() for name in self._owned}

    def pack(self) -> list[bool]:
        """Put what has changed into the buckets. Return, for each of them, whether there is anything in it."""
        changed = [[self._put(flat, name, place) for name, place in flat.named()] for flat in self.flats]
        return [any(row) for row in changed]

    def _put(self, flat: Flat, name: str, place: Tensor) -> bool:
        own, group = self._own(name), self._group[name]
        changed = as_bits(own) != as_bits(group)
        if flat.spec.op is Op.FIRST:
            place.copy_(own)
        else:
            torch.sub(own, group, out=place)
            place.masked_fill_(~changed, 0)  # two infinities have no difference
        return bool(changed.any())

    def take(self, outcomes: Mapping[str, Outcome]) -> None:
        """Take what has arrived into the group's values, and these as this worker's. Buckets are named by their keys.

        Where no contribution counted, a bucket has what this worker alone has put there.
        """
        for flat in self.flats:
            outcome, is_mean = outcomes[flat.spec.key], flat.spec.op is Op.MEAN
            if outcome.present and outcome.left_alone:
                before = torch.cat([self._group[name].reshape(-1) for name, _ in flat.named()]).view(torch.uint8)
                for start, stop in outcome.left_alone:
                    flat.memory.view(torch.uint8)[start:stop] = 0 if is_mean else before[start:stop]
            for name, place in flat.named():
                group = self._group[name]
                if outcome.present:
                    (group.add_ if is_mean else group.copy_)(place)
                self._own(name).data.copy_(group)

    def state(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return the group's values where this worker's differ, or are none of the ``saved`` ones."""
        return {
            name: group.clone()
            for name, group in self._group.items()
            if name not in saved or bool((as_bits(group) != as_bits(self._own(name))).any())
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take group's values that `state` has returned."""
        for name in state.keys() & self._group.keys():
            self._group[name].copy_(state[name])

    def _own(self, name: str) -> Tensor:
        buffer, group = self._owned[name].tensor, self._group.get(name)
        if group is not None:
            check_form(name, buffer, tuple(group.shape), group.dtype, OPTION)
        assert buffer is not None, "it was there when the module was wrapped"
        return buffer.detach()
