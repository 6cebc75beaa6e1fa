"""Turns of several modules that share a group: each round is one module's, the same at all members.

    event                                          what happens
    ─────────────────────────────────────────────  ──────────────────────────────────────────────────────────────
    Opens, the first of a round                    members that follow are told which section it is: Opened
    Opens of the same section                      nothing
    Opens of another section                       the group halts: OutOfStepError at all, which names both
    … with a later attempt                         the round is of that section: a commit was or becomes void
    … with an earlier attempt                      nothing: its member has yet to hear that
    Steps, the first with that index               members that follow are told which models are updated, or that the
                                                   others are at the top of their loop: Opened
    Steps of the same models                       nothing
    Steps of others                                the group halts
    Follow, and an update is next                  Opened
    … the round is open                            Opened
    … neither                                      it waits for the next Steps or Opens
    … and all others follow too                    Opened at all: the first section, for which no member has data
    a member departs                               if all that are left follow, the same
    the group is broken                            Opened at all that follow: what they push tells them why

A worker that has run out of batches follows: it takes part without data in each exchange of the others, and updates
what they update. So does a worker that has just joined, until they come to the top of their loop. A group with one
section has no use for all this, and says nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from gradserver.engine.control.group import Group
from gradserver.engine.control.group.turns import Turn
from gradserver.engine.effects import Effects
from gradserver.engine.records import RoundRecord
from gradserver.protocol.errors import OutOfStepError, UnexpectedMessageError
from gradserver.protocol.exchange import Kind
from gradserver.protocol.messages import Follow, Opened, Opens, Steps

_COMMIT: Final = Kind.COMMIT
_MOST_STEPS: Final = 64
"""Updates between two rounds."""


def hear(group: Group, member_id: int, message: Opens | Steps | Follow, now: float, effects: Effects) -> None:
    """Take what a member says of a round. If another member has said otherwise, `Turns.conflict` has the error."""
    number = message.round
    group.check_round(number, type(message).__name__)
    if group.plans.plan is None:
        raise UnexpectedMessageError(f"{group.call(member_id)} speaks of round {number}, and the group has no plan")
    if number < group.rounds.number:
        return  # it is late, and gets what the others have made of it
    turn = group.turns.at(number)
    match message:
        case Follow():
            group.turns.follow(member_id, message)
        case Opens():
            _opens(group, turn, member_id, message, now)
        case Steps():
            _steps(group, turn, member_id, message)
    _answer(group, number, effects)


def _opens(group: Group, turn: Turn, member_id: int, message: Opens, now: float) -> None:
    plan = group.plans.plan
    if plan is None or plan.section(message.section) is None:
        raise UnexpectedMessageError(f"section {message.section} from {group.call(member_id)} is in no plan")
    opens, opener = turn.open(message, member_id, now)
    if opens.section == message.section or opens.attempt > message.attempt:
        return
    names = {one.number: place for place, one in enumerate(plan.each, 1)}
    one, other = sorted([(member_id, message.section), (opener, opens.section)])
    group.turns.contradict(
        OutOfStepError(
            f"round {message.round} exchanges module {names[one[1]]} at {group.call(one[0])} and module "
            f"{names[other[1]]} at {group.call(other[0])}: all workers must train their modules in the same order"
        )
    )


def _steps(group: Group, turn: Turn, member_id: int, message: Steps) -> None:
    index = message.index
    if index > len(turn.steps) or index >= _MOST_STEPS:
        raise UnexpectedMessageError(f"update {index} before round {message.round} from {group.call(member_id)}")
    known, first = turn.step(message, member_id)
    if known == message:
        return
    group.turns.contradict(
        OutOfStepError(
            f"before round {message.round} the jobs of {group.call(first)} and {group.call(member_id)} update other "
            f"models: all workers must update their models in the same order"
        )
    )


def timed(group: Group, record: RoundRecord) -> RoundRecord:
    """Return the record of a round with the times at which members began it, if it ended with a commit.

    All give the commit when the reductions among them are over. So it does not tell which of them was late.
    """
    turn, plan = group.turns.rounds.get(record.round), group.plans.plan
    parts = () if plan is None else plan.parts_of(record.section)
    if turn is None or plan is None or not turn.begun or any(plan.buckets[part].kind is not _COMMIT for part in parts):
        return record
    begun = turn.begun
    arrivals = ((begun[one], begun[one]) if one in begun else was for one, was in enumerate(record.arrivals))
    return replace(record, opened=min(record.opened, *begun.values()), arrivals=tuple(arrivals))


def over(group: Group) -> None:
    """Rounds are over."""
    group.turns.forget_before(group.rounds.number)


def departed(group: Group, member_id: int, effects: Effects) -> None:
    """``member_id`` is vacant, or has a new connection on which it asks again."""
    group.turns.unfollow(member_id)
    broken(group, effects)


def broken(group: Group, effects: Effects) -> None:
    """Answer members that follow and need not wait any more."""
    for number in {asked.round for asked in group.turns.following.values()}:
        _answer(group, number, effects)


def _answer(group: Group, number: int, effects: Effects) -> None:
    """Tell members that follow in round ``number`` what is next, if that is known."""
    turns = group.turns
    asked = {member_id: follow.index for member_id, follow in turns.following.items() if follow.round == number}
    turn = turns.rounds.get(number, Turn())
    assert group.plans.plan is not None
    nobody_has_data = turn.opens is None and _all_of(group.contributors, asked)
    for member_id, index in asked.items():
        if index < len(turn.steps):
            done = turn.steps[index][0]
            news = Opened(number, 0, not done.updated, done.updated, done.dropped, index=index)
        elif turn.opens is not None:
            news = Opened(number, turn.opens.section, index=index)
        elif group.broken is not None or (nobody_has_data and all(one == len(turn.steps) for one in asked.values())):
            news = Opened(number, group.plans.plan.each[0].number, ended=True, index=index)
        else:
            continue
        turns.unfollow(member_id)
        effects.send(group.connection_of(member_id), news)


def _all_of(there: Collection[int], member_ids: Collection[int]) -> bool:
    return bool(member_ids) and set(there) <= set(member_ids)
