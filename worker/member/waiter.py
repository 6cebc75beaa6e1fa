"""The caller's end of something that is under way, as far as a member writes to it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gradserver.protocol.errors import GradServerError


class NotFinite(NamedTuple):
    """Outcome of an exchange with a contribution that is not finite."""

    own: bool
    """True if this worker did."""
    skips: bool
    """True if nothing of the round is to be applied; else the result is the mean of the others."""


class Waiter(Protocol):
    """A handle, for which a caller waits: `gradserver.worker.handle.Handle`.

    A member fills in the outcome, and says when all of it is there. Only the session completes it, without its lock.

    Attributes:
        weight: sum of the weights that counted.
        present: whether some worker contributed data.
        left_alone: byte ranges without a contribution, in which the result is what was there before.
        not_finite: outcome for gradients that are not finite; None if there were none.
        squares: sums of squares that came with results, by the first slice of each (`Result`).
    """

    weight: float
    present: bool
    left_alone: tuple[tuple[int, int], ...]
    not_finite: NotFinite | None
    squares: dict[int, tuple[float, ...]]
    _open: bool
    _value: object

    def _complete(self, error: GradServerError | None = None) -> None:
        """Mark as done, once."""
