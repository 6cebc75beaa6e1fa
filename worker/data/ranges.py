"""Data that the coordinator hands out: each sample is used once in an epoch, even if workers join, leave or die."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gradserver.protocol.audits import NO_AUDIT, Audit
from gradserver.protocol.errors import InvalidArgumentError, UsageError
from gradserver.protocol.limits import MAX_NAME_BYTES, MAX_NUMEL
from gradserver.protocol.messages.leases import Claim, Claimed, Located, Register
from gradserver.protocol.nearest import names_keywords
from gradserver.protocol.ranges import Ranges, count, lowest, union
from gradserver.protocol.whole import whole_number
from gradserver.worker.client import Worker
from gradserver.worker.data.permutation import epoch_permutation, key_half, length_of
from gradserver.worker.handle import Handle

if TYPE_CHECKING:
    from gradserver.worker.data.permutation import Indices

_NOT_RUNNING: Final = (
    "take batches of these DataRanges by job.batches(…) or data.batches(loader): only so it is known which of them the "
    "training has used, as a loader reads ahead"
)


_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.25
"""Seconds that a worker waits before it asks again what others have yet to use."""


class Batch(NamedTuple):
    """Ranges of one batch. If there is a ``holder``, they are its own, and this worker repeats them in an audit."""

    ranges: Ranges
    holder: int = -1


class DataRanges:
    """Samples of a data set, which the coordinator hands out as workers ask for them.

    For example:

        data = gradserver.DataRanges(len(dataset), worker, batch_size=32, seed=17)
        job = gradserver.Job(model, optimizer, data=data, checkpoint="runs/7")
        for inputs, targets in job.batches(dataset, epochs=10, num_workers=4):
            model.set_weight(len(inputs))
            loss(model(inputs), targets).backward()
            job.step()

    All workers draw the same order for an epoch, and each position in it belongs to one worker. It counts as used when
    the worker has contributed to a round, and the round is over. The samples that a worker had not used before it left
    or died go to others. So each sample is used once in each epoch, for any number of workers, and faster workers use
    more. Which worker gets which sample depends on the order of requests, and so on chance. Use a ShardSampler for bits
    that repeat.

    A worker may get nothing while others still have some samples. It continues to take part in rounds, as the samples
    of a dead worker may still come to it. `Job.batches` and `DistributedDataParallel.join` arrange this. Without a job:

        for _ in data.epochs(10):                # all that there is for this worker, then again what came back
            with model.join(optimizer):
                for inputs, targets in data.batches(loader):
                    ...

    In a group with audits (`gradserver serve --audit`) two or three workers sometimes compute the same samples, and
    those of one of them count. Each worker then exchanges its gradients after each batch.

    With ``loader = DataLoader(dataset, batch_sampler=data, num_workers=4)``. Trainers without torch `take` indices:

        while not data.finished():
            indices = data.take()                # perhaps none
            worker.push(0, gradient_of(indices), weight=len(indices))
            worker.finish_round()

    Args:
        dataset_or_length: any object with a length, or the number of samples; the same at every member.
        worker: worker from `connect` or `LocalCluster`. Its group must have a plan when the first batch is taken.
        batch_size: number of samples in a batch. It may differ between workers, and change at any time.
        seed: 0 … 2⁶⁴ - 1, the same at every member.
        shuffle: true for a new order in each epoch; the same at every member.
        name: name of this data, if a group has several kinds.
        prefetch: number of batches to claim ahead, so that no worker waits for the coordinator.

    Attributes:
        epoch: epoch of the batches. It is the group's: a worker that joins continues where the others are.

    Raises:
        DisagreementError: others use other data under this name. It is raised when the first batch is taken, and shows
            both sides.
        UsageError: this worker already has DataRanges of this name, or its group has no rounds, as it has no plan.
    """

    @names_keywords
    def __init__(
        self,
        dataset_or_length: Sized | int,
        worker: Worker,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        name: str = "data",
        prefetch: int = 1,
    ) -> None:
        self.length = whole_number(length_of(dataset_or_length), "length")
        if self.length > MAX_NUMEL:
            raise InvalidArgumentError(f"a data set has {MAX_NUMEL} samples at most, not {self.length}")
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise InvalidArgumentError(f"name is printable text of 1 to {MAX_NAME_BYTES} bytes, not {name!r}")
        self.name, self.epoch, self.batch_size = name, 0, batch_size
        self._seed, self._shuffle = key_half(seed, "seed"), bool(shuffle)
        self._ahead = whole_number(prefetch, "prefetch")
        self._session = worker._session
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._start: tuple[int, Ranges] = (0, ())
        """The place to continue from, if no member has continued yet."""
        self._registered = False
        self._number = 0
        self._claimed: Handle | None = None
        """Ranges that are claimed ahead."""
        self._left: Ranges = ()
        """Ranges of this worker that are in no batch yet."""
        self._returned: Ranges = ()
        """Ranges that others may have: what was computed of them is dropped. The next claim says so."""
        self._asked_in_vain = 0
        """Times in a row that the epoch was not finished, and this worker has got nothing of it since."""
        self._drawn: deque[Batch] = deque()
        """Batches that a loader reads ahead."""
        self._used: Ranges = ()
        """Ranges in batches that the training has had since the last round began."""
        self._repeated = -1
        """Holder of the batch that the training has had since the last round began, if it is a repetition."""
        self._repeats: tuple[int, int] = (-1, -1)
        """The round, and the holder of what is repeated in it."""
        self._audit = NO_AUDIT
        self._said: tuple[int, Ranges] = (-1, ())
        """The message about the last round."""
        self._order: tuple[int, Indices] | None = None
        self._running = False
        self._session.traffic.hand(self._session.member.leases.add, self)

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch. The last batches of an epoch may be smaller."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._batch_size = whole_number(value, "batch_size", least=1)

    @property
    def order(self) -> dict[str, int | bool | str]:
        """Parameters that determine an epoch's order, besides its number. They are the same at every member."""
        return {"length": self.length, "seed": self._seed, "shuffle": self._shuffle, "name": self.name}

    @property
    def unexchanged(self) -> int:
        """Number of samples in batches that were taken since the last round began."""
        with self._lock:
            return count(self._used)

    # ── taking batches ────────────────────────────────────────────────────────────────────────────────

    def take(self) -> Indices:
        """Return the indices of the next batch, which this worker's next contribution uses. It may be empty."""
        batch = self._draw()
        self._hand_over(batch)
        return self._indices(batch.ranges)

    def finished(self) -> bool:
        """Return true if every sample of the epoch is used. Between two rounds, all members get the same answer.

        A member that is late, with a quorum or backups, has no samples any more, and yet false: it takes part until it
        has the results of the last rounds.
        """
        return (answer := self._ask_finished()) is not None and answer.finished and not answer.behind

    def _ask_finished(self) -> Claimed | None:
        """Ask whether the epoch is finished; None if this worker has samples of it itself."""
        self._register()
        self._collect()
        if self._left or self._drawn:
            return None
        answer: Claimed
        answer, _ = self._claim(0).wait()
        if not answer.finished:
            self._pause()
        return answer

    def _pause(self) -> None:
        """Wait a moment, if this worker has asked in vain before: what is left is another's, which has yet to use it.

        All members do, so a group in which that lasts does not make empty rounds as fast as it can.
        """
        if self._asked_in_vain:
            time.sleep(min(_FIRST_PAUSE * 2 ** min(self._asked_in_vain, 16), _LONGEST_PAUSE))
        self._asked_in_vain += 1

    def next_epoch(self) -> None:
        """Go to the next epoch, when this one is `finished`."""
        self.epoch, self._order = self.epoch + 1, None

    def epochs(self, stop: int) -> Iterator[int]:
        """Yield each epoch's number, from the present one up to ``stop``; more than once if samples came back.

        Each time there is one `Job.batches` or `DistributedDataParallel.join`, which wait for members that are late.
        """
        self._register()  # the group may be in a later epoch
        while self.epoch < stop:
            if (answer := self._ask_finished()) is not None and answer.finished:
                self.next_epoch()
            else:
                yield self.epoch

    def batches(self, loader: Iterable[Any] | None = None) -> Iterator[Any]:
        """Yield the batches of ``loader`` that this worker gets, until there is none for it.

        Args:
            loader: a DataLoader with this object as its ``batch_sampler``. None: batches are the indices themselves.
        """
        if self._running:
            raise UsageError(f"there is a loop over batches of data {self.name!r} already")
        self._running = True
        try:
            if loader is None:
                while len(indices := self.take()):
                    yield indices
                return
            if getattr(loader, "batch_sampler", None) is not self or not getattr(loader, "in_order", True):
                raise UsageError(
                    "batches needs a loader of these: DataLoader(dataset, batch_sampler=data, …), in order"
                )
            for batch in loader:
                self._hand_over(self._drawn.popleft())
                yield batch
        finally:
            self._running = False
            # a loop that ended early has not used them
            self._left = union(self._left, *(batch.ranges for batch in self._drawn if batch.holder < 0))
            self._drawn.clear()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield batches of indices, for the loader of `batches`."""
        if not self._running:
            raise UsageError(_NOT_RUNNING)
        while (batch := self._draw()).ranges:
            self._drawn.append(batch)
            yield self._indices(batch.ranges).tolist()

    def _hand_over(self, batch: Batch) -> None:
        with self._lock:
            if batch.ranges and (self._repeated >= 0 or (batch.holder >= 0 and self._used)):
                raise UsageError(
                    f"the group is audited (--audit), and this worker takes several batches of data {self.name!r} for "
                    f"one exchange, of which one repeats another worker's: exchange gradients after each batch, "
                    f"without accumulation, cadence or local SGD, or start the coordinator without --audit"
                )
            if batch.ranges:
                self._asked_in_vain = 0
            if batch.holder >= 0:
                self._repeated = batch.holder
            else:
                self._used = union(self._used, batch.ranges)

    def _indices(self, ranges: Ranges) -> Indices:
        positions = np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in ranges)])
        if not self._shuffle or not ranges:
            return positions
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, epoch_permutation(self.length, self._seed, self.epoch)
        indices: Indices = self._order[1][positions]
        return indices

    # ── claiming ──────────────────────────────────────────────────────────────────────────────────────

    def _draw(self) -> Batch:
        """Return the next batch."""
        self._register()
        self._collect()
        size = self._batch_size
        if self._audit.share and (batch := self._draw_for_audit()).ranges:
            return batch
        if count(self._left) < size:
            self._take_in(self._claim(size - count(self._left)))
        ranges, self._left = lowest(self._left, size)
        if ranges and count(self._left) < self._ahead * size:
            self._claimed = self._claim(self._ahead * size - count(self._left))
        return Batch(ranges)

    def _draw_for_audit(self) -> Batch:
        """Return a batch for an audited round: samples that were claimed for it alone, or those that another holds.

        A loader reads ahead, one batch for each round. If a batch is exchanged in another round, nothing is compared.
        """
        with self._lock:
            ahead = len(self._drawn) + bool(self._used or self._repeated >= 0)
        number = self._session.boundaries.round_to_open + ahead
        if not self._audit.picks(self._seed, number):
            return Batch(())
        answer, ranges = self._claim(self._batch_size, number + 1).wait()
        return Batch(ranges if answer.epoch == self.epoch else (), answer.holder)

    def _collect(self) -> None:
        """Take the answers to claims made ahead."""
        claimed, self._claimed = self._claimed, None
        if claimed is not None:
            self._take_in(claimed)

    def _take_in(self, claimed: Handle) -> None:
        answer, ranges = claimed.wait()
        if answer.epoch == self.epoch:
            self._left = union(self._left, ranges)

    def _claim(self, wanted: int, audit: int = 0) -> Handle:
        session = self._session
        plan = session.plan
        if plan is None or not any(bucket.numel for bucket in plan.buckets):
            raise UsageError(
                f"group {session.membership.group!r} has no rounds, and samples of data {self.name!r} count as used "
                f"when a round is over: wrap the module in DistributedDataParallel, or agree on a plan, and then take "
                f"batches"
            )
        with self._asking:
            self._number += 1
            round_to_open = session.boundaries.round_to_open
            with self._lock:
                returned, self._returned = self._returned, ()
            claim = Claim(self.name, self._number, self.epoch, wanted, round_to_open, audit)
            return session.ask(claim, returned or None)

    def _register(self) -> None:
        if not self._registered:
            self.locate()

    def locate(self) -> tuple[int, Ranges]:
        """Return the epoch that the group is in, and the ranges of its positions that are used up."""
        self._collect()
        epoch, done = (0, ()) if self._registered else self._start
        what = Register(
            self.name, self.length, self._seed, self._shuffle, epoch, self._session.boundaries.round_to_open
        )
        located: Located
        located, used = self._session.ask(what, done).wait()
        if not self._registered:
            self._registered, self.epoch, self._audit = True, located.epoch, Audit(located.audit)
        return located.epoch, used

    def go_on(self, epoch: int, done: Ranges) -> None:
        """Continue in ``epoch``, with the ranges ``done``. All members say so, before any batch is taken.

        A worker that joins a group that has continued is told the group's place, whatever it says here.
        """
        if self._registered and self._number:
            raise UsageError(
                f"batches of data {self.name!r} were taken already: load a checkpoint before the loop over batches"
            )
        self._registered, self._start = False, (epoch, done)
        self._register()

    # ── what was used ─────────────────────────────────────────────────────────────────────────────────

    def use(self, round_number: int) -> Ranges:
        """Return what this worker used since the last round, and so in this one; the same again for the same round."""
        with self._lock:
            if self._said[0] != round_number:
                self._said, self._used = (round_number, self._used), ()
                self._repeats, self._repeated = (round_number, self._repeated), -1
            return self._said[1]

    def repeats(self, round_number: int) -> int:
        """Return the id of the member with samples that this worker computes, too, in this round; -1 for none."""
        return self._repeats[1] if self._repeats[0] == round_number else -1

    def drop(self) -> None:
        """Hand out once more what this worker used since the last round: its contribution was refused."""
        with self._lock:
            self._left, self._used = union(self._left, self._used), ()

    def give_back(self) -> None:
        """Let others have the last round's samples: it closed without this worker, which drops what it gave."""
        with self._lock:
            self._returned, self._said = union(self._returned, self._said[1]), (self._said[0], ())

    def carry(self) -> None:
        """Carry the last round's samples over to the next: it closed without this worker, which keeps what it gave."""
        with self._lock:
            self._used, self._said = union(self._used, self._said[1]), (self._said[0], ())
