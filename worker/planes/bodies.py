"""Tensors of a collective among members: what is given to torch's process groups, and what becomes of their results.

Nothing that the caller has is written before `Body.commit`. Results come into memory of their own. For a reduction or
a broadcast that is as much as the tensor takes, and it is kept for the next call. In the other kinds it is the result
that the caller gets.

A member's weight is a number times a power of two, so that ``w·g`` stays in the range of ``g``. Half precision is
summed in fp32 and rounded once, as the coordinator does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gradserver.protocol.dtypes import DType
from gradserver.protocol.exchange import Kind, Op
from gradserver.worker.collectives.call import Call
from gradserver.worker.devices.cuda import fetch_whole, open_device
from gradserver.worker.devices.device import Event
from gradserver.worker.planes.communicator import Communicator, Reduction, Signal
from gradserver.worker.tensors import bind, is_torch, like

_HALVES: Final = (torch.float16, torch.bfloat16)
_COMPLEX: Final = (torch.complex64, torch.complex128)
_REDUCIBLE: Final = (
    *(torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64),
    *(*_HALVES, *_COMPLEX),
)
"""Element types that both gloo and NCCL reduce."""
REDUCES: Final = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER})
"""Kinds that combine tensors."""
LINEAR: Final = frozenset({Op.MEAN, Op.SUM})
"""Combinations to which zeros add nothing."""


def is_reducible(op: Op, dtype: DType) -> bool:
    """Tell whether members can reduce ``dtype`` with ``op`` among themselves. Of complex numbers only sums are made."""
    kind = getattr(torch, dtype.name, None)
    return kind in _REDUCIBLE and (kind not in _COMPLEX or op in LINEAR)


class Flat(NamedTuple):
    """A tensor's elements in one dimension.

    Attributes:
        elements: the tensor's own memory if it allows, else a copy.
        store: writes ``elements`` back into the tensor; None where they are its own memory.
    """

    elements: Tensor
    store: Callable[[], object] | None


def flat_of(tensor: Any, writes: bool) -> Flat:
    """Return the elements of ``tensor`` where it is. With ``writes`` the result goes back into it.

    Raises:
        LayoutError: it has a layout that cannot travel, or cannot be written to.
    """
    if is_torch(tensor) and tensor.is_cuda and tensor.layout is torch.strided:
        plain = tensor.detach()
        if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            return Flat(plain.view(-1), None)
        if not (writes and any(size > 1 and not stride for size, stride in zip(plain.shape, plain.stride()))):  # noqa: B905
            copy = plain.resolve_conj().resolve_neg().contiguous()
            return Flat(copy.view(-1), partial(plain.copy_, copy) if writes else None)
    bound = bind(tensor, writes)
    data = bound.data if bound.data.flags.writeable else bound.data.copy()  # torch has no memory that is read-only
    return Flat(torch.from_numpy(data).view(_dtype(bound.dtype)), bound.store)


def _dtype(dtype: DType) -> torch.dtype:
    """Return torch's element type; bytes where torch has none, or none that it can look at."""
    found = getattr(torch, dtype.name, None)
    return found if found in (*_REDUCIBLE, torch.bool) else torch.uint8


