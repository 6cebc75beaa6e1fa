"""A learner's steps into the group: `gradserver.worker.member.learner` has the course."""

from __future__ import annotations

from gradserver.protocol.messages import Ready, Transfer
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.learner import Learner, Stage
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.stragglers import Stragglers


class Entering:
    """The steps of one worker that joins. Not safe to share: the session's lock guards it."""

    def __init__(self, identity: Identity, rounds: Rounds, learner: Learner, stragglers: Stragglers) -> None:
        self._identity, self._rounds = identity, rounds
        self._learner, self._stragglers = learner, stragglers

    def next_instruction(self, seen: Transfer | None) -> tuple[Transfer, int | None] | None:
        """Give the next transfer after the one ``seen``, or the first round to contribute to; None if there is none."""
        transfer, number = self._learner.transfer, self._learner.round
        if number is not None and transfer is not None:
            self._identity.go_on_as(Stage.ENTERED)
            self._rounds.go_on_from(number)
            return transfer, number
        if transfer is not None and transfer is not seen:
            return transfer, None
        return None

    def is_outgrown(self, transfer: Transfer) -> bool:
        """Return true if the state of ``transfer`` is too old to begin with."""
        return self._learner.behind or self._learner.transfer is not transfer

    def observe(self) -> None:
        """Begin with the state that is here, while the others go on."""
        self._identity.go_on_as(Stage.OBSERVING)
        self._rounds.go_on_from(self._learner.begins)
        self._stragglers.backlog.forget(self._rounds.number)

    @property
    def has_next(self) -> bool:
        """True if this worker is behind by a round that is over."""
        return self._identity.stage is Stage.OBSERVING and self._stragglers.backlog.has(self._rounds.number)

    @property
    def may_enter(self) -> bool:
        """True if this worker observes, and has come to the first round that it contributes to."""
        first = self._learner.round
        return self._identity.stage is Stage.OBSERVING and first is not None and self._rounds.number >= first

    def caught_up(self) -> Ready | None:
        """Give what is to be said if this worker has caught up and has not said so."""
        learner = self._learner
        if self._identity.stage is not Stage.OBSERVING or learner.ready or learner.transfer is None or self.has_next:
            return None
        return learner.say_ready()
