"""The steps of a job with local SGD. What other jobs do after each step, it does after each exchange."""

from __future__ import annotations

from collections.abc import Callable

from gradserver.worker.client import Worker
from gradserver.worker.job.saving import Saving
from gradserver.worker.job.state import JobState
from gradserver.worker.job.trained import Trained
from gradserver.worker.local_sgd.wrapper import LocalSGD
from gradserver.worker.torch_ddp.alike import Newcomers


class LocalSteps:
    """The steps of the model of a job, and the boundaries between its exchanges.

    Members are at the same boundary at other times, with a delay: so they speak of saves only after the last fragment.

    Args:
        worker: the worker.
        part: the model.
        model: the same, as it is wrapped.
        state: the job's state.
        saving: the job's saves.
        newcomers: the comparison of new members.
    """

    def __init__(
        self,
        worker: Worker,
        part: Trained,
        model: LocalSGD,
        state: JobState,
        saving: Saving,
        newcomers: Newcomers,
    ) -> None:
        self._worker = worker
        self._part = part
        self._model = model
        self._state = state
        self._saving = saving
        self._newcomers = newcomers
        self._looked_at = state.round
        """The round in which the job last checked whether something is to be saved."""
        self._saves = False
        model.count_by_hand()
        model.on_boundary(self._at_boundary)

    def step(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        """Step the inner optimizer, and exchange what is due."""
        if before is not None:
            before()
        self._part.update()
        if after is not None:
            after()
        self._part.optimizer.zero_grad()
        self._model.step()

    def catch_up(self) -> None:
        """Follow the others without data, until this worker contributes to the next exchange."""
        while not self._worker._session.member.is_inside:
            self._model.replay()
        self._looked_at = self._state.round

    def _at_boundary(self) -> None:
        """Do what is due between two exchanges."""
        self._state.count_round()
        if self._worker.observes:
            return
        self._worker.boundary()
        self._newcomers.check(self._state.replicated, self._state.round)
        if self._saves or not self._model.is_whole:
            return
        self._saving.ask()
        if not self._saving.takes_part:
            return
        self._saves = True  # a save exchanges what is left, and comes here again
        try:
            self._saving.save_or_leave(self._looked_at)
        finally:
            self._saves = False
        self._looked_at = self._state.round


def local_steps_of(
    part: Trained, worker: Worker, state: JobState, saving: Saving, newcomers: Newcomers
) -> LocalSteps | None:
    """Return the steps of a job with local SGD; None for one that exchanges gradients."""
    if not isinstance(part.model, LocalSGD):
        return None
    return LocalSteps(worker, part, part.model, state, saving, newcomers)
