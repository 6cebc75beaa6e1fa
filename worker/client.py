"""The worker, as its user sees it: collectives on torch tensors and numpy arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, Self, overload
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import (
    DTypeError,
    InvalidArgumentError,
    PlanMismatchError,
    SizeMismatchError,
    UsageError,
    raised,
)
from gradserver.protocol.exchange import Op
from gradserver.protocol.messages import Membership
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.protocol.planes import AMONG_MEMBERS, IN_PROCESS
from gradserver.worker.agreement import Agreement
from gradserver.worker.collectives.arguments import check_weight
from gradserver.worker.collectives.calls import S
from gradserver.worker.handle import Handle, Timeout, finished, seconds
from gradserver.worker.learner import enter
from gradserver.worker.member.learner import Arrival, Stage
from gradserver.worker.member.progress import Progress
from gradserver.worker.session import Session
from gradserver.worker.tensors import Tensor, bind, empty
from gradserver.worker.tree import Tree
from gradserver.worker.turns import TurnCalls

if TYPE_CHECKING:
    import torch

__all__ = ["Worker", "check_weight", "finished"]


class Closable(Protocol):
    """Something that holds resources until it is closed. A second call does nothing."""

    def close(self) -> None:
        """Free them."""


_BARE: Final = simple_plan([("round", 1)], UINT8, Op.FIRST)
"""The plan of a group that has no gradients."""


class Worker(TurnCalls):
    """One replica's membership of a group. `gradserver.connect` and `gradserver.LocalCluster` create it.

    Tensors are torch tensors or numpy arrays of any numeric element type. All members must call collectives in the
    same order. Buckets of a plan are matched by round, and transfers by source, target and tag. So these may interleave
    freely.

    Attributes:
        name: name of this worker, for people.
        group: name of the group.
        timeout: seconds that one exchange waits for a worker that is alive. The coordinator decides it.
        wire: format in which gradients travel, unless a plan says otherwise. See `gradserver.connect`.
        channel: path of the gradients to the coordinator: "memory" (threads of one process), "shm" (processes of one
            host) or "tcp". With "shm" the gradients lie in what `empty` returns.
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
        self._bare: Agreement | None = None
        """The rounds of a group without gradients, which `next_round` ends."""
        self._under_way = WeakSet()
        self._closes: WeakSet[Closable] = WeakSet()
        """Resources that `close` and `abort` free."""

    def __repr__(self) -> str:
        return f"<Worker {self.name!r}: rank {self.rank} of {self.world_size} in group {self.group!r}>"

    def __copy__(self) -> Self:
        return self  # a connection cannot be doubled: copies of a module that refers to it share it

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a worker is a connection of this process, and cannot be pickled: {self!r}. Leave it out of what goes to "
            f"another process or into a file, or call gradserver.connect() there"
        )

    # ── membership ────────────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workers, by rank."""
        return self._session.membership.names

    @property
    def epoch(self) -> int:
        """Number of this membership. Each group that becomes complete gets a new one, and so does each change."""
        return self._session.membership.epoch

    @property
    def plane(self) -> str:
        """Way of the gradients in this membership: "direct", "hierarchical", or this worker's channel.

        That to the coordinator is "tcp", "shm", or "in_process" for threads of one process. `gradserver.connect` has
        what they are.
        """
        told = self._session.membership.plane
        return told if told in AMONG_MEMBERS else IN_PROCESS if self.channel == "memory" else self.channel

    @property
    def plane_reason(self) -> str:
        """Reason for the group's plane, as a part of a sentence: "'spot-3' has no CUDA device"."""
        return self._session.membership.plane_reason

    def on_membership(self, listener: Callable[[Membership], None]) -> None:
        """Call ``listener`` with the new membership after each change, in the thread that waits for the change."""
        self._session.on_membership(listener)

    # ── joining a group that trains already ───────────────────────────────────────────────────────────

    @property
    def joins(self) -> bool:
        """True if this worker joins a group that already trains, and has not entered it yet.

        Until it calls `enter`, it can only `agree` on the plan. Rank and names are those that it would have as a
        member.
        """
        return self._session.stage is Stage.JOINING

    @property
    def observes(self) -> bool:
        """True if this worker has entered, and its contributions do not count yet: it catches up with the others."""
        return self._session.stage is Stage.OBSERVING

    @property
    def arrival(self) -> Arrival | None:
        """Source, size and duration of the state that this worker got when it joined.

        None if the worker was a member from the start, or has not received the state yet.
        """
        return self._session.learner.arrival

    @property
    def has_next(self) -> bool:
        """True if this worker `observes`, and all results of its round have arrived."""
        return self._session.boundaries.has_next

    def serve_state(self, snapshot: Callable[[], Tree]) -> None:
        """Let workers join: each gets what ``snapshot()`` returns. `gradserver.Job` calls this.

        ``snapshot`` is called between two rounds, before the first push of the next round at the latest. It must return
        all state, as plain values and tensors. These are copied, and then sent while training continues.
        """
        if not self._session.membership.needs_all:
            self._session.donor.serve(snapshot)

    def boundary(self) -> None:
        """Declare that this worker's state is that between two rounds. Without this call, its next push declares it."""
        self._session.donor.give()

    def enter(self, install: Callable[[Tree], object] | None = None, waits: bool = False) -> int:
        """Enter the group that this worker joins: ``install`` gets a member's state. `gradserver.Job` calls this.

        In a group without a plan (see `next_round`) the others wait, and this worker is a member on return.

        Args:
            install: function that is called with the state, as a tree of the same kind. It is called again if a member
                is lost meanwhile. None if there is no state.
            waits: true if the others are to wait, so that this worker's pushes count at once. They also wait if this
                worker cannot keep up with them.

        Returns:
            The first round that this worker takes part in. Without ``waits`` the others do not wait for it. While it
            `observes`, it gets the results of rounds, and its pushes do not count. It becomes a member after the first
            round in which its pushes count.

        Raises:
            DeadlineError: no round of the group ended for as long as this worker's timeout.
            UsageError: no member can send its state.
        """
        install = install or (lambda _: None)
        if self._session.plan is not None or not self.joins:
            return enter(self._session, install, waits)
        try:
            self._bare = self.agree_beside(_BARE)
        except PlanMismatchError as error:
            raise UsageError(
                "before it enters a group that exchanges gradients, a worker agrees on the plan: wrap the model as the "
                "others do, or call agree(plan)"
            ) from error
        enter(self._session, install, True)
        self.next_round()  # it contributes to a round first, and is a member after that
        return self.round

    def next_round(self, timeout: Timeout = None) -> None:
        """End a round in a group that exchanges no gradients, only collectives. Workers may join between two rounds.

        All members call it between the same two collectives. A worker that joins calls `enter`, and takes part in
        the collectives after the next round. It gets what the function given to `serve_state` returns, or nothing.
        In other groups, rounds end with the exchange of gradients.

        Raises:
            UsageError: this group exchanges gradients, or this worker has not entered yet.
            GradServerError: the round failed, for example with WorkerLostError.
        """
        if self._bare is None:
            if self._session.plan is not None:
                raise UsageError("the rounds of this group end with its gradients: next_round is for groups without")
            if self.joins:
                raise UsageError(f"this worker {self._session.stage.value}: call Worker.enter first")
            self._bare = self.agree_beside(_BARE, seconds(timeout))
        if not self._session.member.donor.serves:
            self.serve_state(dict)
        self.push(self._bare.first, np.zeros(1, np.uint8))
        self._bare.finish(seconds(timeout))

    # ── rounds of a plan ──────────────────────────────────────────────────────────────────────────────

    @property
    def plan(self) -> Plan | None:
        """The plan that all members agreed on last."""
        return self._session.plan

    @property
    def round(self) -> int:
        """Number of the round that is open or next. Rounds count from 0 over the group's life."""
        return self._session.round

    def agree(self, plan: Plan, timeout: Timeout = None) -> Plan:
        """Agree with all members on what a round exchanges. Return when every member has proposed the same plan.

        The plan replaces all earlier plans, also those of wrapped modules.

        Returns:
            The plan, with this worker's codec (`Worker.wire`) for its larger means of float32.

        Raises:
            PlanMismatchError: this worker's plan is not the others'. The error shows both sides of the first
                difference.
            DeadlineError: a member did not propose in time. The error names it.
        """
        chosen = with_codec(plan, self._codec)
        self._session.agree(chosen, seconds(timeout))
        return chosen

    def agree_beside(self, plan: Plan, timeout: Timeout = None) -> Agreement:
        """Agree with all members on a further plan, which has rounds of its own.

        Several modules share one worker in this way. All members must make their agreements in the same order, and
        exchange them in the same order. It raises the errors of `agree`.
        """
        return self._session.agree(with_codec(plan, self._codec), seconds(timeout), beside=True)

    def push(
        self,
        bucket: int,
        data: Tensor,
        *,
        weight: float = 1.0,
        present: bool = True,
        progress: Progress | None = None,
    ) -> Handle[None]:
        """Contribute to one bucket of the present round.

        Args:
            bucket: index into the plan.
            data: one-dimensional and contiguous on the CPU, of the bucket's length and element type. The result is
                written into it before the handle is done. Leave it alone until then.
            weight: weight of this worker, the same for all buckets of a round. With 0 nothing is sent, and the
                contribution does not count. The result still comes.
            present: false if the contribution is zeros, which count with their weight and are not sent.
            progress: how much of ``data`` is there so far, while it is being written (see `advance`). None if all is.

        Raises:
            OutOfStepError: this bucket was already pushed, and the round is not finished.
            SizeMismatchError: ``data`` has another length than the plan says. Nothing was sent.
            DTypeError: ``data`` has another element type than the plan says. Nothing was sent.
            LayoutError: ``data`` has a layout that cannot be sent. Nothing was sent.
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
        if progress is not None and progress.encoded:  # by what gives such memory, in the layout of this very bucket
            return self._session.push_bucket(bucket, bound.data, check_weight(weight), present, progress)
        if bound.dtype != spec.dtype:
            raise DTypeError(f"bucket {spec.key!r} was agreed as {spec.dtype.name}, got {bound.dtype.name}")
        if bound.numel != spec.numel:
            raise SizeMismatchError(f"bucket {spec.key!r} was agreed with {spec.numel} elements, got {bound.numel}")
        return self._session.push_bucket(bucket, bound.data, check_weight(weight), present, progress)

    def advance(self, progress: Progress, nbytes: int) -> None:
        """Declare that the first ``nbytes`` bytes of a bucket that was pushed with ``progress`` are there."""
        self._session.traffic.advance(progress, nbytes)

    def finish_round(self, timeout: Timeout = None) -> None:
        """Wait for the results of every bucket, and open the next round.

        Raises:
            OutOfStepError: some buckets were not pushed. The error names them.
            GradServerError: a bucket failed, for example with NonFiniteError or WorkerLostError.
        """
        if self._session.plan is None:
            raise UsageError("no plan was agreed on: call agree(plan) first, on every worker")
        self._session.finish_round(seconds(timeout))

    @property
    def skipped(self) -> bool:
        """True if no worker applies the round that `finish_round` finished last.

        This happens in a group that skips rounds (``serve --nonfinite skip``) if some gradients were not finite. The
        contents of the buckets are then of no use.
        """
        return self._session.member.rounds.skipped

    @property
    def left_out(self) -> bool:
        """True if a part of this worker's contribution to that round was not finite, and so did not count."""
        return self._session.member.rounds.left_out

    def synchronize(self) -> None:
        """Wait for all collectives that were called with ``async_op``, as long as their handles exist.

        Their results are then in the tensors, for every stream of a CUDA device.

        Raises:
            GradServerError: one of them failed. The others are waited for when this is called again.
        """
        for handle in list(self._under_way):
            self._under_way.discard(handle)
            handle.wait()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    # ── memory, and the end ───────────────────────────────────────────────────────────────────────────

    @overload
    def empty(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor: ...
    @overload
    def empty(self, shape: tuple[int, ...] | int, dtype: type[S] | np.dtype[S]) -> npt.NDArray[S]: ...
    @overload
    def empty(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]: ...
    def empty(self, shape: tuple[int, ...] | int, dtype: torch.dtype | npt.DTypeLike) -> Tensor:
        """Allocate uninitialised memory that the channel reads and writes without a copy.

        The result is a torch tensor if ``dtype`` is torch's. Otherwise it is a numpy array of that dtype (or name, such
        as ``"bfloat16"``).
        """
        made: Tensor = empty(shape, dtype, self._session.traffic.channel.empty)
        return made

    def close(self, reason: str = "close() was called") -> None:
        """Leave the group. Calls that still wait fail with ClosedError. A second call does nothing."""
        self._close(reason)

    def abort(self, reason: str) -> None:
        """Leave because of an error. The others, which needed this worker, are told ``reason`` at once."""
        self._close(reason, failed=True)

    def _close(self, reason: str, failed: bool = False) -> None:
        try:
            self._session.close(reason, failed)
        finally:
            for resource in list(self._closes):
                resource.close()

    def closes(self, resource: Closable) -> None:
        """Close ``resource``, too, when this worker has left the group, if it still exists then."""
        self._closes.add(resource)

    @property
    def closed(self) -> bool:
        """True if this worker can exchange nothing any more."""
        return self._session.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session.disowned:  # in a forked child that ends inside the block, the worker is its parent's
            return
        if error is None:
            self.close("its work was done")
        else:
            self.abort(raised(error))
