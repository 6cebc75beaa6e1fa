"""The stages of a learner, as a table that runs: what becomes of each event in each stage.

The first of `ROWS` with a condition that holds names the next stage. Nothing else changes a stage. Until a learner is
a member, nothing that happens to it or to its donor changes the membership, or costs others more than a wait. `NEVER`
has the pairs that cannot be. `docs/reference/group-states.md` shows these tables; ``python -m tests.group_tables``
makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from gradserver.engine.control.group.learners import Learner, Stage

ADMITTED, WELCOME, WAITING, RECEIVING, READY, ENTERED, MEMBER, GONE = Stage
LIVING: Final = (ADMITTED, WELCOME, WAITING, RECEIVING, READY, ENTERED)
STAGES: Final = {
    ADMITTED: "It has a member id, and shards hear of it.",
    WELCOME: "It agrees on its plan.",
    WAITING: "It waits for the end of a round, and for a donor.",
    RECEIVING: "It gets the state. It listens meanwhile, or it is expected: the open round waits for it.",
    READY: "It has the state, and has caught up with the others.",
    ENTERED: "It contributes to a round as its first one.",
    MEMBER: "It is a member.",
    GONE: "It left, was lost or evicted. The round goes on without it.",
}
"""Meaning of each stage of a learner."""


class Event(Enum):
    """Events of a learner. Its transfer fails if it says Enter, or if its donor says StateFailed or is lost."""

    KNOWN = "all shards know it"
    PROPOSE = "Propose"
    ENTER = "Enter"
    READY = "Ready, of its transfer"
    SERVE = "Serve"
    STATE_FAILED = "StateFailed"
    DONATED = "a round is over, and it gets a donor"
    BOUNDARY = "a round is over"
    BEHIND = "more results wait to be read than there is room for"
    FAILED = "its transfer fails"
    DONOR_LOST = "its donor is lost, and RoundDone had named it"
    COUNTED = "that round is over, or a recovery begins in it"
    OUTDATED = "the group agrees on another plan"
    HOPELESS = "no member can send the state, now or soon"
    VOID = "a recovery begins, and what is open is void"
    CUT_OFF = "a data shard is lost"
    OVERDUE = "its patience ends, or that of the others with it"
    GONE = "it leaves, is lost or evicted"


CONDITIONS: Final[dict[str, Callable[[Learner], bool]]] = {
    "": lambda _: True,
    "no proposal is open": lambda learner: learner.plan is None,
    "its plan is the group's": lambda learner: bool(learner.agreed),
    "it listens": lambda learner: learner.listens,
    "it is expected": lambda learner: learner.delivery is not None,
    "Entered was sent": lambda learner: learner.entered,
}
"""Conditions of rows."""


class Row(NamedTuple):
    """Rows of the table: in each of ``stages`` the event leads to the ``next`` one; with None the stage stays.

    A learner that the row ``evicts`` keeps its stage until it is gone, which is at once.
    """

    stages: tuple[Stage, ...]
    event: Event
    next: Stage | None
    what: str
    when: str = ""
    act: Callable[[Learner], None] = lambda _: None
    evicts: bool = False


_GETS: Final = (RECEIVING,)
_FREE: Final = Learner.end_transfer  # it is evicted, and not because the others have waited for it in vain
ROWS: Final = (
    Row((ADMITTED,), Event.KNOWN, WELCOME, "Welcome."),
    Row(LIVING[1:], Event.KNOWN, None, "Nothing: it was welcome when they knew the earlier one with its id."),
    Row((WELCOME,), Event.PROPOSE, None, "Agreed; or PlanMismatchError, and it proposes again.", "no proposal is open"),
    Row((WELCOME,), Event.ENTER, WAITING, "It waits for a donor.", "its plan is the group's"),
    Row(LIVING[2:], Event.ENTER, None, "Its patience begins anew."),
    Row(LIVING, Event.SERVE, None, "It can be a donor when it is a member.", act=Learner.serve),
    Row((WAITING,), Event.DONATED, RECEIVING, "RoundDone tells all which member sends it the state."),
    Row(_GETS, Event.READY, READY, "It has caught up with the others.", "it listens", Learner.end_transfer),
    Row(_GETS, Event.READY, ENTERED, "Entered: it contributes to the open round.", act=Learner.end_transfer),
    Row((*LIVING[:3], READY, ENTERED), Event.READY, None, "Nothing."),
    Row(_GETS, Event.BEHIND, WAITING, "It gets the state anew, and the others wait for that.", act=Learner.fall_behind),
    Row(LIVING[:3], Event.BEHIND, None, "Nothing: another data shard has reported it before."),
    Row(_GETS, Event.FAILED, WAITING, "The round goes on without it. It gets the next donor.", act=Learner.excuse),
    Row((WAITING, READY, ENTERED), Event.FAILED, None, "Nothing: that transfer is over."),
    Row(_GETS, Event.DONOR_LOST, None, "It may have the state: Ready or Enter.", "it listens", Learner.end_transfer),
    Row(_GETS, Event.DONOR_LOST, WAITING, "The round goes on without it. It gets the next donor.", act=Learner.excuse),
    Row((READY,), Event.BOUNDARY, ENTERED, "Shards expect it in the next round: Entered, when that begins."),
    Row((ENTERED,), Event.COUNTED, MEMBER, "A new epoch.", "Entered was sent"),
    Row(LIVING[1:], Event.OUTDATED, None, "PlanMismatchError.", act=_FREE, evicts=True),
    Row((WAITING,), Event.HOPELESS, None, "UsageError.", act=_FREE, evicts=True),
    Row(LIVING[:3], Event.VOID, None, "Nothing."),
    Row((ENTERED,), Event.VOID, None, "Nothing: it takes part in the recovery.", "Entered was sent"),
    Row(LIVING[3:], Event.VOID, None, "LeftOutError.", act=_FREE, evicts=True),
    Row((ENTERED,), Event.CUT_OFF, None, "Nothing: it takes part in the recovery.", "Entered was sent"),
    Row(LIVING, Event.CUT_OFF, None, "LeftOutError.", act=_FREE, evicts=True),
    Row(_GETS, Event.OVERDUE, None, "DeadlineError: its state comes late.", "it is expected", evicts=True),
    Row(LIVING[1:], Event.OVERDUE, None, "DeadlineError: no plan is agreed on, or no round is over.", evicts=True),
    Row(LIVING, Event.GONE, GONE, "The round goes on without it. Its donor hears of that."),
)
_UNEXPECTED: Final = "UnexpectedMessageError, as it {}."
NEVER: Final = {
    (stage, event): what
    for event, legal, what in (
        (Event.PROPOSE, (WELCOME,), _UNEXPECTED.format("is not welcome yet, or has all its plans")),
        (Event.ENTER, LIVING[1:], _UNEXPECTED.format("is not welcome yet")),
        (Event.STATE_FAILED, (), _UNEXPECTED.format("is not a donor before it is a member")),
        (Event.BEHIND, LIVING[:4], "LeftOutError: it needs each result that it was sent."),
        (Event.DONATED, (WAITING,), "It does not wait for a donor."),
        (Event.HOPELESS, (WAITING,), "It does not wait for a donor."),
        (Event.FAILED, LIVING[2:], "It has had no transfer yet."),
        (Event.DONOR_LOST, (RECEIVING,), "It has no donor."),
        (Event.BOUNDARY, (READY,), "It has not caught up, or contributes already."),
        (Event.COUNTED, (ENTERED,), "It has contributed to no round."),
        (Event.OUTDATED, LIVING[1:], "It has agreed to no plan."),
        (Event.OVERDUE, LIVING[1:], "It waits for shards alone."),
    )
    for stage in LIVING
    if stage not in legal
}
"""Pairs of the stage of a learner and an event that cannot be, and what is said instead."""


def row_of(learner: Learner, event: Event) -> Row | None:
    """Return the row that says what an event of a learner comes to; None if it cannot be."""
    rows = (row for row in ROWS if row.event is event and learner.stage in row.stages)
    return next((row for row in rows if CONDITIONS[row.when](learner)), None)


def happens(learner: Learner, event: Event) -> Row:
    """Go to the stage to which an event leads. Return the row that says so."""
    row = row_of(learner, event)
    assert row is not None, f"{event} of a learner that is {learner.stage}"
    if row.next is not None:
        learner.go_on_as(row.next)
    row.act(learner)
    return row
