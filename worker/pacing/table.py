"""The table of a group's members: what each has measured, and what was decided for it. It travels as a bucket.

Each member fills in a row of what it has measured, and the rows of what it knows was decided. The result is the
largest of each number. What was measured stands in one member's table only. What was decided is the same in all tables,
and is 0 in that of a worker that has just joined. So each member gets the whole table, with the same bits.

    head     the number that the rule needs beside rows: `anchor` of a cadence, `steps` of a balance
    row      of the member with that id: `MEASURED`, then `DECIDED`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float64]

HEAD: Final = 2


class Measured(NamedTuple):
    """Measurements of one member since the last exchange.

    Attributes:
        milliseconds: time in which it computed.
        batches: batches that it computed in this time.
        samples: samples in them.
        sync_milliseconds: time of the exchange before, from the end of its own computation to the result.
        drawn: steps that its sampler has dealt so far.
    """

    milliseconds: float = 0.0
    batches: float = 0.0
    samples: float = 0.0
    sync_milliseconds: float = 0.0
    drawn: float = 0.0


class Decided(NamedTuple):
    """Decision about one member.

    Attributes:
        speed: its smoothed speed, in the rule's unit; 0 if it is not known.
        share: its share, in the rule's unit; 0 if there is no such member.
    """

    speed: float = 0.0
    share: float = 0.0


_COLUMNS: Final = len(Measured._fields) + len(Decided._fields)


def numel_of(places: int) -> int:
    """Return the number of elements of a table for ids below ``places``."""
    return HEAD + places * _COLUMNS


class Table:
    """A table in ``memory``, one-dimensional float64 of `numel_of` elements.

    Attributes:
        head: numbers beside the rows.
    """

    def __init__(self, memory: Numbers) -> None:
        self.head = memory[:HEAD]
        self._rows = memory[HEAD:].reshape(-1, _COLUMNS)

    @property
    def places(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def clear(self) -> None:
        """Forget all."""
        self.head[:] = 0
        self._rows[:] = 0

    def measure(self, member_id: int, measured: Measured) -> None:
        """Fill in what a member has measured. One without a row is left out."""
        if member_id < self.places:
            self._rows[member_id, : len(measured)] = measured

    def decide(self, member_id: int, decided: Decided) -> None:
        """Fill in what was decided for a member. One without a row is left out."""
        if member_id < self.places:
            self._rows[member_id, len(Measured._fields) :] = decided

    def measured(self, member_id: int) -> Measured:
        """Return what a member has measured; zeros if it did not say."""
        row = self._rows[member_id, : len(Measured._fields)].tolist() if member_id < self.places else ()
        return Measured(*row)

    def decided(self, member_id: int) -> Decided:
        """Return what was decided for a member; zeros if there is none."""
        row = self._rows[member_id, len(Measured._fields) :].tolist() if member_id < self.places else ()
        return Decided(*row)

    def known(self) -> Iterable[int]:
        """Return ids of the members that something was decided for."""
        shares = self._rows[:, -1]
        found: list[int] = np.flatnonzero(shares).tolist()
        return found

    def sync_milliseconds(self, member_ids: Iterable[int]) -> float:
        """Return the time of the exchange: that of the member that came last, as the others have waited for it."""
        times = (self.measured(member_id).sync_milliseconds for member_id in member_ids)
        return min((time for time in times if time > 0), default=0.0)

    def drawn(self) -> int:
        """Return the most steps that a sampler has dealt."""
        return int(self._rows[:, Measured._fields.index("drawn")].max(initial=0.0))
