"""The steps of a job: what is common to all kinds, and the steps of one model that exchanges gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from gradserver.worker.client import Worker
from gradserver.worker.job.position import Position, RangesPosition, StepsPosition
from gradserver.worker.job.saving import Saving
from gradserver.worker.job.state import JobState
from gradserver.worker.job.trained import Trained, Wrapped, chosen
from gradserver.worker.torch_ddp.alike import Newcomers
from gradserver.worker.tree import Tree

Call: TypeAlias = Callable[[], object] | None
"""A function of the script that is called before or after an update; None for none."""


class Steps(ABC):
    """The steps of a job, the boundaries between them, and the loop around them.

    Args:
        worker: the worker.
        parts: the models.
        state: the job's state.
        saving: the job's saves.
        position: the position in the data; None if the job does not know it.
        limit: limit of the norm of averaged gradients; None for none.
    """

    def __init__(
        self,
        worker: Worker,
        parts: Sequence[Trained],
        state: JobState,
        saving: Saving,
        position: Position | RangesPosition | StepsPosition | None,
        limit: float | None,
    ) -> None:
        self._worker = worker
        self._parts = parts
        self._state = state
        self._saving = saving
        self._position = position
        self._limit = limit
        self._newcomers = Newcomers(worker)

    @property
    def can_be_joined(self) -> bool:
        """True if workers can join this job."""
        return True

    def enter(self, take_over: Callable[[Tree], None]) -> None:
        """Join a group that trains already: ``take_over`` gets a member's state.

        The others wait for a worker that gets samples from the coordinator, so that these count.
        """
        self._worker.enter(take_over, waits=isinstance(self._position, RangesPosition))

    @abstractmethod
    def step(self, models: Sequence[Wrapped | str], before: Call, after: Call) -> None:
        """Do what `gradserver.Job.step` does."""

    def join(self, step: Callable[..., object]) -> AbstractContextManager[None]:
        """Join as `DistributedDataParallel.join`, for all models at once."""
        return self._parts[0].join(step)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``, until the others have come to the end of the epoch."""
        while not self._ended:  # first: a batch that is taken counts as used
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    @property
    def _ended(self) -> bool:
        """True if the others have come to the end of the epoch."""
        return any(part.model.ended for part in self._parts)

    def _update(self, updated: Sequence[Trained], before: Call, after: Call) -> None:
        """Update these models by their averaged gradients."""
        for part in updated:
            part.clip(self._limit)
        if before is not None:
            before()
        for part in updated:
            part.update()
        self._state.count_round()
        if after is not None:
            after()

    def _pass_boundary(self, doing: int = 0) -> None:
        """Do what all members do between two rounds. New members hear what the others are ``doing`` there."""
        self._worker.boundary()
        self._newcomers.check(self._state.replicated, self._state.round, doing)


class GradientSteps(Steps):
    """The steps of one model that exchanges gradients, where each round waits for all workers."""

    def step(self, models: Sequence[Wrapped | str], before: Call, after: Call) -> None:
        """Update the model, if the last backward has exchanged gradients."""
        (part,) = chosen(self._parts, models)
        if not part.synchronous.exchanged:
            return  # its cadence, or `no_sync`, has accumulated the gradients
        if not part.synchronous.has_update:  # it was late, and no other had a batch: these step, and ask, no more
            part.clear()
            self._catch_up(before, after)
            self._worker.boundary()
            return
        self._end_round(before, after)
        self._catch_up(before, after)

    def _end_round(self, before: Call, after: Call) -> None:
        """Update the model by the gradients of a round, and do what all members do behind it."""
        self._saving.ask()
        self._apply(before, after)
        if self._position is not None:
            self._position.count()
        self._pass_boundary()
        self._saving.save_or_leave()

    def _catch_up(self, before: Call, after: Call) -> None:
        """Repeat what the others have done since this worker got its state.

        Behind one of these rounds it may be a member: the first in which it counts can be over without it.
        """
        while self._worker.has_next:
            if self._parts[0].synchronous.replay():
                self._end_round(before, after)

    def _apply(self, before: Call, after: Call) -> None:
        """Update the model by the gradients of a round, unless no worker applies it."""
        (part,) = self._parts
        if not part.synchronous.skipped:
            self._update(self._parts, before, after)
        part.clear()
