"""The schedule of local SGD: the steps after which a fragment is sent, and those after which its mean is taken.

With ``every`` 8, 2 fragments and a delay of 3 steps:

    step        1   2   3   4   5   6   7   8   9   10  11  12
    fragment 0              send ────────► take             send ─ …
    fragment 1                              send ───────► take

One fragment is on its way at a time. So rounds follow each other, and round k is of fragment k mod the number of
fragments: the same for all members, whatever the interval of each is. The group's weights change in the order of rounds
by what is sent. When a member takes a mean concerns its own parameters alone. So each has its own delay.
"""

from __future__ import annotations

import math
from typing import Final

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.whole import whole_number

AUTO: Final = "auto"
"""Delay that follows from how long fragments are on their way."""


class Schedule:
    """The schedule of one worker. It knows neither parameters nor messages.

    Args:
        every: steps between two averagings of a fragment.
        fragments: number of fragments.
        delay: steps from a fragment's sending to the taking of its mean. `AUTO` for as many as it needs: the most that
            are possible at first, then as many as the slowest fragment of the last interval has needed.

    Attributes:
        fragments: number of fragments.
        is_measured: true if the delay follows from how long fragments are on their way.
        delay: steps from sending to taking, from the next sending on.
        round: number of the fragment's round that is on its way, or of the next one.
        under_way: true if a fragment is on its way.

    Raises:
        InvalidArgumentError: a fragment would be sent before the one before it was taken.
    """

    def __init__(self, every: int, fragments: int = 1, delay: int | str = 0) -> None:
        self.fragments = whole_number(fragments, "fragments", 1)
        self.is_measured = isinstance(delay, str)
        if self.is_measured and delay != AUTO:
            raise InvalidArgumentError(f"delay is {delay!r}, and must be a whole number, at least 0, or {AUTO!r}")
        self.delay = whole_number(every, "every", 1) if isinstance(delay, str) else whole_number(delay, "delay")
        self.round = 0
        self.under_way = False
        self._steps = 0
        """Steps since the last fragment was sent."""
        self._needed = 0
        """Steps after which the fragment that is on its way was there; 0 if it is not."""
        self._most_needed = 0
        """The most steps that a fragment of this interval has needed."""
        self.set_every(every)

    @property
    def every(self) -> int:
        """Steps between two averagings of a fragment."""
        return self._every

    def set_every(self, every: int) -> None:
        """Set the steps between two averagings of a fragment, from the next sending on."""
        every = whole_number(every, "every", 1)
        if every < self.fragments:
            raise InvalidArgumentError(
                f"every={every} steps are too few for {self.fragments} fragments, of which one at a time is sent: give "
                f"at least as many steps, or fewer fragments"
            )
        if self.is_measured:
            self.delay = min(self.delay, every // self.fragments)
        if self.delay > every // self.fragments:
            raise InvalidArgumentError(
                f"delay={self.delay}: a fragment must arrive before the next one is sent, which is after "
                f"{every // self.fragments} of every={every} steps with {self.fragments} fragments: give at most "
                f"{every // self.fragments}"
            )
        self._every = every

    @property
    def fragment(self) -> int:
        """The fragment that is on its way, or the next one."""
        return self.round % self.fragments

    @property
    def gap(self) -> int:
        """Steps from the last sending to the next one."""
        place = self.fragment
        return (place + 1) * self._every // self.fragments - place * self._every // self.fragments

    def step(self) -> None:
        """Count a step."""
        self._steps += 1

    @property
    def takes(self) -> bool:
        """True if the fragment that is on its way is to be taken now."""
        return self.under_way and self._steps >= self.delay

    @property
    def sends(self) -> bool:
        """True if the next fragment is to be sent now."""
        return not self.under_way and self._steps >= self.gap

    @property
    def looks(self) -> bool:
        """True if it matters whether the fragment that is on its way is there."""
        return self.is_measured and self.under_way and not self._needed

    def arrived(self) -> None:
        """Note that the fragment that is on its way is there, though it is not taken yet."""
        self._needed = max(self._steps, 1)

    def sent(self) -> None:
        """Note that the fragment is on its way."""
        self.under_way, self._steps, self._needed = True, 0, 0

    def taken(self, waited: float = 0.0) -> None:
        """Note that the fragment was taken. The next one is that of the next round.

        Args:
            waited: time that it was waited for, as a multiple of the time that the steps since the sending took.
        """
        if self.is_measured and self._steps >= self.delay:  # else it was taken before its time
            self._adapt(self._needed or math.ceil(self._steps * (1.0 + waited)))
        self.under_way = False
        self.round += 1

    def _adapt(self, needed: int) -> None:
        """Choose the next delay. A longer one holds at once, and a shorter one from the next interval on."""
        self._most_needed = max(self._most_needed, needed)
        if self.fragment == self.fragments - 1:
            self.delay, self._most_needed = self._most_needed, 0
        self.delay = min(max(self.delay, needed), self._every // self.fragments)

    def go_on_from(self, number: int) -> None:
        """Go on from round ``number``, as another member does."""
        self.round, self.under_way, self._steps = number, False, 0
