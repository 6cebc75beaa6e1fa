"""A member's request for a round, in a group where rounds do not wait for all members.

`ROWS` is the table of what becomes of a request, and it runs. A member has one request at a time: for the contribution
that it has computed at a version, the number of updates that its weights had. It applies all rounds before the one that
it is granted, and pushes then. So it is in that round as any member is.

Of several modules a request names one, by its section of the plan. Rounds before it may be of any section. Which one a
round is of is known from its first result.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from gradserver.protocol.errors import GradServerError, OutOfStepError, UsageError
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.messages import Granted, RequestRound
from gradserver.protocol.plan import Section
from gradserver.worker.member.effects import Effects, Said, Tell
from gradserver.worker.member.entering import Entering
from gradserver.worker.member.exchanges import Exchanges
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.learner import Stage
from gradserver.worker.member.leases import Leases
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.stragglers import Stragglers
from gradserver.worker.member.waiter import Waiter


class Turn(Enum):
    """Next step of a member with a request."""

    APPLY = "apply"
    """It takes part in the present round with weight 0, as that is done without it, and applies the result."""
    PUSH = "push"
    """It contributes to the present round."""
    DROP = "drop"
    """It drops its contribution, which is too old, and computes another one."""


class State(Enum):
    """State of a member's request."""

    NONE = "there is no request"
    ASKED = "it waits for an answer"
    GRANTED = "a round is granted, which the member has yet to come to"
    REFUSED = "the contribution is refused, and the member has yet to apply the rounds before"
    PUSHING = "the member contributes to its round"


class Event(Enum):
    """Events of a request."""

    ASK = "the member has a contribution"
    GRANT = "Granted"
    REFUSE = "Granted, refused"
    PUSH = "the first push of the round that is granted"
    DROP = "the rounds before the refusal are applied"
    OVER = "the round that is granted is over"
    RESUME = "the member is on a new connection"


NONE, ASKED, GRANTED, REFUSED, PUSHING = State


class Row(NamedTuple):
    """Row of the table. If the request is ``said``, that is to the coordinator."""

    state: State
    event: Event
    next: State
    what: str
    said: bool = False


ROWS: Final = (
    Row(NONE, Event.ASK, ASKED, "RequestRound.", said=True),
    Row(NONE, Event.GRANT, NONE, "Nothing: it answers a request that was said twice."),
    Row(NONE, Event.REFUSE, NONE, "Nothing, as before."),
    Row(NONE, Event.RESUME, NONE, "Nothing."),
    Row(ASKED, Event.ASK, ASKED, "RequestRound: a member without data has some now.", said=True),
    Row(ASKED, Event.GRANT, GRANTED, "It applies the rounds before."),
    Row(ASKED, Event.REFUSE, REFUSED, "It applies the rounds before."),
    Row(ASKED, Event.RESUME, ASKED, "RequestRound, once more.", said=True),
    Row(GRANTED, Event.GRANT, GRANTED, "The later answer holds: a recovery has voided rounds in between."),
    Row(GRANTED, Event.REFUSE, REFUSED, "As before."),
    Row(GRANTED, Event.PUSH, PUSHING, "It contributes."),
    Row(GRANTED, Event.OVER, ASKED, "RequestRound: a recovery had the round done without it.", said=True),
    Row(GRANTED, Event.RESUME, ASKED, "RequestRound: the grant may be void.", said=True),
    Row(REFUSED, Event.GRANT, GRANTED, "The later answer holds."),
    Row(REFUSED, Event.REFUSE, REFUSED, "As before."),
    Row(REFUSED, Event.DROP, NONE, "Samples in the contribution are used another time."),
    Row(REFUSED, Event.RESUME, ASKED, "RequestRound: the refusal may be void.", said=True),
    Row(PUSHING, Event.GRANT, PUSHING, "Nothing: it answers a request that was said twice."),
    Row(PUSHING, Event.REFUSE, PUSHING, "Nothing, as before."),
    Row(PUSHING, Event.OVER, NONE, "It can compute the next contribution."),
    Row(PUSHING, Event.RESUME, PUSHING, "RequestRound, which names the round that it contributes to.", said=True),
)
_TABLE: Final = {(row.state, row.event): row for row in ROWS}


