"""Rounds of buckets that a trainer owns and pushes one by one, on the plane that wrapped modules have, too.

The plane may have to do a round again until it is over for all members. So a bucket is its mean when all are. Whatever
waits for one bucket before the others are pushed sends the round over the coordinator, at all members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradserver.protocol.errors import BackendUnavailableError, DTypeError, OutOfStepError, SizeMismatchError
from gradserver.protocol.plan import Plan
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker, check_weight
from gradserver.worker.handle import Handle, Timeout, finished, seconds
from gradserver.worker.planes.commit import commit_plan
from gradserver.worker.planes.direct import DirectPlane
from gradserver.worker.planes.plane import Outcome
from gradserver.worker.planes.staging import Staging
from gradserver.worker.tensors import bind, is_torch, numel_of, wire_dtype


class BucketHandle(Handle[None]):
    """A handle of one bucket of a round that is over for all buckets at once."""

    __slots__ = ("_bucket", "_rounds")

    def __init__(self, rounds: BlockRounds, bucket: int, timeout: float) -> None:
        super().__init__(timeout)
        self._rounds, self._bucket = rounds, bucket

    def _wait(self, given: Timeout) -> None:
        self._rounds.complete(self._bucket, seconds(given))

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome, and be done."""
        self.weight, self.present = outcome.weight, outcome.present
        self.left_alone, self.not_finite, self.squares = outcome.left_alone, outcome.not_finite, outcome.squares
        self._complete()


class _BlockPlane(DirectPlane):
    """The direct plane of buckets that are pushed one by one, and can be waited for one by one."""

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        commit: Agreement,
        staging: Staging,
        device: torch.device,
        timeout: float | None,
    ) -> None:
        super().__init__(worker, plan, commit, staging, {torch.device("cpu"), device}, timeout)
        self._directs.can_try = False
        self._staging = staging

    def within(self, timeout: float | None) -> None:
        """Limit waits from now on to ``timeout`` seconds; None for as long as the worker does."""
        self._timeout = timeout
        self._staging.within(timeout)

    def fall(self, why: str) -> None:
        """Have the present round go over the coordinator, at all members, for a reason of this worker's script."""
        if not self._fallen:
            self._fall(BackendUnavailableError(why))


class BlockRounds:
    """Rounds of one agreement. Buckets become their means in memory of the caller.

    Args:
        worker: worker that has made the agreement.
        agreement: the buckets.
        device: device of their memory.
        timeout: seconds that a round may take; None for the worker's.
        measures: true if results are to come with norms, on any plane.
    """

    def __init__(
        self, worker: Worker, agreement: Agreement, device: torch.device, timeout: float | None, measures: bool
    ) -> None:
        self._worker, self._agreement, self._timeout, self._measures = worker, agreement, timeout, measures
        self._plan, self.device = agreement.plan, device
        commit = worker.agree_beside(commit_plan(self._plan), timeout)
        staging = Staging(worker, agreement, timeout)
        self._plane = _BlockPlane(worker, self._plan, commit, staging, device, timeout)
        self._handles: dict[int, BucketHandle] = {}
        self._is_over = False

    def push(self, bucket: int, data: Any, weight: float) -> Handle[None]:
        """Contribute ``data``, contiguous and in one dimension, to a bucket of the present round."""
        spec, weight = self._plan.buckets[bucket], check_weight(weight)
        if (dtype := wire_dtype(data)) != spec.dtype:
            raise DTypeError(f"bucket {spec.key!r} was agreed as {spec.dtype.name}, got {dtype.name}")
        if numel_of(data) != spec.numel:
            raise SizeMismatchError(f"bucket {spec.key!r} was agreed with {spec.numel} elements, got {numel_of(data)}")
        if bucket in self._handles or self._is_over:
            raise OutOfStepError(
                f"bucket {spec.key!r} was already pushed in round {self._worker.round}: finish the round before "
                f"pushing it again"
            )
        if not spec.numel:
            return finished(None)
        if not self._handles:
            self._push_empty(weight)
        handle = self._handles[bucket] = BucketHandle(self, bucket, self._worker.timeout)
        flat = tensor_of(data)
        self._plane.note_writer(bucket, flat.device)  # a later bucket may come on another stream
        self._plane.push(bucket, flat, weight)
        return handle

    def _push_empty(self, weight: float) -> None:
        """Contribute to the buckets that no caller has to push: the plane reduces buckets in their order."""
        for bucket, spec in enumerate(self._plan.buckets):
            if not spec.numel:
                self._plane.push(bucket, torch.empty(0, dtype=getattr(torch, spec.dtype.name)), weight)

    def complete(self, bucket: int, timeout: float | None) -> None:
        """Wait until ``bucket`` is its mean."""
        if not self._missing():
            self._finish_plane(timeout)
            return
        self._plane.fall(f"{self._plan.buckets[bucket].key!r} is waited for before all gradients are pushed")
        handle = self._handles[bucket]
        handle.settle(self._plane.wait(bucket))

    def finish(self, timeout: float | None) -> None:
        """Wait until every bucket is its mean, and open the next round."""
        if missing := self._missing():
            raise OutOfStepError(
                f"round {self._worker.round} cannot be finished: these buckets were not pushed: {missing[:8]}"
            )
        if not self._is_over:
            self._finish_plane(timeout)
        handles, self._handles, self._is_over = self._handles, {}, False
        for handle in handles.values():
            handle.wait()

    def _missing(self) -> list[str]:
        specs = enumerate(self._plan.buckets)
        return [spec.key for bucket, spec in specs if spec.numel and bucket not in self._handles]

    def _finish_plane(self, timeout: float | None) -> None:
        if not self._handles:  # all are empty
            return
        self._plane.within(self._timeout if timeout is None else timeout)
        outcomes = self._plane.finish(self._measures)
        self._is_over = True
        for bucket, handle in self._handles.items():
            handle.settle(outcomes[bucket])


def tensor_of(data: Any) -> Tensor:
    """Return the elements of ``data`` where they lie."""
    if is_torch(data):
        flat: Tensor = data.detach()
        return flat
    bound = bind(data, writes=True)
    return torch.from_numpy(bound.data).view(getattr(torch, bound.dtype.name))
