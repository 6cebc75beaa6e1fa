"""Collectives of all members alike, for users, on torch tensors and numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from gradserver.protocol.codecs import Codec
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import SizeMismatchError
from gradserver.protocol.exchange import EXACT, Kind, Op, Operation, operation_of
from gradserver.protocol.plan_codecs import EXEMPT_BYTES
from gradserver.protocol.planes import DIRECT
from gradserver.worker.collectives.arguments import Maybe, Reduction, check_weight, op_of, root_of
from gradserver.worker.collectives.call import Among, Call, Stream, check_stream, on_stream
from gradserver.worker.collectives.transfers import No, T, Transfers, V, Yes
from gradserver.worker.collectives.writers import into_part, into_rows
from gradserver.worker.handle import Handle, Timeout, finished, seconds
from gradserver.worker.member.ends import Destination, Source
from gradserver.worker.tensors import Binding, bind, like, numel_of, wire_dtype

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
    _under_way: WeakSet[Handle]
    """Handles that callers have got."""

    # ── all to all alike ──────────────────────────────────────────────────────────────────────────────

    @overload
    def all_reduce(
        self,
        tensor: T,
        op: Reduction = ...,
        weight: float = ...,
        *,
        async_op: No = ...,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> T: ...
    @overload
    def all_reduce(
        self,
        tensor: T,
        op: Reduction = ...,
        weight: float = ...,
        *,
        async_op: Yes,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Handle[T]: ...
    def all_reduce(
        self,
        tensor: T,
        op: Reduction = "mean",
        weight: float = 1.0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
        stream: Stream = None,
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
            stream: ``torch.cuda.Stream`` on which this is queued, of a tensor on a CUDA device. None for one of
                gradserver's own, beside all others: it begins behind what the current stream has, and what is queued
                after ``wait()`` comes behind it.

        Returns:
            The tensor, or a Handle.
        """
        exact = operation_of(Kind.ALL_REDUCE, op_of(op), wire_dtype(tensor), numel_of(tensor))
        weight = check_weight(weight)

        def through() -> Handle[T]:
            bound = bind(tensor, writes=True)
            operation = exact if self._codec is EXACT else self._lossy(exact)
            source = bound.data if weight > 0 else None
            return self._begin(operation, source, bound.data, bound, tensor, async_op, weight)

        outcome: T | Handle[T] = self._run(
            Call(exact, tensor, through, weight=weight, stream=stream), async_op, timeout
        )
        return outcome

    @overload
    def broadcast(
        self,
        tensor: T,
        root: int = ...,
        *,
        src: Maybe = ...,
        async_op: No = ...,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> T: ...
    @overload
    def broadcast(
        self,
        tensor: T,
        root: int = ...,
        *,
        src: Maybe = ...,
        async_op: Yes,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Handle[T]: ...
    def broadcast(
        self,
        tensor: T,
        root: int = 0,
        *,
        src: int | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
        stream: Stream = None,
    ) -> T | Handle[T]:
        """Overwrite ``tensor`` at every member by that of rank ``root`` (or ``src``; 0), in place.

        Returns:
            The tensor, or a Handle.
        """
        root = self._check_rank(root_of(root, "src", src), "root")
        is_root, member_id = root == self.rank, self._session.member_of(root)
        operation = operation_of(Kind.BROADCAST, Op.NONE, wire_dtype(tensor), numel_of(tensor), member_id)

        def through() -> Handle[T]:
            bound = bind(tensor, writes=not is_root)
            source, destination = (bound.data, None) if is_root else (None, bound.data)
            return self._begin(operation, source, destination, bound, tensor, async_op)

        outcome: T | Handle[T] = self._run(Call(operation, tensor, through, root, stream=stream), async_op, timeout)
        return outcome

    @overload
    def all_gather(
        self, tensor: torch.Tensor, *, async_op: No = ..., timeout: Timeout = ..., stream: Stream = ...
    ) -> torch.Tensor: ...
    @overload
    def all_gather(
        self, tensor: torch.Tensor, *, async_op: Yes, timeout: Timeout = ..., stream: Stream = ...
    ) -> Handle[torch.Tensor]: ...
    @overload
    def all_gather(
        self, tensor: Array[S], *, async_op: No = ..., timeout: Timeout = ..., stream: Stream = ...
    ) -> Array[S]: ...
    @overload
    def all_gather(
        self, tensor: Array[S], *, async_op: Yes, timeout: Timeout = ..., stream: Stream = ...
    ) -> Handle[Array[S]]: ...
    def all_gather(self, tensor: Any, *, async_op: bool = False, timeout: Timeout = None, stream: Stream = None) -> Any:
        """Stack every member's ``tensor`` by rank. All have the same shape; the result has ``(world_size, *shape)``."""
        operation = operation_of(Kind.ALL_GATHER, Op.NONE, wire_dtype(tensor), numel_of(tensor))

        def through() -> Handle[Any]:
            return self._begin_gathering(operation, tensor, bind(tensor, writes=False), async_op)

        return self._run(Call(operation, tensor, through, stream=stream), async_op, timeout)

    @overload
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Reduction = ...,
        weight: float = ...,
        *,
        async_op: No = ...,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Reduction = ...,
        weight: float = ...,
        *,
        async_op: Yes,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Handle[torch.Tensor]: ...
    @overload
    def reduce_scatter(
        self,
        tensor: Array[S],
        op: Reduction = ...,
        weight: float = ...,
        *,
        async_op: No = ...,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Array[S]: ...
    @overload
    def reduce_scatter(
        self,
        tensor: Array[S],
        op: Reduction = ...,
        weight: float = ...,
        *,
        async_op: Yes,
        timeout: Timeout = ...,
        stream: Stream = ...,
    ) -> Handle[Array[S]]: ...
    def reduce_scatter(
        self,
        tensor: Any,
        op: Reduction = "mean",
        weight: float = 1.0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
        stream: Stream = None,
    ) -> Any:
        """Combine ``tensor`` over all members, and return this rank's part of the result.

        ``tensor`` has the shape ``(world_size · n, …)`` and stays unchanged. The result has the shape ``(n, …)``.
        """
        operation = operation_of(Kind.REDUCE_SCATTER, op_of(op), wire_dtype(tensor), numel_of(tensor))
        self._check_divisible("reduce_scatter", tuple(tensor.shape))
        weight = check_weight(weight)

        def through() -> Handle[Any]:
            source = bind(tensor, writes=False)
            part = like(tensor, (source.shape[0] // self.world_size, *source.shape[1:]))
            bound = bind(part, writes=True)
            if self.world_size == 1:
                bound.data[:] = source.data
            destination = into_part(bound.data, self.rank * bound.data.size)
            given = source.data if weight > 0 else None
            return self._begin(operation, given, destination, bound, part, async_op, weight)

        return self._run(Call(operation, tensor, through, weight=weight, stream=stream), async_op, timeout)

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

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _lossy(self, operation: Operation) -> Operation:
        """Apply the group's codec, if it is a dense one: without feedback the others would only shrink tensors."""
        small = operation.numel * operation.dtype.itemsize < EXEMPT_BYTES
        if self._codec.parameter or small or operation.op is not Op.MEAN or operation.dtype != FLOAT32:
            return operation
        return operation_of(operation.kind, operation.op, operation.dtype, operation.numel, codec=self._codec)

    def _run(self, call: Call, async_op: bool, timeout: Timeout) -> Any:
        """Begin a collective by the group's plane, and wait for it or return its handle."""
        check_stream(call.stream, call.tensor)
        patience = seconds(timeout)
        handle = None if self._session.membership.plane != DIRECT else self._among().begin(call)
        if handle is None:
            with on_stream(call.stream):
                handle = call.through()
        if patience is not None:
            handle.within(patience)
        if call.stream is not None and handle._finish is not None:
            handle.then(partial(_on, call.stream, handle._finish))
        if not async_op:
            return handle.wait()
        self._under_way.add(handle)
        return handle

    def _among(self) -> Among:
        """Return the collectives among the members. Their module needs torch, and stands above this one."""
        among: Among = import_module("gradserver.worker.planes.calls").DirectCalls.of(self._session)
        return among

    def _begin(
        self,
        operation: Operation,
        source: Source | None,
        destination: Destination | None,
        bound: Binding,
        value: V,
        async_op: bool,
        weight: float = 1.0,
    ) -> Handle[V]:
        """Begin a collective over the coordinator."""
        if self.world_size == 1:  # an identity, nothing to exchange
            self._session.check_open()
            return finished(value, weight)
        if operation.numel == 0:  # nothing travels, but each member counts it: another one's may have elements
            operation = operation_of(Kind.BARRIER, Op.NONE, operation.dtype, 0)
            source = destination = None
        handle: Handle[V] = self._session.collective(operation, source, destination, weight, value, background=async_op)
        handle.then(bound.store)
        return handle

    def _begin_gathering(self, operation: Operation, tensor: Any, source: Binding, async_op: bool) -> Handle[Any]:
        """Begin to stack every member's ``tensor``, the one of ``source``, over the coordinator."""
        gathered = like(tensor, (self.world_size, *source.shape))
        bound = bind(gathered, writes=True)
        if self.world_size == 1:
            bound.data[:] = source.data
        rows = into_rows(bound.data.reshape(self.world_size, -1))
        return self._begin(operation, source.data, rows, bound, gathered, async_op)

    def _check_divisible(self, what: str, shape: tuple[int, ...]) -> None:
        if not shape or shape[0] % self.world_size:
            raise SizeMismatchError(
                f"{what} splits the first dimension among {self.world_size} workers, "
                f"and that of shape {shape} cannot be split evenly"
            )


def _on(stream: Stream, store: Callable[[], None]) -> None:
    with on_stream(stream):
        store()
