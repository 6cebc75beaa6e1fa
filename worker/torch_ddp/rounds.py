"""Exchange of a module's buckets, one round at a time: gradients, buffers, and which parameters were used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor, nn

from gradserver.protocol.plan import Plan
from gradserver.protocol.plan_codecs import with_named_codecs
from gradserver.worker.client import Worker
from gradserver.worker.planes.plane import Outcome, Plane
from gradserver.worker.planes.staging import Staging
from gradserver.worker.torch_ddp.buckets import (
    OPTION,
    BufferBucket,
    FlatBucket,
    GradientBucket,
    Slot,
    bring,
    buffer_buckets,
    hand_out,
    sender_spec,
    used_spec,
)
from gradserver.worker.torch_ddp.clipping import MeanNorms, clip_own
from gradserver.worker.torch_ddp.flatten import local_mean
from gradserver.worker.torch_ddp.grouping import group_parameters
from gradserver.worker.torch_ddp.kept import KeptGradients
from gradserver.worker.torch_ddp.modes import Mode, Modes
from gradserver.worker.torch_ddp.module_buffers import BufferWatch, check_parameters, exchanged_buffers
from gradserver.worker.torch_ddp.pacing import Pacing

_NO_SAMPLES: Final = 1e-300
"""The weight of a worker that takes part in a round without a sample of its own.

Not 0: with that a worker says that it has no more batches, and a round in which all say so ends `join`.
Beside any other weight it vanishes (1 + 1e-300 is 1), and no gradient is sent with it.
"""


@dataclass(frozen=True)
class Options:
    """Options of the exchange; see `DistributedDataParallel`."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    delay_all_reduce: bool = False
    broadcast_buffers: bool = True
    ignored: frozenset[str] = frozenset()
    exchange_in_eval: bool = True
    accumulation: Literal["sum", "mean"] = "sum"
    timeout: float | None = None
    wire: Mapping[str, str] = field(default_factory=dict)
    pacing: Pacing | None = None
    clip_grad_norm: float | None = None
    max_grad_norm: float | None = None

    @property
    def clips_own(self) -> bool:
        """True if what this worker gives is clipped: nothing of it goes before its norm is known."""
        return self.max_grad_norm is not None

    @property
    def tracks_used(self) -> bool:
        """True if parameters may be without a gradient, so that workers tell each other which have one."""
        return self.find_unused_parameters or self.static_graph


