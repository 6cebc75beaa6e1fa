"""Collectives for users, on torch tensors and numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from gradserver.protocol.codecs import Codec
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import DTypeError, InvalidArgumentError, SizeMismatchError
from gradserver.protocol.exchange import EXACT, Kind, Op, Operation, layout_of, operation_of
from gradserver.protocol.plan_codecs import EXEMPT_BYTES
from gradserver.worker.collectives.arguments import Maybe, Reduction, check_weight, op_of, root_of
from gradserver.worker.collectives.transfers import No, T, Transfers, V, Yes
from gradserver.worker.collectives.uneven import all_to_all_uneven
from gradserver.worker.collectives.writers import Columns, Rows, into_columns, into_part, into_portion, into_rows
from gradserver.worker.handle import Handle, Timeout, finished, seconds
from gradserver.worker.member.ends import Destination, Source
from gradserver.worker.tensors import Binding, bind, like

if TYPE_CHECKING:
    import torch

S = TypeVar("S", bound=np.generic)
Array: TypeAlias = npt.NDArray[S]


class Collectives(Transfers):
    """Collectives and transfers of tensors among the members of a group.

    All members must call collectives in the same order. Transfers are matched by source, target and tag.

    With ``async_op`` a call returns a `Handle` at once. Its ``wait()`` returns the result. ``timeout`` limits how
    long this call waits, in seconds or as a timedelta. None means the group's limit. When it runs out, only this call
    fails. The exchange continues, and the tensor must be left alone until the worker is closed.
    """

    _codec: Codec

    # ── all to all alike ──────────────────────────────────────────────────────────────────────────────

    @overload
    def all_reduce(
        self, tensor: T, op: Reduction = ..., weight: float = ..., *, async_op: No = ..., timeout: Timeout = ...
    ) -> T: ...
    @overload
    def all_reduce(
        self, tensor: T, op: Reduction = ..., weight: float = ..., *, async_op: Yes, timeout: Timeout = ...
    ) -> Handle[T]: ...
    def all_reduce(
        self, tensor: T, op: Reduction = "mean", weight: float = 1.0, *, async_op: bool = False, timeout: Timeout = None
    ) -> T | Handle[T]:
        """Replace ``tensor`` by its combination over all members, in place.

        Args:
            tensor: same shape and element type at every member.
            op: ``mean`` or ``avg`` (``sum(w·g) / sum(w)``; floating types), ``sum``, ``min``, ``max``, ``product`` or
                ``prod``. Capitals and members of ``torch.distributed.ReduceOp`` are allowed. (torch's default is the
                sum.)
            weight: weight of this member in a mean. With 0 it does not count, and still gets the result.
            async_op: true to return a `Handle` at once. Its ``wait()`` returns the tensor.
            timeout: limit for this call's wait.

        Returns:
            The tensor, or a Handle.
        """
        bound = bind(tensor, writes=True)
        operation = operation_of(Kind.ALL_REDUCE, op_of(op), bound.dtype, bound.numel)
        if self._codec is not EXACT:
            operation = self._lossy(operation)
        source = bound.data if check_weight(weight) > 0 else None
        return self._collective(operation, source, bound.data, bound, tensor, async_op, timeout, weight)

    @overload
    def broadcast(
        self, tensor: T, root: int = ..., *, src: Maybe = ..., async_op: No = ..., timeout: Timeout = ...
    ) -> T: ...
    @overload
    def broadcast(
        self, tensor: T, root: int = ..., *, src: Maybe = ..., async_op: Yes, timeout: Timeout = ...
    ) -> Handle[T]: ...
    def broadcast(
        self, tensor: T, root: int = 0, *, src: int | None = None, async_op: bool = False, timeout: Timeout = None
    ) -> T | Handle[T]:
        """Overwrite ``tensor`` at every member by that of rank ``root`` (or ``src``; 0), in place.

        Returns:
            The tensor, or a Handle.
        """
        root = self._check_rank(root_of(root, "src", src), "root")
        is_root = root == self.rank
        bound = bind(tensor, writes=not is_root)
        operation = operation_of(Kind.BROADCAST, Op.NONE, bound.dtype, bound.numel, self._session.member_of(root))
        source, destination = (bound.data, None) if is_root else (None, bound.data)
        return self._collective(operation, source, destination, bound, tensor, async_op, timeout)

    @overload
    def all_gather(self, tensor: torch.Tensor, *, async_op: No = ..., timeout: Timeout = ...) -> torch.Tensor: ...
    @overload
    def all_gather(self, tensor: torch.Tensor, *, async_op: Yes, timeout: Timeout = ...) -> Handle[torch.Tensor]: ...
    @overload
    def all_gather(self, tensor: Array[S], *, async_op: No = ..., timeout: Timeout = ...) -> Array[S]: ...
    @overload
    def all_gather(self, tensor: Array[S], *, async_op: Yes, timeout: Timeout = ...) -> Handle[Array[S]]: ...
    def all_gather(self, tensor: Any, *, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Stack every member's ``tensor`` by rank. All have the same shape; the result has ``(world_size, *shape)``."""
        source = bind(tensor, writes=False)
        gathered = like(tensor, (self.world_size, *source.shape))
        bound = bind(gathered, writes=True)
        operation = operation_of(Kind.ALL_GATHER, Op.NONE, source.dtype, source.numel)
        if self.world_size == 1:
            bound.data[:] = source.data
        rows = into_rows(bound.data.reshape(self.world_size, -1))
        return self._collective(operation, source.data, rows, bound, gathered, async_op, timeout)

    @overload
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Reduction = ...,
        weight: float = ...,
        *,
        async_op: No = ...,
        timeout: Timeout = ...,
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Reduction = ..., weight: float = ..., *, async_op: Yes, timeout: Timeout = ...
    ) -> Handle[torch.Tensor]: ...
    @overload
    def reduce_scatter(
        self, tensor: Array[S], op: Reduction = ..., weight: float = ..., *, async_op: No = ..., timeout: Timeout = ...
    ) -> Array[S]: ...
    @overload
    def reduce_scatter(
        self, tensor: Array[S], op: Reduction = ..., weight: float = ..., *, async_op: Yes, timeout: Timeout = ...
    ) -> Handle[Array[S]]: ...
    def reduce_scatter(
        self,
        tensor: Any,
        op: Reduction = "mean",
        weight: float = 1.0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Combine ``tensor`` over all members, and return this rank's part of the result.

        ``tensor`` has the shape ``(world_size · n, …)`` and stays unchanged. The result has the shape ``(n, …)``.
        """
        source = bind(tensor, writes=False)
        self._check_divisible("reduce_scatter", source.shape)
        part = like(tensor, (source.shape[0] // self.world_size, *source.shape[1:]))
        bound = bind(part, writes=True)
        operation = operation_of(Kind.REDUCE_SCATTER, op_of(op), source.dtype, source.numel)
        if self.world_size == 1:
            bound.data[:] = source.data
        given = source.data if check_weight(weight) > 0 else None
        destination = into_part(bound.data, self.rank * bound.data.size)
        return self._collective(operation, given, destination, bound, part, async_op, timeout, weight)

    @overload
    def barrier(self, timeout: Timeout = ..., *, async_op: No = ...) -> None: ...
    @overload
    def barrier(self, timeout: Timeout = ..., *, async_op: Yes) -> Handle[None]: ...
    def barrier(self, timeout: Timeout = None, *, async_op: bool = False) -> Handle[None] | None:
        """Wait until every member has called this; or return a Handle of that."""
        handle: Handle[None]
        patience = seconds(timeout)
        if self.world_size == 1:
            self._session.check_open()
            handle = finished(None)
        else:
            operation = operation_of(Kind.BARRIER, Op.NONE, UINT8, 0)
            handle = self._session.collective(operation, None, None, background=async_op)
            handle.within(patience)
        return handle if async_op else handle.wait()

    # ── to one, from one, from each to each ───────────────────────────────────────────────────────────

    @overload
    def gather(
        self, tensor: torch.Tensor, root: int = ..., *, dst: Maybe = ..., async_op: No = ..., timeout: Timeout = ...
    ) -> torch.Tensor | None: ...
    @overload
    def gather(
        self, tensor: torch.Tensor, root: int = ..., *, dst: Maybe = ..., async_op: Yes, timeout: Timeout = ...
    ) -> Handle[torch.Tensor | None]: ...
    @overload
    def gather(
        self, tensor: Array[S], root: int = ..., *, dst: Maybe = ..., async_op: No = ..., timeout: Timeout = ...
    ) -> Array[S] | None: ...
    @overload
    def gather(
        self, tensor: Array[S], root: int = ..., *, dst: Maybe = ..., async_op: Yes, timeout: Timeout = ...
    ) -> Handle[Array[S] | None]: ...
    def gather(
        self, tensor: Any, root: int = 0, *, dst: int | None = None, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Stack every member's ``tensor`` by rank, at rank ``root`` (or ``dst``; 0). All have the same shape.

        Returns:
            A tensor of shape ``(world_size, *shape)`` at that rank, None at the others; or a Handle of that.
        """
        root = self._check_rank(root_of(root, "dst", dst), "root")
        source = bind(tensor, writes=False)
        operation = operation_of(Kind.GATHER, Op.NONE, source.dtype, source.numel, self._session.member_of(root))
        if root != self.rank:
            return self._collective(operation, source.data, None, source, None, async_op, timeout)
        gathered = like(tensor, (self.world_size, *source.shape))
        bound = bind(gathered, writes=True)
        if self.world_size == 1:
            bound.data[:] = source.data
        rows = into_rows(bound.data.reshape(self.world_size, -1))
        return self._collective(operation, source.data, rows, bound, gathered, async_op, timeout)

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
    ) -> T | Handle[T]:
        """Overwrite ``tensor`` at every member by the part that rank ``root`` (or ``src``; 0) has for it, in place.

        Args:
            tensor: same shape and element type at every member.
            parts: one such tensor for each rank, as a list or stacked, at rank ``root``. None at the others.
            root: rank that has the parts.
            src: ``root`` by torch's name.
            async_op: true to return a `Handle` at once. Its ``wait()`` returns the tensor.
            timeout: limit for this call's wait.

        Returns:
            The tensor, or a Handle.
        """
        root = self._check_rank(root_of(root, "src", src), "root")
        bound, world = bind(tensor, writes=True), self.world_size
        member_id = self._session.member_of(root)
        operation = operation_of(Kind.SCATTER, Op.NONE, bound.dtype, bound.numel * world, member_id)
        source: Source | None = None
        if root == self.rank:
            rows = self._rows_of(parts, bound)
            source = self._columns(operation, rows)
            if world == 1:
                bound.data[:] = rows.reshape(-1)
        elif parts is not None:
            raise InvalidArgumentError(f"the parts are those of rank {root}: give None at rank {self.rank}")
        return self._collective(operation, source, into_portion(bound.data, world), bound, tensor, async_op, timeout)

    @overload
    def all_to_all(self, tensor: torch.Tensor, *, async_op: No = ..., timeout: Timeout = ...) -> torch.Tensor: ...
    @overload
    def all_to_all(self, tensor: torch.Tensor, *, async_op: Yes, timeout: Timeout = ...) -> Handle[torch.Tensor]: ...
    @overload
    def all_to_all(self, tensor: Array[S], *, async_op: No = ..., timeout: Timeout = ...) -> Array[S]: ...
    @overload
    def all_to_all(self, tensor: Array[S], *, async_op: Yes, timeout: Timeout = ...) -> Handle[Array[S]]: ...
    @overload
    def all_to_all(self, tensor: Sequence[T], *, async_op: No = ..., timeout: Timeout = ...) -> list[T]: ...
    @overload
    def all_to_all(self, tensor: Sequence[T], *, async_op: Yes, timeout: Timeout = ...) -> Handle[list[T]]: ...
    def all_to_all(self, tensor: Any, *, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Give each rank its part of ``tensor``, and get this rank's part of each rank's tensor.

        Args:
            tensor: shape ``(world_size · n, …)``, the same at every member. Part r of the first dimension is for rank
                r. Or a list of one tensor for each rank. Their first dimensions may be any, also 0, and differ between
                members. The rest of their shapes, and the element type, is the same everywhere.
            async_op: true to return a `Handle` at once. (The sizes of a list are exchanged before.)
            timeout: limit for this call's wait.

        Returns:
            The parts from all ranks, in the order of ranks, as a tensor of the same shape or a list of tensors; or a
            Handle.

        Raises:
            CollectiveMismatchError: the members' tensors do not fit together.
        """
        if isinstance(tensor, (list, tuple)):
            handle = all_to_all_uneven(self._session, tensor, seconds(timeout), async_op)
            return handle if async_op else handle.wait()
        source = bind(tensor, writes=False)
        self._check_divisible("all_to_all", source.shape)
        received = like(tensor, source.shape)
        bound = bind(received, writes=True)
        operation = operation_of(Kind.ALL_TO_ALL, Op.NONE, source.dtype, source.numel)
        if self.world_size == 1:
            bound.data[:] = source.data
        given = self._columns(operation, source.data.reshape(self.world_size, -1))
        rows = into_columns(bound.data.reshape(self.world_size, -1))
        return self._collective(operation, given, rows, bound, received, async_op, timeout)

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _lossy(self, operation: Operation) -> Operation:
        """Apply the group's codec, if it is a dense one: without feedback the others would only shrink tensors."""
        small = operation.numel * operation.dtype.itemsize < EXEMPT_BYTES
        if self._codec.parameter or small or operation.op is not Op.MEAN or operation.dtype != FLOAT32:
            return operation
        return operation_of(operation.kind, operation.op, operation.dtype, operation.numel, codec=self._codec)

    def _columns(self, operation: Operation, rows: Rows) -> Source:
        """Return the source of a divided operation: the rows as they lie there, if that is one slice."""
        layout = layout_of(operation, self.world_size)
        return rows.reshape(-1) if layout.count <= 1 else Columns(rows, layout)

    def _rows_of(self, parts: object, bound: Binding) -> Rows:
        """Return the bytes that a scatter has for each rank. ``bound`` is the memory of each rank's part."""
        given = list(parts) if parts is not None else []  # type: ignore[call-overload]  # any iterable of parts
        if len(given) != self.world_size:
            raise SizeMismatchError(f"scatter needs a part for each of {self.world_size} ranks, and got {len(given)}")
        found = [bind(part, writes=False) for part in given]
        for rank, part in enumerate(found):
            if part.dtype != bound.dtype:
                raise DTypeError(f"the part for rank {rank} is {part.dtype.name}, and the tensor {bound.dtype.name}")
            if part.shape != bound.shape:
                raise SizeMismatchError(f"the part for rank {rank} has shape {part.shape}, the tensor {bound.shape}")
        return np.concatenate([part.data for part in found]).reshape(self.world_size, -1)

    def _collective(
        self,
        operation: Operation,
        source: Source | None,
        destination: Destination | None,
        bound: Binding,
        value: V,
        async_op: bool,
        timeout: Timeout,
        weight: float = 1.0,
    ) -> V | Handle[V]:
        patience = None if timeout is None else seconds(timeout)
        if self.world_size == 1 or operation.numel == 0:  # identities, nothing to exchange
            self._session.check_open()
            handle: Handle[V] = finished(value, weight)
        else:
            handle = self._session.collective(operation, source, destination, weight, value, background=async_op)
            handle.then(bound.store)
            if patience is not None:
                handle.within(patience)
        return handle if async_op else handle.wait()

    def _check_divisible(self, what: str, shape: tuple[int, ...]) -> None:
        if not shape or shape[0] % self.world_size:
            raise SizeMismatchError(
                f"{what} splits the first dimension among {self.world_size} workers, "
                f"and that of shape {shape} cannot be split evenly"
            )
