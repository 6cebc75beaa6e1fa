"""Collectives with parts of different lengths: first all hear the longest length, then the parts travel as frames.

Both are collectives like any other, in one order at all members. A contribution is as long as its content
(`gradserver.protocol.frames`). Only the number of slices follows from the longest part.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import BY_NAME, UINT8
from gradserver.protocol.errors import CollectiveMismatchError, DTypeError, InvalidArgumentError, SizeMismatchError
from gradserver.protocol.exchange import JOINED, Kind, Op, layout_of, operation_of
from gradserver.protocol.frames import framed_length
from gradserver.protocol.limits import SLICE_BYTES
from gradserver.worker.collectives.writers import Frames, FromFrames
from gradserver.worker.handle import Handle
from gradserver.worker.session import Session
from gradserver.worker.tensors import Binding, bind, like

INT64 = BY_NAME["int64"]
V = TypeVar("V")


def agree_on(session: Session, values: Sequence[int], timeout: float | None) -> list[int]:
    """Return the largest of each of ``values`` among all members."""
    most = np.array(values, np.int64)
    if len(session.membership.names) > 1:
        data = most.view(np.uint8)
        handle = session.collective(operation_of(Kind.ALL_REDUCE, Op.MAX, INT64, most.size), data, data)
        handle.within(timeout)
        handle.wait()
    return [int(value) for value in most]


def exchange_parts(
    session: Session,
    kind: Kind,
    given: Sequence[Buffer] | None,
    longest: int,
    root: int = -1,
    *,
    made: Callable[[list[bytes]], V],
    timeout: float | None,
    background: bool = False,
) -> Handle[V]:
    """Exchange parts of at most ``longest`` bytes. The handle's value is ``made`` of the parts that come here.

    Args:
        session: the member's.
        kind: ALL_GATHER and GATHER take one part, SCATTER (of its root) and ALL_TO_ALL one for each rank.
        given: those parts; None at a rank that gives none.
        longest: bytes of the longest part of all members.
        root: the rank that scatters or gathers.
        made: what the handle returns, of one part from each rank that gives; of none at a rank that gets none.
        timeout: seconds that the handle waits; None for as long as the group does.
        background: whether the caller does not wait for it at once.
    """
    names = session.membership.names
    world, rank = len(names), session.membership.rank
    if world == 1:
        session.check_open()
        handle: Handle[V] = Handle(0.0, None, made([bytes(part) for part in given or ()]))
        handle._complete()
        return handle
    step = SLICE_BYTES // world
    member_id = session.member_of(root) if root >= 0 else -1
    numel = framed_length(longest, step) * (1 if kind in JOINED else world)
    operation = operation_of(kind, Op.FRAMED, UINT8, numel, member_id)
    layout = layout_of(operation, world)
    source = None if given is None else Frames(given, step, layout.count)
    gets = kind is not Kind.GATHER or root == rank
    came = FromFrames(1 if kind is Kind.SCATTER else world) if gets else None
    whole = source.slices[0] if source is not None and layout.count == 1 else source
    handle = session.collective(operation, whole, came, background=background)
    handle.within(timeout)
    handle.then(lambda: _deliver(handle, came, made))
    return handle


def _deliver(handle: Handle[V], came: FromFrames | None, made: Callable[[list[bytes]], V]) -> None:
    handle._value = made([] if came is None else came.parts())


def all_to_all_uneven(
    session: Session, tensors: Sequence[Any], timeout: float | None, background: bool
) -> Handle[list[Any]]:
    """Exchange a list as `Collectives.all_to_all` does."""
    world = len(session.membership.names)
    if len(tensors) != world:
        raise SizeMismatchError(f"all_to_all needs a tensor for each of {world} ranks, and got {len(tensors)}")
    bound = [bind(tensor, writes=False) for tensor in tensors]
    first = bound[0]
    for rank, one in enumerate(bound):
        _check_alike(rank, one, first)
    rest = first.shape[1:]
    kind = zlib.crc32(repr((first.dtype.name, rest)).encode())
    longest, largest, smallest = agree_on(session, [max(len(one.data) for one in bound), kind, -kind], timeout)
    if largest != -smallest:
        raise CollectiveMismatchError(
            f"all_to_all of tensors that do not fit together: those of this worker are {first.dtype.name} of shape "
            f"(…, {', '.join(map(str, rest))}), and those of another one are not"
        )

    def made(parts: list[bytes]) -> list[Any]:
        return [_tensor(tensors[0], first, part) for part in parts]

    data = [one.data.data for one in bound]
    return exchange_parts(session, Kind.ALL_TO_ALL, data, longest, made=made, timeout=timeout, background=background)


def _check_alike(rank: int, one: Binding, first: Binding) -> None:
    if not one.shape:
        raise InvalidArgumentError(f"the tensor for rank {rank} has no dimension that may have any length")
    if one.dtype != first.dtype:
        raise DTypeError(f"the tensor for rank {rank} is {one.dtype.name}, that for rank 0 {first.dtype.name}")
    if one.shape[1:] != first.shape[1:]:
        raise SizeMismatchError(
            f"the tensor for rank {rank} has shape {one.shape}, that for rank 0 {first.shape}: they may differ in the "
            f"first dimension only"
        )


def _tensor(model: Any, bound: Binding, part: bytes) -> Any:
    """Return a tensor like ``model`` of the rows in ``part``."""
    row = int(np.prod(bound.shape[1:], dtype=np.int64)) * bound.dtype.itemsize
    rows, left = divmod(len(part), row) if row else (0, len(part))
    if left:
        raise SizeMismatchError(f"{len(part)} bytes came, which are not rows of {row} bytes")
    made = like(model, (rows, *bound.shape[1:]))
    target = bind(made, writes=True)
    target.data[:] = np.frombuffer(part, np.uint8)
    if target.store is not None:
        target.store()
    return made
