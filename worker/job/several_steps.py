"""The steps of a job of several models. Workers hear of each other's steps, as each updates some of the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gradserver.protocol.errors import UsageError
from gradserver.worker.job.steps import Call, Steps
from gradserver.worker.job.trained import Trained, Wrapped, bits, check_updated, chosen, of_bits, part_of, together
from gradserver.worker.tree import Tree


class SeveralSteps(Steps):
    """The steps of several models.

    A step updates some of the models, and a worker without a batch repeats that. So members say in each step which ones
    are updated, and where the top of their loop is. There the job is saved, and others join.
    """

    _dropped: list[Trained] | None = None
    """Models with gradients that the others drop, in a round for which this worker has no data."""
    _is_entering = False
    """True if the worker has joined, and is not at the top of its loop while the others are."""

    @property
    def can_be_joined(self) -> bool:
        """True if the top of the loop is known."""
        return self._position is not None

    def enter(self, take_over: Callable[[Tree], None]) -> None:
        """Join a group that trains already. The others wait at the top of their loop."""
        if self._position is None:
            raise UsageError(
                "a job of several models joins others at the top of their loop, which is known with job.batches "
                "only: give data=, here and at the others"
            )
        self._is_entering = True
        self._worker.enter(take_over, waits=True)
        self._worker._session.member.turns.go_on_from(self._state.done)

    def step(self, models: Sequence[Wrapped | str], before: Call, after: Call) -> None:
        """Update the models that are named. Drop the gradients that others got in the same backward."""
        updated = chosen(self._parts, models)
        dropped = together(self._parts, updated) if self._dropped is None else self._dropped
        check_updated(updated)
        if self._dropped is None:
            self._worker._session.steps(bits(self._parts, updated), bits(self._parts, dropped))
        self._dropped = None
        saves_here = self._position is None
        if saves_here:
            self._saving.ask()
        found = [part.synchronous for part in updated]
        if any(one.has_update for one in found) and not any(one.skipped for one in found):
            self._update(updated, before, after)
        for part in (*updated, *dropped):
            part.clear()
            part.dropped = part in dropped
        if self._position is not None:
            self._position.count()
        self._pass_boundary()
        if saves_here:
            self._saving.save_or_leave()

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``, until the others have come to the end of the epoch."""
        return super().batches(self._from_the_top(batches))

    def _from_the_top(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``. Before each the others hear of it, as they may have none, and the job can be saved."""
        while True:
            if not self._ended:
                if not self._is_entering:
                    self._worker._session.steps(0, 0)
                self._is_entering = False
                self._save_if_due()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    @contextmanager
    def join(self, step: Callable[..., object]) -> Iterator[None]:
        """Join for all models at once: a worker without batches repeats what the others do."""
        for part in self._parts:
            part.begin_block()
        if self._is_entering:
            assert self._position is not None
            self._position.running = True
            self._follow(step, to_the_top=True)
        yield
        if not self._ended:
            self._follow(step)
        self._save_if_due()

    def _follow(self, step: Callable[..., object], to_the_top: bool = False) -> None:
        """Repeat the others' updates without data, until the top of their loop or the end of the epoch."""
        while True:
            news = self._worker._session.follow()
            if news.updated:
                self._dropped = of_bits(self._parts, news.dropped)
                step(*(part.model for part in of_bits(self._parts, news.updated)))
            elif news.top:
                if to_the_top:
                    return
                self._save_if_due()
            elif not part_of(self._parts, news).synchronous.replay():
                for part in self._parts:
                    part.clear()
                return

    def _save_if_due(self) -> None:
        """Save at the top of the loop. In between some models are updated and others not."""
        self._saving.ask()
        self._saving.save_or_leave()
