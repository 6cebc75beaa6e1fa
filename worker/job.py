"""A training job: everything that has state, saved and loaded as one."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from gradserver.protocol.errors import GradServerError, InvalidArgumentError, StateError, UsageError, WorkerLeftError
from gradserver.protocol.messages import Opened
from gradserver.protocol.version import __version__
from gradserver.worker.alike import Newcomers, check_same_start, check_weights, digest_of, gather
from gradserver.worker.checkpoint import Directory, Writing, read, write
from gradserver.worker.ddp import DistributedDataParallel
from gradserver.worker.handle import Handle
from gradserver.worker.position import Position, RangesPosition, chance, set_chance
from gradserver.worker.ranges import DataRanges
from gradserver.worker.sampler import ShardSampler
from gradserver.worker.stopping import stop_on_sigterm
from gradserver.worker.trained import (
    Scheduler,
    Stateful,
    Trained,
    bits,
    check_parts,
    check_updated,
    chosen,
    of_bits,
    state_of,
    states,
    together,
    trained,
)
from gradserver.worker.tree import Tree, pack

log = logging.getLogger("gradserver")

_LOOK_SECONDS: Final = 1.0
"""Seconds between two messages to waiting members that a checkpoint is still being written."""
_VERSIONS: Final = {"gradserver": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


class Told(NamedTuple):
    """The models that the others update, and those with gradients that they drop."""

    updated: list[Trained]
    dropped: list[Trained]


class Job:
    """A training job: the model, the optimizer and all other state, which is saved and loaded as one.

    For example:

        data = gradserver.ShardSampler.for_worker(dataset, worker, seed=17)
        loader = DataLoader(dataset, batch_size=32, sampler=data)
        job = gradserver.Job(model, optimizer, scheduler, data=data, checkpoint="runs/7", every=500)
        for inputs, targets in job.batches(loader, epochs=10):
            loss(model(inputs), targets).backward()
            job.step()

    Started again, the same script continues from the last checkpoint in ``runs/7``. With as many workers as before, it
    ends with the bits of a run without a stop. This needs a lossless wire, and nothing else left to chance, such as the
    seeds of a loader's processes. With another number of workers, every remaining sample of the epoch is still used. It
    is used once if the sampler has ``uneven="keep"``, which `batches` supports.

    A checkpoint has the model's parameters and buffers (rank 0's), the optimizer, the scheduler, the objects in
    ``state``, and the round. It also has the position of every worker in the epoch, and each worker's generators of
    random numbers: torch's, Python's and numpy's. The generators are restored if the number of workers is the same.

    All workers save at the same boundary between two rounds, after they have compared their weights. Rank 0 writes from
    a copy, in a thread, while training continues. If that fails, for want of room on the disk for example, the log has
    a warning, and the next save is the next try. A save that is due while the thread still writes is omitted.

    Spot machines and batch systems send SIGTERM before they end a process. After SIGTERM all workers save when the
    round is over. Then the worker that received the signal leaves, and its process ends with status 0. The others
    continue if the group can do without it. Otherwise they get a WorkerLeftError, which names the worker and the
    checkpoint. A script that handles SIGTERM itself can call `stop`.

    Args:
        model: the wrapped module. Or several that share a worker, such as a generator and its discriminator: a list, or
            a mapping by name.
        optimizer: its optimizer, made before the job. For several models a list or mapping of optimizers.
        scheduler: one of torch's learning-rate schedulers, or a similar object. It is stepped after each update. A
            scheduler with an argument for ``step`` belongs into ``state``, and the loop steps it.
        data: source of `batches`.
        state: other objects with state, by name. They have ``state_dict`` and ``load_state_dict``. The state of rank 0
            is saved, so a worker's own state does not belong there.
        checkpoint: directory of the checkpoints. If it has some, the job continues from the one written last. It should
            be the same for all workers, and must hold the same checkpoints for all that start.
        every: number of rounds between two saves. None: save only on SIGTERM and when `save` is called.
        keep: number of checkpoints to keep in the directory.

    Attributes:
        model: the model, as given. Of several, the one that was wrapped first.
        optimizer: the optimizer of ``model``.
        scheduler: the scheduler of ``model``.
        models: all models, by name (or place in the list).
        round: number of updates of the weights since the job was first started.
        entered: value of ``round`` at which this worker joined, or has come to so far. 0 if it was there from the
            start.
        resumed: the checkpoint that the job continued from. None for a new job.

    Raises:
        StateError: a checkpoint cannot be read, or belongs to another job. The error names the file.
        DisagreementError: the workers found different checkpoints.
    """

    def __init__(
        self,
        model: DistributedDataParallel | Sequence[DistributedDataParallel] | Mapping[str, DistributedDataParallel],
        optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
        scheduler: Scheduler | Sequence[Scheduler | None] | Mapping[str, Scheduler | None] | None = None,
        *,
        data: ShardSampler | DataRanges | None = None,
        state: Mapping[str, Stateful] | None = None,
        checkpoint: str | Path | None = None,
        every: int | None = None,
        keep: int = 2,
    ) -> None:
        _check(data, checkpoint, every)
        self._parts = trained(model, optimizer, scheduler)
        first = self._parts[0]
        self.model, self.optimizer, self.scheduler = first.model, first.optimizer, first.scheduler
        self.models = {part.name: part.model for part in self._parts}
        self.round = self.entered = 0
        self.resumed: Path | None = None
        self._worker = self._parts[0].model.worker
        self._several = bool(self._parts[0].name)
        self._entering = self._worker.joins and self._several
        """True if the worker has joined, and is not at the top of its loop while the others are."""
        self._state = dict(state or {})
        self._position = None if data is None else _position_of(data, self._place_of(data))
        self._directory = None if checkpoint is None else Directory(Path(checkpoint), keep)
        self._every = every
        self._writing: Writing | None = None
        self._stopping = False
        self._plain_steps = False
        self._done = 0
        """Steps since the last round of the member that sent this worker its state."""
        self._looked_at = 0
        """The round in which the job last checked whether something is to be saved."""
        self._told: Told | None = None
        """The models that the others update, in a round for which this worker has no data."""
        self._newcomers = Newcomers(self._worker)
        if self._worker.joins:
            # The others wait for a worker that gets samples from the coordinator, so that these count.
            self._check_can_enter()
            self._worker.enter(self._take_over, waits=isinstance(data, DataRanges) or self._several)
            self._worker._session.turns.go_on_from(self._done)
        elif self._directory is not None:
            self._load(self._directory.latest)
        if self._directory is not None:
            stop_on_sigterm(self)
        if not self._several or data is not None:
            self._worker.serve_state(self._for_who_joins)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def step(
        self,
        *models: DistributedDataParallel | str,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Update the weights by the averaged gradients, and save if that is due. Call it after each exchange.

        The order is: ``before()``, for example clipping; the step of the optimizer and the scheduler; ``after()``, for
        example a moving average; then the gradients are cleared.

        In a group that skips rounds with gradients that are not finite, such a round updates nothing.

        Of several models, those that are named or given are updated. Without any, all are updated. Gradients that
        another model got in the same backward are dropped, such as a discriminator's in the generator's step.

        Raises:
            DivergedError: the workers' weights differ. They are compared before each save. A worker that joined is
                compared after its first round.
            WorkerLeftError: another worker was told to stop. All is saved.
            SystemExit: this worker was told to stop, and has left. All is saved.
            StateError: a worker was told to stop, and the state could not be saved.
        """
        self._check_step(before, after)
        updated, before_it = chosen(self._parts, models), self.round
        dropped = self._told.dropped if self._told is not None else together(self._parts, updated)
        if self._several:
            check_updated(updated)
            if self._told is None:
                self._worker._session.turns.steps(bits(self._parts, updated), bits(self._parts, dropped))
            self._told = None
        saves_later = self._several and self._position is not None
        stopping = None if saves_later else self._ask_who_stops()
        if any(part.model.has_update for part in updated) and not any(part.model.skipped for part in updated):
            self._update(updated, before, after)
        for part in (*updated, *dropped):
            part.clear()
            part.dropped = part in dropped
        if not self._several:
            self._catch_up(before, after)
        self._worker.boundary()
        self._newcomers.check(self._modules, self.round)
        if stopping is not None:
            self._save_or_part(stopping, before_it)

    def _save_if_due(self) -> None:
        """Save at the top of the loop of several models. In between some are updated and others not."""
        before, self._looked_at = self._looked_at, self.round
        stopping = self._ask_who_stops()
        if stopping is not None:
            self._save_or_part(stopping, before)

    def _save_or_part(self, stopping: Handle, before: int) -> None:
        leaving = np.flatnonzero(stopping.wait()).tolist()
        if leaving:
            self._save_and_part(leaving)
        elif self._every is not None and self.round // self._every > before // self._every:
            self._save_beside()

    def _update(
        self, updated: Sequence[Trained], before: Callable[[], object] | None, after: Callable[[], object] | None
    ) -> None:
        if before is not None:
            before()
        for part in updated:
            part.update()
        self.round += 1
        if after is not None:
            after()

    def _catch_up(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        """Repeat what the others have done since this worker got its state."""
        while self._worker.has_next:
            (part,) = self._parts
            if part.model.replay():
                if not part.model.skipped:
                    self._update(self._parts, before, after)
                part.clear()
        if self._worker.observes:
            self.entered = self.round

    def batches(
        self,
        loader: DataLoader[Any] | Dataset[Any],
        epochs: int = 1,
        step: Callable[..., object] | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Yield the batches of ``loader`` in each epoch, from the job's position to the end of the last epoch.

        Workers may have different numbers of batches. A worker without a batch takes part in the others' rounds, as in
        `DistributedDataParallel.join`, until all have reached the end of the epoch.

        Args:
            loader: a data set, or a DataLoader. The ``sampler`` of the DataLoader is the job's ``data``. With
                DataRanges, its ``batch_sampler`` is.
            epochs: number of epochs of the whole training, including those before a restart.
            step: function that the loop calls after each backward, if that is more than ``job.step()``. It calls
                ``job.step(before=…, after=…)``. Workers without batches call it too. With several models it gets those
                that the others update: ``job.step(*models, before=…)``.
            **options: options of the loader for a data set: ``num_workers`` and so on.
        """
        if self._position is None:
            raise UsageError("job.batches needs to know the sampler: Job(…, data=sampler)")
        if not isinstance(loader, DataLoader):
            loader = self._position.loader(loader, options)
        elif options:
            raise UsageError(f"{', '.join(options)}: give these to the DataLoader itself")
        self._plain_steps = step is None
        for _ in self._position.epochs(epochs):
            with self._join(self.step if step is None else step):
                self._position.running = True
                for batch in self._from_the_top(self._position.batches(loader)):
                    if self._ended:
                        break
                    yield batch
            self._position.running = False

    @property
    def _ended(self) -> bool:
        """True if the others have come to the end of the epoch."""
        return any(part.model.ended for part in self._parts)

    @contextmanager
    def _join(self, step: Callable[..., object]) -> Iterator[None]:
        """Join as `DistributedDataParallel.join`, for all models at once."""
        if not self._several:
            with self._parts[0].model.join(step):
                yield
            return
        for part in self._parts:
            part.model._backward.ended = max(part.model._backward.ended - 1, 0)
        if self._entering:
            assert self._position is not None
            self._position.running = True
            self._follow(step, to_the_top=True)
        yield
        if not self._ended:
            self._follow(step)
        self._save_if_due()

    def _from_the_top(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``. Before each the others hear of it, as they may have none, and the job can be saved."""
        while True:
            if self._several and not self._ended:
                if not self._entering:
                    self._worker._session.turns.steps(0, 0)
                self._entering = False
                self._save_if_due()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _follow(self, step: Callable[..., object], to_the_top: bool = False) -> None:
        """Repeat the others' updates without data, until the top of their loop or the end of the epoch."""
        while True:
            news = self._worker._session.turns.follow()
            if news.updated:
                self._told = Told(of_bits(self._parts, news.updated), of_bits(self._parts, news.dropped))
                step(*(part.model for part in self._told.updated))
            elif news.top:
                if to_the_top:
                    return
                self._save_if_due()
            elif not self._part_of(news).model.replay():
                for part in self._parts:
                    part.clear()
                return

    def _part_of(self, news: Opened) -> Trained:
        found = next((part for part in self._parts if part.number == news.section), None)
        if news.ended:
            return self._parts[0]
        if found is None:
            raise UsageError(
                f"round {news.round} is of a module that is not this job's: give the job all that the loop trains"
            )
        return found

    def stop(self) -> None:
        """Save when this round is over, and leave, as on SIGTERM. It returns at once. Any thread may call it."""
        if self._directory is None:
            raise UsageError("this job has no directory to save in: Job(…, checkpoint=DIRECTORY)")
        self._stopping = True

    # ── saving ────────────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | Path | None = None) -> None:
        """Save now, and return when it is written. All workers call it between the same two rounds.

        Args:
            path: the file to write. None for the next one in the job's directory.

        Raises:
            StateError: the file could not be written. Every worker gets this error, which names the file. The job can
                continue.
            DivergedError: the workers' weights differ. Nothing was written.
        """
        if path is None and self._directory is None:
            raise UsageError("where to? Give save(path), or Job(…, checkpoint=DIRECTORY)")
        tree = self._agree_on_state()
        self._await(None if tree is None else Writing(partial(self._write, tree, path)))

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint: a file, or the last one of a directory. All workers call it.

        Raises:
            StateError: some worker cannot read it, or it does not fit this job.
            DisagreementError: the workers' checkpoints differ.
        """
        path = Path(path)
        if not path.is_dir():
            self._load(lambda: path)
        elif not self._load(Directory(path, keep=1).latest):
            raise StateError(f"there is no checkpoint in {path}")

    def _write(self, tree: Tree, path: str | Path | None) -> None:
        if self._writing is not None:
            self._writing.join()
        if path is not None:
            write(Path(path), pack(tree))
        elif self._directory is not None:
            self._directory.write(self.round, pack(tree))

    def _save_beside(self) -> None:
        tree = self._agree_on_state()
        if tree is None:
            return
        assert self._directory is not None
        if self._writing is not None and self._writing.is_alive():
            log.warning("round %d is not saved: the last checkpoint is still being written", self.round)
            return
        self._writing = Writing(partial(self._directory.write, self.round, pack(tree, copy=True)), warns=True)

    def _save_and_part(self, leaving: list[int]) -> None:
        """Save for the workers that were told to stop. Return if this worker can go on without them."""
        assert self._directory is not None
        leaves, names = self._worker.rank in leaving, [self._worker.names[rank] for rank in leaving]
        self.save()
        who = ", ".join(map(repr, names))
        said = f"{who} was told to stop, and left after round {self.round}, which is saved in {self._directory.path}"
        if leaves:
            log.info("%s", said)
            self._worker.close(f"it was told to stop; round {self.round} is saved")
            raise SystemExit(0)
        if self._worker._session.membership.needs_all:
            raise WorkerLeftError(
                f"{said}. This group needs all of its workers: start again from there", worker=names[0], rank=leaving[0]
            )
        log.warning("%s; the others go on", said)

    def _agree_on_state(self) -> Tree | None:
        """Compare weights, and learn every worker's position. Return the tree to save, at the writing worker only."""
        mine = {
            "weights": digest_of(*self._modules),
            "chance": chance(),
            "position": None if self._position is None else self._position.own(),
        }
        told = gather(self._worker, mine)
        check_weights(self._worker, [one["weights"] for one in told], self.round)
        position = None
        if self._position is not None:
            position = self._position.of_all([one["position"] for one in told])
        return self._tree(told, position) if self._worker.rank == 0 else None

    def _tree(self, told: Sequence[Tree], position: Tree) -> Tree:
        return {
            "round": self.round,
            "model": states(self._parts, lambda part: part.model.state_dict(unwrapped=True)),
            "optimizer": states(self._parts, lambda part: part.optimizer.state_dict()),
            "scheduler": states(self._parts, lambda part: part.scheduler and part.scheduler.state_dict()),
            "state": {name: one.state_dict() for name, one in self._state.items()},
            "data": position,
            "chance": [one["chance"] for one in told],
            "weights": told[0]["weights"],
            "group": self._worker.group,
            "workers": list(self._worker.names),
            "versions": _VERSIONS,
        }

    def _await(self, writing: Writing | None) -> None:
        """Wait for the worker that writes. It says each second that it still does, so that no wait runs out."""
        pause = min(_LOOK_SECONDS, self._worker.timeout / 4)
        outcome: Tree = ""
        while outcome == "":
            mine = None if writing is None else writing.outcome(pause)
            outcome = next((one for one in gather(self._worker, mine) if one is not None), "its writer was lost")
        if outcome != "written":
            raise StateError(str(outcome))

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────

    def _load(self, find: Callable[[], Path | None]) -> bool:
        """Continue from the checkpoint that ``find`` finds, if all have the same. Return whether there is one."""
        loaded, failure = None, ""
        try:
            path = find()
            loaded = None if path is None else read(path)
            if loaded is not None:
                _of_a_job(loaded.tree, str(loaded.path))
        except StateError as error:
            failure = error.message
        mine = {"error": failure, "path": "", "round": 0, "digest": b""}
        if loaded is not None:
            mine |= {"path": str(loaded.path), "round": loaded.tree["round"], "digest": loaded.digest}
        check_same_start(self._worker, gather(self._worker, mine))
        if loaded is None:
            return False
        try:
            self._install(loaded.tree)
        except _DOES_NOT_FIT as error:
            raise StateError(f"the checkpoint {loaded.path} does not fit this job: {error}") from error
        self.resumed = loaded.path
        log.info("the job goes on from round %d (%s)", self.round, loaded.path)
        return True

    def _for_who_joins(self) -> Tree:
        """Return the state that a learner needs to be like this worker."""
        position = None if self._position is None else self._position.for_who_joins()
        tree = self._tree([{"chance": None, "weights": digest_of(*self._modules)}], position)
        tree["unsaved"] = states(self._parts, lambda part: part.model.unsaved_buffers())
        if self._several:
            tree["gradients"] = states(self._parts, Trained.gradients)
            tree["done"] = self._worker._session.turns.done
        return tree

    def _take_over(self, tree: Tree) -> None:
        """Take the state of another member."""
        try:
            self._install(_of_a_job(tree, "the state that a member sent"))
            for part in self._parts:
                for name, buffer in state_of(part, tree["unsaved"]).items():
                    part.model.module.get_buffer(name).copy_(buffer)
        except _DOES_NOT_FIT as error:
            raise StateError(f"this job is not like the one that it joins: {error}") from error
        self.entered = self.round
        log.info("the job joined the others after round %d", self.round)

    def _install(self, tree: Tree) -> None:
        if (tree["data"] is None) != (self._position is None):
            raise StateError(f"it was saved {'without' if tree['data'] is None else 'with'} data=")
        check_parts(self._parts, tree)
        if tree["state"].keys() != self._state.keys():
            raise StateError(f"it has state= {sorted(tree['state'])}, and this job {sorted(self._state)}")
        if self._position is not None:
            (self._position.join if self._worker.joins else self._position.resume)(tree["data"])
        for part in self._parts:
            part.model.module.load_state_dict(state_of(part, tree["model"]))
        if digest_of(*self._modules) != tree["weights"]:
            raise StateError("its weights are others when they are loaded: this model's are of another type, or order")
        for part in self._parts:
            part.optimizer.load_state_dict(state_of(part, tree["optimizer"]))
            if part.scheduler is not None:
                part.scheduler.load_state_dict(state_of(part, tree["scheduler"]))
            if "gradients" in tree:
                part.set_gradients(state_of(part, tree["gradients"]))
        self._done = tree.get("done", 0)
        for name, one in self._state.items():
            one.load_state_dict(tree["state"][name])
        if not self._worker.joins and len(tree["chance"]) == self._worker.world_size:
            set_chance(tree["chance"][self._worker.rank])
        if tree["versions"] != _VERSIONS:
            log.warning("this state was made with %s, and here is %s", tree["versions"], _VERSIONS)
        self.round = self._looked_at = tree["round"]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def _modules(self) -> list[nn.Module]:
        return [part.model.module for part in self._parts]

    def _check_can_enter(self) -> None:
        if self._several and self._position is None:
            raise UsageError(
                "a job of several models joins others at the top of their loop, which is known with job.batches only: "
                "give data=, here and at the others"
            )

    def _place_of(self, data: ShardSampler | DataRanges) -> Callable[[], tuple[int, int]] | None:
        """Return the source of rank and world size, for a sampler of the worker's own rank; None if they stay."""
        worker = self._worker
        if isinstance(data, DataRanges):
            return None
        own = (data.rank, data.world_size) == (worker.rank, worker.world_size)
        return (lambda: (worker.rank, worker.world_size)) if own and not worker._session.membership.needs_all else None

    def _check_step(self, before: object, after: object) -> None:
        if self._position is None:
            return
        if not self._position.running:
            raise UsageError(
                "this job has data=, and would not know how much of it is used: loop over job.batches(loader)"
            )
        if self._plain_steps and (before is not None or after is not None):
            raise UsageError(
                "workers that run out of batches must do the same after each round: put job.step(before=…, after=…) "
                "into a function, and give it to job.batches(loader, step=…) too"
            )

    def _ask_who_stops(self) -> Handle | None:
        """Tell the others whether this worker is to stop. It costs little, as it travels while the optimizer steps."""
        if self._directory is None or self._worker.observes:
            return None
        stopping = np.zeros(self._worker.world_size, np.uint8)
        stopping[self._worker.rank] = self._stopping
        return self._worker.all_reduce(stopping, op="max", async_op=True)


_DOES_NOT_FIT: Final = (GradServerError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""Errors of objects that cannot be loaded."""


def _of_a_job(tree: Tree, what: str) -> Tree:
    """Return ``tree`` if it has the parts that `Job.save` writes."""
    parts = ("round", "model", "optimizer", "scheduler", "state", "data", "chance", "weights", "versions")
    if type(tree) is not dict or any(part not in tree for part in parts):
        raise StateError(f"{what} is not the checkpoint of a job")
    return tree


def _position_of(
    data: ShardSampler | DataRanges, place: Callable[[], tuple[int, int]] | None
) -> Position | RangesPosition:
    return RangesPosition(data) if isinstance(data, DataRanges) else Position(data, place)


def _check(data: object, checkpoint: object, every: object) -> None:
    if data is not None and not isinstance(data, ShardSampler | DataRanges):
        raise InvalidArgumentError(
            f"data is a {type(data).__name__}, and must be a gradserver.ShardSampler or DataRanges: what has a "
            f"state_dict can go "
            f"into state="
        )
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InvalidArgumentError(f"every is {every!r}, and must be a number of rounds, at least 1")
    if every is not None and checkpoint is None:
        raise UsageError("every= says when to save, and not where: Job(…, checkpoint=DIRECTORY)")
