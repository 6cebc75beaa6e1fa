"""A training job: everything that has state, saved and loaded as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from gradserver.protocol.errors import StateError, UsageError
from gradserver.worker.data.balanced import BalancedSampler
from gradserver.worker.data.ranges import DataRanges
from gradserver.worker.data.sampler import ShardSampler
from gradserver.worker.job.checkpoint import Directory
from gradserver.worker.job.local_steps import local_steps_of
from gradserver.worker.job.position import check_data, position_of
from gradserver.worker.job.saving import Saving, check_every
from gradserver.worker.job.state import JobState
from gradserver.worker.job.stopping import stop_on_sigterm
from gradserver.worker.job.trained import (
    Scheduler,
    Stateful,
    Trained,
    Wrapped,
    bits,
    check_clips,
    check_updated,
    chosen,
    of_bits,
    part_of,
    together,
    trained,
)
from gradserver.worker.norms import check_limit
from gradserver.worker.torch_ddp.alike import Newcomers
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from gradserver.worker.tree import Tree

log = logging.getLogger("gradserver")


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
        model: the wrapped module, by `DistributedDataParallel` or `LocalSGD`. Or several of the former that share a
            worker, such as a generator and its discriminator: a list, or a mapping by name.
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
        clip_grad_norm: limit of the norm of each model's averaged gradients, to which `step` clips them; None: none. A
            `LocalSGD` has no averaged gradients: ``before`` of `step` can clip the worker's own.

    Attributes:
        model: the model, as given. Of several, the one that was wrapped first.
        optimizer: the optimizer of ``model``.
        scheduler: the scheduler of ``model``.
        models: all models, by name (or place in the list).
        entered: value of ``round`` at which this worker joined, or has come to so far. 0 for a founder.
        resumed: the checkpoint that the job continued from. None for a new job.

    Raises:
        StateError: a checkpoint cannot be read, or belongs to another job. The error names the file.
        DisagreementError: the workers found different checkpoints.
        UsageError: the options exclude each other, such as ``clip_grad_norm`` and a `LocalSGD`.
    """

    def __init__(
        self,
        model: Wrapped | Sequence[DistributedDataParallel] | Mapping[str, DistributedDataParallel],
        optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
        scheduler: Scheduler | Sequence[Scheduler | None] | Mapping[str, Scheduler | None] | None = None,
        *,
        data: ShardSampler | DataRanges | BalancedSampler | None = None,
        state: Mapping[str, Stateful] | None = None,
        checkpoint: str | Path | None = None,
        every: int | None = None,
        keep: int = 2,
        clip_grad_norm: float | None = None,
    ) -> None:
        check_every(every, checkpoint)
        if data is not None:
            check_data(data)
        self._parts = trained(model, optimizer, scheduler)
        first = self._parts[0]
        self.model, self.optimizer, self.scheduler = first.model, first.optimizer, first.scheduler
        self.models: dict[str, Any] = {part.name: part.model for part in self._parts}
        self.entered = 0
        self.resumed: Path | None = None
        self._worker, self._several = first.model.worker, bool(first.name)
        self._entering = self._worker.joins and self._several
        """True if the worker has joined, and is not at the top of its loop while the others are."""
        self._position = None if data is None else position_of(data, self._worker)
        self._state = JobState(self._worker, self._parts, state or {}, self._position)
        directory = None if checkpoint is None else Directory(Path(checkpoint), keep)
        self._saving = Saving(self._worker, self._state, directory, every)
        self._plain_steps = False
        self._clip = check_limit(clip_grad_norm, "clip_grad_norm")
        check_clips(first, self._clip)
        self._looked_at = 0
        """The round in which the job last checked whether something is to be saved."""
        self._dropped: list[Trained] | None = None
        """Models with gradients that the others drop, in a round for which this worker has no data."""
        self._newcomers = Newcomers(self._worker)
        self._local = local_steps_of(first, self._worker, self._state, self._saving, self._newcomers)
        if self._worker.joins:
            # The others wait for a worker that gets samples from the coordinator, so that these count.
            if self._several and data is None:
                raise UsageError(
                    "a job of several models joins others at the top of their loop, which is known with job.batches "
                    "only: give data=, here and at the others"
                )
            waits = isinstance(data, DataRanges) or self._several
            self._worker.enter(self._take_over, waits=waits and self._local is None)
            self._worker._session.member.turns.go_on_from(self._state.done)
            if self._local is not None:
                self._local.catch_up()
                self.entered = self.round
        elif directory is not None:
            self._load(directory.latest)
        if directory is not None:
            stop_on_sigterm(self)
        if not self._several or data is not None:
            self._worker.serve_state(self._state.for_learner)

    @property
    def round(self) -> int:
        """Number of updates of the weights since the job was first started; with local SGD, number of exchanges."""
        return self._state.round

    def _load(self, find: Callable[[], Path | None]) -> bool:
        """Continue from the checkpoint that ``find`` finds, if all have the same. Return whether there is one."""
        path = self._state.load(find)
        if path is None:
            return False
        self._looked_at, self.resumed = self.round, path
        log.info("the job goes on from round %d (%s)", self.round, path)
        return True

    def _take_over(self, tree: Tree) -> None:
        """Take the state of another member."""
        self._state.take_over(tree)
        self._looked_at = self.entered = self.round
        log.info("the job joined the others after round %d", self.round)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def step(
        self,
        *models: Wrapped | str,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Update the weights by the averaged gradients, and save if that is due. Call it after each exchange.

        In modes "bounded" and "async" it updates once for each of `DistributedDataParallel.updates`.

        First the gradients are clipped, with ``clip_grad_norm``. Then ``before()`` is called. Then the optimizer and
        the scheduler step. Then ``after()`` is called, for example a moving average. Then the gradients are cleared.

        After a backward that exchanged nothing, as most do with a cadence, it does nothing.

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
        if self._local is not None:
            self._local.step(before, after)
            return
        if not self._several and not self._parts[0].synchronous.exchanged:
            return  # its cadence, or `no_sync`, has accumulated the gradients
        if self._worker.mode != "sync":
            self._apply_updates(before, after)
            return
        updated, before_it = chosen(self._parts, models), self.round
        dropped = together(self._parts, updated) if self._dropped is None else self._dropped
        if self._several:
            check_updated(updated)
            if self._dropped is None:
                self._worker._session.steps(bits(self._parts, updated), bits(self._parts, dropped))
            self._dropped = None
        saves_later = self._several and self._position is not None
        if not saves_later:
            self._saving.ask()
        models_updated = [part.synchronous for part in updated]
        if any(one.has_update for one in models_updated) and not any(one.skipped for one in models_updated):
            self._update(updated, before, after)
        for part in (*updated, *dropped):
            part.clear()
            part.dropped = part in dropped
        if not self._several:
            self._catch_up(before, after)
        self._end_step(before_it, saves_later)

    def _end_step(self, before: int, saves_later: bool = False) -> None:
        if self._position is not None and not self._parts[0].waits:
            self._position.count()
        self._worker.boundary()
        self._newcomers.check(self._state.replicated, self.round)
        if not saves_later:
            self._saving.save_or_leave(before)

    def _apply_updates(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        """Update the weights by all rounds that the last backward leads to, where rounds do not wait for all."""
        for _ in self._parts[0].synchronous.updates():
            number = self.round
            self._saving.ask()
            self._apply(before, after)
            self._end_step(number)

    def _save_if_due(self) -> None:
        """Save at the top of the loop of several models. In between some are updated and others not."""
        before, self._looked_at = self._looked_at, self.round
        self._saving.ask()
        self._saving.save_or_leave(before)

    def _update(
        self, updated: Sequence[Trained], before: Callable[[], object] | None, after: Callable[[], object] | None
    ) -> None:
        for part in updated:
            part.clip(self._clip)
        if before is not None:
            before()
        for part in updated:
            part.update()
        self._state.count_round()
        if self._worker.observes:
            self.entered = self.round
        if after is not None:
            after()

    def _catch_up(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        """Repeat what the others have done since this worker got its state."""
        while self._worker.has_next:
            if self._parts[0].synchronous.replay():
                self._apply(before, after)

    def _apply(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        """Update the only model by the gradients of a round."""
        (part,) = self._parts
        if not part.synchronous.skipped:
            self._update(self._parts, before, after)
        part.clear()

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
                a BalancedSampler or DataRanges, its ``batch_sampler`` is.
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
            backward = part.synchronous._backward
            backward.ended = max(backward.ended - 1, 0)
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
                    self._worker._session.steps(0, 0)
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
            news = self._worker._session.follow()
            if news.updated:
                self._dropped = of_bits(self._parts, news.dropped)
                step(*(part.model for part in of_bits(self._parts, news.updated)))
            elif news.top:
                if to_the_top:
                    return
                self._save_if_due()
            elif not part_of(self._parts, news).model.replay():
                for part in self._parts:
                    part.clear()
                return

    def stop(self) -> None:
        """Save when this round is over, and leave, as on SIGTERM. It returns at once. Any thread may call it."""
        self._saving.stop()

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
        self._saving.save(path)

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

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

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
