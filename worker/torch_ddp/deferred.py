"""A contribution that waits for its round, in a group where rounds do not wait for all members.

    state    event                            next     what happens
    ───────  ───────────────────────────────  ───────  ──────────────────────────────────────────────────────────
    NONE     end of backward                  WAITING  a round is requested
    NONE     no batches are left              FOLLOWS  the same, for a worker without gradients
    FOLLOWS  end of backward                  WAITING  the same, with gradients
    WAITING  turn: a round is done without    WAITING  gradients are set aside; a round without them begins
    FOLLOWS  turn: a round is done without    FOLLOWS  a round without gradients begins
    WAITING  turn: its round                  NONE     a round with the gradients begins
    FOLLOWS  turn: no worker has batches      NONE     a round without gradients begins
    WAITING  turn: the gradients are too old  NONE     they are dropped
    WAITING  forward, or another backward     WAITING  UsageError

Gradients lie in the buckets, where the results of earlier rounds are to come. So they are set aside with their memory,
and the buckets get other memory. This takes one more copy of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from gradserver.protocol.errors import UsageError
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.buckets import BufferBucket, FlatBucket, GradientBucket
from gradserver.worker.turns import Turn


class Exchange(Protocol):
    """The rounds of a module: `gradserver.worker.torch_ddp.rounds.Rounds`."""

    gradients: list[GradientBucket]
    buffers: list[BufferBucket]

    def begin(self, count: int, foreseen: bool = False, leaves: bool = False) -> None:
        """Begin a round."""

    def new_memory(self, bucket: FlatBucket) -> Tensor:
        """Return memory for a bucket."""


class _Aside(NamedTuple):
    """Memory of one bucket's gradients, and whether each of its parameters has one."""

    flat: Tensor
    have: Sequence[bool]


class Deferred:
    """Gradients and buffers of one module that wait for their round. There are none at first.

    Args:
        worker: the worker.
        rounds: the module's rounds.
        as_view: whether a ``.grad`` is a view of its bucket.
        timeout: seconds to wait for a turn; None for the worker's.
    """

    def __init__(self, worker: Worker, rounds: Exchange, as_view: bool, timeout: float | None) -> None:
        self._worker = worker
        self._rounds = rounds
        self._as_view = as_view
        self._timeout = timeout
        self.is_waiting = False
        self._count = 0
        """Number of backwards behind the gradients; 0 for a worker that follows without any."""
        self._aside: list[_Aside] = []
        self._values: list[list[Tensor] | None] = []
        """Values of the buffers in each bucket; None where the forward has not changed any."""
        self._spare: list[Tensor] = []
        """The other memory of each bucket, when nothing is set aside."""

    @property
    def has_gradients(self) -> bool:
        """True if gradients wait for their round."""
        return self.is_waiting and self._count > 0

    def check(self) -> None:
        """Check that a forward or backward may begin: UsageError if updates before it were not applied."""
        if self.has_gradients:
            raise UsageError(
                f"the last backward has led to updates that were not applied. In a group of mode "
                f"{self._worker.mode!r} rounds do not wait for all workers, so one backward can lead to several "
                f"updates: write `for _ in model.updates(): optimizer.step()`, or let gradserver.Job do it"
            )

    def request(self, count: int) -> None:
        """Request a round for the gradients of ``count`` backwards; with 0, follow the others without any."""
        self._worker.request_round(follows=not count)
        self.is_waiting, self._count = True, count

    def take_turn(self) -> Turn:
        """Wait for the next turn, and begin its round. `Turn.DROP` has none: the gradients are forgotten."""
        turn, count = self._worker.next_turn(self._timeout), self._count
        if turn is Turn.DROP:
            self._spare = [aside.flat for aside in self._aside] or self._spare
            self._aside, self._values = [], []
        elif turn is Turn.PUSH:
            self._restore(self._worker.damping)
        elif count and not self._aside:
            self._set_aside()
        self.is_waiting = turn is Turn.APPLY
        if turn is not Turn.DROP:
            gives = turn is Turn.PUSH and count > 0
            self._rounds.begin(count if gives else 0, leaves=not gives)
        return turn

    def _set_aside(self) -> None:
        """Set the gradients and buffers aside. No parameter has a gradient then."""
        for index, bucket in enumerate(self._rounds.gradients):
            have = [slot.take(self._as_view) for slot in bucket.slots]
            self._aside.append(_Aside(bucket.flat, have))
            bucket.place(self._spare[index] if self._spare else self._rounds.new_memory(bucket))
            for slot in bucket.slots:
                slot.parameter.grad = None
        self._spare = []
        self._values = [bucket.values() if bucket.changed() else None for bucket in self._rounds.buffers]

    def _restore(self, factor: float) -> None:
        """Bring back what is set aside, with gradients times ``factor``."""
        for bucket, (flat, have) in zip(self._rounds.gradients, self._aside, strict=bool(self._aside)):
            self._spare.append(bucket.flat)
            bucket.place(flat)
            if factor != 1.0:
                flat.mul_(factor)
            for slot, has in zip(bucket.slots, have, strict=True):
                slot.parameter.grad = None if not has else slot.view if self._as_view else slot.view.clone()
        for buffers, values in zip(self._rounds.buffers, self._values, strict=bool(self._values)):
            if values is not None:
                buffers.set_values(values)
        self._aside, self._values = [], []