class Scratch:
    """Memory for results, which one call after the other takes. The largest is kept.

    Calls may be on different streams of a device. So a call waits there for the one before to be done with it.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}
        self._done: dict[torch.device, Event] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for so many elements. The next call takes the same."""
        nbytes, opened = numel * dtype.itemsize, open_device(device)
        memory = self._memory.get(device)
        if memory is None or memory.numel() < nbytes:
            memory = self._memory[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if opened is not None:
            stream = opened.current_stream()
            opened.keep(memory, stream)
            if device in self._done:
                stream.wait_event(self._done[device])
        return memory[:nbytes].view(dtype)

    def give_back(self, device: torch.device) -> None:
        """Note that the present call has read its result, on the current stream."""
        opened = open_device(device)
        if opened is not None:
            self._done[device] = opened.new_event()
            opened.current_stream().record_event(self._done[device])

    def drop(self) -> None:
        """Take other memory from now on: what was given up may still write to this."""
        self._memory.clear()


class Body:
    """The tensors of one call at one member.

    Args:
        call: the collective.
        rank: this member's.
        world: number of members.
    """

    def __init__(self, call: Call, rank: int, world: int) -> None:
        self._call, self._rank, self._world = call, rank, world
        kind = call.operation.kind
        writes = kind in (Kind.ALL_REDUCE, Kind.SCATTER) or (kind is Kind.BROADCAST and rank != call.root)
        self._flat = flat_of(call.tensor, writes)
        self._parts = None if call.parts is None else [flat_of(part, False).elements for part in call.parts]
        self._value: Any = call.tensor
        self._result: Tensor | None = None
        self._divisor = 1.0

    @property
    def device(self) -> torch.device:
        """The device of the elements."""
        return self._flat.elements.device

    @property
    def has_nan(self) -> bool:
        """True if the least or largest element is not a number: libraries disagree on what that means."""
        op, elements = self._call.operation.op, self._flat.elements
        return op in (Op.MIN, Op.MAX) and elements.is_floating_point() and bool(fetch_whole(elements.isnan().any()))

    def start(self, group: Communicator, signal: Signal, weights: Sequence[float], scratch: Scratch) -> Reduction:
        """Begin the exchange with the others. ``weights`` are those of all members, by rank."""
        kind, elements = self._call.operation.kind, self._flat.elements
        if kind in REDUCES:
            taken = self._weighed(weights, scratch)
            self._result = taken
            op = self._call.operation.op
            return group.all_reduce(_real(taken), Op.SUM if op is Op.MEAN else op, signal)
        if kind is Kind.BROADCAST:
            is_root = self._rank == self._call.root
            self._result = elements if is_root else scratch.take(elements.numel(), elements.dtype, elements.device)
            return group.broadcast(_bytes(self._result), self._call.root, signal)
        return self._move(kind, _bytes(elements), group, signal)

    def _move(self, kind: Kind, given: Tensor, group: Communicator, signal: Signal) -> Reduction:
        """Begin an exchange that reduces nothing, into the memory of its result."""
        root, world = self._call.root, self._world
        if kind is Kind.SCATTER:
            result = self._result = torch.empty_like(self._flat.elements)
            parts = None if self._parts is None else [_bytes(part) for part in self._parts]
            return group.scatter(_bytes(result), parts, root, signal)
        if kind is Kind.GATHER and self._rank != root:
            self._value = None
            return group.gather(given, None, root, signal)
        tensor = self._call.tensor
        shape = tuple(tensor.shape) if kind is Kind.ALL_TO_ALL else (world, *tensor.shape)
        self._value = like(tensor, shape)
        rows = _bytes(flat_of(self._value, True).elements)
        if kind is Kind.ALL_GATHER:
            return group.all_gather(rows, given, signal)
        if kind is Kind.GATHER:
            return group.gather(given, list(rows.view(world, -1).unbind()), root, signal)
        return group.all_to_all(rows, given, signal)

    def _weighed(self, weights: Sequence[float], scratch: Scratch) -> Tensor:
        """Put this member's contribution into ``scratch``, times its factor."""
        elements, op = self._flat.elements, self._call.operation.op
        wide = torch.float32 if elements.dtype in _HALVES and op not in (Op.MIN, Op.MAX) else elements.dtype
        taken = scratch.take(elements.numel(), wide, elements.device)
        factor = 1.0
        if op is Op.MEAN:
            factor, self._divisor = _factor(weights, self._rank)
        if weights[self._rank] == 0:
            taken.zero_()
        elif factor == 1.0:
            taken.copy_(elements)
        else:
            torch.mul(elements, factor, out=taken)
        return taken

    def commit(self) -> Any:
        """Put the result where it belongs, and return the call's value: all members have theirs."""
        kind, flat, result = self._call.operation.kind, self._flat, self._result
        if kind is Kind.REDUCE_SCATTER:
            assert result is not None
            tensor = self._call.tensor
            self._value = like(tensor, (tensor.shape[0] // self._world, *tensor.shape[1:]))
            flat = flat_of(self._value, True)
            size = flat.elements.numel()
            result = result[self._rank * size : (self._rank + 1) * size]
        if result is not None and result is not flat.elements:
            if self._divisor == 1.0:
                flat.elements.copy_(result)
            elif result.dtype == flat.elements.dtype:
                torch.div(result, self._divisor, out=flat.elements)
            else:
                flat.elements.copy_(result.div_(self._divisor))
        if flat.store is not None:
            flat.store()
        return self._value


def _factor(weights: Sequence[float], rank: int) -> tuple[float, float]:
    """Return the factor of this member's contribution to a mean, and what the sum is divided by."""
    given = [weight for weight in weights if weight > 0]
    if not given:
        return 1.0, 1.0
    if min(given) == max(given):
        return 1.0, float(len(given))
    exponent = -math.frexp(max(given))[1]
    return math.ldexp(weights[rank], exponent), sum(math.ldexp(weight, exponent) for weight in given)


def _real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs, which add like any."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return _real(tensor).view(-1).view(torch.uint8)
