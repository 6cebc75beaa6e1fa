"""The worker, as its user sees it: collectives on torch tensors and numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, overload

from protocol.codecs import codec_of
from protocol.dtypes import FLOAT32, UINT8
from protocol.errors import (
    DTypeError,
    InvalidArgumentError,
    InvalidRankError,
    SendToSelfError,
    SizeMismatchError,
    UsageError,
)
from protocol.exchange import EXACT, STATE_TAG, Kind, Op, Operation, operation_of
from protocol.limits import MAX_WEIGHT
from protocol.messages import Membership
from protocol.plan import EXEMPT_BYTES, Plan, with_codec
from worker.agreement import Agreement
from worker.entry import Arrival
from worker.handle import Handle
from worker.joiner import enter
from worker.outbox import Destination
from worker.session import Session
from worker.stages import Stage
from worker.tensors import Binding, Bytes, bind, empty, like
from worker.tree import Tree
from worker.writers import into_part, into_rows

_OPS = {op.name.lower(): op for op in (Op.MEAN, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT)}


class Worker:
    """One replica's membership of a group. Made by `gradserver.connect` or `gradserver.LocalCluster`.

    Tensors are torch tensors or numpy arrays of any numeric element type. Collectives must be called
    by all members in the same order; buckets of a plan are matched by round instead, and transfers by
    source, target and tag, so that these may interleave freely.

    Attributes:
        name: what people call this worker.
        group: name of the group.
        timeout: seconds that any one exchange waits for a worker that is alive, as the coordinator said.
        wire: what gradients travel as, unless a plan says otherwise; see `gradserver.connect`.
        channel: how gradients reach the coordinator: "memory" (threads of one process), "shm" (processes of one
            host, where they lie in what `empty` returns) or "tcp".
    """

    def __init__(self, session: Session, channel: str = "memory", wire: str = "fp32") -> None:
        welcome = session.membership
        self._session = session
        self.group: str = welcome.group
        self.name: str = welcome.names[welcome.rank]
        self.timeout: float = session.timeout
        self.channel: str = channel
        self._codec = codec_of(wire)
        self.wire: str = self._codec.name

    def __repr__(self) -> str:
        return f"<Worker {self.name!r}: rank {self.rank} of {self.world_size} in group {self.group!r}>"

    # ── who is there ──────────────────────────────────────────────────────────────────────────────────

    @property
    def rank(self) -> int:
        """This worker's place, ``0 … world_size - 1``.

        In an elastic group this and what follows change when others leave or are lost: in `finish_round` (and so in
        ``backward()``), in a collective that raises MembershipChangedError, and nowhere else.
        """
        return self._session.membership.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return len(self._session.membership.names)

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the workers, by rank."""
        return self._session.membership.names

    @property
    def epoch(self) -> int:
        """Number of this membership: each group that becomes complete gets a new one, and so does each change."""
        return self._session.membership.epoch

    def on_membership(self, listener: Callable[[Membership], None]) -> None:
        """Have ``listener`` called with the new membership whenever it has changed, in the thread that waits for it."""
        self._session.on_membership(listener)

    # ── joining a group that trains already ───────────────────────────────────────────────────────────

    @property
    def joins(self) -> bool:
        """Whether this worker joins an elastic group that trains already, and has yet to `enter` it.

        Until then it can only `agree` on the plan; rank and names are what they would be if it were a member.
        """
        return self._session.stage is Stage.JOINING

    @property
    def observes(self) -> bool:
        """Whether this worker has entered, and nothing that it gives counts yet: it catches up with the others."""
        return self._session.stage is Stage.OBSERVING

    @property
    def arrival(self) -> Arrival | None:
        """How this worker got the state when it joined: from whom, how many bytes, in how many seconds.

        None if it was there from the start, or has not got it yet.
        """
        return self._session.entry.arrival

    @property
    def has_next(self) -> bool:
        """Whether this worker `observes`, and all results of its round are here already."""
        return self._session.has_next

    def serve_state(self, snapshot: Callable[[], Tree]) -> None:
        """Let workers join: one that does gets what ``snapshot()`` returns. `gradserver.Job` calls this.

        It is called between two rounds, before the first push of the next one at the latest, and must return all that
        has state: plain values and tensors, which are copied and then sent while training goes on.
        """
        if self._session.membership.seats:
            self._session.donor.serve(snapshot)

    def boundary(self) -> None:
        """This worker's state is now that at a boundary between two rounds. Without this call its next push says so."""
        self._session.donor.give()

    def enter(self, install: Callable[[Tree], object], waits: bool = False) -> int:
        """Come into the group that this worker joins: ``install`` gets a member's state. `gradserver.Job` calls this.

        Args:
            install: is called with the state, as a tree of the same kind; more than once if a member is lost meanwhile.
            waits: the others are to wait, so that what this worker pushes counts at once. They also do if it cannot
                keep up with them.

        Returns:
            The first round that this worker takes part in. Without ``waits`` others do not wait for it: while it
            `observes`, it gets the results of rounds, and what it pushes does not count. It is a member after the
            first round in which it does.

        Raises:
            DeadlineError: no round of the group was over for as long as this worker's timeout.
            UsageError: no member can send its state.
        """
        return enter(self._session, install, waits)

    # ── collectives ───────────────────────────────────────────────────────────────────────────────────

    @overload
    def all_reduce(self, tensor: Any, op: str = ..., weight: float = ..., *, async_op: Literal[False] = ...) -> Any: ...
    @overload
    def all_reduce(self, tensor: Any, op: str = ..., weight: float = ..., *, async_op: Literal[True]) -> Handle: ...
    def all_reduce(self, tensor: Any, op: str = "mean", weight: float = 1.0, *, async_op: bool = False) -> Any:
        """Replace ``tensor`` by its combination over all members, in place.

        Args:
            tensor: same shape and element type at every member.
            op: ``mean`` (``sum(w·g) / sum(w)``; floating types), ``sum``, ``min``, ``max`` or ``product``.
            weight: this member's weight in a mean; with 0 it does not count, and still gets the result.
            async_op: return a `Handle` at once, whose ``wait()`` returns the tensor.

        Returns:
            The tensor, or a Handle.
        """
        bound = bind(tensor, writes=True)
        operation = operation_of(Kind.ALL_REDUCE, _op(op), bound.dtype, bound.numel)
        if self._codec is not EXACT:
            operation = self._lossy(operation)
        source = bound.data if check_weight(weight) > 0 else None
        return self._collective(operation, source, bound.data, bound, tensor, async_op, weight)

    def broadcast(self, tensor: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Overwrite ``tensor`` at every member by that of rank ``root``, in place. Returns it, or a Handle."""
        self._check_rank(root, "root")
        gives = root == self.rank
        bound = bind(tensor, writes=not gives)
        operation = operation_of(Kind.BROADCAST, Op.NONE, bound.dtype, bound.numel, self._session.seat_of(root))
        destination = None if gives else bound.data
        return self._collective(operation, bound.data if gives else None, destination, bound, tensor, async_op)

    def all_gather(self, tensor: Any, *, async_op: bool = False) -> Any:
        """Every member's ``tensor`` (same shape everywhere), stacked by rank: shape ``(world_size, *shape)``."""
        source = bind(tensor, writes=False)
        gathered = like(tensor, (self.world_size, *source.shape))
        bound = bind(gathered, writes=True)
        operation = operation_of(Kind.ALL_GATHER, Op.NONE, source.dtype, source.numel)
        if self.world_size == 1:
            bound.data[:] = source.data
        rows = bound.data.reshape(self.world_size, -1)
        return self._collective(operation, source.data, into_rows(rows), bound, gathered, async_op)

    def reduce_scatter(self, tensor: Any, op: str = "mean", weight: float = 1.0, *, async_op: bool = False) -> Any:
        """Combine ``tensor`` over all members, and get this rank's part of the result.

        ``tensor`` of shape ``(world_size · n, …)`` is left alone; the result has shape ``(n, …)``.
        """
        source = bind(tensor, writes=False)
        if not source.shape or source.shape[0] % self.world_size:
            raise SizeMismatchError(
                f"reduce_scatter splits the first dimension among {self.world_size} workers, "
                f"and that of shape {source.shape} cannot be split evenly"
            )
        part = like(tensor, (source.shape[0] // self.world_size, *source.shape[1:]))
        bound = bind(part, writes=True)
        operation = operation_of(Kind.REDUCE_SCATTER, _op(op), source.dtype, source.numel)
        if self.world_size == 1:
            bound.data[:] = source.data
        given = source.data if check_weight(weight) > 0 else None
        destination = into_part(bound.data, self.rank * bound.data.size)
        return self._collective(operation, given, destination, bound, part, async_op, weight)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every member has come here."""
        if self.world_size == 1:
            self._session.check_open()
        else:
            operation = operation_of(Kind.BARRIER, Op.NONE, UINT8, 0)
            self._session.collective(operation, None, None).wait(timeout)

    def send(self, tensor: Any, target: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send ``tensor`` to rank ``target``; done when that rank has taken it with `recv`. Returns it, or a Handle."""
        self._check_peer(target, "target", tag)
        bound = bind(tensor, writes=False)
        return self._transfer((self.rank, target, tag), bound, True, tensor, async_op)

    def recv(self, tensor: Any, source: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Overwrite ``tensor`` by what rank ``source`` sends with the same tag. Returns it, or a Handle.

        Sends from one rank with one tag arrive in the order in which they were sent.
        """
        self._check_peer(source, "source", tag)
        bound = bind(tensor, writes=True)
        return self._transfer((source, self.rank, tag), bound, False, tensor, async_op)

    # ── rounds of a plan ──────────────────────────────────────────────────────────────────────────────

    @property
    def plan(self) -> Plan | None:
        """The plan that all members agreed on last."""
        return self._session.plan

    @property
    def round(self) -> int:
        """The round that is open or next. Rounds count from 0 over the group's life."""
        return self._session.round

    def agree(self, plan: Plan, timeout: float | None = None) -> Plan:
        """Agree with all members on what a round exchanges; returns when everybody proposed the same plan.

        The plan takes the place of all that were agreed on before, by wrapped modules too.

        Returns:
            The plan, with this worker's codec (`Worker.wire`) for its larger means of float32.

        Raises:
            PlanMismatchError: this worker's plan is not the others'; names the first difference, both sides.
            DeadlineError: somebody did not propose in time; names them.
        """
        chosen = with_codec(plan, self._codec)
        self._session.agree(chosen, timeout)
        return chosen

    def agree_beside(self, plan: Plan, timeout: float | None = None) -> Agreement:
        """Agree with all members on a plan beside those that there are: each has rounds of its own.

        This is how several modules share one worker. All members must make their agreements in the same order, and
        exchange them in the same order. See `agree` for what is raised.
        """
        return self._session.agree(with_codec(plan, self._codec), timeout, beside=True)

    def push(self, bucket: int, data: Any, *, weight: float = 1.0, present: bool = True) -> Handle:
        """Contribute to one bucket of the present round.

        Args:
            bucket: index into the plan.
            data: one-dimensional and contiguous on the CPU, of the bucket's length and element type. The
                result is written into it before the handle is done; leave it alone until then.
            weight: this worker's weight, the same for all buckets of a round. With 0 nothing is sent and
                the contribution does not count; the result comes all the same.
            present: with False the contribution is zeros, which counts with its weight and is not sent.

        Raises:
            OutOfStepError: this bucket was pushed already and the round is not finished.
            SizeMismatchError, DTypeError, LayoutError: ``data`` is not what the plan says. Nothing was sent.
        """
        plan = self._session.plan
        if plan is None:
            raise UsageError("no plan was agreed on: call agree(plan) first, on every worker")
        if plan.is_vacant(bucket):
            raise InvalidArgumentError(f"there is no bucket {bucket}: the plan has {len(plan.buckets)}")
        spec = plan.buckets[bucket]
        bound = bind(data, writes=True)
        if bound.store is not None:
            raise UsageError(f"bucket {spec.key!r}: a bucket's memory must be contiguous and on the CPU")
        if bound.dtype != spec.dtype:
            raise DTypeError(f"bucket {spec.key!r} was agreed as {spec.dtype.name}, got {bound.dtype.name}")
        if bound.numel != spec.numel:
            raise SizeMismatchError(f"bucket {spec.key!r} was agreed with {spec.numel} elements, got {bound.numel}")
        return self._session.push_bucket(bucket, bound.data, check_weight(weight), present)

    def finish_round(self, timeout: float | None = None) -> None:
        """Wait for the results of every bucket, and open the next round.

        Raises:
            OutOfStepError: some buckets were not pushed; names them.
            GradServerError: whatever made a bucket fail, for example NonFiniteError or WorkerLostError.
        """
        if self._session.plan is None:
            raise UsageError("no plan was agreed on: call agree(plan) first, on every worker")
        self._session.finish_round(timeout)

    # ── memory, and the end ───────────────────────────────────────────────────────────────────────────

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """Uninitialised memory that the channel reads and writes without a copy.

        A torch tensor if ``dtype`` is torch's, else a numpy array of that dtype (or name, as ``"bfloat16"``).
        """
        return empty(shape, dtype, self._session.empty)

    def close(self, reason: str = "close() was called") -> None:
        """Leave the group. Calls that are still waiting fail with ClosedError; closing twice does nothing."""
        self._session.close(reason)

    def abort(self, reason: str) -> None:
        """Leave because of an error: the others, who needed this worker, are told ``reason`` at once."""
        self._session.close(reason, failed=True)

    @property
    def closed(self) -> bool:
        """Whether this worker can exchange nothing any more."""
        return self._session.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session.disowned:  # a forked child that ends inside the block: the worker is its parent's
            return
        if error is None:
            self.close("its work was done")
        else:
            self.abort(f"it raised {type(error).__name__}: {error}")

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _lossy(self, operation: Operation) -> Operation:
        """With the group's codec, if it is a dense one: without feedback the others would only shrink tensors."""
        small = operation.numel * operation.dtype.itemsize < EXEMPT_BYTES
        if self._codec.parameter or small or operation.op is not Op.MEAN or operation.dtype != FLOAT32:
            return operation
        return operation_of(operation.kind, operation.op, operation.dtype, operation.numel, codec=self._codec)

    def _collective(
        self,
        operation: Operation,
        source: Bytes | None,
        destination: Destination | None,
        bound: Binding,
        value: Any,
        async_op: bool,
        weight: float = 1.0,
    ) -> Any:
        if self.world_size == 1 or operation.numel == 0:  # identities, nothing to exchange
            self._session.check_open()
            handle = finished(value, weight)
        else:
            handle = self._session.collective(operation, source, destination, weight, value, background=async_op)
            handle.then(bound.store)
        return handle if async_op else handle.wait()

    def _transfer(self, ends: tuple[int, int, int], bound: Binding, gives: bool, tensor: Any, async_op: bool) -> Any:
        operation = operation_of(Kind.TRANSFER, Op.NONE, bound.dtype, bound.numel)
        if bound.numel == 0:
            self._session.check_open()
            handle = finished(tensor)
        elif gives:
            handle = self._session.transfer(operation, ends, bound.data, None, tensor, async_op)
        else:
            handle = self._session.transfer(operation, ends, None, bound.data, tensor, async_op)
            handle.then(bound.store)
        return handle if async_op else handle.wait()

    def _check_rank(self, rank: int, what: str) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise InvalidRankError(f"{what} is {rank!r}, ranks of this group are 0 to {self.world_size - 1}")

    def _check_peer(self, rank: int, what: str, tag: int) -> None:
        self._check_rank(rank, what)
        if rank == self.rank:
            raise SendToSelfError(f"{what} is this worker's own rank, {rank}: there is nothing to send")
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < STATE_TAG:
            raise InvalidArgumentError(f"a tag is a number from 0 to {STATE_TAG - 1}, not {tag!r}")


def check_weight(weight: float) -> float:
    """``weight`` as a float; InvalidArgumentError unless it is finite, not negative and at most 1e30."""
    if weight == 1.0:
        return 1.0
    try:
        value = float(weight)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or not 0.0 <= value <= MAX_WEIGHT:
        raise InvalidArgumentError(f"a weight is a number from 0 to {MAX_WEIGHT:g}, not {weight!r}")
    return value


def finished(value: Any, weight: float = 1.0) -> Handle:
    """A handle of something that needed no exchange."""
    handle = Handle(0.0, None, value)
    handle.weight, handle.present = weight, True
    handle._complete()
    return handle


def _op(name: str) -> Op:
    try:
        return _OPS[name]
    except (KeyError, TypeError):
        raise InvalidArgumentError(f"op is {name!r}, and must be one of {', '.join(_OPS)}") from None
