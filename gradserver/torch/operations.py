"""The operations of torch.distributed, each by the collectives and transfers of one worker.

Every method returns a work at once. Its first arguments are torch's; what follows are torch's options, or the root,
reduction and timeout that shorter spellings give in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from gradserver.protocol.errors import (
    CollectiveMismatchError,
    DeadlineError,
    DTypeError,
    LayoutError,
    PeerError,
    SizeMismatchError,
    UnsupportedOperationError,
    UsageError,
)
from gradserver.protocol.limits import MAX_TIMEOUT
from gradserver.torch.errors import as_torchs
from gradserver.torch.work import GradServerWork, Resolvers
from gradserver.worker.client import Worker
from gradserver.worker.collectives.any_source import AnySource
from gradserver.worker.handle import Handle

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Finish = Callable[[], object]

_REDUCTIONS: Final = {"SUM": "sum", "AVG": "mean", "PRODUCT": "product", "MIN": "min", "MAX": "max"}
_BITWISE: Final = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_PAIRS_TAG: Final = 1 << 40
"""Tag of the transfers of which an exchange of unequal parts is made. Those of callers fit into 32 bits."""


class Chosen(NamedTuple):
    """Options of one call."""

    op: str
    root: int
    seconds: float


class Operations:
    """The operations of one group.

    Args:
        worker: this process's membership.
        rank: its rank.
        size: number of ranks.
        timeout: limit of waits that name none.
        ranks: ranks of the members in the default group; nothing if it is that.
    """

    def __init__(self, worker: Worker, rank: int, size: int, timeout: timedelta, ranks: tuple[int, ...] = ()) -> None:
        self.worker, self.rank, self.size, self.ranks = worker, rank, size, ranks
        self.sequence = 0
        self._resolvers = Resolvers()
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit waits that name no limit."""
        self._seconds = min(timeout.total_seconds(), MAX_TIMEOUT)

    # ── reductions ────────────────────────────────────────────────────────────────────────────────────

    def allreduce(self, tensors: Tensor | Tensors, *options: Any, **more: Any) -> GradServerWork:
        """Replace each tensor by its combination over all ranks."""
        chosen, targets = self._chosen(options, more), _several(tensors)
        if any(target.is_sparse for target in targets):
            return self._sum_sparse(targets, chosen)
        if chosen.op in _BITWISE:
            return self._combine(targets, targets, chosen)
        return self._work(self._reduced(targets, chosen), None, targets, chosen)

    def reduce(self, tensors: Tensor | Tensors, *options: Any, **more: Any) -> GradServerWork:
        """Replace each tensor of the root by its combination over all ranks."""
        chosen, targets = self._chosen(options, more), _several(tensors)
        if self.rank == chosen.root:
            return self.allreduce(targets, *options, **more)
        given = [target.detach().clone() for target in targets]
        if chosen.op in _BITWISE:
            return self._combine(given, [], chosen)
        return self._work(self._reduced(given, chosen), None, targets, chosen)

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any, **more: Any) -> GradServerWork:
        """Combine lists of one tensor for each rank, and keep this rank's."""
        chosen = self._chosen(options, more)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        handles, ends = [], []
        for output, parts in zip(outputs, inputs, strict=True):
            if len(parts) != self.size:
                raise SizeMismatchError(
                    f"reduce_scatter needs a tensor for each of {self.size} ranks, not {len(parts)}"
                )
            if output.shape != parts[self.rank].shape:
                raise SizeMismatchError(_unlike("reduce_scatter", output, parts[self.rank]))
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            if len({part.numel() for part in parts}) == 1:
                handle = self._reduce_scattered(flat.view(self.size, -1), chosen)
                ends.append((output, handle, 0))
            else:
                (handle,) = self._reduced([flat], chosen)
                ends.append((output, handle, sum(part.numel() for part in parts[: self.rank])))
            handles.append(handle)

        def finish() -> None:
            for output, handle, start in ends:
                _put(output, handle.wait().reshape(-1)[start : start + output.numel()])

        return self._work(handles, finish, list(outputs), chosen)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, *options: Any, **more: Any) -> GradServerWork:
        """Combine a tensor over all ranks, and keep this rank's part of it."""
        return self.reduce_scatter_single_coalesced([output], [given], *options, **more)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *options: Any, **more: Any
    ) -> GradServerWork:
        """Combine several tensors in this way."""
        chosen = self._chosen(options, more)
        handles = []
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() * self.size != given.numel():
                raise SizeMismatchError(
                    f"input tensor must be the same size as output size times world size: {given.numel()} elements, "
                    f"and {self.size} times {output.numel()}"
                )
            handles.append(self._reduce_scattered(given.detach().reshape(self.size, -1), chosen))
        return self._work(handles, lambda: _put_all(outputs, handles), list(outputs), chosen)

    def _reduced(self, targets: Tensors, chosen: Chosen) -> list[Handle[Tensor]]:
        self._check_whole()
        op: Any = _REDUCTIONS[chosen.op]
        return [self.worker.all_reduce(_dense(target), op, async_op=True) for target in targets]

    def _reduce_scattered(self, rows: Tensor, chosen: Chosen) -> Handle[Tensor]:
        if chosen.op in _BITWISE:
            raise UnsupportedOperationError(f"reduce_scatter has no ReduceOp.{chosen.op} here: use all_reduce")
        self._check_whole()
        op: Any = _REDUCTIONS[chosen.op]
        return self.worker.reduce_scatter(_dense(rows), op, async_op=True)

    def _combine(self, given: Tensors, targets: Tensors, chosen: Chosen) -> GradServerWork:
        """Combine bit by bit: each rank gets all tensors, and combines them into ``targets``."""
        for tensor in given:
            if tensor.is_floating_point() or tensor.is_complex():
                raise UnsupportedOperationError(
                    f"ReduceOp.{chosen.op} is for integers and bool, not for {tensor.dtype}"
                )
        self._check_whole()
        handles = [self.worker.all_gather(_dense(tensor), async_op=True) for tensor in given]

        def finish() -> None:
            for target, handle in zip(targets, handles, strict=False):
                first, *others = handle.wait()
                for other in others:
                    first = _BITWISE[chosen.op](first, other)
                _put(target, first)

        return self._work(handles, finish, list(given), chosen)

    def _sum_sparse(self, targets: Tensors, chosen: Chosen) -> GradServerWork:
        """Add sparse tensors up. Each rank gets the elements of all; how many each has is waited for here."""
        if chosen.op != "SUM":
            raise UnsupportedOperationError(f"sparse tensors have a sum here, and no ReduceOp.{chosen.op}")
        self._check_whole()
        pieces = [self._gather_sparse(target.detach().coalesce(), chosen) for target in targets]
        handles = [handle for piece in pieces for handle in piece[:2]]

        def finish() -> None:
            for target, (places, values, counts) in zip(targets, pieces, strict=True):
                found = [places.wait()[rank, :, :count] for rank, count in enumerate(counts)]
                elements = [values.wait()[rank, :count] for rank, count in enumerate(counts)]
                everything = torch.cat(found, 1), torch.cat(elements)
                total = torch.sparse_coo_tensor(*everything, target.shape, check_invariants=False)
                target.copy_(total.coalesce())

        return self._work(handles, finish, list(targets), chosen)

    def _gather_sparse(self, own: Tensor, chosen: Chosen) -> tuple[Handle[Tensor], Handle[Tensor], list[int]]:
        places, values = own.indices(), own.values()
        shape = torch.tensor([places.shape[1], places.shape[0], *own.shape])
        shapes = self.worker.all_gather(shape, timeout=chosen.seconds)
        if bool((shapes[:, 1:] != shapes[0, 1:]).any()):
            raise CollectiveMismatchError(f"all_reduce of sparse tensors of different shapes: {shapes[:, 2:].tolist()}")
        counts = [int(count) for count in shapes[:, 0]]
        longest = max(counts)
        padded = places.new_zeros(places.shape[0], longest)
        padded[:, : places.shape[1]] = places
        elements = values.new_zeros(longest, *values.shape[1:])
        elements[: len(values)] = values
        gathered = self.worker.all_gather(padded, async_op=True), self.worker.all_gather(elements, async_op=True)
        return *gathered, counts

    # ── copies ────────────────────────────────────────────────────────────────────────────────────────

    def broadcast(self, tensors: Tensor | Tensors, *options: Any, **more: Any) -> GradServerWork:
        """Overwrite each tensor by that of the root."""
        chosen, targets = self._chosen(options, more), _several(tensors)
        handles = [self.worker.broadcast(_dense(target), chosen.root, async_op=True) for target in targets]
        return self._work(handles, None, targets, chosen)

    def allgather(self, outputs: Any, inputs: Any, *options: Any, **more: Any) -> GradServerWork:
        """Put the tensors of all ranks into lists of tensors. Those of different ranks may differ in length."""
        chosen = self._chosen(options, more)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        handles: list[Handle[Tensor]] = []
        ends: list[tuple[Tensors, Handle[Tensor]]] = []
        for targets, given in zip(outputs, inputs, strict=True):
            self._check_lists("allgather", targets, given)
            if len({target.numel() for target in targets}) > 1:
                _put(targets[self.rank], given)
                handles += [
                    self.worker.broadcast(_dense(target), root, async_op=True) for root, target in enumerate(targets)
                ]
            else:
                ends.append((targets, self.worker.all_gather(_dense(given.detach()), async_op=True)))
        handles += [handle for _, handle in ends]

        def finish() -> None:
            for targets, handle in ends:
                for target, row in zip(targets, handle.wait(), strict=True):
                    _put(target, row)

        return self._work(handles, finish, [target for targets in outputs for target in targets], chosen)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, *options: Any, **more: Any) -> GradServerWork:
        """Put several tensors of all ranks into one list for each rank."""
        by_tensor = [[rank_outputs[place] for rank_outputs in outputs] for place in range(len(inputs))]
        return self.allgather(by_tensor, inputs, *options, **more)

    def all_gather_single(self, output: Tensor, given: Tensor, *options: Any, **more: Any) -> GradServerWork:
        """Put the tensors of all ranks one behind the other."""
        return self.all_gather_single_coalesced([output], [given], *options, **more)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *options: Any, **more: Any
    ) -> GradServerWork:
        """Put several tensors of all ranks into one tensor each."""
        chosen = self._chosen(options, more)
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self.size:
                raise SizeMismatchError(
                    f"output tensor size must be equal to world_size times input tensor size: {output.numel()} "
                    f"elements, and {self.size} times {given.numel()}"
                )
            _check_dtypes("all_gather", output, given)
        handles = [self.worker.all_gather(_dense(given.detach()), async_op=True) for given in inputs]
        return self._work(handles, lambda: _put_all(outputs, handles), list(outputs), chosen)

    def gather(self, outputs: Any, inputs: Tensor | Tensors, *options: Any, **more: Any) -> GradServerWork:
        """Put the tensors of all ranks into a list at the root."""
        chosen, (given,) = self._chosen(options, more), _several(inputs)
        targets: list[Tensor] = [] if not outputs else list(outputs if isinstance(outputs[0], Tensor) else outputs[0])
        if self.rank == chosen.root:
            self._check_lists("gather", targets, given)
        handle = self.worker.gather(_dense(given.detach()), chosen.root, async_op=True)

        def finish() -> None:
            if (rows := handle.wait()) is not None:
                for target, row in zip(targets, rows, strict=True):
                    _put(target, row)

        return self._work([handle], finish, targets, chosen)

    def scatter(self, outputs: Tensor | Tensors, inputs: Any, *options: Any, **more: Any) -> GradServerWork:
        """Give each rank its tensor of the root's list."""
        chosen, (target,) = self._chosen(options, more), _several(outputs)
        parts = None
        if self.rank == chosen.root:
            parts = [part.detach() for part in (inputs if isinstance(inputs[0], Tensor) else inputs[0])]
        handle = self.worker.scatter(_dense(target), parts, chosen.root, async_op=True)
        return self._work([handle], None, [target], chosen)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        *options: Any,
        **more: Any,
    ) -> GradServerWork:
        """Give each rank its part of a tensor: equal parts, or rows as the sizes say."""
        chosen = self._chosen(options, more)
        _check_dtypes("all_to_all", output, given)
        if not output_sizes and not input_sizes:
            if not given.dim() or given.shape[0] % self.size:
                raise SizeMismatchError(
                    f"Tensor's dim 0 does not divide equally across group size: {tuple(given.shape)}, {self.size}"
                )
            if output.numel() != given.numel():
                raise SizeMismatchError(_unlike("all_to_all", output, given))
            handle = self.worker.all_to_all(_dense(given.detach()).reshape(self.size, -1), async_op=True)
            return self._work([handle], lambda: _put(output, handle.wait()), [output], chosen)
        targets, parts = _split(output, output_sizes, self.size), _split(given.detach(), input_sizes, self.size)
        return self._exchange_pairs(targets, parts, [output], chosen)

    def alltoall(self, outputs: Tensors, inputs: Tensors, *options: Any, **more: Any) -> GradServerWork:
        """Give each rank its tensor of a list."""
        for tensors in (outputs, inputs):
            if len(tensors) != self.size:
                raise SizeMismatchError(f"all_to_all needs a tensor for each of {self.size} ranks, not {len(tensors)}")
        return self._exchange_pairs(outputs, inputs, list(outputs), self._chosen(options, more))

    def _exchange_pairs(self, targets: Tensors, parts: Tensors, value: list[Tensor], chosen: Chosen) -> GradServerWork:
        """Exchange parts of any lengths. Each pair of ranks knows its own, so nothing is agreed on before."""
        handles = []
        if targets[self.rank].numel() != parts[self.rank].numel():
            raise SizeMismatchError(_unlike("all_to_all", targets[self.rank], parts[self.rank]))
        own = parts[self.rank].detach()
        for peer in range(self.size):
            if peer != self.rank:
                part, target = _dense(parts[peer].detach()), _dense(targets[peer].detach())
                handles.append(self.worker.send(part, peer, _PAIRS_TAG, async_op=True))
                handles.append(self.worker.recv(target, peer, _PAIRS_TAG, async_op=True))
        return self._work(handles, lambda: _put(targets[self.rank], own), value, chosen)

    # ── barriers and messages ─────────────────────────────────────────────────────────────────────────

    def barrier(self, *options: Any, **more: Any) -> GradServerWork:
        """Wait for all ranks."""
        return self._work([self.worker.barrier(async_op=True)], None, [], self._chosen(options, more))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. The error names, in torch's words, the first rank that is missing, or all of them."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        try:
            self.worker.barrier(timeout=seconds)
        except (DeadlineError, PeerError) as error:
            text = self._names_missing(error, seconds, wait_all_ranks)
            raise as_torchs(type(error)(text, **error.fields), self.ranks) from None

    def _names_missing(self, error: DeadlineError | PeerError, seconds: float, wait_all_ranks: bool) -> str:
        if self.rank:
            return (
                f"[Rank {self.rank}]: Rank {self.rank} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank. {error.message}"
            )
        if seconds <= 0:
            return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms. {error.message}"
        if isinstance(error, PeerError):
            missing = [error.rank]
        else:
            missing = [rank for rank in range(self.size) if any(f"(rank {rank})" in one for one in error.missing)]
        shown = missing if wait_all_ranks else missing[:1]
        ranks = f"Rank{'s' * (len(shown) > 1)} {', '.join(map(str, shown))}"
        return f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms. {error.message}"

    def send(self, tensors: Tensor | Tensors, target: int, tag: int = 0) -> GradServerWork:
        """Send tensors to a rank."""
        given = _several(tensors)
        handles = [self.worker.send(_dense(tensor.detach()), target, tag, async_op=True) for tensor in given]
        return self._work(handles, None, given, self._chosen((), {}))

    def recv(self, tensors: Tensor | Tensors, source: int, tag: int = 0) -> GradServerWork:
        """Receive tensors from a rank."""
        targets = _several(tensors)
        handles = [self.worker.recv(_dense(tensor), source, tag, async_op=True) for tensor in targets]
        return self._work(handles, None, targets, self._chosen((), {}), source)

    def recv_anysource(self, tensors: Tensor | Tensors, tag: int = 0) -> GradServerWork:
        """Receive tensors from whichever rank sends first. A thread looks for them, whether the caller waits or not."""
        targets = _several(tensors)
        sources = [AnySource(self.worker._session, _dense(tensor), tag) for tensor in targets]
        work = self._work(sources, None, targets, self._chosen((), {}))
        work.get_future()
        return work

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _chosen(self, options: Iterable[Any], more: dict[str, Any]) -> Chosen:
        """Collect options: torch's objects of them, or a root, a reduction and a timeout by themselves."""
        op, root, timeout = more.get("op"), more.get("root", 0), more.get("timeout")
        for given in (*options, more.get("opts")):
            if given is None:
                continue
            if isinstance(given, timedelta):
                timeout = given
            elif isinstance(given, int):
                root = given
            elif isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
                op = given
            else:
                op, root = getattr(given, "reduceOp", op), getattr(given, "rootRank", root)
                timeout = getattr(given, "timeout", timeout)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        return Chosen(_name_of(op), root, min(seconds, MAX_TIMEOUT) if seconds > 0 else self._seconds)

    def _work(
        self,
        handles: Sequence[Handle | AnySource],
        finish: Finish | None,
        value: list[Tensor],
        chosen: Chosen,
        source: int = -1,
    ) -> GradServerWork:
        self.sequence += 1
        return GradServerWork(self._resolvers, handles, finish, value, chosen.seconds, source, self.ranks)

    def _check_whole(self) -> None:
        """Raise UsageError if the group may go on without a member: torch's callers count on all of them."""
        if self.size > 1 and not self.worker._session.membership.needs_all:
            raise UsageError(
                f"group {self.worker.group!r} is elastic: it goes on without a member that is lost, and torch's "
                f"callers divide sums by the {self.size} ranks of the start. Start the coordinator with --workers "
                f"{self.size} (not MIN:MAX), and `gradserver run` without --min and --restart (with torchrun, "
                f"--max-restarts starts all ranks again); or exchange gradients in rounds, with "
                f"gradserver.torch.DistributedDataParallel"
            )

    def _check_lists(self, what: str, targets: Tensors, given: Tensor) -> None:
        if len(targets) != self.size:
            raise SizeMismatchError(f"{what} needs a tensor for each of {self.size} ranks, not {len(targets)}")
        if targets[self.rank].numel() != given.numel():
            raise SizeMismatchError(_unlike(what, targets[self.rank], given))
        for target in targets:
            _check_dtypes(what, target, given)


