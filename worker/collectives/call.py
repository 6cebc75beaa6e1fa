"""A collective that a caller has asked for, before it is known how it travels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.exchange import Operation
from gradserver.worker.handle import Handle
from gradserver.worker.tensors import is_torch

Stream = Any
"""A ``torch.cuda.Stream``; None for the one that gradserver has for the tensor's device."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one member.

    Attributes:
        operation: what is done, exactly.
        tensor: the member's tensor: it gives, or gets, or both.
        through: begins the collective over the coordinator. It may be called from another thread.
        root: rank that broadcasts, scatters or gathers; -1 elsewhere.
        weight: of this member in a reduction.
        parts: one tensor for each rank, at the root of a scatter.
        stream: as the caller has given it.
    """

    operation: Operation
    tensor: Any
    through: Callable[[], Handle]
    root: int = -1
    weight: float = 1.0
    parts: list[Any] | None = None
    stream: Stream = None


@dataclass(frozen=True, slots=True)
class Passing:
    """One transfer, at one of its ends.

    Attributes:
        operation: what is passed.
        ends: ids of the source and the target, and the tag.
        data: the elements as bytes.
        gives: true at the source.
        through: begins the transfer over the coordinator.
        value: what the caller gets.
    """

    operation: Operation
    ends: tuple[int, int, int]
    data: Bytes
    gives: bool
    through: Callable[[], Handle]
    value: Any


class AmongTwo(Protocol):
    """A way of transfers from member to member: `gradserver.worker.planes.transfers`."""

    def begin(self, call: Passing) -> Handle | None:
        """Begin ``call``; None if it is one for the coordinator. Both ends decide alike."""


class Among(Protocol):
    """A way of collectives among the members themselves: `gradserver.worker.planes.calls`."""

    def begin(self, call: Call) -> Handle | None:
        """Begin ``call``; None if it is one for the coordinator. All members decide alike.

        GradServerError says what is wrong with the tensors.
        """


def on_stream(stream: Stream) -> AbstractContextManager[object]:
    """Return a context in which work on a CUDA device is queued on ``stream``; nothing changes without one."""
    if stream is None:
        return nullcontext()
    import torch

    context: AbstractContextManager[object] = torch.cuda.stream(stream)
    return context


def check_stream(stream: Stream, tensor: Any) -> None:
    """Raise InvalidArgumentError if ``stream`` says nothing about ``tensor``."""
    if stream is not None and not (is_torch(tensor) and tensor.is_cuda):
        raise InvalidArgumentError("stream= orders work on a CUDA device, and this tensor is on the CPU: leave it out")
