"""The schedule of local SGD: the steps after which a fragment is sent, and those after which its mean is taken.

With ``every`` 8, 2 fragments and a delay of 3 steps:

    step        1   2   3   4   5   6   7   8   9   10  11  12
    fragment 0              send ────────► take             send ─ …
    fragment 1                              send ───────► take

One fragment is on its way at a time. So rounds follow each other, and round k is of fragment k mod the number of
fragments: the same for all members, whatever the interval of each is.
"""

from __future__ import annotations

from gradserver.protocol.errors import InvalidArgumentError


class Schedule:
    """The schedule of one worker. It knows neither parameters nor messages.

    Args:
        every: steps between two averagings of a fragment.
        fragments: number of fragments.
        delay: steps from a fragment's sending to the taking of its mean.

    Attributes:
        fragments: number of fragments.
        delay: steps from sending to taking.
        round: number of the fragment's round that is on its way, or of the next one.
        under_way: true if a fragment is on its way.

    Raises:
        InvalidArgumentError: a fragment would be sent before the one before it was taken.
    """

    def __init__(self, every: int, fragments: int = 1, delay: int = 0) -> None:
        self.fragments = whole(fragments, "fragments", 1)
        self.delay = whole(delay, "delay", 0)
        self.round = 0
        self.under_way = False
        self._steps = 0
        """Steps since the last fragment was sent."""
        self.set_every(every)

    @property
    def every(self) -> int:
        """Steps between two averagings of a fragment."""
        return self._every

    def set_every(self, every: int) -> None:
        """Set the steps between two averagings of a fragment, from the next sending on."""
        self._every = whole(every, "every", 1)
        if every < self.fragments:
            raise InvalidArgumentError(
                f"every={every} steps are too few for {self.fragments} fragments, of which one at a time is sent: give "
                f"at least as many steps, or fewer fragments"
            )
        if self.delay > every // self.fragments:
            raise InvalidArgumentError(
                f"delay={self.delay}: a fragment must arrive before the next one is sent, which is after "
                f"{every // self.fragments} of every={every} steps with {self.fragments} fragments: give at most "
                f"{every // self.fragments}"
            )

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

    def sent(self) -> None:
        """Note that the fragment is on its way."""
        self.under_way, self._steps = True, 0

    def taken(self) -> None:
        """Note that the fragment has arrived. The next one is that of the next round."""
        self.under_way = False
        self.round += 1

    def go_on_from(self, number: int) -> None:
        """Go on from round ``number``, as another member does."""
        self.round, self.under_way, self._steps = number, False, 0


def whole(value: object, name: str, least: int) -> int:
    """Return ``value``, an argument; InvalidArgumentError unless it is a whole number of ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{name} is {value!r}, and must be a whole number, at least {least}")
    return value
