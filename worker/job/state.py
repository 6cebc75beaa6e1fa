"""The state of a job: what is saved, sent to a learner, and loaded as one."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from gradserver.protocol.errors import GradServerError, StateError
from gradserver.protocol.version import __version__
from gradserver.worker.client import Worker
from gradserver.worker.job.checkpoint import check_job
from gradserver.worker.job.copies import Agreed, writers_of
from gradserver.worker.job.position import Position, RangesPosition, StepsPosition, chance, set_chance
from gradserver.worker.job.resuming import Source, resume
from gradserver.worker.job.trained import Stateful, Trained, check_parts, state_of, states
from gradserver.worker.torch_ddp.alike import check_weights, digest_of_all, gather
from gradserver.worker.tree import Tree

log = logging.getLogger("gradserver")

_VERSIONS: Final = {"gradserver": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
_DOES_NOT_FIT: Final = (GradServerError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""Errors of objects that cannot be loaded."""


class JobState:
    """The models, optimizers and schedulers of a job, its other objects, and its position in the data.

    Args:
        worker: the worker.
        parts: the models, each with its optimizer and scheduler.
        others: further objects with state, by name.
        position: the position in the data; None if the job does not know it.

    Attributes:
        round: number of updates of the weights since the job was first started.
        entered: value of ``round`` at which this worker joined, or has come to so far. 0 for a founder.
        done: steps since the last round of the member that sent this worker its state.
    """

    def __init__(
        self,
        worker: Worker,
        parts: Sequence[Trained],
        others: Mapping[str, Stateful],
        position: Position | RangesPosition | StepsPosition | None,
    ) -> None:
        self.round = self.entered = self.done = 0
        self._worker = worker
        self._parts = parts
        self._several = bool(parts[0].name)
        self._others = dict(others)
        self._position = position

    @property
    def replicated(self) -> list[Tensor]:
        """The weights that all members have alike."""
        return [weight for part in self._parts for weight in part.replicated]

    def count_round(self) -> None:
        """Count an update of the weights that all members have alike."""
        self.round += 1
        if self._worker.observes:
            self.enter()

    def enter(self) -> None:
        """Note that this worker has come to the present round of the others."""
        self.entered = self.round

    def agree(self, place: str, busy: bool = False, rounds: int | None = None) -> Agreed:
        """Compare weights, and learn every worker's position.

        Args:
            place: what is equal for workers that would write the same file (`gradserver.worker.job.copies`).
            busy: whether this worker still writes the last one.
            rounds: rounds in which the others still exchange what was not exchanged yet; None for all of these rounds.
        """
        for part in self._parts:
            part.settle(rounds)
        has_part = self._several and self._worker.mode != "sync"  # some models may have had gradients of a batch
        waits = has_part or any(part.waits for part in self._parts)
        mine = {
            "weights": digest_of_all(self.replicated),
            "chance": chance(),
            "position": None if self._position is None else self._position.own(waits),
            "place": place,
            "busy": busy,
        }
        told = gather(self._worker, mine)
        check_weights(self._worker, [one["weights"] for one in told], self.round)
        position = None
        if self._position is not None:
            position = self._position.of_all([one["position"] for one in told])
        writers = writers_of([one["place"] for one in told], [one["busy"] for one in told])
        tree = self._tree(told, position) if self._worker.rank in writers else None
        return Agreed(tree, writers, self._worker.epoch)

    def _tree(self, told: Sequence[Tree], position: Tree) -> Tree:
        return {
            "round": self.round,
            "model": states(self._parts, lambda part: part.model.state_dict(unwrapped=True)),
            "outer": states(self._parts, Trained.outer_state),
            "optimizer": states(self._parts, lambda part: part.optimizer.state_dict()),
            "scheduler": states(self._parts, lambda part: part.scheduler and part.scheduler.state_dict()),
            "state": {name: one.state_dict() for name, one in self._others.items()},
            "data": position,
            "chance": [one["chance"] for one in told],
            "weights": told[0]["weights"],
            "group": self._worker.group,
            "workers": list(self._worker.names),
            "versions": _VERSIONS,
        }

    def load(self, source: Source, whole: bool, exact: bool) -> Path | None:
        """Continue from the newest checkpoint of all members, as `resume` finds it. Return its path."""
        loaded = resume(self._worker, source, whole, exact)
        if loaded is None:
            return None
        try:
            self._install(loaded.tree)
        except _DOES_NOT_FIT as error:
            raise StateError(f"the checkpoint {loaded.path} does not fit this job: {error}") from error
        return loaded.path

    def for_learner(self) -> Tree:
        """Return the state that a learner needs to be like this worker."""
        position = None if self._position is None else self._position.for_who_joins()
        tree = self._tree([{"chance": None, "weights": digest_of_all(self.replicated)}], position)
        tree["unsaved"] = states(self._parts, lambda part: part.model.unsaved_buffers())
        if self._several:
            tree["gradients"] = states(self._parts, Trained.gradients)
            tree["done"] = self._worker._session.member.turns.done
        return tree

    def take_over(self, tree: Tree) -> None:
        """Take the state of another member."""
        try:
            self._install(check_job(tree, "the state that a member sent"))
            for part in self._parts:
                for name, buffer in state_of(part, tree["unsaved"]).items():
                    part.model.module.get_buffer(name).copy_(buffer)
        except _DOES_NOT_FIT as error:
            raise StateError(f"this job is not like the one that it joins: {error}") from error
        self.enter()

    def _install(self, tree: Tree) -> None:
        if (tree["data"] is None) != (self._position is None):
            raise StateError(f"it was saved {'without' if tree['data'] is None else 'with'} data=")
        check_parts(self._parts, tree)
        if tree["state"].keys() != self._others.keys():
            raise StateError(f"it has state= {sorted(tree['state'])}, and this job {sorted(self._others)}")
        if self._position is not None:
            (self._position.join if self._worker.joins else self._position.resume)(tree["data"])
        for part in self._parts:
            part.load(state_of(part, tree["model"]), state_of(part, tree["outer"]) if "outer" in tree else None)
        if digest_of_all(self.replicated) != tree["weights"]:
            raise StateError("its weights change when they are loaded: this model's have another type or order")
        for part in self._parts:
            part.optimizer.load_state_dict(state_of(part, tree["optimizer"]))
            if part.scheduler is not None:
                part.scheduler.load_state_dict(state_of(part, tree["scheduler"]))
            if "gradients" in tree:
                part.set_gradients(state_of(part, tree["gradients"]))
        self.done = tree.get("done", 0)
        for name, one in self._others.items():
            one.load_state_dict(tree["state"][name])
        if not self._worker.joins and len(tree["chance"]) == self._worker.world_size:
            set_chance(tree["chance"][self._worker.rank])
        if tree["versions"] != _VERSIONS:
            log.warning("this state was made with %s, and here is %s", tree["versions"], _VERSIONS)
        self.round = tree["round"]
