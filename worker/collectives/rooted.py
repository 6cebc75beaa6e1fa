"""Collectives with parts for ranks, for users: to one, from one, from each to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gradserver.protocol.errors import DTypeError, InvalidArgumentError, SizeMismatchError
from gradserver.protocol.exchange import Kind, Op, Operation, layout_of, operation_of
from gradserver.worker.collectives.arguments import Maybe, root_of
from gradserver.worker.collectives.call import Call, Stream
from gradserver.worker.collectives.calls import Array, Collectives, S
from gradserver.worker.collectives.transfers import No, T, Yes
from gradserver.worker.collectives.uneven import all_to_all_uneven
from gradserver.worker.collectives.writers import Columns, Rows, into_columns, into_portion
from gradserver.worker.handle import Handle, Timeout, seconds
from gradserver.worker.member.ends import Source
from gradserver.worker.tensors import bind, like, numel_of, wire_dtype

if TYPE_CHECKING:
    import torch


class RootedCollectives(Collectives):
    """Collectives in which ranks give or get parts of their own."""

    @overload
    def gather(
        self,
        tensor: torch.Tensor,
        root: int = ...,
        *,
        dst: Maybe = ...,
        async_op: No = ...,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> torch.Tensor | None: ...
    @overload
    def gather(
        self,
        tensor: torch.Tensor,
        root: int = ...,
        *,
        dst: Maybe = ...,
        async_op: Yes,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Handle[torch.Tensor | None]: ...
    @overload
    def gather(
        self,
        tensor: Array[S],
        root: int = ...,
        *,
        dst: Maybe = ...,
        async_op: No = ...,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Array[S] | None: ...
    @overload
    def gather(
        self,
        tensor: Array[S],
        root: int = ...,
        *,
        dst: Maybe = ...,
        async_op: Yes,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Handle[Array[S] | None]: ...
    def gather(
        self,
        tensor: Any,
        root: int = 0,
        *,
        dst: int | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
        stream: Stream = None,
    ) -> Any:
        """Stack every member's ``tensor`` by rank, at rank ``root`` (or ``dst``; 0). All have the same shape.

        Returns:
            A tensor of shape ``(world_size, *shape)`` at that rank, None at the others; or a Handle of that.
        """
        root = self._check_rank(root_of(root, "dst", dst), "root")
        dtype, member_id = wire_dtype(tensor), self._session.member_of(root)
        operation = operation_of(Kind.GATHER, Op.NONE, dtype, numel_of(tensor), member_id)

        def through() -> Handle[Any]:
            source = bind(tensor, writes=False)
            if root != self.rank:
                return self._begin(operation, source.data, None, source, None, async_op)
            return self._begin_gathering(operation, tensor, source, async_op)

        return self._run(Call(operation, tensor, through, root, stream=stream), async_op, timeout)

    @overload
    def scatter(
        self,
        tensor: T,
        parts: T | Sequence[T] | None = ...,
        root: int = ...,
        *,
        src: Maybe = ...,
        async_op: No = ...,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> T: ...
    @overload
    def scatter(
        self,
        tensor: T,
        parts: T | Sequence[T] | None = ...,
        root: int = ...,
        *,
        src: Maybe = ...,
        async_op: Yes,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Handle[T]: ...
    def scatter(
        self,
        tensor: T,
        parts: T | Sequence[T] | None = None,
        root: int = 0,
        *,
        src: int | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
        stream: Stream = None,
    ) -> T | Handle[T]:
        """Overwrite ``tensor`` at every member by the part that rank ``root`` (or ``src``; 0) has for it, in place.

        Args:
            tensor: same shape and element type at every member.
            parts: one such tensor for each rank, as a list or stacked, at rank ``root``. None at the others.
            root: rank that has the parts.
            src: ``root`` by torch's name.
            async_op: true to return a `Handle` at once. Its ``wait()`` returns the tensor.
            timeout: limit for this call's wait.
            stream: stream of a CUDA device, as in `all_reduce`.

        Returns:
            The tensor, or a Handle.
        """
        root = self._check_rank(root_of(root, "src", src), "root")
        world, member_id = self.world_size, self._session.member_of(root)
        operation = operation_of(Kind.SCATTER, Op.NONE, wire_dtype(tensor), numel_of(tensor) * world, member_id)
        if root == self.rank:
            given = self._parts_of(parts, tensor)
        elif parts is None:
            given = None
        else:
            raise InvalidArgumentError(f"the parts are those of rank {root}: give None at rank {self.rank}")

        def through() -> Handle[T]:
            bound, source = bind(tensor, writes=True), None
            if given is not None:
                rows = np.concatenate([bind(part, writes=False).data for part in given]).reshape(world, -1)
                source = self._columns(operation, rows)
                if world == 1:
                    bound.data[:] = rows.reshape(-1)
            return self._begin(operation, source, into_portion(bound.data, world), bound, tensor, async_op)

        outcome: T | Handle[T] = self._run(
            Call(operation, tensor, through, root, parts=given, stream=stream), async_op, timeout
        )
        return outcome

    @overload
    def all_to_all(
        self, tensor: torch.Tensor, *, async_op: No = ..., timeout: Timeout = ..., stream: Stream = ...
    ) -> torch.Tensor: ...
    @overload
    def all_to_all(
        self, tensor: torch.Tensor, *, async_op: Yes, timeout: Timeout = ..., stream: Stream = ...
    ) -> Handle[torch.Tensor]: ...
    @overload
    def all_to_all(
        self, tensor: Array[S], *, async_op: No = ..., timeout: Timeout = ..., stream: Stream = ...
    ) -> Array[S]: ...
    @overload
    def all_to_all(
        self, tensor: Array[S], *, async_op: Yes, timeout: Timeout = ..., stream: Stream = ...
    ) -> Handle[Array[S]]: ...
    @overload
    def all_to_all(
        self, tensor: Sequence[T], *, async_op: No = ..., timeout: Timeout = ..., stream: Stream = ...
    ) -> list[T]: ...
    @overload
    def all_to_all(
        self, tensor: Sequence[T], *, async_op: Yes, timeout: Timeout = ..., stream: Stream = ...
    ) -> Handle[list[T]]: ...
    def all_to_all(self, tensor: Any, *, async_op: bool = False, timeout: Timeout = None, stream: Stream = None) -> Any:
        """Give each rank its part of ``tensor``, and get this rank's part of each rank's tensor.

        Args:
            tensor: shape ``(world_size · n, …)``, the same at every member. Part r of the first dimension is for rank
                r. Or a list of one tensor for each rank. Their first dimensions may be any, also 0, and differ between
                members. The rest of their shapes, and the element type, is the same everywhere.
            async_op: true to return a `Handle` at once. (The sizes of a list are exchanged before.)
            timeout: limit for this call's wait.
            stream: stream of a CUDA device, as in `all_reduce`; not for lists.

        Returns:
            The parts from all ranks, in the order of ranks, as a tensor of the same shape or a list of tensors; or a
            Handle.

        Raises:
            CollectiveMismatchError: the members' tensors do not fit together.
        """
        if isinstance(tensor, (list, tuple)):
            handle = all_to_all_uneven(self._session, tensor, seconds(timeout), async_op)
            return handle if async_op else handle.wait()
        operation = operation_of(Kind.ALL_TO_ALL, Op.NONE, wire_dtype(tensor), numel_of(tensor))
        self._check_divisible("all_to_all", tuple(tensor.shape))

        def through() -> Handle[Any]:
            source = bind(tensor, writes=False)
            received = like(tensor, source.shape)
            bound = bind(received, writes=True)
            if self.world_size == 1:
                bound.data[:] = source.data
            given = self._columns(operation, source.data.reshape(self.world_size, -1))
            rows = into_columns(bound.data.reshape(self.world_size, -1))
            return self._begin(operation, given, rows, bound, received, async_op)

        return self._run(Call(operation, tensor, through, stream=stream), async_op, timeout)

    def _columns(self, operation: Operation, rows: Rows) -> Source:
        """Return the source of a divided operation: the rows as they lie there, if that is one slice."""
        layout = layout_of(operation, self.world_size)
        return rows.reshape(-1) if layout.count <= 1 else Columns(rows, layout)

    def _parts_of(self, parts: Any, tensor: Any) -> list[Any]:
        """Return the tensors that a scatter has for each rank. ``tensor`` is that of each rank's part."""
        given = list(parts) if parts is not None else []
        if len(given) != self.world_size:
            raise SizeMismatchError(f"scatter needs a part for each of {self.world_size} ranks, and got {len(given)}")
        dtype, shape = wire_dtype(tensor), tuple(tensor.shape)
        for rank, part in enumerate(given):
            if (found := wire_dtype(part)) != dtype:
                raise DTypeError(f"the part for rank {rank} is {found.name}, and the tensor {dtype.name}")
            if tuple(part.shape) != shape:
                raise SizeMismatchError(f"the part for rank {rank} has shape {tuple(part.shape)}, the tensor {shape}")
        return given
