"""The interfaces of a plane: buckets go in, and come back as the mean of all members.

`Plane` is what a module has. `Way` is what a plane on which members reduce among themselves has in one epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from gradserver.protocol.exchange import Op
from gradserver.worker.member.waiter import NotFinite
from gradserver.worker.planes.communicator import Communicator, Signal


class Outcome(Protocol):
    """Outcome of a bucket in a round, known when the round is finished: a `gradserver.worker.handle.Handle`.

    Attributes:
        weight: sum of the weights that counted.
        present: true if some member contributed data.
        left_alone: byte ranges without a contribution, in which the result is what was there before.
        not_finite: outcome for gradients that are not finite; None if there were none.
        squares: sums of squares that came with results, by the first slice of each. On the direct plane there are none
            if no member wanted them.
    """

    weight: float
    present: bool
    left_alone: tuple[tuple[int, int], ...]
    not_finite: NotFinite | None
    squares: dict[int, tuple[float, ...]]


class Kept(Protocol):
    """A contribution that its owner keeps, while its bucket has it multiplied by what `Plane.factor` has said."""

    def flat(self) -> Tensor:
        """Return a copy of the contribution as it is."""

    def scale_again(self) -> None:
        """Bring the contribution, multiplied, into the bucket once more."""

    def move(self) -> Tensor:
        """Give the bucket's memory up, and bring the contribution as it is into other memory. Return that."""


class Plane(Protocol):
    """The way of one module's buckets to the other members, and of the results back."""

    def new_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a bucket, in memory that this plane reads and writes without a copy where it can."""

    def before_forward(self) -> None:
        """Prepare for a forward, in the thread that will call ``backward()``."""

    def note_writer(self, index: int, device: torch.device) -> None:
        """Note that a gradient of bucket ``index`` was computed on the calling thread's stream."""

    @property
    def pushed(self) -> bool:
        """True if anything of the present round was pushed."""

    def factor(self, weight: float) -> float | None:
        """Return what gradients may be multiplied by when they are brought into a bucket that is pushed with a `Kept`.

        It saves the plane a copy. None if the plane has no use for it.
        """

    def push(self, index: int, flat: Tensor, weight: float, present: bool = True, kept: Kept | None = None) -> None:
        """Contribute ``flat`` to bucket ``index``; it holds the result after `finish`, and is left alone until then.

        With ``kept``, ``flat`` has the contribution multiplied, and may have parts of results before `finish`. The
        result is then in the bucket's memory, which can be another one.
        """

    def wait(self, index: int) -> Outcome:
        """Wait for the result of a bucket on the CPU that was pushed in this round."""

    def overwritten(self, index: int, flat: Tensor) -> None:
        """Note that ``flat`` does not hold the last result any more."""

    def finish(self, measures: bool = False) -> Mapping[int, Outcome]:
        """Wait until every result is in its bucket. Return the outcomes, by bucket, and open the next round.

        With ``measures`` this worker wants the norms of means: they come with the results of all planes then.
        """


class Pending(Protocol):
    """A result that is under way."""

    def wait(self, timeout: float) -> None:
        """Wait until it is in its tensor. It raises what `gradserver.worker.planes.communicator.Reduction` does."""


class Way(Protocol):
    """Way in which the members of one epoch reduce the buckets of one module. All of them make the same calls.

    A *pass* reduces every mean of the plan once: `open`, `mean` for each, a wait for each, `close`. Each call may raise
    what a wait may raise.

    Attributes:
        on_host: communicator of this host's members, if all of them have the same results; None if there is none.
    """

    on_host: Communicator | None

    def memory(self, index: int, like: Tensor) -> Tensor:
        """Return memory for the result of bucket ``index``."""

    def open(self, weight: float, signal: Signal) -> None:
        """Begin a pass, to which this member contributes with ``weight``. The signal interrupts its waits."""

    def mean(self, index: int, weighed: Tensor) -> Pending:
        """Begin to reduce a contribution times its weight, which `gradserver.worker.planes.direct` divides."""

    def combine(self, tensor: Tensor, op: Op) -> Pending:
        """Begin to replace ``tensor`` by its combination over all members."""

    def broadcast(self, tensor: Tensor, rank: int) -> Pending:
        """Begin to replace ``tensor`` by that of ``rank``."""

    def close(self) -> None:
        """End a pass: all of its means are there."""

    def divide(self, result: Tensor, weight: float, out: Tensor) -> None:
        """Put a mean into ``out``, from its result and the sum of weights."""
