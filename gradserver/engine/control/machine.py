"""The tables of a group's life: transitions, rules and timers. `half` runs them.

A group is a state machine. `TRANSITIONS` says what becomes of each event in each state, and `ILLEGAL` has the pairs
that cannot be. `RULES` say what follows whenever a condition holds. They are tried in their order after each event,
until none applies. `TIMERS` say when a group has waited long enough. Each entry names the function that does it, in the
module that knows. `forming` knows applicants, `learners` workers that join a running group, `members` departures.
`rounds` knows the end of a round, `sessions` members that come back, `shard_replacement` lost data shards.

`docs/reference/group-states.md` has these tables for people; ``python -m tests.group_tables`` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from gradserver.engine.control import (
    admissions,
    donations,
    forming,
    learners,
    members,
    plans,
    reactions as do,
    requests,
    rounds,
    sessions,
    shard_replacement,
    subgroups,
    waiting,
)
from gradserver.engine.control.group import Group, State
from gradserver.engine.control.reactions import Broke, Event, Lost, ShardEnlisted, ShardLost
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.reports import (
    Absent,
    Applied,
    Behind,
    CaughtUp,
    Halted,
    Late,
    Planned,
    Recovered,
    RoundCompleted,
    StateComes,
)
from gradserver.protocol.messages import (
    Enter,
    Follow,
    Join,
    Opens,
    Paced,
    Propose,
    Ready,
    RequestRound,
    Serve,
    StateFailed,
    Steps,
)
from gradserver.protocol.messages.leases import Claim, Register, Used
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.messages.waiting import Blocked

STATES: Final = {
    State.FORMING: "Workers have joined, and more are waited for.",
    State.ACTIVE: "Its members train.",
    State.PAUSED: "A round is complete, and fewer than MIN workers take part in the next one: it waits for others.",
    State.RECOVERING: "Its members and shards find out which of them hold which results.",
    State.SUSPENDED: "All its members are away. It is durable: they may come back.",
    State.BROKEN: "It goes no further, and members that exchange anything are told why.",
    State.ENDED: "It is forgotten. Its name is free.",
}
"""Meaning of each state."""
FORMING, ACTIVE, PAUSED = State.FORMING, State.ACTIVE, State.PAUSED
RECOVERING, SUSPENDED, BROKEN, ENDED = State.RECOVERING, State.SUSPENDED, State.BROKEN, State.ENDED
_TRAINING: Final = (ACTIVE, PAUSED)
_THERE: Final = (ACTIVE, PAUSED, RECOVERING)
_BEGUN: Final = (ACTIVE, PAUSED, RECOVERING, SUSPENDED, BROKEN)


class Transition(NamedTuple):
    """Rows of the table: in each of ``states``, each of ``events`` leads to one of ``next``, or the state stays.

    The docstring of ``react`` says what happens. ``why`` says why nothing does.
    """

    states: tuple[State, ...]
    events: tuple[type, ...]
    react: Callable[[Event], None]
    next: tuple[State, ...] = ()
    why: str = ""


ROWS: Final = (
    Transition((FORMING,), (Join,), do.come, (ACTIVE,)),
    Transition(_BEGUN, (Join,), do.come),
    Transition((FORMING,), (Lost,), do.leave_before, (ENDED,)),
    Transition(_THERE, (Lost,), do.leave, (ACTIVE, PAUSED, SUSPENDED, BROKEN, ENDED)),
    Transition((SUSPENDED,), (Lost,), do.leave, (BROKEN, ENDED)),
    Transition((BROKEN,), (Lost,), do.leave, (ENDED,)),
    Transition((*_THERE, SUSPENDED), (Broke,), do.detach, (ACTIVE, SUSPENDED)),
    Transition((*_THERE, SUSPENDED), (Resume,), do.resume, (RECOVERING,)),
    Transition(_BEGUN, (Propose,), do.propose),
    Transition(_BEGUN, (Register, Claim, Used), do.ask_of_data),
    Transition(_BEGUN, (Serve, Enter, Ready, StateFailed), do.say_of_states, (ACTIVE,)),
    Transition(_BEGUN, (Opens, Steps, Follow), do.say_of_modules, (BROKEN,)),
    Transition(_BEGUN, (RequestRound,), do.request_round),
    Transition(_BEGUN, (Paced,), do.note_pace),
    Transition(_BEGUN, (Blocked,), do.wait, (BROKEN,)),
    Transition(_BEGUN, (RoundCompleted,), do.complete, (ACTIVE, PAUSED, BROKEN)),
    Transition(_BEGUN, (Applied,), do.apply, (ACTIVE, PAUSED)),
    Transition(_BEGUN, (Planned,), do.confirm),
    Transition(_BEGUN, (Late,), do.be_late),
    Transition(_BEGUN, (Behind,), do.fall_behind),
    Transition(_BEGUN, (Absent,), do.be_absent, (ACTIVE, SUSPENDED)),
    Transition(_BEGUN, (Halted,), do.halt, (BROKEN,)),
    Transition(_BEGUN, (StateComes,), do.state_comes),
    Transition((RECOVERING, SUSPENDED), (CaughtUp,), do.catch_up),
    Transition((RECOVERING, SUSPENDED), (Recovered,), do.recover, (ACTIVE, PAUSED)),
    Transition((*_TRAINING, BROKEN), (CaughtUp, Recovered), do.nothing, why="It is of a recovery that is over."),
    Transition((*_THERE, SUSPENDED), (ShardLost,), do.lose_shard, (RECOVERING, BROKEN)),
    Transition((BROKEN,), (ShardLost,), do.lose_shard),
    Transition((FORMING,), (ShardLost,), do.nothing, why="The group has no shards yet."),
    Transition((RECOVERING, SUSPENDED), (ShardEnlisted,), do.replace_shard),
    Transition((FORMING, *_TRAINING, BROKEN), (ShardEnlisted,), do.nothing, why="The group lacks no shard."),
)
TRANSITIONS: Final = {(state, event): row for row in ROWS for state in row.states for event in row.events}
"""Row of each state and type of event."""
ILLEGAL: Final[dict[tuple[State, type], str]] = {
    **{
        (FORMING, event): "No worker is a member yet: UnexpectedMessageError, or the report is of a group before."
        for state, event in TRANSITIONS
        if state is ACTIVE and (FORMING, event) not in TRANSITIONS
    },
    (FORMING, Broke): "An applicant has no place to come back to: Lost.",
    (FORMING, Resume): "The group is not durable yet: JoinRefusedError.",
    (BROKEN, Resume): "The error that broke the group.",
    (BROKEN, Broke): "No worker comes back to a broken group: Lost.",
}
"""Pairs that cannot be, and the errors that are raised instead, by `Registry.member` and `sessions.check`.