def _name_of(op: Any) -> str:
    """Return the name of a reduction. UnsupportedOperationError if there is none of it here."""
    if op is None:
        return "SUM"
    name: str = getattr(getattr(op, "op", op), "name", str(op))
    if name not in _REDUCTIONS and name not in _BITWISE:
        known = ", ".join([*_REDUCTIONS, *_BITWISE])
        raise UnsupportedOperationError(f"Cannot use ReduceOp.{name} with the backend 'gradserver', which has {known}")
    return name


def _several(tensors: Tensor | Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor, if it is an ordinary one: a wrapper of others has no memory of its own."""
    if tensor.layout is not torch.strided:
        raise LayoutError(f"a {tensor.layout} tensor can only be summed by all_reduce: call .to_dense() first")
    return tensor.detach() if tensor.requires_grad else tensor


def _put(target: Tensor, found: Tensor) -> None:
    """Write a result into its tensor."""
    target.detach().copy_(found.view(target.shape))


def _put_all(targets: Tensors, handles: Sequence[Handle[Tensor]]) -> None:
    for target, handle in zip(targets, handles, strict=True):
        _put(target, handle.wait())


def _split(tensor: Tensor, sizes: Sequence[int] | None, count: int) -> Tensors:
    """Split a tensor into rows for each rank."""
    if not sizes:
        if tensor.shape[0] % count:
            raise SizeMismatchError(
                f"Tensor's dim 0 does not divide equally across group size: {tensor.shape[0]}, {count}"
            )
        sizes = [tensor.shape[0] // count] * count
    if len(sizes) != count:
        raise SizeMismatchError(f"Number of tensor splits not equal to group size: {len(sizes)}, and {count} ranks")
    if sum(sizes) != tensor.shape[0]:
        raise SizeMismatchError(
            f"Split sizes doesn't match total dim 0 size: {list(sizes)}, and {tensor.shape[0]} rows"
        )
    parts: Tensors = tensor.split(list(sizes))  # type: ignore[no-untyped-call]
    return parts


def _check_dtypes(what: str, target: Tensor, given: Tensor) -> None:
    if target.dtype != given.dtype:
        raise DTypeError(
            f"{what}: output tensor must have the same type as input tensor: {target.dtype}, {given.dtype}"
        )


def _unlike(what: str, target: Tensor, given: Tensor) -> str:
    return f"{what}: tensors must have the same size: output {tuple(target.shape)}, input {tuple(given.shape)}"
