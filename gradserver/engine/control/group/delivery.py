"""Delivery of the state to a learner that others wait for, and its deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradserver.protocol.limits import MIB, STATE_ASK_SECONDS, STATE_INSTALLED_A_SECOND, STATE_STALL_SECONDS


@dataclass(slots=True)
class Delivery:
    """The state's way to a learner that others wait for. What buys time are bytes that have come, and nothing else.

    Attributes:
        began: when members were told of it.
        seconds: how long it may take.
        rate: bytes that must come in a second.
        asked: whether the learner has asked for it.
        received: bytes that have come.
        endless: whether it may take longer, since there are too few to train without the learner.
    """

    seconds: float
    rate: float
    endless: bool
    began: float = math.inf
    asked: bool = False
    received: int = 0
    _since: float = 0.0
    """Last time at which as many bytes had come as were due."""
    _then: int = 0
    """Bytes that had come then."""

    def begin(self, now: float) -> None:
        """Note that members were told of it."""
        self.began = now

    def comes(self, nbytes: int, now: float) -> None:
        """Note that the learner has asked for the state, or that so many more bytes of it have come."""
        self.asked = True
        if nbytes and not self.received:
            self._since = now
        self.received += nbytes
        if self.received - self._then >= self.rate * (now - self._since):
            self._since, self._then = now, self.received

    @property
    def deadline(self) -> float:
        """Time until which the others wait, if nothing more comes."""
        if not self.asked:
            until = self.began + STATE_ASK_SECONDS
        elif not self.received:
            until = self.began + self.seconds / 8
        else:
            until = self._since + STATE_STALL_SECONDS + (self.received - self._then) / self.rate
            until += self.received / STATE_INSTALLED_A_SECOND
        return until if self.endless else min(until, self.began + self.seconds)

    def why(self, now: float, donor: str) -> str:
        """Say why the others wait no longer."""
        if not self.asked:
            return f"it did not ask for the state that {donor} was to send it"
        much = f"{self.received:,} bytes of the state of {donor} had come"
        if now >= self.began + self.seconds and not self.endless:
            return f"{much}, and the others wait {self.seconds:g} s at most (--state-timeout)"
        if not self.received:
            return f"{much}, and the others wait {self.seconds / 8:g} s for the first (an eighth of --state-timeout)"
        return f"{much}, too few for the {self.rate / MIB:g} MiB a second that must come (--state-rate)"
