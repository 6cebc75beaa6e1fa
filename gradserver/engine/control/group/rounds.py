"""Rounds of a group, as control knows them: the open one, those that are complete and not over, and the last ones.

`gradserver.engine.control.rounds` decides what happens to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gradserver.engine.control.group.empty import Empty
from gradserver.engine.ends import MAX_CUTS, Ends
from gradserver.engine.records import RoundRecord

_LEDGER_ROUNDS: Final = 256
_SHOWN: Final = ("round", "weights", "opened", "completed", "last", "cut")
"""Fields of the last round that the status shows."""


class Complete(NamedTuple):
    """A round that all shards are done with.

    Attributes:
        told: True if it is over for members, as its last results said so.
        adopted: True if its results are those from before a recovery: it may be written down already.
    """

    record: RoundRecord
    told: bool
    adopted: bool


@dataclass(slots=True)
class Rounds:
    """Rounds of one group.

    Attributes:
        number: the open round.
        held: a complete round that is not over for members: a shard has yet to go by a change, or too few are left.
        held_again: True if a member may have heard before that this round is over, and be in the next one.
        unsettled: rounds that all shards are done with and that are not written down.
        late: members that a round was closed without, by its number.
        paused: time since which too few workers are left; None while there are enough.
        ends: which rounds are over, and the epoch in force behind each, as they are written down.
        ledger: records of the last rounds.
        empty: the last ones, if these had no update.
    """

    number: int = 0
    held: RoundRecord | None = None
    held_again: bool = False
    unsettled: deque[Complete] = field(default_factory=deque)
    late: dict[int, set[int]] = field(default_factory=dict)
    paused: float | None = None
    ends: Ends = field(default_factory=Ends)
    ledger: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=_LEDGER_ROUNDS))
    empty: Empty = field(default_factory=Empty)

    @property
    def told(self) -> tuple[int, int]:
        """The last round that is over, and the epoch in force behind it, as they are written down."""
        return self.ends.told

    @property
    def due(self) -> int:
        """The latest round that members were told of: the open one, or the next, if the open one is done again.

        A recovery can begin when members have heard that a round is over, and some lack results of it. Then the group
        is in that round once more. A member goes on by itself as soon as it has them, before its shards say so here.
        """
        return max(self.number, self.told[0] + 1)

    def complete(self, complete: Complete) -> None:
        """Take a round that all shards are done with."""
        self.unsettled.append(complete)

    def next_settled(self) -> Complete:
        """Take the first round that is complete out of the list."""
        return self.unsettled.popleft()

    def write(self, record: RoundRecord, epoch: int) -> None:
        """Note what is written down of a round."""
        self.ends.write(record.round, epoch)
        self.ledger.append(record.without_digests())  # here it is for its times

    def write_end(self, number: int, epoch: int) -> bool:
        """Note that a round is over, with this epoch behind it. True if that has to be written down, too."""
        return self.ends.write(number, epoch)

    def hold(self, record: RoundRecord, again: bool) -> None:
        """Keep a round from being over until all shards know which members take part in the next one."""
        self.held, self.held_again = record, again

    def begin(self, number: int) -> None:
        """Open round ``number``."""
        self.number = number

    def skip_to(self, number: int) -> None:
        """Open round ``number``, if it is a later one."""
        self.number = max(self.number, number)

    def pause(self, since: float) -> None:
        """Note that too few workers are left for the next round."""
        self.paused = since

    def void(self) -> None:
        """Forget a complete round that is not over. If it is complete, data says so once more."""
        self.paused = self.held = None

    def end(self, number: int) -> None:
        """Note that a round is over for all members."""
        self.held = self.paused = None
        self.late.pop(number - MAX_CUTS, None)  # later ones may have to be closed again

    def close_without(self, number: int, member_ids: Iterable[int]) -> None:
        """Note members that the round is closed without."""
        self.late.setdefault(number, set()).update(member_ids)

    def late_in_a_row(self, member_id: int, number: int) -> int:
        """Return the number of rounds before ``number`` that were closed without a member, one after the other."""
        first = number
        while member_id in self.late.get(first - 1, ()):
            first -= 1
        return number - first

    def recall_late(self, number: int) -> set[int]:
        """Return members that round ``number`` was closed without. Later rounds have not begun after all."""
        self.late = {one: member_ids for one, member_ids in self.late.items() if one <= number}
        return self.late.get(number, set())

    def describe_last(self) -> dict[str, object] | None:
        """Return the last round as plain JSON values; None before the first is over."""
        return {name: getattr(self.ledger[-1], name) for name in _SHOWN} if self.ledger else None

    def restore(self, ends: Ends, planned: int, last: RoundRecord | None) -> None:
        """Go on behind what an earlier coordinator has written down."""
        self.ends = ends
        self.number = max(self.told[0] + 1, planned)
        if last is not None:
            self.ledger.append(last.without_digests())
