"""The steps of a job where rounds do not wait for all workers: it makes each update of the log, of whichever model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gradserver.protocol.errors import UsageError
from gradserver.worker.job.steps import Call, Steps
from gradserver.worker.job.trained import Trained, Wrapped, chosen
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel


class LogSteps(Steps):
    """The steps of one model, or of several, in modes "bounded" and "async".

    A step makes all updates up to those with this worker's gradients. Each is of one model, in the order of the log.

    With several models the samples of a batch count when the loop comes for the next one. A job that goes on from a
    checkpoint repeats a batch of which some models have had the gradients, and others not.
    """

    def step(self, models: Sequence[Wrapped | str], before: Call, after: Call) -> None:
        """Make the updates that the last backwards lead to. Gradients of models that are not named are dropped."""
        named = chosen(self._parts, models)
        backward = self._parts[0].synchronous._backward
        backward.deferred.withdraw([one.synchronous._backward for one in self._parts if one not in named])
        for model in self._parts[0].synchronous.updates():
            part = self._part_of(model)
            self._saving.ask()
            if not model.skipped:
                self._update([part], before, after)
            part.clear()
            if self._position is not None and not self._are_several and not part.waits:
                self._position.count()
            self._pass_boundary()
            self._saving.save_or_leave()

    def join(self, step: Callable[..., object]) -> AbstractContextManager[None]:
        """Join as `DistributedDataParallel.join`, for all models at once."""
        return self._join(step) if self._are_several else super().join(step)

    @contextmanager
    def _join(self, step: Callable[..., object]) -> Iterator[None]:
        backwards = [part.synchronous._backward for part in self._parts]
        for one in backwards:
            one.begin_block()
        try:
            yield
            while not self._ended and backwards[0].shadow():
                (updated,) = (part for part in self._parts if part.synchronous._backward is backwards[0].deferred.due)
                step(updated.model)
        finally:
            for one in backwards:
                one.block = None

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``, until the others have come to the end of the epoch."""
        for batch in super().batches(batches):
            yield batch
            if self._position is not None and self._are_several:
                self._position.count()

    @property
    def _are_several(self) -> bool:
        return len(self._parts) > 1

    def _part_of(self, model: DistributedDataParallel) -> Trained:
        found = next((part for part in self._parts if part.model is model), None)
        if found is None:
            raise UsageError(
                f"round {self._worker.round - 1} updates a module that is not this job's: give the job all that the "
                f"loop trains"
            )
        return found
