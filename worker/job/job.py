"""A training job: everything that has state, saved and loaded as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from gradserver.protocol.errors import StateError, UsageError
from gradserver.protocol.nearest import names_keywords
from gradserver.worker.data.balanced import BalancedSampler
from gradserver.worker.data.ranges import DataRanges
from gradserver.worker.data.sampler import ShardSampler
from gradserver.worker.job.checkpoint import NEWEST_WHOLE, Directory, File, check_resume, located
from gradserver.worker.job.local_steps import LocalSteps
from gradserver.worker.job.log_steps import LogSteps
from gradserver.worker.job.position import check_data, check_same_data, position_of
from gradserver.worker.job.resuming import Source
from gradserver.worker.job.saving import Saving, check_every
from gradserver.worker.job.several_steps import SeveralSteps
from gradserver.worker.job.state import JobState
from gradserver.worker.job.steps import GradientSteps, Steps
from gradserver.worker.job.stopping import stop_on_sigterm
from gradserver.worker.job.trained import Scheduler, Stateful, Trained, Wrapped, trained
from gradserver.worker.local_sgd.wrapper import LocalSGD
from gradserver.worker.norms import check_limit
from gradserver.worker.torch_ddp.alike import gather
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

    All workers save at the same boundary between two rounds, after they have compared their weights. In each directory
    the worker of the lowest rank writes: so each host without a shared disk has the same file. It writes from a copy,
    in a thread, while training continues. If that fails, for want of room on the disk for example, the log has a
    warning, and the next save is the next try. A save that is due while the thread still writes is omitted.

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
        checkpoint: directory of the checkpoints, on a shared disk or one at each host. A path without / in front
            begins in the folder that the process has now, also if it has another one later. The job continues from the
            newest checkpoint that any worker has there. Workers without it get it from one that has it, and write it to
            their own disk.
        every: number of rounds between two saves. None: save only on SIGTERM and when `save` is called.
        keep: number of checkpoints to keep in the directory.
        clip_grad_norm: limit of the norm of each model's averaged gradients, to which `step` clips them; None: none. A
            `LocalSGD` has no averaged gradients: ``before`` of `step` can clip the worker's own.
        resume: "latest": a damaged checkpoint is an error, which names the newest whole one beside it. "newest-whole":
            the job continues from that one, with a warning. None: as the environment variable GRADSERVER_RESUME says,
            which ``gradserver run --resume`` sets; without it, "latest".

    Attributes:
        model: the model, as given. Of several, the one that was wrapped first.
        optimizer: the optimizer of ``model``.
        scheduler: the scheduler of ``model``.
        models: all models, by name (or place in the list).
        resumed: the checkpoint that the job continued from. None for a new job.

    Raises:
        StateError: a checkpoint cannot be read, or belongs to another job. The error names the file.
        DisagreementError: the workers found different checkpoints of the same round, or gave different samplers.
        UsageError: the options exclude each other, such as ``clip_grad_norm`` and a `LocalSGD`.
    """

    @names_keywords
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
        resume: str | None = None,
    ) -> None:
        check_every(every, checkpoint)
        self._whole = check_resume(resume) == NEWEST_WHOLE
        if data is not None:
            check_data(data)
        self._parts = trained(model, optimizer, scheduler)
        first = self._parts[0]
        self.model, self.optimizer, self.scheduler = first.model, first.optimizer, first.scheduler
        self.models: dict[str, Any] = {part.name: part.model for part in self._parts}
        self.resumed: Path | None = None
        self._worker = first.model.worker
        self._position = None if data is None else position_of(data, self._worker)
        self._state = JobState(self._worker, self._parts, state or {}, self._position)
        self._keep = keep
        directory = None if checkpoint is None else Directory(located(checkpoint), keep)
        self._saving = Saving(self._worker, self._state, directory, every)
        limit = check_limit(clip_grad_norm, "clip_grad_norm")
        self._steps: Steps = self._kind(first)(
            self._worker, self._parts, self._state, self._saving, self._position, limit
        )
        self._plain_steps = False
        if self._worker.joins:
            self._steps.enter(self._take_over)
        else:
            if data is not None:
                check_same_data(data, self._worker)
            if directory is not None:
                self._load(directory)
        if directory is not None:
            stop_on_sigterm(self)
        if self._steps.can_be_joined:
            self._worker.serve_state(self._state.for_learner)

    @property
    def round(self) -> int:
        """Number of updates of the weights since the job was first started; with local SGD, number of exchanges."""
        return self._state.round

    @property
    def entered(self) -> int:
        """Value of ``round`` at which this worker joined, or has come to so far. 0 for a founder."""
        return self._state.entered

    def _kind(self, first: Trained) -> type[Steps]:
        """Return the kind of steps that the models need, of which this is the first."""
        if isinstance(first.model, LocalSGD):
            return LocalSteps
        if self._worker.mode != "sync":
            return LogSteps
        return SeveralSteps if first.name else GradientSteps

    def _load(self, source: Source, exact: bool = False) -> bool:
        """Continue from the newest checkpoint that a member has in ``source``. Return whether there is one."""
        path = self._state.load(source, self._whole, exact)
        if path is None:
            return False
        self._saving.start()
        self.resumed = path
        log.info("the job goes on from round %d (%s)", self.round, path)
        return True

    def _take_over(self, tree: Tree) -> None:
        """Take the state of another member."""
        self._state.take_over(tree)
        self._saving.start()
        log.info("the job joined the others after round %d", self.round)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def step(
        self,
        *models: Wrapped | str,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Update the weights by the averaged gradients, and save if that is due. Call it after each exchange.

        In modes "bounded" and "async" it updates once for each of `DistributedDataParallel.updates`. With several
        models these may be updates of any of them.

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
        self._steps.step(models, before, after)

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
            with self._steps.join(self.step if step is None else step):
                self._position.running = True
                yield from self._steps.batches(self._position.batches(loader))
            self._position.running = False

    def stop(self) -> None:
        """Save when this round is over, and leave, as on SIGTERM. It returns at once. Any thread may call it."""
        self._saving.stop()

    # ── saving ────────────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | Path | None = None) -> None:
        """Save now, and return when it is written. All workers call it between the same two rounds.

        Args:
            path: the file to write, at each host. None for the next one in the job's directory.

        Raises:
            StateError: no worker could write the file. Every worker gets this error, which names the file. The job can
                continue. If some could, the others have a warning.
            DivergedError: the workers' weights differ. Nothing was written.
        """
        self._saving.save(None if path is None else located(path))

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint: a file, or the newest one of a directory. All workers call it.

        A worker that does not have it gets it from one that does, and writes it to the same path.

        Raises:
            StateError: some worker cannot read its own, none has it, or it does not fit this job.
            DisagreementError: the workers' files differ.
        """
        path = located(path)
        told = gather(self._worker, "folder" if path.is_dir() else "file" if path.exists() else "none")
        exact = "file" in told
        if path.is_dir() or (not path.exists() and not exact and "folder" in told):
            if not self._load(Directory(path, self._keep), exact):
                raise StateError(f"there is no checkpoint in {path}")
        elif not self._load(File(path), exact=True):
            raise StateError(f"cannot read the checkpoint {path}: no such file or directory, at any worker")

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
