"""A training job: all that has state, saved and loaded as one."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from protocol.errors import GradServerError, InvalidArgumentError, StateError, UsageError, WorkerLeftError
from worker import __version__
from worker.alike import Newcomers, check_same_start, check_weights, digest_of, gather
from worker.checkpoint import Directory, Writing, read, write
from worker.ddp import DistributedDataParallel
from worker.handle import Handle
from worker.position import Position, RangesPosition, chance, set_chance
from worker.ranges import DataRanges
from worker.sampler import ShardSampler
from worker.stopping import stop_on_sigterm
from worker.tree import Tree, pack

log = logging.getLogger("gradserver")

_LOOK_SECONDS: Final = 1.0
"""How often members that wait for a checkpoint are told that it is still being written."""
_VERSIONS: Final = {"gradserver": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


class Stateful(Protocol):
    """What a job can save: schedulers, averages of weights, scalers, generators, and so on."""

    def state_dict(self) -> Any:
        """Its state, made of what `worker.tree` knows."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from a state."""


class Scheduler(Stateful, Protocol):
    """One that steps after each update, without arguments."""

    def step(self) -> Any:
        """Go to the next step."""


class Job:
    """A training job: model, optimizer and all else that has state, which is saved and loaded as one.

    Example::

        data = gradserver.ShardSampler.for_worker(dataset, worker, seed=17)
        loader = DataLoader(dataset, batch_size=32, sampler=data)
        job = gradserver.Job(model, optimizer, scheduler, data=data, checkpoint="runs/7", every=500)
        for inputs, targets in job.batches(loader, epochs=10):
            loss(model(inputs), targets).backward()
            job.step()

    Started again, the same script goes on from the last checkpoint in ``runs/7``. With as many workers as before it
    ends with the bits that it would have had without a stop, if its wire is not a lossy one and nothing else in it is
    left to chance (such as the seeds of a loader's own processes). With another number of workers every sample that
    was left of the epoch is still used: once, if the sampler has ``uneven="keep"``, which `batches` copes with.

    A checkpoint has the model's parameters and buffers (rank 0's), the optimizer, the scheduler, the objects in
    ``state``, the round, how much of the epoch every worker had used, and each worker's generators of random numbers:
    torch's, Python's and numpy's. The last are restored if the number of workers is the same.

    All workers save at the same boundary between two rounds, after they have compared their weights. Rank 0 writes,
    from a copy and in a thread, while training goes on. If that fails, for want of room on the disk for example, there
    is a warning in the log, and the next save is the next try. What is due while that thread still writes is left out.

    SIGTERM, which spot instances and batch systems send before they end a process, makes all workers save when the
    round is over. The one that was told to stop then leaves, and its process ends with status 0. The others of a group
    of fixed size cannot go on without it: they get a WorkerLeftError that says who left and where the checkpoint is.
    Those of an elastic group go on. (A script that handles SIGTERM itself can call `stop`.)

    Args:
        model: the wrapped module.
        optimizer: its optimizer, made before the job.
        scheduler: one of torch's learning-rate schedulers, or anything like it; stepped after each update. One whose
            ``step`` needs an argument goes into ``state``, and is stepped by the loop.
        data: what `batches` are drawn from.
        state: what else has state, by name: objects with ``state_dict`` and ``load_state_dict``. A worker's own state
            does not belong there: what is saved is that of rank 0.
        checkpoint: directory of the checkpoints. If there are some, the job goes on from the one written last. It
            should be the same for all workers, and must hold the same checkpoints for all that start.
        every: save after each so many rounds. None: only on SIGTERM and when `save` is called.
        keep: how many checkpoints to keep in the directory.

    Attributes:
        model, optimizer, scheduler: as given.
        round: how many updates the weights have had since the job was first started.
        entered: the value of ``round`` at which this worker joined, or has come to so far; 0 if it was there from the
            start.
        resumed: the checkpoint that it went on from; None for a new job.

    Raises:
        StateError: a checkpoint cannot be read, or is of another job; names the file.
        DisagreementError: the workers found different checkpoints.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        *,
        data: ShardSampler | DataRanges | None = None,
        state: Mapping[str, Stateful] | None = None,
        checkpoint: str | Path | None = None,
        every: int | None = None,
        keep: int = 2,
    ) -> None:
        _check(model, optimizer, data, checkpoint, every)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.round = self.entered = 0
        self.resumed: Path | None = None
        self._worker = model.worker
        self._state = dict(state or {})
        self._position = None if data is None else _position_of(data, self._place_of(data))
        self._directory = None if checkpoint is None else Directory(Path(checkpoint), keep)
        self._every = every
        self._writing: Writing | None = None
        self._stopping = False
        self._plain_steps = False
        self._newcomers = Newcomers(self._worker)
        if self._worker.joins:
            # What the coordinator hands out to a worker is to count: then the others wait for it.
            self._worker.enter(self._take_over, waits=isinstance(data, DataRanges))
        elif self._directory is not None:
            self._load(self._directory.latest)
        if self._directory is not None:
            stop_on_sigterm(self)
        self._worker.serve_state(self._for_who_joins)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def step(self, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None) -> None:
        """Update the weights by the averaged gradients, and save if that is due. To be called after each exchange.

        In a group that skips rounds with gradients that are not finite, such a round updates nothing.

        That is: ``before()``, for example clipping; the optimizer's and the scheduler's step; ``after()``, for
        example a moving average; and the gradients are cleared.

        Raises:
            DivergedError: the workers' weights differ, which is looked at before each save; or this one's are not
                those of the others, which is looked at behind the first round of who joins.
            WorkerLeftError: somebody was told to stop; all is saved.
            SystemExit: this worker was told to stop, and has left; all is saved.
            StateError: the same, but it could not be saved.
        """
        self._check_step(before, after)
        stopping = self._ask_who_stops()
        updates = self.model.has_update and not self.model.skipped
        if updates:
            self._update(before, after)
        else:
            self.optimizer.zero_grad()
        self._catch_up(before, after)
        self._worker.boundary()
        self._newcomers.check(self.model.module, self.round)
        if stopping is None:
            return
        leaving = np.flatnonzero(stopping.wait()).tolist()
        if leaving:
            self._save_and_part(leaving)
        elif updates and self._every is not None and self.round % self._every == 0:
            self._save_beside()

    def _update(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        if before is not None:
            before()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.round += 1
        if after is not None:
            after()
        self.optimizer.zero_grad()

    def _catch_up(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        """Who has just joined does all that the others have done meanwhile."""
        while self._worker.has_next:
            if self.model.replay() and not self.model.skipped:
                self._update(before, after)
        if self._worker.observes:
            self.entered = self.round

    def batches(
        self,
        loader: DataLoader[Any] | Dataset[Any],
        epochs: int = 1,
        step: Callable[[], object] | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """What ``loader`` gives in each epoch, from where the job is up to the end of the last one.

        Workers may have different numbers of batches: who has none left takes part in the others' rounds, as in
        `DistributedDataParallel.join`, until all have come to the end of the epoch.

        Args:
            loader: a DataLoader whose ``sampler`` is the job's ``data``, or its ``batch_sampler`` where that is
                DataRanges; or a data set.
            epochs: how many the training has in all; those before a restart count.
            step: what the loop does after each backward, if that is more than ``job.step()``: a function that calls
                ``job.step(before=…, after=…)``. Workers without batches call it too.
            **options: of the loader, for a data set: ``num_workers`` and so on.
        """
        if self._position is None:
            raise UsageError("job.batches needs to know the sampler: Job(…, data=sampler)")
        if not isinstance(loader, DataLoader):
            loader = self._position.loader(loader, options)
        elif options:
            raise UsageError(f"{', '.join(options)}: give these to the DataLoader itself")
        self._plain_steps = step is None
        for _ in self._position.epochs(epochs):
            with self.model.join(self.step if step is None else step):
                self._position.running = True
                for batch in self._position.batches(loader):
                    if self.model.ended:
                        break
                    yield batch
            self._position.running = False

    def stop(self) -> None:
        """Save when this round is over, and leave, as on SIGTERM. Returns at once, and may be called in any thread."""
        if self._directory is None:
            raise UsageError("this job has no directory to save in: Job(…, checkpoint=DIRECTORY)")
        self._stopping = True

    # ── saving ────────────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | Path | None = None) -> None:
        """Save now, and return when it is written. To be called by all workers between the same two rounds.

        Args:
            path: the file to write; None for the next one in the job's directory.

        Raises:
            StateError: it could not be written; names the file. At every worker, and the job can go on.
            DivergedError: the workers' weights differ; nothing was written.
        """
        if path is None and self._directory is None:
            raise UsageError("where to? Give save(path), or Job(…, checkpoint=DIRECTORY)")
        tree = self._agree_on_state()
        self._await(None if tree is None else Writing(partial(self._write, tree, path)))

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint: a file, or the last one of a directory. To be called by all workers.

        Raises:
            StateError: it cannot be read by some worker, or does not fit this job.
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
        """Save for those who were told to stop. Returns if this worker can go on without them."""
        assert self._directory is not None
        leaves, names = self._worker.rank in leaving, [self._worker.names[rank] for rank in leaving]
        self.save()
        who = ", ".join(map(repr, names))
        said = f"{who} was told to stop, and left after round {self.round}, which is saved in {self._directory.path}"
        if leaves:
            log.info("%s", said)
            self._worker.close(f"it was told to stop; round {self.round} is saved")
            raise SystemExit(0)
        if not self._worker._session.membership.seats:  # a group of fixed size
            raise WorkerLeftError(
                f"{said}. This group needs all of its workers: start again from there", worker=names[0], rank=leaving[0]
            )
        log.warning("%s; the others go on", said)

    def _agree_on_state(self) -> Tree | None:
        """Compare weights, and hear where everybody is. What is to be saved; None at all but the one who writes."""
        mine = {
            "weights": digest_of(self.model.module),
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
            "model": self.model.state_dict(unwrapped=True),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "state": {name: one.state_dict() for name, one in self._state.items()},
            "data": position,
            "chance": [one["chance"] for one in told],
            "weights": told[0]["weights"],
            "group": self._worker.group,
            "workers": list(self._worker.names),
            "versions": _VERSIONS,
        }

    def _await(self, writing: Writing | None) -> None:
        """Wait until the one who writes has done so. It says so each second, so that no wait runs out meanwhile."""
        pause = min(_LOOK_SECONDS, self._worker.timeout / 4)
        outcome: Tree = ""
        while outcome == "":
            mine = None if writing is None else writing.outcome(pause)
            outcome = next((one for one in gather(self._worker, mine) if one is not None), "its writer was lost")
        if outcome != "written":
            raise StateError(str(outcome))

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────

    def _load(self, find: Callable[[], Path | None]) -> bool:
        """Go on from the checkpoint that ``find`` finds, if it is everybody's; whether there is one."""
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
        """What a worker that joins needs to be like this one."""
        position = None if self._position is None else self._position.for_who_joins()
        tree = self._tree([{"chance": None, "weights": digest_of(self.model.module)}], position)
        return tree | {"unsaved": self.model.unsaved_buffers()}

    def _take_over(self, tree: Tree) -> None:
        """Be like the member whose state this is."""
        try:
            self._install(_of_a_job(tree, "the state that a member sent"))
            for name, buffer in tree["unsaved"].items():
                self.model.module.get_buffer(name).copy_(buffer)
        except _DOES_NOT_FIT as error:
            raise StateError(f"this job is not like the one that it joins: {error}") from error
        self.entered = self.round
        log.info("the job joined the others after round %d", self.round)

    def _install(self, tree: Tree) -> None:
        for what, here in (("scheduler", self.scheduler), ("data", self._position)):
            if (tree[what] is None) != (here is None):
                raise StateError(f"it was saved {'without' if tree[what] is None else 'with'} {what}=")
        if tree["state"].keys() != self._state.keys():
            raise StateError(f"it has state= {sorted(tree['state'])}, and this job {sorted(self._state)}")
        if self._position is not None:
            (self._position.join if self._worker.joins else self._position.resume)(tree["data"])
        self.model.module.load_state_dict(tree["model"])
        if digest_of(self.model.module) != tree["weights"]:
            raise StateError("its weights are others when they are loaded: this model's are of another type, or order")
        self.optimizer.load_state_dict(tree["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(tree["scheduler"])
        for name, one in self._state.items():
            one.load_state_dict(tree["state"][name])
        if not self._worker.joins and len(tree["chance"]) == self._worker.world_size:
            set_chance(tree["chance"][self._worker.rank])
        if tree["versions"] != _VERSIONS:
            log.warning("this state was made with %s, and here is %s", tree["versions"], _VERSIONS)
        self.round = tree["round"]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _place_of(self, data: ShardSampler | DataRanges) -> Callable[[], tuple[int, int]] | None:
        """By what epochs are dealt in an elastic group, if this sampler is of the worker's own rank."""
        worker = self._worker
        if isinstance(data, DataRanges):
            return None
        own = (data.rank, data.world_size) == (worker.rank, worker.world_size)
        return (lambda: (worker.rank, worker.world_size)) if worker._session.membership.seats and own else None

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
        """Tell the others whether this worker is to stop. On its way while the optimizer steps, so it costs little."""
        if self._directory is None or self._worker.observes:
            return None
        stopping = np.zeros(self._worker.world_size, np.uint8)
        stopping[self._worker.rank] = self._stopping
        return self._worker.all_reduce(stopping, op="max", async_op=True)


_DOES_NOT_FIT: Final = (GradServerError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""What is raised by what cannot be loaded."""


def _of_a_job(tree: Tree, what: str) -> Tree:
    """``tree``, if it has what `Job.save` writes."""
    parts = ("round", "model", "optimizer", "scheduler", "state", "data", "chance", "weights", "versions")
    if type(tree) is not dict or any(part not in tree for part in parts):
        raise StateError(f"{what} is not the checkpoint of a job")
    return tree


def _position_of(
    data: ShardSampler | DataRanges, place: Callable[[], tuple[int, int]] | None
) -> Position | RangesPosition:
    return RangesPosition(data) if isinstance(data, DataRanges) else Position(data, place)


def _check_optimizer(model: DistributedDataParallel, optimizer: Optimizer) -> None:
    """Refuse an optimizer of other parameters: its steps would change nothing, or what is not exchanged."""
    own = {id(parameter) for parameter in model.module.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise InvalidArgumentError(
                    f"parameter {number} of the optimizer's group {index}, of shape {tuple(parameter.shape)}, is none "
                    f"of the model's: make the optimizer with model.parameters()"
                )


def _check(model: object, optimizer: Optimizer, data: object, checkpoint: object, every: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}: wrap it first, in gradserver.DistributedDataParallel(module, worker)"
        )
    _check_optimizer(model, optimizer)
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
