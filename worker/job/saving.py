"""The times when a job is saved: regularly, when it is asked to, and when a worker is told to stop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from gradserver.protocol.errors import (
    InvalidArgumentError,
    MembershipChangedError,
    StateError,
    UsageError,
    WorkerLeftError,
)
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.job.checkpoint import Directory, Writing, write
from gradserver.worker.job.copies import alike, place_in
from gradserver.worker.job.resuming import GiverLostError, place_of
from gradserver.worker.job.state import JobState
from gradserver.worker.member.learner import Stage
from gradserver.worker.torch_ddp.alike import gather
from gradserver.worker.tree import Packed, Tree, pack

log = logging.getLogger("gradserver")

_UPDATES_LATER: Final = 16
"""Updates after which members heed that one was told to stop, where rounds do not wait for all.

If they did so at once, each would wait for the slowest at every update.
"""
_LOOK_SECONDS: Final = 1.0
"""Seconds between two messages to waiting members that a checkpoint is still being written."""


class _Asked(NamedTuple):
    """A comparison that is under way: which members, by rank, were told to stop."""

    names: Sequence[str]
    rank: int
    stopping: Handle


class Saving:
    """The saves of a job. All workers save at the same boundary; the lowest rank of each directory writes.

    Args:
        worker: the worker.
        state: what is saved.
        directory: where; None if the job has no directory.
        every: number of rounds between two saves; None for none.

    Attributes:
        takes_part: whether this worker takes part in what members do at the present boundary, as last asked.
        is_saving: whether a save exchanges something at present.
        waits: whether that save then waits for its file.
    """

    def __init__(self, worker: Worker, state: JobState, directory: Directory | None, every: int | None) -> None:
        self._worker = worker
        self._state = state
        self._directory = directory
        self._every = every
        self._writing: Writing | None = None
        self._told_to_stop = False
        self._looked_at = 0
        """The round in which it was last checked whether a save is due."""
        self.takes_part = self.is_saving = self.waits = False
        self._asked: deque[_Asked] = deque()
        """Comparisons of the last updates that were not heeded yet."""
        self._later = 0 if worker.mode == "sync" else _UPDATES_LATER
        worker.on_membership(lambda _: self._asked.clear())  # it changes between the same two updates at all members

    def stop(self) -> None:
        """Save when this round is over, and leave. It returns at once."""
        if self._directory is None:
            raise UsageError("this job has no directory to save in: Job(…, checkpoint=DIRECTORY)")
        self._told_to_stop = True

    def start(self) -> None:
        """Begin to count rounds until the next save at the present one."""
        self._looked_at = self._state.round

    def ask(self) -> None:
        """Tell the others whether this worker is to stop. It costs little, as it travels while the optimizer steps."""
        is_member = self._worker._session.stage is Stage.MEMBER  # not behind the state alone, nor in its first round
        self.takes_part = self._directory is not None and is_member
        if not self.takes_part:
            return
        stopping = np.zeros(self._worker.world_size, np.uint8)
        stopping[self._worker.rank] = self._told_to_stop
        handle = self._worker.all_reduce(stopping, op="max", async_op=True)
        self._asked.append(_Asked(self._worker.names, self._worker.rank, handle))

    def save_or_leave(self) -> None:
        """Save if workers were told to stop, or if a save is due since the last call."""
        if not self._heed_stop() and self.takes_part and self._is_due:
            self._save_beside()
        self._looked_at = self._state.round  # after the save, as that may exchange what was left

    @property
    def _is_due(self) -> bool:
        return self._every is not None and self._state.round // self._every > self._looked_at // self._every

    def _heed_stop(self) -> bool:
        """Save if workers were told to stop, and leave if this one was. Return whether there were any."""
        if len(self._asked) > self._later:
            asked = self._asked.popleft()
            leaving = np.flatnonzero(asked.stopping.wait()).tolist()
            if leaving:
                self._save_and_leave([asked.names[rank] for rank in leaving], asked.rank in leaving, leaving[0])
                return True
        return False

    def save(self, path: Path | None = None) -> None:
        """Save to ``path`` or the directory, and return when it is written."""
        if path is None and self._directory is None:
            raise UsageError("where to? Give save(path), or Job(…, checkpoint=DIRECTORY)")
        if path is None:
            assert self._directory is not None
            place = place_in(self._worker, self._directory)
        else:
            place = place_of(self._worker, path)
        found = self._agree(place, waits=True)
        self._await(None if found is None else Writing(partial(self._write, found, path)))
        if path is None:
            self.start()

    def take_part(self, rounds: int, waits: bool) -> None:
        """Take part in a save that the others began before this worker was a member. It writes nothing.

        Args:
            rounds: rounds in which they still exchange what was not exchanged yet.
            waits: whether they then wait for the file.
        """
        self._agree("", waits=waits, rounds=rounds)
        self.start()
        if waits:
            try:
                self._await(None)
            except StateError as failure:  # those that have called for the save have this error
                log.warning("round %d is not saved: %s", self._state.round, failure.message)

    def _agree(
        self, place: str, busy: bool = False, copy: bool = False, waits: bool = False, rounds: int | None = None
    ) -> Packed | Tree | None:
        """Return what to save, at the workers that write. With local SGD this exchanges what was not exchanged yet.

        ``rounds`` is as in `JobState.agree`.
        """
        self.is_saving, self.waits = True, waits
        try:
            while True:
                agreed = self._state.agree(place, busy, rounds)
                rounds = None
                try:
                    return agreed.tree if len(agreed.writers) < 2 else alike(self._worker, agreed, copy)
                except (MembershipChangedError, GiverLostError) as change:  # raised at all members
                    log.info("what to save is compared again: %s", change)
        finally:
            self.is_saving = False

    def _write(self, found: Packed | Tree, path: Path | None) -> None:
        if self._writing is not None:
            self._writing.join()
        packed = found if isinstance(found, Packed) else pack(found)
        if path is not None:
            write(path, packed)
        elif self._directory is not None:
            self._directory.write(self._state.round, packed)

    def _save_beside(self) -> None:
        assert self._directory is not None
        busy = self._writing is not None and self._writing.is_alive()
        found = self._agree(place_in(self._worker, self._directory), busy, copy=True)
        if busy:
            log.warning("round %d is not saved: the last checkpoint is still being written", self._state.round)
        if found is None:
            return
        packed = found if isinstance(found, Packed) else pack(found, copy=True)
        self._writing = Writing(partial(self._directory.write, self._state.round, packed), warns=True)

    def _save_and_leave(self, names: Sequence[str], leaves: bool, rank: int) -> None:
        """Save for the workers that were told to stop. Return if this worker can go on without them.

        The lowest of them has ``rank``. This worker may be one that ``leaves``.
        """
        assert self._directory is not None
        self.save()
        named = ", ".join(map(repr, names))
        saved = f"which is saved in {self._directory.path}"
        said = f"{named} was told to stop, and left after round {self._state.round}, {saved}"
        if leaves:
            log.info("%s", said)
            self._worker.close(f"it was told to stop; round {self._state.round} is saved")
            raise SystemExit(0)
        if self._worker._session.membership.needs_all:
            raise WorkerLeftError(
                f"{said}. This group needs all of its workers: start again from there", worker=names[0], rank=rank
            )
        log.warning("%s; the others go on", said)

    def _await(self, writing: Writing | None) -> None:
        """Wait for the workers that write. They say each second that they still do, so that no wait runs out.

        One checkpoint that is written is enough. A worker that could not write another copy has a warning.
        """
        pause = min(_LOOK_SECONDS, self._worker.timeout / 4)
        outcomes: list[Tree] = [""]
        while "" in outcomes:
            mine = None if writing is None else writing.outcome(pause)
            outcomes = [one for one in gather(self._worker, mine) if one is not None]
        if "written" not in outcomes:
            raise StateError(str(next(iter(outcomes), "its writer was lost")))
        if writing is not None and (failure := writing.outcome(0)) != "written":
            log.warning("%s. The checkpoint is written at another worker", failure)


def check_every(every: object, checkpoint: object) -> None:
    """Raise an error if ``every`` is no number of rounds, or has no directory."""
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InvalidArgumentError(f"every is {every!r}, and must be a number of rounds, at least 1")
    if every is not None and checkpoint is None:
        raise UsageError("every= says when to save, and not where: Job(…, checkpoint=DIRECTORY)")
