"""The direct plane: members reduce buckets among themselves, and the coordinator hears when all have the results.

A round, at one member:

    state      event                                          next       what happens
    ─────────  ─────────────────────────────────────────────  ─────────  ───────────────────────────────────────────
    (none)     first push; this epoch reduces directly        REDUCING   `Opens`; communicators, if the epoch is new
    (none)     first push; else                               FALLEN     all goes through the coordinator's plane
    REDUCING   push                                           REDUCING   a reduction begins, in the order of buckets
    REDUCING   `finish`; all reductions are done              VOTING     the commit is pushed
    REDUCING   a reduction fails, or takes too long           FALLEN     the commit is refused: void for all
    REDUCING   word that the round is void                    FALLEN     communicators are given up; it is refused, too
    VOTING     the commit's result                            (none)     results are copied into the buckets
    VOTING     word that the round is void                    FALLEN     the same
    any        another error, as a lost coordinator           (none)     it is raised
    FALLEN     push                                           FALLEN     this and earlier ones go to the coordinator
    FALLEN     `finish`                                       (none)     as the coordinator's plane does

Results lie in memory of their own until the commit is there, and contributions stay as they are. That is one copy of
the gradients. So a void round is done again with the same contributions, and nothing of a half is applied.

A pass over the gradients takes as long as some of the exchange. A module's gradients are therefore multiplied when they
are brought into the bucket, and summed there. What autograd has made is kept until then (`Kept`), and ``.grad`` is a
view of the result when the round is over. Anything else is copied before and after.

Sums are made by gloo and NCCL, in an order of theirs: all members get the same bits, and another number of members,
or another library, gives others. The mean is the sum divided by the sum of weights, which the commit's result has. Most
often all weights are 1. So contributions are divided by the world size beforehand, rounded up to a power of two, which
rounds nothing. With 2, 4 or 8 members no division is left to do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradserver.protocol.errors import BackendUnavailableError, GradServerError, RoundVoidError
from gradserver.protocol.exchange import EXACT, Op
from gradserver.protocol.plan import Plan
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker
from gradserver.worker.devices.cuda import fetch_whole
from gradserver.worker.handle import Handle
from gradserver.worker.planes.commit import are_finite, mark, measure, measured, overflow, sign, times
from gradserver.worker.planes.communicator import Signal
from gradserver.worker.planes.epochs import Directs
from gradserver.worker.planes.flat import divisor
from gradserver.worker.planes.given import NO_DATA, DirectOutcome, Given, weight_of
from gradserver.worker.planes.plane import Kept, Outcome, Pending, Plane, Way
from gradserver.worker.planes.watch import Watch

log = logging.getLogger("gradserver")


class DirectPlane:
    """The direct plane of one module, with the coordinator's plane for rounds that cannot be direct.

    Args:
        worker: worker that has made the agreements.
        plan: the buckets.
        agreement: the section of the commit.
        through: the coordinator's plane for the same buckets.
        devices: devices of the buckets.
        timeout: seconds that a round may take beyond the end of backward; None for the worker's.
    """

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        agreement: Agreement,
        through: Plane,
        devices: Iterable[torch.device],
        timeout: float | None,
    ) -> None:
        self._worker, self._plan, self._commit, self._through = worker, plan, agreement, through
        self._timeout = timeout
        self._directs = Directs.of(worker)
        self._directs.devices.update(devices := set(devices))
        self._directs.can_try &= all(bucket.codec in (None, EXACT) for bucket in plan.buckets)
        self._is_on_host = all(device.type == "cpu" for device in devices)
        self._ordered = [index for index, bucket in enumerate(plan.buckets) if bucket.op is Op.MEAN]
        """Buckets that become ready in any order, and are reduced in this one."""
        self._scratch: dict[int, Tensor] = {}
        """Memory for results, by bucket, of buckets in which they must not be made."""
        self._way: Way | None = None
        """The way of the last round that was direct."""
        self._markers = torch.zeros(agreement.plan.buckets[0].numel)
        self._begin()

    def _begin(self) -> None:
        self._signal: Signal | None = None
        self._given: dict[int, Given] = {}
        self._next = 0
        """Place in that order of the bucket that is reduced next."""
        self._under_way: dict[int, Pending] = {}
        self._outcomes: dict[int, DirectOutcome] = {}
        self._writers: dict[int, dict[int, Any]] = {}
        """Events behind the gradients of each bucket, by the stream that computed them."""
        self._fallen = False

    # ── as any plane ──────────────────────────────────────────────────────────────────────────────────

    def new_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a bucket, in memory of the coordinator's plane: a void round goes there."""
        return self._through.new_memory(numel, dtype, device)

    def before_forward(self) -> None:
        """Prepare for a forward."""
        self._through.before_forward()

    def note_writer(self, index: int, device: torch.device) -> None:
        """Note that a gradient of bucket ``index`` was computed on the calling thread's stream."""
        self._through.note_writer(index, device)
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._writers.setdefault(index, {})[stream.cuda_stream] = stream.record_event()

    @property
    def pushed(self) -> bool:
        """True if anything of the present round was pushed."""
        return bool(self._given) or self._through.pushed

    def factor(self, weight: float) -> float | None:
        """Return what a gradient is to be multiplied by if this round is direct and there are other members."""
        world = self._worker.world_size
        is_direct = not self._fallen and (self._signal is not None or self._directs.reduces())
        if not is_direct or world == 1:
            return None
        return weight / divisor(world)

    def push(self, index: int, flat: Tensor, weight: float, present: bool = True, kept: Kept | None = None) -> None:
        """Contribute ``flat`` to bucket ``index``."""
        if self._signal is None and not self._fallen:
            self._open(weight)
        is_mean = self._is_mean(index)
        copy = None if is_mean or self._fallen else flat.clone()
        given = Given(flat, weight, present, copy, kept)
        if self._fallen:
            self._push_through(index, given)
            return
        self._given[index] = given
        try:
            if is_mean:
                self._reduce_in_order()
            else:
                self._reduce(index)
        except (GradServerError, RuntimeError, TimeoutError) as error:
            self._fall(error)

    def wait(self, index: int) -> Outcome:
        """Wait for the result of a bucket on the CPU, and write it there."""
        if not self._fallen:
            try:
                self._await(index)
                given = self._given[index]
                if self._outcomes[index].present:
                    given.flat.copy_(self._scratch[index])
                return self._outcomes[index]
            except (GradServerError, RuntimeError, TimeoutError) as error:
                self._fall(error)
        return self._through.wait(index)

    def overwritten(self, index: int, flat: Tensor) -> None:
        """Note that ``flat`` does not hold the last result any more."""
        self._through.overwritten(index, flat)

    def finish(self, measures: bool = False) -> Mapping[int, Outcome]:
        """Wait until every result is in its bucket."""
        outcomes: Mapping[int, Outcome] = {}
        if not self._fallen:
            try:
                outcomes = self._vote(measures)
            except (GradServerError, RuntimeError, TimeoutError) as error:
                self._fall(error)
        if self._fallen:
            outcomes = self._through.finish()
        else:
            self._commit.finish(self._timeout)
        self._directs.end(not self._fallen)
        self._begin()
        return outcomes

    # ── reductions ────────────────────────────────────────────────────────────────────────────────────

    def _open(self, weight: float) -> None:
        if not self._directs.reduces():
            self._fallen = True
            return
        signal = self._signal = Signal()
        watch = Watch(signal, self._worker.timeout)
        if (why := self._worker._session.boundaries.begin_direct(self._commit.first, watch)) is not None:
            signal.interrupt(why)
        try:
            way = self._directs.way(self._plan, self._commit.number, self._limit, signal)
            if way is not self._way:
                self._way = way
                self._scratch.clear()
            way.open(weight, signal)
        except (GradServerError, RuntimeError, TimeoutError) as error:
            self._fall(error)

    def _is_mean(self, index: int) -> bool:
        return self._plan.buckets[index].op is Op.MEAN

    def _reduce_in_order(self) -> None:
        while self._next < len(self._ordered) and (index := self._ordered[self._next]) in self._given:
            self._next += 1
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        """Begin the reduction of a bucket, in memory of its own."""
        given, op = self._given[index], self._plan.buckets[index].op
        if op is Op.MEAN and self._is_its_own_mean(given):
            self._writers.pop(index, None)
            self._scratch.pop(index, None)
            self._outcomes[index] = DirectOutcome()
            return
        way = self._checked_way()
        scratch = self._result(index, given)
        if scratch is None:
            scratch = self._scratch[index] = way.memory(index, given.flat)
        self._await_writers(index, given)
        self._outcomes[index] = DirectOutcome()
        if op is Op.MEAN:
            given.weigh(self._worker.world_size, scratch)
            self._under_way[index] = way.mean(index, scratch)
        elif op is Op.FIRST:
            first = self._first(given, way)
            self._outcomes[index].present = first < self._worker.world_size
            if self._outcomes[index].present:
                scratch.copy_(given.flat)
                self._under_way[index] = way.broadcast(scratch, first)
        else:
            scratch.copy_(given.flat)
            self._under_way[index] = way.combine(scratch, op)

    def _is_its_own_mean(self, given: Given) -> bool:
        """Return true for the contribution of a worker that is alone: it stays where it is, with all its bits."""
        is_kept = self._worker._session.membership.nonfinite in ("halt", "propagate")
        return self._worker.world_size == 1 and is_kept and given.present and given.weight >= NO_DATA

    def _result(self, index: int, given: Given) -> Tensor | None:
        """Return the memory of a result; None if there is none."""
        return self._scratch.get(index) if given.kept is None else given.flat

    def _made(self, index: int) -> Tensor:
        """Return the result of a bucket, where it was made."""
        result = self._result(index, self._given[index])
        return self._given[index].flat if result is None else result

    def _await_writers(self, index: int, given: Given) -> None:
        """Let the calling thread's stream wait for what computes the gradients of a bucket."""
        for event in self._writers.pop(index, {}).values():
            torch.cuda.current_stream(given.flat.device).wait_event(event)

    def _first(self, given: Given, way: Way) -> int:
        """Return the lowest rank that has something to give; the world size if none has."""
        gives = given.present and given.weight > 0
        rank = torch.full((1,), self._worker.rank if gives else self._worker.world_size, device=given.flat.device)
        way.combine(rank, Op.MIN).wait(self._limit)
        return fetch_whole(rank)

    def _await(self, index: int) -> None:
        reduction = self._under_way.get(index)
        if reduction is not None:
            reduction.wait(self._limit)

    @property
    def _limit(self) -> float:
        return self._worker.timeout if self._timeout is None else self._timeout

    def _checked(self) -> Signal:
        signal = self._signal
        assert signal is not None
        if signal.error is not None:
            raise signal.error.again()
        return signal

    def _checked_way(self) -> Way:
        self._checked()
        assert self._way is not None
        return self._way

    # ── the commit ────────────────────────────────────────────────────────────────────────────────────

    def _vote(self, measures: bool) -> dict[int, DirectOutcome]:
        """Wait for all reductions, say so, and write the results when all members have said so."""
        self._markers.zero_()
        overflowed = not self._await_all() and self._find_nonfinite()
        self._checked()
        weight = weight_of(self._given.values())
        if self._worker._session.membership.digests and self._worker.rank == 0:
            sign(self._plan, {index: self._made(index) for index in self._given}, self._markers)
        if measures and weight >= NO_DATA and self._worker.world_size > 1 and not overflowed:
            measure([self._made(index) for index in self._ordered], self._markers)
        vote = self._directs.votes
        if vote is not None and weight >= NO_DATA:
            vote.tell(times(self._markers, len(self._ordered)))
        marked = bool(torch.count_nonzero(self._markers))
        handle = self._worker.push(self._commit.first, self._markers, weight=weight, present=marked)
        handle.wait(self._timeout)
        if overflowed and handle.not_finite is None:
            raise overflow(self._worker.round)
        if vote is not None and not overflowed and handle.not_finite is None:  # else the commit may have no result
            self._directs.hear(times(self._markers, len(self._ordered)).tolist())
        for index, given in self._given.items():
            self._write(index, given, handle)
        if handle.weight >= NO_DATA and (norms := measured(self._markers, len(self._ordered))) is not None:
            self._checked_way().divide(norms, handle.weight, norms)  # they are of sums, as results are
            for index, norm in zip(self._ordered, norms.tolist(), strict=True):
                self._outcomes[index].squares = {0: (norm * norm,)}
        return self._outcomes

    def _write(self, index: int, given: Given, handle: Handle[None]) -> None:
        """Put the result of a bucket into its memory: for a mean, the sum divided by the sum of weights."""
        outcome, scratch = self._outcomes[index], self._result(index, given)
        outcome.weight, outcome.not_finite = handle.weight, handle.not_finite
        if scratch is None or not outcome.present:
            return
        if self._plan.buckets[index].op is not Op.MEAN:
            given.flat.copy_(scratch)
        elif handle.weight < NO_DATA:
            given.flat.zero_()
        elif given.kept is None or handle.weight != divisor(self._worker.world_size):
            assert self._way is not None
            self._way.divide(scratch, handle.weight, given.flat)

    def _await_all(self) -> bool:
        """Wait for all reductions. Return false if a mean is not finite, in a group where that matters."""
        shares = self._is_on_host and self._worker._session.membership.nonfinite != "propagate"
        on_host = self._checked_way().on_host if shares else None
        return are_finite(self._arriving(), on_host, self._checked(), self._limit)

    def _arriving(self) -> Iterator[Tensor]:
        """Wait for all reductions, and yield each mean that has to be finite."""
        passes_on = self._worker._session.membership.nonfinite == "propagate"
        for index in self._given:
            self._await(index)
            if not passes_on and self._is_mean(index):
                yield self._made(index)
        self._checked_way().close()

    def _find_nonfinite(self) -> bool:
        """Mark this worker's parameters that are not finite, as results are not. Return true if they still are not.

        Where such gradients are left out, they are reduced once more without those: all members see the same results,
        and do the same.
        """
        gave = [(index, given) for index in self._ordered if (given := self._given[index]).present and given.weight > 0]
        contributions = ((index, given.flat if given.kept is None else given.kept.flat()) for index, given in gave)
        own = mark(self._plan, contributions, self._markers)
        if self._worker._session.membership.nonfinite != "leave-out":
            return True
        weight = weight_of(self._given.values())
        self._checked_way().open(0.0 if own else weight, self._checked())
        for index in self._ordered:
            given = self._given[index]
            if own:
                self._given[index] = given._replace(present=False)
            elif given.kept is not None and given.present:
                given.kept.scale_again()
            self._reduce(index)
        return not self._await_all()

    # ── the round is void ─────────────────────────────────────────────────────────────────────────────

    def _fall(self, error: BaseException) -> None:
        """Go on with this round through the coordinator, if it is ``error`` that says so or a reduction's own."""
        signal = self._signal
        assert signal is not None
        word = signal.error if signal.error is not None else error
        self._under_way.clear()  # gloo closes connections when no work is kept: the other members' reductions end then
        if isinstance(word, GradServerError) and not isinstance(word, (RoundVoidError, BackendUnavailableError)):
            self._directs.give_up()
            raise word
        boundaries = self._worker._session.boundaries
        if not isinstance(word, RoundVoidError):
            log.warning(
                "group %r: this worker could not reduce round %d with the others, and it goes over the coordinator: %s",
                self._worker.group,
                self._worker.round,
                str(word),
            )
            boundaries.refuse(self._commit.first)
        self._directs.void()
        self._way = None
        self._scratch.clear()  # a reduction that was given up may still write there
        boundaries.begin_again()
        self._fallen = True
        for index, given in self._given.items():
            if given.copy is not None:
                given.flat.copy_(given.copy)
            self._push_through(index, given)

    def _push_through(self, index: int, given: Given) -> None:
        """Push a contribution as it is to the coordinator's plane."""
        flat = given.flat
        if given.kept is not None:
            self._await_writers(index, given)
            flat = given.kept.move()
        self._through.push(index, flat, given.weight, given.present)