A group that has ended is in no table: its name is free.
"""


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────────


class Rule(NamedTuple):
    """A condition, and what is done whenever it holds, until the group has ended.

    An action makes its condition false, so the rules come to an end.
    """

    holds: Callable[[Registry, Group], bool]
    act: Callable[[Registry, Group, Effects], None]
    when: str
    what: str


def _contradicts(_: Registry, group: Group) -> bool:
    return group.turns.conflict is not None and group.broken is None


def _break(_: Registry, group: Group, effects: Effects) -> None:
    assert group.turns.conflict is not None
    members.halt(group, group.turns.conflict, effects)


def _can_promote(_: Registry, group: Group) -> bool:
    held = group.rounds.held
    return held is not None and bool(learners.contributors(group, held.round))


def _promote(registry: Registry, group: Group, effects: Effects) -> None:
    assert group.rounds.held is not None
    learners.promote(group, group.rounds.held.round, registry.next_epoch, effects)


def _can_expect(registry: Registry, group: Group) -> bool:
    return bool(group.learners) and rounds.is_at_boundary(group) and rounds.can_expect(group, registry.now)


def _can_end_round(_: Registry, group: Group) -> bool:
    return rounds.is_at_boundary(group) and rounds.has_enough(group)


def _must_pause(_: Registry, group: Group) -> bool:
    return rounds.is_at_boundary(group) and group.rounds.paused is None and not rounds.has_enough(group)


RULES: Final = (
    Rule(
        lambda registry, group: (
            group.origin is not None and group.state is FORMING and bool(subgroups.gone(registry, group))
        ),
        subgroups.go_on_without,
        "A member that a forming sub-group waits for has departed from the parent.",
        "It is not waited for. If the parent needs all its members, the applicants are told which one is gone.",
    ),
    Rule(
        lambda registry, group: group.state is FORMING and forming.is_complete(group, registry.now),
        forming.activate,
        "All applicants that a forming group waits for are there, or the gathering is over.",
        "Member ids, a new epoch, OpenGroup to all shards, Welcome to every member.",
    ),
    Rule(_contradicts, _break, "Two members say different things of one round.", "The group is broken."),
    Rule(
        lambda _, group: bool(group.rounds.unsettled) and rounds.is_settled(group),
        lambda _, group, effects: rounds.settle(group, effects),
        "A round is complete at all shards, and each member that counted has said what it used.",
        "Used data is committed, and the round is written down. It is over if its last results said so.",
    ),
    Rule(
        lambda _, group: bool(group.learners.queue) and admissions.can_admit(group),
        lambda registry, group, effects: admissions.admit_queued(group, registry.roster.token, effects),
        "There is a place for an applicant that waits for one.",
        "It is a learner: Configure to all shards.",
    ),
    Rule(
        lambda _, group: group.configuration.can_tell,
        lambda registry, group, effects: rounds.tell_applied(group, registry.incarnation, effects),
        "All shards go by the next change of the membership.",
        "Membership to every member, or Welcome to the learner.",
    ),
    Rule(
        _can_promote,
        _promote,
        "A round is complete to which learners have contributed.",
        "They are members in a new epoch: Configure to all shards.",
    ),
    Rule(
        _can_expect,
        lambda registry, group, effects: rounds.expect(group, registry.now, effects),
        "At a boundary: learners have caught up, or wait for the state and a donor is free.",
        "They contribute to the next round, or get the state in it: Configure to all shards.",
    ),
    Rule(
        _can_end_round,
        lambda registry, group, effects: rounds.end_round(group, registry.now, effects),
        "At a boundary: enough workers take part in the next round.",
        "RoundDone to every member, with the epoch in force.",
    ),
    Rule(
        _must_pause,
        lambda _, group, effects: rounds.pause(group, effects),
        "At a boundary: fewer than MIN take part in the next round.",
        "The group pauses: RoundDone is held back.",
    ),
    Rule(
        lambda _, group: group.policy.mode.grants and requests.is_news(group),
        lambda registry, group, _: requests.note(registry, group),
        "The next round waits for requests, or has as many as it needs; or this is not so any more.",
        "Members that have made none have their grace, and the round timeout.",
    ),
    Rule(
        lambda _, group: group.policy.mode.grants and requests.can_begin(group),
        lambda _, group, effects: requests.begin(group, effects),
        "No round is open, and the next one has as many requests as it needs, and waits for no other member.",
        "CutRound of all others to all shards, and Granted to members with a request.",
    ),
    Rule(
        lambda _, group: requests.must_fail(group),
        lambda _, group, effects: requests.fail(group, effects),
        "The group is broken, and members have requested a round.",
        "They are told why.",
    ),
    Rule(
        lambda _, group: bool(group.plans.proposals) and plans.are_complete(group),
        lambda _, group, effects: plans.agree(group, effects),
        "All members have proposed a plan.",
        "SetPlan to all shards if all are alike; otherwise the minority is told what differs.",
    ),
    Rule(
        lambda _, group: bool(group.learners) and bool(learners.outdated(group, group.plans.plan)),
        lambda _, group, effects: learners.evict_outdated(group, group.plans.plan, effects),
        "A learner has agreed to a plan that is not the group's any more.",
        "It has to join again.",
    ),
    Rule(
        lambda _, group: bool(group.learners) and bool(donations.hopeless(group)),
        lambda _, group, effects: learners.evict_hopeless(group, effects),
        "A learner waits for the state, and no member can send it, now or soon.",
        "It is told so.",
    ),
)


# ── timers ────────────────────────────────────────────────────────────────────────────────────────────


class Timer(NamedTuple):
    """A deadline of a group, and what is done when it has passed."""

    deadline: Callable[[Group], float | None]
    fire: Callable[[Registry, Group, Effects], None]
    until: str
    what: str


TIMERS: Final = (
    Timer(
        lambda group: group.applicants.opens,
        lambda _registry, _group, _effects: None,
        "The gathering of a forming group that has MIN applicants is over.",
        "The rule for a forming group applies.",
    ),
    Timer(
        forming.deadline,
        lambda registry, group, effects: forming.overdue(group, registry.now, effects),
        "An applicant's patience ends.",
        "It is told which workers are missing.",
    ),
    Timer(
        waiting.deadline,
        lambda registry, group, effects: waiting.tell(registry, group, effects),
        "Applicants of a group that forms have waited for five seconds, or for another thirty.",
        "They are told which workers came, and which are missing.",
    ),
    Timer(
        shard_replacement.deadline,
        lambda _, group, effects: members.halt(group, shard_replacement.overdue(group), effects, frozen=True),
        "No process has taken a lost data shard's place, for the group's timeout.",
        "The group is broken.",
    ),
    Timer(
        shard_replacement.hire_deadline,
        lambda registry, group, effects: group.shards.hire(registry.now, effects),
        "No process has taken a lost data shard's place, for another second.",
        "The coordinator starts a data shard, if it can.",
    ),
    Timer(
        lambda group: group.pause_ends,
        members.disband,
        "A paused group has waited for another worker for as long as its policy says.",
        "DeadlineError to every member, and the group ends.",
    ),
    Timer(
        lambda group: group.expires,
        members.expire,
        "A group of `gradserver doctor` has lasted for as long as it may.",
        "DeadlineError to every worker, and the group ends.",
    ),
    Timer(
        admissions.queue_deadline,
        lambda registry, group, effects: admissions.queue_overdue(group, registry.now, effects),
        "The patience of an applicant that waits for a place ends.",
        "It is told that there was none.",
    ),
    Timer(
        learners.deadline,
        lambda registry, group, effects: learners.overdue(group, registry.now, effects),
        "A learner's patience ends, or that of the others with it.",
        "It is evicted.",
    ),
    Timer(
        sessions.deadline,
        sessions.overdue,
        "A member that is away should be back.",
        "It is lost, unless its process is known to run: then it has the round timeout.",
    ),
    Timer(
        lambda group: group.requests.grace_ends,
        lambda registry, group, _effects: group.requests.end_graces(registry.now),
        "The grace of members that have requested no round is over.",
        "The rule for requests applies.",
    ),
    Timer(
        requests.deadline,
        requests.overdue,
        "Requests have waited for other members for as long as the round timeout.",
        "These are evicted; a group that needs them is broken.",
    ),
    Timer(
        plans.deadline,
        lambda _, group, effects: plans.overdue(group, effects),
        "The patience of a member that has proposed a plan ends.",
        "Members that have proposed one are told which others did not.",
    ),
)


def deadlines(group: Group) -> Iterator[tuple[float, Timer]]:
    """Give each deadline of a group, with its timer."""
    for timer in TIMERS:
        at = timer.deadline(group)
        if at is not None:
            yield at, timer
