"""The steps of a job with local SGD. What other jobs do after each step, it does after each exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradserver.protocol.errors import UsageError
from gradserver.worker.job.steps import Call, Steps
from gradserver.worker.job.trained import Wrapped, chosen
from gradserver.worker.local_sgd.wrapper import LocalSGD
from gradserver.worker.tree import Tree


class LocalSteps(Steps):
    """The steps of one model with local SGD, and the boundaries between its exchanges.

    Members are at the same boundary at other times, with a delay: so they speak of saves only after the last fragment.
    A save exchanges what is left, in rounds of its own, and behind each of these a worker can become a member:

        boundary                           a member                       a worker that is a member since then
        ─────────────────────────────────  ─────────────────────────────  ──────────────────────────────────────────
        behind the last fragment           asks; saves if that is due     the same
        behind another fragment            nothing                        the same
        in the midst of a save, or before  says so, does the rounds that  hears that, does them too, and compares: it
        the last exchange of it            are left, compares, and saves  writes nothing
    """

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        if self._limit is not None:
            raise UsageError(
                f"clip_grad_norm={self._limit:g} limits averaged gradients, and a LocalSGD exchanges changes of "
                f"parameters: leave it out, and clip this worker's own gradients in each step: def clip(): "
                f"torch.nn.utils.clip_grad_norm_(model.parameters(), {self._limit:g}); job.step(before=clip)"
            )
        model = self._parts[0].model
        assert isinstance(model, LocalSGD)
        self._model = model
        model.count_by_hand()
        model.on_boundary(self._at_boundary)

    def enter(self, take_over: Callable[[Tree], None]) -> None:
        """Join a group that trains already, and follow it until this worker contributes to the next exchange."""
        self._worker.enter(take_over)
        while not self._worker._session.member.is_inside:
            self._model.replay()
        self._state.enter()
        self._saving.start()

    def step(self, models: Sequence[Wrapped | str], before: Call, after: Call) -> None:
        """Step the inner optimizer, and exchange what is due."""
        (part,) = chosen(self._parts, models)
        if before is not None:
            before()
        part.update()
        if after is not None:
            after()
        part.optimizer.zero_grad()
        self._model.step()

    def _at_boundary(self) -> None:
        """Do what is due between two exchanges."""
        self._state.count_round()
        if self._worker.observes:
            self._saving.start()  # what the others save meanwhile is not due here
            return
        is_saving = self._saving.is_saving
        self._pass_boundary(1 + 2 * self._parts[0].left + self._saving.waits if is_saving else 0)
        if is_saving:
            return
        if (doing := self._newcomers.others_do()) > 0:
            rounds, waits = divmod(doing - 1, 2)
            self._saving.take_part(rounds, bool(waits))
        elif self._model.is_whole:
            self._saving.ask()
            self._saving.save_or_leave()
