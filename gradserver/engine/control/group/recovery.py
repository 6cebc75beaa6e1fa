"""The recovery of a durable group: which shards have found out what members hold.

`gradserver.engine.control.recovery` decides what happens to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Recovery:
    """Recoveries of one group.

    Attributes:
        is_open: True while members and shards find out which of them hold which results.
        generation: number of the last recovery.
        caught_up: shards that know that all members have the round before.
        standing: shards that have told members what stands.
        made: the latest round of which a shard has not adopted all results from members since the recovery began.
        is_restored: True if an earlier coordinator began the group.
        is_uncertain: True if members may be in a later round than is written down: they have not said where it is.
        own: the first round of which nothing can be an earlier coordinator's.
        owes_nothing: True if the group was restored, and what lossy codecs had kept back at the coordinator was not.
    """

    is_open: bool = False
    generation: int = 0
    caught_up: set[int] = field(default_factory=set)
    standing: set[int] = field(default_factory=set)
    made: int = -1
    is_restored: bool = False
    is_uncertain: bool = False
    own: int = 0
    owes_nothing: bool = False

    def restore(self, lacks_shards: bool) -> None:
        """Go on where an earlier coordinator was lost."""
        self.is_restored = self.is_uncertain = True
        self.is_open = lacks_shards

    def begin(self, generation: int) -> None:
        """Begin a recovery with this number. What shards have found out in an earlier one is void."""
        self.is_open, self.generation = True, generation
        self.made = -1
        self.void()

    def await_shard(self) -> None:
        """Note that there is to be a recovery, when another process has taken a lost shard's place."""
        self.is_open = True
        self.void()

    def void(self) -> None:
        """Forget what shards have found out."""
        self.caught_up.clear()
        self.standing.clear()

    def note_made(self, number: int) -> None:
        """Note that a shard has made results of round ``number``."""
        self.made = max(self.made, number)

    def note_caught_up(self, shard: int) -> int:
        """Note that a shard has caught up. Return how many have."""
        self.caught_up.add(shard)
        return len(self.caught_up)

    def note_standing(self, shard: int) -> int:
        """Note that a shard has told members what stands. Return how many have."""
        self.standing.add(shard)
        return len(self.standing)

    def end(self, number: int) -> None:
        """Let members go on with round ``number``."""
        if self.is_uncertain:
            self.own = number + 1
        self.is_open = self.is_uncertain = False

    def lose_residuals(self) -> None:
        """Note that what lossy codecs had kept back is lost."""
        self.owes_nothing = True

    def note_loss(self) -> bool:
        """Tell once whether what lossy codecs had kept back was lost."""
        lost, self.owes_nothing = self.owes_nothing, False
        return lost