class Requests:
    """The requests of one member, one after the other. Not safe to share: the session's lock guards it.

    Attributes:
        staleness: updates of the module between the version of the last contribution that was granted a round, and
            that round.
        section: number of the section that the present round is of, as the last turn says.
    """

    def __init__(
        self,
        effects: Effects,
        identity: Identity,
        rounds: Rounds,
        stragglers: Stragglers,
        exchanges: Exchanges,
        leases: Leases,
        entering: Entering,
    ) -> None:
        self.staleness = self.section = 0
        self._effects, self._identity, self._rounds = effects, identity, rounds
        self._stragglers, self._exchanges, self._leases = stragglers, exchanges, leases
        self._entering = entering
        self._state = NONE
        self._version = self._since = self._answered = 0
        """The version, the round in which the request was made, and the round that answers it."""
        self._asked = self._granted = self._late = 0
        """The section that the request names, the one of the round that is granted, and the staleness there."""
        self._later: tuple[int, ...] = ()
        self._follows = False
        self._is_said = True
        """False for the request of a learner that does not contribute yet."""
        self._failure: GradServerError | None = None
        self._waiting: Waiter | None = None

    @property
    def applies(self) -> bool:
        """True if members of this group request rounds."""
        return self._identity.membership.mode != "sync"

    @property
    def is_pushing(self) -> bool:
        """True if the member contributes to the present round."""
        return self._state is PUSHING

    @property
    def damping(self) -> float:
        """Factor of the contribution that was granted a round last."""
        return 1.0 / (1 + self.staleness) if self._identity.membership.damping == "inverse" else 1.0

    # ── what the member does ──────────────────────────────────────────────────────────────────────────

    def ask(
        self, follows: bool, section: int | None = None, version: int | None = None, later: Sequence[int] = ()
    ) -> None:
        """Request a round for what was computed at a version, or follow the others without data.

        Args:
            follows: true without data.
            section: number of the section; None if the plan has one.
            version: the version; None for the present one.
            later: sections of further contributions, for which rounds are requested afterwards.
        """
        plan = self._rounds.plan
        if not self.applies:
            raise UsageError("no round is requested in mode 'sync': push the buckets, and finish the round")
        if self._identity.stage is Stage.JOINING:
            raise self._identity.not_yet("request a round")
        if plan is None:
            raise UsageError("no plan was agreed on: call agree(plan) first, on every worker")
        if plan.is_shared and section is None and not follows:
            raise UsageError(
                f"this worker exchanges {len(plan.each)} modules, and a round is of one: name the agreement of the "
                f"module, request_round(of=agreement)"
            )
        if section is not None and plan.section(section) is None:
            raise UsageError(f"there is no section {section} in the plan of group {self._identity.membership.group!r}")
        is_free = self._state is NONE or (self._state is ASKED and self._follows)
        if not is_free or self._rounds.pushed:
            raise OutOfStepError(f"this worker cannot request a round: {self._state.value}. Call next_turn first")
        self._version = self._rounds.number if version is None else min(version, self._rounds.number)
        self._since = self._rounds.number
        self._asked, self._later = plan.each[0].number if section is None else section, tuple(later)
        self._follows, self._failure = follows, None
        self._happens(Event.ASK)

    def turn(self) -> Turn | None:
        """Give what is next; None if the answer, or the results of the present round, are still to come."""
        if self._failure is not None:
            raise self._failure.again()
        if self._state is NONE or self._rounds.pushed:
            raise OutOfStepError("there is no turn to wait for: request a round first, and finish each round")
        number = self._rounds.number
        if self._entering.may_enter:
            self._identity.go_on_as(Stage.ENTERED)
        if not self._is_said:
            self._say()
        if self._state is GRANTED and self._answered == number:
            self.staleness, self.section = self._late, self._granted
            return Turn.PUSH
        if self._state is REFUSED and self._answered <= number:
            self._leases.drop()
            self._happens(Event.DROP)
            return Turn.DROP
        section = self._section_here()
        if number in self._stragglers.failures:
            self.section = self._asked if section is None else section.number
            return Turn.APPLY
        if section is None or (self._state is ASKED and not self._has_results()):
            return None
        self.section = section.number
        return Turn.APPLY

    def wait(self, waiter: Waiter) -> None:
        """Have ``waiter`` done when there may be a turn."""
        self._waiting = waiter

    def enter(self, index: int, weight: float) -> bool:
        """Return true if the member contributes to the present round, false if it only takes the results.

        UsageError if it contributes, and has no round for that. OutOfStepError if bucket ``index`` is not of the round.
        """
        plan = self._rounds.plan
        if plan is not None and plan.is_shared and plan.section_of(index).number != self.section:
            raise OutOfStepError(
                f"bucket {plan.buckets[index].key!r} is another module's: round {self._rounds.number} is of section "
                f"{self.section} of the plan (Worker.turn_of)"
            )
        if self._state is GRANTED and self._answered == self._rounds.number:
            self._happens(Event.PUSH)
        if self._state is PUSHING:
            return True
        if weight > 0:
            raise UsageError(
                f"round {self._rounds.number} is not this worker's: in mode {self._identity.membership.mode!r} request "
                f"a round for each contribution (Worker.request_round), and push when next_turn says so"
            )
        return False

    def over(self) -> None:
        """Note that the present round is over. A member that follows says how far it has come."""
        if self._state is PUSHING or (self._state is GRANTED and self._answered <= self._rounds.number):
            self._happens(Event.OVER)
        elif self._state is ASKED and self._follows:
            self._say(self._rounds.number + 1)

    # ── what it is told ───────────────────────────────────────────────────────────────────────────────

    def answered(self, message: Granted) -> None:
        """Take the coordinator's answer. One about a round that is over is passed over, or about an earlier request.

        Results of the round can come before the word that this member's contribution is refused in it. That word is
        never about a round that it had applied when it made the request.
        """
        if (inventory := self._exchanges.inventory) is not None:
            inventory.retained.forget_older(message.applied)
        earliest = max(self._version + 1, self._since) if message.refused else self._rounds.number
        if message.round < earliest or (message.refused and message.section != self._asked):
            return
        if self._state in (ASKED, GRANTED, REFUSED):
            self._answered, self._granted, self._late = message.round, message.section, message.staleness
        self._happens(Event.REFUSE if message.refused else Event.GRANT)
        self.wake()

    def failed(self, error: GradServerError) -> None:
        """Take the word that the group goes no further."""
        if self._state is not NONE:
            self._failure = error
            self.wake()

    def came(self, number: int) -> None:
        """Note that a result of round ``number`` has come before it was asked for."""
        if self._waiting is None or number != self._rounds.number:
            return
        if self._state is not ASKED or self._has_results():
            self.wake()

    def wake(self) -> None:
        """Have the member look again what is next."""
        self._effects.complete_all(self.give_up())

    def again(self) -> list[Said]:
        """Give what is repeated on a new connection."""
        self._happens(Event.RESUME, says=False)
        return [(self._request(), ())] if self._state is not NONE and self._is_said else []

    def give_up(self) -> list[Waiter]:
        """Give the handle that waits for a turn."""
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else [waiting]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────

    def _happens(self, event: Event, says: bool = True) -> None:
        row = _TABLE[self._state, event]
        self._state = row.next
        if row.said and says:
            self._say()

    def _say(self, number: int | None = None) -> None:
        """Request a round, or say that this member is in round ``number``; not as long as it only observes."""
        self._is_said = self._identity.stage is not Stage.OBSERVING
        if self._is_said:
            self._effects.add(Tell(self._request(number)))  # without a connection it is said on the next one

    def _request(self, number: int | None = None) -> RequestRound:
        """Return the request. The present round counts without this member if it has begun to take its results."""
        pushes, here = self._state is PUSHING, self._rounds.number if number is None else number
        takes_results = bool(self._rounds.pushed) and not pushes and number is None
        version = here if self._follows and not pushes else self._version
        section = self._granted if pushes else self._asked
        return RequestRound(version, here + takes_results, self._follows, pushes, section, self._later)

    def _section_here(self) -> Section | None:
        """Return the section that the present round is of; None if it is not known yet."""
        plan, inventory, number = self._rounds.plan, self._exchanges.inventory, self._rounds.number
        assert plan is not None
        if not plan.is_shared:
            return plan.each[0]
        parts = self._stragglers.backlog.section_of(number)
        if parts is not None:
            return plan.section_of(parts.start)
        found = None if inventory is None else inventory.retained.part_of(number)
        return None if found is None else plan.section_of(found)

    def _has_results(self) -> bool:
        """Tell whether all results of the present round are here, perhaps from before a recovery."""
        backlog, inventory, number = self._stragglers.backlog, self._exchanges.inventory, self._rounds.number
        if backlog.has(number):
            return True
        if inventory is None or self._rounds.plan is None or (section := self._section_here()) is None:
            return False
        for part in section.parts:
            key, bucket = ExchangeKey(Stream.BUCKET, number, part), self._rounds.plan.buckets[part]
            slices = self._exchanges.table.share(key, bucket.operation).layout.count
            kept = inventory.retained.of_bucket(key)
            if slices and not kept:
                return False
            if len({*kept, *backlog.slices(number, part)}) < slices:
                return False
        return True
