"""The worker, as its user sees it: collectives on torch tensors and numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, overload

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
)
from gradserver.protocol.exchange import Op
from gradserver.protocol.messages import Membership
from gradserver.protocol.plan import Plan, simple_plan, with_codec
from gradserver.worker.agreement import Agreement
from gradserver.worker.collectives import S, check_weight, finished
from gradserver.worker.entry import Arrival
from gradserver.worker.handle import Handle, Timeout, seconds
from gradserver.worker.joiner import enter
from gradserver.worker.objects import ObjectCollectives
from gradserver.worker.session import Session
from gradserver.worker.stages import Stage
from gradserver.worker.tensors import Tensor, bind, empty
from gradserver.worker.tree import Tree

if TYPE_CHECKING:
    import torch

__all__ = ["Worker", "check_weight", "finished"]


_BARE: Final = simple_plan([("round", 1)], UINT8, Op.FIRST)
"""What the rounds of a group exchange that has no gradients."""


class Worker(ObjectCollectives):
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
        self._bare: Agreement | None = None
        """By which rounds of a group without gradients end."""

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

    def enter(self, install: Callable[[Tree], object] | None = None, waits: bool = False) -> int:
        """Come into the group that this worker joins: ``install`` gets a member's state. `gradserver.Job` calls this.

        In a group without a plan (see `next_round`) the others wait, and this worker is a member on return.

        Args:
            install: is called with the state, as a tree of the same kind; more than once if a member is lost meanwhile.
                None if there is no state.
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
        self.next_round()  # it contributes to a round first, and is a member when that is over
        return self.round

    def next_round(self, timeout: Timeout = None) -> None:
        """End a round in a group that exchanges no gradients, only collectives: between two rounds workers may join.

        All members call it between the same two collectives. A worker that joins calls `enter`, and takes part in
        the collectives behind the next one. It gets what the function given to `serve_state` returns, or nothing.
        In other groups rounds end with the exchange of gradients.

        Raises:
            UsageError: this group exchanges gradients, or this worker has not entered yet.
            GradServerError: whatever made the round fail, for example WorkerLostError.
        """
        if self._bare is None:
            if self._session.plan is not None:
                raise UsageError("the rounds of this group end with its gradients: next_round is for groups without")
            if self.joins:
                raise UsageError(f"this worker {self._session.stage.value}: call Worker.enter first")
            self._bare = self.agree_beside(_BARE, seconds(timeout))
        if not self._session.donor.serves:
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
        """The round that is open or next. Rounds count from 0 over the group's life."""
        return self._session.round

    def agree(self, plan: Plan, timeout: Timeout = None) -> Plan:
        """Agree with all members on what a round exchanges; returns when everybody proposed the same plan.

        The plan takes the place of all that were agreed on before, by wrapped modules too.

        Returns:
            The plan, with this worker's codec (`Worker.wire`) for its larger means of float32.

        Raises:
            PlanMismatchError: this worker's plan is not the others'; names the first difference, both sides.
            DeadlineError: somebody did not propose in time; names them.
        """
        chosen = with_codec(plan, self._codec)
        self._session.agree(chosen, seconds(timeout))
        return chosen

    def agree_beside(self, plan: Plan, timeout: Timeout = None) -> Agreement:
        """Agree with all members on a plan beside those that there are: each has rounds of its own.

        This is how several modules share one worker. All members must make their agreements in the same order, and
        exchange them in the same order. See `agree` for what is raised.
        """
        return self._session.agree(with_codec(plan, self._codec), seconds(timeout), beside=True)

    def push(self, bucket: int, data: Tensor, *, weight: float = 1.0, present: bool = True) -> Handle[None]:
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

    def finish_round(self, timeout: Timeout = None) -> None:
        """Wait for the results of every bucket, and open the next round.

        Raises:
            OutOfStepError: some buckets were not pushed; names them.
            GradServerError: whatever made a bucket fail, for example NonFiniteError or WorkerLostError.
        """
        if self._session.plan is None:
            raise UsageError("no plan was agreed on: call agree(plan) first, on every worker")
        self._session.finish_round(seconds(timeout))

    @property
    def skipped(self) -> bool:
        """Whether the round that `finish_round` has finished last is not to be applied, by any worker.

        That is so in a group that skips rounds (``serve --nonfinite skip``) if somebody's gradients were not finite.
        What the buckets hold then is of no use.
        """
        return self._session.skipped

    @property
    def left_out(self) -> bool:
        """Whether something that this worker gave to that round was not finite, and so did not count."""
        return self._session.left_out

    # ── memory, and the end ───────────────────────────────────────────────────────────────────────────

    @overload
    def empty(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor: ...
    @overload
    def empty(self, shape: tuple[int, ...] | int, dtype: type[S] | np.dtype[S]) -> npt.NDArray[S]: ...
    @overload
    def empty(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]: ...
    def empty(self, shape: tuple[int, ...] | int, dtype: torch.dtype | npt.DTypeLike) -> Tensor:
        """Uninitialised memory that the channel reads and writes without a copy.

        A torch tensor if ``dtype`` is torch's, else a numpy array of that dtype (or name, as ``"bfloat16"``).
        """
        made: Tensor = empty(shape, dtype, self._session.empty)
        return made

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
