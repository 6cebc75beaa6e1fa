"""Learners: workers that join a running group, and what each has of the state that a donor sends it.

A learner contributes to buckets from a round on, and is a member when that round is over. An id can have been another
member's before. A member that does not know yet that its peer has gone sends to that id. It names the epoch that it
goes by, and is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.data.exchange import Exchange
from gradserver.engine.order_fields import NEVER, Newcomer
from gradserver.protocol.exchange import BUCKET, COLLECTIVE, STATE_TAG, TRANSFER, ExchangeKey, is_state
from gradserver.protocol.messages import Push

NOT_YET: Final = NEVER
_REPORT_SECONDS: Final = 0.5
"""Least time between two reports that more of a state has come, once it has begun."""


@dataclass(slots=True)
class Coming:
    """State in one transfer: bytes that have come and were not reported."""

    key: tuple[int, int]
    """Number of the transfer, and the donor's id."""
    nbytes: int = 0
    reported: float = -math.inf
    """Time of the latest report."""
    begun: bool = False
    """True if any bytes have been reported."""


@dataclass(slots=True)
class Learners:
    """Learners of one group, and members that were learners, by member id."""

    first_rounds: dict[int, int] = field(default_factory=dict)
    """The first round that each contributes to; `NOT_YET` if it does not yet."""
    since: dict[int, int] = field(default_factory=dict)
    """Epoch as of which each is a member; `NOT_YET` if it is none yet."""
    states: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of the transfer in which each learner gets the state, and the epoch of that time."""
    heard: dict[int, float] = field(default_factory=dict)
    """Time when more of its state came to each."""
    coming: dict[int, Coming] = field(default_factory=dict)
    """State of each that has yet to be reported."""
    newcomers: dict[int, Newcomer] = field(default_factory=dict)
    """Latest that control has said of each."""

    def take(self, newcomers: Iterable[Newcomer]) -> dict[int, Newcomer]:
        """Note what control says of newcomers, and return what it said before."""
        before, self.newcomers = self.newcomers, {one.member_id: one for one in newcomers}
        return before

    def admit(self, member_id: int) -> None:
        """Begin with a learner with ``member_id``."""
        self.first_rounds[member_id] = self.since[member_id] = NOT_YET
        self.heard.pop(member_id, None)
        self.states.pop(member_id, None)
        self.coming.pop(member_id, None)

    def expect(self, member_id: int, number: int) -> None:
        """Wait for ``member_id`` in rounds from ``number`` on."""
        self.first_rounds[member_id] = number

    def expect_state(self, member_id: int, number: int, epoch: int) -> None:
        """Let ``member_id`` get the state in transfer ``number``."""
        self.states[member_id] = number, epoch

    def excuse(self, member_id: int) -> None:
        """Wait for ``member_id`` in no round. Its state is sent no further."""
        self.first_rounds[member_id] = NOT_YET
        self.states.pop(member_id, None)

    def promote(self, member_ids: Iterable[int], epoch: int) -> list[int]:
        """Make members of the learners among ``member_ids``, and return these."""
        new = [member_id for member_id in member_ids if self.since.get(member_id) == NOT_YET]
        self.since.update(dict.fromkeys(new, epoch))
        return new

    def depart(self, member_id: int) -> None:
        """Wait no more for ``member_id``, which has departed."""
        self.first_rounds.pop(member_id, None)
        self.states.pop(member_id, None)

    def early(self, member_ids: Iterable[int], number: int) -> list[int]:
        """Return those of ``member_ids`` that contribute to rounds behind ``number`` only."""
        return [member_id for member_id in member_ids if self.first_rounds.get(member_id, -1) > number]

    def is_learner(self, member_id: int) -> bool:
        """Tell whether ``member_id`` is a learner's still."""
        return self.since.get(member_id) == NOT_YET

    def has_part(self, member_id: int, key: ExchangeKey) -> bool:
        """Tell whether ``member_id`` may begin ``key``: it may not if it joined later."""
        first = self.first_rounds.get(member_id)
        if first is None or key.stream == TRANSFER:
            return True
        part = key.number if key.stream == BUCKET else key.part - 1
        return first != NOT_YET and part >= first and (key.stream != COLLECTIVE or not self.is_learner(member_id))

    def is_stale(self, member_id: int, push: Push) -> bool:
        """Tell whether ``push`` is for an earlier member with that id, or of a state that no learner waits for."""
        key = push.key
        if key.stream != TRANSFER:
            return False
        if is_state(key):
            number, epoch = self.states.get(key.target, (0, 0))
            return key.part - STATE_TAG != number or not 0 <= self.since.get(key.source, 0) <= epoch
        since = self.since.get(key.target if key.source == member_id else key.source, 0)
        return since == NOT_YET or push.epoch < since

    def take_state(self, exchange: Exchange, giver: int, before: int, now: float) -> tuple[int, int] | None:
        """Note a push of ``giver`` to a transfer that was complete up to slice ``before``.

        Return the number of the state and the bytes to report. Its first bytes are reported as they come, later ones
        twice a second. A request for it is reported, too: pushes of one end alone are nothing that has come.
        """
        key, member_id = exchange.key, exchange.key.target
        if not is_state(key) or not self.is_learner(member_id):
            return None
        which = key.part - STATE_TAG, key.source
        coming = self.coming.get(member_id)
        if coming is None or coming.key != which:
            if giver != member_id:
                return None  # it has yet to be asked for
            coming = self.coming[member_id] = Coming(which)
        if exchange.complete > before:
            coming.nbytes += exchange.layout.run_bytes(before, exchange.complete)
            self.heard[member_id] = now
        begins = coming.nbytes > 0 and not coming.begun
        if now < coming.reported + _REPORT_SECONDS and not begins:
            return None
        coming.begun |= begins
        nbytes, coming.nbytes, coming.reported = coming.nbytes, 0, now
        return which[0], nbytes

    def last_heard(self, member_ids: Iterable[int]) -> float:
        """Return the time when more of its state came to a learner among ``member_ids``; 0 if none did."""
        return max(
            (self.heard.get(member_id, 0.0) for member_id in member_ids if self.is_learner(member_id)), default=0.0
        )