class Rounds:
    """The exchange of one module's gradients. Constructing it agrees on the plan with all other workers.

    Attributes:
        agreement: what the replicas have agreed on.
        plan: what a round exchanges: gradients, the sender of buffers, buffers, and which parameters have a gradient.
        gradients: the buckets of gradients.
        buffers: the buckets of buffers.
        slots: all parameters that are exchanged, in the plan's order.
        weight: this worker's weight, from the next round on.
        pacing: measures this worker, if workers are unequal.
        modes: compares the workers' modes, if eval mode exchanges nothing.
        seconds: time that the caller's thread has spent in exchanges so far.
        total_weight: sum of the weights of the last round.
        skipped: true if the last round must not be applied, as gradients of a member were not finite.
        left_out: true if gradients of this worker in it were not finite, and did not count.
        norms: norms of the last round's means.
        own_norm: norm of what this worker gave to it before that was clipped; None unless it clips that.
    """

    def __init__(
        self,
        module: nn.Module,
        worker: Worker,
        options: Options,
        blocks: Iterable[nn.Module] | None,
        bucket_cap_mb: float,
    ) -> None:
        self._worker = worker
        self._options = options
        groups = group_parameters(module, blocks, bucket_cap_mb, options.ignored)
        check_parameters(module, options.ignored)
        self.gradients = [GradientBucket(group) for group in groups]
        exchanged = exchanged_buffers(module, options.ignored) if options.broadcast_buffers else []
        self.buffers = buffer_buckets(exchanged)
        self._watch = BufferWatch(module, exchanged, options.ignored, OPTION) if options.broadcast_buffers else None
        self.slots = [slot for bucket in self.gradients for slot in bucket.slots]
        buckets: list[FlatBucket] = [*self.gradients, *self.buffers]
        specs = [bucket.spec for bucket in self.gradients]
        if self.buffers:
            specs += [sender_spec(), *(bucket.spec for bucket in self.buffers)]
        if options.tracks_used:
            specs.append(used_spec(len(self.slots)))
        self.pacing = options.pacing
        self._is_mean = options.accumulation == "mean" or (self.pacing is not None and self.pacing.is_cadence)
        if self.pacing is not None:
            specs.append(self.pacing.spec)
        self.plan = Plan(tuple(specs))
        self.agreement = worker.agree_beside(with_named_codecs(self.plan, options.wire), options.timeout)
        self.plan = self.agreement.plan
        self._plane = self._choose_plane(buckets)
        for bucket in buckets:
            bucket.place(self.new_memory(bucket))
        self._sender = self._plane.new_memory(1, torch.int32, torch.device("cpu"))
        self._saved: dict[int, Tensor] = {}
        """Contents of buckets before this worker put its buffers there, in this round, by their index."""
        self._adopted = self._has_forwarded = False
        self._used = self._plane.new_memory(len(self.slots), torch.uint8, torch.device("cpu"))
        self._pace = self._plane.new_memory(
            0 if self.pacing is None else self.pacing.spec.numel, torch.float64, torch.device("cpu")
        )
        if self.pacing is not None:
            parameters = [slot.parameter for slot in self.slots]
            self.pacing.measure(self.gradients[0].device, lambda: self.seconds, parameters)
        self.modes = Modes(worker, compares=not options.exchange_in_eval)
        self.weight = 1.0
        self.seconds = 0.0
        self.skipped = self.left_out = False
        self.total_weight = 0.0
        self.norms = MeanNorms(worker, self.gradients, options.clip_grad_norm is not None)
        self.own_norm: float | None = None
        self._clipped: dict[int, bool] = {}
        """Buckets that have what this worker gives, clipped, and if they have any."""
        self._unpushed: set[int] = set()
        self._brought: list[set[Slot]] = []
        """Slots of each bucket with gradients that were brought as they became ready."""
        self._round_weight: float | None = None
        self._leaves = self._abandoned = False
        self._count = 1
        self._foreseen = False
        self._factor: float | None = None
        """Factor of this round's gradients on their way into buckets; None if they are taken as they are."""

    def _choose_plane(self, buckets: Iterable[FlatBucket]) -> Plane:
        """Return the way of the buckets: the coordinator's, or the members' own where the group has that."""
        through = Staging(self._worker, self.agreement, self._options.timeout)
        if not self._worker._session.membership.commits:
            return through
        from gradserver.worker.planes.commit import commit_plan
        from gradserver.worker.planes.direct import DirectPlane  # some builds of torch lack what it needs

        commit = self._worker.agree_beside(commit_plan(self.plan), self._options.timeout)
        devices = {torch.device("cpu"), *(bucket.device for bucket in buckets)}
        return DirectPlane(self._worker, self.plan, commit, through, devices, self._options.timeout)

    def begin(self, count: int, foreseen: bool = False, leaves: bool = False) -> None:
        """Begin a round, before anything of it is pushed.

        Args:
            count: how many local backwards the gradients are the sum of.
            foreseen: whether each slot's ``expected`` already tells if it will have a gradient.
            leaves: this worker has no more batches: it takes part with weight 0.
        """
        self._unpushed = set(range(len(self.gradients)))
        self._brought = [set() for _ in self.gradients]
        self._round_weight = None
        self._abandoned = False
        self.adopt_buffers()
        self._count, self._foreseen, self._leaves = count, foreseen, leaves
        if self.pacing is not None:
            self.pacing.open(count, self.weight)
        is_changed = (self._is_mean and count > 1) or self._options.clips_own
        self._factor = None if is_changed else self._plane.factor(self._own_weight)
        if self._factor is not None:
            for bucket in self.gradients:
                bucket.vacate(partial(self.new_memory, bucket))

    def new_memory(self, bucket: FlatBucket) -> Tensor:
        """Return zeros for a bucket, where the plane reads and writes them without a copy if it can."""
        return self._plane.new_memory(bucket.spec.numel, bucket.dtype, bucket.device)

    def before_forward(self) -> None:
        """Prepare for a forward, in the thread that will call ``backward()``."""
        self.check_buffers()
        self._plane.before_forward()
        self.adopt_buffers()
        if self.pacing is not None:
            self.pacing.begin()

    def check_buffers(self) -> None:
        """Raise UsageError or SizeMismatchError, with its name, for a buffer that would not be exchanged."""
        if self._watch is not None:
            self._watch.check()

    def after_forward(self) -> None:
        """Check the buffers behind the first forward, which may make some: before anything is exchanged."""
        if not self._has_forwarded:
            self.check_buffers()
            self._has_forwarded = True

    def adopt_buffers(self) -> None:
        """Take the buffers, as they are now, for those that all members have, before the first round."""
        if not self._adopted and not self._worker.joins:  # a learner gets them later
            for bucket in self.buffers:
                bucket.pack()
            self._adopted = True

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of the buffers that are exchanged."""
        return frozenset(component.name for bucket in self.buffers for component in bucket.spec.components)

    @property
    def begun(self) -> bool:
        """True if anything of this round was pushed, so that only its end can follow."""
        return self._plane.pushed

    @property
    def unpushed(self) -> list[str]:
        """Keys of the buckets of gradients that were not pushed yet."""
        return [self.gradients[index].spec.key for index in sorted(self._unpushed)]

    def take(self, index: int, slot: Slot) -> None:
        """Bring a gradient of bucket ``index``, which is ready, into the bucket."""
        if self._factor is None:
            bring((slot,), self._options.gradient_as_bucket_view)
            self._brought[index].add(slot)
        else:
            slot.scale(self._factor)
        self._plane.note_writer(index, self.gradients[index].device)

    def push(self, index: int) -> None:
        """Contribute one bucket of gradients: all that its parameters have accumulated."""
        with self._timed():
            weight = min(self._open(), _NO_SAMPLES) if self._abandoned else self._open()
            bucket, kept = self.gradients[index], None
            factor = None if self._factor is None else self._plane.factor(weight)
            present = weight > _NO_SAMPLES
            if factor is not None:
                present = present and bucket.scale(factor)
                kept = KeptGradients(bucket, self._options.gradient_as_bucket_view, partial(self.new_memory, bucket))
            elif present:
                present = self._clipped.pop(index) if index in self._clipped else self._take_all(index, bucket)
            self._plane.push(index, bucket.flat, weight, present, kept)
            self._unpushed.discard(index)

    def _take_all(self, index: int, bucket: GradientBucket) -> bool:
        """Bring the gradients that were not brought into the bucket as they are. Return whether it has any."""
        has = bucket.take(self._options.gradient_as_bucket_view, self._brought[index])
        if self._is_mean:
            local_mean(bucket.flat, max(self._count, 1))
        return has

    def abandon(self) -> None:
        """Give no more gradients in this round. What was pushed of it counts."""
        self._abandoned = True
        if self.pacing is not None:
            self.pacing.abandon()
        for index in self._unpushed:
            for slot in self.gradients[index].slots:
                slot.parameter.grad = None

    def finish(self) -> bool:
        """Push the rest, wait for every result and hand them out. Return true if any worker took part with a weight."""
        if self.pacing is not None:
            self.pacing.computed()
        if self._options.max_grad_norm is not None and not (self._abandoned or self._leaves):
            self._clip_own(self._options.max_grad_norm)
        for index in sorted(self._unpushed):
            self.push(index)
        with self._timed():
            self._push_pace()
            if self._options.tracks_used and not self._foreseen:
                self._push_used()
            self._push_buffers()
            self.modes.heed()
            handles = self._plane.finish(self.norms.are_wanted)
            self.skipped, self.left_out = self._worker.skipped, self._worker.left_out
            self.total_weight = handles[0].weight
            self._hand_out(handles)
            self.norms.take(handles, self.skipped)
            if self._options.clip_grad_norm is not None:
                self.norms.clip(self._options.clip_grad_norm)
        anybody = handles[0].weight > 0.0 or handles[0].not_finite is not None
        if self.pacing is not None:
            self.pacing.arrived(self._pace, anybody)
        return anybody

    def _clip_own(self, limit: float) -> None:
        """Clip what this worker gives, by its norm over all buckets."""
        self._clipped = {index: self._take_all(index, bucket) for index, bucket in enumerate(self.gradients)}
        self.own_norm = clip_own([bucket.flat for bucket in self.gradients], limit, self._worker.damping)

    def _open(self) -> float:
        """Return this worker's weight in the round. The first call pushes what does not wait for gradients."""
        if self._round_weight is None:
            self.agreement.check()
            self._round_weight = self._own_weight
            if not self._leaves:
                self.modes.say(Mode.TRAINING)
            if self.buffers:
                membership = self._worker._session.membership
                self._sender.fill_(self._worker._session.member_of(membership.rank))
                self._plane.push(len(self.gradients), self._sender, self._round_weight)
            if self._options.tracks_used and self._foreseen:
                self._push_used()
        return self._round_weight

    @property
    def _own_weight(self) -> float:
        weight = self.weight if self.pacing is None else self.pacing.weight
        own = _NO_SAMPLES if self._abandoned else max(weight, _NO_SAMPLES)
        return 0.0 if self._leaves else own

    def _push_buffers(self) -> None:
        """Send what has changed of the buffers, if it is this worker's that all are to have.

        The sender is known when all have begun their backward: as a rule, long before its end.
        """
        if not self.buffers:
            return
        weight, sends = self._open(), self._sends_buffers()
        membership = self._worker._session.membership
        may_be_left_out = not membership.needs_all or bool(membership.late)
        for index, bucket in self._numbered_buffers():
            present = sends and bucket.changed()
            if present:
                if may_be_left_out:
                    self._saved[index] = bucket.flat.clone()
                bucket.pack()
            self._plane.push(index, bucket.flat, weight, present)

    def _sends_buffers(self) -> bool:
        session = self._worker._session
        if not self._open():
            return False
        if session.membership.late:  # a round is closed when a quorum has given all, so nothing can be waited for in it
            return True
        handle = self._plane.wait(len(self.gradients))
        return handle.present and int(self._sender) == session.member_of(session.membership.rank)

    def _numbered_buffers(self) -> Iterator[tuple[int, BufferBucket]]:
        return enumerate(self.buffers, start=len(self.gradients) + 1)

    def _hand_out_buffers(self, handles: Mapping[int, Outcome]) -> None:
        """Give all members the buffers that were sent. The others get the values that they had after the last round."""
        for index, bucket in self._numbered_buffers():
            handle, before = handles[index], self._saved.pop(index, None)
            if before is not None and handle.left_alone:  # what this worker sent came too late
                flat, saved = bucket.flat.view(torch.uint8), before.view(torch.uint8)
                for start, stop in handle.left_alone:
                    flat[start:stop] = saved[start:stop]
                self._plane.overwritten(index, bucket.flat)
            if handle.weight:
                bucket.unpack()

    def _push_used(self) -> None:
        have = [(self._foreseen and slot.expected > 0) or slot.parameter.grad is not None for slot in self.slots]
        self._used.copy_(torch.tensor(have))
        self._plane.push(len(self.plan.buckets) - (1 if self.pacing is None else 2), self._used, self._open())

    def _push_pace(self) -> None:
        if self.pacing is not None:
            self.pacing.fill(self._pace)
            self._plane.push(len(self.plan.buckets) - 1, self._pace, self._open())

    def _hand_out(self, handles: Mapping[int, Outcome]) -> None:
        self._hand_out_buffers(handles)
        as_view = self._options.gradient_as_bucket_view
        # Where no member has a gradient none gets one, not even zeros: optimizers tell these from none.
        given, used = self.slots, self._used.tolist() if self._options.tracks_used else []
        if self.skipped or not all(used):
            given = [] if self.skipped else [slot for slot, anybody in zip(given, used, strict=True) if anybody]
            for slot in set(self.slots).difference(given):
                slot.parameter.grad = None
        elif as_view and all(bucket.is_in_place for bucket in self.gradients):
            return
        hand_out(given, as_view)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
